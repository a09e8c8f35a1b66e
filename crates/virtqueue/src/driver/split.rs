//! The driver of one split virtqueue (VirtIO 1.3, 2.7.13 and 2.7.14).

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use super::ring::{DriverFeatures, DriverRing};
use super::{GuestRam, RamError};
use crate::cell::Cell;
use crate::layout::{self, DESC_NEXT, DESC_WRITE, Descriptor};
use crate::notify::Words;
use crate::{GuestAddr, QueueSize, RingAddresses, RingFormat, RingShape};

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it starts.
    pub addr: GuestAddr,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

impl Buffer {
    /// A buffer that the device reads.
    #[must_use]
    pub const fn readable(addr: GuestAddr, len: u32) -> Self {
        Self {
            addr,
            len,
            writable: false,
        }
    }

    /// A buffer that the device writes.
    #[must_use]
    pub const fn writable(addr: GuestAddr, len: u32) -> Self {
        Self {
            addr,
            len,
            writable: true,
        }
    }

    /// Its descriptor, in a chain that continues at descriptor `next`.
    #[must_use]
    pub fn descriptor(self, next: Option<u16>) -> Descriptor {
        let flags = if self.writable { DESC_WRITE } else { 0 } | if next.is_some() { DESC_NEXT } else { 0 };
        Descriptor {
            addr: self.addr.get(),
            len: self.len,
            flags,
            next: next.unwrap_or(0),
        }
    }
}

/// A chain that the device returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What `add` returned for it: its first descriptor, or in a packed ring its buffer id.
    pub head: u16,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// The driver's side of one split virtqueue.
#[derive(Debug)]
pub struct SplitDriver {
    ring: DriverRing,
    /// By descriptor: the next one of its chain, or of the list of free ones.
    next: Vec<u16>,
    /// By descriptor: how many descriptors the chain has whose head it is.
    lengths: Vec<u16>,
    /// How many descriptors are free, and the first and the last one of their list. Chains are taken from the front;
    /// with in-order they are returned at the end and so stay in ring order.
    free: u16,
    first_free: u16,
    last_free: u16,
    avail_idx: u16,
    avail_published: u16,
    used_idx: u16,
    /// What the device had published when the driver looked last.
    used_published: u16,
}

impl Deref for SplitDriver {
    type Target = DriverRing;

    fn deref(&self) -> &DriverRing {
        &self.ring
    }
}

impl SplitDriver {
    /// Makes a ring of `size` entries in `ram`.
    ///
    /// # Errors
    /// Guest memory is full.
    pub fn new(ram: &Arc<GuestRam>, size: QueueSize, features: DriverFeatures) -> Result<Self, RamError> {
        let (entries, shape) = (size.get(), RingShape::new(RingFormat::Split, size));
        Ok(Self {
            ring: DriverRing::new(ram, shape, features)?,
            next: (1..=entries).collect(),
            lengths: vec![0; usize::from(entries)],
            free: entries,
            first_free: 0,
            last_free: entries - 1,
            avail_idx: 0,
            avail_published: 0,
            used_idx: 0,
            used_published: 0,
        })
    }

    /// Puts a chain of `buffers` into the ring, not yet visible. Returns its head; `None` if there are not
    /// enough descriptors.
    ///
    /// # Panics
    /// If there is no buffer.
    pub fn add(&mut self, buffers: &[Buffer]) -> Option<u16> {
        assert!(!buffers.is_empty(), "a chain has at least one buffer");
        let count = u16::try_from(buffers.len())
            .ok()
            .filter(|&count| count <= self.free)?;
        let mut index = self.first_free;
        for (i, buffer) in buffers.iter().enumerate() {
            let next = self.next[usize::from(index)];
            let is_last = i + 1 == buffers.len();
            self.write_descriptor(index, buffer.descriptor((!is_last).then_some(next)));
            index = next;
        }
        Some(self.push_avail(count, index))
    }

    /// Makes the first `count` free descriptors a chain, of which `first_free` is not. Returns its head.
    fn push_avail(&mut self, count: u16, first_free: u16) -> u16 {
        let head = std::mem::replace(&mut self.first_free, first_free);
        self.lengths[usize::from(head)] = count;
        self.free -= count;
        self.set_avail_entry(self.avail_idx, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.ring.order.push_back(head);
        head
    }

    /// Makes all added chains visible with one store of avail.idx. Returns whether the device wants a kick.
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.avail_published, self.avail_idx);
        self.words().publish_avail(old, self.avail_idx)
    }

    /// Takes the next chain that the device returned, and frees its descriptors.
    ///
    /// # Panics
    /// If the device returns a chain that it does not hold, or with in-order one out of order.
    pub fn take_used(&mut self) -> Option<Used> {
        if self.used_published == self.used_idx {
            let used_idx = self.word(self.ring.offsets.used + layout::RING_IDX);
            // Pairs with the device's release store of used.idx: elements and frames before it are visible
            // (2.7.14).
            self.used_published = Cell::load(used_idx, Ordering::Acquire);
            if self.used_published == self.used_idx {
                return None;
            }
        }
        let used = self.used_element(self.used_idx);
        self.used_idx = self.used_idx.wrapping_add(1);
        self.release(used.head);
        Some(used)
    }

    fn release(&mut self, head: u16) {
        self.ring.came_back(head);
        let count = std::mem::take(&mut self.lengths[usize::from(head)]);
        let last = (1..count).fold(head, |index, _| self.next[usize::from(index)]);
        if self.free == 0 {
            (self.first_free, self.last_free) = (head, last);
        } else if self.ring.features.in_order {
            self.next[usize::from(self.last_free)] = head;
            self.last_free = last;
        } else {
            self.next[usize::from(last)] = self.first_free;
            self.first_free = head;
        }
        self.free += count;
    }

    /// Asks for a call with the next chain that the device returns. `true`: it has returned one already.
    pub fn enable_calls(&mut self) -> bool {
        self.words().enable_calls(self.used_idx)
    }

    /// Tells the device that no calls are needed.
    pub fn disable_calls(&mut self) {
        self.words().disable_calls(self.used_idx);
    }

    /// Writes descriptor `index`, unchecked.
    pub fn write_descriptor(&self, index: u16, desc: Descriptor) {
        let offset = self.ring.offsets.desc + layout::desc_bytes(index);
        self.ring.write_words(offset, desc.to_words());
    }

    /// Writes the entry of the available ring for free-running index `index`.
    pub fn set_avail_entry(&self, index: u16, head: u16) {
        let slot = u64::from(index & self.ring.size.mask());
        let entry = self.word(self.ring.offsets.avail + layout::RING_ENTRIES + 2 * slot);
        Cell::store(entry, head, Ordering::Relaxed);
    }

    /// The used element for free-running index `index`.
    fn used_element(&self, index: u16) -> Used {
        let slot = u64::from(index & self.ring.size.mask());
        let offset = self.ring.offsets.used + layout::RING_ENTRIES + layout::USED_ELEM_BYTES * slot;
        let number = |offset| Cell::load(self.ring.word::<AtomicU32, _>(offset), Ordering::Relaxed);
        Used {
            head: u16::try_from(number(offset)).expect("the device invented a head"),
            len: number(offset + 4),
        }
    }

    fn word(&self, offset: u64) -> &AtomicU16 {
        self.ring.word(offset)
    }

    fn words(&self) -> Words<'_, AtomicU16> {
        let RingAddresses { avail, used, .. } = self.ring.offsets;
        let size = self.ring.size.get();
        Words {
            avail_flags: self.word(avail + layout::RING_FLAGS),
            avail_idx: self.word(avail + layout::RING_IDX),
            used_event: self.word(avail + layout::used_event_offset(size)),
            used_flags: self.word(used + layout::RING_FLAGS),
            used_idx: self.word(used + layout::RING_IDX),
            avail_event: self.word(used + layout::avail_event_offset(size)),
            event_idx: self.ring.features.event_idx,
        }
    }
}

#[cfg(feature = "test-driver")]
#[path = "tests/split.rs"]
mod tests;
