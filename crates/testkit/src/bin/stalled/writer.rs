//! A process that writes to a tap device what never comes.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags, mmap};

/// The virtio-net header, and a frame behind it, bytes.
const BYTES: usize = 12 + 60;

/// Writes it from the memory of that file, which waits for the server.
pub(crate) fn write(file: &Path, tap: RawFd) {
    let file = File::open(file).expect("the server answers yet");
    let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice; a page that does not come is the kernel's EFAULT.
    let memory =
        unsafe { mmap(std::ptr::null_mut(), BYTES, protection, flags, &file, 0) }.expect("a mapping");
    // SAFETY: it was mapped just now, and stays so; only the kernel reads it.
    let frame = unsafe { std::slice::from_raw_parts(memory.cast::<u8>(), BYTES) };
    // SAFETY: the parent left this descriptor open for this call, and nothing here closes it.
    let tap = unsafe { BorrowedFd::borrow_raw(tap) };
    println!("{:?}", rustix::io::write(tap, frame));
}
