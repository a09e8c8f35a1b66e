//! Tests that repeat something: a few times in `scripts/test`, and often in `scripts/soak`.

/// The environment variable: absent or 0 for the short form, else so many times the long one.
const TIMES: &str = "VHOST_AF_XDP_SOAK";

/// How often a test repeats what it repeats: `short`, or in a soak a multiple of `long`.
///
/// # Panics
/// If `VHOST_AF_XDP_SOAK` is not a number.
#[must_use]
pub fn count(short: usize, long: usize) -> usize {
    let said = std::env::var(TIMES);
    match said.map_or(0, |text| text.parse().expect("VHOST_AF_XDP_SOAK is a number")) {
        0 => short,
        times => times * long,
    }
}
