//! Descriptors that no crate here makes.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

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

/// Memory of a virtual machine of KVM's (guest_memfd), with so many bytes and these flags.
///
/// # Errors
/// There is no KVM, or not with that.
pub fn kvm_memory(bytes: u64, flags: u64) -> io::Result<OwnedFd> {
    // `linux/kvm.h`.
    const KVM_CREATE_VM: libc::Ioctl = 0xae01;
    const KVM_CREATE_GUEST_MEMFD: libc::Ioctl = 0xc040_aed4;
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm")?;
    // SAFETY: takes a number.
    let machine = owned(unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0) }.into())?;
    // `struct kvm_create_guest_memfd`: size, flags, six reserved.
    let mut asked = [bytes, flags, 0, 0, 0, 0, 0, 0];
    // SAFETY: the kernel reads the structure, which has the 64 bytes that the request's number says.
    owned(unsafe { libc::ioctl(machine.as_raw_fd(), KVM_CREATE_GUEST_MEMFD, asked.as_mut_ptr()) }.into())
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(result) {
        // SAFETY: the call made it just now, and nobody else knows it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
