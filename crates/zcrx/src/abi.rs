//! The kernel's ABI of zcrx: structures, constants and the calls that take them.
//!
//! From `include/uapi/linux/io_uring/zcrx.h` and `include/uapi/linux/io_uring.h` of Linux 7.2. Fields that older
//! kernels do not know are zero there, and mean nothing then. The crate `io-uring` has only the older part, and
//! its registration writes through a shared reference, so this file has its own.
//!
//! Everything here takes and returns plain values; `instance.rs` explains them. Nothing allocates: the
//! steward registers queues in a child that must not.
#![allow(unsafe_code)]

use std::ffi::{c_long, c_uint};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `IORING_REGISTER_PROBE` (Linux 5.6).
const REGISTER_PROBE: c_uint = 8;
/// `IORING_REGISTER_PBUF_RING` (Linux 5.19).
const REGISTER_BUFFER_RING: c_uint = 22;
/// `IORING_REGISTER_ZCRX_IFQ` (Linux 6.15).
const REGISTER_ZCRX_IFQ: c_uint = 32;
/// `IORING_REGISTER_ZCRX_CTRL` (Linux 7.0).
const REGISTER_ZCRX_CTRL: c_uint = 36;

/// `ZCRX_REG_IMPORT`.
pub const REG_IMPORT: u32 = 1;
/// `ZCRX_REG_NODEV` (Linux 7.1).
pub const REG_NODEV: u32 = 2;
/// `ZCRX_CTRL_FLUSH_RQ`.
const CTRL_FLUSH_RQ: u32 = 0;
/// `ZCRX_CTRL_EXPORT`.
const CTRL_EXPORT: u32 = 1;
/// `IORING_ZCRX_AREA_SHIFT`: the bits of an offset from here on are the area.
pub const AREA_SHIFT: u32 = 48;
/// `IORING_MEM_REGION_TYPE_USER`: the region's memory is the caller's.
pub const REGION_TYPE_USER: u32 = 1;
/// `IO_RQ_MAX_ENTRIES`, `io_uring/zcrx.c`.
pub const MOST_REFILL_ENTRIES: u32 = 32768;

/// `struct io_uring_zcrx_rqe`: a buffer that is returned to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RefillEntry {
    /// Where the buffer is: its area, and its place there.
    pub offset: u64,
    /// Ignored by the kernel.
    pub len: u32,
    /// Must be zero.
    pub pad: u32,
}

/// `struct io_uring_zcrx_offsets`: where things are in the refill ring's memory. Never assumed: the header's size has
/// changed between kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Offsets {
    /// Offset of the head, which the kernel advances.
    pub head: u32,
    /// Offset of the tail, which the application advances.
    pub tail: u32,
    /// Offset of the entries.
    pub entries: u32,
    /// Zero.
    pub reserved: u32,
    /// Zero.
    pub reserved2: [u64; 2],
}

/// `struct io_uring_zcrx_area_reg`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct AreaRegistration {
    /// Where the memory is mapped.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Set by the kernel: the upper bits of each offset in the refill ring.
    pub token: u64,
    /// Zero.
    pub flags: u32,
    /// Zero.
    pub dmabuf_fd: u32,
    /// Zero.
    pub reserved: [u64; 2],
}

/// `struct io_uring_region_desc`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Region {
    /// Where the memory is mapped; without [`REGION_TYPE_USER`] the kernel makes it.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// [`REGION_TYPE_USER`], or none.
    pub flags: u32,
    /// Zero.
    pub id: u32,
    /// Set by the kernel: the offset for mmap(2) of the ring's descriptor, if the kernel made the memory.
    pub mmap_offset: u64,
    /// Zero.
    pub reserved: [u64; 4],
}

/// `struct io_uring_zcrx_ifq_reg`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Registration {
    /// Index of the interface; with [`REG_IMPORT`] the descriptor of the instance.
    pub interface: u32,
    /// The receive queue.
    pub queue: u32,
    /// Rounded up to a power of two by the kernel.
    pub refill_entries: u32,
    /// [`REG_IMPORT`], [`REG_NODEV`], or none.
    pub flags: u32,
    /// Address of an [`AreaRegistration`].
    pub area: u64,
    /// Address of a [`Region`].
    pub region: u64,
    /// Set by the kernel.
    pub offsets: Offsets,
    /// Set by the kernel: the ID that requests of the ring use.
    pub id: u32,
    /// Requested size, 0 for a page; the kernel sets the actual one. Kernels before 7.0 leave it.
    pub buffer_bytes: u32,
    /// Address of a `struct zcrx_event_desc`, or none.
    pub event: u64,
    /// Zero.
    pub reserved: [u64; 2],
}

/// `struct zcrx_event_desc`: here only for the counters that the kernel keeps behind the refill ring (Linux 7.2).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct EventDescription {
    user_data: u64,
    types: u32,
    flags: u32,
    counters: u64,
    reserved: [u64; 9],
}

/// `ZCRX_EVENT_DESC_FLAG_STATS`.
const EVENT_FLAG_STATS: u32 = 1;

/// `struct zcrx_ctrl`, with the largest member of its union.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Control {
    id: u32,
    operation: u32,
    reserved: [u64; 2],
    descriptor: u32,
    rest: [u32; 11],
}

/// `struct io_uring_buf_reg`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct BufferRing {
    address: u64,
    entries: u32,
    group: u16,
    flags: u16,
    reserved: [u64; 3],
}

fn register<T>(ring: BorrowedFd<'_>, operation: c_uint, argument: &mut T, count: c_uint) -> io::Result<()> {
    // SAFETY: the kernel reads and writes one structure, and keeps no pointer to it. The address is that of a live
    // value, and callers pass the type that the operation takes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            c_long::from(ring.as_raw_fd()),
            operation,
            std::ptr::from_mut(argument),
            count,
        )
    };
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Registers an instance with a ring. The kernel completes area and region. Returns true if the kernel counts
/// its copies, at offset `counters` of the region (`struct zcrx_stats`: times, then bytes).
///
/// # Errors
/// An error of the kernel.
///
/// # Safety
/// The memory that area and region name must be mapped, and nobody may have references to it, as long as the instance
/// lives: the kernel pins and writes it.
pub unsafe fn register_instance(
    ring: BorrowedFd<'_>,
    registration: &mut Registration,
    area: &mut AreaRegistration,
    region: &mut Region,
    counters: u64,
) -> io::Result<bool> {
    let events = EventDescription {
        flags: EVENT_FLAG_STATS,
        counters,
        ..EventDescription::default()
    };
    registration.event = std::ptr::from_ref(&events) as u64;
    // SAFETY: as our caller promises.
    let registered = unsafe { register_without_counters(ring, registration, area, region) };
    registration.event = 0;
    match registered {
        // Kernels without counters return this error; an error with another cause is returned again.
        // SAFETY: the same.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => unsafe {
            register_without_counters(ring, registration, area, region).map(|()| false)
        },
        registered => registered.map(|()| true),
    }
}

/// As [`register_instance`], but without counters unless the registration names them.
///
/// # Errors
/// An error of the kernel.
///
/// # Safety
/// As [`register_instance`].
pub unsafe fn register_without_counters(
    ring: BorrowedFd<'_>,
    registration: &mut Registration,
    area: &mut AreaRegistration,
    region: &mut Region,
) -> io::Result<()> {
    registration.area = std::ptr::from_mut(area) as u64;
    registration.region = std::ptr::from_mut(region) as u64;
    register(ring, REGISTER_ZCRX_IFQ, registration, 1)
}

/// Checks that a descriptor is of an io_uring that no thread uses yet.
///
/// # Errors
/// The kernel's: it is not.
pub fn probe(ring: BorrowedFd<'_>) -> io::Result<()> {
    register(ring, REGISTER_PROBE, &mut [0u64; 2], 0)
}

/// Registers a ring of provided buffers as group 0.
///
/// # Errors
/// An error of the kernel.
///
/// # Safety
/// The memory for so many entries at the address must be mapped, and nobody may have references to it, as long as the
/// io_uring lives.
pub unsafe fn register_buffer_ring(ring: BorrowedFd<'_>, address: u64, entries: u32) -> io::Result<()> {
    let mut argument = BufferRing {
        address,
        entries,
        ..BufferRing::default()
    };
    register(ring, REGISTER_BUFFER_RING, &mut argument, 1)
}

/// Imports an instance into a ring; returns its ID there, and the offsets in the refill ring.
///
/// # Errors
/// An error of the kernel.
pub fn import_instance(ring: BorrowedFd<'_>, instance: BorrowedFd<'_>) -> io::Result<(u32, Offsets)> {
    let mut registration = Registration {
        interface: instance.as_raw_fd().cast_unsigned(),
        flags: REG_IMPORT,
        ..Registration::default()
    };
    register(ring, REGISTER_ZCRX_IFQ, &mut registration, 1)?;
    Ok((registration.id, registration.offsets))
}

/// Exports the ring's instance as a descriptor.
///
/// # Errors
/// An error of the kernel.
pub fn export_instance(ring: BorrowedFd<'_>, id: u32) -> io::Result<OwnedFd> {
    let mut control = Control {
        id,
        operation: CTRL_EXPORT,
        ..Control::default()
    };
    register(ring, REGISTER_ZCRX_CTRL, &mut control, 0)?;
    // SAFETY: the kernel just made the descriptor, for us alone (`zcrx_export`, io_uring/zcrx.c).
    Ok(unsafe { OwnedFd::from_raw_fd(control.descriptor.cast_signed()) })
}

/// Makes the kernel take the entries of the refill ring now.
///
/// # Errors
/// An error of the kernel.
pub fn flush_refill(ring: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    let mut control = Control {
        id,
        operation: CTRL_FLUSH_RQ,
        ..Control::default()
    };
    register(ring, REGISTER_ZCRX_CTRL, &mut control, 0)
}

// The sizes of the kernel's structures.
const _: () = assert!(size_of::<RefillEntry>() == 16);
const _: () = assert!(size_of::<Offsets>() == 32);
const _: () = assert!(size_of::<AreaRegistration>() == 48);
const _: () = assert!(size_of::<Region>() == 64);
const _: () = assert!(size_of::<Registration>() == 96);
const _: () = assert!(size_of::<EventDescription>() == 96);
const _: () = assert!(size_of::<Control>() == 72);
const _: () = assert!(size_of::<BufferRing>() == 40);
