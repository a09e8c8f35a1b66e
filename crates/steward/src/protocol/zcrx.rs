//! Leases of a queue for io_uring zero-copy receive (zcrx): what a lessee asks for, and what it is told.
//!
//! A lease is for one receive queue of an interface and the TCP flows that are to come to it. [`Request::Zcrx`] asks
//! for it, [`Request::ZcrxRegister`] then has the steward register the queue with rings of io_uring. Those are the
//! lessee's: it names them by their descriptors, as the kernel lets nobody send such descriptors, and keeps them
//! disabled until they are registered (`IORING_SETUP_R_DISABLED`), as a ring that is in use takes registrations of its
//! own thread only.
//!
//! [`Request::Zcrx`]: super::Request::Zcrx
//! [`Request::ZcrxRegister`]: super::Request::ZcrxRegister

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Malformed;
use super::field::{NAME_BYTES, field, interface_name, padded, value};
use super::part::{Part, check_parts};

/// Most flows of one lease.
pub const ZCRX_FLOWS_MAX: usize = 8;
/// Most rings that share a queue.
pub const ZCRX_RINGS_MAX: usize = 16;
/// Most entries of a refill ring (`IO_RQ_MAX_ENTRIES`, io_uring/zcrx.c).
pub const ZCRX_ENTRIES_MAX: u32 = 1 << 15;
/// Largest buffer, bytes.
pub const ZCRX_BUFFER_MAX: u32 = 1 << 21;

/// The lease of a queue that a lessee wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZcrxWanted {
    /// Name of the interface. `lo` has no queue: the kernel copies there (`ZCRX_REG_NODEV`).
    pub interface: String,
    /// The receive queue.
    pub queue: u32,
    /// Where the connections end that are to come to the queue: local addresses and ports, 1 to [`ZCRX_FLOWS_MAX`],
    /// each once.
    pub flows: Vec<SocketAddr>,
}

/// What is to be registered for a lease. The memory comes along, as one descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZcrxRings {
    /// The rings' descriptors in the process that has connected, 1 to [`ZCRX_RINGS_MAX`], each once. All receive into
    /// the same memory.
    pub rings: Vec<i32>,
    /// The memory that payload is received into.
    pub area: Part,
    /// Entries of the ring by which buffers are given back: a power of two, at most [`ZCRX_ENTRIES_MAX`].
    pub entries: u32,
    /// Bytes of a buffer: a power of two, or 0 for a page.
    pub buffer_bytes: u32,
}

/// What was registered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ZcrxRegistered {
    /// By which number each ring knows the queue (`zcrx_id`), in the order in which they were named.
    pub numbers: Vec<u32>,
    /// Entries of the refill ring.
    pub entries: u32,
    /// Bytes of a buffer.
    pub buffer_bytes: u32,
    /// Where in the refill ring's mapping its head, its tail and its entries are, bytes.
    pub offsets: [u32; 3],
    /// Where the first ring's descriptor has that mapping, bytes.
    pub map_offset: u64,
    /// Length of the mapping, bytes.
    pub map_bytes: u64,
}

#[derive(Clone, Copy, Default, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct FlowBody {
    address: [u8; 16],
    port: u16,
    /// 4 or 6.
    family: u16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ZcrxBody {
    interface: [u8; NAME_BYTES],
    queue: u32,
    flow_count: u32,
    flows: [FlowBody; ZCRX_FLOWS_MAX],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RingsBody {
    area: Part,
    ring_count: u32,
    entries: u32,
    buffer_bytes: u32,
    rings: [i32; ZCRX_RINGS_MAX],
    zero: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RegisteredBody {
    map_offset: u64,
    map_bytes: u64,
    entries: u32,
    buffer_bytes: u32,
    offsets: [u32; 3],
    count: u32,
    numbers: [u32; ZCRX_RINGS_MAX],
}

const _: () = assert!(size_of::<ZcrxBody>() == 184 && size_of::<RingsBody>() == 96);
const _: () = assert!(size_of::<RegisteredBody>() == 104);

impl FlowBody {
    fn of(flow: SocketAddr) -> Self {
        let mut address = [0; 16];
        let family = match flow.ip() {
            IpAddr::V4(of_four) => {
                address[..4].copy_from_slice(&of_four.octets());
                4
            }
            IpAddr::V6(of_six) => {
                address = of_six.octets();
                6
            }
        };
        let port = flow.port();
        Self {
            address,
            port,
            family,
        }
    }

    fn read(&self) -> Result<SocketAddr, Malformed> {
        let [first, second, third, fourth, rest @ ..] = self.address;
        let ip: IpAddr = match self.family {
            4 if rest == [0; 12] => Ipv4Addr::new(first, second, third, fourth).into(),
            6 => Ipv6Addr::from(self.address).into(),
            other => return Err(value("family of a flow's address", other.into())),
        };
        if self.port == 0 {
            return Err(value("port of a flow", 0));
        }
        // A NIC finds frames by them: those of one host only.
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(value("first byte of a flow's address", first.into()));
        }
        Ok(SocketAddr::new(ip, self.port))
    }
}

impl ZcrxWanted {
    pub(super) fn body(&self) -> ZcrxBody {
        let flows: Vec<FlowBody> = self.flows.iter().copied().map(FlowBody::of).collect();
        ZcrxBody {
            interface: field(&self.interface),
            queue: self.queue,
            flow_count: self.flows.len().try_into().unwrap_or(u32::MAX),
            flows: padded(&flows),
        }
    }

    pub(super) fn read(body: &ZcrxBody) -> Result<Self, Malformed> {
        let count = usize::try_from(body.flow_count).unwrap_or(usize::MAX);
        if !(1..=ZCRX_FLOWS_MAX).contains(&count) {
            return Err(value("number of flows", body.flow_count));
        }
        let (flows, rest) = body.flows.split_at(count);
        let flows: Vec<SocketAddr> = flows.iter().map(FlowBody::read).collect::<Result<_, _>>()?;
        let different: BTreeSet<&SocketAddr> = flows.iter().collect();
        if different.len() < count || rest.iter().any(|&flow| flow != FlowBody::default()) {
            return Err(Malformed::List("flows"));
        }
        Ok(Self {
            interface: interface_name(&body.interface)?,
            queue: body.queue,
            flows,
        })
    }
}

impl ZcrxRings {
    pub(super) fn body(&self) -> RingsBody {
        RingsBody {
            area: self.area,
            ring_count: self.rings.len().try_into().unwrap_or(u32::MAX),
            entries: self.entries,
            buffer_bytes: self.buffer_bytes,
            rings: padded(&self.rings),
            zero: 0,
        }
    }

    pub(super) fn read(body: &RingsBody) -> Result<Self, Malformed> {
        let count = usize::try_from(body.ring_count).unwrap_or(usize::MAX);
        if !(1..=ZCRX_RINGS_MAX).contains(&count) {
            return Err(value("number of rings", body.ring_count));
        }
        let (rings, rest) = body.rings.split_at(count);
        let different: BTreeSet<&i32> = rings.iter().collect();
        let is_wrong = different.len() < count || rings.iter().any(|&ring| ring < 0);
        if is_wrong || rest.iter().any(|&ring| ring != 0) || body.zero != 0 {
            return Err(Malformed::List("rings"));
        }
        check_parts(&[body.area])?;
        if !body.entries.is_power_of_two() || body.entries > ZCRX_ENTRIES_MAX {
            return Err(value("entries of a refill ring", body.entries));
        }
        let is_size = body.buffer_bytes.is_power_of_two() && body.buffer_bytes <= ZCRX_BUFFER_MAX;
        if body.buffer_bytes != 0 && !is_size {
            return Err(value("bytes of a buffer", body.buffer_bytes));
        }
        Ok(Self {
            rings: rings.to_vec(),
            area: body.area,
            entries: body.entries,
            buffer_bytes: body.buffer_bytes,
        })
    }
}

impl ZcrxRegistered {
    pub(super) fn body(&self) -> RegisteredBody {
        RegisteredBody {
            map_offset: self.map_offset,
            map_bytes: self.map_bytes,
            entries: self.entries,
            buffer_bytes: self.buffer_bytes,
            offsets: self.offsets,
            count: self.numbers.len().try_into().unwrap_or(u32::MAX),
            numbers: padded(&self.numbers),
        }
    }

    pub(super) fn read(body: &RegisteredBody) -> Result<Self, Malformed> {
        let count = usize::try_from(body.count).unwrap_or(usize::MAX);
        if count > ZCRX_RINGS_MAX {
            return Err(value("number of rings", body.count));
        }
        let (numbers, rest) = body.numbers.split_at(count);
        if rest.iter().any(|&number| number != 0) {
            return Err(Malformed::List("numbers of rings"));
        }
        Ok(Self {
            numbers: numbers.to_vec(),
            entries: body.entries,
            buffer_bytes: body.buffer_bytes,
            offsets: body.offsets,
            map_offset: body.map_offset,
            map_bytes: body.map_bytes,
        })
    }
}
