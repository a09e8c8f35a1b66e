//! Work of a child for a lease of a queue: it takes rings of io_uring from their owner and registers the queue with
//! them. No function here allocates.
//!
//! # Theory of operation
//!
//! A queue is registered for zero-copy receive with a ring, and that takes CAP_NET_ADMIN, as does the import of a
//! queue that another process has exported (`io_register_zcrx`, io_uring/zcrx.c, Linux 7.2): lessees have no such
//! capability. And a ring cannot be sent over a Unix socket (`scm_fp_copy`, net/core/scm.c). So the child takes the
//! lessee's own ring (pidfd_getfd(2)), which must not be in use yet: a ring that is disabled belongs to no thread
//! (`__io_uring_register`, io_uring/register.c). With it the queue is registered, and exported to the further rings.
//!
//! All that the kernel makes belongs to the ring: it counts the memory for the one who made the ring, within that
//! user's limit, and releases the queue when the last ring is gone.
//!
//! The lessee chooses the descriptor: it may be of any file. The child uses only system calls that io_uring answers,
//! and the end of the child closes it. The process may run a setuid program meanwhile, with the same process number:
//! then the child does not touch its descriptors ([`check_owner`]).
#![allow(unsafe_code)]

use std::mem::{ManuallyDrop, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::process::{ForeignRawFd, PidfdGetfdFlags, pidfd_getfd};
use rustix::thread::{CapabilitySets, capabilities, set_capabilities};
use zcrx::abi::{self, AreaRegistration, Offsets, RefillEntry, Region, Registration};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use steward::capabilities::TO_TAKE_RINGS;
use steward::child::give_up;
use steward_protocol::{Step, ZCRX_RINGS_MAX};

/// More than what is before the entries of a refill ring: 64 bytes in Linux 7.2.
const BEFORE_ENTRIES: u64 = 4096;

/// `PIDFD_GET_INFO`, include/uapi/linux/pidfd.h, with the structure of its first version (Linux 6.13).
const GET_INFO: Opcode = opcode::read_write::<ProcessInfo>(0xff, 11);

/// `struct pidfd_info`.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ProcessInfo {
    mask: u64,
    cgroup: u64,
    numbers: [u32; 3],
    real: UserAndGroup,
    effective: UserAndGroup,
    saved: UserAndGroup,
    of_files: UserAndGroup,
    exit_code: u32,
}

const _: () = assert!(size_of::<ProcessInfo>() == 64);

/// The user of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct UserAndGroup {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// The registration to make.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueOrder {
    /// The user of the process that has the rings, when it connected.
    pub(super) owner: UserAndGroup,
    /// `None`: without an interface, as for the loopback.
    pub(super) queue: Option<(u32, u32)>,
    pub(super) entries: u32,
    pub(super) buffer_bytes: u32,
    /// Bytes.
    pub(super) area_len: u64,
}

/// The report of the child over its pipe.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Made {
    pub(super) map_offset: u64,
    pub(super) map_bytes: u64,
    pub(super) entries: u32,
    pub(super) buffer_bytes: u32,
    pub(super) offsets: [u32; 3],
    pub(super) count: u32,
    pub(super) numbers: [u32; ZCRX_RINGS_MAX],
}

type Attempt<T> = Result<T, (Step, Errno)>;

/// Registers memory that is mapped there with the rings of that process. All are taken before: a failure other than of
/// [`Step::ShareQueue`] leaves nothing registered.
pub(super) fn register(
    process: BorrowedFd<'_>,
    rings: &[i32],
    address: u64,
    order: &QueueOrder,
) -> Attempt<Made> {
    // They are closed by the end of this process: what they are the lessee knows.
    let mut taken = ManuallyDrop::new([const { None }; ZCRX_RINGS_MAX]);
    for (&number, place) in rings.iter().zip(taken.iter_mut()) {
        *place = Some(take_ring(process, order.owner, number)?);
    }
    give_up(TO_TAKE_RINGS).map_err(|errno| (Step::Ring, errno))?;
    let mut taken = taken.iter().flatten().map(AsFd::as_fd);
    let first = taken.next().ok_or((Step::Ring, Errno::INVAL))?;
    let mut made = register_first(first, address, order)?;
    if rings.len() > 1 {
        share(first, taken, &mut made)?;
    }
    Ok(made)
}

/// A ring of the process, if it is a ring and the process still runs as its owner.
fn take_ring(process: BorrowedFd<'_>, owner: UserAndGroup, number: i32) -> Attempt<OwnedFd> {
    let failed = |errno| (Step::Ring, errno);
    check_owner(process, owner).map_err(failed)?;
    allow_taking(true).map_err(failed)?;
    let taken = pidfd_getfd(process, number as ForeignRawFd, PidfdGetfdFlags::empty());
    allow_taking(false).map_err(failed)?;
    let ring = taken.map_err(failed)?;
    // Check again: the process may have changed its user in between.
    let probed =
        check_owner(process, owner).and_then(|()| abi::probe(ring.as_fd()).map_err(|error| errno(&error)));
    match probed {
        Ok(()) => Ok(ring),
        Err(errno) => {
            std::mem::forget(ring);
            Err(failed(errno))
        }
    }
}

/// Whether a process still runs for whom it did. Its real user stays when it runs a setuid program, the others do not;
/// one that lays its privilege down for a while has it saved. Root may do all of that.
/// Errors: EACCES, if it does not. A kernel that does not tell has no zero-copy receive.
fn check_owner(process: BorrowedFd<'_>, owner: UserAndGroup) -> Result<(), Errno> {
    if owner.uid == 0 {
        return Ok(());
    }
    let mut info = ProcessInfo::new_zeroed();
    // SAFETY: the kernel reads and writes a live structure of the length that the number says.
    match unsafe { ioctl(process, Updater::<GET_INFO, _>::new(&mut info)) } {
        // Before Linux 6.13.
        Err(Errno::NOTTY | Errno::INVAL) => return Ok(()),
        asked => asked?,
    }
    match [info.effective, info.saved, info.of_files] == [owner; 3] {
        true => Ok(()),
        false => Err(Errno::ACCESS),
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Whether this process may take descriptors of others', if it may at all.
fn allow_taking(may: bool) -> Result<(), Errno> {
    let own = capabilities(None)?;
    let effective = match may {
        true => own.effective | (own.permitted & TO_TAKE_RINGS),
        false => own.effective - TO_TAKE_RINGS,
    };
    set_capabilities(None, CapabilitySets { effective, ..own })
}

fn register_first(ring: BorrowedFd<'_>, address: u64, order: &QueueOrder) -> Attempt<Made> {
    let mut area = AreaRegistration {
        address,
        len: order.area_len,
        ..AreaRegistration::default()
    };
    let entries_bytes = size_of::<RefillEntry>() as u64 * u64::from(order.entries);
    let mut region = Region {
        len: (BEFORE_ENTRIES + entries_bytes).next_multiple_of(4096),
        ..Region::default()
    };
    let (interface, number) = order.queue.unwrap_or((0, 0));
    let mut queue = Registration {
        interface,
        queue: number,
        refill_entries: order.entries,
        flags: if order.queue.is_some() { 0 } else { abi::REG_NODEV },
        buffer_bytes: order.buffer_bytes,
        ..Registration::default()
    };
    // SAFETY: the memory is mapped for this alone, until this process ends, and nothing here refers to its bytes.
    let registered = unsafe { abi::register_without_counters(ring, &mut queue, &mut area, &mut region) };
    registered.map_err(|error| (Step::Queue, errno(&error)))?;
    let mut numbers = [0; ZCRX_RINGS_MAX];
    numbers[0] = queue.id;
    let Offsets {
        head, tail, entries, ..
    } = queue.offsets;
    Ok(Made {
        map_offset: region.mmap_offset,
        map_bytes: region.len,
        entries: queue.refill_entries,
        // Linux before 7.0 does not say: a page.
        buffer_bytes: if queue.buffer_bytes == 0 {
            4096
        } else {
            queue.buffer_bytes
        },
        offsets: [head, tail, entries],
        count: 1,
        numbers,
    })
}

/// Shares the queue of the first ring with the others.
fn share<'a>(
    first: BorrowedFd<'_>,
    further: impl Iterator<Item = BorrowedFd<'a>>,
    made: &mut Made,
) -> Attempt<()> {
    let failed = |error| (Step::ShareQueue, errno(&error));
    let exported = abi::export_instance(first, made.numbers[0]).map_err(failed)?;
    for ring in further {
        let (number, _) = abi::import_instance(ring, exported.as_fd()).map_err(failed)?;
        let place = made.numbers.get_mut(made.count as usize);
        *place.ok_or((Step::ShareQueue, Errno::INVAL))? = number;
        made.count += 1;
    }
    Ok(())
}
