//! AF_PACKET sockets whose frames lie in rings that are mapped (PACKET_MMAP), in their versions 2 and 3.
//!
//! # Theory of operation
//! A receive ring and a transmit ring, as many as are asked for, lie one behind the other in one mapping. A ring is a
//! row of blocks of [`BLOCK_BYTES`], cut into slots, each with a header. One word of it, the *status*, says whose
//! turn it is:
//!
//! | ring | unit | given to us | given back |
//! |---|---|---|---|
//! | receive, version 2 | slot | `TP_STATUS_USER` | `TP_STATUS_KERNEL` |
//! | receive, version 3 | block of as many frames as came, when it is full or 1 ms old | `TP_STATUS_USER` | `TP_STATUS_KERNEL` |
//! | transmit, both | slot | `TP_STATUS_AVAILABLE` | `TP_STATUS_SEND_REQUEST` |
//!
//! While a unit is ours the kernel does not touch it. Status words are atomics; all other bytes are copied by pointer.
//! What the kernel says of places and lengths is checked against the mapping all the same: a wrong one panics.
//!
//! Sources: Documentation/networking/packet_mmap.rst, include/uapi/linux/if_packet.h, net/packet/af_packet.c.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use libc::{tpacket_block_desc, tpacket_hdr_v1, tpacket_req3, tpacket2_hdr, tpacket3_hdr};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socket_with};
use xsk::WakeError;

/// Bytes of a block. Version 3 hands out whole ones.
const BLOCK_BYTES: usize = 1 << 16;
/// How long version 3 waits for a block to be full, ms.
const BLOCK_AGE_MS: u32 = 1;
/// A slot's header, whichever version, and what the kernel leaves before a frame that it received: 48 bytes, an
/// address of 20, 16 for the Ethernet header, rounded (`tpacket_rcv`).
const SLOT_OVERHEAD: usize = 128;

/// Version of the rings' layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V2,
    V3,
}

impl Version {
    fn number(self) -> c_int {
        match self {
            Self::V2 => libc::tpacket_versions::TPACKET_V2 as c_int,
            Self::V3 => libc::tpacket_versions::TPACKET_V3 as c_int,
        }
    }

    /// Where the status of a slot stands.
    fn status_at(self) -> usize {
        match self {
            Self::V2 => offset_of!(tpacket2_hdr, tp_status),
            Self::V3 => offset_of!(tpacket3_hdr, tp_status),
        }
    }

    /// Where a frame begins in a transmit slot: behind the header (`tpacket_parse_header`).
    fn frame_at(self) -> usize {
        let header = match self {
            Self::V2 => size_of::<tpacket2_hdr>(),
            Self::V3 => size_of::<tpacket3_hdr>(),
        };
        header.next_multiple_of(libc::TPACKET_ALIGNMENT)
    }
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) ifindex: u32,
    pub(crate) version: Version,
    pub(crate) receives: bool,
    pub(crate) sends: bool,
    /// Longest frame, bytes.
    pub(crate) longest: u32,
    /// Slots of each ring, at least.
    pub(crate) slots: u32,
}

/// Why there is no such socket; `what` names the step.
#[derive(Debug, thiserror::Error)]
#[error("AF_PACKET: {what}: {source}{remedy}", remedy = remedy(source))]
pub(crate) struct PacketError {
    what: &'static str,
    source: io::Error,
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "; it needs CAP_NET_RAW",
        Some(libc::EINVAL) => "; version 3 needs Linux 4.11 to send",
        _ => "",
    }
}

/// A frame that was received: where it lies in the mapping, and its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    at: usize,
    pub(crate) len: u32,
}

/// A packet socket with its rings.
#[derive(Debug)]
pub(crate) struct PacketSocket {
    map: Mapping,
    fd: OwnedFd,
    version: Version,
    receive: Option<ReceiveRing>,
    transmit: Option<TransmitRing>,
}

#[derive(Debug)]
struct ReceiveRing {
    ring: Ring,
    /// Version 3, within a block that is ours: frames left, and where the next one's header is.
    left: u32,
    next: usize,
}

#[derive(Debug)]
struct TransmitRing {
    ring: Ring,
    /// The slot that was given to the kernel first, of those that it has.
    oldest: usize,
    /// How many it has.
    with_kernel: usize,
}

/// Units of equal size, and the one that is next.
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
    /// Opens it, makes its rings, and binds it.
    ///
    /// # Errors
    /// [`PacketError`].
    pub(crate) fn open(wanted: &Wanted) -> Result<Self, PacketError> {
        let failed = |what| move |source| PacketError { what, source };
        // No protocol yet: nothing comes before the rings are there and the interface is chosen.
        let fd = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)
            .map_err(failed("no socket"))?;
        let set = |name, value: c_int| set_option(fd.as_fd(), name, &value);
        set(libc::PACKET_VERSION, wanted.version.number()).map_err(failed("PACKET_VERSION refused"))?;
        // Straight to the driver, as AF_XDP does. What we send is not to come back as received (Linux 4.20; a socket
        // that bypasses queueing is not shown it anyway).
        set(libc::PACKET_QDISC_BYPASS, 1).map_err(failed("PACKET_QDISC_BYPASS refused"))?;
        let _ = set(libc::PACKET_IGNORE_OUTGOING, 1);

        let slot_bytes = (wanted.longest as usize + SLOT_OVERHEAD).next_power_of_two();
        let slot_bytes = slot_bytes.clamp(2048, BLOCK_BYTES);
        let bytes = (wanted.slots as usize * slot_bytes).next_multiple_of(BLOCK_BYTES);
        let mut rings = 0;
        for (name, wanted_ring) in [
            (libc::PACKET_RX_RING, wanted.receives),
            (libc::PACKET_TX_RING, wanted.sends),
        ] {
            if wanted_ring {
                make_ring(fd.as_fd(), wanted.version, name, (bytes, slot_bytes))
                    .map_err(failed("the ring was refused"))?;
                rings += 1;
            }
        }
        let map = Mapping::new(fd.as_fd(), rings * bytes).map_err(failed("the rings could not be mapped"))?;
        bind(fd.as_fd(), wanted.ifindex, wanted.receives).map_err(failed("cannot bind to the interface"))?;
        let unit = match wanted.version {
            Version::V2 => slot_bytes,
            Version::V3 => BLOCK_BYTES,
        };
        Ok(Self {
            receive: wanted.receives.then(|| ReceiveRing {
                ring: Ring::new(0, unit, bytes),
                left: 0,
                next: 0,
            }),
            transmit: wanted.sends.then(|| TransmitRing {
                ring: Ring::new(if wanted.receives { bytes } else { 0 }, slot_bytes, bytes),
                oldest: 0,
                with_kernel: 0,
            }),
            map,
            fd,
            version: wanted.version,
        })
    }

    /// The frame that is next, if one came; the same until [`PacketSocket::give_back`].
    #[inline]
    pub(crate) fn received(&mut self) -> Option<Received> {
        let receive = self.receive.as_mut()?;
        let place = receive.ring.place(receive.ring.next);
        let header = match self.version {
            Version::V2 => self
                .map
                .is_ours(place + offset_of!(tpacket2_hdr, tp_status))
                .then_some(place)?,
            Version::V3 => {
                if receive.left == 0 {
                    let block = place + offset_of!(tpacket_block_desc, hdr);
                    if !self.map.is_ours(block + offset_of!(tpacket_hdr_v1, block_status)) {
                        return None;
                    }
                    receive.left = self.map.word(block + offset_of!(tpacket_hdr_v1, num_pkts));
                    receive.next = place
                        + self
                            .map
                            .word(block + offset_of!(tpacket_hdr_v1, offset_to_first_pkt))
                            as usize;
                    if receive.left == 0 {
                        // Grown old while it was empty.
                        self.give_unit_back();
                        return None;
                    }
                }
                receive.next
            }
        };
        let (mac_at, len_at) = match self.version {
            Version::V2 => (
                offset_of!(tpacket2_hdr, tp_mac),
                offset_of!(tpacket2_hdr, tp_snaplen),
            ),
            Version::V3 => (
                offset_of!(tpacket3_hdr, tp_mac),
                offset_of!(tpacket3_hdr, tp_snaplen),
            ),
        };
        Some(Received {
            at: header + usize::from(self.map.half_word(header + mac_at)),
            len: self.map.word(header + len_at),
        })
    }

    /// Gives back the frame that [`PacketSocket::received`] returned.
    #[inline]
    pub(crate) fn give_back(&mut self) {
        let Some(receive) = self.receive.as_mut() else {
            return;
        };
        if self.version == Version::V3 && receive.left > 1 {
            receive.left -= 1;
            let step = self
                .map
                .word(receive.next + offset_of!(tpacket3_hdr, tp_next_offset));
            receive.next += step as usize;
            return;
        }
        self.give_unit_back();
    }

    /// Gives back the slot or block in hand.
    fn give_unit_back(&mut self) {
        let Some(receive) = self.receive.as_mut() else {
            return;
        };
        let place = receive.ring.place(receive.ring.next);
        let status = match self.version {
            Version::V2 => place + offset_of!(tpacket2_hdr, tp_status),
            Version::V3 => {
                place + offset_of!(tpacket_block_desc, hdr) + offset_of!(tpacket_hdr_v1, block_status)
            }
        };
        receive.left = 0;
        receive.ring.next = receive.ring.after(receive.ring.next);
        self.map.set_status(status, libc::TP_STATUS_KERNEL);
    }

    /// Frames for which there is room in the transmit ring.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.transmit
            .as_ref()
            .map_or(0, |transmit| transmit.ring.units - transmit.with_kernel)
    }

    /// Puts a frame into the transmit ring, which must have room for it: `write` fills it, by [`Slot`].
    #[inline]
    pub(crate) fn send(&mut self, len: u32, write: impl FnOnce(&Slot<'_>)) {
        let Some(transmit) = self.transmit.as_mut() else {
            return;
        };
        let place = transmit.ring.place(transmit.ring.next);
        let slot = Slot {
            map: &self.map,
            at: place + self.version.frame_at(),
        };
        write(&slot);
        match self.version {
            Version::V2 => self.map.set_word(place + offset_of!(tpacket2_hdr, tp_len), len),
            // tp_next_offset stays 0, as the kernel asks for.
            Version::V3 => self.map.set_word(place + offset_of!(tpacket3_hdr, tp_len), len),
        }
        transmit.ring.next = transmit.ring.after(transmit.ring.next);
        transmit.with_kernel += 1;
        self.map
            .set_status(place + self.version.status_at(), libc::TP_STATUS_SEND_REQUEST);
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

    /// Takes note of slots that are free again; how many frames that were. A frame that the kernel refused counts, too.
    #[inline]
    pub(crate) fn sent(&mut self) -> u32 {
        const WITH_KERNEL: u32 = libc::TP_STATUS_SEND_REQUEST | libc::TP_STATUS_SENDING;
        let Some(transmit) = self.transmit.as_mut() else {
            return 0;
        };
        let mut sent = 0;
        while transmit.with_kernel > 0 {
            let place = transmit.ring.place(transmit.oldest);
            if self.map.status(place + self.version.status_at()) & WITH_KERNEL != 0 {
                break;
            }
            transmit.oldest = transmit.ring.after(transmit.oldest);
            transmit.with_kernel -= 1;
            sent += 1;
        }
        sent
    }

    /// Frames in the transmit ring that the kernel has.
    #[inline]
    pub(crate) fn with_kernel(&self) -> usize {
        self.transmit.as_ref().map_or(0, |transmit| transmit.with_kernel)
    }

    /// Sends on what was received, with its MAC addresses swapped; there must be room for it.
    #[inline]
    pub(crate) fn send_back(&mut self, received: Received) {
        self.send(received.len, |slot| slot.copy_swapped(received));
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A frame in the transmit ring that is being written.
pub(crate) struct Slot<'a> {
    map: &'a Mapping,
    at: usize,
}

impl Slot<'_> {
    /// Writes `bytes` so many bytes behind the frame's begin.
    #[inline]
    pub(crate) fn write(&self, behind: usize, bytes: &[u8]) {
        let to = self.map.part(self.at + behind, bytes.len());
        // SAFETY: `part` has checked that the bytes lie in the mapping; the slice is memory of ours, not of the
        // mapping, to which there are no references.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
    }

    #[inline]
    fn copy_swapped(&self, received: Received) {
        let len = received.len as usize;
        let from = self.map.part(received.at, len);
        let to = self.map.part(self.at, len);
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
}

/// The rings' pages.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let (protection, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::POPULATE,
        );
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, flags, fd, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The address of `len` bytes at `at`. Panics if they are not all inside: the kernel's word about its own ring is
    /// wrong.
    #[inline]
    fn part(&self, at: usize, len: usize) -> NonNull<u8> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {at} of rings of {} bytes", self.len);
        // SAFETY: at <= len of the mapping, which lives as long as self.
        unsafe { self.start.add(at) }
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

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and len are what mmap returned, and nothing points inside any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
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
