//! Properties that hold for any driver of a packed ring, correct or not. Tests with correct drivers are in
//! `queue_tests.rs`, for both rings.

use proptest::prelude::*;

use super::*;
use crate::rig_tests::{LOW, lies};

/// A descriptor that is valid in some cases, and invalid in all ways in the others.
fn descriptors() -> impl Strategy<Value = PackedDescriptor> {
    const BOTH: u16 = PACKED_AVAIL | PACKED_USED;
    let flags = prop_oneof![8 => 0u16..8, 1 => any::<u16>()];
    let turn = prop_oneof![8 => Just(PACKED_AVAIL), 2 => Just(PACKED_USED), 1 => Just(0), 1 => Just(BOTH)];
    (lies(), flags, turn, any::<u16>()).prop_map(|((addr, len), flags, turn, id)| PackedDescriptor {
        addr,
        len,
        id,
        flags: flags & !BOTH | turn,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Garbage in the whole ring, and in memory where tables may be looked for: no panic, no buffer outside
    /// memory, never more than the ring holds, and an end.
    #[test]
    fn a_lying_driver_gets_nothing_but_faults_and_its_own_memory(
        rounds in prop::collection::vec(prop::collection::vec(descriptors(), 13), 1..5),
        tables in prop::collection::vec(descriptors(), 64),
        event_idx: bool, start in 0u16..26, event: u32, max in 0usize..40, base: u32, use_part in 0usize..14,
    ) {
        let mut pair = Pair::with(13, QueueFeatures { event_idx, ..full(Packed) }, start);
        for (index, entry) in tables.iter().cycle().take(64 * 64).enumerate() {
            pair.driver.packed().write_table_entry(GuestAddr(LOW + 0x2_0000 + 16 * index as u64), 0, *entry);
        }
        for descs in &rounds {
            for (slot, desc) in descs.iter().enumerate() {
                pair.driver.packed().write_slot(slot as u16, *desc);
            }
            pair.driver.packed().set_driver_events(event);
            match pair.queue.pop(&mut pair.chains, max) {
                Err(fault) => {
                    prop_assert!(!fault.name().is_empty() && !fault.to_string().is_empty());
                    break;
                }
                Ok(taken) => {
                    prop_assert!(taken <= max.min(13) && taken == pair.chains.len());
                    pair.assert_sound();
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
        // A successor may find a position in the resulting ring.
        let memory = Arc::clone(pair.queue.memory());
        if let Ok(mut queue) = Queue::new(&memory, pair.rings(), full(Packed), QueueStart::at(base)) {
            prop_assert!(queue.base() as u16 & 0x7fff < 13);
            let _ = queue.pop(&mut pair.chains, max);
        }
    }
}
