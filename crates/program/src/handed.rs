//! Descriptors that a program passes to a process that it starts.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_setfd};

/// Sets close-on-exec on all descriptors from 3 on, so that programs started by this process do not get them.
///
/// # Errors
/// An error of the kernel.
pub fn close_all_on_exec() -> io::Result<()> {
    let flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    // SAFETY: no descriptor is closed.
    match unsafe { libc::close_range(3, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The descriptor of this number, which the daemon passed to this process.
///
/// # Errors
/// No such descriptor is open.
pub fn taken(number: RawFd) -> anyhow::Result<OwnedFd> {
    if number < 3 || fs::read_link(format!("/proc/self/fd/{number}")).is_err() {
        anyhow::bail!("descriptor {number} is not there; `serve` starts this");
    }
    // SAFETY: it is open, as just checked, and `serve` passed it to this process as its owner.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    Ok(fd)
}
