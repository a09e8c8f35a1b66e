//! The other side: memory as a guest has it, and the driver of a virtqueue in it.
//!
//! Theory of operation: [`GuestRam`] makes shared files, as a VMM does, and maps them for the driver's own
//! use. Its [`regions`](GuestRam::regions) go to a [`MemoryMap`](crate::MemoryMap) in the same process, or
//! over vhost-user to another one. [`SplitDriver`] lays out a ring in it and plays the driver by the book.
//!
//! With the feature `test-driver` there are also `PackedDriver`, and `QueueDriver`, which is either of them. All can
//! then lie: the `set_*` and `write_*` functions put any value anywhere in the ring.
//!
//! Misuse panics, and so does a *device* that breaks the rules. No use of it must be made in a driver whose device is
//! not trusted.

mod ram;
mod ring;
mod split;

#[cfg(feature = "test-driver")]
#[path = "for_tests/packed.rs"]
mod packed;
#[cfg(feature = "test-driver")]
#[path = "for_tests/queue.rs"]
mod queue;

#[cfg(feature = "test-driver")]
pub use packed::PackedDriver;
#[cfg(feature = "test-driver")]
pub use queue::QueueDriver;
pub use ram::{GuestRam, RamError};
pub use ring::{DriverFeatures, DriverRing};
pub use split::{Buffer, SplitDriver, Used};
