//! A split ring whose driver lies: it offers good and bad chains, and writes anything anywhere in its memory between
//! the steps of the device.
//!
//! Invariants: no panic; a chain's buffers are inside one region each and add up to what the chain says; there are
//! never more chains out than the ring has entries, and as many are seen used as were used; a driver that tells no lie
//! is never accused, and gets each of its chains back once, in order, also if the device dies and another goes on.

pub use crate::ring::run_split as run;
