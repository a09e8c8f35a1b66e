//! The protocol between steward and lessee, byte by byte.
//!
//! # Theory of operation
//!
//! The transport is a Unix socket of type SOCK_SEQPACKET: one datagram is one message. A message is a [`Head`] of
//! eight bytes and a body whose length its kind determines; a message of any other length is malformed. All numbers
//! are in the byte order of the machine, which both sides share. Text is UTF-8 in a field of fixed length, padded
//! with zeros.
//!
//! The lessee sends requests ([`Request`]) with a serial number of its choice, not 0. Each has exactly one answer
//! ([`Answer`]) with the same serial number, in order. Serial number 0 is the steward's own: [`Answer::Changed`], when
//! the interface of the lease changed, [`Answer::Hinted`], when its hints did, and [`Answer::Refused`], before it
//! closes a connection whose lessee broke the rules.
//!
//! Descriptors travel with these messages. With `Register` the lessee passes the memory of a socket, one file for each
//! part, and with `Share` one of its sockets, whose memory another socket will use. With the answer to
//! `Bind` it gets that socket: an AF_XDP socket with this memory and all four rings, bound to its queue and
//! entered in the program's map. So a lessee never has a socket that it could bind to another queue, for a socket is
//! bound once (`xsk_bind`, net/xdp/xsk.c). Before Linux 6.4, where the rings of such a socket cannot be mapped, it
//! comes with the answer to `Register`, and its lessee binds it; `Share` is refused there. The answer to `Share` also
//! carries such a socket. The answers to `Host` and `Uplink` carry the queues of a new tap, one descriptor for each.
//!
//! | kind | body, bytes | from the lessee |
//! |---|---|---|
//! | 1 `Lease` | 168 | interface (16), first queue, queues, mode, numbers of addresses and VLANs (4 each), see below |
//! | 2 `Register` | 1080 | queue, number of parts, chunk, headroom, metadata (bytes), flags, four rings, see below |
//! | 5 `Bind` | 12 | queue, flags, how long to wait for it (ms): the socket that was registered last |
//! | 11 `Share` | 32 | queue, how long to wait for it (ms), SO_COOKIE of the socket that is sent (8), four rings |
//! | 3 `Activate` | 12 | queue, bytes of virtio-net header (0, 12, 20; 0x10000: none, hints), longest frame (bytes) |
//! | 4 `Deactivate` | 4 | queue: its frames go to the host |
//! | 6 `Counters` | 4 | queue |
//! | 7 `Facts` | 0 | |
//! | 8 `Keep` | 16 | a token of the lessee's choice, for `Resume` after a restart; once for each lease |
//! | 9 `Resume` | 16 | the token: this connection takes over the lease; instead of `Lease` |
//! | 10 `Await` | 8 | queue, how long at most (ms): until no socket has the queue |
//! | 12 `Stations` | 772 | how many (4), then 64 × 12: VLAN (2), address (6), number of its port (4; none: all ones) |
//! | 13 `Groups` | 0 | |
//! | 14 `Host` | 4 | index of the tap device whose descriptor the lessee has; 0: of none |
//! | 15 `Behind` | 8 | VLAN (2) and address (6): stations behind the bridge after this one; zeros: the first ones |
//! | 16 `Leases` | 8 | number: the first lease above it that the user may see; the connection needs no lease |
//! | 17 `Hints` | 4 | which hints (1 hash, 2 VLAN, 4 timestamp, 8 mark, 0x100 VLAN where it is needed); see `hints` |
//! | 18 `Zcrx` | 184 | interface (16), queue, number of flows, 8 × 20: address (16), port (2), 4 or 6 (2); see `zcrx` |
//! | 19 `ZcrxRegister` | 96 | memory (16), number of rings, entries, bytes of a buffer, 16 × 4: descriptors, zero |
//! | 20 `Netkit` | 24 | queue, zero (4 each), name (16); with a network namespace or none; see `netkit` |
//! | 21 `SendTap` | 8 | queue, 1: only if the NIC has TSO, else 0; the answer has a tap for unsegmented GSO packets |
//! | 22 `Uplink` | 4 | as for `Host`, for a lease in tap mode |
//! | 23 `Uplink` | 8 | as for `Host`, queues (4), 2 to 16: the same with a device of several queues |
//! | 24 `Advertise` | 900 | number of changes (4), 32 × change: VLAN (2), MAC (6), IP (16), 1: added (4) |
//! | 28 `DropUnknown` | 4 | network (4; 0: the lease's) |
//! | 29 `TunnelStations` | 776 | network (4), then as `Stations` |
//! | 31 `Vteps` | 648 | network (4), number of changes (4), 32 × change: IP (16), 1: added (4) |
//! | 32 `Tunnel` | 20 | network (4), name of a tunnel device (16); the answer has two rtnetlink sockets |
//!
//! `Lease`: mode 0 is native or skb, 1 native, 2 skb, 3 tap (for networks only: no XDP program is attached); then
//! follow addresses (16 × 6), VLANs (16 × 2), and 1 for the queues of a network (4; addresses and VLANs are none then),
//! else 0. These are for the lease of a network: `Stations`, which sets whose frames it receives; `Groups`, whose
//! answer has the ring with its frames to groups (a BPF map); `Host`, whose answer has a tap device between the network
//! and the host; `Uplink`, whose answer has one between the network and the interface. `Register`: rings are fill,
//! completion, RX, TX; then follow parts (65 × 16: offset in the file, length, bytes). `Activate`: frames go
//! to the socket that was bound last. Only a lessee that has sent `Hints` may ask for hints there.
//!
//! | kind | body, bytes | from the steward |
//! |---|---|---|
//! | 64 `Done` | 0 | to all without another answer; `Groups`, with the ring; `Hints`, `SendTap`, 23 to 32 without a lease |
//! | 65 `Facts` | 840 | to `Lease`, `Resume` and `Facts` |
//! | 66 `Counters` | 88 | to `Counters` |
//! | 67 `Refused` | 488 | to anything: code (4), zero (4), text (480) |
//! | 68 `Changed` | 840 | unsolicited |
//! | 69 `Failed` | 8 | to `Register`, `Bind`, `Share` and `Await`: step (4), the kernel's error number (4) |
//! | 70 `Host` | 148 | to `Host`, `Uplink`: interface (16), addresses of the host (16 × 6), bridge (16) …, see `taps` |
//! | 71 `Hinted` | 636 | to `Hints`, unsolicited: possible, on, layout count (4 each), layouts (24 × 16), why (240) |
//! | 72 `ZcrxRegistered` | 104 | to `ZcrxRegister`: mapping (16), entries, bytes of a buffer, 3 offsets, 17 numbers |
//! | 73 `Netkit` | 24 | to `Netkit`, with a map: index, number of its queue (4 each), name (16) |
//! | 74 `Behind` | 516 | to `Behind`: how many (4), 64 × 8: VLAN (2; any: all ones), address (6); unasked: others now |
//! | 75 `SendTap` | 20 | to `SendTap`: interface (16), 1 if it takes UDP GSO packets, else 0 (4); see `taps` |
//! | 80 `Lease` | 192 | to `Leases`; after the last one `Done` (see `listed`) |
//!
//! Requests are in `request.rs`, answers in `answer.rs`, each with the table of its kinds; `wire.rs` writes and reads
//! their fields.
//!
//! A lessee that does not read its answers gets no further ones: the steward keeps one answer for each connection and
//! reads no further request before that is sent. Changes are not queued: a notification has the state at the time of
//! sending.

use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use wire::Body;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

mod advertised;
mod answer;
mod hints;
mod listed;
mod netkit;
mod part;
mod request;
mod stations;
mod taps;
mod tunnel;
mod wire;
mod zcrx;

pub use advertised::{ADVERTISED_CHANGES_MAX, AddressChange};
pub use answer::{Answer, Facts, Reason, Refusal, Step};
pub use hints::{HintRequest, Hinted};
pub use host::links::bridge::{ANY_VLAN, BEHIND_MAX};
pub use listed::{Listed, Steered};
pub use netkit::{NetkitEnd, NetkitWanted};
pub use part::Part;
pub use request::{Request, Rings, UmemLayout, Wanted};
pub use stations::StationChange;
pub use taps::{HostEnd, SendTapEnd};
pub use tunnel::{VTEP_CHANGES_MAX, VtepChange};
pub use wire::is_interface_name;
pub use zcrx::{
    ZCRX_BUFFER_MAX, ZCRX_ENTRIES_MAX, ZCRX_FLOWS_MAX, ZCRX_RINGS_MAX, ZcrxRegistered, ZcrxRings, ZcrxWanted,
};

pub use answer::STEERING_BYTES;
pub use wire::{enumerated, mode_request};

/// Version of this protocol; messages of another version are refused.
pub const VERSION: u16 = 6;
/// Longest message in either direction, bytes.
pub const MESSAGE_MAX: usize = 1088;
/// Most queues of one lease.
pub const QUEUES_MAX: u32 = 128;
/// Most queues of a tap, hence most descriptors of one answer. The kernel allows 256 (`MAX_TAP_QUEUES`,
/// drivers/net/tun.c).
pub const TAP_QUEUES_MAX: usize = 16;
/// Most parts of a socket's memory, hence most descriptors of one message (the kernel allows 253, SCM_MAX_FD): a
/// guest's memory regions, and the device's own memory after them.
pub const PARTS_MAX: usize = 65;
/// Most memory of one socket, bytes: the size that a process can map at once on most machines.
pub const UMEM_MAX: u64 = 1 << 46;
/// Most entries of a ring; the kernel sets no limit.
pub const RING_MAX: u32 = 1 << 15;
/// UMEM flags that a lessee may set: unaligned chunks, room for TX metadata (`XDP_UMEM_UNALIGNED_CHUNK_FLAG`,
/// `XDP_UMEM_TX_METADATA_LEN`, include/uapi/linux/if_xdp.h).
pub const UMEM_FLAGS: u32 = 1 | 1 << 2;
/// Bind flags that a lessee may set: `XDP_COPY`, `XDP_ZEROCOPY`, `XDP_USE_NEED_WAKEUP`, `XDP_USE_SG` (same header).
pub const BIND_FLAGS: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4;
/// Longest wait for a queue that a request may set, milliseconds.
pub const BIND_WAIT_MAX: u32 = 60_000;
/// Smallest page size, to a multiple of which parts are aligned, bytes.
const SMALLEST_PAGE: u64 = 4096;
/// Shortest and longest frame limit, bytes: an Ethernet header; the longest MTU there is, with header and VLAN tag.
pub const FRAME_LIMITS: RangeInclusive<u32> = 14..=65_553;
/// Most addresses, and most VLANs, of one lease.
pub const ENTRIES_MAX: usize = 16;
/// Most changes of stations in one message.
pub const CHANGES_MAX: usize = 64;
/// Most hosts from which a network takes packets of its tunnel.
pub const VTEPS_MAX: usize = 16_384;
/// Most networks in tunnels that share the queues of a lease, besides its own.
pub const SHARES_MAX: u32 = 63;
/// Most stations of one lease.
pub const STATIONS_MAX: usize = 1024;

/// Proof that a lessee is the same: random bytes that only it and the steward know.
pub type Token = [u8; 16];

/// A socket of the type that carries the messages.
///
/// # Errors
/// An error of the kernel.
pub fn new_socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The first bytes of each message.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Head {
    /// [`VERSION`].
    pub version: u16,
    /// The kind of the body.
    pub kind: u16,
    /// Serial number of a request and of its answer; 0 for notifications.
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
    /// Descriptors with a message that carries none.
    #[error("descriptors with a message that carries none")]
    Descriptors,
    /// Another version of the protocol.
    #[error("version {0} of the protocol, version {VERSION} is spoken here: use programs of one release")]
    Version(u16),
    /// No such kind of message.
    #[error("unknown kind of message {0}: use programs of one release")]
    Kind(u16),
    /// The body does not have the length of its kind.
    #[error("a body of {got} bytes in a message of kind {kind}")]
    Length {
        /// Kind of the message.
        kind: u16,
        /// Bytes.
        got: usize,
    },
    /// Serial number 0 in a request.
    #[error("a request with serial number 0")]
    Serial,
    /// A field has an invalid value.
    #[error("{field} is {value}")]
    Value {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A list that is empty or too long, has a duplicate or invalid element, or is not followed by zeros.
    #[error("the list of {0} is empty or too long, or has an element twice or one that is not possible")]
    List(&'static str),
    /// An invalid interface name.
    #[error(
        "{0:?} is not a name of an interface, which has 1 to 15 bytes, no `/`, `:` or blank: `ip link` lists them"
    )]
    Interface(String),
    /// A field that should be text, and is not.
    #[error("{0} is not text")]
    Text(&'static str),
}

const _: () = assert!(size_of::<Head>() == 8);

/// A message: `write` appends the body and returns its kind.
fn message(serial: u32, write: impl FnOnce(&mut Vec<u8>) -> u16) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<Head>()];
    let head = Head {
        version: VERSION,
        kind: write(&mut bytes),
        serial,
    };
    bytes[..size_of::<Head>()].copy_from_slice(head.as_bytes());
    bytes
}

/// Head and body of a message.
fn split(bytes: &[u8]) -> Result<(Head, Body<'_>), Malformed> {
    let (head, body) = Head::read_from_prefix(bytes).map_err(|_| Malformed::Short(bytes.len()))?;
    match head.version {
        VERSION => Ok((head, Body::new(head.kind, body))),
        other => Err(Malformed::Version(other)),
    }
}

#[cfg(test)]
mod tests;
