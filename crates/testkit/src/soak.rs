//! Tests that repeat something: a few times in `scripts/test`, and often in `scripts/soak`.

use crate::daemon::{Mode, Placement};

/// The environment variable: absent or 0 for the short form, else so many times the long one.
const TIMES: &str = "VHOST_AF_XDP_SOAK";

/// How often a test repeats what it repeats: `short`, or in a soak a multiple of `long`.
///
/// # Panics
/// If `VHOST_AF_XDP_SOAK` is not a number.
pub fn count(short: usize, long: usize) -> usize {
    match times() {
        0 => short,
        times => times * long,
    }
}

/// Whether a case of a matrix is left to soaks: in the short form those that are not `chosen`. Each value of each
/// parameter is to be in a chosen case.
///
/// # Panics
/// As [`count`].
pub fn leaves_out(chosen: bool) -> bool {
    let is_left_out = !chosen && times() == 0;
    if is_left_out {
        println!("left to scripts/soak");
    }
    is_left_out
}

/// Ends a test whose case is left to soaks: every second case of a matrix, those for which the places of these values among
/// the values of their parameters add up to an odd number. Any two values of two parameters still meet if a third
/// parameter has both even and odd places.
#[macro_export]
macro_rules! skip_half {
    ($($value:expr),+) => {
        if $crate::soak::leaves_out([$($crate::soak::Place::place($value)),+].iter().sum::<usize>().is_multiple_of(2)) {
            return;
        }
    };
}

/// A value of a parameter.
pub trait Place {
    /// Its place among the values of the parameter.
    fn place(self) -> usize;
}

impl Place for usize {
    fn place(self) -> usize {
        self
    }
}

impl Place for bool {
    fn place(self) -> usize {
        self.into()
    }
}

/// Features: place 0 for none, 1 for any.
impl Place for u64 {
    fn place(self) -> usize {
        (self != 0).into()
    }
}

impl Place for Placement {
    fn place(self) -> usize {
        self as usize
    }
}

impl Place for Mode {
    fn place(self) -> usize {
        self as usize
    }
}

fn times() -> usize {
    let said = std::env::var(TIMES);
    said.map_or(0, |text| text.parse().expect("VHOST_AF_XDP_SOAK is a number"))
}
