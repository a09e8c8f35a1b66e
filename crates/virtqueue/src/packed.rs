//! The device side of one packed virtqueue (VirtIO 1.3, 2.8).
//!
//! Theory of operation: one owner, no locks, and the methods of [`SplitQueue`](crate::split::SplitQueue). There is
//! one ring of descriptors, which both sides write. Two bits of a slot's flags, compared with the current wrap
//! counter ([`Position`]), mark it as available or used. If chains are used in the order in which they were taken,
//! each used descriptor goes to the slot in which its chain began, and the ring always has three parts:
//!
//! ```text
//!             used               next
//!    ... used  | taken, in flight | available, or not yet ...      positions: slot and lap
//!              ^ push_used        ^ pop  ^ unpop
//! ```
//!
//! Chains used in another order occupy the same number of slots, so the sizes of the parts do not change. But a used
//! descriptor may then overwrite the descriptor of a chain in flight: only the inflight region has a copy of that.
//!
//! *Taking.* The second word of a descriptor (length, id, flags) is loaded once, with Acquire; if its flags
//! mark it available, the first word (address) is loaded next. Everything else uses that copy. Chains of one
//! descriptor are taken by one loop (a run). The others (lists, indirect tables, a buffer in another region,
//! faults) are handled out of line, which reads the descriptor again. If a driver makes slots available that
//! the device still holds, counting reveals it ([`GuestFault::RingOverrun`]).
//!
//! *Using.* Used descriptors are written at once, except the first of a batch: the driver checks that one
//! first and stops there until [`publish`](PackedQueue::publish) stores it. So a batch, and with it a frame
//! in several chains, becomes visible as a whole.
//!
//! *For a successor* (`packed_resume.rs`): every slot that `used` has passed has the USED bit of its lap,
//! including the later slots of a list, which a device need not write. So the ring itself shows the device's
//! position. And the first slot of a batch keeps its future used descriptor in its address, which is no
//! longer needed: a successor that finds an unpublished batch can publish it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::journal::{Notes, TakenOver};
use crate::cell::Cell;
use crate::chain::{ChainBuilder, ChainId, Chains, Kind, Stop};
use crate::crash;
use crate::indirect::{Prefetch, Table, prefetch, prefetch_frame};
use crate::layout::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, PACKED_AVAIL, PACKED_USED, PackedDescriptor};
use crate::log::DirtyLog;
use crate::memory::RegionHint;
use crate::packed_notify::{self as notify, EventSuppression};
use crate::packed_resume::stash;
use crate::packed_ring::PackedRing;
use crate::position::Position;
use crate::{Buffer, GuestFault, MemoryMap, QueueFeatures, QueueSize, QueueStart, RingError, RingLayout};

/// How many slots ahead of the descriptor read the ring is prefetched: two cache lines. Only while the ring has more
/// available descriptors than are taken: otherwise the driver would have to get back the line that it is writing.
const SLOTS_AHEAD: usize = 8;

/// The flags, in a descriptor's second word, that identify an available descriptor that is a whole chain.
const COMMON_MASK: u64 = ((PACKED_AVAIL | PACKED_USED | DESC_NEXT | DESC_INDIRECT | DESC_WRITE) as u64) << 48;

/// Device side of one packed virtqueue.
#[derive(Debug)]
pub struct PackedQueue {
    pub(crate) ring: PackedRing,
    pub(crate) size: QueueSize,
    pub(crate) features: QueueFeatures,
    hint: RegionHint,
    /// Kind of the last chain.
    kind: Kind,
    /// [`SLOTS_AHEAD`] if the last batch had the maximum number of chains, else 0.
    ahead: usize,
    /// The next chain to take starts here.
    next: Position,
    /// The next used descriptor goes here.
    used: Position,
    /// Slots taken and not published, up to `next`: the driver must not write there.
    out: u16,
    /// Those of them that are used, up to `used`.
    unpublished: u16,
    /// Where the first unpublished used descriptor goes, and its second word.
    first: (u16, u64),
    /// The first publication always calls the driver: a predecessor may have died before its call.
    call_once: bool,
    pub(crate) log: Option<Arc<DirtyLog>>,
    notes: Notes,
    /// How many of the first chains after `new` a predecessor had taken and not used, according to the journal.
    pub(crate) taken_before: usize,
    pub(crate) prefetch: Prefetch,
}

/// Slots that may be available: `left` of them from `at` on.
#[derive(Clone, Copy)]
struct Room {
    at: Position,
    left: u16,
}

impl PackedQueue {
    /// As [`Queue::new`](crate::Queue::new).
    ///
    /// # Errors
    /// `rings` was made for another map and does not fit this one, or neither base nor ring gives a valid slot.
    pub fn new(
        memory: &Arc<MemoryMap>,
        rings: RingLayout,
        features: QueueFeatures,
        start: QueueStart,
    ) -> Result<Self, RingError> {
        let ring = PackedRing::new(memory, rings)?;
        let TakenOver { at, notes } = Notes::take_over(&ring, start.base, start.journal)?;
        let mut queue = Self {
            size: ring.size,
            taken_before: notes.taken_before(&ring, at),
            ring,
            features,
            hint: RegionHint::default(),
            kind: Kind::Other,
            ahead: 0,
            next: at,
            used: at,
            out: 0,
            unpublished: 0,
            first: (0, 0),
            call_once: true,
            log: start.log,
            notes,
            prefetch: Prefetch::default(),
        };
        if let Some(log) = &queue.log {
            // `resume` may have written anywhere.
            queue.ring.log_slots(log, at, queue.size.get());
        }
        let _ = queue.enable_kicks();
        Ok(queue)
    }

    /// As [`Queue::pop`](crate::Queue::pop).
    ///
    /// # Errors
    /// The driver broke a rule.
    #[inline]
    pub fn pop(&mut self, chains: &mut Chains, max: usize) -> Result<usize, GuestFault> {
        chains.prepare(max.min(usize::from(self.size.get())), self.size);
        if self.notes.has_left_over() {
            return self.pop_left_over(chains, max);
        }
        let (mut at, mut left) = (self.next, self.size.get() - self.out);
        let (mut hint, mut kind, mut taken) = (self.hint, self.kind, 0);
        let mut fault = None;
        while taken < max {
            let most = (max - taken).min(left.into());
            let slots = match kind {
                Kind::Single { writable: true } => self.take_run::<true>(chains, hint, at, most),
                Kind::Single { writable: false } => self.take_run::<false>(chains, hint, at, most),
                Kind::Other => 0,
            };
            at = at.forward(slots, self.size);
            left -= slots;
            taken += usize::from(slots);
            if taken == max {
                break;
            }
            if slots > 0 && at.offset == 0 {
                continue; // a new lap
            }
            let Some(desc) = self.ring.read_available(at) else {
                break;
            };
            match self.take_chain(chains, &mut hint, Room { at, left }, desc) {
                Ok(slots) => {
                    kind = Kind::of(desc.buffer());
                    at = at.forward(slots, self.size);
                    left -= slots;
                    taken += 1;
                }
                Err(stop) => {
                    if let Stop::Fault(stop) = stop {
                        fault = Some(stop);
                    }
                    break;
                }
            }
        }
        if taken == 0 {
            return fault.map_or(Ok(0), Err);
        }
        (self.hint, self.kind) = (hint, kind);
        self.ahead = if taken == max { SLOTS_AHEAD } else { 0 };
        if !matches!(self.notes, Notes::None) {
            self.note_taken(chains);
        }
        self.next = at;
        self.out = self.size.get() - left;
        Ok(taken)
    }

    /// Takes chains from `at` on, at most `most`, while they are of the common kind: one descriptor, with a
    /// buffer in the region of the last one. Returns how many; the caller handles the chain after them.
    #[inline(always)]
    fn take_run<const WRITABLE: bool>(
        &self,
        chains: &mut Chains,
        hint: RegionHint,
        at: Position,
        most: usize,
    ) -> u16 {
        // Copies: the compiler loads fields of `self` again after each atomic load.
        let (base, ahead, prefetch_of) = (self.ring.memory.base(), self.ahead, self.prefetch);
        let write = if WRITABLE { DESC_WRITE } else { 0 };
        let common = u64::from(at.available_flags() | write) << 48;
        let slots = chains.push_singles::<_, WRITABLE>(self.ring.run(at, most), |slot| {
            // Each word once, the second one before the first: see `read_available`.
            let high = PackedRing::load_high(slot);
            if high & COMMON_MASK != common {
                return None;
            }
            let desc = PackedRing::load(slot, high);
            let buffer = Buffer::at(hint.find(desc.addr, desc.len.into())?, desc.len);
            prefetch(slot.as_ptr().wrapping_add(ahead * slot.len()).cast());
            prefetch_frame(base, &buffer, WRITABLE, prefetch_of);
            let id = ChainId {
                head: desc.id,
                slots: 1,
            };
            Some((id, buffer))
        });
        slots as u16
    }

    /// Takes a chain of any shape, with first descriptor `desc`, from the slots in `room`. Returns how many
    /// slots it has.
    #[inline(never)]
    fn take_chain(
        &self,
        chains: &mut Chains,
        hint: &mut RegionHint,
        room: Room,
        desc: PackedDescriptor,
    ) -> Result<u16, Stop> {
        let head = room.at.offset;
        if room.left == 0 {
            return Err(GuestFault::RingOverrun { at: head }.into());
        }
        let mut builder = ChainBuilder::new(chains, head, self.size);
        match self.walk(&mut builder, hint, room, desc) {
            Ok(id) => {
                builder.finish(id);
                Ok(id.slots)
            }
            Err(stop) => {
                builder.abandon();
                Err(stop)
            }
        }
    }

    /// Follows a list, slot by slot; its id is that of its last descriptor (2.8.6).
    #[inline(always)]
    fn walk(
        &self,
        builder: &mut ChainBuilder<'_>,
        hint: &mut RegionHint,
        room: Room,
        mut desc: PackedDescriptor,
    ) -> Result<ChainId, Stop> {
        let Room { mut at, left } = room;
        let head = at.offset;
        let mut slots = 1;
        loop {
            let buffer = desc.buffer();
            let id = ChainId { head: desc.id, slots };
            if buffer.has(DESC_INDIRECT) {
                self.walk_indirect(builder, hint, head, desc)?;
                return Ok(id);
            }
            self.prefetch_buffer(builder.push(&self.ring.memory, hint, buffer)?);
            if !buffer.has(DESC_NEXT) {
                return Ok(id);
            }
            at = at.forward(1, self.size);
            if slots == left {
                let limit = self.size.get();
                let fault = if left == limit {
                    GuestFault::DescriptorLoop { head, limit }
                } else {
                    GuestFault::RingOverrun { at: at.offset }
                };
                return Err(fault.into());
            }
            let Some(next) = self.ring.read_available(at) else {
                return Err(GuestFault::ChainIncomplete { head, at: at.offset }.into());
            };
            desc = next;
            slots += 1;
        }
    }

    /// Takes all entries of an indirect table, in their order (2.8.7). Only WRITE means anything in them.
    #[inline(always)]
    fn walk_indirect(
        &self,
        builder: &mut ChainBuilder<'_>,
        hint: &mut RegionHint,
        head: u16,
        desc: PackedDescriptor,
    ) -> Result<(), Stop> {
        let memory = &self.ring.memory;
        let negotiated = self.features.indirect;
        let table = Table::find(memory, self.size, negotiated, head, desc.buffer())?;
        for [low, high] in (0..table.entries).map_while(|index| table.read(index)) {
            let entry = PackedDescriptor::from_words(low, high).buffer();
            if entry.has(DESC_INDIRECT) {
                return Err(GuestFault::NestedIndirect { head }.into());
            }
            self.prefetch_buffer(builder.push(memory, hint, entry)?);
        }
        Ok(())
    }

    /// As [`Queue::unpop`](crate::Queue::unpop).
    ///
    /// # Panics
    /// In debug builds, if more are returned than were taken: a bug of the caller.
    #[inline]
    pub fn unpop(&mut self, slots: u16) {
        debug_assert!(slots <= self.out - self.unpublished, "more given back than taken");
        self.next = self.next.back(slots, self.size);
        self.out -= slots;
        self.note_returned(slots);
    }

    /// As [`Queue::push_used`](crate::Queue::push_used).
    ///
    /// # Panics
    /// In debug builds, if more is used than was taken: a bug of the caller.
    #[inline]
    pub fn push_used(&mut self, id: ChainId, len: u32) {
        debug_assert!(id.slots <= self.out - self.unpublished, "more used than taken");
        let at = self.used;
        let written = if len > 0 { DESC_WRITE } else { 0 };
        let flags = at.used_flags() | written;
        if id.slots == 1 {
            self.write_used(id, len, flags);
        } else {
            self.write_used(id, len, flags | DESC_NEXT);
            self.use_rest(at, id);
        }
        self.used = at.forward(id.slots, self.size);
        self.unpublished += id.slots;
    }

    /// As [`Queue::push_used_in_any_order`](crate::Queue::push_used_in_any_order).
    #[inline]
    pub fn push_used_in_any_order(&mut self, id: ChainId, len: u32) {
        if let Notes::Inflight(journal) = &mut self.notes {
            journal.use_next(id);
        }
        self.push_used(id, len);
    }

    /// Whether a successor can find out for each chain whether it is in flight.
    pub(crate) fn notes_each_chain(&self) -> bool {
        matches!(self.notes, Notes::Inflight(_))
    }

    /// Writes the next used descriptor; the first of a batch is kept for [`publish`](Self::publish).
    #[inline(always)]
    fn write_used(&mut self, id: ChainId, len: u32, flags: u16) {
        let (addr, id) = (0, id.head);
        let [_, word] = PackedDescriptor { addr, len, id, flags }.to_words();
        let slot = self.used.offset;
        if self.unpublished == 0 {
            self.first = (slot, word);
            self.ring.store_low_after(slot, stash(word));
        } else {
            // A correct driver does not read it: it waits for the first of the batch; `publish` orders this
            // store before that one.
            self.ring.store_high(slot, word);
        }
    }

    /// Marks the second and later slots of the list at `head` as used (see the head of the file). NEXT stays
    /// set where it was, so that a successor recognises an incomplete list.
    #[inline(never)]
    fn use_rest(&mut self, head: Position, id: ChainId) {
        for step in 1..id.slots {
            let at = head.forward(step, self.size);
            let next = if step + 1 < id.slots { DESC_NEXT } else { 0 };
            let desc = PackedDescriptor {
                addr: 0,
                len: 0,
                id: id.head,
                flags: at.used_flags() | next,
            };
            self.ring.store_high(at.offset, desc.to_words()[1]);
        }
    }

    /// As [`Queue::publish`](crate::Queue::publish).
    #[inline]
    pub fn publish(&mut self) -> bool {
        let slots = std::mem::take(&mut self.unpublished);
        if slots == 0 {
            return false;
        }
        self.out -= slots;
        let (slot, word) = self.first;
        if let Notes::Inflight(journal) = &mut self.notes {
            journal.before_publish(slots, self.used);
        }
        crash::point();
        let batch = notify::Batch {
            first: self.ring.high(slot),
            word,
            end: self.used,
            slots,
            size: self.size,
        };
        let wanted = notify::publish(&batch, self.ring.driver_events(), self.features.event_idx);
        crash::point();
        if let Notes::Inflight(journal) = &mut self.notes {
            journal.after_publish(slots, self.used);
        }
        if let Some(log) = &self.log {
            self.ring.log_slots(log, self.used.back(slots, self.size), slots);
        }
        std::mem::take(&mut self.call_once) | wanted
    }

    /// As [`Queue::disable_kicks`](crate::Queue::disable_kicks).
    #[inline]
    pub fn disable_kicks(&mut self) {
        Cell::store(
            self.ring.device_events(),
            EventSuppression::NEVER.0,
            Ordering::Relaxed,
        );
        self.log_events();
    }

    /// As [`Queue::enable_kicks`](crate::Queue::enable_kicks).
    #[inline]
    #[must_use = "sleeping on true loses a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        let (events, slot) = (self.ring.device_events(), self.ring.high(self.next.offset));
        let found = notify::enable(events, self.next, slot, self.features.event_idx);
        self.log_events();
        self.next.is_available(PackedDescriptor::flags_of(found)) || self.notes.has_left_over()
    }

    /// The answer to VHOST_USER_GET_VRING_BASE, in the form of [`new`](Self::new).
    #[must_use]
    pub fn base(&self) -> u32 {
        u32::from(self.next.to_bits()) | u32::from(self.used.to_bits()) << 16
    }

    #[inline]
    fn log_events(&self) {
        if let Some(log) = &self.log {
            self.ring.log_events(log);
        }
    }

    #[inline(always)]
    fn prefetch_buffer(&self, offset: u64) {
        if self.prefetch == Prefetch::Frame {
            prefetch(self.ring.memory.base().as_ptr().wrapping_add(offset as usize));
        }
    }
}

#[path = "packed_journal.rs"]
mod journal;

#[cfg(all(test, not(loom)))]
#[path = "packed_tests.rs"]
mod tests;
