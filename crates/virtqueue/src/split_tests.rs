//! What only a split ring does; the rest is in `pair_tests.rs`.

use super::*;
use crate::driver::Buffer;
use crate::layout::AVAIL_NO_INTERRUPT;
use crate::rig_tests::{GOOD, LOW, Pair, full, part, single};
use crate::{GuestAddr, Queue, RingFormat::Split};

#[test]
fn indirect_table_may_end_a_direct_chain() {
    let mut pair = Pair::new(Split, 8);
    pair.ram.write(GuestAddr(GOOD), b"abcd");
    let table = LOW + 0x5_0000;
    pair.write_table(table, &[part(GOOD + 2, 2, 0)]);
    pair.post(&[
        part(GOOD, 2, DESC_NEXT),
        part(table, 16, DESC_INDIRECT | DESC_WRITE),
    ]);
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.gather(0), b"abcd");
}

#[test]
fn chains_of_one_descriptor_are_taken_in_one_run() {
    for writable in [false, true] {
        let mut pair = Pair::new(Split, 8);
        let buffer = |len| Buffer {
            writable,
            ..Buffer::readable(GuestAddr(GOOD), len)
        };
        // Its kind and its region are expected of the next ones.
        pair.driver.add(&[buffer(1)]).unwrap();
        pair.driver.publish();
        assert_eq!(pair.serve(), 1);
        let heads = [2, 3, 4].map(|len| pair.driver.add(&[buffer(len)]).unwrap());
        pair.driver.publish();
        let queue = pair.split();
        let mut run = Chains::for_queue(queue.size, 8);
        let taken = [
            queue.take_run::<false>(&mut run, &heads),
            queue.take_run::<true>(&mut run, &heads),
        ];
        assert_eq!(taken, if writable { [0, 3] } else { [3, 0] });
        assert_eq!(pair.pop(), Ok(3));
        assert_eq!(
            (run.chains, run.buffers),
            (pair.chains.chains, pair.chains.buffers)
        );
    }
}

#[test]
fn a_successor_goes_on_where_the_ring_stands() {
    let mut pair = Pair::with(8, full(Split), 65530);
    pair.add(8);
    assert_eq!(pair.pop(), Ok(8));
    assert_eq!(
        (pair.chains.count_buffers(2..8), pair.chains.count_buffers(0..3)),
        (6, 3)
    );
    for chain in &pair.chains.chains[..5] {
        pair.queue.push_used(chain.id, 0);
    }
    pair.queue.publish();
    // It dies with three chains under way; the driver has seen the call or not.
    pair.driver.split().set_avail_flags(AVAIL_NO_INTERRUPT);
    let used_idx = pair.split().used_idx;
    pair.replace(used_idx.into());
    assert_eq!(pair.split().used_idx, 65530u16.wrapping_add(5));
    assert_eq!(pair.pop(), Ok(3));
    pair.queue.push_all_used(&pair.chains.chains);
    assert!(pair.queue.publish(), "the first publication calls in any case");
    assert_eq!(pair.back(), 8);
}

// Faults of a driver, each with its name.

#[test]
fn avail_index_jump_is_a_fault() {
    for (next, found) in [(0, 5u16), (0, 65535), (65533, 3), (65533, 65532)] {
        let mut pair = Pair::with(4, full(Split), next);
        pair.driver.split().set_avail_idx(found);
        let size = 4;
        let fault = GuestFault::AvailIndexJump { found, next, size };
        assert_eq!(pair.pop(), Err(fault));
        assert_eq!(pair.split().available(), Err(fault));
        assert!(pair.queue.enable_kicks(), "no sleep on nonsense: pop must tell");
    }
}

#[test]
fn more_chains_than_the_ring_has_entries_are_a_fault() {
    for start in [0, 65533] {
        let mut pair = Pair::with(4, full(Split), start);
        pair.add(4);
        assert_eq!(pair.pop(), Ok(4));
        let (next, found) = (start.wrapping_add(4), start.wrapping_add(5));
        pair.driver.split().set_avail_idx(found);
        let size = 4;
        assert_eq!(pair.pop(), Err(GuestFault::AvailIndexJump { found, next, size }));
        // Used, but the driver cannot know yet.
        pair.queue.push_used(single(0), 0);
        assert!(pair.pop().is_err());
        pair.queue.publish();
        assert_eq!(pair.pop(), Ok(1));
    }
}

/// CVE-2020-10723: a head that was cut to 16 bits, or not checked.
#[test]
fn head_out_of_range_is_a_fault() {
    for head in [4u16, 5, 32768, 65535] {
        let mut pair = Pair::new(Split, 4);
        pair.driver.split().set_avail_entry(0, head);
        pair.driver.split().set_avail_idx(1);
        assert_eq!(pair.pop(), Err(GuestFault::HeadOutOfRange { head, size: 4 }));
    }
}

#[test]
fn next_out_of_range_is_a_fault() {
    for next in [4u16, 65535] {
        let mut pair = Pair::new(Split, 4);
        let first = part(GOOD, 1, DESC_NEXT);
        pair.post(&[first]);
        let first = Descriptor {
            next,
            ..first.split(0, 1)
        };
        pair.driver.split().write_descriptor(0, first);
        let (head, size) = (0, 4);
        assert_eq!(pair.refused(), GuestFault::NextOutOfRange { head, next, size });
    }
}

#[test]
fn descriptor_that_is_its_own_next_is_a_fault() {
    let fault = Pair::new(Split, 4).fault(&[part(GOOD, 1, DESC_NEXT)]);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 4 });
}

#[test]
fn loop_and_range_inside_an_indirect_table_are_faults() {
    let mut pair = Pair::new(Split, 4);
    let (table, entry) = (part(GOOD, 32, DESC_INDIRECT), part(GOOD, 1, DESC_NEXT));
    pair.write_table(GOOD, &[entry]);
    let fault = pair.fault(&[table]);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 2 });
    // Inside guest memory, but past the table.
    let entry = Descriptor {
        next: 2,
        ..entry.split(0, 1)
    };
    pair.driver.split().write_table_entry(GuestAddr(GOOD), 0, entry);
    let (head, next, size) = (0, 2, 2);
    assert_eq!(
        pair.fault(&[table]),
        GuestFault::NextOutOfRange { head, next, size }
    );
}

#[test]
fn direct_and_indirect_together_longer_than_the_queue_are_a_fault() {
    let mut pair = Pair::new(Split, 4);
    let entries = [DESC_NEXT, DESC_NEXT, DESC_NEXT, 0].map(|flags| part(GOOD, 1, flags));
    pair.write_table(GOOD, &entries);
    let fault = pair.fault(&[part(GOOD, 1, DESC_NEXT), part(GOOD, 64, DESC_INDIRECT)]);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 4 });
}

/// A record must not overwrite a used element that the driver has not read, even with all descriptors in flight.
#[test]
fn notes_for_a_successor_leave_unread_used_elements_alone() {
    for event_idx in [false, true] {
        let mut pair = Pair::with(
            4,
            QueueFeatures {
                event_idx,
                ..full(Split)
            },
            0,
        );
        pair.split().take_over(crate::Journal::Ring).unwrap();
        let buffer = [Buffer::readable(GuestAddr(GOOD), 1)];
        let heads: Vec<_> = (0..4).map(|_| pair.driver.add(&buffer).unwrap()).collect();
        pair.driver.publish();
        for _ in 0..2 {
            assert_eq!(pair.queue.pop(&mut pair.chains, 2), Ok(2));
            for chain in &pair.chains {
                pair.queue.push_used(chain.id, 0);
            }
            // With and without the hint in the same word.
            pair.queue.disable_kicks();
            assert_eq!(pair.driver.split().used_flags() & 1, u16::from(!event_idx));
        }
        pair.queue.publish();
        assert!(!pair.queue.enable_kicks());
        assert_eq!(pair.driver.split().used_flags() & 1, 0);
        let back: Vec<_> = std::iter::from_fn(|| pair.driver.take_used().map(|used| used.head)).collect();
        assert_eq!(back, heads);
        // The next lap: two out, none read.
        (0..4).for_each(|_| assert!(pair.driver.add(&buffer).is_some()));
        pair.driver.publish();
        assert_eq!(pair.queue.pop(&mut pair.chains, 2), Ok(2));
        for kicks in [true, false] {
            if !kicks {
                pair.queue.disable_kicks();
            }
            let taken = successor(&pair, 4).taken_before();
            assert_eq!(taken, 2, "two were out, kicks: {kicks}");
        }
        // The record counts from used.idx.
        assert_eq!(successor(&pair, 5).taken_before(), 0);
    }
}

/// A device that keeps its records in the ring, and continues at `base`.
fn successor(pair: &Pair, base: u32) -> Queue {
    let start = QueueStart {
        base,
        journal: crate::Journal::Ring,
        log: None,
    };
    let (memory, features) = (pair.queue.memory(), pair.queue.features());
    Queue::new(memory, pair.rings(), features, start).unwrap()
}

#[test]
fn chains_that_a_predecessor_had_taken_are_recorded_until_they_are_used() {
    let mut pair = Pair::new(Split, 8);
    pair.queue = successor(&pair, 0);
    pair.add(4);
    assert_eq!(pair.pop(), Ok(4));
    for used in 0..4 {
        pair.queue = successor(&pair, used);
        assert_eq!(pair.queue.taken_before(), 4 - used as usize);
        assert_eq!(pair.queue.pop(&mut pair.chains, 1), Ok(1));
        pair.queue.push_all_used(&pair.chains.chains);
        pair.queue.publish();
        pair.queue.disable_kicks(); // records them again
    }
    // No longer, even when the last of these devices has seen the index come around.
    assert_eq!(pair.back(), 4);
    for _ in 0..8191 {
        pair.add(8);
        assert_eq!((pair.serve(), pair.back()), (8, 8));
    }
    pair.add(2);
    assert_eq!(pair.pop(), Ok(2));
    assert_eq!(successor(&pair, 4 + 8 * 8191).taken_before(), 2);
}

#[path = "tests/split_properties.rs"]
mod properties;
