//! What a steward and a holder say to each other, byte by byte.
//!
//! # Theory of operation
//!
//! The transport is a Unix socket of type SOCK_SEQPACKET: one datagram is one message. A message is a [`Head`] of
//! eight bytes and a body whose length its kind determines; a message of any other length is malformed. All numbers
//! are in the byte order of the machine, which both sides share. Text is UTF-8 in a field of fixed length, padded
//! with zeros.
//!
//! The holder sends requests ([`Request`]) with a serial number of its choice, not 0. Each has exactly one answer
//! ([`Answer`]) with the same serial number, in order. Descriptors travel only from the steward to the holder, and only
//! with the answers to `Lease` (one for each queue, in order) and `Socket` (one). Each is an AF_XDP socket that is in
//! the program's map, has an RX ring of [`RECEIVE_RING`] entries, which the holder maps, and nothing else. Serial
//! number 0 is the steward's own: [`Answer::Changed`], when the interface of the lease changed, and
//! [`Answer::Refused`], before it closes a connection whose holder broke the rules.
//!
//! | kind | body, bytes | from the holder |
//! |---|---|---|
//! | 1 `Lease` | 164 | interface (16), first queue, queues, mode, numbers of addresses and VLANs (4 each), see below |
//! | 2 `Socket` | 4 | queue: a further socket, which waits beside the one in use; of several the last counts |
//! | 3 `Activate` | 12 | queue, bytes of virtio-net header (0, 12, 20), longest frame in bytes: see below |
//! | 4 `Deactivate` | 4 | queue: its frames go to the host |
//! | 5 `Memlock` | 8 | locked memory that the holder's process may have in all, bytes |
//! | 6 `Counters` | 4 | queue |
//! | 7 `Facts` | 0 | |
//! | 8 `Keep` | 16 | a token of the holder's choice, to come back with after a restart; once for each lease |
//! | 9 `Resume` | 16 | the token: this connection takes over the lease; instead of `Lease` |
//! | 16 `Leases` | 8 | the first lease whose number is higher, of those that the asker may know of; needs no lease |
//!
//! `Lease`: mode 0 is any, 1 native, 2 skb; then follow addresses (16 × 6) and VLANs (16 × 2). `Activate`: from now on
//! the socket is used that came last, which must be bound.
//!
//! | kind | body, bytes | from the steward |
//! |---|---|---|
//! | 64 `Done` | 0 | to `Leases`, `Socket` (with a descriptor), `Activate`, `Deactivate`, `Memlock`, `Keep` |
//! | 65 `Facts` | 520 | to `Lease` (with descriptors), `Resume` and `Facts` |
//! | 66 `Counters` | 48 | to `Counters` |
//! | 67 `Refused` | 488 | to anything: code (4), zero (4), text (480) |
//! | 68 `Changed` | 520 | by itself |
//! | 80 `Lease` | 192 | to `Leases`; after the last one `Done` (see `listing`) |
//!
//! Requests are in `protocol/request.rs`, answers in `protocol/answer.rs`, what both are made of in
//! `protocol/field.rs`.
//!
//! A holder that does not read its answers gets no further ones: the steward keeps one answer for each connection and
//! reads no further request before that is sent. Changes are not queued: the last state is told.

use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

mod answer;
mod field;
mod request;

pub use answer::{Answer, Facts, Reason, Refusal, Steered};
pub use field::is_interface_name;
pub use request::{Request, Wanted};

pub(crate) use answer::STEERING_BYTES;
pub(crate) use field::{
    enumerated, field, flags_of, interface_name, listed, mode_request, padded, value, zero,
};

/// Of this protocol; a message of another one is refused.
pub const VERSION: u16 = 4;
/// Longest message in bytes, either way.
pub const MESSAGE_MAX: usize = 528;
/// Most queues of one lease, hence most descriptors of one message (the kernel carries 253, SCM_MAX_FD).
pub const QUEUES_MAX: u32 = 128;
/// Entries of the RX ring of each socket that a steward hands out. It makes the ring itself, since from Linux 7.1 on an
/// XSKMAP takes no socket without one, and no ring can be made twice (`xsk_init_queue`, net/xdp/xsk.c).
pub const RECEIVE_RING: u32 = 2048;
/// Shortest and longest frame limit, bytes: an Ethernet header; the longest MTU there is, with header and VLAN tag.
pub const FRAME_LIMITS: RangeInclusive<u32> = 14..=65_553;
/// Most addresses, and most VLANs, of one lease.
pub const ENTRIES_MAX: usize = 16;
/// Where a steward listens if it is not told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/vhost-af-xdp/steward.sock";

/// What a holder proves with that it is the same: random bytes, known to it and the steward alone.
pub type Token = [u8; 16];

/// A socket of the kind that messages go over.
///
/// # Errors
/// The kernel's.
pub fn new_socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// What each message begins with.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Head {
    /// [`VERSION`].
    pub version: u16,
    /// What the body is.
    pub kind: u16,
    /// The request's, and its answer's; 0 for what was not asked for.
    pub serial: u32,
}

/// A message that breaks the rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Shorter than a head.
    #[error("a message of {0} bytes has no head")]
    Short(usize),
    /// Longer than any message.
    #[error("a message of more than {MESSAGE_MAX} bytes")]
    Long,
    /// Descriptors where none belong.
    #[error("descriptors with a message that carries none")]
    Descriptors,
    /// Another version of the protocol.
    #[error("version {0} of the protocol, version {VERSION} is spoken here: use programs of one release")]
    Version(u16),
    /// No such kind of message.
    #[error("unknown kind of message {0}")]
    Kind(u16),
    /// The body has not the length of its kind.
    #[error("a body of {got} bytes in a message of kind {kind}")]
    Length {
        /// As given.
        kind: u16,
        /// Bytes.
        got: usize,
    },
    /// Serial number 0 in a request.
    #[error("a request with serial number 0")]
    Serial,
    /// A field has a value that it cannot have.
    #[error("{field} is {value}")]
    Value {
        /// Which.
        field: &'static str,
        /// As given.
        value: u64,
    },
    /// A list that is too long, names something twice, or goes on after its end.
    #[error("{0}: a list of at most {ENTRIES_MAX} different ones is meant")]
    List(&'static str),
    /// A name that no interface can have.
    #[error(
        "{0:?} is not a name of an interface, which has 1 to 15 bytes, no `/`, `:` or blank: `ip link` lists them"
    )]
    Interface(String),
    /// Text that is none.
    #[error("{0} is not text")]
    Text(&'static str),
}

/// What the body of a message is.
mod kind {
    pub(super) const LEASE: u16 = 1;
    pub(super) const SOCKET: u16 = 2;
    pub(super) const ACTIVATE: u16 = 3;
    pub(super) const DEACTIVATE: u16 = 4;
    pub(super) const MEMLOCK: u16 = 5;
    pub(super) const COUNTERS: u16 = 6;
    pub(super) const FACTS: u16 = 7;
    pub(super) const KEEP: u16 = 8;
    pub(super) const RESUME: u16 = 9;

    pub(super) const LEASES: u16 = 16;

    pub(super) const DONE: u16 = 64;
    pub(super) const THESE_FACTS: u16 = 65;
    pub(super) const THESE_COUNTERS: u16 = 66;
    pub(super) const REFUSED: u16 = 67;
    pub(super) const CHANGED: u16 = 68;
    pub(super) const LISTED: u16 = 80;
}

const _: () = assert!(size_of::<Head>() == 8);

fn message(kind: u16, serial: u32, body: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    let head = Head {
        version: VERSION,
        kind,
        serial,
    };
    [head.as_bytes(), body.as_bytes()].concat()
}

/// Head and body of a message.
fn split(bytes: &[u8]) -> Result<(Head, &[u8]), Malformed> {
    let (head, body) = Head::read_from_prefix(bytes).map_err(|_| Malformed::Short(bytes.len()))?;
    match head.version {
        VERSION => Ok((head, body)),
        other => Err(Malformed::Version(other)),
    }
}

/// A body that has the length of its kind.
fn read<T: FromBytes>(kind: u16, body: &[u8]) -> Result<T, Malformed> {
    let got = body.len();
    T::read_from_bytes(body).map_err(|_| Malformed::Length { kind, got })
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;
