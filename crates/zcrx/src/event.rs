//! Events of a receiver's connections and listeners.

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
        /// The listener that it arrived at.
        listener: ListenerId,
        /// The connection.
        socket: OwnedFd,
    },
    /// No more connections are accepted until [`listen_again`](crate::Receiver::listen_again).
    AcceptFailed {
        /// The listener that failed.
        listener: ListenerId,
        /// The error of accept(2).
        error: io::Error,
    },
    /// A listener that was [to be stopped](crate::Receiver::stop_listening) accepts no more. Connections that
    /// arrived before were earlier events.
    Stopped {
        /// The listener that stopped.
        listener: ListenerId,
        /// Its socket: dropping it resets connections that wait to be accepted, and later ones are refused.
        socket: OwnedFd,
    },
    /// Bytes were received.
    Received {
        /// The connection that received them.
        from: ConnectionId,
        /// The bytes.
        piece: Piece,
    },
    /// No more bytes follow. [Close](crate::Receiver::close) the connection when nothing more is to be sent either.
    Ended {
        /// The connection that ended.
        connection: ConnectionId,
        /// `None`: the peer has finished sending.
        error: Option<io::Error>,
    },
    /// All that was queued is with the kernel.
    Sent {
        /// To which peer.
        to: ConnectionId,
    },
    /// Queued payloads are not sent, and neither are later ones.
    SendFailed {
        /// To which peer.
        to: ConnectionId,
        /// The error of send(2).
        error: io::Error,
    },
    /// A connection is closed, as requested.
    Closed {
        /// Which.
        connection: ConnectionId,
    },
}
