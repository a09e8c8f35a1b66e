//! What a steward and a holder say to each other, byte by byte.
//!
//! # Theory of operation
//!
//! The transport is a Unix socket of type SOCK_SEQPACKET: one datagram is one message. A message is a [`Head`] of eight bytes and a body
//! whose length its kind determines; a message of any other length is malformed. All numbers are in the byte order of the machine, which both
//! sides share. Text is UTF-8 in a field of fixed length, padded with zeros.
//!
//! The holder sends requests ([`Request`]) with a serial number of its choice, not 0. Each has exactly one answer ([`Answer`]) with the same serial
//! number, in order. Descriptors travel only from the steward to the holder, and only with the answers to `Lease` (one for each queue, in order) and
//! `Socket` (one). Serial number 0 is the steward's own: [`Answer::Changed`], when the interface of the lease changed, and
//! [`Answer::Refused`], before it closes a connection whose holder broke the rules.
//!
//! | kind | body, bytes | from the holder |
//! |---|---|---|
//! | 1 `Lease` | 164 | interface (16), first queue (4), queues (4), mode 0 any 1 native 2 skb (4), numbers of addresses and VLANs (4, 4), addresses (16 × 6), VLANs (16 × 2) |
//! | 2 `Socket` | 4 | queue: a further socket, which waits beside the one in use; of several the last counts |
//! | 3 `Activate` | 12 | queue, bytes of virtio-net header (0, 12, 20), longest frame in bytes: the socket that came last, and is bound, is used from now on |
//! | 4 `Deactivate` | 4 | queue: its frames go to the host |
//! | 5 `Memlock` | 8 | locked memory that the holder's process may have in all, bytes |
//! | 6 `Counters` | 4 | queue |
//! | 7 `Facts` | 0 | |
//! | 8 `Keep` | 16 | a token of the holder's choice, by which it comes back to this lease if the steward is restarted; once for each lease |
//! | 9 `Resume` | 16 | the token: this connection takes over the lease; instead of `Lease` |
//! | 16 `Leases` | 8 | the first lease whose number is higher, of those that the asker may know of; needs no lease |
//!
//! | kind | body, bytes | from the steward |
//! |---|---|---|
//! | 64 `Done` | 0 | to `Leases`, `Socket` (with a descriptor), `Activate`, `Deactivate`, `Memlock`, `Keep` |
//! | 65 `Facts` | 488 | to `Lease` (with descriptors), `Resume` and `Facts` |
//! | 66 `Counters` | 48 | to `Counters` |
//! | 67 `Refused` | 488 | to anything: code (4), zero (4), text (480) |
//! | 68 `Changed` | 488 | by itself |
//! | 80 `Lease` | 192 | to `Leases`; after the last one `Done` (see `listing`) |
//!
//! A holder that does not read its answers gets no further ones: the steward keeps one answer for each connection and reads no further request
//! before that is sent. Changes are not queued: the last state is told.

use std::ops::{Range, RangeInclusive};

use steer::{Filter, LAST_VLAN, Mode, ModeRequest, QueueConf, QueueCounters, VirtioHeader};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::links::DriverSends;
use crate::listing::Listed;

/// Of this protocol; a message of another one is refused.
pub const VERSION: u16 = 1;
/// Longest message in bytes, either way.
pub const MESSAGE_MAX: usize = 496;
/// Most queues of one lease, hence most descriptors of one message (the kernel carries 253, SCM_MAX_FD).
pub const QUEUES_MAX: u32 = 128;
/// Shortest and longest frame limit, bytes: an Ethernet header; the longest MTU there is, with header and VLAN tag.
pub const FRAME_LIMITS: RangeInclusive<u32> = 14..=65_553;
/// Most addresses, and most VLANs, of one lease.
pub const ENTRIES_MAX: usize = 16;
/// Where a steward listens if it is not told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/vhost-af-xdp/steward.sock";

/// What a holder proves with that it is the same: random bytes, known to it and the steward alone.
pub type Token = [u8; 16];

const NAME_BYTES: usize = 16;
const NOTE_BYTES: usize = 240;
const STEERING_BYTES: usize = 184;
const REFUSAL_BYTES: usize = 480;

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
    /// Text that is none.
    #[error("{0} is not text")]
    Text(&'static str),
}

/// What a holder asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A lease of queues. At most one for each connection.
    Lease(Wanted),
    /// A further socket for a queue of the lease; frames go on as before until [`Request::Activate`].
    Socket {
        /// One of the lease.
        queue: u32,
    },
    /// From now on frames go to the queue's last socket, which is bound.
    Activate {
        /// One of the lease.
        queue: u32,
        /// How frames are treated; the frame limit is in [`FRAME_LIMITS`].
        conf: QueueConf,
    },
    /// From now on the queue's frames go to the host.
    Deactivate {
        /// One of the lease.
        queue: u32,
    },
    /// Locked memory that the holder's process may have.
    Memlock {
        /// In all.
        bytes: u64,
    },
    /// What the program did with the queue's frames.
    Counters {
        /// One of the lease.
        queue: u32,
    },
    /// What is known of the interface.
    Facts,
    /// The lease is to outlive the steward's process.
    Keep {
        /// By which the holder comes back.
        token: Token,
    },
    /// The lease that was kept, for a connection that has none. Its queues go on meanwhile; the sockets are those that the holder has.
    Resume {
        /// As given with [`Request::Keep`].
        token: Token,
    },
    /// The first lease of a higher number, whoever's; by whom a lease is not needed.
    Leases {
        /// Of the last lease that is known; 0 at first.
        after: u64,
    },
}

/// The lease that a holder wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Name of the interface.
    pub interface: String,
    /// First queue.
    pub start_queue: u32,
    /// How many, 1 to [`QUEUES_MAX`].
    pub queues: u32,
    /// How the program is to be attached.
    pub mode: ModeRequest,
    /// Which frames are to come, if not all of the queues': at most [`ENTRIES_MAX`] addresses and VLANs. The NIC is asked to bring such frames to these queues, where it
    /// can and the policy names them; what else comes to the queues goes to the host.
    pub filter: Filter,
}

impl Wanted {
    /// The queues.
    #[must_use]
    pub fn range(&self) -> Range<u32> {
        self.start_queue..self.start_queue.saturating_add(self.queues)
    }
}

/// What a holder must know of the interface, and cannot ask the kernel if it lives in another network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Index in the steward's network namespace; 0: the interface is gone.
    pub ifindex: u32,
    /// Its name now.
    pub name: String,
    /// Bytes.
    pub mtu: u32,
    /// Its address.
    pub mac: [u8; 6],
    /// Receive queues.
    pub rx_queues: u32,
    /// Administratively up.
    pub up: bool,
    /// Its local senders leave partial checksums, as those of a veth do.
    pub partial_checksums: bool,
    /// How the program is attached; `None`: it is not, the lease is impaired, and [`note`](Self::note) says why.
    pub mode: Option<Mode>,
    /// The kernel's id of the program; 0 if there is none.
    pub program: u32,
    /// What the driver does for sockets in zero-copy mode.
    pub sends: DriverSends,
    /// Changes whenever the program was attached anew, and all sockets are to be asked for again.
    pub generation: u32,
    /// How frames come to the queues of the lease.
    pub steered: Steered,
    /// Frames do not come although they should: the interface is gone or down, or lacks a queue of the lease. It goes on by itself when that is over.
    pub impaired: bool,
    /// Why the lease is impaired, or why the program is not attached natively; else empty. Cut to 240 bytes.
    pub note: String,
    /// Why frames do not come in a better way, or what of them is not seen; else empty. Cut to 184 bytes.
    pub steering: String,
}

/// How frames come to the queues of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steered {
    /// All that the NIC puts into the queues, by whatever rules it has.
    ByQueue,
    /// Of what the NIC puts into the queues, the frames of the lease's addresses and VLANs; the program looks.
    ByProgram,
    /// The NIC brings the frames of these addresses and VLANs to the lease's first queue (n-tuple rules); the program looks, too.
    ByRules,
    /// The NIC spreads the frames of these addresses and VLANs over the lease's queues (n-tuple rules and an RSS context); the program looks, too.
    ByContext,
}

impl Steered {
    const ALL: [Self; 4] = [Self::ByQueue, Self::ByProgram, Self::ByRules, Self::ByContext];

    /// For status and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ByQueue => "queue",
            Self::ByProgram => "program",
            Self::ByRules => "n-tuple rules",
            Self::ByContext => "n-tuple rules, RSS context",
        }
    }
}

/// Why a request was refused, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The message broke the rules; the connection is over.
    Malformed = 1,
    /// The policy has no rule for it.
    NotAllowed = 2,
    /// Another lease has a queue of it.
    Taken = 3,
    /// No such interface, or no such queue.
    NoInterface = 4,
    /// The XDP program cannot be attached.
    Program = 5,
    /// Too many connections.
    Limit = 6,
    /// More locked memory than the policy allows.
    Memlock = 7,
    /// The connection has no lease, or one already, or not of this queue.
    Lease = 8,
    /// The kernel refused something.
    Kernel = 9,
    /// The interface is gone, or its program; it may come back.
    Impaired = 10,
}

impl Reason {
    const ALL: [Self; 10] = [
        Self::Malformed,
        Self::NotAllowed,
        Self::Taken,
        Self::NoInterface,
        Self::Program,
        Self::Limit,
        Self::Memlock,
        Self::Lease,
        Self::Kernel,
        Self::Impaired,
    ];

    fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|&reason| reason as u32 == code)
    }
}

/// A refusal, with the sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For programs.
    pub reason: Reason,
    /// Names the value and the remedy. Cut to 480 bytes.
    pub text: String,
}

impl Refusal {
    /// A refusal for this reason.
    #[must_use]
    pub fn new(reason: Reason, text: impl Into<String>) -> Self {
        Self {
            reason,
            text: text.into(),
        }
    }
}

/// What a steward says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Done,
    /// The interface of the lease.
    Facts(Facts),
    /// Counters of a queue.
    Counters(QueueCounters),
    /// Not done.
    Refused(Refusal),
    /// The interface of the lease is now like this; never an answer to a request.
    Changed(Facts),
    /// A lease, whoever's.
    Lease(Listed),
}

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

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct LeaseBody {
    interface: [u8; NAME_BYTES],
    start_queue: u32,
    queues: u32,
    mode: u32,
    mac_count: u32,
    vlan_count: u32,
    macs: [[u8; 6]; ENTRIES_MAX],
    vlans: [u16; ENTRIES_MAX],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ActivateBody {
    queue: u32,
    header_bytes: u32,
    frame_limit: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FactsBody {
    ifindex: u32,
    mtu: u32,
    rx_queues: u32,
    program: u32,
    generation: u32,
    mode: u32,
    flags: u32,
    most_pieces: u32,
    name: [u8; NAME_BYTES],
    mac: [u8; 6],
    zero: [u8; 6],
    steered: u32,
    note: [u8; NOTE_BYTES],
    steering: [u8; STEERING_BYTES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RefusedBody {
    reason: u32,
    zero: u32,
    text: [u8; REFUSAL_BYTES],
}

/// The interface is up.
const FLAG_UP: u32 = 1;
/// The driver completes checksums in zero-copy mode.
const FLAG_CHECKSUM: u32 = 2;
/// Local senders leave partial checksums.
const FLAG_PARTIAL: u32 = 4;
/// Frames do not come although they should.
const FLAG_IMPAIRED: u32 = 8;

const _: () =
    assert!(size_of::<Head>() == 8 && size_of::<LeaseBody>() == 164 && size_of::<ActivateBody>() == 12);
const _: () = assert!(size_of::<FactsBody>() == 488 && size_of::<RefusedBody>() == 488);
const _: () = assert!(size_of::<Head>() + size_of::<RefusedBody>() == MESSAGE_MAX);

impl Request {
    /// The message, with this serial number.
    #[must_use]
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        match self {
            Self::Lease(wanted) => message(
                kind::LEASE,
                serial,
                &LeaseBody {
                    interface: field(&wanted.interface),
                    start_queue: wanted.start_queue,
                    queues: wanted.queues,
                    mode: match wanted.mode {
                        ModeRequest::Auto => 0,
                        ModeRequest::Native => 1,
                        ModeRequest::Skb => 2,
                    },
                    mac_count: wanted.filter.macs.len().try_into().unwrap_or(u32::MAX),
                    vlan_count: wanted.filter.vlans.len().try_into().unwrap_or(u32::MAX),
                    macs: padded(&wanted.filter.macs),
                    vlans: padded(&wanted.filter.vlans),
                },
            ),
            Self::Socket { queue } => message(kind::SOCKET, serial, queue),
            Self::Activate { queue, conf } => message(
                kind::ACTIVATE,
                serial,
                &ActivateBody {
                    queue: *queue,
                    header_bytes: conf.virtio_header.map_or(0, VirtioHeader::len_bytes),
                    frame_limit: conf.frame_limit,
                },
            ),
            Self::Deactivate { queue } => message(kind::DEACTIVATE, serial, queue),
            Self::Memlock { bytes } => message(kind::MEMLOCK, serial, bytes),
            Self::Counters { queue } => message(kind::COUNTERS, serial, queue),
            Self::Facts => message(kind::FACTS, serial, &[0u8; 0]),
            Self::Leases { after } => message(kind::LEASES, serial, after),
            Self::Keep { token } => message(kind::KEEP, serial, token),
            Self::Resume { token } => message(kind::RESUME, serial, token),
        }
    }

    /// Reads a message of a holder: its serial number and what it asks for.
    ///
    /// # Errors
    /// [`Malformed`], for anything that [`Request::encode`] does not make.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), Malformed> {
        let (head, body) = split(bytes)?;
        if head.serial == 0 {
            return Err(Malformed::Serial);
        }
        let kind = head.kind;
        let request = match kind {
            kind::LEASE => Self::Lease(wanted(&read(kind, body)?)?),
            kind::SOCKET => Self::Socket {
                queue: read(kind, body)?,
            },
            kind::ACTIVATE => activate(&read(kind, body)?)?,
            kind::DEACTIVATE => Self::Deactivate {
                queue: read(kind, body)?,
            },
            kind::MEMLOCK => Self::Memlock {
                bytes: read(kind, body)?,
            },
            kind::COUNTERS => Self::Counters {
                queue: read(kind, body)?,
            },
            kind::FACTS => read::<[u8; 0]>(kind, body).map(|_| Self::Facts)?,
            kind::KEEP => Self::Keep {
                token: read(kind, body)?,
            },
            kind::RESUME => Self::Resume {
                token: read(kind, body)?,
            },
            kind::LEASES => Self::Leases {
                after: read(kind, body)?,
            },
            other => return Err(Malformed::Kind(other)),
        };
        Ok((head.serial, request))
    }
}

fn wanted(body: &LeaseBody) -> Result<Wanted, Malformed> {
    if !(1..=QUEUES_MAX).contains(&body.queues) {
        return Err(value("number of queues", body.queues));
    }
    if body.start_queue.checked_add(body.queues).is_none() {
        return Err(value("first queue", body.start_queue));
    }
    Ok(Wanted {
        interface: interface_name(&body.interface)?,
        start_queue: body.start_queue,
        queues: body.queues,
        mode: match body.mode {
            0 => ModeRequest::Auto,
            1 => ModeRequest::Native,
            2 => ModeRequest::Skb,
            other => return Err(value("mode", other)),
        },
        filter: filter(body)?,
    })
}

fn filter(body: &LeaseBody) -> Result<Filter, Malformed> {
    let macs = listed(&body.macs, body.mac_count, "number of addresses")?;
    let vlans = listed(&body.vlans, body.vlan_count, "number of VLANs")?;
    // Bit 0 of the first byte: a group of stations (IEEE 802).
    if let Some(mac) = macs.iter().find(|mac| mac[0] & 1 != 0) {
        return Err(value("first byte of the address of one station", mac[0].into()));
    }
    if let Some(&vlan) = vlans.iter().find(|&&vlan| vlan > LAST_VLAN) {
        return Err(value("VLAN", vlan.into()));
    }
    Ok(Filter { macs, vlans })
}

/// A list in a field of fixed length; what is too long is cut, and its number tells.
pub(crate) fn padded<T: Copy + Default, const N: usize>(list: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all.iter_mut().zip(list).for_each(|(to, &from)| *to = from);
    all
}

/// The list in a field of fixed length, after which there are only zeros, and in which nothing is there twice.
pub(crate) fn listed<T: Copy + Default + Ord>(
    all: &[T],
    count: u32,
    name: &'static str,
) -> Result<Vec<T>, Malformed> {
    let count = usize::try_from(count).ok().filter(|&count| count <= all.len());
    let (list, rest) = all.split_at(count.ok_or(Malformed::List(name))?);
    let mut sorted = list.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    match sorted.len() == list.len() && rest.iter().all(|&item| item == T::default()) {
        true => Ok(list.to_vec()),
        false => Err(Malformed::List(name)),
    }
}

fn activate(body: &ActivateBody) -> Result<Request, Malformed> {
    let virtio_header = match body.header_bytes {
        0 => None,
        12 => Some(VirtioHeader::Basic),
        20 => Some(VirtioHeader::HashReport),
        other => return Err(value("length of the virtio-net header", other)),
    };
    if !FRAME_LIMITS.contains(&body.frame_limit) {
        return Err(value("frame limit", body.frame_limit));
    }
    Ok(Request::Activate {
        queue: body.queue,
        conf: QueueConf {
            virtio_header,
            frame_limit: body.frame_limit,
        },
    })
}

impl Answer {
    /// The message, with the serial number of the request, or 0.
    #[must_use]
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        match self {
            Self::Done => message(kind::DONE, serial, &[0u8; 0]),
            Self::Facts(facts) => message(kind::THESE_FACTS, serial, &facts.body()),
            Self::Counters(counters) => {
                let values = counters.named().map(|(_, value)| value);
                message(kind::THESE_COUNTERS, serial, &values)
            }
            Self::Refused(refusal) => message(
                kind::REFUSED,
                serial,
                &RefusedBody {
                    reason: refusal.reason as u32,
                    zero: 0,
                    text: field(&refusal.text),
                },
            ),
            Self::Changed(facts) => message(kind::CHANGED, serial, &facts.body()),
            Self::Lease(listed) => message(kind::LISTED, serial, &listed.body()),
        }
    }

    /// Reads a message of a steward: the serial number of the request, or 0, and the answer.
    ///
    /// # Errors
    /// [`Malformed`], for anything that [`Answer::encode`] does not make.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), Malformed> {
        let (head, body) = split(bytes)?;
        let kind = head.kind;
        let answer = match kind {
            kind::DONE => read::<[u8; 0]>(kind, body).map(|_| Self::Done)?,
            kind::THESE_FACTS => Self::Facts(Facts::read(&read(kind, body)?)?),
            kind::THESE_COUNTERS => Self::Counters(counters(read(kind, body)?)),
            kind::REFUSED => Self::Refused(refusal(&read(kind, body)?)?),
            kind::CHANGED => Self::Changed(Facts::read(&read(kind, body)?)?),
            kind::LISTED => Self::Lease(Listed::read(&read(kind, body)?)?),
            other => return Err(Malformed::Kind(other)),
        };
        Ok((head.serial, answer))
    }
}

fn counters([redirected, passed, too_long, no_header_room, no_socket, not_ours]: [u64; 6]) -> QueueCounters {
    let mut counters = QueueCounters::default();
    counters.redirected = redirected;
    counters.passed = passed;
    counters.too_long = too_long;
    counters.no_header_room = no_header_room;
    counters.no_socket = no_socket;
    counters.not_ours = not_ours;
    counters
}

fn refusal(body: &RefusedBody) -> Result<Refusal, Malformed> {
    zero(u64::from(body.zero))?;
    let reason = Reason::from_code(body.reason).ok_or_else(|| value("reason of a refusal", body.reason))?;
    Ok(Refusal::new(reason, text("refusal", &body.text)?))
}

impl Facts {
    fn body(&self) -> FactsBody {
        FactsBody {
            ifindex: self.ifindex,
            mtu: self.mtu,
            rx_queues: self.rx_queues,
            program: self.program,
            generation: self.generation,
            mode: match self.mode {
                None => 0,
                Some(Mode::Native) => 1,
                Some(Mode::Skb) => 2,
            },
            flags: flags_of([
                (self.up, FLAG_UP),
                (self.sends.checksum, FLAG_CHECKSUM),
                (self.partial_checksums, FLAG_PARTIAL),
                (self.impaired, FLAG_IMPAIRED),
            ]),
            most_pieces: u32::try_from(self.sends.most_pieces).unwrap_or(u32::MAX),
            name: field(&self.name),
            mac: self.mac,
            zero: [0; 6],
            steered: self.steered as u32,
            note: field(&self.note),
            steering: field(&self.steering),
        }
    }

    fn read(body: &FactsBody) -> Result<Self, Malformed> {
        body.zero.iter().try_for_each(|&byte| zero(byte.into()))?;
        if body.flags & !(FLAG_UP | FLAG_CHECKSUM | FLAG_PARTIAL | FLAG_IMPAIRED) != 0 {
            return Err(value("flags of an interface", body.flags));
        }
        Ok(Self {
            ifindex: body.ifindex,
            name: interface_name(&body.name)?,
            mtu: body.mtu,
            mac: body.mac,
            rx_queues: body.rx_queues,
            up: body.flags & FLAG_UP != 0,
            partial_checksums: body.flags & FLAG_PARTIAL != 0,
            sends: DriverSends {
                checksum: body.flags & FLAG_CHECKSUM != 0,
                most_pieces: body.most_pieces as usize,
            },
            mode: match body.mode {
                0 => None,
                1 => Some(Mode::Native),
                2 => Some(Mode::Skb),
                other => return Err(value("mode", other)),
            },
            program: body.program,
            generation: body.generation,
            steered: steered(body.steered)?,
            impaired: body.flags & FLAG_IMPAIRED != 0,
            note: text("note", &body.note)?,
            steering: text("note on steering", &body.steering)?,
        })
    }
}

pub(crate) fn steered(number: u32) -> Result<Steered, Malformed> {
    let known = Steered::ALL.into_iter().find(|&steered| steered as u32 == number);
    known.ok_or_else(|| value("way of steering", number))
}

/// The flags that hold.
pub(crate) fn flags_of<const N: usize>(flags: [(bool, u32); N]) -> u32 {
    flags
        .into_iter()
        .filter_map(|(holds, flag)| holds.then_some(flag))
        .sum()
}

fn message(kind: u16, serial: u32, body: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    let head = Head {
        version: VERSION,
        kind,
        serial,
    };
    [head.as_bytes(), body.as_bytes()].concat()
}

fn split(bytes: &[u8]) -> Result<(Head, &[u8]), Malformed> {
    let (head, body) = Head::read_from_prefix(bytes).map_err(|_| Malformed::Short(bytes.len()))?;
    match head.version {
        VERSION => Ok((head, body)),
        other => Err(Malformed::Version(other)),
    }
}

fn read<T: FromBytes>(kind: u16, body: &[u8]) -> Result<T, Malformed> {
    let got = body.len();
    T::read_from_bytes(body).map_err(|_| Malformed::Length { kind, got })
}

pub(crate) fn value(field: &'static str, value: u32) -> Malformed {
    Malformed::Value {
        field,
        value: value.into(),
    }
}

pub(crate) fn zero(value: u64) -> Result<(), Malformed> {
    match value {
        0 => Ok(()),
        value => Err(Malformed::Value {
            field: "a field that must be zero",
            value,
        }),
    }
}

/// Text in a field of fixed length, cut where a character ends if it is too long.
pub(crate) fn field<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let len = (0..=text.len().min(N))
        .rev()
        .find(|&len| text.is_char_boundary(len))
        .unwrap_or(0);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

/// Text of a field: what is before the first zero, after which there are only zeros.
fn text(name: &'static str, field: &[u8]) -> Result<String, Malformed> {
    let len = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let (bytes, rest) = field.split_at(len);
    if rest.iter().any(|&byte| byte != 0) {
        return Err(Malformed::Text(name));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| Malformed::Text(name))?;
    match text.chars().any(char::is_control) {
        true => Err(Malformed::Text(name)),
        false => Ok(text.to_owned()),
    }
}

/// A name that an interface can have (`dev_valid_name`, net/core/dev.c).
pub(crate) fn interface_name(field: &[u8; NAME_BYTES]) -> Result<String, Malformed> {
    let name = text("name of an interface", field)?;
    let possible = (1..NAME_BYTES).contains(&name.len())
        && !matches!(name.as_str(), "." | "..")
        && !name.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace());
    match possible {
        true => Ok(name),
        false => Err(Malformed::Text("name of an interface")),
    }
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;
