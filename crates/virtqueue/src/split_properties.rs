//! What no driver can do, by the book or not.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::thread;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
struct Plan {
    parts: Vec<(u16, bool)>,
    indirect: bool,
}

fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let plan = (
        prop::collection::vec((1u16..300, any::<bool>()), 1..6),
        any::<bool>(),
    )
        .prop_map(|(mut parts, indirect)| {
            parts.sort_by_key(|part| part.1); // readable ones first
            Plan { parts, indirect }
        });
    prop::collection::vec(plan, 1..120)
}

/// What a chain carries: the bytes in its readable buffers, and where its writable ones are.
type Sent = (Vec<u8>, Vec<(GuestAddr, u32)>);

/// Runs `plans` through a ring; each chain's bytes must arrive, and each must come back once, with what was
/// written.
fn exchange(plans: &[Plan], features: QueueFeatures, start: u16, batch: usize, push: usize) {
    let mut pair = Pair::with(16, features, start);
    let mut under_way: HashMap<u16, Sent> = HashMap::new();
    let (mut sent, mut served, mut back) = (0, 0, 0);
    // Buffers of a chain are cut from a slot of its own: 16 chains at most are under way.
    while back < plans.len() {
        for _ in 0..push {
            let Some(plan) = plans.get(sent) else { break };
            if plan.parts.len() > pair.driver.free_descriptors() {
                break;
            }
            let mut at = GOOD + 0x800 * (sent as u64 % 32);
            let (mut bytes, mut room, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
            for (i, &(len, writable)) in plan.parts.iter().enumerate() {
                let addr = GuestAddr(at);
                if writable {
                    room.push((addr, u32::from(len)));
                } else {
                    let content: Vec<u8> = (0..len)
                        .map(|b| (sent as u16 * 7 + i as u16 * 31 + b) as u8)
                        .collect();
                    pair.ram.write(addr, &content);
                    bytes.extend(content);
                }
                buffers.push(Buffer {
                    addr,
                    len: u32::from(len),
                    writable,
                });
                at += u64::from(len);
            }
            let added = if plan.indirect {
                pair.driver.add_indirect(&buffers)
            } else {
                pair.driver.add(&buffers)
            };
            assert!(under_way.insert(added.unwrap(), (bytes, room)).is_none());
            sent += 1;
        }
        pair.driver.publish();
        let taken = pair.queue.pop(&mut pair.chains, batch).unwrap();
        for index in 0..taken {
            let chain = pair.chains.chains[index];
            let (bytes, room) = &under_way[&chain.id.head];
            assert_eq!(&pair.gather(index), bytes);
            assert_eq!(chain.readable_bytes as usize, bytes.len());
            assert_eq!(chain.writable_bytes, room.iter().map(|part| part.1).sum::<u32>());
            for buffer in pair.chains.writable(&chain) {
                let answer = vec![chain.id.head as u8 ^ 0x5a; buffer.len as usize];
                assert!(pair.queue.memory.copy_to_guest(buffer.offset, &answer));
            }
            pair.queue.push_used(chain.id, chain.writable_bytes);
            served += 1;
        }
        pair.queue.publish();
        while let Some(used) = pair.driver.take_used() {
            let (_, room) = under_way.remove(&used.head).expect("given back once");
            assert_eq!(used.len, room.iter().map(|part| part.1).sum::<u32>());
            for (addr, len) in room {
                let expected = vec![used.head as u8 ^ 0x5a; len as usize];
                assert_eq!(pair.ram.read_vec(addr, len as usize), expected);
            }
            back += 1;
        }
        assert_eq!(back, served);
    }
    assert_eq!((pair.driver.free_descriptors(), pair.driver.in_flight()), (16, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_chain_arrives_and_comes_back_exactly_once(
        plans in plans(), event_idx: bool, in_order: bool,
        start in prop_oneof![Just(0u16), 65500u16..=65535, any::<u16>()], batch in 1usize..40, push in 1usize..20,
    ) {
        exchange(&plans, QueueFeatures { event_idx, indirect: true, in_order, packed: false }, start, batch, push);
    }
}

/// A descriptor that is right often enough to lead somewhere, and wrong in all ways.
fn lies() -> impl Strategy<Value = Descriptor> {
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
    let next = prop_oneof![8 => 0u16..16, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| Descriptor {
        addr,
        len,
        flags,
        next,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Garbage in the whole ring, and in memory where tables may be looked for: no panic, no buffer outside memory, and an end.
    #[test]
    fn a_lying_driver_gets_nothing_but_faults_and_its_own_memory(
        descs in prop::collection::vec(lies(), 16), tables in prop::collection::vec(lies(), 64),
        heads in prop::collection::vec(prop_oneof![9 => 0u16..16, 1 => any::<u16>()], 16),
        indices in prop::collection::vec(prop_oneof![3 => 0u16..20, 1 => any::<u16>()], 1..5),
        event_idx: bool, start in prop_oneof![Just(0u16), any::<u16>()], event: u16, max in 0usize..40,
    ) {
        let mut pair = Pair::with(16, QueueFeatures { event_idx, ..FULL }, start);
        for (index, desc) in descs.iter().enumerate() {
            pair.driver.write_descriptor(index as u16, *desc);
        }
        for (index, head) in heads.iter().enumerate() {
            pair.driver.set_avail_entry(index as u16, *head);
        }
        for (index, entry) in tables.iter().cycle().take(64 * 64).enumerate() {
            pair.driver.write_table_entry(GuestAddr(LOW + 0x2_0000 + 16 * index as u64), 0, *entry);
        }
        for step in indices {
            pair.driver.set_used_event(event);
            pair.driver.set_avail_flags(event);
            pair.driver.set_avail_idx(pair.queue.next_avail.wrapping_add(step));
            match pair.queue.pop(&mut pair.chains, max) {
                Err(fault) => {
                    prop_assert!(!fault.name().is_empty() && !fault.to_string().is_empty());
                    break;
                }
                Ok(taken) => {
                    prop_assert!(taken <= max && taken == pair.chains.len());
                    for chain in &pair.chains {
                        let buffers = pair.chains.buffers(chain);
                        prop_assert!(!buffers.is_empty() && buffers.len() <= 16);
                        prop_assert!(buffers.iter().all(|buffer| buffer.is_inside(&pair.queue.memory)));
                        let sum = |part: &[crate::Buffer]| part.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
                        prop_assert_eq!(u64::from(chain.readable_bytes), sum(pair.chains.readable(chain)));
                        prop_assert_eq!(u64::from(chain.writable_bytes), sum(pair.chains.writable(chain)));
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

/// CVE-2024-11614 and its like: a value that is checked, changed by the guest, and read again. One thread
/// rewrites descriptors and an indirect table without pause, good and bad by turns, while the device takes
/// chains.
#[test]
fn descriptors_that_change_meanwhile_never_lead_outside() {
    let mut pair = Pair::new(16);
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
                desc(GOOD, 64, 0, 0),
                desc(LOW + LOW_LEN - 1, 1, DESC_WRITE, 0),
                desc(table, 32, DESC_INDIRECT, 0),
                desc(u64::MAX, u32::MAX, DESC_NEXT, 1),
                desc(HIGH + HIGH_LEN, 0x1_0000, DESC_NEXT | DESC_WRITE, 65535),
            ];
            for form in forms.iter().cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                driver.write_descriptor(0, *form);
                driver.write_table_entry(GuestAddr(table), 0, *form);
                driver.write_table_entry(GuestAddr(table), 1, *form);
            }
        });
        let (mut taken, mut faults) = (0, 0);
        for _ in 0..200_000 {
            driver.set_avail_entry(queue.next_avail, 0);
            driver.set_avail_idx(queue.next_avail.wrapping_add(1));
            match queue.pop(chains, 4) {
                Ok(count) => taken += count,
                Err(_) => faults += 1,
            }
            assert!(
                chains
                    .buffers
                    .iter()
                    .all(|buffer| buffer.is_inside(&queue.memory))
            );
        }
        done.store(true, Ordering::Relaxed);
        assert!(taken + faults >= 200_000);
    });
}
