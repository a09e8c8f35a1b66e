//! What a split queue records for a successor, and how it uses a predecessor's records.

use std::sync::atomic::Ordering;

use super::SplitQueue;
use crate::cell::Cell;
use crate::chain::Chains;
use crate::crash;
use crate::inflight_split::{Resumed, SplitJournal};
use crate::notify::NO_KICK;
use crate::{Journal, RingError};

/// Where a queue records the chains that it takes.
///
/// In the ring, `avail_event` is the record. The device writes it, and its value in a request for a kick is what a
/// successor must know: the index of the next chain to take. So the device writes it with each batch that it
/// takes, before it processes the batch, plus [`NO_KICK`] if it wants no kick. Only the store of
/// `used.idx` marks chains as done, so the two words always show what is in flight: `[used.idx,
/// avail_event)`. A driver without VIRTIO_F_EVENT_IDX ignores the word (2.7.10.1), which is part of the ring
/// nevertheless (table in 2.7).
#[derive(Debug)]
pub(super) enum Notes {
    /// Nowhere.
    None,
    /// In the ring. The value: where the chains end that a predecessor had taken, until they are used.
    Ring(Option<u16>),
    /// In the inflight region.
    Inflight(Box<SplitJournal>),
}

impl SplitQueue {
    /// Reads a predecessor's records, and continues them.
    pub(super) fn take_over(&mut self, journal: Journal) -> Result<(), RingError> {
        // Only an estimate here: `pop` checks it.
        let found = Cell::load(self.words().avail_idx, Ordering::Acquire);
        let available = found.wrapping_sub(self.used_idx);
        let available = if available > self.size.get() { 0 } else { available };
        match journal {
            Journal::None => {}
            // The record counts from used.idx.
            Journal::Ring if self.next_avail != self.used_idx => {}
            Journal::Ring => {
                let taken = self.noted_as_taken(available);
                self.taken_before = taken.into();
                self.notes = Notes::Ring((taken > 0).then(|| self.used_idx.wrapping_add(taken)));
            }
            Journal::Inflight(queue) => {
                let queue = queue.of_ring(self.size, false)?;
                let entry = |index| self.read_avail_entry(index);
                let Resumed { journal, left } = SplitJournal::resume(queue, self.used_idx, available, entry);
                (self.next_avail, self.avail_seen) = (self.used_idx, self.used_idx);
                self.taken_before = left.taken.into();
                (self.replay, self.replay_start) = (left.replay, self.used_idx);
                self.notes = Notes::Inflight(Box::new(journal));
            }
        }
        Ok(())
    }

    /// How many of the `available` chains from used.idx on a predecessor had taken, according to its record, which it
    /// wrote with kicks on or off. A word that is valid as neither is no record. In a queue of 32,768 entries, all of
    /// them available, a word may be valid as both: then the larger number counts.
    fn noted_as_taken(&self, available: u16) -> u16 {
        let event = Cell::load(self.words().avail_event, Ordering::Relaxed);
        [0, NO_KICK]
            .map(|kick| event.wrapping_sub(kick).wrapping_sub(self.used_idx))
            .into_iter()
            .filter(|&taken| taken <= available)
            .max()
            .unwrap_or(0)
    }

    /// The end of the chains that were taken, by this device or its predecessor.
    #[inline]
    pub(super) fn taken_end(&self) -> u16 {
        match self.notes {
            Notes::Ring(Some(end)) if end.wrapping_sub(self.next_avail) <= self.size.get() => end,
            _ => self.next_avail,
        }
    }

    /// Writes [`taken_end`](Self::taken_end) to the ring, if it is recorded there.
    #[inline]
    pub(super) fn note_taken_end(&self) {
        if let Notes::Ring(_) = self.notes {
            crash::point();
            let kick = if self.kicks { 0 } else { NO_KICK };
            let event = self.taken_end().wrapping_add(kick);
            Cell::store(self.words().avail_event, event, Ordering::Relaxed);
        }
    }

    /// Records that `chains` were taken.
    pub(super) fn note_taken(&mut self, chains: &Chains) {
        match &mut self.notes {
            Notes::None => {}
            Notes::Ring(_) if chains.is_empty() => {}
            Notes::Ring(_) => {
                self.note_taken_end();
                self.log_events();
            }
            Notes::Inflight(journal) => journal.take(chains.iter().map(|chain| chain.id.head)),
        }
    }

    /// Records that the `slots` chains before `next_avail + slots` were returned.
    pub(super) fn note_returned(&mut self, slots: u16) {
        match &mut self.notes {
            Notes::Ring(_) if slots > 0 => {
                self.note_taken_end();
                self.log_events();
            }
            Notes::None | Notes::Ring(_) => {}
            Notes::Inflight(journal) => journal.untake(slots),
        }
    }

    /// Records that used elements from `used_published` on were published.
    pub(super) fn note_published(&mut self) {
        crash::point();
        let (used, published) = (self.used_idx, self.used_published);
        match &mut self.notes {
            Notes::Ring(taken)
                if taken.is_some_and(|end| end.wrapping_sub(published) <= used.wrapping_sub(published)) =>
            {
                *taken = None;
            }
            Notes::None | Notes::Ring(_) => {}
            Notes::Inflight(journal) => journal.after_publish(used.wrapping_sub(published), used),
        }
        if self.used_idx.wrapping_sub(self.replay_start) >= self.replay.len() as u16 {
            self.replay.clear();
        }
    }

    /// Replaces heads read from the next entries by the heads to be replayed.
    #[cold]
    pub(super) fn replay_into(&self, heads: &mut [u16]) {
        for (step, head) in (0..).zip(heads) {
            let index = self.next_avail.wrapping_add(step);
            let at = usize::from(index.wrapping_sub(self.replay_start));
            *head = self.replay.get(at).copied().unwrap_or(*head);
        }
    }
}
