//! A tap device, by its descriptor: frames of the host's kernel, each with a virtio-net header before it.
//!
//! The process that created it has set it up: it is non-blocking, and its headers are VirtIO's, of 12 bytes. A read
//! returns one frame and a write takes one; a GSO packet is one frame.
//!
//! A [`SendTap`] is only written to: the kernel sends its frames out of an interface.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use device::meter::{self, KernelCall};
use device::offloads::Offloads;
use virtqueue::MemoryMap;

/// Most parts of a frame: a GSO packet in buffers of an MTU of 1500 has 44.
pub(crate) const PARTS: usize = 48;
/// `TUNSETOFFLOAD`, include/uapi/linux/if_tun.h: `_IOW('T', 208, unsigned int)`, of which the value is the argument.
pub(crate) const SET_OFFLOAD: u64 = 0x4004_54d0;

/// Where the bytes of a frame lie, front to back.
pub(crate) struct Parts<'a> {
    /// The first `count` are there.
    parts: [MaybeUninit<libc::iovec>; PARTS],
    count: usize,
    /// Some are bytes of the daemon that a read must not change.
    is_constant: bool,
    memory: PhantomData<&'a MemoryMap>,
}

impl<'a> Parts<'a> {
    pub(crate) fn new() -> Self {
        Self {
            parts: [const { MaybeUninit::uninit() }; PARTS],
            count: 0,
            is_constant: false,
            memory: PhantomData,
        }
    }

    /// Adds bytes of the daemon, to be written to the tap; false: there is no room, and nothing changes.
    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) -> bool {
        // The kernel writes to parts only in a read, and [`Tap::read`] fails if there are such bytes.
        self.is_constant = true;
        self.add(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Adds memory of the daemon, to read a frame into; false: there is no room, and nothing changes.
    pub(crate) fn push_room(&mut self, room: &'a mut [u8]) -> bool {
        self.add(room.as_mut_ptr(), room.len())
    }

    /// How many more parts there is room for.
    pub(crate) fn left(&self) -> usize {
        PARTS - self.count
    }

    fn add(&mut self, start: *mut u8, len: usize) -> bool {
        let part = self.parts.get_mut(self.count);
        part.is_some_and(|part| {
            part.write(libc::iovec {
                iov_base: start.cast(),
                iov_len: len,
            });
            self.count += 1;
            true
        })
    }

    /// Adds bytes of a map; false: there is no room, or they are not in the map, and nothing changes.
    pub(crate) fn push(&mut self, memory: &'a MemoryMap, offset: u64, len: usize) -> bool {
        let start = memory.ptr(offset, len);
        start.is_some_and(|start| self.add(start.as_ptr(), len))
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct Tap(OwnedFd);

impl Tap {
    /// The tap of this descriptor.
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Takes the next frame of the host; its bytes, with the header.
    /// Errors: the kernel's; EAGAIN: no frame waits, EBADFD: the device is gone.
    pub(crate) fn read(&self, into: &Parts<'_>) -> io::Result<usize> {
        if into.is_constant {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (parts, count) = (into.parts.as_ptr().cast(), into.count as libc::c_int);
        // SAFETY: there are `count` parts. Each is inside a map that exists as long as `into` and without references to
        // its bytes, or room that is borrowed as long.
        let bytes = meter::call(KernelCall::Host, || unsafe {
            libc::readv(self.0.as_raw_fd(), parts, count)
        });
        usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
    }

    /// Writes a frame, with its header.
    /// Errors: the kernel's, which has refused it.
    pub(crate) fn write(&self, frame: &Parts<'_>) -> io::Result<()> {
        let (parts, count) = (frame.parts.as_ptr().cast(), frame.count as libc::c_int);
        // SAFETY: as in read, or a slice that is borrowed as long; the kernel only reads, or fails with EFAULT.
        let bytes = meter::call(KernelCall::Host, || unsafe {
            libc::writev(self.0.as_raw_fd(), parts, count)
        });
        match bytes {
            ..0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl Tap {
    /// Allows reads to return those GSO packets and partial checksums that a guest takes. The kernel segments and
    /// completes the others. `segments_udp`: it can segment UDP, too.
    /// Errors: the kernel's.
    pub fn set_offloads(&self, offloads: &Offloads, segments_udp: bool) -> io::Result<()> {
        // TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN; TUN_F_USO4 and TUN_F_USO6: both or none of these two.
        let tso = offloads.guest_tso4 || offloads.guest_tso6;
        let uso = segments_udp && offloads.guest_uso4 && offloads.guest_uso6;
        let flags = [
            (offloads.guest_csum, 0x01),
            (offloads.guest_tso4, 0x02),
            (offloads.guest_tso6, 0x04),
            (offloads.guest_ecn && tso, 0x08),
            (uso, 0x60),
        ];
        let flags = flags.iter().filter(|(is_on, _)| *is_on && offloads.guest_csum);
        let flags = flags.fold(0, |all, (_, flag)| all | flag);
        // SAFETY: the argument is a number.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), SET_OFFLOAD as _, flags as libc::c_ulong) };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Duplicates the descriptor.
    /// Errors: no descriptor is left.
    pub fn again(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Reads and drops waiting frames, at most `most`. Returns how many there were.
    pub fn discard(&self, most: usize) -> usize {
        let mut room = [0; 16];
        let mut is_taken = || {
            let mut parts = Parts::new();
            parts.push_room(&mut room) && self.read(&parts).is_ok()
        };
        (0..most).take_while(|_| is_taken()).count()
    }
}

impl AsFd for Tap {
    /// Readable when the host has frames.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A tap whose frames leave by a NIC queue's interface.
#[derive(Debug)]
pub struct SendTap {
    /// The tap.
    pub tap: Tap,
    /// The kernel can segment UDP, too.
    pub segments_udp: bool,
}
