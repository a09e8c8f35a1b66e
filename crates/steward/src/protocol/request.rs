//! Requests of a lessee, and their messages.

use std::ops::Range;

use steer::{Filter, LAST_VLAN, ModeRequest, QueueConf, Station, VirtioHeader};

use super::hints::HintRequest;
use super::listed::{MACS, VLANS};
use super::netkit::NetkitWanted;
use super::part::{Part, check_parts};
use super::stations::{Changes, StationChange};
use super::wire::{
    Body, Checked, Codec, Fields, Flag, Io, List, Name, Wire, count, enumeration, messages, value, wire,
};
use super::zcrx::{ZcrxRings, ZcrxWanted};
use super::{
    BIND_FLAGS, BIND_WAIT_MAX, FRAME_LIMITS, Malformed, PARTS_MAX, QUEUES_MAX, RING_MAX, TAP_QUEUES_MAX,
    Token, UMEM_FLAGS, message, split,
};

/// A request of a lessee.
///
/// `queue` is the number of one of the lease's.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum Request {
    /// A lease of queues. At most one for each connection.
    Lease(Wanted),
    /// Memory and rings of a further socket for a queue of the lease, which [`Request::Bind`] binds. The queue goes on
    /// as it does. One descriptor comes along for each part of the memory.
    Register {
        queue: u32,
        /// The memory of the socket.
        umem: UmemLayout,
        /// The same.
        rings: Rings,
    },
    /// The socket that was registered last, bound to its queue; frames continue as before until [`Request::Activate`].
    Bind {
        queue: u32,
        /// Some of [`BIND_FLAGS`].
        flags: u32,
        /// How long it is tried again while the queue is busy, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
    },
    /// A further socket for a queue of the lease, with rings of its own and the memory of a socket that the steward
    /// bound for the same user before, for any queue of any of its leases. That comes along as the one descriptor. The
    /// new one is bound as it is, in one step; frames continue as before until [`Request::Activate`].
    Share {
        queue: u32,
        /// How long it is tried again while the queue is busy, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
        /// Which socket comes along: its `SO_COOKIE`.
        cookie: u64,
        /// The rings of the new socket.
        rings: Rings,
    },
    /// Once no socket has the queue: the kernel has then taken the memory of the last one from the driver, which it
    /// does some time after that is closed.
    Await {
        queue: u32,
        /// Time limit, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
    },
    /// From now on frames go to the queue's last socket.
    Activate {
        queue: u32,
        /// How frames are treated; the frame limit is in [`FRAME_LIMITS`].
        conf: QueueConf,
    },
    /// From now on the queue's frames go to the host.
    Deactivate { queue: u32 },
    /// The program's counters of the queue.
    Counters { queue: u32 },
    /// Facts about the interface.
    Facts,
    /// The lease is to outlive the steward's process.
    Keep {
        /// The lessee comes back with it.
        token: Token,
    },
    /// The lease that was kept, for a connection that has none. Its queues go on meanwhile; the sockets are those that
    /// the lessee has.
    Resume {
        /// As given with [`Request::Keep`].
        token: Token,
    },
    /// Stations of the network that the lease is for: these change, others stay as they are. At most
    /// [`CHANGES_MAX`](super::CHANGES_MAX), each station once; a lease has [`STATIONS_MAX`](super::STATIONS_MAX) at
    /// most. All are judged before any is changed.
    Stations {
        /// The changes.
        changes: Vec<StationChange>,
    },
    /// The ring with the frames to groups of stations that come to the network; see [`steer::MulticastReader`].
    Groups,
    /// Asks for a tap device between the network and the host; see [`HostEnd`](super::HostEnd). The device's descriptor
    /// comes with the answer if the steward made the device for this request: because there was none, or not the one
    /// that the lessee has. The device ends with the lease.
    Host {
        /// Index of the device whose descriptor the lessee has; 0: of none.
        has: u32,
    },
    /// Asks for a tap device between the network and the interface, for a lease of [`ModeRequest::Tap`]. The device
    /// receives the interface's frames to stations of the network, and copies of its frames to groups; of a lease that
    /// is of no network, the frames that its queues take. Frames written to the device leave by the interface. The
    /// answer is that of [`Request::Host`], without addresses and bridge. For several queues, but without a lease, the
    /// answer is `Done`: so clients find out whether the steward knows the message.
    Uplink {
        /// Index of the device whose descriptors the lessee has; 0: of none.
        has: u32,
        /// Queues of a device that is made for this, 1 to [`TAP_QUEUES_MAX`], and no more than the lease has. The
        /// answer has as many descriptors.
        queues: u32,
    },
    /// Stations behind the bridge that the interface of the network is part of, in order: at most
    /// [`CHANGES_MAX`](super::CHANGES_MAX) that come after this one. Only after [`Request::Host`].
    Behind {
        /// With zeros: from the first one on.
        after: Station,
    },
    /// The hints that the lease's queues are to have, from now on. Without a lease: of that which this connection asks
    /// for or comes back to.
    Hints(HintRequest),
    /// A lease of a queue for io_uring zero-copy receive, instead of [`Request::Lease`].
    Zcrx(ZcrxWanted),
    /// Registers that queue, once. The memory comes as the one descriptor with the message.
    ZcrxRegister(ZcrxRings),
    /// A netkit to which the queue of the lease, which has one, is leased in turn. The descriptor of the network
    /// namespace that it is to be in comes along; without, it is in the steward's. Once: a second one for the lease has
    /// the answer of the first, and no effect.
    Netkit(NetkitWanted),
    /// A tap device whose frames leave the interface of the lease from this queue; see
    /// [`SendTapEnd`](super::SendTapEnd). Its descriptor comes with the answer. There is one for each queue: a second
    /// request is refused while somebody has the first one's. Without a lease the answer is `Done`: so clients find
    /// out whether the steward knows the message.
    SendTap {
        queue: u32,
        /// If the NIC has no TSO there is none, and the answer is `Done`.
        only_with_tso: bool,
    },
    /// The first lease with a higher number, of any lessee. The connection needs no lease.
    Leases {
        /// Of the last lease that is known; 0 at first.
        after: u64,
    },
}

/// Memory that frames lie in, as `struct xdp_umem_reg` describes it (include/uapi/linux/if_xdp.h).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UmemLayout {
    /// One after the other, at least one and at most [`PARTS_MAX`].
    pub parts: Vec<Part>,
    /// Size of a chunk, bytes.
    pub chunk_bytes: u32,
    /// Room before each received frame, bytes, in addition to the kernel's own.
    pub headroom_bytes: u32,
    /// Room for metadata before each frame that is sent, bytes.
    pub tx_metadata_bytes: u32,
    /// Some of [`UMEM_FLAGS`].
    pub flags: u32,
}

impl UmemLayout {
    /// All of it, bytes.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }
}

/// Entries of a socket's rings: powers of two, at most [`RING_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the kernel's documentation of AF_XDP")]
pub struct Rings {
    pub fill: u32,
    pub completion: u32,
    pub rx: u32,
    pub tx: u32,
}

/// The lease that a lessee wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Name of the interface.
    pub interface: String,
    /// First queue.
    pub start_queue: u32,
    /// Number of queues, 1 to [`QUEUES_MAX`].
    pub queues: u32,
    /// How the program is to be attached.
    pub mode: ModeRequest,
    /// Which frames are to come, if not all of the queues': at most [`ENTRIES_MAX`] addresses and VLANs. The NIC is
    /// asked to bring such frames to these queues, where it can and the policy names them; what else comes to the
    /// queues goes to the host.
    pub filter: Filter,
    /// The queues are those of a network: only frames to its stations come, which [`Request::Stations`] names, and
    /// copies of frames to groups. There is no filter then.
    pub network: bool,
}

impl Wanted {
    /// The queues.
    pub fn range(&self) -> Range<u32> {
        self.start_queue..self.start_queue.saturating_add(self.queues)
    }

    /// The same in that mode.
    #[must_use]
    pub fn in_mode(&self, mode: ModeRequest) -> Self {
        Self { mode, ..self.clone() }
    }
}

const WAIT: Checked = Checked(|ms| ms <= BIND_WAIT_MAX, "milliseconds to wait for a queue");
const FLAGS_OF_BIND: Checked = Checked(|flags| flags & !BIND_FLAGS == 0, "flags of a bind");
const FLAGS_OF_UMEM: Checked = Checked(|flags| flags & !UMEM_FLAGS == 0, "flags of memory");
const SEVERAL_QUEUES: Checked = Checked(
    |queues| (2..=TAP_QUEUES_MAX as u32).contains(&queues),
    "number of queues of a tap",
);
const QUEUES: Checked = Checked(|queues| (1..=QUEUES_MAX).contains(&queues), "number of queues");
const ENTRIES: Checked = Checked(
    |entries| entries.is_power_of_two() && entries <= RING_MAX,
    "entries of a ring",
);
const FRAME_LIMIT: Checked = Checked(|limit| FRAME_LIMITS.contains(&limit), "frame limit");
const PARTS: List = List::new(PARTS_MAX, 16, "parts of memory").filled();

messages! {
    Request {
        1 => Lease(wanted);
        3 => Activate { queue, conf };
        4 => Deactivate { queue };
        5 => Bind { queue, flags: FLAGS_OF_BIND, wait_ms: WAIT };
        6 => Counters { queue };
        7 => Facts;
        8 => Keep { token };
        9 => Resume { token };
        10 => Await { queue, wait_ms: WAIT };
        11 => Share { queue, wait_ms: WAIT, cookie, rings };
        12 => Stations { changes: Changes };
        13 => Groups;
        14 => Host { has };
        15 => Behind { after };
        16 => Leases { after };
        17 => Hints(wanted);
        18 => Zcrx(wanted);
        19 => ZcrxRegister(rings);
        20 => Netkit(wanted);
        21 => SendTap { queue, only_with_tso: Flag };
    } else Self::read_other, Self::write_other
}

impl Request {
    /// The message, with this serial number.
    #[must_use]
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        message(serial, |to| self.write(to))
    }

    /// Reads a message of a lessee: its serial number and the request.
    ///
    /// # Errors
    /// [`Malformed`], for anything that [`Request::encode`] does not write.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), Malformed> {
        let (head, mut body) = split(bytes)?;
        if head.serial == 0 {
            return Err(Malformed::Serial);
        }
        let request = Self::read(head.kind, &mut body)?;
        body.end()?;
        Ok((head.serial, request))
    }

    /// Whether it takes long or has descriptors: a child does it.
    pub(crate) fn is_for_job(&self) -> bool {
        matches!(self, Self::Bind { .. } | Self::Await { .. }) || self.may_have_files()
    }

    /// Whether files come with it.
    pub(crate) fn may_have_files(&self) -> bool {
        matches!(
            self,
            Self::Register { .. } | Self::Share { .. } | Self::ZcrxRegister(_) | Self::Netkit(_)
        )
    }

    /// Requests whose fields are not one after the other, or that have two kinds.
    fn write_other(&self, to: &mut Vec<u8>) -> u16 {
        match self {
            Self::Register { queue, umem, rings } => {
                [*queue, count(&umem.parts), umem.chunk_bytes].write(to);
                [umem.headroom_bytes, umem.tx_metadata_bytes, umem.flags].write(to);
                rings.write(to);
                PARTS.write_elements(&umem.parts, to);
                2
            }
            Self::Uplink { has, queues: 1 } => {
                has.write(to);
                22
            }
            Self::Uplink { has, queues } => {
                [*has, *queues].write(to);
                23
            }
            // The table has all others.
            _ => unreachable!("{self:?}"),
        }
    }

    fn read_other(kind: u16, from: &mut Body<'_>) -> Result<Self, Malformed> {
        match kind {
            2 => {
                let [queue, count, chunk_bytes] = from.next()?;
                let [headroom_bytes, tx_metadata_bytes] = from.next()?;
                let (flags, rings) = (FLAGS_OF_UMEM.read(from)?, from.next()?);
                let parts: Vec<Part> = PARTS.read_elements(count, from)?;
                check_parts(&parts)?;
                let umem = UmemLayout {
                    parts,
                    chunk_bytes,
                    headroom_bytes,
                    tx_metadata_bytes,
                    flags,
                };
                Ok(Self::Register { queue, umem, rings })
            }
            22 => Ok(Self::Uplink {
                has: from.next()?,
                queues: 1,
            }),
            23 => Ok(Self::Uplink {
                has: from.next()?,
                queues: SEVERAL_QUEUES.read(from)?,
            }),
            other => Err(Malformed::Kind(other)),
        }
    }
}

enumeration!(ModeRequest, "mode");

wire!(Rings {
    fill: ENTRIES,
    completion: ENTRIES,
    rx: ENTRIES,
    tx: ENTRIES
});

impl Fields for Wanted {
    fn fields(&mut self, io: &mut Io<'_, '_>) -> Result<(), Malformed> {
        let Filter { macs, vlans } = &mut self.filter;
        io.by(&Name, &mut self.interface)?;
        io.plain(&mut self.start_queue)?;
        io.by(&QUEUES, &mut self.queues)?;
        io.plain(&mut self.mode)?;
        let mut counts = [count(macs), count(vlans)];
        io.plain(&mut counts)?;
        io.elements(MACS, counts[0], macs)?;
        io.elements(VLANS, counts[1], vlans)?;
        io.by(&Flag, &mut self.network)?;
        if self.start_queue.checked_add(self.queues).is_none() {
            return Err(value("first queue", self.start_queue));
        }
        // Bit 0 of the first byte: a multicast address (IEEE 802).
        if let Some(mac) = macs.iter().find(|mac| mac[0] & 1 != 0) {
            return Err(value("first byte of the address of one station", mac[0].into()));
        }
        if let Some(&vlan) = vlans.iter().find(|&&vlan| vlan > LAST_VLAN) {
            return Err(value("VLAN", vlan.into()));
        }
        match self.network && !self.filter.is_empty() {
            true => Err(Malformed::List("addresses and VLANs of a network")),
            false => Ok(()),
        }
    }
}

/// In the place of the length of a virtio-net header: hints, which frames with a header do not have.
const HINTS: u32 = 0x1_0000;

impl Wire for QueueConf {
    fn write(&self, to: &mut Vec<u8>) {
        let header_bytes = match self.virtio_header {
            Some(header) => header.len_bytes(),
            None if self.hints => HINTS,
            None => 0,
        };
        [header_bytes, self.frame_limit].write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let header_bytes = from.next()?;
        Ok(Self {
            virtio_header: match header_bytes {
                0 | HINTS => None,
                12 => Some(VirtioHeader::Basic),
                20 => Some(VirtioHeader::HashReport),
                other => return Err(value("length of the virtio-net header", other)),
            },
            frame_limit: FRAME_LIMIT.read(from)?,
            hints: header_bytes == HINTS,
        })
    }
}
