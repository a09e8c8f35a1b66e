//! What a split queue notes for a successor, and what it makes of a predecessor's notes.

use std::sync::atomic::Ordering;

use super::SplitQueue;
use crate::chain::Chains;
use crate::inflight_split::SplitJournal;
use crate::layout;
use crate::notify::Word;
use crate::{Journal, RingError};

/// Upper half of the length of a used element that is a mark: its chain and all before it were taken. No driver
/// reads it: it is behind used.idx, and what stood in its place a lap ago has been read, or the driver could not have
/// made the chain of that place available. (In the place behind the last chain an element may stand that the driver has
/// not read yet.) The last used element takes the mark's place, so it is written when it is published: a device that dies
/// between these two stores leaves no mark, and its batch is done again.
const MARK: u32 = 0xa5a5_0000;
/// Its id: no chain has that one.
const MARK_ID: u32 = u32::MAX;

/// Where notes are made.
#[derive(Debug)]
pub(super) enum Notes {
    /// Nowhere.
    None,
    /// As marks in the used ring. The last chain's used element, head and length, as long as the mark has its place.
    Ring(Option<(u16, u32)>),
    /// In the inflight region.
    Inflight(Box<SplitJournal>),
}

impl SplitQueue {
    /// Reads what a predecessor noted, and goes on in the same way.
    pub(super) fn take_over(&mut self, journal: Journal) -> Result<(), RingError> {
        // Only a hint here, which `pop` checks.
        let found = Word::load(self.words().avail_idx, Ordering::Acquire);
        let available = found.wrapping_sub(self.used_idx);
        let available = if available > self.size.get() { 0 } else { available };
        match journal {
            Journal::None => {}
            // Marks are where used elements will be: that needs both rings to stand at the same index.
            Journal::Ring if self.next_avail != self.used_idx => {}
            Journal::Ring => {
                // Older marks are nearer: chains behind them have been taken since.
                let mut steps = (0..available).rev();
                let last = steps.find(|&step| self.is_marked(self.used_idx.wrapping_add(step)));
                self.taken_before = last.map_or(0, |step| step + 1).into();
                self.notes = Notes::Ring(None);
            }
            Journal::Inflight(queue) => {
                let queue = queue.check(self.size, false)?;
                let entry = |index| self.read_avail_entry(index);
                let (journal, left) = SplitJournal::resume(queue, (self.used_idx, available), entry);
                (self.next_avail, self.avail_seen) = (self.used_idx, self.used_idx);
                self.taken_before = left.taken.into();
                (self.replay, self.replay_start) = (left.replay, self.used_idx);
                self.notes = Notes::Inflight(Box::new(journal));
            }
        }
        Ok(())
    }

    fn is_marked(&self, index: u16) -> bool {
        let slot = u64::from(index & self.size.mask());
        let at = self.offsets.used + layout::RING_ENTRIES + layout::USED_ELEM_BYTES * slot;
        let element: Option<[u32; 2]> = self.memory.read_obj(at);
        element.is_some_and(|[id, len]| {
            u32::from_le(id) == MARK_ID && u32::from_le(len) == MARK | u32::from(index)
        })
    }

    fn mark(&self, index: u16) {
        self.write_used(index, MARK_ID, MARK | u32::from(index));
        self.log_used(index, index.wrapping_add(1));
    }

    /// Notes that `chains` were taken just now.
    pub(super) fn note_taken(&mut self, chains: &Chains) {
        match &mut self.notes {
            Notes::None => {}
            Notes::Ring(_) if chains.is_empty() => {}
            Notes::Ring(last) => {
                let last = last.take();
                self.mark(self.next_avail.wrapping_sub(1));
                self.write_last(last);
            }
            Notes::Inflight(journal) => journal.take(chains.iter().map(|chain| chain.id.head)),
        }
    }

    /// Notes that the `slots` chains before `next_avail + slots` went back.
    pub(super) fn note_returned(&mut self, slots: u16) {
        match &mut self.notes {
            Notes::Ring(_) if slots > 0 => {
                if self.next_avail != self.used_idx {
                    self.mark(self.next_avail.wrapping_sub(1));
                }
                self.write_used(self.next_avail.wrapping_add(slots).wrapping_sub(1), 0, 0);
            }
            Notes::None | Notes::Ring(_) => {}
            Notes::Inflight(journal) => journal.untake(slots),
        }
    }

    /// Keeps the used element of the last chain, whose place the mark has; `false`: it is not that one.
    #[inline]
    pub(super) fn keep_last(&mut self, head: u16, len: u32) -> bool {
        match &mut self.notes {
            Notes::Ring(last) if self.used_idx.wrapping_add(1) == self.next_avail => {
                *last = Some((head, len));
                true
            }
            _ => false,
        }
    }

    /// Writes what [`keep_last`](Self::keep_last) kept: the element before `used_idx`.
    pub(super) fn write_last(&self, last: Option<(u16, u32)>) {
        if let Some((head, len)) = last {
            self.write_used(self.used_idx.wrapping_sub(1), head.into(), len);
        }
    }

    /// Notes that used elements from `used_published` on were published just now.
    pub(super) fn note_published(&mut self) {
        crate::crash::point();
        let count = self.used_idx.wrapping_sub(self.used_published);
        if let Notes::Inflight(journal) = &mut self.notes {
            journal.after_publish(count, self.used_idx);
        }
        if self.used_idx.wrapping_sub(self.replay_start) >= self.replay.len() as u16 {
            self.replay.clear();
        }
    }

    /// Puts the heads that are to be replayed in place of those that were read for the next entries.
    #[cold]
    pub(super) fn replay_into(&self, heads: &mut [u16]) {
        for (step, head) in (0..).zip(heads) {
            let index = self.next_avail.wrapping_add(step);
            let at = usize::from(index.wrapping_sub(self.replay_start));
            *head = self.replay.get(at).copied().unwrap_or(*head);
        }
    }
}
