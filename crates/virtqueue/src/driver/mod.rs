//! The other side, for tests, examples and benchmarks: a guest's memory and the driver of a virtqueue.
//!
//! Theory of operation: [`GuestRam`] makes shared files, as a VMM does, and maps them for the driver's own
//! use. Its [`regions`](GuestRam::regions) go to a [`MemoryMap`](crate::MemoryMap) in the same process, or
//! over vhost-user to another one. [`SplitDriver`] and [`PackedDriver`] lay out a ring in it and play the driver by the
//! book, until they are told to lie: the `set_*` and `write_*` functions put any value anywhere in the ring.
//! [`QueueDriver`] is either of them.
//!
//! This is a model for tests: its misuse panics, and so does a *device* that breaks the rules, since that is
//! what tests are for. No use of it must be made in a driver whose device is not trusted.

mod packed;
mod queue;
mod ram;
mod ring;
mod split;

pub use packed::PackedDriver;
pub use queue::QueueDriver;
pub use ram::{GuestRam, RamError};
pub use ring::{DriverFeatures, DriverRing};
pub use split::{Buffer, SplitDriver, Used};
