//! Device side of virtio virtqueues, split and packed (VirtIO 1.3, sections 2.7 and 2.8), over a flat map of guest
//! memory.
//!
//! For vhost-user backends and for device models of VMMs. The crate does no I/O and uses neither sockets,
//! networks nor vhost-user; it needs only the file descriptors of the guest's memory.
//!
//! # Layers
//! From the bottom up; each uses only those before it:
//!
//! 1. [`GuestAddr`], [`QueueSize`] and [`layout`]: units, and the layout of the rings in memory.
//! 2. [`Region`] and [`MemoryMap`]: all guest memory in one mapping, region after region without a hole, so
//!    that an address becomes an offset by one subtraction; and functions that check an offset once and copy.
//! 3. [`GuestFault`]: every way in which a driver can break the rules, each with a static name.
//! 4. [`Chains`]: a batch of descriptor chains, copied and checked: a reusable buffer, no allocation.
//! 5. [`Queue`], a split or packed ring: take a batch, use it, publish a batch, suppress notifications.
//!    [`DirtyLog`]: the pages written, for a migration. [`Journal`] and [`InflightRegion`]: the chains in
//!    flight, for a successor.
//! 6. `driver` (feature `driver`): the driver's side, for programs that have both: creates memory and rings.
//!    The feature `test-driver` adds packed rings and drivers that break the rules.
//!
//! # A complete device
//! ```
//! # #[cfg(feature = "driver")] {
//! use std::sync::Arc;
//! use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, SplitDriver};
//! use virtqueue::{Chains, GuestAddr, MemoryMap, Queue, QueueFeatures, QueueSize, QueueStart};
//! use virtqueue::{RingFormat, RingLayout, RingShape, TrustedFiles};
//!
//! // The guest: memory, a ring in it, one buffer to be sent.
//! let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)])?);
//! let mut driver = SplitDriver::new(&ram, QueueSize::new(8)?, DriverFeatures::default())?;
//! let buffer = ram.alloc(5, 1)?;
//! ram.write(buffer, b"hello");
//! driver.add(&[Buffer::readable(buffer, 5)]).unwrap();
//! driver.publish();
//!
//! // The device: maps the memory, takes the chain, returns it.
//! let memory = Arc::new(MemoryMap::new(ram.regions()?, 0, &TrustedFiles)?);
//! let shape = RingShape::new(RingFormat::Split, driver.size());
//! let rings = RingLayout::from_user(&memory, shape, driver.ring_user_addresses())?;
//! let mut queue = Queue::new(&memory, rings, QueueFeatures::default(), QueueStart::default())?;
//! let mut chains = Chains::for_queue(driver.size(), 32);
//! queue.pop(&mut chains, 32)?;
//! for chain in chains.iter() {
//!     let mut bytes = [0; 5];
//!     assert!(memory.copy_from_guest(chains.readable(chain)[0].offset, &mut bytes));
//!     assert_eq!(&bytes, b"hello");
//!     queue.push_used(chain.id, 0);
//! }
//! let wants_call = queue.publish();
//! # assert!(wants_call);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Two kinds of ring
//! A [`Queue`] is created for the negotiated kind of ring, and from then on both kinds have the same interface. A
//! [`ChainId`] identifies a chain when it is returned. Chains are returned in the order in which they were taken:
//! VIRTIO_F_IN_ORDER demands that, and the position of the next used element is then exactly where a successor
//! continues. If an inflight region records each chain, they may be returned in any order ([`Queue::takes_any_order`]).
//!
//! # A device that dies
//! Its successor is created from the same ring ([`QueueStart`]). Nothing is lost: it takes again all chains
//! that were taken and not returned. Whether they were *done* is not in the ring alone. With a [`Journal`],
//! [`Queue::taken_before`] is the number of the first chains that the predecessor had taken, and the device
//! may return them without doing them. [`Queue::publish`] returns a chain; in a packed ring without an
//! inflight region [`Queue::push_used`] already does, because the successor publishes unpublished batches.
//!
//! # Trust
//! The guest may write to all of this memory at any time, and is assumed hostile. Its values are read once,
//! into a copy; the copy is checked, and only the copy is used. No value from the guest can make this crate
//! panic, overflow, allocate, loop for longer than one ring, or touch a byte outside the map. (A device that
//! takes over chains from an inflight region allocates once for each.) *Inside* the map nothing is protected
//! from the guest itself: a driver that passes a buffer twice gets what it asked for.
//!
//! One thing this crate cannot prevent: a VMM may truncate the file behind the memory (or the log, or the
//! inflight region) after it was mapped, or pass one for which there is no memory, and the next access is
//! then SIGBUS. So every function that maps such a file takes a [`ForeignFiles`], which is called before the
//! first byte is touched; a process that accepts the risk passes [`TrustedFiles`]. [`MappedRegion::sealed`]
//! returns whether a file is sealed against shrinking (`F_SEAL_SHRINK`; QEMU's `memory-backend-memfd` seals
//! by default). The guest itself cannot do this, only its VMM.

#![cfg_attr(
    loom,
    allow(dead_code, reason = "the models have notifications and no queues")
)]

pub mod layout;

mod addr;
mod bytes;
mod cell;
mod chain;
#[cfg(not(test))]
mod crash;
#[cfg(test)]
#[path = "tests/crash.rs"]
mod crash;
#[cfg(feature = "driver")]
pub mod driver;
mod fault;
mod indirect;
mod inflight;
mod inflight_packed;
mod inflight_split;
mod log;
mod mapping;
mod memory;
mod notify;
mod packed;
mod packed_notify;
mod packed_resume;
mod packed_ring;
#[cfg(all(test, not(loom)))]
mod pair_tests;
mod position;
mod queue;
mod region;
#[cfg(all(test, not(loom)))]
mod rig_tests;
mod rings;
mod split;
mod start;

pub use addr::{GuestAddr, MAX_QUEUE_SIZE, QueueSize, QueueSizeError};
pub use chain::{Buffer, Chain, ChainId, Chains};
pub use fault::{GuestFault, IndirectRule};
pub use indirect::{Prefetch, header_ends_line};
pub use inflight::{InflightError, InflightFile, InflightQueue, InflightRegion, InflightShape};
pub use log::{DirtyLog, LOG_PAGE_BYTES};
pub use mapping::{FileError, FileRange, ForeignFiles, Guard, TrustedFiles};
pub use memory::{HUGE_PAGE_BYTES, MappedFile, MemoryMap};
pub use queue::{Queue, ResetQueue};
pub use region::{MAX_REGIONS, MapError, MappedRegion, Region};
pub use rings::{RingAddresses, RingError, RingFormat, RingLayout, RingPart, RingShape};
pub use start::{Journal, QueueFeatures, QueueStart};
