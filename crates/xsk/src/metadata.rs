//! What an XDP program left before a frame: hash, VLAN tag, time of receipt and the like, in a structure that names
//! itself.
//!
//! # Theory of operation
//!
//! AF_XDP gives a frame to its receiver with what the program left directly before it (`bpf_xdp_adjust_meta`), and says
//! neither how long that is nor what it means. So the last four bytes before the frame are the structure's *id*, a
//! number that belongs to one [`Layout`]: where in the structure which field stands. Who loads the program knows the
//! layouts from its BTF (the `steer` crate reads them), and tells the receiver, who keeps a few ([`Layouts`]):
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
//! What a chunk held before its frame came stays there when the program leaves nothing. So who gives a chunk to the
//! fill ring that may have held a frame calls [`forget`] first, or gives only to a program that always leaves
//! something.
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
