//! What a holder asks for: as a value, and as a message.

use std::ops::Range;

use steer::{Filter, LAST_VLAN, ModeRequest, QueueConf, VirtioHeader};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::field::{NAME_BYTES, field, interface_name, listed, mode_request, padded, value};
use super::{ENTRIES_MAX, FRAME_LIMITS, Malformed, QUEUES_MAX, Token, kind, message, read, split};

/// What a holder asks for.
///
/// `queue` is the number of one of the lease's.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum Request {
    /// A lease of queues. At most one for each connection.
    Lease(Wanted),
    /// A further socket for a queue of the lease; frames go on as before until [`Request::Activate`].
    Socket { queue: u32 },
    /// From now on frames go to the queue's last socket, which is bound.
    Activate {
        queue: u32,
        /// How frames are treated; the frame limit is in [`FRAME_LIMITS`].
        conf: QueueConf,
    },
    /// From now on the queue's frames go to the host.
    Deactivate { queue: u32 },
    /// Locked memory that the holder's process may have.
    Memlock {
        /// In all.
        bytes: u64,
    },
    /// What the program did with the queue's frames.
    Counters { queue: u32 },
    /// What is known of the interface.
    Facts,
    /// The lease is to outlive the steward's process.
    Keep {
        /// The holder comes back with it.
        token: Token,
    },
    /// The lease that was kept, for a connection that has none. Its queues go on meanwhile; the sockets are those that
    /// the holder has.
    Resume {
        /// As given with [`Request::Keep`].
        token: Token,
    },
    /// The first lease of a higher number, of any holder. Who asks needs no lease.
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
    /// Which frames are to come, if not all of the queues': at most [`ENTRIES_MAX`] addresses and VLANs. The NIC is
    /// asked to bring such frames to these queues, where it can and the policy names them; what else comes to the
    /// queues goes to the host.
    pub filter: Filter,
}

impl Wanted {
    /// The queues.
    pub fn range(&self) -> Range<u32> {
        self.start_queue..self.start_queue.saturating_add(self.queues)
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
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ActivateBody {
    pub(super) queue: u32,
    pub(super) header_bytes: u32,
    pub(super) frame_limit: u32,
}

const _: () = assert!(size_of::<LeaseBody>() == 164 && size_of::<ActivateBody>() == 12);

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
                    mode: wanted.mode as u32,
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
        mode: mode_request(body.mode)?,
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
