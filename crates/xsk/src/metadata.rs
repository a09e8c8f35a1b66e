//! What an XDP program left before a frame: hash, VLAN tag, time of receipt and the like, in a structure that names
//! itself.
//!
//! # Theory of operation
//!
//! AF_XDP passes a frame to its receiver with the metadata that the program left directly before it
//! (`bpf_xdp_adjust_meta`), without its length or meaning. So the last four bytes before the frame are the structure's
//! *id*, a number that belongs to one [`Layout`]: the offset of each field in the structure. The program's loader knows
//! the layouts from its BTF (the `steer` crate reads them), and sends them to the receiver, which keeps a few
//! ([`Layouts`]):
//!
//! ```text
//!            ┌──────────────┬─────────┬─────┬────────┬────┬─────────┐
//!   chunk    │ room         │ rx_hash │  …  │ absent │ id │ frame … │
//!            └──────────────┴─────────┴─────┴────────┴────┴─────────┘
//!                           ◀──────── Layout::len_bytes ──▶▲ RxDesc::data
//! ```
//!
//! One program may follow another on the interface while frames are under way. Each frame names its own layout, so
//! none is misread, as long as ids are not used twice: that is the loader's duty. One that the receiver does not know
//! is [`Found::Unknown`]: to be counted, and the frame to be treated as one without hints.
//!
//! Earlier bytes of a chunk stay there when the program leaves nothing. So before a chunk that may have held a frame
//! goes into the fill ring, call [`forget`], unless the program always leaves something.
//!
//! Two ways of reading, with the same result:
//! - [`Layouts::read`] looks up each frame's id;
//! - [`Expected`] is decided once, at set-up: the fields of one layout are read without a look at which there are, a
//!   whole batch at once; frames of other layouts fall back to the first way.
//!
//! Nothing here is trusted: ids, offsets and values may be any. Reads stay inside the UMEM and the structure.

mod layout;
mod read;
#[cfg(test)]
mod tests;

pub use layout::{Field, Layout, LayoutError, MAX_LEN_BYTES};
pub use read::{Expected, Found, Hash, Hints, Layouts, MAX_LAYOUTS, Tag, forget};
