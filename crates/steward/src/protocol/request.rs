//! What a lessee asks for: as a value, and as a message.

use std::ops::Range;

use steer::{Filter, LAST_VLAN, ModeRequest, QueueConf, Station, VirtioHeader};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::field::{NAME_BYTES, field, interface_name, listed, mode_request, padded, value};
use super::hints::HintRequest;
use super::host::StationBody;
use super::netkit::NetkitWanted;
use super::part::{Part, check_parts};
use super::stations::{self, StationChange};
use super::zcrx::{ZcrxRings, ZcrxWanted};
use super::{
    BIND_FLAGS, BIND_WAIT_MAX, ENTRIES_MAX, FRAME_LIMITS, Head, MESSAGE_MAX, Malformed, PARTS_MAX,
    QUEUES_MAX, RING_MAX, TAP_QUEUES_MAX, Token, UMEM_FLAGS, kind, message, read, split,
};

/// What a lessee asks for.
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
        /// What the socket gets.
        umem: UmemLayout,
        /// The same.
        rings: Rings,
    },
    /// The socket that was registered last, bound to its queue; frames go on as before until [`Request::Activate`].
    Bind {
        queue: u32,
        /// Some of [`BIND_FLAGS`].
        flags: u32,
        /// How long it is tried again while the queue is busy, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
    },
    /// A further socket for a queue of the lease, with rings of its own and the memory of a socket that the steward
    /// bound for the same user before, for any queue of any of its leases. That comes along as the one descriptor. The
    /// new one is bound as it is, in one step; frames go on as before until [`Request::Activate`].
    Share {
        queue: u32,
        /// How long it is tried again while the queue is busy, milliseconds, at most [`BIND_WAIT_MAX`].
        wait_ms: u32,
        /// Which socket comes along: its `SO_COOKIE`.
        cookie: u64,
        /// What the new one gets.
        rings: Rings,
    },
    /// Once no socket has the queue: the kernel has then taken the memory of the last one from the driver, which it
    /// does some time after that is closed.
    Await {
        queue: u32,
        /// How long at most, milliseconds, at most [`BIND_WAIT_MAX`].
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
    /// What the program did with the queue's frames.
    Counters { queue: u32 },
    /// What is known of the interface.
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
        /// What changes.
        changes: Vec<StationChange>,
    },
    /// The ring with the frames to groups of stations that come to the network; see [`steer::GroupReader`].
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
    /// What that queue is registered with, once. The memory comes along as the one descriptor.
    ZcrxRegister(ZcrxRings),
    /// A netkit to which the queue of the lease, which has one, is leased in turn. The descriptor of the network
    /// namespace that it is to be in comes along; without, it is in the steward's. Once: a second one for the lease has
    /// the answer of the first, and no effect.
    Netkit(NetkitWanted),
    /// A tap device whose frames leave the interface of the lease from this queue; see
    /// [`SendTapEnd`](super::SendTapEnd). Its descriptor comes with the answer. There is one for each
    /// queue: a second request is refused while somebody has the first one's. Without a lease the answer is `Done`: so clients find out whether the steward knows the message.
    SendTap {
        queue: u32,
        /// If the NIC has no TSO there is none, and the answer is `Done`.
        only_with_tso: bool,
    },
    /// The first lease of a higher number, of any lessee. Who asks needs no lease.
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
    /// Room before each received frame, bytes, beside the kernel's own.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs, reason = "named as in the kernel's documentation of AF_XDP")]
pub struct Rings {
    pub fill: u32,
    pub completion: u32,
    pub rx: u32,
    pub tx: u32,
}

/// The lease that a lessee wants.
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
    network: u32,
}

impl LeaseBody {
    fn of(wanted: &Wanted) -> Self {
        Self {
            interface: field(&wanted.interface),
            start_queue: wanted.start_queue,
            queues: wanted.queues,
            mode: wanted.mode as u32,
            mac_count: wanted.filter.macs.len().try_into().unwrap_or(u32::MAX),
            vlan_count: wanted.filter.vlans.len().try_into().unwrap_or(u32::MAX),
            macs: padded(&wanted.filter.macs),
            vlans: padded(&wanted.filter.vlans),
            network: wanted.network.into(),
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ActivateBody {
    pub(super) queue: u32,
    pub(super) header_bytes: u32,
    pub(super) frame_limit: u32,
}

impl ActivateBody {
    fn of(queue: u32, conf: &QueueConf) -> Self {
        Self {
            queue,
            header_bytes: match conf.virtio_header {
                Some(header) => header.len_bytes(),
                None if conf.hints => HINTS,
                None => 0,
            },
            frame_limit: conf.frame_limit,
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RegisterBody {
    queue: u32,
    part_count: u32,
    chunk_bytes: u32,
    headroom_bytes: u32,
    tx_metadata_bytes: u32,
    flags: u32,
    rings: Rings,
    parts: [Part; PARTS_MAX],
}

impl RegisterBody {
    fn of(queue: u32, umem: &UmemLayout, rings: Rings) -> Self {
        Self {
            queue,
            part_count: umem.parts.len().try_into().unwrap_or(u32::MAX),
            chunk_bytes: umem.chunk_bytes,
            headroom_bytes: umem.headroom_bytes,
            tx_metadata_bytes: umem.tx_metadata_bytes,
            flags: umem.flags,
            rings,
            parts: padded(&umem.parts),
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ShareBody {
    queue: u32,
    wait_ms: u32,
    cookie: u64,
    rings: Rings,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct BindBody {
    queue: u32,
    flags: u32,
    wait_ms: u32,
}

const _: () = assert!(size_of::<LeaseBody>() == 168 && size_of::<ActivateBody>() == 12);
const _: () = assert!(size_of::<RegisterBody>() == 1080 && size_of::<BindBody>() == 12);
const _: () = assert!(size_of::<ShareBody>() == 32);
const _: () = assert!(size_of::<Head>() + size_of::<RegisterBody>() == MESSAGE_MAX);

/// In the place of a virtio-net header's length: hints, which no frame has beside one.
const HINTS: u32 = 0x1_0000;

impl Request {
    /// The message, with this serial number.
    #[must_use]
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        match self {
            Self::Lease(wanted) => message(kind::LEASE, serial, &LeaseBody::of(wanted)),
            Self::Register { queue, umem, rings } => {
                message(kind::REGISTER, serial, &RegisterBody::of(*queue, umem, *rings))
            }
            &Self::Bind {
                queue,
                flags,
                wait_ms,
            } => {
                let body = BindBody {
                    queue,
                    flags,
                    wait_ms,
                };
                message(kind::BIND, serial, &body)
            }
            &Self::Share {
                queue,
                wait_ms,
                cookie,
                rings,
            } => {
                let body = ShareBody {
                    queue,
                    wait_ms,
                    cookie,
                    rings,
                };
                message(kind::SHARE, serial, &body)
            }
            &Self::Await { queue, wait_ms } => message(kind::AWAIT, serial, &[queue, wait_ms]),
            Self::Activate { queue, conf } => {
                message(kind::ACTIVATE, serial, &ActivateBody::of(*queue, conf))
            }
            Self::Deactivate { queue } => message(kind::DEACTIVATE, serial, queue),
            Self::Counters { queue } => message(kind::COUNTERS, serial, queue),
            Self::Facts => message(kind::FACTS, serial, &[0u8; 0]),
            Self::Stations { changes } => message(kind::STATIONS, serial, &stations::body(changes)),
            Self::Groups => message(kind::GROUPS, serial, &[0u8; 0]),
            Self::Host { has } => message(kind::HOST, serial, has),
            &Self::Uplink { has, queues: 1 } => message(kind::UPLINK, serial, &has),
            &Self::Uplink { has, queues } => message(kind::UPLINK_QUEUES, serial, &[has, queues]),
            &Self::Behind { after } => message(kind::BEHIND, serial, &StationBody::of(after)),
            Self::Hints(hint_request) => message(kind::HINTS, serial, &hint_request.number()),
            Self::Zcrx(wanted) => message(kind::ZCRX, serial, &wanted.body()),
            Self::ZcrxRegister(rings) => message(kind::ZCRX_REGISTER, serial, &rings.body()),
            Self::Netkit(wanted) => message(kind::NETKIT, serial, &wanted.body()),
            &Self::SendTap { queue, only_with_tso } => {
                message(kind::SEND_TAP, serial, &[queue, only_with_tso.into()])
            }
            Self::Leases { after } => message(kind::LEASES, serial, after),
            Self::Keep { token } => message(kind::KEEP, serial, token),
            Self::Resume { token } => message(kind::RESUME, serial, token),
        }
    }

    /// Reads a message of a lessee: its serial number and what it asks for.
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
            kind::REGISTER => register(&read(kind, body)?)?,
            kind::BIND => bind(&read(kind, body)?)?,
            kind::SHARE => share(&read(kind, body)?)?,
            kind::AWAIT => {
                let [queue, wait_ms] = read(kind, body)?;
                check_wait(wait_ms)?;
                Self::Await { queue, wait_ms }
            }
            kind::ACTIVATE => activate(&read(kind, body)?)?,
            kind::DEACTIVATE => Self::Deactivate {
                queue: read(kind, body)?,
            },
            kind::COUNTERS => Self::Counters {
                queue: read(kind, body)?,
            },
            kind::FACTS => read::<[u8; 0]>(kind, body).map(|_| Self::Facts)?,
            kind::STATIONS => Self::Stations {
                changes: stations::read(&read(kind, body)?)?,
            },
            kind::GROUPS => read::<[u8; 0]>(kind, body).map(|_| Self::Groups)?,
            kind::HOST => Self::Host {
                has: read(kind, body)?,
            },
            kind::UPLINK => Self::Uplink {
                has: read(kind, body)?,
                queues: 1,
            },
            kind::UPLINK_QUEUES => {
                let [has, queues] = read(kind, body)?;
                if !(2..=TAP_QUEUES_MAX as u32).contains(&queues) {
                    return Err(value("number of queues of a tap", queues));
                }
                Self::Uplink { has, queues }
            }
            kind::BEHIND => Self::Behind {
                after: read::<StationBody>(kind, body)?.read()?,
            },
            kind::KEEP => Self::Keep {
                token: read(kind, body)?,
            },
            kind::RESUME => Self::Resume {
                token: read(kind, body)?,
            },
            kind::HINTS => Self::Hints(HintRequest::of_number(read(kind, body)?)?),
            kind::ZCRX => Self::Zcrx(ZcrxWanted::read(&read(kind, body)?)?),
            kind::ZCRX_REGISTER => Self::ZcrxRegister(ZcrxRings::read(&read(kind, body)?)?),
            kind::NETKIT => Self::Netkit(NetkitWanted::read(&read(kind, body)?)?),
            kind::SEND_TAP => {
                let [queue, only_with_tso] = read(kind, body)?;
                let only_with_tso = match only_with_tso {
                    0 => false,
                    1 => true,
                    other => return Err(value("number that says whether TSO is wanted", other)),
                };
                Self::SendTap { queue, only_with_tso }
            }
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
    let filter = filter(body)?;
    let network = match body.network {
        0 => false,
        1 if filter.is_empty() => true,
        other => return Err(value("number that says whether it is for a network", other)),
    };
    Ok(Wanted {
        interface: interface_name(&body.interface)?,
        start_queue: body.start_queue,
        queues: body.queues,
        mode: mode_request(body.mode)?,
        filter,
        network,
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

fn register(body: &RegisterBody) -> Result<Request, Malformed> {
    let count = usize::try_from(body.part_count).unwrap_or(usize::MAX);
    if !(1..=PARTS_MAX).contains(&count) {
        return Err(value("number of parts of memory", body.part_count));
    }
    let (parts, rest) = body.parts.split_at(count);
    if rest.iter().any(|&part| part != Part::default()) {
        return Err(Malformed::List("parts of memory"));
    }
    check_parts(parts)?;
    if body.flags & !UMEM_FLAGS != 0 {
        return Err(value("flags of memory", body.flags));
    }
    check_rings(&body.rings)?;
    Ok(Request::Register {
        queue: body.queue,
        umem: UmemLayout {
            parts: parts.to_vec(),
            chunk_bytes: body.chunk_bytes,
            headroom_bytes: body.headroom_bytes,
            tx_metadata_bytes: body.tx_metadata_bytes,
            flags: body.flags,
        },
        rings: body.rings,
    })
}

fn check_rings(rings: &Rings) -> Result<(), Malformed> {
    let &Rings {
        fill,
        completion,
        rx,
        tx,
    } = rings;
    for entries in [fill, completion, rx, tx] {
        if !entries.is_power_of_two() || entries > RING_MAX {
            return Err(value("entries of a ring", entries));
        }
    }
    Ok(())
}

fn bind(body: &BindBody) -> Result<Request, Malformed> {
    let &BindBody {
        queue,
        flags,
        wait_ms,
    } = body;
    if flags & !BIND_FLAGS != 0 {
        return Err(value("flags of a bind", flags));
    }
    check_wait(wait_ms)?;
    Ok(Request::Bind {
        queue,
        flags,
        wait_ms,
    })
}

fn share(body: &ShareBody) -> Result<Request, Malformed> {
    let &ShareBody {
        queue,
        wait_ms,
        cookie,
        rings,
    } = body;
    check_wait(wait_ms)?;
    check_rings(&rings)?;
    Ok(Request::Share {
        queue,
        wait_ms,
        cookie,
        rings,
    })
}

fn check_wait(wait_ms: u32) -> Result<(), Malformed> {
    match wait_ms > BIND_WAIT_MAX {
        true => Err(value("milliseconds to wait for a queue", wait_ms)),
        false => Ok(()),
    }
}

fn activate(body: &ActivateBody) -> Result<Request, Malformed> {
    let virtio_header = match body.header_bytes {
        0 | HINTS => None,
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
            hints: body.header_bytes == HINTS,
        },
    })
}
