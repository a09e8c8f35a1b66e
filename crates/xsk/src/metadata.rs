//! Metadata that an XDP program writes before a frame (hash, VLAN tag, receive timestamp etc.), in a
//! structure that contains its own id.
//!
//! # Theory of operation
//!
//! AF_XDP passes a frame to its receiver with the metadata that the program wrote directly before it
//! (`bpf_xdp_adjust_meta`), but without its length or type. So the last four bytes before the frame are the
//! structure's *id*, which identifies one [`Layout`]: the offset of each field in the structure. The
//! program's loader knows the layouts from its BTF (the `steer` crate reads them), and sends them to the
//! receiver, which keeps a few ([`Layouts`]):
//!
//! ```text
//!            ┌──────────────┬─────────┬─────┬────────┬────┬─────────┐
//!   chunk    │ room         │ rx_hash │  …  │ absent │ id │ frame … │
//!            └──────────────┴─────────┴─────┴────────┴────┴─────────┘
//!                           ◀──────── Layout::len_bytes ──▶▲ RxDesc::data
//! ```
//!
//! One program may replace another on the interface while frames are in flight. Each frame has the id of its
//! own layout, so none is misread, as long as the loader never uses an id twice. An id that the receiver does
//! not know is [`Found::Unknown`]: count it, and treat the frame as one without hints.
//!
//! If the program writes no metadata, older bytes of the chunk remain there. So call [`forget`] before a used
//! chunk goes into the fill ring, unless the program always writes metadata.
//!
//! Nothing here is trusted: ids, offsets and values may be arbitrary. Reads stay inside the UMEM and the structure.

mod layout;
mod read;
#[cfg(test)]
mod tests;

pub use layout::{Field, Layout, LayoutError, MAX_LEN_BYTES};
pub use read::{Found, Hash, Hints, Layouts, MAX_LAYOUTS, Tag, forget};
