//! A tap device, by its descriptor: frames of the host's kernel, each with a virtio-net header before it.
//!
//! Whoever made it has set it up: it does not block, and its headers are those of VirtIO, of 12 bytes. A read gives one
//! frame and a write takes one, GSO packets whole.
//!
//! Of a [`SendTap`] nothing is read: the kernel sends what is written by an interface.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use device::meter::{self, KernelCall};
use virtqueue::MemoryMap;

/// Most parts of a frame.
pub(crate) const PARTS: usize = 32;

/// Where the bytes of a frame lie, front to back.
pub(crate) struct Parts<'a> {
    parts: [libc::iovec; PARTS],
    count: usize,
    /// Some are of slices, which nobody writes to.
    is_ours: bool,
    memory: PhantomData<&'a MemoryMap>,
}

impl<'a> Parts<'a> {
    pub(crate) fn new() -> Self {
        let none = libc::iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            parts: [none; PARTS],
            count: 0,
            is_ours: false,
            memory: PhantomData,
        }
    }

    /// Adds bytes of ours, for writing; false, and nothing done: there is no room.
    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) -> bool {
        let part = self.parts.get_mut(self.count);
        part.is_some_and(|part| {
            // Only of what is read into the kernel writes, and there are none of these then ([`Tap::read`]).
            part.iov_base = bytes.as_ptr().cast_mut().cast();
            part.iov_len = bytes.len();
            self.count += 1;
            self.is_ours = true;
            true
        })
    }

    /// Adds bytes of a map; false, and nothing done: there is no room, or they are not in it.
    pub(crate) fn push(&mut self, memory: &'a MemoryMap, offset: u64, len: usize) -> bool {
        match (self.parts.get_mut(self.count), memory.ptr(offset, len)) {
            (Some(part), Some(start)) => {
                part.iov_base = start.as_ptr().cast();
                part.iov_len = len;
                self.count += 1;
                true
            }
            _ => false,
        }
    }
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Tap(OwnedFd);

impl Tap {
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Takes the next frame of the host; its bytes, with the header.
    /// Errors: the kernel's; EAGAIN: there is none, EBADFD: nor will there be.
    pub(crate) fn read(&self, into: &Parts<'_>) -> io::Result<usize> {
        if into.is_ours {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (parts, count) = (into.parts.as_ptr(), into.count as libc::c_int);
        // SAFETY: each part is inside a map that lives as long as `into`, of which nobody has references to bytes.
        let bytes = meter::call(KernelCall::Host, || unsafe {
            libc::readv(self.0.as_raw_fd(), parts, count)
        });
        usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
    }

    /// Writes a frame, with its header.
    /// Errors: the kernel's, which has refused it.
    pub(crate) fn write(&self, frame: &Parts<'_>) -> io::Result<()> {
        let (parts, count) = (frame.parts.as_ptr(), frame.count as libc::c_int);
        // SAFETY: as in read, or of a slice that is borrowed as long; the kernel reads only, and answers EFAULT where memory is gone.
        let bytes = meter::call(KernelCall::Host, || unsafe {
            libc::writev(self.0.as_raw_fd(), parts, count)
        });
        match bytes {
            ..0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl AsFd for Tap {
    /// Readable when the host has frames.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A tap whose frames leave by a NIC queue's interface.
#[derive(Debug)]
pub(crate) struct SendTap {
    pub(crate) tap: Tap,
    /// Its kernel cuts UDP packets, too.
    pub(crate) cuts_udp: bool,
}
