//! The configuration map, mapped into this process: one 64-bit word a queue (`bpf/steer.h`).
//!
//! A word is changed by one atomic store, so the program on any CPU sees the old or the new configuration, never a
//! mix of both, which the kernel does not promise for an update by system call (it copies bytes).
//! Writers: this process only. Readers: the XDP program, once a frame.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::layout::MAX_QUEUES;

const MAP_BYTES: usize = MAX_QUEUES as usize * size_of::<AtomicU64>();

/// The mapped words of all queues.
#[derive(Debug)]
pub(crate) struct QueueWords {
    words: NonNull<AtomicU64>,
}

// SAFETY: the pointer is to shared memory that lives until Drop, and every access to it is atomic.
unsafe impl Send for QueueWords {}
// SAFETY: as for Send.
unsafe impl Sync for QueueWords {}

impl QueueWords {
    /// Maps the array map behind `map`, which has [`MAX_QUEUES`] values of eight bytes and `BPF_F_MMAPABLE`.
    pub(crate) fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours. The kernel refuses
        // a length beyond the map (array_map_mmap in kernel/bpf/arraymap.c), so all of it is backed.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                MAP_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { words })
    }

    fn word(&self, queue: u32) -> Option<&AtomicU64> {
        if queue >= MAX_QUEUES {
            return None;
        }
        // SAFETY: queue < MAX_QUEUES was just checked, so the word lies in the mapping made by `map`, which is
        // page-aligned, zeroed by the kernel, and lives as long as self. The other side only reads it.
        Some(unsafe { self.words.add(queue as usize).as_ref() })
    }

    /// The word of a queue; `None` beyond [`MAX_QUEUES`].
    pub(crate) fn load(&self, queue: u32) -> Option<u64> {
        // Relaxed: this process is the only writer, and nothing else is read because of the word.
        self.word(queue).map(|word| word.load(Ordering::Relaxed))
    }

    /// Replaces the word of a queue; false beyond [`MAX_QUEUES`].
    pub(crate) fn store(&self, queue: u32, value: u64) -> bool {
        let Some(word) = self.word(queue) else {
            return false;
        };
        // Release: publishes what was prepared for the queue (its socket in the XSKMAP, a system call made before)
        // to the program that loads this word in steer_frame(). Without it the program could see the queue as ours
        // before the socket is there, and pass some of the first frames to the host.
        word.store(value, Ordering::Release);
        true
    }
}

impl Drop for QueueWords {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `map` made; no reference into it outlives self. munmap can fail only on
        // bad arguments.
        unsafe { libc::munmap(self.words.as_ptr().cast(), MAP_BYTES) };
    }
}
