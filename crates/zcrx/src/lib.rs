//! Receives the payload of TCP connections into the application's memory by io_uring: zero-copy (zcrx) where NIC and
//! kernel support it, otherwise by copy.
//!
//! # Overview
//!
//!  - A [`Receiver`] serves the connections of one thread, with one io_uring. It opens in the best mode available, and
//!    reports which that is and why not a better one ([`Receiver::mode`], [`Receiver::fallbacks`]).
//!  - Received data is a [`Piece`]: bytes where the NIC or the kernel wrote them, read as `&[u8]`, in any thread.
//!    Dropping it returns its buffer, without a lock or a system call, unless a receiver sleeps for lack of buffers.
//!  - Pieces, and the application's own bytes, are sent from where they are ([`Receiver::send`]).
//!  - Several threads can receive from one queue ([`Receiver::share`], [`Receiver::join`]).
//!  - An [`Instance`] is a registered queue as an object: one process registers it and passes it on as descriptors, and
//!    another process receives from it.
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
//!             // Sent back to the peer, without a copy.
//!             Event::Received { from, piece } => {
//!                 receiver.send(from, piece);
//!             }
//!             Event::Ended { connection, .. } => receiver.close(connection)?,
//!             // Mostly for lack of descriptors: call `listen_again` when there are some.
//!             Event::AcceptFailed { error, .. } => return Err(error.into()),
//!             _ => {}
//!         }
//!     }
//! }
//! # }
//! ```
//!
//! # Requirements and limits
//!
//!  - Registering and importing need CAP_NET_ADMIN in the initial user namespace, on all kernels so far.
//!  - A NIC's queue needs header/data split on and no XDP program on its interface. The kernel copies bytes that arrive
//!    on another queue, and those that the NIC did not split from the headers, into the same buffers.
//!  - The number of buffers is the limit: while pieces hold all of them, nothing is received.
//!    [Pause](Receiver::pause) a connection whose pieces are not read for a while, and one whose peer does not read
//!    what it is sent ([`Receiver::queued`]). A pause begins with the next [wait](Receiver::wait): bytes that have
//!    arrived by then still take buffers, so use more buffers than a socket's receive buffer (SO_RCVBUF) needs.
//!  - To accept no connections for a while, [stop](Receiver::stop_listening) the listener. That returns its socket, to
//!    listen again later or to pass it on.
//!  - A piece of zcrx is at most a buffer long, and may begin anywhere in it. Blocks for O_DIRECT
//!    ([`Config::block_bytes`]) are filled by ordinary receives only.
//!  - zcrx supports plain TCP only: on sockets with kernel TLS, MPTCP or Unix sockets, receiving ends with
//!    EPROTONOSUPPORT.
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
