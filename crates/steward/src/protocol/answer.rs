//! What a steward says: as a value, and as a message.

use steer::{Mode, QueueCounters, Station};
use xsk::NumaNode;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::field::{NAME_BYTES, enumerated, field, flags_of, interface_name, text, value, zero};
use super::hints::Hinted;
use super::listed::{Listed, Steered};
use super::netkit::NetkitEnd;
use super::zcrx::ZcrxRegistered;
use super::{HostEnd, Malformed, SendTapEnd, host, kind, message, read, split};
use crate::links::DriverSends;

/// Of a driver's name (ETHTOOL_BUSINFO_LEN, include/uapi/linux/ethtool.h).
const DRIVER_BYTES: usize = 32;
const NOTE_BYTES: usize = 240;
/// Longest text on how frames come, bytes; more is cut.
pub(crate) const STEERING_BYTES: usize = 504;
const REFUSAL_BYTES: usize = 480;

/// What a steward says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Done,
    /// The interface of the lease.
    Facts(Facts),
    /// Counters of a queue.
    Counters(QueueCounters),
    /// How the network reaches the host.
    Host(HostEnd),
    /// Stations behind the bridge that the uplink is part of. By itself, with none: they are others now.
    Behind(Vec<Station>),
    /// What stands before frames. Also by itself, to who asked.
    Hinted(Hinted),
    /// A queue is registered for zero-copy receive.
    ZcrxRegistered(ZcrxRegistered),
    /// The netkit that has the lease's queue. The map for its socket comes along.
    Netkit(NetkitEnd),
    /// A tap device by which GSO packets leave whole. Its descriptor comes along.
    SendTap(SendTapEnd),
    /// Not done.
    Refused(Refusal),
    /// The interface of the lease is now like this; never an answer to a request.
    Changed(Facts),
    /// A lease of any lessee.
    Lease(Listed),
    /// The kernel did not do a step of what a socket needs; a lessee may try otherwise.
    Failed {
        /// Which.
        step: Step,
        /// The kernel's answer (errno(3)).
        errno: u32,
    },
}

/// What is done for a socket, or for a netkit, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Step {
    /// The files of its memory are looked at and mapped.
    Map = 1,
    /// The memory is registered (`XDP_UMEM_REG`).
    Register = 2,
    /// Its rings are made.
    Rings = 3,
    /// It is bound.
    Bind = 4,
    /// It is closed, and nobody has its queue any more.
    Await = 5,
    /// The socket whose memory it is to have is looked at.
    Share = 6,
    /// A ring of io_uring is taken from its owner.
    Ring = 7,
    /// The queue is registered with that ring.
    Queue = 8,
    /// The further rings have it, too.
    ShareQueue = 9,
    /// The network namespace for a netkit is looked at.
    Namespace = 10,
    /// The netkit goes there, has its name, and is up.
    Netkit = 11,
}

impl Step {
    /// In words, with what may be amiss.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            Self::Map => {
                "the memory cannot be mapped by the steward (it has to be of memfd_create, tmpfs or hugetlbfs; QEMU: \
                 memory-backend-memfd, or memory-backend-file below /dev/shm or /dev/hugepages)"
            }
            Self::Register => "the memory cannot be registered (XDP_UMEM_REG)",
            Self::Rings => "the rings cannot be made",
            Self::Bind => "the socket cannot be bound to the queue",
            Self::Share => "the socket whose memory is to be shared is not the one that was named",
            Self::Ring => "the ring cannot be taken from the process that has connected",
            Self::Queue => "the queue cannot be registered for zero-copy receive",
            Self::ShareQueue => "the queue cannot be shared with further rings (Linux 7.1)",
            Self::Namespace => "the descriptor is not of a network namespace that this user may use",
            Self::Netkit => "the netkit cannot be moved, named or set up",
            Self::Await => "the queue does not become free, though its socket is closed",
        }
    }
}

/// What a lessee must know of the interface, and cannot ask the kernel if it lives in another network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
    /// Name of the driver; empty if it is not known. Cut to 32 bytes.
    pub driver: String,
    /// Administratively up.
    pub up: bool,
    /// Its local senders leave partial checksums, as those of a veth do.
    pub partial_checksums: bool,
    /// Tags of VLANs are taken off before XDP sees frames: stations of VLANs cannot be told.
    pub strips_tags: bool,
    /// Frames for the lessee may be lost: [`steering`](Self::steering) says where, with the remedy.
    pub loses: bool,
    /// NUMA node of its device, if it is on one and that is known.
    pub node: Option<NumaNode>,
    /// An IOMMU translates for its device.
    pub translated: bool,
    /// How the program is attached; `None`: it is not, the lease is impaired, and [`note`](Self::note) says why.
    pub mode: Option<Mode>,
    /// The kernel's id of the program; 0 if there is none.
    pub program: u32,
    /// What the driver does for sockets in zero-copy mode.
    pub sends: DriverSends,
    /// Changes whenever the program was attached again, and all sockets are to be asked for again.
    pub generation: u32,
    /// How frames come to the queues of the lease.
    pub steered: Steered,
    /// Frames do not come although they should: the interface is gone or down, or lacks a queue of the lease. It goes
    /// on by itself when that is over.
    pub impaired: bool,
    /// Why the lease is impaired, or why the program is not attached natively; else empty. Cut to 240 bytes.
    pub note: String,
    /// Why frames do not come in a better way, or what of them is not seen; else empty. Cut to 184 bytes.
    pub steering: String,
}

/// Why a request was refused, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Reason {
    /// The message broke the rules; the connection is over.
    Malformed = 1,
    /// The policy has no rule for it.
    NotAllowed = 2,
    /// Another lease has a queue of it.
    Taken = 3,
    /// No such interface, no such queue, or none that could have the lease.
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
    /// No memory was registered for the queue, or another steward had it.
    Unregistered = 11,
    /// The NIC, or its driver, cannot do it, or is not set up for it.
    Nic = 12,
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
    /// Its number and one; 0: none.
    node: u16,
    zero: [u8; 4],
    steered: u32,
    driver: [u8; DRIVER_BYTES],
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
/// The driver may grant zero-copy.
const FLAG_ZERO_COPY: u32 = 16;
/// An IOMMU translates for the device.
const FLAG_TRANSLATED: u32 = 32;
/// Tags of VLANs are taken off.
const FLAG_STRIPS_TAGS: u32 = 64;
/// Frames for the lessee may be lost.
const FLAG_LOSES: u32 = 128;
const FLAGS: u32 = FLAG_UP
    | FLAG_CHECKSUM
    | FLAG_PARTIAL
    | FLAG_IMPAIRED
    | FLAG_ZERO_COPY
    | FLAG_TRANSLATED
    | FLAG_STRIPS_TAGS
    | FLAG_LOSES;

const _: () = assert!(size_of::<FactsBody>() == 840 && size_of::<RefusedBody>() == 488);

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
            Self::Host(host) => message(kind::THIS_HOST, serial, &host.body()),
            Self::Behind(stations) => message(kind::THESE_BEHIND, serial, &host::behind(stations)),
            Self::ZcrxRegistered(registered) => message(kind::ZCRX_REGISTERED, serial, &registered.body()),
            Self::Netkit(netkit) => message(kind::THIS_NETKIT, serial, &netkit.body()),
            Self::SendTap(tap) => message(kind::THIS_SEND_TAP, serial, &tap.body()),
            Self::Hinted(hinted) => message(kind::HINTED, serial, &hinted.body()),
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
            &Self::Failed { step, errno } => message(kind::FAILED, serial, &[step as u32, errno]),
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
            kind::THIS_HOST => Self::Host(HostEnd::read(&read(kind, body)?)?),
            kind::THESE_BEHIND => Self::Behind(host::read_behind(&read(kind, body)?)?),
            kind::HINTED => Self::Hinted(Hinted::read(&read(kind, body)?)?),
            kind::THIS_NETKIT => Self::Netkit(NetkitEnd::read(&read(kind, body)?)?),
            kind::THIS_SEND_TAP => Self::SendTap(SendTapEnd::read(&read(kind, body)?)?),
            kind::ZCRX_REGISTERED => Self::ZcrxRegistered(ZcrxRegistered::read(&read(kind, body)?)?),
            kind::REFUSED => Self::Refused(refusal(&read(kind, body)?)?),
            kind::CHANGED => Self::Changed(Facts::read(&read(kind, body)?)?),
            kind::LISTED => Self::Lease(Listed::read(&read(kind, body)?)?),
            kind::FAILED => {
                let [step, errno] = read(kind, body)?;
                let step = enumerated("step", step)?;
                Self::Failed { step, errno }
            }
            other => return Err(Malformed::Kind(other)),
        };
        Ok((head.serial, answer))
    }
}

pub(super) fn counters(values: [u64; 9]) -> QueueCounters {
    let [
        redirected,
        passed,
        too_long,
        no_header_room,
        no_socket,
        not_ours,
        groups @ ..,
    ] = values;
    let mut counters = QueueCounters::default();
    counters.redirected = redirected;
    counters.passed = passed;
    counters.too_long = too_long;
    counters.no_header_room = no_header_room;
    counters.no_socket = no_socket;
    counters.not_ours = not_ours;
    [counters.group_copied, counters.group_limited, counters.group_lost] = groups;
    counters
}

fn refusal(body: &RefusedBody) -> Result<Refusal, Malformed> {
    zero(u64::from(body.zero))?;
    let reason: Reason = enumerated("reason of a refusal", body.reason)?;
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
                Some(Mode::Tap) => 3,
            },
            flags: flags_of([
                (self.up, FLAG_UP),
                (self.sends.checksum, FLAG_CHECKSUM),
                (self.partial_checksums, FLAG_PARTIAL),
                (self.impaired, FLAG_IMPAIRED),
                (self.sends.zero_copy, FLAG_ZERO_COPY),
                (self.translated, FLAG_TRANSLATED),
                (self.strips_tags, FLAG_STRIPS_TAGS),
                (self.loses, FLAG_LOSES),
            ]),
            most_pieces: u32::try_from(self.sends.most_pieces).unwrap_or(u32::MAX),
            name: field(&self.name),
            mac: self.mac,
            node: self.node.map_or(0, |node| node.number() + 1),
            zero: [0; 4],
            steered: self.steered as u32,
            driver: field(&self.driver),
            note: field(&self.note),
            steering: field(&self.steering),
        }
    }

    fn read(body: &FactsBody) -> Result<Self, Malformed> {
        body.zero.iter().try_for_each(|&byte| zero(byte.into()))?;
        if body.flags & !FLAGS != 0 {
            return Err(value("flags of an interface", body.flags));
        }
        Ok(Self {
            ifindex: body.ifindex,
            name: interface_name(&body.name)?,
            mtu: body.mtu,
            mac: body.mac,
            rx_queues: body.rx_queues,
            driver: text("name of a driver", &body.driver)?,
            up: body.flags & FLAG_UP != 0,
            partial_checksums: body.flags & FLAG_PARTIAL != 0,
            translated: body.flags & FLAG_TRANSLATED != 0,
            strips_tags: body.flags & FLAG_STRIPS_TAGS != 0,
            loses: body.flags & FLAG_LOSES != 0,
            node: match i32::from(body.node) {
                0 => None,
                beyond => {
                    let node = NumaNode::new(beyond - 1);
                    Some(node.ok_or_else(|| value("NUMA node", body.node.into()))?)
                }
            },
            sends: DriverSends {
                checksum: body.flags & FLAG_CHECKSUM != 0,
                zero_copy: body.flags & FLAG_ZERO_COPY != 0,
                most_pieces: body.most_pieces as usize,
            },
            mode: match body.mode {
                0 => None,
                1 => Some(Mode::Native),
                2 => Some(Mode::Skb),
                3 => Some(Mode::Tap),
                other => return Err(value("mode", other)),
            },
            program: body.program,
            generation: body.generation,
            steered: enumerated("way of steering", body.steered)?,
            impaired: body.flags & FLAG_IMPAIRED != 0,
            note: text("note", &body.note)?,
            steering: text("note on steering", &body.steering)?,
        })
    }
}
