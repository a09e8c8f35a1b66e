//! What happens to a receiver's connections.

use std::io;
use std::os::fd::OwnedFd;

use crate::connection::{ConnectionId, ListenerId};
use crate::piece::Piece;

/// What happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer connected. [Add](crate::Receiver::add) it, or drop it.
    Accepted {
        /// By which listener.
        listener: ListenerId,
        /// The connection.
        socket: OwnedFd,
    },
    /// No more connections are accepted until [`listen_again`](crate::Receiver::listen_again).
    AcceptFailed {
        /// By which listener.
        listener: ListenerId,
        /// Why, as accept(2) says it.
        error: io::Error,
    },
    /// A listener that was [to be stopped](crate::Receiver::stop_listening) accepts no more. Connections that had come
    /// by then were events before.
    Stopped {
        /// Which.
        listener: ListenerId,
        /// Its socket: whoever drops it has peers refused that connect, and those reset that wait to be accepted.
        socket: OwnedFd,
    },
    /// Bytes came.
    Received {
        /// From which peer.
        from: ConnectionId,
        /// The bytes.
        piece: Piece,
    },
    /// Nothing more will come. [Close](crate::Receiver::close) the connection when nothing more is to be sent either.
    Ended {
        /// Of which connection.
        connection: ConnectionId,
        /// `None`: the peer is done.
        error: Option<io::Error>,
    },
    /// All that was queued is with the kernel.
    Sent {
        /// To which peer.
        to: ConnectionId,
    },
    /// What was queued is not sent, nor is what will be.
    SendFailed {
        /// To which peer.
        to: ConnectionId,
        /// Why, as send(2) says it.
        error: io::Error,
    },
    /// A connection that was to be closed is.
    Closed {
        /// Which.
        connection: ConnectionId,
    },
}
