//! A ring of io_uring as a holder makes it, and what it receives, without a library.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap};
use steward::protocol::ZcrxRegistered;
use testkit::wait;

/// `IORING_SETUP_R_DISABLED`, include/uapi/linux/io_uring.h, as what follows.
pub(crate) const DISABLED: u32 = 1 << 6;
/// `IORING_SETUP_CQSIZE`, `…_CQE32`, `…_SINGLE_ISSUER`, `…_DEFER_TASKRUN`, `…_NO_SQARRAY`.
const FOR_ZERO_COPY: u32 = 1 << 3 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 16;
const REGISTER_ENABLE: u32 = 12;
const REGISTER_CONTROL: u32 = 36;
const ENTER_GETEVENTS: u32 = 1;
const RECV_ZC: u8 = 58;
const RECV_MULTISHOT: u16 = 1 << 1;
const CQE_F_MORE: u32 = 1 << 1;
const OFF_SQES: u64 = 0x1000_0000;
const SQ_ENTRIES: u32 = 8;
const CQ_ENTRIES: u32 = 256;
const SQE_BYTES: usize = 64;
/// With `IORING_SETUP_CQE32`.
const CQE_BYTES: usize = 32;

/// Words of `struct io_uring_params`: `sq_off` begins at 10, `cq_off` at 20.
type Parameters = [u32; 30];

/// A ring for zero-copy receive, with these flags beside.
pub(crate) fn new(flags: u32) -> OwnedFd {
    set_up(flags).0
}

/// The locked memory of a process that was killed counts for its user a moment longer.
fn set_up(flags: u32) -> (OwnedFd, Parameters) {
    wait::until_some(wait::SOON, || try_set_up(flags)).expect("memory for a ring")
}

fn try_set_up(flags: u32) -> Option<(OwnedFd, Parameters)> {
    let mut parameters: Parameters = [0; 30];
    parameters[1] = CQ_ENTRIES;
    parameters[2] = FOR_ZERO_COPY | flags;
    // SAFETY: the kernel reads and writes the 120 bytes of the structure, which live during the call.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, SQ_ENTRIES, parameters.as_mut_ptr()) };
    let ring = RawFd::try_from(ring).expect("a number");
    if ring < 0 {
        let error = io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{error}");
        return None;
    }
    // SAFETY: a descriptor that the kernel has just made for this process, and that nobody else knows.
    Some((unsafe { OwnedFd::from_raw_fd(ring) }, parameters))
}

/// Mapped memory, for as long as the process lives.
#[derive(Clone, Copy)]
struct Mapped(*mut u8);

impl Mapped {
    fn of(file: BorrowedFd<'_>, bytes: usize, offset: u64) -> Self {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, protection, flags, file, offset) };
        Self(at.expect("mapped").cast())
    }

    fn counter(self, at: u32) -> &'static AtomicU32 {
        // SAFETY: the kernel says where in the mapping, which stays, its counters are; both sides access them as
        // atomics.
        unsafe { &*self.0.add(at as usize).cast::<AtomicU32>() }
    }

    fn write(self, at: usize, bytes: &[u8]) {
        // SAFETY: the callers write within the mapping, to what is theirs until they publish it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(at), bytes.len()) };
    }

    fn read<const N: usize>(self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: as above, and what the kernel has published.
        unsafe { std::ptr::copy_nonoverlapping(self.0.add(at), bytes.as_mut_ptr(), N) };
        bytes
    }
}

/// A ring that is not enabled yet.
pub(crate) struct Prepared {
    pub(crate) ring: OwnedFd,
    parameters: Parameters,
}

/// One that receives.
pub(crate) struct Receiver {
    ring: OwnedFd,
    number: u32,
    sq_tail: &'static AtomicU32,
    sqes: Mapped,
    cq: [&'static AtomicU32; 2],
    cqes: Mapped,
    cqes_at: usize,
    refill: Mapped,
    registered: ZcrxRegistered,
    refill_tail: u32,
    area: Mapped,
    area_bytes: usize,
}

impl Prepared {
    pub(crate) fn new() -> Self {
        let (ring, parameters) = set_up(DISABLED);
        Self { ring, parameters }
    }

    /// Enables it, with what the steward registered for it and that memory.
    pub(crate) fn enable(self, registered: ZcrxRegistered, area: BorrowedFd<'_>, bytes: usize) -> Receiver {
        let Self { ring, parameters } = self;
        let map = |bytes, offset| Mapped::of(ring.as_fd(), bytes, offset);
        let (sq, cq) = (&parameters[10..20], &parameters[20..30]);
        // Both are one mapping (IORING_FEAT_SINGLE_MMAP).
        let rings = map(cq[5] as usize + CQ_ENTRIES as usize * CQE_BYTES, 0);
        let refill = map(registered.map_bytes as usize, registered.map_offset);
        // SAFETY: the operation takes no memory.
        let enabled = unsafe {
            libc::syscall(
                libc::SYS_io_uring_register,
                ring.as_raw_fd(),
                REGISTER_ENABLE,
                0usize,
                0,
            )
        };
        assert_eq!(enabled, 0, "{}", io::Error::last_os_error());
        Receiver {
            number: registered.numbers[0],
            sq_tail: rings.counter(sq[1]),
            sqes: map(SQ_ENTRIES as usize * SQE_BYTES, OFF_SQES),
            cq: [rings.counter(cq[0]), rings.counter(cq[1])],
            cqes: rings,
            cqes_at: cq[5] as usize,
            refill,
            registered,
            refill_tail: 0,
            area: Mapped::of(area, bytes, 0),
            area_bytes: bytes,
            ring,
        }
    }
}

impl Receiver {
    /// Receives until there is so much, or the peer has ended; buffers go back as soon as they are read.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>, bytes: usize) -> Vec<u8> {
        let mut received = Vec::new();
        let mut is_armed = false;
        while received.len() < bytes {
            if !is_armed {
                self.arm(socket);
            }
            self.enter(u32::from(!is_armed));
            is_armed = true;
            let [head, tail] = self.cq.map(|counter| counter.load(Ordering::Acquire));
            for index in head..tail {
                let at = self.cqes_at + (index % CQ_ENTRIES) as usize * CQE_BYTES;
                let result = i32::from_ne_bytes(self.cqes.read(at + 8));
                let flags = u32::from_ne_bytes(self.cqes.read(at + 12));
                is_armed &= flags & CQE_F_MORE != 0;
                if result > 0 {
                    let offset = u64::from_ne_bytes(self.cqes.read(at + 16));
                    received.extend(self.piece(offset, result as usize));
                    self.give_back(offset);
                } else if result == 0 {
                    return received;
                } else {
                    // Out of buffers, or of room for completions: once more.
                    let again = [libc::ENOMEM, libc::ENOSPC, libc::EAGAIN, libc::ENOBUFS];
                    let is_so = again.contains(&-result);
                    assert!(is_so, "{}", io::Error::from_raw_os_error(-result));
                }
            }
            self.cq[0].store(tail, Ordering::Release);
            self.flush();
        }
        received
    }

    fn arm(&mut self, socket: BorrowedFd<'_>) {
        let mut sqe = [0u8; SQE_BYTES];
        sqe[0] = RECV_ZC;
        sqe[2..4].copy_from_slice(&RECV_MULTISHOT.to_ne_bytes());
        sqe[4..8].copy_from_slice(&socket.as_raw_fd().to_ne_bytes());
        // zcrx_ifq_idx
        sqe[44..48].copy_from_slice(&self.number.to_ne_bytes());
        let tail = self.sq_tail.load(Ordering::Relaxed);
        self.sqes.write((tail % SQ_ENTRIES) as usize * SQE_BYTES, &sqe);
        self.sq_tail.store(tail.wrapping_add(1), Ordering::Release);
    }

    /// Without a device the kernel looks at what was given back when it is asked to (`ZCRX_REG_NODEV`,
    /// include/uapi/linux/io_uring/zcrx.h).
    fn flush(&self) {
        // struct zcrx_ctrl: the number, ZCRX_CTRL_FLUSH_RQ, zeros.
        let mut control = [0u32; 18];
        control[0] = self.number;
        // SAFETY: the kernel reads the 72 bytes of the structure, which live during the call.
        let done = unsafe {
            let ring = self.ring.as_raw_fd();
            libc::syscall(
                libc::SYS_io_uring_register,
                ring,
                REGISTER_CONTROL,
                control.as_mut_ptr(),
                0,
            )
        };
        assert!(done >= 0, "{}", io::Error::last_os_error());
    }

    fn enter(&self, submitted: u32) {
        // SAFETY: no memory is passed but that of the rings, which lives as long as the process.
        let done = unsafe {
            let ring = self.ring.as_raw_fd();
            libc::syscall(
                libc::SYS_io_uring_enter,
                ring,
                submitted,
                1,
                ENTER_GETEVENTS,
                0usize,
                0usize,
            )
        };
        assert!(done >= 0, "{}", io::Error::last_os_error());
    }

    fn piece(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let at = usize::try_from(offset).expect("in the area");
        assert!(at + bytes <= self.area_bytes, "within the memory");
        // SAFETY: the kernel gave it to us until it is given back; it lies within the mapping.
        unsafe { std::slice::from_raw_parts(self.area.0.add(at), bytes) }.to_vec()
    }

    fn give_back(&mut self, offset: u64) {
        let [_, tail_at, entries_at] = self.registered.offsets;
        let index = self.refill_tail % self.registered.entries;
        let mut entry = [0u8; 16];
        entry[..8].copy_from_slice(&offset.to_ne_bytes());
        self.refill
            .write(entries_at as usize + index as usize * 16, &entry);
        self.refill_tail = self.refill_tail.wrapping_add(1);
        let tail = self.refill.counter(tail_at);
        tail.store(self.refill_tail, Ordering::Release);
    }
}
