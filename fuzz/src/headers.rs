//! Headers of a frame: any bytes.
//!
//! Invariant: what the readers of `packet` find is what a slow and obvious reader finds, step by step.

use packet::HEADERS_MAX;

#[path = "../../crates/packet/tests/reference/mod.rs"]
mod reference;

/// Runs one input: how many bytes of the frame are not known, and those that are.
pub fn run(data: &[u8]) {
    let [more, frame @ ..] = data else { return };
    let known = &frame[..frame.len().min(HEADERS_MAX)];
    // Only of a frame that is longer than what is looked at.
    let more = if known.len() == HEADERS_MAX {
        usize::from(*more) * 8
    } else {
        0
    };
    reference::compare(known, known.len() + more);
}
