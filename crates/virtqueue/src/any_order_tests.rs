//! Devices that return chains in another order than they took them, and die.

use super::*;
use crate::chain::ChainId;

/// A chain that a device took: what it reads and where it writes to.
struct Held {
    id: ChainId,
    readable: Vec<crate::Buffer>,
    writable: Vec<crate::Buffer>,
}

/// The choices of a device: which of the chains that it holds it returns next, one number each.
struct Choices {
    numbers: Vec<usize>,
    next: usize,
}

impl Choices {
    fn new(numbers: &[usize]) -> Self {
        let numbers = numbers.to_vec();
        Self { numbers, next: 0 }
    }

    fn below(&mut self, end: usize) -> usize {
        self.next += 1;
        self.numbers[self.next % self.numbers.len()] % end
    }
}

fn features(packed: bool) -> QueueFeatures {
    QueueFeatures {
        in_order: false,
        ..super::features(packed)
    }
}

/// Processes a chain, and returns it.
fn answer(queue: &mut Queue, world: &RefCell<World>, held: &Held) {
    let world = &mut *world.borrow_mut();
    let sent = world.under_way.get_mut(&held.id.head).expect("it is under way");
    let mut bytes = Vec::new();
    for buffer in &held.readable {
        let mut part = vec![0; buffer.len as usize];
        assert!(world.memory.copy_from_guest(buffer.offset, &mut part));
        bytes.extend(part);
    }
    assert_eq!(bytes, sent.bytes, "plan {}", sent.plan);
    for buffer in &held.writable {
        let answer = vec![held.id.head as u8 ^ 0x5a; buffer.len as usize];
        assert!(world.memory.copy_to_guest(buffer.offset, &answer));
    }
    let room = sent.room.iter().map(|part| part.1).sum();
    sent.len = Some(room);
    queue.push_used_in_any_order(held.id, room);
}

/// Runs a device: takes all available chains, and returns some of those that it holds.
fn live(world: &RefCell<World>, plans: &[Plan], batch: usize, choices: &mut Choices) {
    let mut queue = world.borrow().device();
    assert!(queue.takes_any_order());
    let mut chains = Chains::for_queue(queue.size(), batch);
    let mut held: Vec<Held> = Vec::new();
    while world.borrow().back < plans.len() {
        world.borrow_mut().send(plans, 5);
        queue.pop(&mut chains, batch).unwrap();
        held.extend(chains.iter().map(|chain| Held {
            id: chain.id,
            readable: chains.readable(chain).to_vec(),
            writable: chains.writable(chain).to_vec(),
        }));
        // The youngest may go back untouched.
        if held.len() > 2 && !chains.is_empty() && choices.below(3) == 0 {
            let youngest = held.pop().expect("three");
            queue.unpop(youngest.id.slots);
        }
        // At least one is returned, so that the loop ends.
        for _ in 0..held.len().min(1 + choices.below(4)) {
            let chain = held.remove(choices.below(held.len()));
            answer(&mut queue, world, &chain);
        }
        queue.publish();
        world.borrow_mut().collect();
    }
    assert!(held.is_empty());
}

/// As `lives` of the module above.
fn lives(world: World, plans: &[Plan], batch: usize, choices: &[usize], deaths: &[u32]) -> bool {
    let world = RefCell::new(world);
    let mut died = true;
    let mut choices = Choices::new(choices);
    for &steps in deaths {
        died &= crash::after(steps, || live(&world, plans, batch, &mut choices)).is_none();
        world.borrow_mut().collect();
    }
    live(&world, plans, batch, &mut choices);
    let world = world.into_inner();
    assert!(world.under_way.is_empty());
    let entries = world.driver.size().get().into();
    let free = (world.driver.free_descriptors(), world.driver.in_flight());
    assert_eq!(free, (entries, 0));
    died
}

#[test]
fn device_that_gives_back_in_any_order_may_die_at_every_step() {
    let plans = some_plans();
    for packed in [false, true] {
        for choices in [&[3, 1, 2, 0, 4][..], &[1], &[7, 5, 6, 2, 2, 9, 1]] {
            let mut steps = 0;
            let world = || World::new(8, features(packed), Notes::Inflight);
            while lives(world(), &plans, 4, choices, &[steps]) {
                steps += 1;
            }
            assert!(steps > 10, "it did not even try");
        }
    }
}

#[test]
fn order_is_kept_where_the_driver_or_a_successor_relies_on_it() {
    for packed in [false, true] {
        for notes in [Notes::None, Notes::Ring, Notes::Inflight] {
            for in_order in [false, true] {
                let features = QueueFeatures {
                    in_order,
                    ..features(packed)
                };
                let any = World::new(8, features, notes).device().takes_any_order();
                assert_eq!(
                    any,
                    !in_order && notes == Notes::Inflight,
                    "{features:?}, {notes:?}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_chain_comes_back_once_whatever_the_order_and_however_many_die(
        plans in plans(60, 40), packed: bool, deaths in prop::collection::vec(0u32..300, 0..6),
        start in prop_oneof![Just(0u16), 65500u16..=65535],
        batch in 1usize..20, choices in prop::collection::vec(0usize..64, 1..40),
    ) {
        let mut world = World::new(16, features(packed), Notes::Inflight);
        if !packed {
            world.driver.start_at(start);
        }
        lives(world, &plans, batch, &choices, &deaths);
    }
}
