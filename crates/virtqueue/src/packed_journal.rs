//! What a packed queue records for a successor, and how it uses a predecessor's records.

use std::sync::atomic::Ordering;

use super::PackedQueue;
use crate::cell::Cell;
use crate::chain::{ChainBuilder, ChainId, Chains, Stop};
use crate::inflight_packed::{PackedJournal, Resumed};
use crate::layout::{DESC_INDIRECT, DESC_NEXT, PackedDescriptor};
use crate::packed_resume as resume;
use crate::packed_ring::PackedRing;
use crate::position::Position;
use crate::{GuestFault, Journal, RingError};

/// Reserved flag of descriptors: this chain was taken. Its used descriptor overwrites it.
const MARK: u16 = 1 << 8;

/// Where a queue records the chains that it takes.
#[derive(Debug)]
pub(super) enum Notes {
    /// Nowhere.
    None,
    /// As marks in the ring.
    Ring,
    /// In the inflight region.
    Inflight(Box<PackedJournal>),
}

/// The state taken over from a predecessor.
pub(super) struct TakenOver {
    /// Where the queue continues.
    pub(super) at: Position,
    pub(super) notes: Notes,
}

impl Notes {
    /// Reads a predecessor's records.
    pub(super) fn take_over(ring: &PackedRing, base: u32, journal: Journal) -> Result<TakenOver, RingError> {
        let notes = match journal {
            Journal::None => Self::None,
            Journal::Ring => Self::Ring,
            Journal::Inflight(queue) => {
                let queue = queue.of_ring(ring.size, true)?;
                let Resumed { journal, at } = PackedJournal::resume(queue, ring, resume::search(ring));
                let at = match at {
                    Some(at) => {
                        resume::take_back(ring, at, &journal.all_left());
                        at
                    }
                    None => {
                        let at = resume::position(ring, base)?;
                        journal.start(at);
                        at
                    }
                };
                let notes = Self::Inflight(Box::new(journal));
                return Ok(TakenOver { at, notes });
            }
        };
        let at = resume::position(ring, base)?;
        Ok(TakenOver { at, notes })
    }

    /// Number of chains from `at` on that a predecessor had taken.
    pub(super) fn taken_before(&self, ring: &PackedRing, at: Position) -> usize {
        match self {
            Self::None => 0,
            Self::Ring => marked(ring, at),
            Self::Inflight(journal) => journal.left_over(),
        }
    }

    /// Whether chains that a predecessor left come before those in the ring.
    #[inline(always)]
    pub(super) fn has_left_over(&self) -> bool {
        matches!(self, Self::Inflight(journal) if journal.left_over() > 0)
    }
}

/// Number of consecutive marked chains from `at` on.
fn marked(ring: &PackedRing, at: Position) -> usize {
    let (mut at, mut count, mut in_list) = (at, 0, false);
    for _ in 0..ring.size.get() {
        let Some(desc) = ring.read_available(at) else {
            break;
        };
        if !in_list && desc.flags & MARK == 0 {
            break;
        }
        in_list = desc.flags & DESC_NEXT != 0;
        count += usize::from(!in_list);
        at = at.forward(1, ring.size);
    }
    count
}

impl PackedQueue {
    /// Records that `chains` were taken, from `next` on.
    pub(super) fn note_taken(&mut self, chains: &Chains) {
        let mut at = self.next;
        for chain in chains {
            match &mut self.notes {
                Notes::None => return,
                Notes::Ring => {
                    // The driver must not write here until the chain is used; if it does, this may undo its
                    // write.
                    let high = Cell::load(self.ring.high(at.offset), Ordering::Relaxed);
                    self.ring.store_high(at.offset, high | u64::from(MARK) << 48);
                }
                Notes::Inflight(journal) => journal.take(&self.ring, at, chain.id),
            }
            at = at.forward(chain.id.slots, self.size);
        }
        if let (Notes::Ring, Some(log)) = (&self.notes, &self.log) {
            self.ring.log_slots(log, self.next, chains.slots(0));
        }
    }

    /// Records that the chains in the `slots` slots from `next` on were returned.
    pub(super) fn note_returned(&mut self, slots: u16) {
        match &mut self.notes {
            Notes::None => {}
            Notes::Ring => {
                let mut at = self.next;
                for _ in 0..slots {
                    let high = Cell::load(self.ring.high(at.offset), Ordering::Relaxed);
                    // As above: this may undo a write of the driver.
                    self.ring.store_high(at.offset, high & !(u64::from(MARK) << 48));
                    at = at.forward(1, self.size);
                }
                if let Some(log) = &self.log {
                    self.ring.log_slots(log, self.next, slots);
                }
            }
            Notes::Inflight(journal) => journal.untake(slots),
        }
    }

    /// Takes chains that a predecessor left in the inflight region.
    #[cold]
    pub(super) fn pop_left_over(&mut self, chains: &mut Chains, max: usize) -> Result<usize, GuestFault> {
        while chains.len() < max && self.notes.has_left_over() {
            let Notes::Inflight(journal) = &self.notes else {
                break;
            };
            match self.take_left(chains, journal.next_left()) {
                Ok(slots) => {
                    self.next = self.next.forward(slots, self.size);
                    self.out += slots;
                    if let Notes::Inflight(journal) = &mut self.notes {
                        journal.take_left();
                    }
                }
                Err(Stop::Fault(fault)) if chains.is_empty() => return Err(fault),
                Err(_) => break,
            }
        }
        Ok(chains.len())
    }

    /// Takes one of them. There is room in the ring: the region has no more states than the ring has slots, and each
    /// state is in one chain.
    fn take_left(&self, chains: &mut Chains, descs: &[PackedDescriptor]) -> Result<u16, Stop> {
        let head = self.next.offset;
        let slots = descs.len() as u16;
        let mut hint = self.hint;
        let mut builder = ChainBuilder::new(chains, head, self.size);
        let taken = descs.iter().try_for_each(|desc| {
            if desc.flags & DESC_INDIRECT != 0 {
                return self.walk_indirect(&mut builder, &mut hint, head, *desc);
            }
            builder
                .push(&self.ring.memory, &mut hint, desc.buffer())
                .map(drop)
        });
        match (taken, descs.last()) {
            (Ok(()), Some(last)) => {
                let head = last.id;
                builder.finish(ChainId { head, slots });
                Ok(slots)
            }
            (taken, _) => {
                builder.abandon();
                taken.map(|()| 0)
            }
        }
    }
}
