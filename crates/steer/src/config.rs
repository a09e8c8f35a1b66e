//! The configuration map, mapped into this process: one 64-bit word per queue (`bpf/steer.h`).
//!
//! A word is changed by one atomic store, so the program on any CPU sees the old or the new configuration,
//! never a mix. An update by system call does not guarantee that (it copies bytes). Writers: this process
//! only. Readers: the XDP program, once per frame.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use xsk::Mapping;

use crate::layout::MAX_QUEUES;

const MAP_BYTES: usize = MAX_QUEUES as usize * size_of::<AtomicU64>();

/// The mapped words of all queues.
#[derive(Debug)]
pub(crate) struct QueueWords(Mapping);

impl QueueWords {
    /// Maps the array map behind `map`, which has [`MAX_QUEUES`] values of eight bytes and `BPF_F_MMAPABLE`.
    pub(crate) fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        // The kernel refuses a length beyond the map (array_map_mmap in kernel/bpf/arraymap.c), so all of it is backed.
        Mapping::new(map, MAP_BYTES, 0).map(Self)
    }

    fn word(&self, queue: u32) -> Option<&AtomicU64> {
        if queue >= MAX_QUEUES {
            return None;
        }
        let words = self.0.part::<AtomicU64>(0, MAX_QUEUES);
        // SAFETY: queue < MAX_QUEUES was just checked, so the word lies in the mapping, which is
        // page-aligned, zeroed by the kernel, and lives as long as self. The XDP program only reads it.
        Some(unsafe { words.add(queue as usize).as_ref() })
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
        // Release: publishes the preparations for the queue (its socket in the XSKMAP, a system call made
        // before) to the program that loads this word in steer_frame(). Without it the program could see the
        // queue as active before the socket is there, and pass some of the first frames to the host.
        word.store(value, Ordering::Release);
        true
    }
}
