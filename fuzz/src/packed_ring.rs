//! As `split_ring`, on a packed ring.

pub use crate::ring::run_packed as run;
