//! Payload of TCP connections into memory of yours, by io_uring: zero-copy (zcrx) where NIC and kernel can, else by
//! copy.
//!
//! # What there is
//!
//!  - A [`Receiver`] is one thread's connections over one io_uring. It is opened in the best way there is, and tells
//!    which that is and why no better ([`Receiver::mode`], [`Receiver::fallbacks`]).
//!  - What comes is a [`Piece`]: bytes where NIC or kernel put them, read as `&[u8]`, in any thread. Its buffer goes
//!    back when it is dropped, without a lock or a system call.
//!  - Pieces, and bytes of yours, are sent from where they are ([`Receiver::send`]).
//!  - Several threads receive by one queue ([`Receiver::share`], [`Receiver::join`]).
//!  - An [`Instance`] is a queue as an object: registered by one process, passed as descriptors, received by in
//!    another.
//!
//! # Example
//!
//! ```no_run
//! use std::net::TcpListener;
//! use zcrx::{Config, Event, Receiver, Source};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut receiver = Receiver::open(&Config::new(Source::NoDevice))?;
//! println!("{}", receiver.mode());
//! for fallback in receiver.fallbacks() {
//!     println!("{fallback}");
//! }
//! receiver.listen(TcpListener::bind("127.0.0.1:7000")?)?;
//! loop {
//!     receiver.wait(None)?;
//!     while let Some(event) = receiver.next_event() {
//!         match event {
//!             Event::Accepted { socket, .. } => {
//!                 receiver.add(socket)?;
//!             }
//!             // Back to where it came from, without a copy.
//!             Event::Received { from, piece } => {
//!                 receiver.send(from, piece);
//!             }
//!             Event::Ended { connection, .. } => receiver.close(connection)?,
//!             // Of no descriptors, mostly: `listen_again` when there are some.
//!             Event::AcceptFailed { error, .. } => return Err(error.into()),
//!             _ => {}
//!         }
//!     }
//! }
//! # }
//! ```
//!
//! # Facts worth knowing
//!
//!  - Registering, and importing, takes CAP_NET_ADMIN in the first user namespace, on all kernels so far.
//!  - A NIC's queue needs header/data split on and no XDP program on its interface. Bytes that come by another queue,
//!    and those that the NIC did not split off, are copied by the kernel into the same buffers.
//!  - Buffers are what limits: with all of them in pieces nothing is received until one is dropped. A connection that
//!    is not read for a while is better [paused](Receiver::pause), and one whose peer does not read what it is sent
//!    ([`Receiver::queued`]). A pause begins with the next [wait](Receiver::wait): what has come by then still takes
//!    buffers, so there should be more than a peer's socket holds (SO_RCVBUF).
//!  - Who must not take more connections for a while [stops](Receiver::stop_listening) the listener, and has its socket
//!    back: to listen again later, or to hand it on.
//!  - A piece of zcrx is at most a buffer long, and may begin anywhere in it. Blocks for O_DIRECT
//!    ([`Config::block_bytes`]) are filled by ordinary receives only.
//!  - zcrx is for TCP itself: not for TLS in the kernel, MPTCP or Unix sockets. These end with EPROTONOSUPPORT.
//!
//! Sources: `Documentation/networking/iou-zcrx.rst`, `include/uapi/linux/io_uring/zcrx.h` and `io_uring/zcrx.c` of
//! Linux 7.2.

#![cfg_attr(loom, allow(dead_code, reason = "the model has the way back of buffers only"))]

#[cfg(not(loom))]
pub mod abi;
#[cfg(all(feature = "receive", not(loom)))]
mod area;
#[cfg(all(feature = "receive", not(loom)))]
mod completions;
#[cfg(all(feature = "receive", not(loom)))]
mod config;
#[cfg(all(feature = "receive", not(loom)))]
mod connection;
#[cfg(all(feature = "receive", not(loom)))]
mod error;
#[cfg(all(feature = "receive", not(loom)))]
mod event;
#[cfg(all(feature = "receive", not(loom)))]
mod instance;
#[cfg(all(feature = "receive", not(loom)))]
mod lease;
#[cfg(all(feature = "receive", not(loom)))]
mod outbox;
#[cfg(all(feature = "receive", not(loom)))]
mod piece;
#[cfg(all(feature = "receive", not(loom)))]
mod provided;
#[cfg(all(feature = "receive", not(loom)))]
mod receiver;
#[cfg(all(feature = "receive", not(loom)))]
mod refill;
#[cfg(feature = "receive")]
mod returns;
#[cfg(all(feature = "receive", not(loom)))]
mod ring;
#[cfg(all(feature = "receive", not(loom)))]
mod supply;

#[cfg(all(feature = "receive", not(loom)))]
pub use {
    config::{Config, Fallback, Memory, Mode, Request, Source},
    connection::{ConnectionId, ListenerId},
    error::OpenError,
    event::Event,
    instance::{Imported, Instance, Prepared, Shape, Share},
    lease::{Leased, Offer, Registered},
    outbox::Payload,
    piece::Piece,
    receiver::{Receiver, Statistics, Waker},
    xsk::{OwnMemory, QueueId, UmemMemory},
};
