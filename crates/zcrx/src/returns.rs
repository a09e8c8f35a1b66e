//! Returned buffers: passed from any reading thread to the one that gives them to the kernel.
//!
//! # Theory of operation
//!
//! Each buffer has a count and a link. A reader that is done adds one to the count; if it was zero, it puts the
//! buffer on a list, by compare and swap of the list's head. The receiving thread takes the whole list with one swap,
//! and each count with another. No thread waits, nothing is allocated, and a buffer is on the list at most once.
//!
//! A buffer may be returned several times before it is taken: a NIC puts several pieces into one buffer, and the kernel
//! counts how often it was handed out.
//!
//! Invariants:
//!  - **T1** a buffer is on the list exactly while its count is not zero, but for the moment between the two steps of
//!    [`give`](Returns::give) and of [`take`](Returns::take);
//!  - **T2** a buffer's link is written only by the thread that found its count zero, and is read before the count is
//!    taken. So no thread writes it while it is needed.
//!
//! The count is incremented with release and taken with acquire: all accesses of a reader end before the buffer is
//! given to the kernel. Without that, a reader could see bytes that the kernel writes later.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

/// The end of the list; no buffer has this number.
const END: u32 = u32::MAX;

#[derive(Debug)]
struct Slot {
    count: AtomicU32,
    next: AtomicU32,
}

/// Returned buffers that are not taken yet.
#[derive(Debug)]
pub(crate) struct Returns {
    head: AtomicU32,
    slots: Box<[Slot]>,
}

impl Returns {
    pub(crate) fn new(buffers: u32) -> Self {
        let slot = |_| Slot {
            count: AtomicU32::new(0),
            next: AtomicU32::new(END),
        };
        Self {
            head: AtomicU32::new(END),
            slots: (0..buffers).map(slot).collect(),
        }
    }

    /// Returns one piece of this buffer.
    pub(crate) fn give(&self, buffer: u32) {
        let Some(slot) = self.slots.get(buffer as usize) else {
            return;
        };
        if slot.count.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            slot.next.store(head, Ordering::Relaxed);
            // Release: the thread that takes the list sees the link. Pairs with the swap in `take`.
            match self
                .head
                .compare_exchange_weak(head, buffer, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Whether there is nothing to take.
    pub(crate) fn is_empty(&self) -> bool {
        self.head.load(Ordering::Acquire) == END
    }

    /// Takes all returned buffers: calls `each` with the buffer and its number of pieces.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, u32)) {
        if self.head.load(Ordering::Relaxed) == END {
            return;
        }
        // Acquire: the links are visible. A chain of exchanges keeps each giver's release.
        let mut at = self.head.swap(END, Ordering::AcqRel);
        while let Some(slot) = self.slots.get(at as usize) {
            let next = slot.next.load(Ordering::Relaxed);
            // From here on the buffer may be put on the list again.
            let count = slot.count.swap(0, Ordering::AcqRel);
            each(at, count);
            at = next;
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn taken(returns: &Returns) -> Vec<(u32, u32)> {
        let mut all = Vec::new();
        returns.take(|buffer, count| all.push((buffer, count)));
        all.sort_unstable();
        all
    }

    #[test]
    fn what_is_given_is_taken_once_with_its_count() {
        let returns = Returns::new(4);
        for buffer in [2, 0, 2, 3, 2] {
            returns.give(buffer);
        }
        assert!(!returns.is_empty());
        assert_eq!(taken(&returns), [(0, 1), (2, 3), (3, 1)]);
        assert!(returns.is_empty());
        assert_eq!(taken(&returns), []);
    }

    #[test]
    fn a_buffer_that_is_not_there_changes_nothing() {
        let returns = Returns::new(2);
        returns.give(2);
        returns.give(END);
        assert!(returns.is_empty());
    }

    #[test]
    fn nothing_is_lost_between_threads() {
        const EACH: u32 = 20_000;
        let returns = Returns::new(8);
        let mut counts = [0_u32; 8];
        std::thread::scope(|scope| {
            let givers: Vec<_> = (0..4)
                .map(|thread| {
                    let returns = &returns;
                    scope.spawn(move || (0..EACH).for_each(|n| returns.give((n * 3 + thread) % 8)))
                })
                .collect();
            let mut add = |buffer: u32, count| counts[buffer as usize] += count;
            while !givers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                returns.take(&mut add);
            }
            returns.take(&mut add);
        });
        assert_eq!(counts, [4 * EACH / 8; 8]);
    }
}

/// Every interleaving, and every value that the memory model lets a load return. Run with
/// `RUSTFLAGS="--cfg loom" cargo test -p zcrx --lib --profile loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    #[allow(unsafe_code)]
    fn loom_two_readers_and_the_kernel() {
        loom::model(|| {
            let returns = Arc::new(Returns::new(2));
            // The bytes of the two buffers: read by readers, then written by the kernel. Loom reports both at once.
            let bytes = Arc::new([UnsafeCell::new(0_u8), UnsafeCell::new(0_u8)]);
            let readers: Vec<_> = [vec![0], vec![0, 1]]
                .into_iter()
                .map(|pieces| {
                    let (returns, bytes) = (returns.clone(), bytes.clone());
                    thread::spawn(move || {
                        for piece in pieces {
                            // SAFETY: loom checks that nobody writes meanwhile.
                            bytes[piece as usize].with(|byte| unsafe { byte.read() });
                            returns.give(piece);
                        }
                    })
                })
                .collect();
            let mut back = [0_u32; 2];
            let mut take = || {
                returns.take(|buffer, count| {
                    let buffer = buffer as usize;
                    back[buffer] += count;
                    // All pieces of it are back.
                    if back[buffer] == [2, 1][buffer] {
                        // SAFETY: loom checks that nobody reads meanwhile.
                        bytes[buffer].with_mut(|byte| unsafe { byte.write(1) });
                    }
                });
            };
            take();
            for reader in readers {
                reader.join().unwrap();
            }
            take();
            assert_eq!(back, [2, 1]);
        });
    }
}
