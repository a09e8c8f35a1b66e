//! The ring against a kernel of ours, as `zcrx_parse_rq` reads it.

use std::collections::VecDeque;

use proptest::prelude::*;
use xsk::OwnMemory;

use super::*;

const TOKEN: u64 = 5 << crate::abi::AREA_SHIFT;

/// The kernel's side.
struct Kernel {
    memory: Arc<dyn UmemMemory>,
    offsets: Offsets,
    mask: u32,
    head: u32,
}

impl Kernel {
    fn counter(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: inside the ring's memory, which lives as long as we do.
        unsafe { self.memory.base().add(offset as usize).cast().as_ref() }
    }

    /// Takes up to so many entries.
    fn take(&mut self, most: u32) -> Vec<u64> {
        let tail = self.counter(self.offsets.tail).load(Ordering::Acquire);
        let count = tail.wrapping_sub(self.head).min(self.mask + 1).min(most);
        let taken = (0..count).map(|n| {
            let slot = (self.head.wrapping_add(n) & self.mask) as usize * size_of::<RefillEntry>();
            let entry = self.memory.base();
            // SAFETY: a masked slot that the producer has published.
            unsafe {
                entry
                    .add(self.offsets.entries as usize + slot)
                    .cast::<RefillEntry>()
                    .read()
            }
        });
        let taken: Vec<_> = taken
            .inspect(|entry| assert_eq!(entry.pad, 0))
            .map(|entry| entry.offset)
            .collect();
        self.head = self.head.wrapping_add(count);
        self.counter(self.offsets.head)
            .store(self.head, Ordering::Release);
        taken
    }
}

/// A ring whose counters begin at `start`.
fn ring(entries: u32, start: u32) -> (RefillRing, Kernel) {
    let memory: Arc<dyn UmemMemory> = Arc::new(OwnMemory::new(16384).unwrap());
    let offsets = Offsets {
        head: 0,
        tail: 64,
        entries: 192,
        ..Offsets::default()
    };
    let kernel = Kernel {
        memory: memory.clone(),
        offsets,
        mask: entries - 1,
        head: start,
    };
    kernel.counter(0).store(start, Ordering::Relaxed);
    kernel.counter(64).store(start, Ordering::Relaxed);
    (
        RefillRing::new(memory, offsets, entries, TOKEN, false).unwrap(),
        kernel,
    )
}

#[test]
fn parts_outside_the_memory_are_no_ring() {
    let memory: Arc<dyn UmemMemory> = Arc::new(OwnMemory::new(4096).unwrap());
    let offsets = |head, tail, entries| Offsets {
        head,
        tail,
        entries,
        ..Offsets::default()
    };
    let made = |offsets, entries| RefillRing::new(memory.clone(), offsets, entries, 0, false).is_some();
    assert!(made(offsets(0, 64, 128), 128));
    assert!(!made(offsets(0, 64, 128), 256), "entries end behind the memory");
    assert!(!made(offsets(4096, 64, 128), 8));
    assert!(!made(offsets(0, u32::MAX, 128), 8));
    assert!(!made(offsets(0, 64, 132), 8), "not aligned");
    assert!(!made(offsets(2, 64, 128), 8) && !made(offsets(0, 66, 128), 8));
    assert!(!made(offsets(0, 64, 128), 12), "no power of two");
    assert!(!made(offsets(0, 64, 128), 0));
}

#[test]
fn room_is_none_if_the_head_is_ahead_of_the_tail() {
    let cursor = Cursor { tail: 10, mask: 7 };
    assert_eq!(cursor.room(10), 8);
    assert_eq!(cursor.room(2), 0);
    assert_eq!(cursor.room(11), 0);
    assert_eq!(cursor.room(1), 0);
    let cursor = Cursor { tail: 1, mask: 7 };
    assert_eq!(cursor.room(u32::MAX), 6);
}

proptest! {
    #[test]
    fn all_that_is_pushed_arrives_as_often_as_it_was(
        start in prop_oneof![Just(0), Just(u32::MAX - 3), any::<u32>()],
        steps in prop::collection::vec((0_u64..16, 0_u32..6, 0_u32..9), 1..200),
    ) {
        let (mut ring, mut kernel) = ring(8, start);
        let mut counts = [0_i64; 16];
        let mut pending = VecDeque::new();
        for (buffer, count, taken) in steps {
            ring.push(buffer * 4096, count);
            counts[buffer as usize] += i64::from(count);
            ring.publish();
            pending.extend(kernel.take(taken));
        }
        while !ring.publish() {
            pending.extend(kernel.take(3));
        }
        pending.extend(kernel.take(u32::MAX));
        for offset in pending {
            prop_assert_eq!(offset & !((1 << crate::abi::AREA_SHIFT) - 1), TOKEN);
            counts[((offset & !TOKEN) / 4096) as usize] -= 1;
        }
        prop_assert_eq!(counts, [0; 16]);
    }
}
