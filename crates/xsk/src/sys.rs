//! System calls for which rustix has no safe function: ring mappings, plain socket options, NUMA.
//!
//! # Theory of operation
//!
//! Everything here takes and returns plain values; `bind.rs` and `socket.rs` explain their meaning.
//!
//! A [`Mapping`] owns one ring's pages. The kernel counts it as a user of the socket: as long as one is mapped, closing
//! the descriptor does not free the queue. So the rings of a [`Socket`](crate::Socket) own their mappings and are
//! dropped before the descriptor.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// `XDP_MAX_TX_SKB_BUDGET`, `include/uapi/linux/if_xdp.h` (Linux 6.18).
pub(crate) const XDP_MAX_TX_SKB_BUDGET: c_int = 9;

/// Arguments of system calls made by number: of the size of a register.
const NO_FLAGS: c_long = 0;
const THIS_PROCESS: c_long = 0;
/// Maximum number of nodes of a kernel (`MAX_NUMNODES`, include/linux/numa.h; CONFIG_NODES_SHIFT is at most 10).
pub(crate) const MAX_NODES: u16 = 1024;
/// A bit for each node.
type NodeMask = [u64; MAX_NODES as usize / 64];
/// The number of bits as the kernel expects it: one more (`get_nodes`, mm/mempolicy.c).
const MASK_BITS: usize = MAX_NODES as usize + 1;

/// Where the parts of a ring lie in its mapping, in bytes (`struct xdp_ring_offset`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingOffsets {
    pub(crate) producer: u64,
    pub(crate) consumer: u64,
    pub(crate) flags: u64,
    pub(crate) slots: u64,
}

/// Pages that a descriptor shares with the kernel or another process: a ring, a BPF map, a file. Populated; unmapped on
/// drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: the value only owns its mapping, and munmap works from any thread; its user handles access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes from `offset` on, for reading and writing.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn new(fd: BorrowedFd<'_>, len: usize, offset: u64) -> io::Result<Self> {
        Self::protected(fd, len, offset, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// As [`new`](Self::new), for reading only.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn read_only(fd: BorrowedFd<'_>, len: usize, offset: u64) -> io::Result<Self> {
        Self::protected(fd, len, offset, ProtFlags::READ)
    }

    fn protected(fd: BorrowedFd<'_>, len: usize, offset: u64, protection: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, flags, fd, offset) }?;
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Its first byte.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.start.cast()
    }

    /// Length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "none is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of `count` values of `T`, `offset` bytes from the start.
    ///
    /// # Panics
    /// If they are not wholly inside, or not aligned: then the kernel's offsets and the mapped length
    /// disagree.
    #[must_use]
    pub fn part<T>(&self, offset: u64, count: u32) -> NonNull<T> {
        let end = offset + (count as usize * size_of::<T>()) as u64;
        assert!(
            end <= self.len as u64,
            "ring part at {offset} ends past its mapping of {} bytes",
            self.len
        );
        // SAFETY: offset <= end <= len, so the result is inside the mapping.
        let part = unsafe { self.start.byte_add(offset as usize) }.cast::<T>();
        assert!(part.is_aligned(), "ring part at {offset} is not aligned");
        part
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and len are from mmap; every holder of a pointer into it owns this value, so none is left.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

/// Opens an unbound AF_XDP socket.
pub(crate) fn open_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::XDP,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// The value of an option that is a 32-bit number.
pub(crate) fn option(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<u32> {
    let (mut value, mut len) = (0_u32, size_of::<u32>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `len` bytes to the address of a live u32, and the length to a live one.
    let result =
        unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) };
    if result == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sets an option whose value is a 32-bit number.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: u32) -> io::Result<()> {
    let len = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes from the address of a live u32 and keeps no pointer.
    let result = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sets the node from which pages for this thread are allocated while it has free ones; `None`: the default policy.
pub(crate) fn prefer_node(node: Option<u16>) -> io::Result<()> {
    let mut nodes = NodeMask::default();
    let (mode, mask, bits) = match node {
        // MPOL_DEFAULT takes no nodes.
        None => (libc::MPOL_DEFAULT, ptr::null(), 0),
        Some(node) => {
            let word = nodes.get_mut(usize::from(node) / 64);
            *word.ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % 64);
            (libc::MPOL_PREFERRED, nodes.as_ptr(), MASK_BITS)
        }
    };
    // SAFETY: the kernel reads the given number of bits from the address of a live mask, or none, and keeps no pointer.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, c_long::from(mode), mask, bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The policy of this thread for memory (`MPOL_…`, get_mempolicy(2)).
pub(crate) fn memory_policy() -> io::Result<c_int> {
    let (mut mode, mut nodes) = (0, NodeMask::default());
    let address = ptr::null::<c_void>();
    // SAFETY: the kernel writes an int and the given number of bits to live values; the call has no address to query.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            nodes.as_mut_ptr(),
            MASK_BITS,
            address,
            NO_FLAGS,
        )
    };
    match result {
        0 => Ok(mode),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The nodes of the pages at these addresses; negative where no page is mapped.
pub(crate) fn nodes_of(pages: &[*const c_void]) -> io::Result<Vec<c_int>> {
    let mut nodes = vec![-1; pages.len()];
    let nowhere = ptr::null::<c_int>();
    // SAFETY: without target nodes the call only reports where the pages are; the kernel reads as many
    // addresses and writes as many ints as there are.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            THIS_PROCESS,
            pages.len(),
            pages.as_ptr(),
            nowhere,
            nodes.as_mut_ptr(),
            NO_FLAGS,
        )
    };
    match result {
        0 => Ok(nodes),
        _ => Err(io::Error::last_os_error()),
    }
}
