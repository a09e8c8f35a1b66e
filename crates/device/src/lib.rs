//! The virtio-net device (VirtIO 1.3, 5.1), without front end and network.
//!
//! Features and their consequences ([`features`], [`offloads`]), the config space ([`config_space`]), vrings
//! ([`vring`]), the device's state made of these ([`net_device`]), and the queue pairs ([`pair`]), which
//! check each frame of the guest and accept frames for it ([`deliver`]). The protocol with a VMM and the
//! destinations of frames are outside: a front end calls [`net_device::NetDevice`], and the code that moves
//! frames takes its [`pair::QueuePair`]s. vhost-user is one front end, in the daemon.
//!
//! A VMM that embeds the device can let it serve the control queue ([`control`]): address filters, VLANs,
//! multiqueue, RSS and the hash report. So does a vhost-user front end that passes this queue on. [`hash`]
//! defines how a frame is hashed, and [`receive`] where a frame for the guest goes.
//!
//! Another front end is a program that is VMM, driver and network in one process:
//!
//! ```
//! use std::sync::Arc;
//!
//! use device::counters::PairCounters;
//! use device::features::F_VERSION_1;
//! use device::net_device::{NetDevice, Path};
//! use device::offloads::Offloads;
//! use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
//! use virtqueue::{Chains, GuestAddr, MemoryMap, QueueSize, RingFormat, RingShape, TrustedFiles};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The VMM: memory, shared by descriptor, and a device with one queue pair.
//! let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)])?);
//! let mut device = NetDevice::new(1, Offloads::NONE);
//! device.set_memory(Some(Arc::new(MemoryMap::new(ram.regions()?, 0, &TrustedFiles)?)));
//!
//! // The guest's driver: features, then a receive and a transmit vring.
//! device.acknowledge(F_VERSION_1)?;
//! let size = QueueSize::new(256)?;
//! let mut drivers = Vec::new();
//! for index in 0..2 {
//!     let driver = QueueDriver::new(&ram, RingShape::new(RingFormat::Split, size), DriverFeatures::default())?;
//!     device.set_size(index, size.get().into())?;
//!     device.set_addresses(index, driver.ring_user_addresses())?;
//!     device.start(index, None)?; // no kick eventfd: the ring is polled
//!     device.set_enabled(index, true)?;
//!     drivers.push(driver);
//! }
//! assert!(device.is_started(0));
//!
//! // It sends a frame, after a virtio-net header of 12 bytes that requests no offload.
//! let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[0x88, 0xb5], b"hello, network"].concat();
//! let buffer = ram.alloc(2048, 64)?;
//! ram.write(buffer, &[&[0; 12][..], &frame].concat());
//! drivers[1].add(&[Buffer::readable(buffer, 12 + frame.len() as u32)]);
//! drivers[1].publish();
//!
//! // The network: takes what the guest sent, checks it, copies it, returns the buffer.
//! let path = Path { frame_limit: 1518, partial_checksums: false, in_place: false };
//! let mut pair = device.queue_pair(0, path)?;
//! let (mut chains, counters, mut sink) = (Chains::default(), PairCounters::default(), Vec::new());
//! pair.from_guest.queue.pop(&mut chains, 64)?;
//! for chain in chains.iter() {
//!     let buffers = chains.buffers(chain);
//!     if let Some(sending) = pair.from_guest.check(chain, buffers, None, &counters)? {
//!         for piece in sending.start.pieces(buffers) {
//!             let at = sink.len();
//!             sink.resize(at + piece.len as usize, 0);
//!             pair.from_guest.guest.memory.copy_from_guest(piece.offset, &mut sink[at..]);
//!         }
//!     }
//!     pair.from_guest.queue.push_used(chain.id, 0);
//! }
//! pair.from_guest.publish(&counters);
//! assert_eq!(sink, frame);
//! assert!(drivers[1].take_used().is_some());
//!
//! // The VMM stops the vrings: the next queue pair continues from their positions.
//! device.keep_bases(0, pair.bases());
//! assert_eq!((device.stop(0)?, device.stop(1)?), (0, 1));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

// Tests that fuzz targets share name the crate as those do.
#[cfg(test)]
extern crate self as device;

pub mod call;
pub mod config_space;
pub mod control;
pub mod counters;
pub mod deliver;
mod driver_state;
pub mod features;
pub mod filter;
pub mod hash;
pub mod meter;
pub mod net_device;
pub mod offloads;
pub mod pair;
pub mod receive;
pub mod vring;
