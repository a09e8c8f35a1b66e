//! What a hostile VMM or guest may try against the whole daemon, beside an honest guest on the same worker: that one loses no frame, the
//! daemon lives and tells its status, holds afterwards what it held before, and serves an honest guest where the hostile one was.
//!
//! The number of sessions is multiplied by `ATTACKS` in the environment: `ATTACKS=20 scripts/test hostile_vmm` is a long run.

mod descriptors;
mod eventfds;
mod floods;
mod large;
mod scribbled;
mod segments;
mod share;
mod sparse;
mod stalled;
mod truncated;

/// So many, or `ATTACKS` times as many.
fn count(usual: usize) -> usize {
    let factor = std::env::var("ATTACKS").map_or(1, |text| text.parse().expect("ATTACKS is a number"));
    usual * factor
}
