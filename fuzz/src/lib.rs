//! Fuzz targets, a module each; the programs in `fuzz_targets/` are one line, and `tests/corpus.rs` runs the
//! committed inputs through the same functions without a fuzzer.
//!
//! Each input is decoded by `arbitrary` into a sequence of steps, so that the fuzzer changes what a guest or a VMM
//! would say and not bytes that no parser reads. A target panics when an invariant of the daemon's is broken; it is
//! named at the head of each module.

pub mod config_space;
pub mod net_header;
mod ring;
pub mod session;
pub mod split_ring;

/// Decodes an input; `None` if it is too short to mean anything.
fn decode<'a, T: arbitrary::Arbitrary<'a>>(data: &'a [u8]) -> Option<T> {
    T::arbitrary_take_rest(arbitrary::Unstructured::new(data)).ok()
}
