//! AF_XDP sockets: frames between a network queue and your memory, without the network stack.
//!
//! # Layers, from the bottom
//!
//! 1. **Memory**: [`UmemMemory`] is one contiguous mapping that you own (a memfd, guest RAM); [`OwnMemory`]
//!    is allocated by the crate (on huge pages if available). Bytes are only ever copied by pointer, since
//!    kernel and guest may write them at any time.
//! 2. **UMEM**: [`Umem`] cuts memory into chunks, aligned or unaligned, and hands each out as a [`Frame`].
//! 3. **Frames**: a [`Frame`] is the right to use one chunk. It cannot be copied: a push into a ring consumes
//!    it, and the kernel returns it through another ring. [`FramePool`] keeps the free ones.
//! 4. **Rings**: [`FillRing`] and [`TxRing`] are produced in batches (`reserve`, `push`, `submit`), [`RxRing`] and
//!    [`CompletionRing`] are consumed in batches (`peek`, iterate, drop). No allocation, one barrier per batch.
//! 5. **Socket**: [`Socket`] connects these with a queue, in the best available mode, and reports that mode
//!    and why no better one works ([`Socket::mode`], [`Socket::fallbacks`]).
//!
//! Several sockets, of other queues and other interfaces, may share one UMEM ([`Socket::share`]): a frame
//! that one has received can be sent by another without a copy, and the memory is registered once.
//!
//! On a machine with several NUMA nodes, memory and rings created while a [`PreferNode`] exists are on its node.
//!
//! Steering frames into the socket (an XDP program and its XSKMAP) is not done here: put [`Socket`]'s descriptor
//! into the map of your program. A socket that only sends needs no program.
//!
//! # Example
//!
//! ```no_run
//! use std::sync::Arc;
//! use xsk::{FramePool, Kick, OwnMemory, QueueId, Socket, SocketConfig, TxDesc, Umem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let umem = Umem::aligned(Arc::new(OwnMemory::new(4096 * 2048)?), 2048, 0)?;
//! let mut pool: FramePool = umem.all_frames()?.collect();
//! let mut socket = Socket::open(&umem, &SocketConfig::new(2, QueueId(0)))?;
//! println!("{}", socket.mode());
//! for fallback in socket.fallbacks() {
//!     println!("{fallback}");
//! }
//!
//! // Receive: keep the fill ring full, send each frame back where it came from.
//! loop {
//!     socket.fill.refill(&mut pool, 64);
//!     if socket.fill.needs_wakeup() {
//!         socket.wake_rx()?;
//!     }
//!     let received = socket.rx.peek(64);
//!     let mut sending = socket.tx.reserve(64);
//!     for desc in received {
//!         if sending.room() > 0 {
//!             let (frame, offset, len) = (desc.frame, desc.data, desc.len);
//!             sending.push(TxDesc { frame, offset, len, more: false, metadata: false });
//!         } else {
//!             pool.put(desc.frame);
//!         }
//!     }
//!     if sending.submit() > 0 {
//!         while socket.tx.needs_wakeup() && socket.kick_tx()? == Kick::Again {
//!             pool.extend(socket.completion.peek(64));
//!         }
//!     }
//!     pool.extend(socket.completion.peek(64));
//! }
//! # }
//! ```
//!
//! # Facts worth knowing
//!
//!  - Without CAP_IPC_LOCK the UMEM counts against RLIMIT_MEMLOCK, once for each socket that registers it, and not for
//!    those that share it.
//!  - Each bind costs the kernel memory in addition to the UMEM: about 32 MiB per GiB of UMEM with 4096-byte
//!    chunks, 70 MiB with 2048-byte chunks.
//!  - In copy mode sending happens inside [`Socket::kick_tx`].
//!  - An invalid tx descriptor is skipped, and on most kernels never completed: see [`TxDesc`].
//!  - A batch borrows its ring, not the socket: rings are fields, so that one may be read while another is written.
//!
//! Sources: `Documentation/networking/af_xdp.rst`, `include/uapi/linux/if_xdp.h` and `net/xdp/` of Linux 6.18.

#![cfg_attr(loom, allow(dead_code, reason = "the model has rings and no sockets"))]

#[cfg(not(loom))]
mod bind;
mod codec;
#[cfg(not(loom))]
mod config;
mod desc;
#[cfg(not(loom))]
mod error;
mod frame;
mod memory;
pub mod metadata;
#[cfg(not(loom))]
mod names;
mod netdevice;
#[cfg(not(loom))]
mod numa;
mod ring;
#[cfg(not(loom))]
mod setup;
#[cfg(not(loom))]
mod share;
#[cfg(not(loom))]
mod socket;
#[cfg(not(loom))]
mod statistics;
#[cfg(not(loom))]
mod sys;
mod umem;
mod units;

pub use desc::{CompletionRing, FillRing, RxDesc, RxRing, TxDesc, TxRing};
pub use frame::{Frame, FramePool};
pub use memory::{Backing, MemoryError, MemoryPart, OwnMemory, UmemMemory};
pub use netdevice::{Channels, Netdevice};
#[cfg(all(feature = "test-kernel", not(loom)))]
pub use socket::test_kernel::TestKernel;
pub use umem::{Frames, MIN_CHUNK_BYTES, Umem, UmemError, XDP_PACKET_HEADROOM};
pub use units::{InvalidRingSize, QueueId, RingSize, UmemOffset};
#[cfg(not(loom))]
pub use {
    config::{AttachMode, BindRequest, BusyPoll, Fallback, Mode, SocketConfig},
    error::OpenError,
    names::note_name,
    numa::{NumaNode, PreferNode},
    setup::{made_rx_ring, new_socket},
    share::{First, Lender},
    socket::{Kick, Socket, Unbound, WakeError},
    statistics::Statistics,
    sys::Mapping,
};
