//! What no driver of a packed ring can do, by the book or not. What it does by the book is in
//! `queue_tests.rs`, for both rings.

use std::sync::atomic::AtomicBool;
use std::thread;

use proptest::prelude::*;

use super::*;

/// A descriptor that is right often enough to lead somewhere, and wrong in all ways.
fn lies() -> impl Strategy<Value = PackedDescriptor> {
    let addr = prop_oneof![
        6 => LOW..LOW + LOW_LEN,
        2 => HIGH..HIGH + HIGH_LEN + 0x100,
        1 => Just(LOW + LOW_LEN - 1),
        1 => any::<u64>(),
        1 => (0u64..0x100).prop_map(|back| u64::MAX - back),
    ];
    let len =
        prop_oneof![6 => 1u32..0x200, 3 => (1u32..10).prop_map(|n| 16 * n), 1 => any::<u32>(), 1 => Just(0)];
    let flags = prop_oneof![8 => 0u16..8, 1 => any::<u16>()];
    let turn =
        prop_oneof![8 => Just(AVAIL), 2 => Just(PACKED_USED), 1 => Just(0), 1 => Just(AVAIL | PACKED_USED)];
    (addr, len, flags, turn, any::<u16>()).prop_map(|(addr, len, flags, turn, id)| PackedDescriptor {
        addr,
        len,
        id,
        flags: flags & !(AVAIL | PACKED_USED) | turn,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Garbage in the whole ring, and in memory where tables may be looked for: no panic, no buffer outside
    /// memory, never more than the ring holds, and an end.
    #[test]
    fn a_lying_driver_gets_nothing_but_faults_and_its_own_memory(
        rounds in prop::collection::vec(prop::collection::vec(lies(), 13), 1..5),
        tables in prop::collection::vec(lies(), 64),
        event_idx: bool, start in (0u16..13, any::<bool>()), event: u32, max in 0usize..40, base: u32, use_part in 0usize..14,
    ) {
        let mut pair = Pair::with(13, QueueFeatures { event_idx, ..FULL }, start);
        for (index, entry) in tables.iter().cycle().take(64 * 64).enumerate() {
            pair.driver.write_table_entry(GuestAddr(LOW + 0x2_0000 + 16 * index as u64), 0, *entry);
        }
        for descs in &rounds {
            for (slot, desc) in descs.iter().enumerate() {
                pair.driver.write_slot(slot as u16, *desc);
            }
            pair.driver.set_driver_events(event);
            match pair.queue.pop(&mut pair.chains, max) {
                Err(fault) => {
                    prop_assert!(!fault.name().is_empty() && !fault.to_string().is_empty());
                    break;
                }
                Ok(taken) => {
                    prop_assert!(taken <= max.min(13) && taken == pair.chains.len());
                    prop_assert!(pair.chains.slots(0) <= 13);
                    for chain in &pair.chains {
                        let buffers = pair.chains.buffers(chain);
                        prop_assert!(!buffers.is_empty() && buffers.len() <= 13);
                        prop_assert!(buffers.iter().all(|buffer| buffer.is_inside(&pair.queue.ring.memory)));
                        let sum = |part: &[crate::Buffer]| part.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
                        prop_assert_eq!(u64::from(chain.readable_bytes), sum(pair.chains.readable(chain)));
                        prop_assert_eq!(u64::from(chain.writable_bytes), sum(pair.chains.writable(chain)));
                    }
                    let part = use_part.min(taken);
                    for chain in &pair.chains.chains[..part] {
                        pair.queue.push_used(chain.id, u32::MAX);
                    }
                    pair.queue.unpop(pair.chains.slots(part));
                    pair.queue.publish();
                }
            }
        }
        let _ = pair.queue.enable_kicks();
        pair.queue.disable_kicks();
        // A successor finds somewhere to stand in whatever that has become.
        let memory = Arc::clone(&pair.queue.ring.memory);
        let shape = RingShape::new(RingFormat::Packed, pair.queue.size);
        let rings = RingLayout::from_user(&memory, shape, pair.driver.ring_user_addresses()).unwrap();
        if let Ok(mut queue) = PackedQueue::new(&memory, rings, FULL, QueueStart::at(base)) {
            prop_assert!(queue.base() as u16 & 0x7fff < 13);
            let _ = queue.pop(&mut pair.chains, max);
        }
    }
}

/// CVE-2024-11614 and its like: a value that is checked, changed by the guest, and read again. One thread
/// rewrites descriptors and an indirect table without pause, good and bad by turns, while the device takes
/// chains.
#[test]
fn descriptors_that_change_meanwhile_never_lead_outside() {
    let mut pair = Pair::new(4);
    let table = LOW + 0x5_0000;
    let done = AtomicBool::new(false);
    let Pair {
        driver,
        queue,
        chains,
        ..
    } = &mut pair;
    let driver = &*driver;
    thread::scope(|scope| {
        scope.spawn(|| {
            let forms = [
                desc(GOOD, 64, 0),
                desc(LOW + LOW_LEN - 1, 1, DESC_WRITE),
                desc(table, 32, DESC_INDIRECT),
                desc(u64::MAX, u32::MAX, DESC_NEXT),
                desc(HIGH + HIGH_LEN, 0x1_0000, DESC_NEXT | DESC_WRITE),
            ];
            for form in forms.iter().cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                for slot in 0..4 {
                    driver.write_slot(slot, *form);
                }
                driver.write_table_entry(GuestAddr(table), 0, *form);
                driver.write_table_entry(GuestAddr(table), 1, *form);
            }
        });
        let (mut taken, mut faults) = (0, 0);
        for _ in 0..200_000 {
            match queue.pop(chains, 1) {
                Ok(count) => taken += count,
                Err(_) => faults += 1,
            }
            let memory = &queue.ring.memory;
            assert!(chains.buffers.iter().all(|buffer| buffer.is_inside(memory)));
            queue.unpop(chains.slots(0));
        }
        done.store(true, Ordering::Relaxed);
        assert!(taken + faults > 0);
    });
}
