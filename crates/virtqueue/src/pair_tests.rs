//! Tests of both kinds of ring: what a correct driver sees, and which fault an incorrect one causes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rstest::rstest;

use crate::driver::{Buffer, QueueDriver};
use crate::layout::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE};
use crate::rig_tests::{GOOD, HIGH, HIGH_LEN, LOW, LOW_LEN, Pair, full, part, single};
use crate::{Chains, GuestAddr, GuestFault, IndirectRule, Queue, QueueFeatures, RingFormat};
use RingFormat::{Packed, Split};

// What a correct driver sees.

#[rstest]
fn a_chain_arrives_with_its_bytes_and_goes_back(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 8);
    pair.ram.write(GuestAddr(GOOD), b"header+payload");
    let parts = [
        Buffer::readable(GuestAddr(GOOD), 7),
        Buffer::readable(GuestAddr(GOOD + 7), 7),
        Buffer::writable(GuestAddr(HIGH), 100),
    ];
    let name = pair.driver.add(&parts).unwrap();
    assert_eq!(pair.pop(), Ok(0), "not visible before publish");
    assert!(pair.driver.publish(), "kicks are on at first");
    assert_eq!(pair.pop(), Ok(1));
    let mut chain = pair.chains.chains[0];
    assert_eq!((chain.id.head, chain.readable, chain.writable), (name, 2, 1));
    assert_eq!(chain.id.slots, if format == Packed { 3 } else { 1 });
    assert_eq!((chain.readable_bytes, chain.writable_bytes), (14, 100));
    assert_eq!(pair.gather(0), b"header+payload");
    let expected = crate::Buffer {
        offset: LOW_LEN,
        len: 100,
        room_before: 0,
    };
    assert_eq!(pair.chains.writable(&chain)[0], expected);
    chain.writable_bytes = 99;
    pair.queue.push_all_written(&[chain]);
    assert_eq!(pair.driver.take_used(), None, "not visible before publish");
    assert!(pair.queue.publish());
    let used = pair.driver.take_used().unwrap();
    assert_eq!((used.head, used.len), (name, 99));
    assert_eq!(pair.driver.free_descriptors(), 8);
}

/// Whatever is called, the memory of the former ring, which may have another use by then, does not change.
#[rstest]
fn queue_that_was_reset_neither_reads_nor_writes(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 8);
    pair.add(2);
    assert_eq!(pair.pop(), Ok(2));
    let (memory, size, features) = (pair.queue.memory(), pair.queue.size(), pair.queue.features());
    let mut queue = Queue::reset(memory, size, features, 7);
    let whole = |pair: &Pair| {
        pair.ram
            .read_vec(GuestAddr(LOW), usize::try_from(LOW_LEN).unwrap())
    };
    let before = whole(&pair);
    assert_eq!(queue.pop(&mut pair.chains, 64), Ok(0));
    assert!(pair.chains.is_empty());
    queue.unpop(1);
    queue.disable_kicks();
    assert!(!queue.enable_kicks() && !queue.publish());
    assert_eq!((queue.base(), queue.taken_before(), queue.size()), (7, 0, size));
    assert!(whole(&pair) == before, "guest memory was written to");
}

/// NEXT means nothing in a table of a packed ring; WRITE of the descriptor that leads to a table never does.
#[rstest]
fn indirect_table_need_not_be_aligned(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 8);
    pair.ram.write(GuestAddr(GOOD), b"abcd");
    let table = LOW + 0x5_0003;
    pair.write_table(table, &[part(GOOD, 1, DESC_NEXT), part(GOOD + 1, 3, 0)]);
    pair.post(&[part(table, 32, DESC_INDIRECT | DESC_WRITE)]);
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.gather(0), b"abcd");
    assert_eq!(pair.chains.chains[0].id.slots, 1);
}

#[rstest]
#[case(Split, 4)]
#[case(Packed, 5)]
fn indirect_table_may_have_as_many_entries_as_the_queue(#[case] format: RingFormat, #[case] size: u16) {
    let mut pair = Pair::new(format, size);
    let byte = Buffer::readable(GuestAddr(GOOD), 1);
    pair.driver.add_indirect(&vec![byte; size.into()]).unwrap();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.chains.chains[0].readable, size);
}

#[rstest]
#[case(Split, 4)]
#[case(Packed, 5)]
fn chain_as_long_as_the_queue_is_no_loop(#[case] format: RingFormat, #[case] size: u16) {
    let mut pair = Pair::with(size, full(format), size + 3);
    let byte = Buffer::readable(GuestAddr(GOOD), 1);
    pair.driver.add(&vec![byte; size.into()]).unwrap();
    pair.driver.publish();
    assert_eq!((pair.serve(), pair.back()), (1, 1));
    assert_eq!(
        pair.queue.base(),
        pair.driver.base() & if format == Split { 0xffff } else { !0 }
    );
}

#[rstest]
fn buffers_at_region_edges_are_taken_whole(#[values(Split, Packed)] format: RingFormat) {
    for (addr, len, offset) in [
        (LOW + LOW_LEN - 1, 1, LOW_LEN - 1),
        (HIGH, HIGH_LEN as u32, LOW_LEN),
        (LOW, LOW_LEN as u32, 0),
    ] {
        let mut pair = Pair::new(format, 4);
        pair.post(&[part(addr, len, DESC_WRITE)]);
        assert_eq!(pair.pop(), Ok(1));
        let buffer = pair.chains.buffers[0];
        assert_eq!((buffer.offset, buffer.len), (offset, len));
    }
}

#[rstest]
fn unpopped_chains_come_again(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::with(8, full(format), 6);
    for i in 0..3 {
        let buffers = [1, 2].map(|len| Buffer::readable(GuestAddr(GOOD + i), len));
        pair.driver.add(&buffers).unwrap();
    }
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(3));
    let slots = if format == Packed { 2 } else { 1 };
    assert_eq!(
        (pair.chains.slots(0), pair.chains.slots(1)),
        (3 * slots, 2 * slots)
    );
    assert_eq!(pair.chains.slots(3), 0);
    pair.queue.unpop(pair.chains.slots(1));
    pair.chains.truncate(1);
    assert_eq!((pair.chains.len(), pair.chains.buffers.len()), (1, 2));
    assert_eq!(pair.pop(), Ok(2));
    assert_eq!(pair.chains.buffers[0].offset, 0x4_0001);
}

#[rstest]
fn a_batch_ends_when_its_buffers_are_full_and_allocates_nothing(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 64);
    let byte = Buffer::readable(GuestAddr(GOOD), 1);
    for _ in 0..4 {
        pair.driver.add_indirect(&[byte; 60]).unwrap();
    }
    pair.driver.publish();
    pair.chains = Chains::for_queue(pair.queue.size(), 4);
    let room = |chains: &Chains| (chains.chains.capacity(), chains.buffers.capacity());
    let (before, mut batches, mut taken) = (room(&pair.chains), 0, 0);
    while taken < 4 {
        let count = pair.queue.pop(&mut pair.chains, 4).unwrap();
        assert!(count > 0);
        (taken, batches) = (taken + count, batches + 1);
    }
    assert!(batches > 1);
    assert_eq!(room(&pair.chains), before);
    assert_eq!(pair.pop(), Ok(0));
}

#[rstest]
fn mergeable_buffers_become_visible_together(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::with(4, full(format), 3);
    for i in 0..3 {
        let buffer = [Buffer::writable(GuestAddr(GOOD + 0x100 * i), 0x100)];
        pair.driver.add(&buffer).unwrap();
    }
    pair.driver.publish();
    pair.pop().unwrap();
    for chain in &pair.chains {
        pair.queue.push_used(chain.id, 0x100);
        assert_eq!(pair.driver.take_used(), None);
    }
    pair.queue.publish();
    assert_eq!(pair.back(), 3);
    assert!(!pair.queue.publish(), "nothing new, no call");
}

#[test]
fn header_ends_a_line_12_bytes_before_the_next() {
    let ends: Vec<_> = (0..192).filter(|&at| crate::header_ends_line(at)).collect();
    assert_eq!(ends, [52, 116, 180]);
}

// Notifications.

#[rstest]
fn flags_suppress_kicks_and_calls(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 8);
    pair.queue.disable_kicks();
    assert!(pair.kicks_are_off());
    let byte = [Buffer::readable(GuestAddr(GOOD), 1)];
    pair.driver.add(&byte);
    assert!(!pair.driver.publish());
    assert!(pair.queue.enable_kicks(), "one is there already: do not sleep");
    pair.pop().unwrap();
    assert!(!pair.queue.enable_kicks());
    assert!(!pair.kicks_are_off());
    pair.driver.add(&byte);
    assert!(pair.driver.publish());
    pair.pop().unwrap();
    pair.queue.push_used(single(0), 0);
    assert!(pair.queue.publish(), "the first in any case");
    pair.driver.disable_calls();
    pair.queue.push_used(single(1), 0);
    assert!(!pair.queue.publish());
    assert!(pair.driver.enable_calls(), "two are used already");
    assert_eq!(pair.back(), 2);
    assert!(!pair.driver.enable_calls());
    pair.add(1);
    pair.pop().unwrap();
    pair.queue.push_all_used(&pair.chains.chains);
    assert!(pair.queue.publish());
}

/// Over the end of the ring, and of the indices of a split one.
#[rstest]
#[case(Split, 65534)]
#[case(Packed, 13)]
fn event_idx_calls_only_when_crossed(#[case] format: RingFormat, #[case] start: u16) {
    let features = QueueFeatures {
        event_idx: true,
        ..full(format)
    };
    let mut pair = Pair::with(8, features, start);
    pair.add(6);
    pair.pop().unwrap();
    let mut publish = |head, event: u16| {
        pair.call_at(start.wrapping_add(event));
        pair.queue.push_used(single(head), 0);
        pair.queue.publish()
    };
    assert!(publish(0, 7), "the first in any case");
    assert!(publish(1, 1));
    assert!(!publish(2, 1), "passed");
    assert!(!publish(3, 5), "not yet");
    assert!(!publish(4, 5), "not yet");
    assert!(publish(5, 5));
    if let QueueDriver::Split(driver) = &pair.driver {
        assert_eq!(driver.used_flags(), 0, "unused with event idx");
    }
}

#[rstest]
#[case(Split, 256)]
#[case(Packed, 250)]
fn event_idx_suppression_outlives_the_wrap(#[case] format: RingFormat, #[case] size: u16) {
    let features = QueueFeatures {
        event_idx: true,
        ..full(format)
    };
    let mut pair = Pair::with(size, features, 0);
    pair.queue.disable_kicks();
    for _ in 0..1000 {
        for _ in 0..200 {
            let byte = [Buffer::readable(GuestAddr(GOOD), 1)];
            pair.driver.add(&byte).unwrap();
        }
        assert!(!pair.driver.publish(), "a poller is not kicked");
        while pair.serve() > 0 {}
        assert_eq!(pair.back(), 200);
    }
}

// Faults of a driver, each with its name.

#[rstest]
fn chain_without_an_end_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    let around = [part(GOOD, 1, DESC_NEXT); 4];
    let fault = Pair::new(format, 4).fault(&around);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 4 });
    let fault = Pair::new(format, 1).fault(&around[..1]);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 1 });
}

/// CVE-2020-10725.
#[rstest]
fn zero_length_is_a_fault(
    #[values(Split, Packed)] format: RingFormat,
    #[values(GOOD, 0, u64::MAX)] addr: u64,
) {
    let fault = Pair::new(format, 4).fault(&[part(addr, 0, DESC_WRITE)]);
    assert_eq!(fault, GuestFault::ZeroLength { head: 0 });
    let second = [part(GOOD, 1, DESC_NEXT), part(addr, 0, 0)];
    let fault = Pair::new(format, 4).fault(&second);
    assert_eq!(fault, GuestFault::ZeroLength { head: 0 });
}

/// CVE-2018-1059: only the start of a range was checked.
#[rstest]
fn buffer_outside_memory_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    for (addr, len) in [
        (0, 1),
        (LOW - 1, 2),
        (LOW + LOW_LEN, 1),
        (LOW + LOW_LEN - 1, 2), // the next region follows in the map, but not for the guest
        (HIGH + HIGH_LEN - 1, 2), // private memory follows in the map
        (HIGH, u32::MAX),
    ] {
        let fault = Pair::new(format, 4).fault(&[part(addr, len, 0)]);
        let addr = GuestAddr(addr);
        assert_eq!(fault, GuestFault::OutsideMemory { head: 0, addr, len });
    }
}

#[rstest]
fn address_wrap_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    for (addr, len) in [
        (u64::MAX, 1),
        (u64::MAX - 1, u32::MAX),
        (u64::MAX - 0xffff, 0x20_0000),
    ] {
        let fault = Pair::new(format, 4).fault(&[part(addr, len, 0)]);
        let addr = GuestAddr(addr);
        assert_eq!(fault, GuestFault::AddressWrap { head: 0, addr, len });
    }
}

#[rstest]
fn readable_after_writable_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    let parts = [part(GOOD, 1, DESC_WRITE | DESC_NEXT), part(GOOD, 1, 0)];
    let fault = Pair::new(format, 4).fault(&parts);
    assert_eq!(fault, GuestFault::WritableBeforeReadable { head: 0 });
}

#[rstest]
fn indirect_without_the_feature_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    let features = QueueFeatures {
        indirect: false,
        ..full(format)
    };
    let fault = Pair::with(4, features, 0).fault(&[part(GOOD, 16, DESC_INDIRECT)]);
    assert_eq!(fault.name(), "indirect-not-negotiated");
}

#[rstest]
fn indirect_descriptor_that_breaks_a_rule_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    use IndirectRule::{Length, TooLong, WithNext};
    for (len, flags, why) in [
        (16, DESC_NEXT, WithNext),
        (0, 0, Length),
        (1, 0, Length),
        (15, 0, Length),
        (17, 0, Length),
        (31, 0, Length),
        (u32::MAX, 0, Length),
        (80, 0, TooLong),
        (0xffff_fff0, 0, TooLong),
        (0x10_0000, 0, TooLong),
    ] {
        let fault = Pair::new(format, 4).fault(&[part(GOOD, len, DESC_INDIRECT | flags)]);
        assert_eq!(fault, GuestFault::IndirectInvalid { head: 0, len, why });
    }
}

#[rstest]
fn indirect_table_outside_memory_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    let fault = Pair::new(format, 4).fault(&[part(HIGH + HIGH_LEN - 16, 32, DESC_INDIRECT)]);
    assert_eq!(fault.name(), "outside-memory");
    let fault = Pair::new(format, 4).fault(&[part(u64::MAX - 15, 32, DESC_INDIRECT)]);
    assert_eq!(fault.name(), "address-wrap");
}

#[rstest]
fn nested_indirect_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 4);
    pair.write_table(GOOD, &[part(GOOD, 16, DESC_INDIRECT)]);
    let fault = pair.fault(&[part(GOOD, 16, DESC_INDIRECT)]);
    assert_eq!(fault, GuestFault::NestedIndirect { head: 0 });
}

/// A sum of lengths that does not fit 32 bits: CVE-2020-10722.
#[rstest]
fn chain_of_four_gigabytes_is_a_fault(#[values(Split, Packed)] format: RingFormat) {
    // Never touched, so no page is allocated.
    let mut pair = Pair::over(&[(GuestAddr(0), 3 << 30)], 4, full(format), 0);
    let fault = pair.fault(&[part(0, 3 << 30, DESC_NEXT), part(0, 1 << 30, 0)]);
    assert_eq!(fault, GuestFault::ChainTooLong { head: 0 });
}

#[rstest]
fn sound_chains_before_a_bad_one_are_served(#[values(Split, Packed)] format: RingFormat) {
    let mut pair = Pair::new(format, 8);
    pair.add(3);
    let bad = [Buffer::readable(GuestAddr(0), 1)];
    assert_eq!(pair.driver.add(&bad), Some(3));
    pair.add(1);
    assert_eq!(pair.pop(), Ok(3));
    let after = pair.queue.base();
    let fault = pair.pop().unwrap_err();
    assert!(matches!(fault, GuestFault::OutsideMemory { head: 3, .. }));
    assert_eq!(pair.queue.base(), after);
    assert_eq!(after & 0x7fff, 3);
}

/// CVE-2024-11614 and its like: a value that is checked, changed by the guest, and read again. One thread
/// rewrites descriptors and an indirect table without pause, good and bad by turns, while the device takes
/// chains.
#[rstest]
#[case(Split, 16)]
#[case(Packed, 4)]
fn descriptors_that_change_meanwhile_never_lead_outside(#[case] format: RingFormat, #[case] size: u16) {
    let mut pair = Pair::new(format, size);
    let (table, done) = (LOW + 0x5_0000, AtomicBool::new(false));
    let forms = [
        part(GOOD, 64, 0),
        part(LOW + LOW_LEN - 1, 1, DESC_WRITE),
        part(table, 32, DESC_INDIRECT),
        part(u64::MAX, u32::MAX, DESC_NEXT),
        part(HIGH + HIGH_LEN, 0x1_0000, DESC_NEXT | DESC_WRITE),
    ];
    let Pair {
        driver,
        queue,
        chains,
        ..
    } = &mut pair;
    let driver = &*driver;
    thread::scope(|scope| {
        scope.spawn(|| {
            for form in forms.iter().cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                for at in 0..2 {
                    match driver {
                        QueueDriver::Split(driver) => {
                            driver.write_descriptor(at, form.split(at, 2));
                            driver.write_table_entry(GuestAddr(table), at, form.split(at, 65535));
                        }
                        QueueDriver::Packed(driver) => {
                            driver.write_slot(2 * at, form.packed());
                            driver.write_slot(2 * at + 1, form.packed());
                            driver.write_table_entry(GuestAddr(table), at, form.packed());
                        }
                    }
                }
            }
        });
        let (mut taken, mut faults) = (0, 0);
        for _ in 0..200_000 {
            if let QueueDriver::Split(driver) = driver {
                driver.set_avail_entry(0, 0);
                driver.set_avail_idx(1);
            }
            match queue.pop(chains, 1) {
                Ok(count) => taken += count,
                Err(_) => faults += 1,
            }
            let memory = queue.memory();
            assert!(chains.buffers.iter().all(|buffer| buffer.is_inside(memory)));
            queue.unpop(chains.slots(0));
        }
        done.store(true, Ordering::Relaxed);
        // An entry of a split ring is there from the start.
        assert!(taken + faults >= if format == Split { 200_000 } else { 1 });
    });
}
