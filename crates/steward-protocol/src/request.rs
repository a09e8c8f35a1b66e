//! Requests of a lessee, and their messages.

use std::ops::Range;

use steer::{Filter, LAST_VLAN, ModeRequest, QueueConf, Station, VirtioHeader};

use super::advertised::{ADDRESSES, AddressChange};
use super::hints::HintRequest;
use super::listed::{MACS, VLANS};
use super::netkit::NetkitWanted;
use super::part::{Part, check_parts};
use super::stations::{Changes, StationChange};
use super::tunnel::{VTEPS, VtepChange};
use super::wire::{
    Body, Checked, Codec, Fields, Flag, Io, List, Name, Wire, count, enumeration, messages, value, wire,
};
use super::zcrx::{ZcrxRings, ZcrxWanted};
use super::{
    BIND_FLAGS, BIND_WAIT_MAX, FRAME_LIMITS, Malformed, PARTS_MAX, QUEUES_MAX, RING_MAX, SHARES_MAX,
    TAP_QUEUES_MAX, Token, UMEM_FLAGS, message, split,
};

/// A request of a lessee.
///
/// `queue` is the number of a queue of the lease.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum Request {
    /// A lease of queues. At most one for each connection.
    Lease(Wanted),
    /// Registers memory and rings of another socket for a queue of the lease; [`Request::Bind`] binds it. The queue's
    /// frames continue as before. The message carries one descriptor for each part of the memory.
    Register {
        queue: u32,
        /// The memory of the socket.
        umem: UmemLayout,
        /// The rings of the socket.
        rings: Rings,
    },
    /// Binds the socket that was registered last; frames continue as before until [`Request::Activate`].
    Bind {
        queue: u32,
        /// Some of [`BIND_FLAGS`].
        flags: u32,
        /// How long it is tried again while the queue is busy, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
    },
    /// Makes another socket for a queue of the lease, with its own rings and the memory of a socket that the steward
    /// bound before for the same user, for any queue of any of its leases. The message carries that socket's
    /// descriptor. The new socket is bound with the same flags; frames continue as before until [`Request::Activate`].
    Share {
        queue: u32,
        /// How long it is tried again while the queue is busy, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
        /// `SO_COOKIE` of the socket whose descriptor the message carries.
        cookie: u64,
        /// The rings of the new socket.
        rings: Rings,
    },
    /// Answered once no socket has the queue: then the kernel has taken the memory of the last socket from the driver,
    /// which happens some time after that socket is closed.
    Await {
        queue: u32,
        /// Time limit, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
    },
    /// Sends the queue's frames to the socket that was bound last, from now on.
    Activate {
        queue: u32,
        /// How frames are treated; the frame limit is in [`FRAME_LIMITS`].
        conf: QueueConf,
    },
    /// Sends the queue's frames to the host, from now on.
    Deactivate { queue: u32 },
    /// The program's counters of the queue.
    Counters { queue: u32 },
    /// Facts about the interface.
    Facts,
    /// Keeps the lease when the steward's process ends.
    Keep {
        /// The lessee resumes the lease with it.
        token: Token,
    },
    /// Resumes a kept lease by a connection that has none. The queues continue meanwhile, and the lessee keeps its
    /// sockets.
    Resume {
        /// As given with [`Request::Keep`].
        token: Token,
    },
    /// Changes stations of the network that the lease is for; other stations stay as they are. At most
    /// [`CHANGES_MAX`](super::CHANGES_MAX), each station once; a lease has [`STATIONS_MAX`](super::STATIONS_MAX) at
    /// most. All are checked before any is changed.
    Stations {
        /// The changes.
        changes: Vec<StationChange>,
    },
    /// Asks for the ring with the network's multicast and broadcast frames; see [`steer::MulticastReader`].
    Groups,
    /// Asks for a tap device between the network and the host; see [`HostEnd`](super::HostEnd). The device's descriptor
    /// comes with the answer if the steward made the device for this request: because there was none, or not the one
    /// that the lessee has. The device ends with the lease.
    Host {
        /// Index of the device whose descriptor the lessee has; 0: of none.
        has: u32,
    },
    /// Asks for a tap device between the network and the interface, for a lease of [`ModeRequest::Tap`]. The device
    /// receives the interface's frames to stations of the network, and copies of multicast frames; if the lease is not
    /// for a network, the frames of the lease. The interface sends the frames that are written to the device. If a lessee
    /// writes guests' ARP requests and neighbour solicitations to this device, it writes each to that of
    /// [`Request::Host`], too: while the network advertises addresses, a bridge gets those, and may answer or send them.
    /// The answer is that of [`Request::Host`], without addresses and bridge.
    Uplink {
        /// Index of the device whose descriptors the lessee has; 0: of none.
        has: u32,
        /// Number of queues of a new device, 1 to [`TAP_QUEUES_MAX`], and no more than the lease has. The answer
        /// has as many descriptors.
        queues: u32,
    },
    /// Lists stations behind the bridge that the interface of the network is part of, in order: at most
    /// [`CHANGES_MAX`](super::CHANGES_MAX) that follow `after`. Only after [`Request::Host`].
    Behind {
        /// Zeros: start with the first station.
        after: Station,
    },
    /// Changes the addresses of guests that the network advertises to other hosts. Only after [`Request::Host`], and if
    /// the interface is a tunnel that is a port of a bridge. Changes before one that fails stay.
    Advertise {
        /// The changes.
        changes: Vec<AddressChange>,
    },
    /// Has the program of a network's lease in XDP mode decapsulate frames that arrive for a tunnel device and are to
    /// stations of the network, which other networks in tunnels may have, too; frames that it does not take go to the
    /// device as before. If a VLAN device on the interface has the local address, packets have its tag. A network that
    /// had no tunnel loses its stations. The answer is `Done` with two rtnetlink sockets in the interface's network
    /// namespace: the lessee reads the device's forwarding database, routes and neighbours by them, and cannot change
    /// anything (the kernel checks the sender's capabilities). A lessee requests it again when the steward reports a
    /// change.
    Tunnel {
        /// 0: the lease's network; up to [`SHARES_MAX`](super::SHARES_MAX): another network that shares its queues, and
        /// begins with this request. The lease's network has to have a tunnel then.
        share: u32,
        /// Name of the device (VXLAN, Geneve).
        device: String,
    },
    /// [`Request::Stations`] of a network that shares the queues of the lease, or of the lease's.
    TunnelStations {
        /// As in [`Request::Tunnel`].
        share: u32,
        /// The changes.
        changes: Vec<StationChange>,
    },
    /// Changes the hosts (VTEPs) from which the program takes packets of the tunnel, at most
    /// [`VTEPS_MAX`](super::VTEPS_MAX) for a network; after [`Request::Tunnel`] there are none. Packets of others go to the
    /// kernel. Refused for a tunnel of Geneve: it has the device's remote, and no other.
    Vteps {
        /// As in [`Request::Tunnel`].
        share: u32,
        /// The changes.
        changes: Vec<VtepChange>,
    },
    /// Has the program drop packets for the tunnel from hosts that it takes none from, until [`Request::Tunnel`]. Without
    /// effect on a tunnel of Geneve: such packets may be for another device with its VNI.
    DropUnknown {
        /// As in [`Request::Tunnel`].
        share: u32,
    },
    /// Sets the hints that the lease's queues request, from now on. Without a lease: for the lease that this connection
    /// requests or resumes later.
    Hints(HintRequest),
    /// A lease of a queue for io_uring zero-copy receive, instead of [`Request::Lease`].
    Zcrx(ZcrxWanted),
    /// Registers that queue, once. The message carries the descriptor of the memory.
    ZcrxRegister(ZcrxRings),
    /// Leases the only queue of the lease on to a new netkit. The message may carry the descriptor of the network
    /// namespace for it; without one the netkit stays in the steward's. A second request for the lease has no effect
    /// and gets the answer of the first, unless the netkit is gone.
    Netkit(NetkitWanted),
    /// Asks for a tap device whose frames the interface of the lease sends from this queue; see
    /// [`SendTapEnd`](super::SendTapEnd). The answer has its descriptor. Each queue has one at most: a second request
    /// is refused while a process has the first one's descriptor.
    SendTap {
        queue: u32,
        /// If the NIC has no TSO, no tap is made, and the answer is `Done`.
        only_with_tso: bool,
    },
    /// Asks for the first lease with a higher number: of the same user or, for root, of any. It needs no lease.
    Leases {
        /// Number of the last lease received; 0 at first.
        after: u64,
    },
}

/// Memory for frames, as `struct xdp_umem_reg` describes it (include/uapi/linux/if_xdp.h).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UmemLayout {
    /// Consecutive parts, 1 to [`PARTS_MAX`].
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
    /// Total size, bytes.
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
    /// How to attach the program.
    pub mode: ModeRequest,
    /// Which frames the lessee receives, if not all of the queues': at most [`ENTRIES_MAX`] addresses and VLANs. If the
    /// NIC can and the policy names them, it steers such frames to these queues. Other frames of the queues go to the
    /// host.
    pub filter: Filter,
    /// The queues are for a network: they receive only frames to its stations, which [`Request::Stations`] sets, and
    /// copies of multicast frames. The filter is empty then.
    pub network: bool,
}

impl Wanted {
    /// The queues.
    pub fn range(&self) -> Range<u32> {
        self.start_queue..self.start_queue.saturating_add(self.queues)
    }

    /// The same with another mode.
    #[must_use]
    pub fn in_mode(&self, mode: ModeRequest) -> Self {
        Self { mode, ..self.clone() }
    }
}

const SHARE: Checked = Checked(|share| share <= SHARES_MAX, "number of a network");
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
        24 => Advertise { changes: ADDRESSES };
        28 => DropUnknown { share: SHARE };
        29 => TunnelStations { share: SHARE, changes: Changes };
        // In earlier versions 25 and 30 were `Tunnel`, without `share` and without VLANs, and 27 `Vteps` without `share`.
        31 => Vteps { share: SHARE, changes: VTEPS };
        32 => Tunnel { share: SHARE, device: Name };
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

    /// Writes requests whose fields are not one after the other, or that have two kinds.
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

/// Value of the virtio-net header length that means hints; frames with a header have no hints.
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
