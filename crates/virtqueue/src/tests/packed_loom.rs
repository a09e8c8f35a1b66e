//! Loom's model of `packed_notify.rs`: every interleaving, and every reordering that the memory model allows, of
//! two sides that publish and sleep. Run as `notify_loom.rs`.
//!
//! The functions are the same for driver and device, so one model shows both that no kick and that no call is
//! lost. A lost wake-up is a sleeper that nobody wakes: loom reports a deadlock. Each descriptor has its address stored
//! relaxed before its flags are published, so a missing Release or Acquire shows as a wrong value.

use loom::sync::atomic::{AtomicU32 as LoomU32, AtomicU64 as LoomU64, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;

use super::{Batch, Cell, EventSuppression, Position, QueueSize, enable, publish};
use crate::layout::PackedDescriptor;

/// A ring of three slots, as far as one direction of it goes.
struct Ring {
    slots: [[LoomU64; 2]; 3],
    wish: LoomU32,
    /// The eventfd: a write before the read is remembered.
    eventfd: Notify,
    event_idx: bool,
}

const SLOTS: u32 = 3;

fn size() -> QueueSize {
    QueueSize::packed(SLOTS).unwrap()
}

impl Ring {
    /// The reader starts at `start`, with no wish to be woken.
    fn new(start: Position, event_idx: bool) -> Arc<Self> {
        let slot = |offset: u16| {
            // Used in the lap before the one in which it is read next.
            let mut at = start;
            while at.offset != offset {
                at = at.forward(1, size());
            }
            let flags = at.back(size().get(), size()).used_flags();
            [LoomU64::new(0), LoomU64::new(u64::from(flags) << 48)]
        };
        Arc::new(Self {
            slots: [slot(0), slot(1), slot(2)],
            wish: LoomU32::new(EventSuppression::NEVER.0),
            eventfd: Notify::new(),
            event_idx,
        })
    }

    fn slot(&self, at: Position) -> &[LoomU64; 2] {
        &self.slots[usize::from(at.offset)]
    }
}

/// The value that the descriptor at `at` must carry.
fn mark(at: Position) -> u64 {
    u64::from(at.to_bits()) | 1 << 40
}

/// Publishes batches of so many descriptors, one after the other; wakes when wanted.
fn publisher(ring: &Ring, start: Position, batches: &[u16]) {
    let mut at = start;
    for &slots in batches {
        let first = at;
        for step in 0..slots {
            let high = u64::from(at.available_flags()) << 48;
            Cell::store(&ring.slot(at)[0], mark(at), Ordering::Relaxed);
            if step > 0 {
                Cell::store(&ring.slot(at)[1], high, Ordering::Relaxed);
            }
            at = at.forward(1, size());
        }
        let word = u64::from(first.available_flags()) << 48;
        let batch = Batch {
            first: &ring.slot(first)[1],
            word,
            end: at,
            slots,
            size: size(),
        };
        if publish(&batch, &ring.wish, ring.event_idx) {
            ring.eventfd.notify();
        }
    }
}

/// Takes `count` descriptors; sleeps when there is none.
fn sleeper(ring: &Ring, start: Position, count: u16) {
    let mut at = start;
    let there = |at: Position, word| at.is_available(PackedDescriptor::flags_of(word));
    for _ in 0..count {
        while !there(at, Cell::load(&ring.slot(at)[1], Ordering::Acquire)) {
            let found = enable(&ring.wish, at, &ring.slot(at)[1], ring.event_idx);
            if !there(at, found) {
                ring.eventfd.wait();
            }
            Cell::store(&ring.wish, EventSuppression::NEVER.0, Ordering::Relaxed);
        }
        let addr = Cell::load(&ring.slot(at)[0], Ordering::Relaxed);
        assert_eq!(addr, mark(at), "descriptor before its content");
        at = at.forward(1, size());
    }
}

fn at(offset: u16, wrap: bool) -> Position {
    Position { offset, wrap }
}

fn no_wake_up_is_lost(event_idx: bool, start: Position, batches: &'static [u16]) {
    loom::model(move || {
        let ring = Ring::new(start, event_idx);
        let other = thread::spawn({
            let ring = Arc::clone(&ring);
            move || publisher(&ring, start, batches)
        });
        sleeper(&ring, start, batches.iter().sum());
        other.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost_without_event_idx() {
    no_wake_up_is_lost(false, at(0, true), &[1, 1]);
}

#[test]
fn no_wake_up_is_lost_with_event_idx() {
    no_wake_up_is_lost(true, at(0, true), &[1, 1]);
}

#[test]
fn no_wake_up_is_lost_over_the_wrap() {
    no_wake_up_is_lost(true, at(2, true), &[1, 1]);
    no_wake_up_is_lost(true, at(2, false), &[1, 1]);
}

#[test]
fn no_wake_up_is_lost_between_batches() {
    no_wake_up_is_lost(true, at(1, true), &[2, 1]);
    no_wake_up_is_lost(false, at(1, true), &[2, 1]);
}
