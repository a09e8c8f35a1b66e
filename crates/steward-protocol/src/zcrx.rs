//! Leases of a queue for io_uring zero-copy receive (zcrx): requests and answers.
//!
//! A lease is for one receive queue of an interface and the TCP flows that it receives. [`Request::Zcrx`] asks
//! for it, [`Request::ZcrxRegister`] then has the steward register the queue with io_uring rings of the lessee. The
//! lessee passes only their descriptor numbers, as the kernel does not allow sending such descriptors. It keeps the
//! rings disabled until they are registered (`IORING_SETUP_R_DISABLED`), as an enabled ring accepts registrations from
//! its own thread only.
//!
//! [`Request::Zcrx`]: super::Request::Zcrx
//! [`Request::ZcrxRegister`]: super::Request::ZcrxRegister

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::Malformed;
use super::part::{Part, check_parts};
use super::wire::{Body, Checked, Fields, Io, List, Name, Wire, count, value, wire};

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
    /// Flows for the queue: local addresses and ports of their connections, 1 to [`ZCRX_FLOWS_MAX`], each
    /// once.
    pub flows: Vec<SocketAddr>,
}

/// Registration of a lease's queue. The message carries the descriptor of the memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ZcrxRings {
    /// Descriptor numbers of the rings in the process that connected, 1 to [`ZCRX_RINGS_MAX`], each once. All receive
    /// into the same memory.
    pub rings: Vec<i32>,
    /// The memory that payload is received into.
    pub area: Part,
    /// Entries of the refill ring, by which buffers are returned: a power of two, at most [`ZCRX_ENTRIES_MAX`].
    pub entries: u32,
    /// Bytes of a buffer: a power of two, or 0 for a page.
    pub buffer_bytes: u32,
}

/// A registration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ZcrxRegistered {
    /// The queue's number in each ring (`zcrx_id`), in the order of the request.
    pub numbers: Vec<u32>,
    /// Entries of the refill ring.
    pub entries: u32,
    /// Bytes of a buffer.
    pub buffer_bytes: u32,
    /// Offsets of head, tail and entries in the refill ring's mapping, bytes.
    pub offsets: [u32; 3],
    /// Offset of that mapping in the first ring's descriptor (mmap(2)), bytes.
    pub map_offset: u64,
    /// Length of the mapping, bytes.
    pub map_bytes: u64,
}

/// Address, port, and 4 or 6.
impl Wire for SocketAddr {
    fn write(&self, to: &mut Vec<u8>) {
        let (address, family) = match self.ip() {
            IpAddr::V4(ip) => ([ip.octets(), [0; 4], [0; 4], [0; 4]].concat(), 4u16),
            IpAddr::V6(ip) => (ip.octets().to_vec(), 6),
        };
        to.extend_from_slice(&address);
        self.port().write(to);
        family.write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let (address, port, family): ([u8; 16], u16, u16) = (from.next()?, from.next()?, from.next()?);
        let [first, second, third, fourth, rest @ ..] = address;
        let ip: IpAddr = match family {
            4 if rest == [0; 12] => Ipv4Addr::new(first, second, third, fourth).into(),
            6 => Ipv6Addr::from(address).into(),
            other => return Err(value("family of a flow's address", other.into())),
        };
        if port == 0 {
            return Err(value("port of a flow", 0));
        }
        // A NIC finds frames by them: those of one host only.
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(value("first byte of a flow's address", first.into()));
        }
        Ok(Self::new(ip, port))
    }
}

wire!(ZcrxWanted {
    interface: Name,
    queue,
    flows: List::set(ZCRX_FLOWS_MAX, 20, "flows").filled(),
});

wire!(ZcrxRegistered {
    map_offset,
    map_bytes,
    entries,
    buffer_bytes,
    offsets,
    numbers: List::new(ZCRX_RINGS_MAX, 4, "numbers of rings"),
});

const RINGS: List = List::set(ZCRX_RINGS_MAX, 4, "rings").filled();
const ENTRIES: Checked = Checked(
    |entries| entries.is_power_of_two() && entries <= ZCRX_ENTRIES_MAX,
    "entries of a refill ring",
);
const BUFFER: Checked = Checked(
    |bytes| bytes == 0 || (bytes.is_power_of_two() && bytes <= ZCRX_BUFFER_MAX),
    "bytes of a buffer",
);

impl Fields for ZcrxRings {
    fn fields(&mut self, io: &mut Io<'_, '_>) -> Result<(), Malformed> {
        let (mut count, mut zero) = (count(&self.rings), 0u32);
        io.plain(&mut self.area)?;
        io.plain(&mut count)?;
        io.by(&ENTRIES, &mut self.entries)?;
        io.by(&BUFFER, &mut self.buffer_bytes)?;
        io.elements(RINGS, count, &mut self.rings)?;
        io.plain(&mut zero)?;
        check_parts(&[self.area])?;
        match self.rings.iter().any(|&ring| ring < 0) || zero != 0 {
            true => Err(Malformed::List(RINGS.name)),
            false => Ok(()),
        }
    }
}
