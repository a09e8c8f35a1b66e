//! Properties that hold for any driver of a split ring, correct or not. Tests with correct drivers are in
//! `queue_tests.rs`, for both rings.

use proptest::prelude::*;

use super::*;
use crate::rig_tests::lies;

/// A descriptor that is valid in some cases, and invalid in all ways in the others.
fn descriptors() -> impl Strategy<Value = Descriptor> {
    let flags = prop_oneof![8 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0u16..16, 1 => any::<u16>()];
    (lies(), flags, next).prop_map(|((addr, len), flags, next)| Descriptor {
        addr,
        len,
        flags,
        next,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Garbage in the whole ring, and in memory where tables may be looked for: no panic, no buffer outside memory, and
    /// an end.
    #[test]
    fn a_lying_driver_gets_nothing_but_faults_and_its_own_memory(
        descs in prop::collection::vec(descriptors(), 16), tables in prop::collection::vec(descriptors(), 64),
        heads in prop::collection::vec(prop_oneof![9 => 0u16..16, 1 => any::<u16>()], 16),
        indices in prop::collection::vec(prop_oneof![3 => 0u16..20, 1 => any::<u16>()], 1..5),
        event_idx: bool, start in prop_oneof![Just(0u16), any::<u16>()], event: u16, max in 0usize..40,
    ) {
        let mut pair = Pair::with(16, QueueFeatures { event_idx, ..full(Split) }, start);
        for (index, desc) in descs.iter().enumerate() {
            pair.driver.split().write_descriptor(index as u16, *desc);
        }
        for (index, head) in heads.iter().enumerate() {
            pair.driver.split().set_avail_entry(index as u16, *head);
        }
        for (index, entry) in tables.iter().cycle().take(64 * 64).enumerate() {
            pair.driver.split().write_table_entry(GuestAddr(LOW + 0x2_0000 + 16 * index as u64), 0, *entry);
        }
        for step in indices {
            pair.driver.split().set_used_event(event);
            pair.driver.split().set_avail_flags(event);
            let next = pair.split().next_avail;
            pair.driver.split().set_avail_idx(next.wrapping_add(step));
            match pair.queue.pop(&mut pair.chains, max) {
                Err(fault) => {
                    prop_assert!(!fault.name().is_empty() && !fault.to_string().is_empty());
                    break;
                }
                Ok(taken) => {
                    prop_assert!(taken <= max && taken == pair.chains.len());
                    pair.assert_sound();
                    for chain in &pair.chains {
                        pair.queue.push_used(chain.id, u32::MAX);
                    }
                    pair.queue.publish();
                }
            }
        }
        let _ = pair.queue.enable_kicks();
        pair.queue.disable_kicks();
    }
}
