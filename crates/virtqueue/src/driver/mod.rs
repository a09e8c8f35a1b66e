//! The other side, for tests, examples and benchmarks: a guest's memory and the driver of a split virtqueue.
//!
//! Theory of operation: [`GuestRam`] makes shared files, as a VMM does, and maps them for the driver's own
//! use. Its [`regions`](GuestRam::regions) go to a [`MemoryMap`](crate::MemoryMap) in the same process, or
//! over vhost-user to another one. [`SplitDriver`] lays out a ring in it and plays the driver by the book,
//! until it is told to lie: the `set_*` and `write_descriptor` functions put any value anywhere in the ring.
//!
//! This is a model for tests: its misuse panics, and so does a *device* that breaks the rules, since that is
//! what tests are for. No use of it must be made in a driver whose device is not trusted.

mod ram;
mod split;

pub use ram::{GuestRam, RamError};
pub use split::{Buffer, DriverFeatures, SplitDriver, Used};
