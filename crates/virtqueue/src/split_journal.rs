//! What a split queue notes for a successor, and what it makes of a predecessor's notes.

use std::sync::atomic::Ordering;

use super::SplitQueue;
use crate::cell::Cell;
use crate::chain::Chains;
use crate::crash;
use crate::inflight_split::{Resumed, SplitJournal};
use crate::notify::NO_KICK;
use crate::{Journal, RingError};

/// Where notes are made.
///
/// In the ring, `avail_event` is the note. It belongs to the device, and where it asks for a kick it says already what
/// a successor must know: the index of the next chain to take. So it is written with each batch that is taken, before
/// anything is done with the batch, plus [`NO_KICK`] where no kick is wanted. Chains are done by the store of
/// `used.idx` and by that alone, so at no instant do the two words not tell what is out: `[used.idx, avail_event)`. A
/// driver without VIRTIO_F_EVENT_IDX ignores the word (2.7.10.1), which is part of the ring all the same (table in
/// 2.7).
#[derive(Debug)]
pub(super) enum Notes {
    /// Nowhere.
    None,
    /// In the ring. The end of what a predecessor had taken, until that is used.
    Ring(Option<u16>),
    /// In the inflight region.
    Inflight(Box<SplitJournal>),
}

impl SplitQueue {
    /// Reads what a predecessor noted, and goes on in the same way.
    pub(super) fn take_over(&mut self, journal: Journal) -> Result<(), RingError> {
        // Only a hint here, which `pop` checks.
        let found = Cell::load(self.words().avail_idx, Ordering::Acquire);
        let available = found.wrapping_sub(self.used_idx);
        let available = if available > self.size.get() { 0 } else { available };
        match journal {
            Journal::None => {}
            // The note counts from used.idx.
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

    /// How many of the `available` chains from used.idx on a predecessor had taken, by its note. It may have asked for
    /// kicks or not; what makes no sense as either is no note. In a queue of 32,768 entries, all of them available, a
    /// word may make sense as both: then the chains are not done again.
    fn noted_as_taken(&self, available: u16) -> u16 {
        let event = Cell::load(self.words().avail_event, Ordering::Relaxed);
        [0, NO_KICK]
            .map(|kick| event.wrapping_sub(kick).wrapping_sub(self.used_idx))
            .into_iter()
            .filter(|&taken| taken <= available)
            .max()
            .unwrap_or(0)
    }

    /// The end of the chains that were taken, by this device or the one before.
    #[inline]
    pub(super) fn taken_end(&self) -> u16 {
        match self.notes {
            Notes::Ring(Some(end)) if end.wrapping_sub(self.next_avail) <= self.size.get() => end,
            _ => self.next_avail,
        }
    }

    /// Notes [`taken_end`](Self::taken_end) in the ring, if notes are made there.
    #[inline]
    pub(super) fn note_taken_end(&self) {
        if let Notes::Ring(_) = self.notes {
            crash::point();
            let kick = if self.kicks { 0 } else { NO_KICK };
            let event = self.taken_end().wrapping_add(kick);
            Cell::store(self.words().avail_event, event, Ordering::Relaxed);
        }
    }

    /// Notes that `chains` were taken just now.
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

    /// Notes that the `slots` chains before `next_avail + slots` went back.
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

    /// Notes that used elements from `used_published` on were published just now.
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
