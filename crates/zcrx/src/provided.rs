//! The ring of provided buffers: the buffers that ordinary receives fill.
//!
//! # Theory of operation
//!
//! `struct io_uring_buf_ring`, `include/uapi/linux/io_uring.h`: entries of 16 bytes, and a 16-bit tail that lies in
//! the last two bytes of the first entry, so that an entry is written without them. We advance the tail (release),
//! the kernel keeps the head for itself and takes an entry for each receive; a ring with as many entries as there are
//! buffers is never full. Each buffer is in the ring, in the kernel's hands, or in a piece.
//!
//! Invariants: **B1** `entries` points to `mask + 1` entries in `memory`, which lives as long as the ring that it is
//! registered with; **B2** one owner, `&mut`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use xsk::{OwnMemory, UmemMemory};

use crate::abi;

/// Most entries that such a ring has: the tail has 16 bits.
pub(crate) const MOST_ENTRIES: u32 = 32768;

/// `struct io_uring_buf`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    address: u64,
    len: u32,
    buffer: u16,
    /// In the first entry: the tail.
    tail: u16,
}

/// The producer of a ring of provided buffers.
pub(crate) struct ProvidedRing {
    entries: NonNull<Entry>,
    mask: u16,
    tail: u16,
    _memory: OwnMemory,
}

impl ProvidedRing {
    /// A ring for so many buffers, registered as group 0 of an io_uring.
    pub(crate) fn register(ring: BorrowedFd<'_>, buffers: u32) -> io::Result<Self> {
        let entries = buffers.next_power_of_two();
        if entries > MOST_ENTRIES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = entries as usize * size_of::<Entry>();
        let memory = OwnMemory::new(bytes).map_err(io::Error::other)?;
        // SAFETY: the memory is as long as the ring of so many entries, and the value below keeps it; the kernel pins
        // it.
        unsafe { abi::register_buffer_ring(ring, memory.base().as_ptr() as u64, entries) }?;
        Ok(Self {
            entries: memory.base().cast(),
            mask: (entries - 1) as u16,
            tail: 0,
            _memory: memory,
        })
    }

    /// Gives a buffer to the kernel, at the next [`publish`](Self::publish).
    pub(crate) fn push(&mut self, buffer: u16, address: u64, len: u32) {
        // SAFETY: a masked slot (B1); the tail's bytes are not touched.
        unsafe {
            let entry = self.entries.add(usize::from(self.tail & self.mask)).as_ptr();
            (&raw mut (*entry).address).write(address);
            (&raw mut (*entry).len).write(len);
            (&raw mut (*entry).buffer).write(buffer);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    /// Publishes the pushed buffers to the kernel.
    pub(crate) fn publish(&mut self) {
        // SAFETY: the first entry (B1); two bytes that are aligned.
        let tail = unsafe { AtomicU16::from_ptr(&raw mut (*self.entries.as_ptr()).tail) };
        // Release: the entries are there. Pairs with smp_load_acquire of the tail in `io_ring_buffer_select`.
        tail.store(self.tail, Ordering::Release);
    }
}
