//! The device side of one split virtqueue.
//!
//! Theory of operation: one owner, no locks. The device takes a batch of chains ([`SplitQueue::pop`]),
//! processes their buffers, writes a used element for each ([`SplitQueue::push_used`]) and makes all of them
//! visible with one store ([`SplitQueue::publish`]). If several chains hold one frame (mergeable buffers),
//! the device calls `push_used` for each and `publish` once, so the driver sees a frame whole or not at all.
//!
//! ```text
//!            used_idx         next_avail          avail_seen
//!    ... done | taken, in flight | known, not taken  | unknown ...        all free-running, modulo 2^16
//!               ^ push_used        ^ pop  ^ unpop
//! ```
//!
//! Values from the driver are read once: an entry of the available ring into a local array, a descriptor into
//! a [`Descriptor`], both by atomic loads, so that the compiler cannot read them again. All later code uses
//! the copy.
//!
//! Cost: a batch is taken in blocks of 32. The first pass over a block reads heads and prefetches
//! descriptors; the second reads descriptors and prefetches the first line of each buffer, which the device
//! will touch next. Chains of one descriptor are taken by one loop (a run), all others (lists, indirect
//! tables, a buffer in another region, faults) by `take_chain`, out of line.
//!
//! In-order (VIRTIO_F_IN_ORDER, 2.7.9): the caller returns chains in the order of `pop`. A used element is
//! written for each: the feature allows that, and no special case is needed.
//!
//! Invariants: the three parts lie inside the map, aligned, for as long as `memory` lives (RingLayout,
//! checked again in `new`). Ring indices are masked, and descriptor indices compared with the table's length, before use.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use self::journal::Notes;
use crate::cell::Cell;
use crate::chain::{ChainBuilder, ChainId, Chains, Kind, Stop};
use crate::crash;
use crate::indirect::{Prefetch, Table, prefetch, prefetch_frame};
use crate::layout::{self, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};
use crate::log::DirtyLog;
use crate::memory::RegionHint;
use crate::notify::Words;
use crate::{
    Buffer, GuestFault, MemoryMap, QueueFeatures, QueueSize, QueueStart, RingAddresses, RingError,
    RingFormat, RingLayout, RingShape,
};

/// A block of which not all chains were taken.
struct ShortBlock {
    taken: usize,
    stop: Stop,
}

/// Number of chains whose descriptors are prefetched together.
const BLOCK: usize = 32;

/// With kicks off and event idx on, avail_event is moved on after this many entries, before the driver
/// reaches it (`NO_KICK` entries).
const SUPPRESSION_REFRESH: u16 = 0x4000;

/// Device side of one split virtqueue.
#[derive(Debug)]
pub struct SplitQueue {
    pub(crate) memory: Arc<MemoryMap>,
    base: NonNull<u8>,
    desc: NonNull<AtomicU64>,
    avail: NonNull<AtomicU16>,
    used: NonNull<u8>,
    pub(crate) size: QueueSize,
    pub(crate) features: QueueFeatures,
    hint: RegionHint,
    /// Kind of the last chain.
    kind: Kind,
    /// Next entry of the available ring to take.
    next_avail: u16,
    /// avail.idx as it was read last.
    avail_seen: u16,
    /// Next entry of the used ring to write.
    used_idx: u16,
    /// used.idx as the driver sees it.
    used_published: u16,
    /// The VMM's base minus used.idx: normally 0.
    skew: u16,
    /// The first publication always calls the driver: see `Queue::new`.
    call_once: bool,
    /// Whether kicks are enabled.
    kicks: bool,
    /// While kicks are off with event idx: the index for which avail_event was last written, less `NO_KICK`.
    suppressed_at: Option<u16>,
    pub(crate) log: Option<Arc<DirtyLog>>,
    notes: Notes,
    /// Heads that are served in place of the entries of the available ring from `replay_start` on.
    replay: Vec<u16>,
    replay_start: u16,
    /// How many of the first chains after `new` a predecessor had taken and not used, according to the journal.
    pub(crate) taken_before: usize,
    pub(crate) prefetch: Prefetch,
    offsets: RingAddresses,
}

// SAFETY: the pointers are into `memory`, which is Send and Sync and moves along; nothing is tied to a
// thread. Not Sync: nothing needs it, and `write_used` stores by `&self`.
unsafe impl Send for SplitQueue {}

impl SplitQueue {
    /// As [`Queue::new`](crate::Queue::new). After a crash, used.idx is the base from which no chain is lost,
    /// if chains were used in order.
    ///
    /// # Errors
    /// `rings` was made for another map, and does not fit this one.
    pub fn new(
        memory: &Arc<MemoryMap>,
        rings: RingLayout,
        features: QueueFeatures,
        start: QueueStart,
    ) -> Result<Self, RingError> {
        let shape = RingShape::new(RingFormat::Split, rings.size());
        let rings = RingLayout::from_offsets(memory, shape, rings.offsets())?;
        let base = memory.base();
        // SAFETY: from_offsets has checked that all three parts are inside the map.
        let part = |offset: u64| unsafe { base.add(offset as usize) };
        let offsets = rings.offsets();
        let mut queue = Self {
            base,
            desc: part(offsets.desc).cast(),
            avail: part(offsets.avail).cast(),
            used: part(offsets.used),
            size: rings.size(),
            features,
            hint: RegionHint::default(),
            kind: Kind::Other,
            next_avail: start.base as u16,
            avail_seen: start.base as u16,
            used_idx: 0,
            used_published: 0,
            skew: 0,
            call_once: true,
            kicks: true,
            suppressed_at: None,
            log: None,
            notes: Notes::None,
            replay: Vec::new(),
            replay_start: 0,
            taken_before: 0,
            prefetch: Prefetch::default(),
            offsets,
            memory: Arc::clone(memory),
        };
        queue.used_idx = Cell::load(queue.words().used_idx, Ordering::Relaxed);
        queue.used_published = queue.used_idx;
        // With event idx the device keeps used.flags at 0 (2.7.10).
        Cell::store(queue.words().used_flags, 0, Ordering::Relaxed);
        queue.log = start.log;
        queue.take_over(start.journal)?;
        queue.skew = queue.next_avail.wrapping_sub(queue.used_idx);
        let _ = queue.enable_kicks();
        Ok(queue)
    }

    /// How many chains the driver has made available and the device has not taken. Reads avail.idx.
    ///
    /// # Errors
    /// [`GuestFault::AvailIndexJump`].
    #[inline]
    pub fn available(&mut self) -> Result<u16, GuestFault> {
        // Observes descriptors and available entries that the driver wrote before it. Pairs with the driver's
        // write barrier before its store of avail.idx (2.7.13.3.1; virtio_wmb in virtqueue_add_split).
        // Without it we read descriptors before they are written.
        let found = Cell::load(self.words().avail_idx, Ordering::Acquire);
        let count = found.wrapping_sub(self.next_avail);
        // A correct driver never has more chains in the ring than entries, including those in flight.
        let under_way = found.wrapping_sub(self.used_published).wrapping_sub(self.skew);
        if count > self.size.get() || under_way > self.size.get() {
            return Err(self.index_jump(found));
        }
        self.avail_seen = found;
        Ok(count)
    }

    /// As [`Queue::pop`](crate::Queue::pop). avail.idx is read only if the chains known from last time are not enough.
    ///
    /// # Errors
    /// The driver broke a rule.
    #[inline]
    pub fn pop(&mut self, chains: &mut Chains, max: usize) -> Result<usize, GuestFault> {
        chains.prepare(max.min(usize::from(self.size.get())), self.size);
        let mut wanted = usize::from(self.avail_seen.wrapping_sub(self.next_avail));
        if wanted < max {
            wanted = usize::from(self.available()?);
        }
        wanted = wanted.min(max);
        let mut taken = 0;
        while taken < wanted {
            let block = (wanted - taken).min(BLOCK);
            match self.pop_block(chains, block) {
                Ok(()) => taken += block,
                Err(short) => {
                    taken += short.taken;
                    match short.stop {
                        Stop::Fault(fault) if taken == 0 => return Err(fault),
                        Stop::Fault(_) | Stop::BatchFull => break,
                    }
                }
            }
        }
        if !matches!(self.notes, Notes::None) {
            self.note_taken(chains);
        }
        self.refresh_suppression();
        Ok(taken)
    }

    /// Takes `count` (at most [`BLOCK`]) chains, or fewer.
    #[inline(always)]
    fn pop_block(&mut self, chains: &mut Chains, count: usize) -> Result<(), ShortBlock> {
        let mut heads = [0u16; BLOCK];
        for (step, head) in heads[..count].iter_mut().enumerate() {
            *head = self.read_avail_entry(self.next_avail.wrapping_add(step as u16));
            self.prefetch_descriptor(*head);
        }
        if !self.replay.is_empty() {
            self.replay_into(&mut heads[..count]);
        }
        let mut result = Ok(());
        let mut taken = 0;
        loop {
            let rest = &heads[taken..count];
            taken += match self.kind {
                Kind::Single { writable: true } => self.take_run::<true>(chains, rest),
                Kind::Single { writable: false } => self.take_run::<false>(chains, rest),
                Kind::Other => 0,
            };
            let Some(&head) = heads[..count].get(taken) else {
                break;
            };
            let mut hint = self.hint;
            let chain = self.take_chain(chains, &mut hint, head);
            self.hint = hint;
            match chain {
                Ok(kind) => self.kind = kind,
                Err(stop) => {
                    result = Err(ShortBlock { taken, stop });
                    break;
                }
            }
            taken += 1;
        }
        self.next_avail = self.next_avail.wrapping_add(taken as u16);
        result
    }

    /// Takes the chains at `heads` while they are of the common kind: one descriptor, with a buffer in the
    /// region of the last one. Returns how many; the caller handles the chain after them.
    #[inline(always)]
    fn take_run<const WRITABLE: bool>(&self, chains: &mut Chains, heads: &[u16]) -> usize {
        let common = if WRITABLE { DESC_WRITE } else { 0 };
        // Copies: the compiler loads fields of `self` again after each atomic load.
        let (table, hint, base, prefetch) = (self.table(), self.hint, self.base, self.prefetch);
        chains.push_singles::<_, WRITABLE>(heads, |&head| {
            let desc = read_descriptor(table.get(usize::from(head))?);
            if desc.flags & (DESC_NEXT | DESC_INDIRECT | DESC_WRITE) != common {
                return None;
            }
            let buffer = Buffer::at(hint.find(desc.addr, desc.len.into())?, desc.len);
            prefetch_frame(base, &buffer, WRITABLE, prefetch);
            Some((ChainId::split(head), buffer))
        })
    }

    /// Takes the chain at `head`, of any shape. Returns which kind it is.
    #[inline(never)]
    fn take_chain(&self, chains: &mut Chains, hint: &mut RegionHint, head: u16) -> Result<Kind, Stop> {
        let Some(desc) = self.descriptor(head) else {
            let size = self.size.get();
            return Err(GuestFault::HeadOutOfRange { head, size }.into());
        };
        let mut builder = ChainBuilder::new(chains, head, self.size);
        match self.walk(&mut builder, hint, head, desc) {
            Ok(()) => {
                builder.finish(ChainId::split(head));
                Ok(Kind::of(desc))
            }
            Err(stop) => {
                builder.abandon();
                Err(stop)
            }
        }
    }

    /// Follows a chain through the descriptor table (2.7.5.2). It ends after one descriptor more than the
    /// queue has: ChainBuilder counts.
    #[inline(always)]
    fn walk(
        &self,
        builder: &mut ChainBuilder<'_>,
        hint: &mut RegionHint,
        head: u16,
        mut desc: Descriptor,
    ) -> Result<(), Stop> {
        loop {
            if desc.has(DESC_INDIRECT) {
                return self.walk_indirect(builder, hint, head, desc);
            }
            self.prefetch_buffer(builder.push(&self.memory, hint, desc)?);
            if !desc.has(DESC_NEXT) {
                return Ok(());
            }
            let (next, size) = (desc.next, self.size.get());
            let Some(following) = self.descriptor(next) else {
                return Err(GuestFault::NextOutOfRange { head, next, size }.into());
            };
            desc = following;
        }
    }

    /// Follows a chain through an indirect table (2.7.5.3), which is checked as one range. It may be the last
    /// part of a chain that began directly. Its WRITE flag means nothing (2.7.5.3.2).
    #[inline(always)]
    fn walk_indirect(
        &self,
        builder: &mut ChainBuilder<'_>,
        hint: &mut RegionHint,
        head: u16,
        table: Descriptor,
    ) -> Result<(), Stop> {
        let negotiated = self.features.indirect;
        let table = Table::find(&self.memory, self.size, negotiated, head, table)?;
        let size = table.entries;
        let (mut next, mut left) = (0, size);
        loop {
            let Some([low, high]) = table.read(next) else {
                return Err(GuestFault::NextOutOfRange { head, next, size }.into());
            };
            if left == 0 {
                return Err(GuestFault::DescriptorLoop { head, limit: size }.into());
            }
            left -= 1;
            let desc = Descriptor::from_words(low, high);
            if desc.has(DESC_INDIRECT) {
                return Err(GuestFault::NestedIndirect { head }.into());
            }
            self.prefetch_buffer(builder.push(&self.memory, hint, desc)?);
            if !desc.has(DESC_NEXT) {
                return Ok(());
            }
            next = desc.next;
        }
    }

    /// As [`Queue::unpop`](crate::Queue::unpop).
    ///
    /// # Panics
    /// In debug builds, if more are returned than the queue holds: a bug of the caller.
    #[inline]
    pub fn unpop(&mut self, slots: u16) {
        debug_assert!(slots <= self.size.get(), "more given back than the queue holds");
        self.next_avail = self.next_avail.wrapping_sub(slots);
        if !matches!(self.notes, Notes::None) {
            self.note_returned(slots);
        }
    }

    /// As [`Queue::push_used`](crate::Queue::push_used).
    #[inline]
    pub fn push_used(&mut self, id: ChainId, len: u32) {
        self.write_used(self.used_idx, id.head.into(), len);
        self.used_idx = self.used_idx.wrapping_add(1);
    }

    /// As [`Queue::push_used_in_any_order`](crate::Queue::push_used_in_any_order).
    #[inline]
    pub fn push_used_in_any_order(&mut self, id: ChainId, len: u32) {
        if let Notes::Inflight(journal) = &mut self.notes {
            journal.use_next(self.used_idx.wrapping_sub(self.used_published), id.head);
        }
        self.push_used(id, len);
    }

    /// Whether a successor can find out for each chain whether it is in flight.
    pub(crate) fn notes_each_chain(&self) -> bool {
        matches!(self.notes, Notes::Inflight(_))
    }

    /// Writes the used element for free-running index `index`.
    #[inline(always)]
    fn write_used(&self, index: u16, id: u32, len: u32) {
        crash::point();
        let slot = usize::from(index & self.size.mask());
        let element = u64::from(id) | u64::from(len) << 32;
        // SAFETY: the slot is masked, so the element is inside the used ring, which is inside the map
        // (`new`). It is 4-aligned only. Only the device writes here, and the driver reads no element at or
        // past used.idx, so no access races with this one, unless the driver breaks the rules; then only its
        // own reads are torn.
        unsafe {
            let ring = self.used.add(layout::RING_ENTRIES as usize).cast::<u64>();
            ring.add(slot).write_unaligned(element.to_le());
        }
    }

    /// As [`Queue::publish`](crate::Queue::publish).
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.used_idx == self.used_published {
            return false;
        }
        if let Notes::Inflight(journal) = &mut self.notes {
            journal.before_publish(self.used_idx.wrapping_sub(self.used_published));
        }
        crash::point();
        let wanted = self.words().publish_used(self.used_published, self.used_idx);
        if !matches!(self.notes, Notes::None) {
            self.note_published();
        }
        if self.log.is_some() {
            self.log_used(self.used_published, self.used_idx);
        }
        self.used_published = self.used_idx;
        std::mem::take(&mut self.call_once) | wanted
    }

    /// As [`Queue::disable_kicks`](crate::Queue::disable_kicks).
    #[inline]
    pub fn disable_kicks(&mut self) {
        let event = self.taken_end();
        self.kicks = false;
        self.words().disable_kicks(event);
        self.note_taken_end();
        self.log_events();
        self.suppressed_at = self.features.event_idx.then_some(event);
    }

    /// As [`Queue::enable_kicks`](crate::Queue::enable_kicks).
    #[inline]
    #[must_use = "sleeping on true loses a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        self.suppressed_at = None;
        self.kicks = true;
        let more = self.words().enable_kicks(self.taken_end(), self.next_avail);
        self.note_taken_end();
        self.log_events();
        more
    }

    /// The next chain to take: the reply to VHOST_USER_GET_VRING_BASE.
    #[must_use]
    pub fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    /// Moves avail_event on while kicks are off, before the driver's index reaches it.
    #[inline(always)]
    fn refresh_suppression(&mut self) {
        if let Some(at) = self.suppressed_at
            && self.next_avail.wrapping_sub(at) > SUPPRESSION_REFRESH
        {
            self.disable_kicks();
        }
    }

    /// Marks used elements `[from, to)` and the first words of the used ring in the dirty log.
    #[cold]
    fn log_used(&self, from: u16, to: u16) {
        let Some(log) = &self.log else { return };
        let used = self.offsets.used;
        let (count, first) = (to.wrapping_sub(from), from & self.size.mask());
        // In two parts, if they wrap around the end.
        let before_end = count.min(self.size.get() - first);
        for (slot, count) in [(first, before_end), (0, count - before_end)] {
            let at = used + layout::RING_ENTRIES + layout::USED_ELEM_BYTES * u64::from(slot);
            self.memory
                .log(log, at, layout::USED_ELEM_BYTES * u64::from(count));
        }
        self.memory.log(log, used, layout::RING_ENTRIES);
    }

    /// Marks the words that request kicks in the dirty log.
    #[inline]
    fn log_events(&self) {
        let Some(log) = &self.log else { return };
        let used = self.offsets.used;
        let event = used + layout::avail_event_offset(self.size.get());
        self.memory.log(log, used, layout::RING_ENTRIES);
        self.memory.log(log, event, 2);
    }

    #[cold]
    fn index_jump(&self, found: u16) -> GuestFault {
        GuestFault::AvailIndexJump {
            found,
            next: self.next_avail,
            size: self.size.get(),
        }
    }

    /// Entry `index` of the available ring, read once.
    #[inline(always)]
    fn read_avail_entry(&self, index: u16) -> u16 {
        let slot = usize::from(index & self.size.mask());
        // SAFETY: masked, so inside the available ring, which is inside the map and 2-aligned (`new`).
        let entry = unsafe { self.avail.add(layout::RING_ENTRIES as usize / 2 + slot).as_ref() };
        Cell::load(entry, Ordering::Relaxed)
    }

    /// The descriptor table.
    #[inline(always)]
    fn table(&self) -> &[[AtomicU64; 2]] {
        // SAFETY: the table has `size` descriptors of two words, and is inside the map and 16-aligned (`new`).
        unsafe { slice::from_raw_parts(self.desc.cast().as_ptr(), self.size.get().into()) }
    }

    /// Descriptor `index` of the table; `None`: there is none.
    #[inline(always)]
    fn descriptor(&self, index: u16) -> Option<Descriptor> {
        self.table().get(usize::from(index)).map(read_descriptor)
    }

    #[inline(always)]
    fn words(&self) -> Words<'_, AtomicU16> {
        let size = self.size.get();
        // SAFETY: offsets of layout.rs are inside the parts of the ring for this size, which are inside the
        // map and aligned (`new`).
        let at = |part: NonNull<u8>, offset: u64| unsafe {
            part.add(offset as usize).cast::<AtomicU16>().as_ref()
        };
        let (avail, used) = (self.avail.cast::<u8>(), self.used);
        Words {
            avail_flags: at(avail, layout::RING_FLAGS),
            avail_idx: at(avail, layout::RING_IDX),
            used_event: at(avail, layout::used_event_offset(size)),
            used_flags: at(used, layout::RING_FLAGS),
            used_idx: at(used, layout::RING_IDX),
            avail_event: at(used, layout::avail_event_offset(size)),
            event_idx: self.features.event_idx,
        }
    }

    /// `head` is not checked yet: a prefetch of any address reads nothing that the program sees, and never faults.
    #[inline(always)]
    fn prefetch_descriptor(&self, head: u16) {
        prefetch(
            self.desc
                .as_ptr()
                .cast::<u8>()
                .wrapping_add(16 * usize::from(head)),
        );
    }

    #[inline(always)]
    fn prefetch_buffer(&self, offset: u64) {
        if self.prefetch == Prefetch::Frame {
            prefetch(self.base.as_ptr().wrapping_add(offset as usize));
        }
    }
}

/// A descriptor of the table, each byte read once.
#[inline(always)]
fn read_descriptor([low, high]: &[AtomicU64; 2]) -> Descriptor {
    let load = |word| Cell::load(word, Ordering::Relaxed);
    Descriptor::from_words(load(low), load(high))
}

#[path = "split_journal.rs"]
mod journal;

#[cfg(all(test, not(loom)))]
#[path = "split_tests.rs"]
mod tests;
