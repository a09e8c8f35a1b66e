//! Fuzz targets, a module each; the programs in `fuzz_targets/` are one line, and `corpus.rs` runs the
//! committed inputs and variations of them through the same functions without a fuzzer.
//!
//! Each input is decoded by `arbitrary` into a sequence of steps, so that the fuzzer changes what a guest or a VMM
//! would say and not bytes that no parser reads. A target panics when an invariant of the daemon's is broken; it is
//! named at the head of each module.

pub mod addresses;
pub mod coalesce;
pub mod config_space;
pub mod control;
#[cfg(test)]
mod corpus;
pub mod filter;
pub mod headers;
pub mod message;
pub mod net_header;
pub mod packed_ring;
mod ring;
pub mod segment;
pub mod session;
pub mod split_ring;

/// Decodes an input; `None` if it is too short to mean anything. With FUZZ_SHOW set, prints what it means.
fn decode<'a, T: arbitrary::Arbitrary<'a> + std::fmt::Debug>(data: &'a [u8]) -> Option<T> {
    let input = T::arbitrary_take_rest(arbitrary::Unstructured::new(data)).ok()?;
    if SHOW.get_or_init(|| std::env::var_os("FUZZ_SHOW").is_some()) == &true {
        eprintln!("{input:#?}");
    }
    Some(input)
}

static SHOW: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
