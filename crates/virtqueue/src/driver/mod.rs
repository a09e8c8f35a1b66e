//! The driver's side: guest memory, and the driver of a virtqueue in it.
//!
//! Theory of operation: [`GuestRam`] creates shared files, as a VMM does, and maps them for the driver. Its
//! [`regions`](GuestRam::regions) go to a [`MemoryMap`](crate::MemoryMap) in the same process, or over
//! vhost-user to another one. [`SplitDriver`] creates a ring in it and follows the specification.
//!
//! With the feature `test-driver` there are also `PackedDriver`, and `QueueDriver`, which is either of them. All
//! of them can then break the rules: the `set_*` and `write_*` functions write any value anywhere in the ring.
//!
//! Misuse panics, and so does a *device* that breaks the rules. So do not use it as the driver of an
//! untrusted device.

mod ram;
mod ring;
mod split;

#[cfg(feature = "test-driver")]
#[path = "tests/packed.rs"]
mod packed;
#[cfg(feature = "test-driver")]
#[path = "tests/queue.rs"]
mod queue;

#[cfg(feature = "test-driver")]
pub use packed::PackedDriver;
#[cfg(feature = "test-driver")]
pub use queue::QueueDriver;
pub use ram::{GuestRam, RamError};
pub use ring::{DriverFeatures, DriverRing};
pub use split::{Buffer, SplitDriver, Used};
