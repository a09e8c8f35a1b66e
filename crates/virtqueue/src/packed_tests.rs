//! What only a packed ring does; the rest is in `pair_tests.rs`.

use super::*;
use crate::driver::Buffer;
use crate::rig_tests::{GOOD, Pair, full, part};
use crate::{GuestAddr, Queue, RingFormat::Packed};

/// Available in the first lap.
fn desc(addr: u64, len: u32, flags: u16) -> PackedDescriptor {
    part(addr, len, flags).packed()
}

/// A ring of eight slots at slot `start.0` of a lap with that wrap counter.
fn at(start: (u16, bool)) -> Pair {
    let (offset, wrap) = start;
    Pair::with(8, full(Packed), offset + if wrap { 0 } else { 8 })
}

fn packed(pair: &Pair) -> &PackedQueue {
    match &pair.queue {
        Queue::Packed(queue) => queue,
        Queue::Split(_) | Queue::Reset(_) => panic!("the ring is not packed"),
    }
}

/// Up to the end of the ring; `pop` goes on from its start.
#[test]
fn chains_of_one_descriptor_are_taken_in_one_run() {
    for writable in [false, true] {
        let mut pair = at((5, true));
        let buffer = |len| Buffer {
            writable,
            ..Buffer::readable(GuestAddr(GOOD), len)
        };
        // Its kind and its region are expected of the next ones.
        pair.driver.add(&[buffer(1)]).unwrap();
        pair.driver.publish();
        assert_eq!((pair.serve(), pair.back()), (1, 1));
        (2..7).for_each(|len| _ = pair.driver.add(&[buffer(len)]).unwrap());
        pair.driver.publish();
        let (queue, mut run) = (packed(&pair), Chains::for_queue(pair.queue.size(), 8));
        let slots = [
            queue.take_run::<false>(&mut run, queue.hint, queue.next, 8),
            queue.take_run::<true>(&mut run, queue.hint, queue.next, 8),
        ];
        assert_eq!(slots, if writable { [0, 2] } else { [2, 0] });
        assert_eq!(pair.queue.pop(&mut pair.chains, 4), Ok(4));
        assert_eq!(run.chains, pair.chains.chains[..2]);
        assert_eq!(run.buffers, pair.chains.buffers[..2]);
        assert_eq!(pair.pop(), Ok(1));
        pair.driver.add(&[buffer(7), buffer(8)]).unwrap();
        pair.driver.publish();
        assert_eq!((pair.pop(), packed(&pair).kind), (Ok(1), Kind::Other));
    }
}

#[test]
fn later_slots_of_a_used_list_are_marked_too() {
    for (len, written) in [(9, DESC_WRITE), (0, 0)] {
        let mut pair = Pair::new(Packed, 8);
        let parts = [7, 8, 9].map(|len| Buffer::writable(GuestAddr(GOOD), len));
        let id = pair.driver.add(&parts).unwrap();
        pair.driver.publish();
        assert_eq!(pair.pop(), Ok(1));
        pair.queue.push_used(pair.chains.chains[0].id, len);
        pair.queue.publish();
        let used = PACKED_AVAIL | PACKED_USED;
        let flags = [used | written | DESC_NEXT, used | DESC_NEXT, used];
        for ((slot, flags), len) in (0..).zip(flags).zip([len, 0, 0]) {
            let expected = PackedDescriptor {
                addr: 0,
                len,
                id,
                flags,
            };
            let found = pair.driver.packed().read_slot(slot);
            assert_eq!(PackedDescriptor { addr: 0, ..found }, expected);
        }
        assert_eq!(pair.queue.base(), 0x8003_8003);
    }
}

#[test]
fn the_id_is_that_of_the_last_descriptor() {
    let mut pair = Pair::new(Packed, 4);
    let last = PackedDescriptor {
        id: 0xbeef,
        ..desc(GOOD, 1, 0)
    };
    pair.post(&[part(GOOD, 1, DESC_NEXT), part(GOOD, 1, 0)]);
    pair.driver.packed().write_slot(1, last);
    assert_eq!(pair.pop(), Ok(1));
    let id = ChainId {
        head: 0xbeef,
        slots: 2,
    };
    assert_eq!(pair.chains.chains[0].id, id);
}

// A successor.

#[test]
fn a_successor_goes_on_where_the_ring_stands_whatever_base_it_is_told() {
    for laps in 0..5 {
        for start in [(0, true), (0, false), (5, true), (7, false)] {
            let mut pair = at(start);
            for _ in 0..laps * 3 {
                pair.add(5);
                assert_eq!(pair.serve(), 5);
                assert_eq!(pair.back(), 5);
            }
            // It dies with three of eight chains under way.
            pair.add(8);
            pair.pop().unwrap();
            for chain in &pair.chains.chains[..5] {
                pair.queue.push_used(chain.id, 0);
            }
            pair.queue.publish();
            let stands = pair.queue.base() >> 16;
            for base in [0, 0x8000_8000, 0x8000, 0x8007_8007, 0x0003_0003, u32::MAX] {
                pair.replace(base);
                assert_eq!(pair.queue.base(), stands | stands << 16, "told {base:#x}");
            }
            assert_eq!(pair.serve(), 3);
            assert_eq!(pair.back(), 8);
            pair.driver.disable_calls();
            pair.add(1);
            pair.pop().unwrap();
            pair.queue.push_used(pair.chains.chains[0].id, 0);
            assert!(
                !pair.queue.publish(),
                "only the first publication calls in any case"
            );
        }
    }
}

#[test]
fn a_ring_marked_by_somebody_else_is_entered_at_the_base() {
    let mut pair = Pair::new(Packed, 8);
    // A device that leaves the later slots of lists alone.
    for slot in [0, 2, 4] {
        let mut used = desc(GOOD, 0, PACKED_USED);
        pair.driver.packed().write_slot(slot, used);
        used.flags = PACKED_AVAIL;
        pair.driver.packed().write_slot(slot + 1, used);
    }
    // The slot to be used next, unless that is none where the device may be.
    for (base, at) in [
        (0x8006_8006, 0x8006),
        (0x8005_8006, 0x8005),
        (0x8006, 0x8006),
        (0x8008_8006, 0x8006),
    ] {
        pair.replace(base);
        assert_eq!(pair.queue.base(), at | at << 16, "told {base:#x}");
    }
    let (memory, start) = (Arc::clone(pair.queue.memory()), QueueStart::at(0x8008));
    let refused = Queue::new(&memory, pair.rings(), full(Packed), start).unwrap_err();
    assert_eq!(
        refused,
        RingError::Base {
            base: 0x8008,
            size: 8
        }
    );
}

/// Chains of 1, 3, 1 and 2 slots from slot `start` of a ring of 8; the device dies before the batch is published.
fn dies_before_it_publishes(start: (u16, bool), lengths: &[usize], pushed: usize) {
    let mut pair = at(start);
    let part = Buffer::writable(GuestAddr(GOOD), 100);
    let ids: Vec<_> = lengths
        .iter()
        .map(|&parts| pair.driver.add(&vec![part; parts]).unwrap())
        .collect();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(lengths.len()));
    // The first may have nothing written to it.
    let len = |at: usize| (at + pushed % 2) as u32;
    for (at, chain) in pair.chains.chains[..pushed].iter().enumerate() {
        pair.queue.push_used(chain.id, len(at));
    }
    pair.replace(0x8000_8000);
    let flags = pair.driver.packed().read_slot(start.0).flags;
    assert!(pushed == 0 || (flags & DESC_WRITE != 0) == (len(0) > 0));
    let back: Vec<_> = std::iter::from_fn(|| pair.driver.take_used())
        .map(|used| (used.head, used.len))
        .collect();
    let expected: Vec<_> = (0..pushed).map(|at| (ids[at], len(at))).collect();
    assert_eq!(back, expected, "{start:?} {lengths:?} {pushed}");
    assert_eq!(pair.serve(), lengths.len() - pushed);
    assert_eq!(pair.back(), lengths.len() - pushed);
    pair.add(8);
    assert_eq!((pair.serve(), pair.back()), (8, 8));
}

#[test]
fn a_successor_finishes_a_batch_that_was_not_published() {
    for start in (0..8).flat_map(|offset| [(offset, true), (offset, false)]) {
        for lengths in [
            &[1usize, 3, 1, 2] as &[usize],
            &[3, 1, 1],
            &[1, 1, 1, 1],
            &[8],
            &[1; 8],
            &[4, 4],
        ] {
            for pushed in 0..=lengths.len() {
                dies_before_it_publishes(start, lengths, pushed);
            }
        }
    }
}

// Faults of a driver, each with its name.

/// The packed form of an index jump: the driver makes more descriptors available than the ring has.
#[test]
fn slot_that_is_made_available_again_before_it_was_used_is_a_fault() {
    let mut pair = Pair::new(Packed, 4);
    pair.add(4);
    assert_eq!(pair.pop(), Ok(4));
    assert_eq!(pair.pop(), Ok(0));
    let again = PackedDescriptor {
        flags: PACKED_USED,
        ..desc(GOOD, 1, 0)
    };
    pair.driver.packed().write_slot(0, again);
    assert!(pair.queue.enable_kicks(), "no sleep on nonsense: pop must tell");
    assert_eq!(pair.pop(), Err(GuestFault::RingOverrun { at: 0 }));
}

#[test]
fn list_that_runs_into_a_slot_under_way_is_a_fault() {
    let mut pair = Pair::new(Packed, 4);
    pair.add(2);
    assert_eq!(pair.pop(), Ok(2));
    let lap = PackedDescriptor {
        flags: PACKED_USED,
        ..desc(GOOD, 1, 0)
    };
    pair.driver.packed().write_slot(0, lap);
    pair.driver.packed().write_slot(3, desc(GOOD, 1, DESC_NEXT));
    pair.driver.packed().write_slot(2, desc(GOOD, 1, DESC_NEXT));
    assert_eq!(pair.pop(), Err(GuestFault::RingOverrun { at: 0 }));
}

#[test]
fn list_that_goes_on_in_a_slot_not_available_is_a_fault() {
    let fault = Pair::new(Packed, 4).fault(&[part(GOOD, 1, DESC_NEXT)]);
    assert_eq!(fault, GuestFault::ChainIncomplete { head: 0, at: 1 });
}

#[path = "tests/packed_properties.rs"]
mod properties;
