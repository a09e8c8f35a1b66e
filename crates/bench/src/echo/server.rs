//! The server: one thread that sends every message back, by the engine that was chosen.
//!
//! # What others can do to it
//! Every host that reaches its port can connect, so it bounds the cost of connections. It has at most `--connections`
//! of them; further ones are closed as soon as they are accepted. Each has room for one message that is sent back and
//! one that is received, never more. Invalid bytes end the connection. So does a message that is not complete, or a
//! reply that the client does not read, within [`PATIENCE`]: an idle connection keeps its place no longer than that.

use std::net::TcpListener;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use serde::Serialize;
use zcrx::Source;

use super::counts::Counts;
use super::lease::QueueRequest;
use crate::meter::Meter;

/// Longest time from one message's end to the next one's, in seconds.
pub(super) const PATIENCE: u64 = 30;
/// Connections that are accepted at a time, so that a flood of them does not hold up those that are there.
const ACCEPTED_AT_ONCE: usize = 16;

/// What a server works with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Serving<'a> {
    pub(super) listener: &'a TcpListener,
    pub(super) cpu: usize,
    /// Where zero-copy receives from.
    pub(super) source: Source,
    /// The queue to lease for that, unless this process registers it.
    pub(super) lease: Option<&'a QueueRequest>,
    /// Most connections at a time.
    pub(super) connections: usize,
    pub(super) counts: &'a Counts,
    pub(super) meter: &'a Meter,
}

/// The outcomes of its connections, and how it received bytes.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Served {
    /// Messages sent back.
    #[serde(skip)]
    pub(super) messages: u64,
    /// Bytes of them.
    #[serde(skip)]
    pub(super) bytes: u64,
    /// Connections that had a place.
    pub(super) accepted: u64,
    /// Connections for which there was no place, or no descriptor.
    pub(super) refused: u64,
    /// Connections that sent invalid messages.
    pub(super) malformed: u64,
    /// Connections that did nothing for too long.
    pub(super) stalled: u64,
    /// Connections that ended in the middle of a message, or by a reset.
    pub(super) cut: u64,
    #[serde(skip)]
    pub(super) received: Option<Received>,
}

/// How io_uring received.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Received {
    /// The mode of receiving in use.
    pub(super) mode: String,
    /// Share of the bytes that the NIC wrote where they were read, 0 to 1; `None`: the kernel does not report it.
    pub(super) zero_copy_share: Option<f64>,
    /// Pieces in which messages were received.
    pub(super) pieces: u64,
    /// How often the kernel copied although zero-copy is in use, and how many bytes; `None`: it does not report it.
    pub(super) kernel_copies: Option<u64>,
    pub(super) kernel_copied_bytes: Option<u64>,
    /// Bytes of messages that came in so many pieces that they were copied here.
    pub(super) gathered_bytes: u64,
    /// How often no buffer was left.
    pub(super) ran_out: u64,
}

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    /// Its client ended it, between messages.
    Ended,
    Cut,
    Malformed,
    Stalled,
}

impl Served {
    pub(super) fn count_over(&mut self, over: Over) {
        match over {
            Over::Ended => {}
            Over::Cut => self.cut += 1,
            Over::Malformed => self.malformed += 1,
            Over::Stalled => self.stalled += 1,
        }
    }
}

impl Serving<'_> {
    /// Accepts waiting connections, some at a time. `take` returns whether there was a place. False: the process has no
    /// descriptor left, and the caller should wait before it retries.
    pub(super) fn accept(&self, served: &mut Served, mut take: impl FnMut(OwnedFd) -> bool) -> bool {
        for _ in 0..ACCEPTED_AT_ONCE {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(self.listener, flags) {
                Ok(stream) => {
                    // Replies are sent whole: Nagle's algorithm would only delay them.
                    let _ = sockopt::set_tcp_nodelay(&stream, true);
                    match take(stream) {
                        true => served.accepted += 1,
                        false => served.refused += 1,
                    }
                }
                Err(Errno::AGAIN) => return true,
                // Errors of the connection to be accepted (accept(2)).
                Err(
                    Errno::CONNABORTED | Errno::INTR | Errno::NETDOWN | Errno::PROTO | Errno::HOSTUNREACH,
                ) => {}
                Err(_) => {
                    served.refused += 1;
                    return false;
                }
            }
        }
        true
    }
}
