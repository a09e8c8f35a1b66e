//! A child of this process, and its work: it receives files from a connection, maps them, and makes and binds an
//! AF_XDP socket. No function here allocates: the child of a process with several threads must not.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use rustix::fs::{SeekFrom, fcntl_get_seals, fstatfs, seek};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags, UserfaultfdFlags, madvise, mmap, mmap_anonymous, userfaultfd};
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Resource, Rlimit, Signal, Uid, WaitOptions, geteuid, getpid, getppid,
    kill_process, pidfd_open, set_dumpable_behavior, set_parent_process_death_signal, setrlimit, waitpid,
};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_res_uid};

use crate::capabilities::ChildWork;
use steward_protocol::{PARTS_MAX, Part, Rings, UmemLayout};

/// Parts are mapped from a multiple of this on: the largest page there is, bytes. So each lies on one of its own pages,
/// if those with the largest pages come first.
const LARGEST_PAGE: usize = 1 << 30;
/// Memory of a probe socket: one chunk, bytes.
const PROBE_BYTES: u32 = 4096;

/// Exits the process when dropped, so that a panic cannot unwind into the parent's code.
struct Exit;

impl Drop for Exit {
    fn drop(&mut self) {
        // SAFETY: it ends this process, and runs nothing before that.
        unsafe { libc::_exit(0) }
    }
}

/// Starts a child that keeps only these descriptors and the capabilities for its `kind` of work, does `work`, and exits.
/// It is killed when this thread ends. No unprivileged process may read its memory: it is a copy of this process, with
/// the tokens of leases.
///
/// This returns after the child has closed all other descriptors. So the child never closes the last descriptor of a
/// file that is closed here later, which may take long.
pub(crate) fn begin(kept: &[BorrowedFd<'_>], kind: ChildWork, work: impl FnOnce()) -> io::Result<Child> {
    // Reserves a descriptor number for the child's pidfd.
    let spare = rustix::io::dup(kept.first().ok_or(io::ErrorKind::InvalidInput)?)?;
    let (closed, closing) = pipe_with(PipeFlags::CLOEXEC)?;
    let numbers = kept.iter().map(AsRawFd::as_raw_fd);
    let mut kept: Vec<RawFd> = numbers.chain([closing.as_raw_fd()]).collect();
    kept.sort_unstable();
    let parent = getpid();
    // SAFETY: the child calls nothing that allocates or takes a lock, and never returns from the block.
    match unsafe { libc::fork() } {
        0 => {
            let exit = Exit;
            let is_closed = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            let is_bound = is_closed.and_then(|()| die_with(parent));
            if is_bound.and_then(|()| keep_only(kind.keeps())).is_ok() {
                close_others(&kept);
                drop(closing);
                work();
            }
            drop(exit);
            unreachable!("the process has ended")
        }
        child => {
            let failed = io::Error::last_os_error();
            let child = Pid::from_raw(child).filter(|_| child > 0).ok_or(failed)?;
            drop((closing, spare));
            await_close(closed.as_fd());
            // Do not wait for it: it may hang.
            let end = pidfd_open(child, PidfdFlags::empty()).inspect_err(|_| {
                let _ = kill_process(child, Signal::KILL);
            })?;
            Ok(Child { pid: child, end })
        }
    }
}

/// Has this process killed when its parent, `parent`, ends.
fn die_with(parent: Pid) -> Result<(), Errno> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before.
    match getppid() == Some(parent) {
        true => Ok(()),
        false => Err(Errno::SRCH),
    }
}

/// Drops these capabilities of this process permanently.
///
/// # Errors
/// An error of the kernel.
pub fn give_up(these: CapabilitySet) -> Result<(), Errno> {
    keep_only(these.complement())
}

/// Drops all other capabilities of this process permanently.
fn keep_only(these: CapabilitySet) -> Result<(), Errno> {
    let own = capabilities(None)?;
    let left = CapabilitySets {
        effective: own.effective & these,
        permitted: own.permitted & these,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, left)
}

/// A running child.
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
    /// Readable when it has ended.
    end: OwnedFd,
}

impl Child {
    /// Whether it has ended; [`AsFd`]'s descriptor is readable then.
    pub(crate) fn has_ended(&self) -> bool {
        !matches!(waitpid(Some(self.pid), WaitOptions::NOHANG), Ok(None))
    }

    /// Kills it, without waiting until it has ended.
    pub(crate) fn kill(&self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

/// The user that is charged for memory that this process registers, and that user's limit in total, bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LockedFor {
    pub(crate) uid: u32,
    pub(crate) bytes: u64,
}

/// From now on the kernel counts what this process registers for that user, until the last socket that uses it is gone,
/// whoever has that: it asks for the real user, and whether there is a capability (`xdp_umem_account_pages`,
/// net/xdp/xdp_umem.c), of which none is left.
///
/// The effective user stays. So that user may send signals (kill(2)), and no more: not trace this process nor limit it
/// (`__ptrace_may_access`, kernel/ptrace.c; `check_prlimit_permission`, kernel/sys.c). With a change of the effective
/// user it would be as dumpable as `fs.suid_dumpable` says, and the user could have the kernel write its memory to a
/// core file (`commit_creds`, kernel/cred.c).
pub(crate) fn count_for(of: LockedFor) -> Result<(), Errno> {
    let limit = Rlimit {
        current: Some(of.bytes),
        maximum: Some(of.bytes),
    };
    setrlimit(Resource::Memlock, limit)?;
    let own = geteuid();
    set_thread_res_uid(Uid::from_raw(of.uid), own, own)?;
    keep_only(CapabilitySet::empty())
}

/// Ends when the other end of this pipe is closed.
pub(crate) fn await_close(pipe: BorrowedFd<'_>) {
    let _ = rustix::io::retry_on_intr(|| rustix::io::read(pipe, &mut [0u8; 1]));
}

/// Closes all descriptors but these, which are in order.
fn close_others(kept: &[RawFd]) {
    let mut from = 0;
    for &fd in kept {
        if fd > from {
            close_range(from, fd - 1);
        }
        from = from.max(fd + 1);
    }
    close_range(from, RawFd::MAX);
}

fn close_range(first: RawFd, last: RawFd) {
    // SAFETY: the owners of these descriptors are in the parent, whose table is another one.
    unsafe { libc::close_range(first.cast_unsigned(), last.cast_unsigned(), 0) };
}

/// Maps the files of the connection's next message side by side; where. They stay mapped until the process ends.
///
/// # Errors
/// EINVAL for a file that is not of tmpfs or hugetlbfs, or a part that does not consist of its pages; EBADMSG
/// if there are not as many files as parts; ENODATA for pages that nobody has made yet: they would be made here, and
/// charged to us. Those that are seen to be missing later cannot be registered ([`make_no_pages`]).
pub fn map_parts(connection: BorrowedFd<'_>, parts: &[Part]) -> Result<u64, Errno> {
    let files = take_files(connection)?;
    let count = files.iter().flatten().count();
    if count != parts.len() {
        return Err(Errno::BADMSG);
    }
    let len: u64 = parts.iter().map(|part| part.len).sum();
    let len = usize::try_from(len).map_err(|_| Errno::NOMEM)?;
    // Of hugetlbfs whole pages are mapped, also for a last part that is less.
    let room = len.checked_add(2 * LARGEST_PAGE).ok_or(Errno::NOMEM)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags) }?.cast::<u8>();
    let base = start.wrapping_add(start.align_offset(LARGEST_PAGE));
    let mut at = base;
    let faults = user_faults();
    for (file, part) in files.iter().flatten().zip(parts) {
        let page = check_part(file, part)?;
        let (protection, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
        );
        let len = usize::try_from(part.len).map_err(|_| Errno::NOMEM)?;
        // SAFETY: at..at+len lies in the reservation, behind what was mapped before; nothing refers to it.
        unsafe { mmap(at.cast(), len, protection, flags, file, part.file_offset) }?;
        if let Some(faults) = &faults {
            make_no_pages(faults.as_fd(), at as u64, part.len.next_multiple_of(page))?;
        }
        at = at.wrapping_add(len);
    }
    // Enters pages that are there already, many at a time; pinning them takes a fault for each.
    // SAFETY: base..base+len was mapped just now; the advice changes no content.
    let _ = unsafe { madvise(base.cast(), len, Advice::LinuxPopulateRead) };
    std::mem::forget((files, faults));
    Ok(base as u64)
}

/// An ioctl of userfaultfd(2), include/uapi/linux/userfaultfd.h; what the kernel answers is not looked at.
#[repr(C)]
struct UserFaultApi {
    version: u64,
    features: u64,
    ioctls: u64,
}

/// The same, for a range of memory.
#[repr(C)]
struct UserFaultRange {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_SIGBUS: u64 = 1 << 7;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const UFFDIO_API: Opcode = opcode::read_write::<UserFaultApi>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UserFaultRange>(0xaa, 0x00);
/// UFFD_USER_MODE_ONLY, which needs no privilege (Linux 5.11).
const USER_MODE_ONLY: u32 = 1;

/// What [`make_no_pages`] needs, where the kernel has it and lets this process.
fn user_faults() -> Option<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
    // SAFETY: it changes no memory by itself; the next calls are for mappings of our own, whose pages no other code
    // makes.
    let faults = unsafe { userfaultfd(flags) }.ok()?;
    let mut api = UserFaultApi {
        version: UFFD_API,
        features: UFFD_FEATURE_SIGBUS,
        ioctls: 0,
    };
    // SAFETY: the kernel reads and writes a live structure of the length that the number says.
    unsafe { ioctl(&faults, Updater::<UFFDIO_API, _>::new(&mut api)) }.ok()?;
    Some(faults)
}

/// Has the kernel refuse what would make pages in this mapping, also those that its owner takes out of the file while
/// we pin the others (fallocate(2), FALLOC_FL_PUNCH_HOLE): they would be charged to us, for as long as the file lives.
fn make_no_pages(faults: BorrowedFd<'_>, start: u64, len: u64) -> Result<(), Errno> {
    let mut range = UserFaultRange {
        start,
        len,
        mode: UFFDIO_REGISTER_MODE_MISSING,
        ioctls: 0,
    };
    // SAFETY: as above; the mapping is ours.
    unsafe { ioctl(faults, Updater::<UFFDIO_REGISTER, _>::new(&mut range)) }
}

/// What is to be known of a file before it is mapped; the size of its pages. A part that begins or ends within a page
/// of its file the kernel refuses: it maps no such offset, and does not cut a large page for the part behind
/// (`hugetlb_vm_op_split`, mm/hugetlb.c).
fn check_part(file: &OwnedFd, part: &Part) -> Result<u64, Errno> {
    // First, because it asks no file system that somebody serves.
    fcntl_get_seals(file)?;
    // What the last one may take beyond its end is reserved.
    let page = u64::try_from(fstatfs(file)?.f_bsize).unwrap_or(0).max(1);
    if page > LARGEST_PAGE as u64 {
        return Err(Errno::INVAL);
    }
    let end = part.file_offset.checked_add(part.len).ok_or(Errno::INVAL)?;
    match seek(file, SeekFrom::Hole(part.file_offset)) {
        Ok(hole) if hole < end => Err(Errno::NODATA),
        // Beyond the end of the file there is nothing to pin either.
        Ok(_) | Err(Errno::NXIO) => Ok(page),
        Err(errno) => Err(errno),
    }
}

/// The files that come with the connection's next message.
///
/// # Errors
/// EBADMSG if there are too many; the kernel's.
pub fn take_files(connection: BorrowedFd<'_>) -> Result<[Option<OwnedFd>; PARTS_MAX], Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PARTS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 1];
    let mut iov = [io::IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(connection, &mut iov, &mut control, flags)?;
    let mut files = [const { None }; PARTS_MAX];
    let mut places = files.iter_mut();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            for file in rights {
                *places.next().ok_or(Errno::BADMSG)? = Some(file);
            }
        }
    }
    Ok(files)
}

/// The one socket that comes with the connection's next message; EPERM if it is none of AF_XDP, or not the one with
/// that cookie. Nothing is asked of a descriptor but what a socket answers by itself. It stays open until the process
/// ends.
pub(crate) fn take_socket(connection: BorrowedFd<'_>, cookie: u64) -> Result<OwnedFd, Errno> {
    let mut files = take_files(connection)?;
    let socket = files[0].take().ok_or(Errno::BADMSG)?;
    let others = files.iter().flatten().count();
    std::mem::forget(files);
    let is_meant = sockopt::socket_domain(&socket) == Ok(AddressFamily::XDP)
        && sockopt::socket_cookie(&socket) == Ok(cookie);
    match (is_meant, others) {
        (true, 0) => Ok(socket),
        (_, others) => {
            std::mem::forget(socket);
            Err(if others > 0 { Errno::BADMSG } else { Errno::PERM })
        }
    }
}

/// Registers memory that is mapped there with a socket.
pub(crate) fn register(socket: BorrowedFd<'_>, address: u64, umem: &UmemLayout) -> Result<(), Errno> {
    let registration = XdpUmemReg {
        addr: address,
        len: umem.len_bytes(),
        chunk_size: umem.chunk_bytes,
        headroom: umem.headroom_bytes,
        flags: XdpUmemRegFlags::from_bits_retain(umem.flags),
        tx_metadata_len: umem.tx_metadata_bytes,
    };
    sockopt::set_xdp_umem_reg(socket, registration)
}

/// Sets up a socket's rings.
pub(crate) fn make_rings(socket: BorrowedFd<'_>, rings: &Rings) -> Result<(), Errno> {
    sockopt::set_xdp_umem_fill_ring_size(socket, rings.fill)?;
    sockopt::set_xdp_umem_completion_ring_size(socket, rings.completion)?;
    sockopt::set_xdp_rx_ring_size(socket, rings.rx)?;
    sockopt::set_xdp_tx_ring_size(socket, rings.tx)
}

/// A socket with memory for one frame, which tests whether a queue is free.
pub(crate) fn probe() -> Result<OwnedFd, Errno> {
    let socket = xsk::new_socket().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let memory = unsafe { mmap_anonymous(ptr::null_mut(), PROBE_BYTES as usize, protection, flags) }?;
    let registration = XdpUmemReg {
        addr: memory as u64,
        len: PROBE_BYTES.into(),
        chunk_size: PROBE_BYTES,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    sockopt::set_xdp_umem_reg(&socket, registration)?;
    let least = Rings {
        fill: 1,
        completion: 1,
        rx: 1,
        tx: 1,
    };
    make_rings(socket.as_fd(), &least)?;
    Ok(socket)
}

/// Binds a socket to a queue.
pub(crate) fn bind(socket: BorrowedFd<'_>, ifindex: u32, queue: u32, flags: u16) -> Result<(), Errno> {
    let address = SocketAddrXdp::new(SocketAddrXdpFlags::from_bits_retain(flags), ifindex, queue);
    rustix::net::bind(socket, &address)
}

/// Binds a socket to a queue, with the memory and flags of another socket.
pub(crate) fn bind_sharing(
    socket: BorrowedFd<'_>,
    ifindex: u32,
    queue: u32,
    first: BorrowedFd<'_>,
) -> Result<(), Errno> {
    let address = SocketAddrXdpWithSharedUmem {
        addr: SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, ifindex, queue),
        shared_umem_fd: first,
    };
    rustix::net::bind(socket, &address)
}

#[cfg(test)]
mod tests {
    use rustix::net::RecvFlags;
    use rustix::net::{SendFlags, SocketFlags, SocketType, send, socketpair};

    use super::*;

    const KINDS: [ChildWork; 5] = [
        ChildWork::Register,
        ChildWork::Bind,
        ChildWork::Files,
        ChildWork::Interface,
        ChildWork::Rings,
    ];

    #[test]
    fn child_keeps_only_the_capabilities_of_its_work() {
        testkit::require!(Root);
        let own = capabilities(None).expect("own").permitted;
        for kind in KINDS {
            let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
            let (reads, writes) =
                socketpair(family, SocketType::SEQPACKET, flags, None).expect("two sockets");
            let child = begin(&[writes.as_fd()], kind, || {
                let sets = capabilities(None);
                let sets = sets.map_or([u64::MAX; 3], |sets| {
                    [sets.permitted, sets.effective, sets.inheritable].map(|set| set.bits())
                });
                let _ = send(&writes, zerocopy::IntoBytes::as_bytes(&sets), SendFlags::empty());
            });
            let child = child.expect("a process");
            let mut sets = [[0u8; 8]; 3];
            rustix::net::recv(&reads, sets.as_flattened_mut(), RecvFlags::empty()).expect("it reports");
            let [permitted, effective, inheritable] = sets.map(u64::from_ne_bytes);
            let kept = (own & kind.keeps()).bits();
            assert_eq!((permitted, effective, inheritable), (kept, kept, 0), "{kind:?}");
            while !child.has_ended() {
                std::thread::yield_now();
            }
        }
        // What each kind of child can do to the host.
        let may = |what| KINDS.map(|kind| kind.keeps().contains(what));
        assert_eq!(may(CapabilitySet::NET_ADMIN), [false, false, false, true, true]);
        assert_eq!(may(CapabilitySet::SYS_PTRACE), [false, false, false, false, true]);
        assert_eq!(may(CapabilitySet::BPF), [false; 5]);
    }
}
