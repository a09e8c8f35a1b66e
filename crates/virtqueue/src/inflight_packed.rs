//! What a packed queue records in the inflight region (vhost-user, "Inflight I/O tracking", packed virtqueue).
//!
//! Theory of operation. Used descriptors overwrite available ones, so the region keeps copies: its states form a free
//! list, and a chain that is taken gets as many of them as it has descriptors. Before a batch is published, its states
//! return to the list and the used position advances, in the new fields of the region; after the publication, also in
//! the old fields. The first descriptor of the batch shows a successor whether it was published, so that it completes
//! the step or undoes it. A state that is then in the free list is not in flight, whatever its mark.
//!
//! A successor serves chains in flight from their copies, in the order of their numbers. Then the queue
//! continues in the ring, as many slots after the used position as those chains occupy.
//!
//! The free list is kept here as well, and the region's copy is only written: another writer there cannot
//! mislead this device. A region that is inconsistent, or does not fit the ring, belongs to an earlier use of
//! the queue or is broken: it is reset, and the queue continues without it.

use std::collections::VecDeque;

use crate::chain::ChainId;
use crate::inflight::{Field, InflightQueue};
use crate::layout::PackedDescriptor;
use crate::packed_ring::PackedRing;
use crate::position::Position;

/// DescStatePacked.
const INFLIGHT: Field<u8> = Field::at(0);
const NEXT: Field<u16> = Field::at(2);
const LAST: Field<u16> = Field::at(4);
const NUM: Field<u16> = Field::at(6);
const COUNTER: Field<u64> = Field::at(8);
const ID: Field<u16> = Field::at(16);
const FLAGS: Field<u16> = Field::at(18);
const LEN: Field<u32> = Field::at(20);
const ADDR: Field<u64> = Field::at(24);
/// QueueRegionPacked; each old field follows the new one.
const FREE_HEAD: Field<u16> = Field::at(12);
const OLD_FREE_HEAD: Field<u16> = Field::at(14);
const USED_IDX: Field<u16> = Field::at(16);
const OLD_USED_IDX: Field<u16> = Field::at(18);
const USED_WRAP: Field<u8> = Field::at(20);
const OLD_USED_WRAP: Field<u8> = Field::at(21);

/// A chain in flight.
#[derive(Debug)]
struct Out {
    /// Its slots are also its number of states.
    id: ChainId,
    /// Whether a predecessor had taken it.
    left: bool,
}

/// A chain that a predecessor left in flight. A copy, so that the VMM cannot change it after the check.
#[derive(Debug)]
struct LeftChain {
    /// Its states, in the order of the list.
    states: Vec<u16>,
    /// The descriptor of each.
    descs: Vec<PackedDescriptor>,
}

/// Records of one packed queue.
#[derive(Debug)]
pub(crate) struct PackedJournal {
    queue: InflightQueue,
    /// Number of the next chain.
    counter: u64,
    /// States that are free, the head of the list last.
    free: Vec<u16>,
    /// Chains in flight, and their states, one after the other: first those used but not published, in the
    /// order of use, then the others, the oldest first.
    out: VecDeque<Out>,
    states: VecDeque<u16>,
    /// How many chains, and states, were used by [`use_next`](Self::use_next) and not published.
    used: (usize, usize),
    /// Chains that a predecessor left in flight, and how many of them were taken again.
    left: Vec<LeftChain>,
    next_left: usize,
}

/// The state that a predecessor left.
pub(crate) struct Resumed {
    /// Empty, if the region is of no use.
    pub(crate) journal: PackedJournal,
    /// Where to write the next used descriptor; `None`, if the region is of no use.
    pub(crate) at: Option<Position>,
}

impl PackedJournal {
    /// Takes over from a predecessor. `search` is the position found in the ring, if there is one.
    pub(crate) fn resume(queue: InflightQueue, ring: &PackedRing, search: Option<Position>) -> Resumed {
        let mut journal = Self {
            counter: 0,
            free: Vec::with_capacity(queue.entries().into()),
            out: VecDeque::with_capacity(queue.entries().into()),
            states: VecDeque::with_capacity(queue.entries().into()),
            used: (0, 0),
            left: Vec::new(),
            next_left: 0,
            queue,
        };
        let at = journal
            .recover_batch(ring)
            .filter(|at| search.is_none_or(|found| found == *at))
            .filter(|_| journal.read_chains().is_some());
        journal.link_free();
        Resumed { journal, at }
    }

    /// Completes or undoes the last batch; returns where the next used descriptor goes.
    fn recover_batch(&self, ring: &PackedRing) -> Option<Position> {
        let position = |idx, wrap| Position {
            offset: self.queue.header(idx),
            wrap: self.queue.header(wrap) != 0,
        };
        let (new, old) = (
            position(USED_IDX, USED_WRAP),
            position(OLD_USED_IDX, OLD_USED_WRAP),
        );
        if new.offset >= ring.size.get() || old.offset >= ring.size.get() {
            return None;
        }
        let published = new != old && !old.is_available(ring.flags(old.offset));
        let (at, free_head) = if published || new == old {
            (new, FREE_HEAD)
        } else {
            (old, OLD_FREE_HEAD)
        };
        // With no batch in progress the old head is valid: a chain may have been recorded only in part.
        let free_head = if new == old { OLD_FREE_HEAD } else { free_head };
        self.unmark_free(self.queue.header(free_head))?;
        self.set_used(at);
        self.set_old_used(at);
        Some(at)
    }

    /// Takes the marks off all states in the free list that begins at `head`.
    fn unmark_free(&self, head: u16) -> Option<()> {
        let entries = self.queue.entries();
        let mut at = head;
        for _ in 0..=entries {
            if at >= entries {
                // The list ends with the index after the last state.
                return (at == entries).then_some(());
            }
            self.queue.set(at, INFLIGHT, 0);
            at = self.queue.get(at, NEXT);
        }
        None
    }

    /// Reads the chains in flight, in the order of their numbers, each field of the region once. `None`, and
    /// nothing is changed, if they are inconsistent.
    fn read_chains(&mut self) -> Option<()> {
        let entries = self.queue.entries();
        let marked = (0..entries).filter(|&head| self.queue.get(head, INFLIGHT) == 1);
        // Copied before they are compared: a sort whose keys change under it panics.
        let mut heads: Vec<(u64, u16)> = marked.map(|head| (self.queue.get(head, COUNTER), head)).collect();
        heads.sort_unstable();
        let counter = heads.last().map_or(0, |(number, _)| number.wrapping_add(1));
        let mut seen = vec![false; entries.into()];
        let chains = heads.iter().map(|&(_, head)| self.chain(head, &mut seen));
        self.left = chains.collect::<Option<_>>()?;
        self.counter = counter;
        Some(())
    }

    /// The chain that begins at `head`, of states that were not `seen` before.
    fn chain(&self, head: u16, seen: &mut [bool]) -> Option<LeftChain> {
        let mut states = Vec::new();
        let mut at = head;
        for _ in 0..self.queue.get(head, NUM) {
            // Each state is in one chain at most, so this ends.
            let first_time = seen.get_mut(usize::from(at)).filter(|seen| !**seen)?;
            *first_time = true;
            states.push(at);
            at = self.queue.get(at, NEXT);
        }
        if states.last() != Some(&self.queue.get(head, LAST)) {
            return None;
        }
        let descs = states.iter().map(|&state| self.desc(state)).collect();
        Some(LeftChain { states, descs })
    }

    /// Links all states that belong to no chain into the free list. Clears their marks first, so that the
    /// list has no marked state when it takes effect.
    fn link_free(&mut self) {
        let entries = self.queue.entries();
        let mut used = vec![false; entries.into()];
        for &state in self.left.iter().flat_map(|chain| &chain.states) {
            used[usize::from(state)] = true;
        }
        let mut next = entries;
        self.free.clear();
        for state in (0..entries).rev().filter(|&state| !used[usize::from(state)]) {
            self.queue.set(state, INFLIGHT, 0);
            self.queue.set(state, NEXT, next);
            self.free.push(state);
            next = state;
        }
        self.queue.set_header(FREE_HEAD, next);
        self.queue.set_header(OLD_FREE_HEAD, next);
    }

    /// Starts at `at`, after [`resume`](Self::resume) found no position.
    pub(crate) fn start(&self, at: Position) {
        self.set_used(at);
        self.set_old_used(at);
    }

    fn set_used(&self, at: Position) {
        self.queue.set_header(USED_IDX, at.offset);
        self.queue.set_header(USED_WRAP, at.wrap.into());
    }

    fn set_old_used(&self, at: Position) {
        self.queue.set_header(OLD_USED_IDX, at.offset);
        self.queue.set_header(OLD_USED_WRAP, at.wrap.into());
    }

    fn free_head(&self) -> u16 {
        self.free.last().copied().unwrap_or(self.queue.entries())
    }

    /// Number of chains that a predecessor left in flight and that were not yet taken again.
    pub(crate) fn left_over(&self) -> usize {
        self.left.len() - self.next_left
    }

    /// Descriptors of the next of these chains, in the order of the list; empty if there is none.
    pub(crate) fn next_left(&self) -> &[PackedDescriptor] {
        self.left.get(self.next_left).map_or(&[], |chain| &chain.descs)
    }

    /// Descriptors of all chains that a predecessor left.
    pub(crate) fn all_left(&self) -> Vec<PackedDescriptor> {
        let descs = self.left.iter().flat_map(|chain| &chain.descs);
        descs.copied().collect()
    }

    fn desc(&self, state: u16) -> PackedDescriptor {
        PackedDescriptor {
            addr: self.queue.get(state, ADDR),
            len: self.queue.get(state, LEN),
            id: self.queue.get(state, ID),
            flags: self.queue.get(state, FLAGS),
        }
    }

    /// Records that the next of these chains was taken again.
    pub(crate) fn take_left(&mut self) {
        let LeftChain { states, descs } = &self.left[self.next_left];
        self.states.extend(states);
        let id = ChainId {
            head: descs.last().map_or(0, |last| last.id),
            slots: states.len() as u16,
        };
        self.out.push_back(Out { id, left: true });
        self.next_left += 1;
    }

    /// Records that the chain at `at` was taken; its descriptors are in the ring.
    pub(crate) fn take(&mut self, ring: &PackedRing, at: Position, id: ChainId) {
        let (head, slots) = (self.free_head(), id.slots);
        if self.free.len() < usize::from(slots) {
            return; // cannot happen: `pop` takes no more slots than there are
        }
        self.queue.set(head, NUM, 0);
        self.queue.set(head, COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.queue.set(head, INFLIGHT, 1);
        for step in 0..slots {
            let Some(state) = self.free.pop() else { return };
            if step + 1 == slots {
                self.queue.set(head, LAST, state);
            }
            self.queue.set(head, NUM, step + 1);
            let desc = ring.read(at.forward(step, ring.size).offset);
            self.queue.set(state, ADDR, desc.addr);
            self.queue.set(state, LEN, desc.len);
            self.queue.set(state, FLAGS, desc.flags);
            self.queue.set(state, ID, desc.id);
            self.states.push_back(state);
            self.queue.set_header(FREE_HEAD, self.free_head());
        }
        self.queue.set_header(OLD_FREE_HEAD, self.free_head());
        self.out.push_back(Out { id, left: false });
    }

    /// Records that the chains taken last, `slots` slots in all, were returned.
    pub(crate) fn untake(&mut self, slots: u16) {
        let mut slots = slots;
        while slots > 0 {
            let Some(chain) = self.out.pop_back() else { return };
            slots = slots.saturating_sub(chain.id.slots);
            let states = self
                .states
                .split_off(self.states.len() - usize::from(chain.id.slots));
            if chain.left {
                self.next_left -= 1;
                continue;
            }
            // Clears the mark first: the next device puts a state that is in no list back into the free list.
            self.queue.set(states[0], INFLIGHT, 0);
            self.link(&states);
            self.queue.set_header(OLD_FREE_HEAD, self.free_head());
        }
    }

    /// Puts the states of a chain at the head of the free list.
    fn link(&mut self, states: &VecDeque<u16>) {
        self.queue.set(states[states.len() - 1], NEXT, self.free_head());
        self.free.extend(states.iter().rev());
        self.queue.set_header(FREE_HEAD, self.free_head());
    }

    /// Records that chain `id` is used, after others that are used and not published.
    #[inline]
    pub(crate) fn use_next(&mut self, id: ChainId) {
        let (next, first) = self.used;
        let (mut at, mut ahead) = (next, 0);
        while let Some(out) = self.out.get(at)
            && out.id != id
        {
            (at, ahead) = (at + 1, ahead + usize::from(out.id.slots));
        }
        let slots = usize::from(id.slots);
        if at > next
            && let Some(out) = self.out.remove(at)
        {
            self.out.insert(next, out);
            for state in first..first + slots {
                if let Some(moved) = self.states.remove(state + ahead) {
                    self.states.insert(state, moved);
                }
            }
        }
        self.used = (next + 1, first + slots);
    }

    /// Records that the first chains, `slots` slots in all, are about to be published. The next used
    /// descriptor will go to `used`.
    pub(crate) fn before_publish(&mut self, slots: u16, used: Position) {
        let (mut slots, mut chain, mut first) = (slots, 0, 0);
        while slots > 0
            && let Some(out) = self.out.get(chain)
        {
            let count = usize::from(out.id.slots);
            let states: VecDeque<u16> = self.states.range(first..first + count).copied().collect();
            self.link(&states);
            slots = slots.saturating_sub(count as u16);
            (chain, first) = (chain + 1, first + count);
        }
        self.set_used(used);
    }

    /// Records that they were published.
    pub(crate) fn after_publish(&mut self, slots: u16, used: Position) {
        let mut slots = slots;
        while slots > 0 {
            let Some(chain) = self.out.pop_front() else { break };
            slots = slots.saturating_sub(chain.id.slots);
            self.queue.set(self.states[0], INFLIGHT, 0);
            self.states.drain(..usize::from(chain.id.slots));
        }
        self.used = (0, 0);
        self.queue.set_header(OLD_FREE_HEAD, self.free_head());
        self.set_old_used(used);
    }
}
