//! Device side of virtio virtqueues, split and packed (VirtIO 1.3, sections 2.7 and 2.8), over a flat map of guest
//! memory.
//!
//! For those who write a device: a vhost-user backend, or the device model of a VMM. The crate does no I/O
//! and knows nothing of sockets, networks or vhost-user; it needs only the file descriptors of the guest's
//! memory.
//!
//! # Layers
//! From the bottom, each needing only those before it:
//!
//! 1. [`GuestAddr`], [`QueueSize`] and [`layout`]: units, and what the rings look like in memory.
//! 2. [`Region`] and [`MemoryMap`]: all guest memory in one mapping, region after region without a hole, so
//!    that an address becomes an offset by one subtraction; and byte movers that check an offset once.
//! 3. [`GuestFault`]: everything that a driver can do wrong, each with a static name.
//! 4. [`Chains`]: a batch of descriptor chains, copied and checked: a reusable buffer, no allocation.
//! 5. [`Queue`], split or packed: the ring: take a batch, use it, publish a batch,
//!    suppress notifications. [`DirtyLog`]: what was written, for a migration. [`Journal`] and
//!    [`InflightRegion`]: what is under way, for a successor.
//! 6. `driver` (feature `driver`): the other side, for programs that have both: makes memory and rings. With the feature
//!    `test-driver` also packed ones, and lies on request.
//!
//! # A device, whole
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
//! // The device: maps the memory, takes what is there, gives it back.
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
//! A [`Queue`] is made for the ring that was negotiated, and from then on both look alike. A chain is named by a
//! [`ChainId`] on its way back. Chains are given back in the order in which they were taken, which is what
//! VIRTIO_F_IN_ORDER asks for, and which makes the place of the next used element the exact place to go on from. Where
//! an inflight region notes each chain, they may come back in any order ([`Queue::takes_any_order`]).
//!
//! # A device that dies
//! Its successor is made from the same ring ([`QueueStart`]). Nothing is lost: what was taken and not given back is
//! taken again. Whether it was *done*, the ring alone does not tell; with a [`Journal`], [`Queue::taken_before`] says
//! how many of the first chains the predecessor had taken, and the device may give them back undone. A chain is given
//! back by [`Queue::publish`]; in a packed ring without an inflight region by [`Queue::push_used`] already, because the
//! successor publishes what was not.
//!
//! # Trust
//! The guest writes to all of this memory at any time, and is taken to be hostile. What it writes is read once, into a
//! copy; the copy is checked, and only the copy is used. No value of the guest's can make this crate panic, overflow,
//! allocate, loop for longer than one ring, or touch a byte outside the map. (A device that takes over chains from an
//! inflight region allocates once for each.) What is *inside* the map is the guest's own affair: a driver that names a
//! buffer twice gets what it asked for.
//!
//! One thing is out of reach here: a VMM may truncate the file behind the memory (or the log, or the inflight region)
//! after it was mapped, or give one for which there is no memory, and the next access is then SIGBUS. So whatever maps
//! such a file asks for a [`ForeignFiles`], which hears of the mapping before its first byte is touched; a process that
//! means to live without says so ([`TrustedFiles`]). [`MappedRegion::sealed`] tells whether a file is sealed against
//! shrinking (`F_SEAL_SHRINK`; QEMU's `memory-backend-memfd` seals by default). The guest itself cannot do this, only
//! its VMM.

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
