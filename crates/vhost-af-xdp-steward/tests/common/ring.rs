//! A ring of io_uring, as a lessee makes it.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use testkit::wait;

/// `IORING_SETUP_R_DISABLED`, include/uapi/linux/io_uring.h, as what follows.
pub(crate) const DISABLED: u32 = 1 << 6;
/// `IORING_SETUP_CQSIZE`, `…_CQE32`, `…_SINGLE_ISSUER`, `…_DEFER_TASKRUN`, `…_NO_SQARRAY`.
const FOR_ZERO_COPY: u32 = 1 << 3 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 16;
const SQ_ENTRIES: u32 = 8;
const CQ_ENTRIES: u32 = 256;

/// A ring for zero-copy receive, with these flags beside. The locked memory of a process that was killed counts for its
/// user a moment longer.
pub(crate) fn new(flags: u32) -> OwnedFd {
    wait::until_some(wait::SOON, || try_new(flags)).expect("memory for a ring")
}

fn try_new(flags: u32) -> Option<OwnedFd> {
    // struct io_uring_params
    let mut parameters = [0u32; 30];
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
    // SAFETY: a descriptor that the kernel has just made for this process, and that no other process knows.
    Some(unsafe { OwnedFd::from_raw_fd(ring) })
}
