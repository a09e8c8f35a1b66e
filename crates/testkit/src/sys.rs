//! Descriptors that no crate here makes.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// What a system call returns that makes a descriptor of three numbers.
///
/// # Errors
/// The kernel's, where it does not have it.
pub fn descriptor(number: libc::c_long, arguments: [usize; 3]) -> io::Result<OwnedFd> {
    let [a, b, c] = arguments;
    // SAFETY: the calls that this is for take numbers and flags, no pointers.
    owned(unsafe { libc::syscall(number, a, b, c) })
}

/// An io_uring.
///
/// # Errors
/// The kernel's, where it does not have it or does not allow it.
pub fn io_uring() -> io::Result<OwnedFd> {
    // `struct io_uring_params` (include/uapi/linux/io_uring.h), 120 bytes, all zeros.
    let mut parameters = [0u64; 15];
    // SAFETY: the kernel writes no more than the structure, which lives on this stack.
    owned(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) })
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(result) {
        // SAFETY: the call made it just now, and nobody else knows it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
