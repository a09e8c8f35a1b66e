//! The driver of a split ring for tests: other start indices, indirect chains, reading the ring, breaking the rules.

use std::sync::atomic::Ordering;

use super::{Buffer, SplitDriver};
use crate::GuestAddr;
use crate::cell::Cell;
use crate::layout::{self, DESC_INDIRECT, Descriptor};

impl SplitDriver {
    /// Lets all indices start at `index`, as after 2^16 laps and some: for tests of the wrap. Only before the
    /// first `add`.
    pub fn start_at(&mut self, index: u16) {
        assert!(self.ring.order.is_empty(), "chains are under way");
        (self.avail_idx, self.avail_published) = (index, index);
        (self.used_idx, self.used_published) = (index, index);
        self.set_avail_idx(index);
        Cell::store(self.words().used_idx, index, Ordering::Relaxed);
    }

    /// Descriptors that are free.
    pub fn free_descriptors(&self) -> usize {
        self.free.into()
    }

    /// As [`add`](Self::add), with an indirect table: one descriptor of the ring, however many buffers.
    ///
    /// # Panics
    /// If there is no buffer, or no memory for a table.
    pub fn add_indirect(&mut self, buffers: &[Buffer]) -> Option<u16> {
        assert!(!buffers.is_empty(), "a chain has at least one buffer");
        if self.free == 0 {
            return None;
        }
        let head = self.first_free;
        let table = self.ring.table(head, buffers.len());
        for (i, buffer) in buffers.iter().enumerate() {
            let next = (i + 1 < buffers.len()).then_some(i as u16 + 1);
            self.write_table_entry(table, i as u16, buffer.descriptor(next));
        }
        let len = layout::DESC_BYTES as u32 * buffers.len() as u32;
        self.write_descriptor(
            head,
            Descriptor {
                addr: table.get(),
                len,
                flags: DESC_INDIRECT,
                next: 0,
            },
        );
        Some(self.push_avail(1, self.next[usize::from(head)]))
    }

    /// Writes entry `index` of a table in guest memory, unchecked.
    pub fn write_table_entry(&self, table: GuestAddr, index: u16, desc: Descriptor) {
        let offset = self.ring.table_entry(table, index);
        self.ring.write_words(offset, desc.to_words());
    }

    /// Sets avail.idx in memory, and nothing else.
    pub fn set_avail_idx(&self, index: u16) {
        Cell::store(self.words().avail_idx, index, Ordering::Release);
    }

    /// Sets avail.flags.
    pub fn set_avail_flags(&self, flags: u16) {
        Cell::store(self.words().avail_flags, flags, Ordering::Relaxed);
    }

    /// Sets used_event.
    pub fn set_used_event(&self, index: u16) {
        Cell::store(self.words().used_event, index, Ordering::Relaxed);
    }

    /// Index of the next chain to be added.
    pub fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// used.idx in memory.
    pub fn used_idx(&self) -> u16 {
        Cell::load(self.words().used_idx, Ordering::Acquire)
    }

    /// used.flags in memory.
    pub fn used_flags(&self) -> u16 {
        Cell::load(self.words().used_flags, Ordering::Relaxed)
    }

    /// avail_event in memory.
    pub fn avail_event(&self) -> u16 {
        Cell::load(self.words().avail_event, Ordering::Relaxed)
    }
}
