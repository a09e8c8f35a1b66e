//! What a split queue records in the inflight region (vhost-user, "Inflight I/O tracking", split virtqueue).
//!
//! Theory of operation. A chain that is taken gets a number and a mark. To publish a batch, the device links
//! its heads into a list, advances used.idx, clears the marks, and then advances `used_idx` of the region. If
//! the two indices differ, a successor knows that the batch was published and how many chains it had, and
//! finds them in the list: so it can correct the marks whenever the device died.
//!
//! If chains are used in the order in which they were taken, the marked ones are those from used.idx on in
//! the available ring, and the queue continues there. If the predecessor used chains out of order, other
//! chains are marked. These are served first, in the order of their numbers; their entries in the available
//! ring are not read, because they may have been overwritten.
//!
//! A region that does not fit the ring (more chains than the driver has made available, impossible heads)
//! belongs to an earlier use of the queue, or is broken. It is cleared, and the queue continues without it.

use std::collections::VecDeque;

use crate::inflight::{Field, InflightQueue};

/// DescStateSplit.
const INFLIGHT: Field<u8> = Field::at(0);
const NEXT: Field<u16> = Field::at(6);
const COUNTER: Field<u64> = Field::at(8);
/// QueueRegionSplit.
const LAST_BATCH_HEAD: Field<u16> = Field::at(12);
const USED_IDX: Field<u16> = Field::at(14);

/// A chain in flight.
#[derive(Debug)]
struct Out {
    head: u16,
    /// Whether a predecessor had taken it.
    left: bool,
}

/// A chain that the region marks. Ordered by number.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Marked {
    number: u64,
    head: u16,
}

/// Records of one split queue.
#[derive(Debug)]
pub(crate) struct SplitJournal {
    queue: InflightQueue,
    /// Number of the next chain.
    counter: u64,
    /// Chains in flight: first those used but not published, in the order of use, then the others, the oldest
    /// first.
    out: VecDeque<Out>,
    /// How many of the next heads a predecessor had taken: they keep their marks and numbers.
    left: u16,
}

/// What a predecessor left.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Chains that it had taken and not used.
    pub(crate) taken: u16,
    /// Their heads; empty if the available ring has them in the same order.
    pub(crate) replay: Vec<u16>,
}

/// The journal of a queue that had a predecessor, and what that left.
pub(crate) struct Resumed {
    pub(crate) journal: SplitJournal,
    pub(crate) left: Left,
}

impl SplitJournal {
    /// Takes over from a predecessor whose used.idx is `used_idx`. From there on the driver's available ring
    /// has `available` entries, which `entry` returns.
    pub(crate) fn resume(
        queue: InflightQueue,
        used_idx: u16,
        available: u16,
        entry: impl Fn(u16) -> u16,
    ) -> Resumed {
        let mut journal = Self {
            out: VecDeque::with_capacity(queue.entries().into()),
            counter: 0,
            left: 0,
            queue,
        };
        let left = match journal.finish_batch(used_idx).then(|| journal.marked()) {
            Some(chains) if chains.len() <= usize::from(available) => journal.left(&chains, used_idx, entry),
            _ => {
                journal.clear();
                Left::default()
            }
        };
        journal.queue.set_header(USED_IDX, used_idx);
        Resumed { journal, left }
    }

    /// Clears the marks of a batch that was published. `false`: the region describes an impossible batch.
    fn finish_batch(&self, used_idx: u16) -> bool {
        let mut head = self.queue.header(LAST_BATCH_HEAD);
        let batch = used_idx.wrapping_sub(self.queue.header(USED_IDX));
        if batch > self.queue.entries() {
            return false;
        }
        for _ in 0..batch {
            if head >= self.queue.entries() {
                return false;
            }
            self.queue.set(head, INFLIGHT, 0);
            head = self.queue.get(head, NEXT);
        }
        true
    }

    /// Chains that are marked, in the order of their numbers.
    fn marked(&self) -> Vec<Marked> {
        let marked = (0..self.queue.entries()).filter(|&head| self.queue.get(head, INFLIGHT) == 1);
        // Each number is read once: a sort whose keys change under it panics.
        let chain = |head| Marked {
            number: self.queue.get(head, COUNTER),
            head,
        };
        let mut chains: Vec<Marked> = marked.map(chain).collect();
        chains.sort_unstable();
        chains
    }

    fn left(&mut self, chains: &[Marked], used_idx: u16, entry: impl Fn(u16) -> u16) -> Left {
        self.counter = chains.last().map_or(0, |last| last.number.wrapping_add(1));
        let heads: Vec<u16> = chains.iter().map(|chain| chain.head).collect();
        let taken = heads.len() as u16;
        self.left = taken;
        let in_ring = (0..taken)
            .zip(&heads)
            .all(|(step, &head)| entry(used_idx.wrapping_add(step)) == head);
        Left {
            taken,
            replay: if in_ring { Vec::new() } else { heads },
        }
    }

    fn clear(&self) {
        for head in 0..self.queue.entries() {
            self.queue.set(head, INFLIGHT, 0);
        }
    }

    /// Records that the chains that begin at `heads` were taken.
    pub(crate) fn take(&mut self, heads: impl Iterator<Item = u16>) {
        for head in heads {
            let left = self.left > 0;
            if left {
                self.left -= 1;
            } else {
                self.queue.set(head, COUNTER, self.counter);
                self.counter = self.counter.wrapping_add(1);
                self.queue.set(head, INFLIGHT, 1);
            }
            self.out.push_back(Out { head, left });
        }
    }

    /// Records that the `count` chains taken last were returned.
    pub(crate) fn untake(&mut self, count: u16) {
        for _ in 0..count {
            match self.out.pop_back() {
                Some(Out { left: true, .. }) => self.left += 1,
                Some(Out { head, .. }) => self.queue.set(head, INFLIGHT, 0),
                None => {}
            }
        }
    }

    /// Records that the chain that begins at `head` is used, after `used` others that are not published.
    #[inline]
    pub(crate) fn use_next(&mut self, used: u16, head: u16) {
        let next = self.out.len().min(used.into());
        let at = self.out.range(next..).position(|out| out.head == head);
        if let Some(ahead @ 1..) = at
            && let Some(out) = self.out.remove(next + ahead)
        {
            self.out.insert(next, out);
        }
    }

    /// Records that the first `count` chains are about to be published.
    pub(crate) fn before_publish(&self, count: u16) {
        let mut last = self.queue.header(LAST_BATCH_HEAD);
        for &Out { head, .. } in self.out.iter().take(count.into()) {
            self.queue.set(head, NEXT, last);
            self.queue.set_header(LAST_BATCH_HEAD, head);
            last = head;
        }
    }

    /// Records that they were published, and that used.idx is `used_idx`.
    pub(crate) fn after_publish(&mut self, count: u16, used_idx: u16) {
        let count = self.out.len().min(count.into());
        for Out { head, .. } in self.out.drain(..count) {
            self.queue.set(head, INFLIGHT, 0);
        }
        self.queue.set_header(USED_IDX, used_idx);
    }
}
