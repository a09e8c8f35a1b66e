//! AF_PACKET sockets whose frames lie in rings that are mapped (PACKET_MMAP), in their versions 2 and 3.
//!
//! # Theory of operation
//! A receive ring and a transmit ring, as many as are asked for, lie one behind the other in one mapping. A ring is a
//! row of blocks of [`BLOCK_BYTES`], cut into slots, each with a header. One word of it, the *status*, says who
//! owns it:
//!
//! | ring | unit | status if ours | status if the kernel's |
//! |---|---|---|---|
//! | receive, version 2 | slot | `TP_STATUS_USER` | `TP_STATUS_KERNEL` |
//! | receive, version 3 | block of frames; ours when it is full or 1 ms old | `TP_STATUS_USER` | `TP_STATUS_KERNEL` |
//! | transmit, both | slot | `TP_STATUS_AVAILABLE` | `TP_STATUS_SEND_REQUEST` |
//!
//! While a unit is ours the kernel does not touch it. Status words are atomics; all other bytes are copied by pointer.
//! Offsets and lengths from the kernel are still checked against the mapping: a wrong one panics.
//!
//! Sources: Documentation/networking/packet_mmap.rst, include/uapi/linux/if_packet.h, net/packet/af_packet.c.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context as _;
use libc::{tpacket_block_desc, tpacket_hdr_v1, tpacket_req3, tpacket2_hdr, tpacket3_hdr};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socket_with};
use xsk::{Mapping, WakeError};

use crate::args::{Plan, RING};

/// Bytes of a block. Version 3 hands out whole ones.
const BLOCK_BYTES: usize = 1 << 16;
/// How long version 3 waits for a block to be full, ms.
const BLOCK_AGE_MS: u32 = 1;
/// Bytes of a slot before its frame, enough for both versions: a header of 48, an address of 20, and 16 for the
/// Ethernet header, rounded up (`tpacket_rcv`).
const SLOT_OVERHEAD: usize = 128;

/// Version of the rings' layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V2,
    V3,
}

/// What differs between versions: the number, the offsets of fields in a slot's header, and its length.
#[derive(Debug, Clone, Copy)]
struct Layout {
    number: c_int,
    status: usize,
    len: usize,
    received_len: usize,
    received_at: usize,
    header_bytes: usize,
}

macro_rules! layout {
    ($number:path, $header:ty) => {
        Layout {
            number: $number as c_int,
            status: offset_of!($header, tp_status),
            len: offset_of!($header, tp_len),
            received_len: offset_of!($header, tp_snaplen),
            received_at: offset_of!($header, tp_mac),
            header_bytes: size_of::<$header>(),
        }
    };
}

impl Version {
    fn layout(self) -> Layout {
        match self {
            Self::V2 => layout!(libc::tpacket_versions::TPACKET_V2, tpacket2_hdr),
            Self::V3 => layout!(libc::tpacket_versions::TPACKET_V3, tpacket3_hdr),
        }
    }
}

/// A frame that was received: where it is in the mapping, and its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    at: usize,
    pub(crate) len: u32,
}

/// A packet socket with its rings.
#[derive(Debug)]
pub(crate) struct PacketSocket {
    map: Pages,
    fd: OwnedFd,
    layout: Layout,
    /// Version 3: units of the receive ring are blocks.
    has_blocks: bool,
    receive: Ring,
    /// In the unit that is ours: frames left, and where the next one's header is.
    left: u32,
    header: usize,
    transmit: Ring,
    /// The oldest of the slots that the kernel has.
    oldest: usize,
    /// How many it has.
    with_kernel: usize,
}

/// Units of equal size, and the one that is next. Without units it is not used.
#[derive(Debug)]
struct Ring {
    start: usize,
    unit_bytes: usize,
    units: usize,
    next: usize,
}

impl Ring {
    fn new(start: usize, unit_bytes: usize, bytes: usize) -> Self {
        Self {
            start,
            unit_bytes,
            units: bytes / unit_bytes,
            next: 0,
        }
    }

    fn place(&self, unit: usize) -> usize {
        self.start + unit * self.unit_bytes
    }

    fn after(&self, unit: usize) -> usize {
        if unit + 1 == self.units { 0 } else { unit + 1 }
    }
}

impl PacketSocket {
    /// Opens it, makes the rings that the benchmark uses, and binds it.
    /// Errors: what the kernel refuses.
    pub(crate) fn open(plan: &Plan, version: Version) -> anyhow::Result<Self> {
        let Layout { number, .. } = version.layout();
        let (receives, sends) = (plan.benchmark.receives(), plan.benchmark.sends());
        // No protocol yet: no frame arrives before the rings exist and the interface is chosen.
        let fd = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .context("AF_PACKET: it needs CAP_NET_RAW")?;
        let set = |name, value: c_int| set_option(fd.as_fd(), name, &value);
        set(libc::PACKET_VERSION, number).context("AF_PACKET: PACKET_VERSION refused")?;
        // Straight to the driver, as AF_XDP does. Sent frames must not be received again (Linux 4.20; a socket
        // that bypasses queueing is not shown it anyway).
        set(libc::PACKET_QDISC_BYPASS, 1).context("AF_PACKET: PACKET_QDISC_BYPASS refused")?;
        let _ = set(libc::PACKET_IGNORE_OUTGOING, 1);

        let longest = plan.longest_received().max(plan.args.size) as usize;
        let slot_bytes = (longest + SLOT_OVERHEAD).next_power_of_two();
        let slot_bytes = slot_bytes.clamp(2048, BLOCK_BYTES);
        let ring_bytes = (RING as usize * slot_bytes).next_multiple_of(BLOCK_BYTES);
        let bytes_of = |is_used: bool| if is_used { ring_bytes } else { 0 };
        for (name, is_used) in [(libc::PACKET_RX_RING, receives), (libc::PACKET_TX_RING, sends)] {
            if is_used {
                make_ring(fd.as_fd(), version, name, (ring_bytes, slot_bytes))
                    .context("AF_PACKET: the ring was refused; version 3 needs Linux 4.11 to send")?;
            }
        }
        let (received, sent) = (bytes_of(receives), bytes_of(sends));
        let map = Mapping::new(fd.as_fd(), received + sent, 0).context("AF_PACKET: cannot map the rings")?;
        let map = Pages(map);
        bind(fd.as_fd(), plan.link.index, receives).context("AF_PACKET: cannot bind to the interface")?;
        let has_blocks = version == Version::V3;
        let unit_bytes = if has_blocks { BLOCK_BYTES } else { slot_bytes };
        Ok(Self {
            map,
            fd,
            layout: version.layout(),
            has_blocks,
            receive: Ring::new(0, unit_bytes, received),
            left: 0,
            header: 0,
            transmit: Ring::new(received, slot_bytes, sent),
            oldest: 0,
            with_kernel: 0,
        })
    }

    /// Offset of the status of the receive ring's current unit.
    fn receive_status(&self) -> usize {
        let block = offset_of!(tpacket_block_desc, hdr) + offset_of!(tpacket_hdr_v1, block_status);
        self.receive.place(self.receive.next)
            + if self.has_blocks {
                block
            } else {
                self.layout.status
            }
    }

    /// The next received frame, if there is one; the same until [`PacketSocket::give_back`].
    #[inline]
    pub(crate) fn received(&mut self) -> Option<Received> {
        if self.left == 0 {
            if self.receive.units == 0 || !self.map.is_ours(self.receive_status()) {
                return None;
            }
            let unit = self.receive.place(self.receive.next);
            let field = |at| self.map.word(unit + offset_of!(tpacket_block_desc, hdr) + at);
            (self.left, self.header) = match self.has_blocks {
                true => (
                    field(offset_of!(tpacket_hdr_v1, num_pkts)),
                    unit + field(offset_of!(tpacket_hdr_v1, offset_to_first_pkt)) as usize,
                ),
                false => (1, unit),
            };
            if self.left == 0 {
                // The block grew old while it was empty.
                self.give_unit_back();
                return None;
            }
        }
        let at = self.map.half_word(self.header + self.layout.received_at);
        Some(Received {
            at: self.header + usize::from(at),
            len: self.map.word(self.header + self.layout.received_len),
        })
    }

    /// Gives back the frame that [`PacketSocket::received`] returned.
    #[inline]
    pub(crate) fn give_back(&mut self) {
        self.left -= 1;
        if self.left == 0 {
            return self.give_unit_back();
        }
        let next = self.header + offset_of!(tpacket3_hdr, tp_next_offset);
        self.header += self.map.word(next) as usize;
    }

    /// Gives the current slot or block back.
    fn give_unit_back(&mut self) {
        self.map.set_status(self.receive_status(), libc::TP_STATUS_KERNEL);
        self.receive.next = self.receive.after(self.receive.next);
    }

    /// Frames for which there is room in the transmit ring.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.transmit.units - self.with_kernel
    }

    /// Writes into the next frame of the transmit ring, which must have room for it: `bytes` from `at` on.
    #[inline]
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        self.map.write(self.next_frame() + at, bytes);
    }

    /// Sends the next frame of the transmit ring, with the bytes that are there.
    #[inline]
    pub(crate) fn send(&mut self, len: u32) {
        let slot = self.transmit.place(self.transmit.next);
        // With version 3 tp_next_offset stays 0, as the kernel asks for.
        self.map.set_word(slot + self.layout.len, len);
        self.map
            .set_status(slot + self.layout.status, libc::TP_STATUS_SEND_REQUEST);
        self.transmit.next = self.transmit.after(self.transmit.next);
        self.with_kernel += 1;
    }

    /// Forwards a received frame, with its MAC addresses swapped; there must be room for it.
    #[inline]
    pub(crate) fn send_back(&mut self, received: Received) {
        self.map
            .copy_swapped(received.at, self.next_frame(), received.len as usize);
        self.send(received.len);
    }

    /// Where the next frame begins in its slot of the transmit ring: behind the header (`tpacket_parse_header`).
    fn next_frame(&self) -> usize {
        let header_bytes = self.layout.header_bytes.next_multiple_of(libc::TPACKET_ALIGNMENT);
        self.transmit.place(self.transmit.next) + header_bytes
    }

    /// Makes the kernel send what is in the transmit ring.
    /// Errors: the interface is down or gone.
    #[inline]
    pub(crate) fn kick(&self) -> Result<(), WakeError> {
        match send(&self.fd, &[], SendFlags::DONTWAIT) {
            // What is left stays in the ring.
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => Ok(()),
            Err(Errno::NETDOWN) => Err(WakeError::InterfaceDown),
            Err(Errno::NXIO | Errno::NODEV) => Err(WakeError::InterfaceGone),
            Err(errno) => Err(WakeError::Other(errno.into())),
        }
    }

    /// Counts slots that are free again; returns their number. A frame that the kernel refused counts, too.
    #[inline]
    pub(crate) fn sent(&mut self) -> u32 {
        const WITH_KERNEL: u32 = libc::TP_STATUS_SEND_REQUEST | libc::TP_STATUS_SENDING;
        let mut sent = 0;
        while self.with_kernel > 0 {
            let status = self
                .map
                .status(self.transmit.place(self.oldest) + self.layout.status);
            if status & WITH_KERNEL != 0 {
                break;
            }
            self.oldest = self.transmit.after(self.oldest);
            self.with_kernel -= 1;
            sent += 1;
        }
        sent
    }

    /// Frames in the transmit ring that the kernel has.
    #[inline]
    pub(crate) fn with_kernel(&self) -> usize {
        self.with_kernel
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The rings' pages.
#[derive(Debug)]
struct Pages(Mapping);

impl Pages {
    /// The address of `len` bytes at `at`. Panics if they are not all inside: then the kernel's values about its own
    /// ring are wrong.
    #[inline]
    fn part(&self, at: usize, len: usize) -> NonNull<u8> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.0.len());
        assert!(inside, "{len} bytes at {at} of rings of {} bytes", self.0.len());
        // SAFETY: at <= len of the mapping, which lives as long as self.
        unsafe { self.0.start().add(at) }
    }

    #[inline]
    fn write(&self, at: usize, bytes: &[u8]) {
        let to = self.part(at, bytes.len());
        // SAFETY: `part` has checked that the bytes lie in the mapping; the slice is memory of ours, not of the
        // mapping, to which there are no references.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
    }

    /// Copies a frame from the receive ring to the transmit ring, with its MAC addresses swapped. A frame that is
    /// too short to have both is not copied.
    #[inline]
    fn copy_swapped(&self, from: usize, to: usize, len: usize) {
        let (from, to) = (self.part(from, len), self.part(to, len));
        if len < 12 {
            return;
        }
        // SAFETY: both lie in the mapping for `len` bytes, at least 12, as `part` has checked; they do not overlap, the
        // receive ring ends where the transmit ring begins. Both units are ours until their status says otherwise.
        unsafe {
            ptr::copy_nonoverlapping(from.as_ptr().add(6), to.as_ptr(), 6);
            ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr().add(6), 6);
            ptr::copy_nonoverlapping(from.as_ptr().add(12), to.as_ptr().add(12), len - 12);
        }
    }

    #[inline]
    fn word(&self, at: usize) -> u32 {
        // SAFETY: four bytes inside the mapping, copied; the unit that they are in is ours.
        unsafe { self.part(at, 4).cast::<u32>().read_unaligned() }
    }

    #[inline]
    fn half_word(&self, at: usize) -> u16 {
        // SAFETY: two bytes inside the mapping, copied; the unit that they are in is ours.
        unsafe { self.part(at, 2).cast::<u16>().read_unaligned() }
    }

    #[inline]
    fn set_word(&self, at: usize, value: u32) {
        // SAFETY: four bytes inside the mapping, to which there are no references; the unit that they are in is ours.
        unsafe { self.part(at, 4).cast::<u32>().write_unaligned(value) };
    }

    #[inline]
    fn atomic(&self, at: usize) -> &AtomicU32 {
        let word = self.part(at, 4).cast::<AtomicU32>();
        assert!(word.is_aligned(), "status at {at}");
        // SAFETY: inside the mapping and aligned, as just checked; status words are accessed as atomics only, and the
        // kernel writes them whole.
        unsafe { word.as_ref() }
    }

    /// Acquire: observes what the kernel wrote into the unit before its status. Pairs with smp_wmb in tpacket_rcv and
    /// prb_flush_block, and with the barrier in __packet_set_status (net/packet/af_packet.c). Without it we could read
    /// the frame that was there before.
    #[inline]
    fn status(&self, at: usize) -> u32 {
        self.atomic(at).load(Ordering::Acquire)
    }

    #[inline]
    fn is_ours(&self, at: usize) -> bool {
        self.status(at) & libc::TP_STATUS_USER != 0
    }

    /// Release: what we read from the unit, or wrote into it, is done before the kernel sees that it has it. Pairs with
    /// smp_rmb in __packet_get_status (net/packet/af_packet.c). Without it the kernel could send a frame that is half
    /// written, or overwrite one that is being read.
    #[inline]
    fn set_status(&self, at: usize, status: u32) {
        self.atomic(at).store(status, Ordering::Release);
    }
}

fn make_ring(
    fd: BorrowedFd<'_>,
    version: Version,
    name: c_int,
    (bytes, slot_bytes): (usize, usize),
) -> io::Result<()> {
    // All fit: a ring has some megabytes.
    let number = |value: usize| value as u32;
    let receives = name == libc::PACKET_RX_RING;
    let request = tpacket_req3 {
        tp_block_size: number(BLOCK_BYTES),
        tp_block_nr: number(bytes / BLOCK_BYTES),
        tp_frame_size: number(slot_bytes),
        tp_frame_nr: number(bytes / slot_bytes),
        // A transmit ring must have none.
        tp_retire_blk_tov: if receives { BLOCK_AGE_MS } else { 0 },
        tp_sizeof_priv: 0,
        tp_feature_req_word: 0,
    };
    match version {
        // Its request is the first four members.
        Version::V2 => set_option(
            fd,
            name,
            &[
                request.tp_block_size,
                request.tp_block_nr,
                request.tp_frame_size,
                request.tp_frame_nr,
            ],
        ),
        Version::V3 => set_option(fd, name, &request),
    }
}

fn set_option<T>(fd: BorrowedFd<'_>, name: c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    let value = ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the kernel reads `len` bytes from a live value and keeps no pointer.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_PACKET, name, value, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Binds to the interface; without a protocol a socket receives nothing.
fn bind(fd: BorrowedFd<'_>, ifindex: u32, receives: bool) -> io::Result<()> {
    let protocol = if receives { libc::ETH_P_ALL as u16 } else { 0 };
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol.to_be(),
        sll_ifindex: ifindex as c_int,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes from a live sockaddr_ll and keeps no pointer.
    match unsafe { libc::bind(fd.as_raw_fd(), ptr::from_ref(&address).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
