//! The buffers that the kernel holds, in the order in which it got them.
//!
//! Purpose: in direct placement the kernel names a buffer only by its address; this table maps it to the virtqueue
//! entry. Buffers are nearly always completed in the order in which they were posted, so [`InFlight::complete`] checks
//! the oldest open entry first, and searches only if a driver has changed the order (zero-copy, after a drop).
//!
//! Invariants: entries leave through [`InFlight::pop_done`] strictly in the order of [`InFlight::push`]. So the queue
//! fulfils VIRTIO_F_IN_ORDER (VirtIO 1.3, 2.7.9), and its used index is the exact base from which it can continue after
//! a stop: no frame is lost or repeated.
//!
//! A table [in any order](InFlight::in_any_order) is the exception: its entries leave in the order in which they are
//! done, so a buffer that a driver keeps does not delay the later ones. Entries that others overtook are marked: a
//! queue that stops cannot be rewound to them.

use std::collections::VecDeque;

#[derive(Debug)]
struct Entry<T> {
    key: u64,
    value: T,
    done: bool,
    /// An entry that was pushed later was done before it.
    overtaken: bool,
}

/// A first-in, first-out table of bounded size; see the module's head.
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    entries: VecDeque<Entry<T>>,
    capacity: usize,
    /// Entries at the front known to be done; the search for the next completion starts behind them.
    done_at_front: usize,
    any_order: bool,
}

impl<T> InFlight<T> {
    /// An empty table for `capacity` entries; never grows past it.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            entries: VecDeque::with_capacity(capacity),
            capacity,
            done_at_front: 0,
            any_order: false,
        }
    }

    /// An empty table for at most `capacity` entries, which leave as they are done.
    pub(crate) fn in_any_order(capacity: usize) -> Self {
        Self {
            any_order: true,
            ..Self::new(capacity)
        }
    }

    /// Entries that can be pushed now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.capacity - self.entries.len()
    }

    /// Adds the buffer `key`, which the kernel holds from now on. The caller has checked [`Self::room`].
    #[inline]
    pub(crate) fn push(&mut self, key: u64, value: T) {
        debug_assert!(self.room() > 0, "the caller checks room()");
        self.entries.push_back(Entry {
            key,
            value,
            done: false,
            overtaken: false,
        });
    }

    /// Adds an entry that is already done but must wait for older ones.
    #[inline]
    pub(crate) fn push_done(&mut self, value: T) {
        debug_assert!(self.room() > 0, "the caller checks room()");
        self.entries.push_back(Entry {
            key: u64::MAX,
            value,
            done: true,
            overtaken: false,
        });
    }

    /// Marks the entry of buffer `key`, which the kernel has completed, as done; returns its value, to be updated.
    /// `None`: the kernel does not hold that address: it never got it, or has completed it already.
    #[inline]
    pub(crate) fn complete(&mut self, key: u64) -> Option<&mut T> {
        let first = self.done_at_front;
        let at = match self.entries.get(first) {
            Some(entry) if entry.key == key && !entry.done => first,
            _ => {
                let at = self.find(key)?;
                match self.any_order {
                    true => self.overtake(at)?,
                    false => at,
                }
            }
        };
        let entry = self.entries.get_mut(at)?;
        entry.done = true;
        if at == self.done_at_front {
            self.done_at_front += 1;
        }
        Some(&mut entry.value)
    }

    /// Searches the position of an open entry by its key.
    #[inline(never)]
    fn find(&mut self, key: u64) -> Option<usize> {
        let is_done = |entry: &Entry<T>| entry.done;
        // Done entries are skipped once, not at each search: a guest decides how many were done from the start.
        while self.entries.get(self.done_at_front).is_some_and(is_done) {
            self.done_at_front += 1;
        }
        let is_it = |&at: &usize| self.entries[at].key == key && !self.entries[at].done;
        (self.done_at_front..self.entries.len()).find(is_it)
    }

    /// Moves an entry before the older open ones; returns its new position.
    #[inline(never)]
    fn overtake(&mut self, at: usize) -> Option<usize> {
        let front = self.done_at_front;
        if at > front {
            let entry = self.entries.remove(at)?;
            self.entries
                .range_mut(front..at)
                .for_each(|open| open.overtaken = true);
            self.entries.insert(front, entry);
        }
        Some(front)
    }

    /// Whether the kernel holds a buffer that others overtook.
    pub(crate) fn has_overtaken(&self) -> bool {
        self.entries.iter().any(|entry| entry.overtaken && !entry.done)
    }

    /// The oldest entry, once it is done.
    #[inline]
    pub(crate) fn pop_done(&mut self) -> Option<T> {
        if self.entries.front()?.done {
            self.pop_any()
        } else {
            None
        }
    }

    /// Number of done entries in the table: they wait behind an open one.
    pub(crate) fn len_done(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.done)).sum()
    }

    /// Entries that the kernel has not completed.
    pub(crate) fn open(&self) -> impl Iterator<Item = &T> {
        let open = self.entries.iter().filter(|entry| !entry.done);
        open.map(|entry| &entry.value)
    }

    /// The oldest entry, done or not.
    pub(crate) fn pop_any(&mut self) -> Option<T> {
        self.done_at_front = self.done_at_front.saturating_sub(1);
        self.entries.pop_front().map(|entry| entry.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_order_completion_pops_at_once() {
        let mut table = InFlight::new(4);
        table.push(10, 'a');
        table.push(20, 'b');
        assert_eq!(table.complete(10).copied(), Some('a'));
        assert_eq!(table.pop_done(), Some('a'));
        assert_eq!(table.pop_done(), None);
        assert_eq!(table.room(), 3);
    }

    #[test]
    fn reordered_completion_waits_for_older_ones() {
        let mut table = InFlight::new(4);
        table.push(10, 'a');
        table.push(20, 'b');
        table.push(30, 'c');
        assert!(table.complete(20).is_some());
        assert_eq!(table.pop_done(), None);
        assert!(table.complete(10).is_some());
        assert_eq!(table.pop_done(), Some('a'));
        assert_eq!(table.pop_done(), Some('b'));
        assert_eq!(table.pop_done(), None);
        assert!(table.complete(30).is_some());
        assert_eq!(table.pop_done(), Some('c'));
    }

    #[test]
    fn in_any_order_what_is_done_leaves_and_what_it_overtook_is_marked() {
        let mut table = InFlight::in_any_order(4);
        for (key, value) in [(10, 'a'), (20, 'b'), (30, 'c'), (40, 'd')] {
            table.push(key, value);
        }
        assert_eq!(table.complete(10).copied(), Some('a'));
        assert!(!table.has_overtaken());
        assert_eq!(table.complete(30).copied(), Some('c'));
        assert!(table.complete(30).is_none(), "completed twice");
        assert_eq!((table.pop_done(), table.pop_done()), (Some('a'), Some('c')));
        assert_eq!((table.pop_done(), table.room()), (None, 2));
        assert!(table.has_overtaken());
        assert_eq!(table.complete(20).copied(), Some('b'));
        assert!(!table.has_overtaken(), "no entry overtook d");
        assert_eq!((table.pop_done(), table.pop_any()), (Some('b'), Some('d')));
    }

    #[test]
    fn one_that_a_driver_keeps_takes_no_more_room_than_its_own() {
        let mut table = InFlight::in_any_order(3);
        table.push(1, 1);
        for key in 2..1000 {
            table.push(key, key);
            assert_eq!(table.complete(key).copied(), Some(key));
            assert_eq!((table.pop_done(), table.room()), (Some(key), 2));
        }
        assert_eq!(table.complete(1).copied(), Some(1));
    }

    #[test]
    fn same_address_twice_completes_both_entries() {
        let mut table = InFlight::new(4);
        table.push(10, 'a');
        table.push(10, 'b');
        assert_eq!(table.complete(10).copied(), Some('a'));
        assert_eq!(table.complete(10).copied(), Some('b'));
        assert!(table.complete(10).is_none());
    }

    #[test]
    fn unknown_address_is_refused() {
        let mut table: InFlight<()> = InFlight::new(1);
        assert!(table.complete(1).is_none());
    }

    /// As for a guest that has many dropped frames between those that are sent.
    #[test]
    fn entries_that_were_done_from_the_start_are_passed_once() {
        const BETWEEN: usize = 31;
        let mut table = InFlight::new(64 * (BETWEEN + 1));
        for key in 0..64 {
            table.push(key, key);
            (0..BETWEEN).for_each(|_| table.push_done(key));
        }
        for key in 0..64 {
            assert_eq!(table.complete(key).copied(), Some(key));
            assert_eq!(table.done_at_front, key as usize * (BETWEEN + 1) + 1, "{key}");
        }
        assert_eq!(
            std::iter::from_fn(|| table.pop_done()).count(),
            64 * (BETWEEN + 1)
        );
    }

    #[test]
    fn done_entry_waits_behind_open_one() {
        let mut table = InFlight::new(4);
        table.push(10, 'a');
        table.push_done('x');
        assert_eq!(table.pop_done(), None);
        table.complete(10);
        assert_eq!(table.pop_done(), Some('a'));
        assert_eq!(table.pop_done(), Some('x'));
    }
}
