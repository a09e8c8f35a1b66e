//! What the kernel calls zcrx: structures, constants and the calls that take them.
//!
//! From `include/uapi/linux/io_uring/zcrx.h` and `include/uapi/linux/io_uring.h` of Linux 7.2. Fields that older
//! kernels do not know are zero there, and mean nothing then. The crate `io-uring` has the older part of it only, and
//! a registration that writes through a shared reference; so the registration is ours.
//!
//! Everything here takes and returns plain values; what they mean is said in `instance.rs`.
#![allow(unsafe_code)]

use std::ffi::{c_long, c_uint};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `IORING_REGISTER_PBUF_RING` (Linux 5.19).
const REGISTER_BUFFER_RING: c_uint = 22;
/// `IORING_REGISTER_ZCRX_IFQ` (Linux 6.15).
const REGISTER_ZCRX_IFQ: c_uint = 32;
/// `IORING_REGISTER_ZCRX_CTRL` (Linux 7.0).
const REGISTER_ZCRX_CTRL: c_uint = 36;

/// `ZCRX_REG_IMPORT`.
pub(crate) const REG_IMPORT: u32 = 1;
/// `ZCRX_REG_NODEV` (Linux 7.1).
pub(crate) const REG_NODEV: u32 = 2;
/// `ZCRX_CTRL_FLUSH_RQ`.
const CTRL_FLUSH_RQ: u32 = 0;
/// `ZCRX_CTRL_EXPORT`.
const CTRL_EXPORT: u32 = 1;
/// `IORING_ZCRX_AREA_SHIFT`: the bits of an offset from here on are the area.
pub(crate) const AREA_SHIFT: u32 = 48;
/// `IORING_MEM_REGION_TYPE_USER`: the region's memory is the caller's.
pub(crate) const REGION_TYPE_USER: u32 = 1;
/// `IO_RQ_MAX_ENTRIES`, `io_uring/zcrx.c`.
pub(crate) const MOST_REFILL_ENTRIES: u32 = 32768;

/// `struct io_uring_zcrx_rqe`: a buffer that goes back to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RefillEntry {
    pub(crate) offset: u64,
    /// Not looked at.
    pub(crate) len: u32,
    /// Must be zero.
    pub(crate) pad: u32,
}

/// `struct io_uring_zcrx_offsets`: where things are in the refill ring's memory. Never assumed: the header's size has
/// changed between kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Offsets {
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) entries: u32,
    pub(crate) reserved: u32,
    pub(crate) reserved2: [u64; 2],
}

/// `struct io_uring_zcrx_area_reg`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct AreaRegistration {
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// The kernel's: what an offset in the refill ring begins with.
    pub(crate) token: u64,
    pub(crate) flags: u32,
    pub(crate) dmabuf_fd: u32,
    pub(crate) reserved: [u64; 2],
}

/// `struct io_uring_region_desc`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Region {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) flags: u32,
    pub(crate) id: u32,
    pub(crate) mmap_offset: u64,
    pub(crate) reserved: [u64; 4],
}

/// `struct io_uring_zcrx_ifq_reg`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Registration {
    /// With [`REG_IMPORT`] the descriptor of the instance.
    pub(crate) interface: u32,
    pub(crate) queue: u32,
    /// Rounded up to a power of two by the kernel.
    pub(crate) refill_entries: u32,
    pub(crate) flags: u32,
    pub(crate) area: u64,
    pub(crate) region: u64,
    pub(crate) offsets: Offsets,
    /// The kernel's: what requests of the ring name.
    pub(crate) id: u32,
    /// What was asked for, 0 for a page; then what it is. Kernels before 7.0 leave it.
    pub(crate) buffer_bytes: u32,
    pub(crate) event: u64,
    pub(crate) reserved: [u64; 2],
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
    // SAFETY: for each of our operations the kernel reads and writes one structure of the type that the caller
    // passes, which is the one that the operation takes, at the address of a live value, and keeps no pointer to it.
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

/// Registers an instance with a ring. Area and region tell what the kernel made of them. True if the kernel counts
/// what it copies, at `counters` bytes of the region (`struct zcrx_stats`: times, then bytes).
///
/// # Safety
/// The memory that area and region name must be mapped, and nobody may have references to it, as long as the instance
/// lives: the kernel pins and writes it.
pub(crate) unsafe fn register_instance(
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
    registration.area = std::ptr::from_mut(area) as u64;
    registration.region = std::ptr::from_mut(region) as u64;
    registration.event = std::ptr::from_ref(&events) as u64;
    match register(ring, REGISTER_ZCRX_IFQ, registration, 1) {
        Ok(()) => return Ok(true),
        // Kernels that do not know counters refuse so; another reason for it comes again.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        Err(error) => return Err(error),
    }
    registration.event = 0;
    register(ring, REGISTER_ZCRX_IFQ, registration, 1).map(|()| false)
}

/// Registers a ring of provided buffers as group 0.
///
/// # Safety
/// The memory for so many entries at the address must be mapped, and nobody may have references to it, as long as the
/// io_uring lives.
pub(crate) unsafe fn register_buffer_ring(
    ring: BorrowedFd<'_>,
    address: u64,
    entries: u32,
) -> io::Result<()> {
    let mut argument = BufferRing {
        address,
        entries,
        ..BufferRing::default()
    };
    register(ring, REGISTER_BUFFER_RING, &mut argument, 1)
}

/// Makes an instance known to a ring: its identifier there and where the refill ring's parts are.
pub(crate) fn import_instance(ring: BorrowedFd<'_>, instance: BorrowedFd<'_>) -> io::Result<(u32, Offsets)> {
    let mut registration = Registration {
        interface: instance.as_raw_fd().cast_unsigned(),
        flags: REG_IMPORT,
        ..Registration::default()
    };
    register(ring, REGISTER_ZCRX_IFQ, &mut registration, 1)?;
    Ok((registration.id, registration.offsets))
}

/// A descriptor that stands for the ring's instance.
pub(crate) fn export_instance(ring: BorrowedFd<'_>, id: u32) -> io::Result<OwnedFd> {
    let mut control = Control {
        id,
        operation: CTRL_EXPORT,
        ..Control::default()
    };
    register(ring, REGISTER_ZCRX_CTRL, &mut control, 0)?;
    // SAFETY: the kernel just made the descriptor, for us alone (`zcrx_export`, io_uring/zcrx.c).
    Ok(unsafe { OwnedFd::from_raw_fd(control.descriptor.cast_signed()) })
}

/// Has the kernel take what is in the refill ring now.
pub(crate) fn flush_refill(ring: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    let mut control = Control {
        id,
        operation: CTRL_FLUSH_RQ,
        ..Control::default()
    };
    register(ring, REGISTER_ZCRX_CTRL, &mut control, 0)
}

// As the kernel has them.
const _: () = assert!(size_of::<RefillEntry>() == 16);
const _: () = assert!(size_of::<Offsets>() == 32);
const _: () = assert!(size_of::<AreaRegistration>() == 48);
const _: () = assert!(size_of::<Region>() == 64);
const _: () = assert!(size_of::<Registration>() == 96);
const _: () = assert!(size_of::<EventDescription>() == 96);
const _: () = assert!(size_of::<Control>() == 72);
const _: () = assert!(size_of::<BufferRing>() == 40);
