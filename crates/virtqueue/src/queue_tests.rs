//! Tests of both rings: every chain arrives and returns once, a device dies and another one continues, writes are
//! logged.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;
use rstest::rstest;
use rustix::fs::MemfdFlags;

use super::*;
use crate::Journal;
use crate::crash;
use crate::driver::{Buffer, GuestRam, QueueDriver};
use crate::inflight::{InflightFile, InflightRegion, InflightShape};
use crate::{FileRange, GuestAddr, LOG_PAGE_BYTES, TrustedFiles};

const LOW: u64 = 0x10_0000;
const LOW_LEN: u64 = 0x8_0000;
/// Rings and tables are below, buffers from here on.
const BUFFERS: u64 = LOW + 0x4_0000;
const SLOT_BYTES: u64 = 0x800;

fn inflight_shape(size: QueueSize, features: QueueFeatures) -> InflightShape {
    InflightShape {
        queues: 2,
        entries: size.get(),
        packed: features.packed,
    }
}

/// One chain that the driver is to send: lengths and directions of its buffers.
#[derive(Clone, Debug)]
struct Plan {
    parts: Vec<(u16, bool)>,
    indirect: bool,
}

fn plans(most: usize, longest: u16) -> impl Strategy<Value = Vec<Plan>> {
    let plan = (
        prop::collection::vec((1u16..longest, any::<bool>()), 1..5),
        any::<bool>(),
    )
        .prop_map(|(mut parts, indirect)| {
            parts.sort_by_key(|part| part.1); // readable ones first
            Plan { parts, indirect }
        });
    prop::collection::vec(plan, 1..most)
}

/// How devices record chains in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notes {
    None,
    Ring,
    Inflight,
}

/// A chain under way.
struct Sent {
    plan: usize,
    bytes: Vec<u8>,
    room: Vec<(GuestAddr, u32)>,
    /// Length with which a device returned it.
    len: Option<u32>,
}

/// The driver, and what it knows. Devices come and go.
struct World {
    ram: Arc<GuestRam>,
    memory: Arc<MemoryMap>,
    driver: QueueDriver,
    features: QueueFeatures,
    notes: Notes,
    region: InflightFile,
    under_way: HashMap<u16, Sent>,
    /// By plan: how often a device processed it.
    done: Vec<u32>,
    back: usize,
    next_plan: usize,
}

/// What a device does: how many chains it takes at once, and how many of these it returns unused.
#[derive(Clone, Copy, Debug)]
struct Habits {
    batch: usize,
    unpop: usize,
    publish_each: usize,
}

impl World {
    fn new(size: u32, features: QueueFeatures, notes: Notes) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(LOW), LOW_LEN)]).unwrap());
        let driver = QueueDriver::for_device(&ram, size, features);
        let memory = Arc::new(MemoryMap::new(ram.regions().unwrap(), 0, &TrustedFiles).unwrap());
        let region = InflightRegion::create(inflight_shape(driver.size(), features)).unwrap();
        Self {
            ram,
            memory,
            driver,
            features,
            notes,
            region,
            under_way: HashMap::new(),
            done: Vec::new(),
            back: 0,
            next_plan: 0,
        }
    }

    /// A device with the base that a VMM knows after the last one died: for packed rings it knows none.
    fn device(&self) -> Queue {
        let base = match self.driver.format() {
            RingFormat::Split => self.driver.base(),
            RingFormat::Packed => RingFormat::Packed.first_base(),
        };
        let journal = match self.notes {
            Notes::None => Journal::None,
            Notes::Ring => Journal::Ring,
            Notes::Inflight => {
                let shape = inflight_shape(self.driver.size(), self.features);
                let range = FileRange {
                    offset: 0,
                    bytes: self.region.bytes,
                };
                let region =
                    InflightRegion::open(self.region.file.as_fd(), range, shape, &TrustedFiles).unwrap();
                Journal::Inflight(Arc::new(region).queue(1).unwrap())
            }
        };
        let start = QueueStart {
            base,
            journal,
            log: None,
        };
        Queue::new(
            &self.memory,
            self.driver.rings(&self.memory),
            self.features,
            start,
        )
        .unwrap()
    }

    /// Sends as many of the next plans as fit, at most `most`.
    fn send(&mut self, plans: &[Plan], most: usize) {
        for _ in 0..most {
            let Some(plan) = plans.get(self.next_plan) else {
                break;
            };
            let needed = if plan.indirect { 1 } else { plan.parts.len() };
            if needed > self.driver.free_descriptors() {
                break;
            }
            let mut at = BUFFERS + SLOT_BYTES * (self.next_plan as u64 % 64);
            let (mut bytes, mut room, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
            for (i, &(len, writable)) in plan.parts.iter().enumerate() {
                let addr = GuestAddr(at);
                if writable {
                    room.push((addr, u32::from(len)));
                } else {
                    let byte = |b| (self.next_plan as u16 * 7 + i as u16 * 31 + b) as u8;
                    let content: Vec<u8> = (0..len).map(byte).collect();
                    self.ram.write(addr, &content);
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
                self.driver.add_indirect(&buffers)
            } else {
                self.driver.add(&buffers)
            };
            let sent = Sent {
                plan: self.next_plan,
                bytes,
                room,
                len: None,
            };
            assert!(self.under_way.insert(added.unwrap(), sent).is_none());
            self.done.push(0);
            self.next_plan += 1;
        }
        self.driver.publish();
    }

    /// Collects and checks the chains that the device returned.
    fn collect(&mut self) {
        while let Some(used) = self.driver.take_used() {
            let sent = self.under_way.remove(&used.head).expect("given back once");
            assert_eq!(Some(used.len), sent.len, "length of plan {}", sent.plan);
            for (addr, len) in sent.room {
                let answer = vec![used.head as u8 ^ 0x5a; len as usize];
                assert_eq!(
                    self.ram.read_vec(addr, len as usize),
                    answer,
                    "answer to plan {}",
                    sent.plan
                );
            }
            self.back += 1;
        }
    }
}

/// One round of a device: takes a batch, processes it, returns some chains unused.
fn turn(queue: &mut Queue, world: &RefCell<World>, skip: &mut usize, habits: Habits) {
    let mut chains = Chains::for_queue(queue.size(), habits.batch);
    let taken = queue.pop(&mut chains, habits.batch).unwrap();
    let used = taken.saturating_sub(habits.unpop).max(taken.min(1));
    for (at, chain) in chains.chains[..used].iter().enumerate() {
        {
            let world = &mut *world.borrow_mut();
            let sent = world.under_way.get_mut(&chain.id.head).expect("it is under way");
            let mut bytes = Vec::new();
            for buffer in chains.readable(chain) {
                let mut part = vec![0; buffer.len as usize];
                assert!(world.memory.copy_from_guest(buffer.offset, &mut part));
                bytes.extend(part);
            }
            assert_eq!(bytes, sent.bytes, "plan {}", sent.plan);
            let room: u32 = sent.room.iter().map(|part| part.1).sum();
            assert_eq!(chain.writable_bytes, room);
            for buffer in chains.writable(chain) {
                let answer = vec![chain.id.head as u8 ^ 0x5a; buffer.len as usize];
                assert!(world.memory.copy_to_guest(buffer.offset, &answer));
            }
            sent.len = Some(room);
            if *skip > 0 {
                *skip -= 1;
            } else {
                world.done[sent.plan] += 1;
            }
        }
        queue.push_used(chain.id, chain.writable_bytes);
        if habits.publish_each > 0 && (at + 1) % habits.publish_each == 0 {
            queue.publish();
        }
    }
    queue.unpop(chains.slots(used));
    queue.publish();
}

/// Runs a device until there is nothing to do.
fn live(world: &RefCell<World>, plans: &[Plan], habits: Habits) {
    let mut queue = world.borrow().device();
    let mut skip = queue.taken_before();
    assert!(
        skip <= habits.batch,
        "{skip} were out, of batches of {}",
        habits.batch
    );
    for kicks in [false, true].into_iter().cycle() {
        if world.borrow().back >= plans.len() {
            break;
        }
        // One that polls wants no kicks, one that sleeps does.
        match kicks {
            true => _ = queue.enable_kicks(),
            false => queue.disable_kicks(),
        }
        world.borrow_mut().send(plans, 5);
        turn(&mut queue, world, &mut skip, habits);
        world.borrow_mut().collect();
    }
}

/// Devices that die, each after so many steps, and a last one that does not. Every chain returns once, and is not
/// processed twice if devices keep records. Returns whether all of them died.
fn lives(world: World, plans: &[Plan], habits: Habits, deaths: &[u32]) -> bool {
    let world = RefCell::new(world);
    let mut died = true;
    for &steps in deaths {
        died &= crash::after(steps, || live(&world, plans, habits)).is_none();
        world.borrow_mut().collect();
    }
    live(&world, plans, habits);
    let world = world.into_inner();
    assert!(world.under_way.is_empty());
    let entries = world.driver.size().get().into();
    assert_eq!(
        (world.driver.free_descriptors(), world.driver.in_flight()),
        (entries, 0)
    );
    let most = if world.notes == Notes::None {
        1 + deaths.len() as u32
    } else {
        1
    };
    for (plan, &done) in world.done.iter().enumerate() {
        assert!(done <= most, "plan {plan} was done {done} times");
        // A device may die between taking chains and giving some back.
        let exact = deaths.is_empty() || (world.notes == Notes::Inflight && habits.unpop > 0 && done > 0);
        assert!(!exact || done == 1, "plan {plan} was not done");
    }
    died
}

fn features(packed: bool) -> QueueFeatures {
    QueueFeatures {
        event_idx: true,
        indirect: true,
        in_order: true,
        packed,
    }
}

/// Every kind of chain, more than a lap of them.
fn some_plans() -> Vec<Plan> {
    let plan = |parts: &[(u16, bool)], indirect| Plan {
        parts: parts.to_vec(),
        indirect,
    };
    let kinds = [
        plan(&[(10, false)], false),
        plan(&[(1, false), (2, false), (30, true)], false),
        plan(&[(40, true)], false),
        plan(&[(5, false), (6, true)], true),
        plan(&[(7, true), (8, true)], false),
    ];
    kinds.iter().cycle().take(13).cloned().collect()
}

#[rstest]
fn device_may_die_at_every_step(
    #[values(false, true)] packed: bool,
    #[values(Notes::None, Notes::Ring, Notes::Inflight)] notes: Notes,
) {
    let plans = some_plans();
    for (batch, unpop, publish_each) in [(4, 0, 0), (3, 1, 2), (2, 1, 0), (64, 0, 0), (2, 0, 1)] {
        let habits = Habits {
            batch,
            unpop,
            publish_each,
        };
        let mut steps = 0;
        while lives(World::new(8, features(packed), notes), &plans, habits, &[steps]) {
            steps += 1;
        }
        assert!(steps > 10, "it did not even try");
    }
}

/// What the first one had taken must not be done by the third one either.
#[test]
fn devices_that_note_in_the_ring_may_die_one_after_the_other_at_every_step() {
    let habits = Habits {
        batch: 3,
        unpop: 1,
        publish_each: 0,
    };
    let plans: Vec<_> = some_plans().into_iter().take(6).collect();
    for packed in [false, true] {
        let world = || World::new(4, features(packed), Notes::Ring);
        let mut pairs = 0;
        for first in 0.. {
            if !lives(world(), &plans, habits, &[first]) {
                break;
            }
            let die = |&second: &u32| lives(world(), &plans, habits, &[first, second]);
            pairs += (0..).take_while(die).count();
        }
        assert!(pairs > 100, "only {pairs} pairs of deaths, packed: {packed}");
    }
}

/// The later slots of an unpublished batch look used already: the next device, which processes the chains again and
/// publishes them in smaller batches, must not let the driver see that.
#[test]
fn remains_of_an_unpublished_batch_are_not_seen_with_the_next_one() {
    let chain = |parts| Plan {
        parts: vec![(1, false); parts],
        indirect: false,
    };
    let plans = [1, 1, 1, 3, 1].map(chain);
    let habits = Habits {
        batch: 5,
        unpop: 1,
        publish_each: 0,
    };
    for notes in [Notes::None, Notes::Ring, Notes::Inflight] {
        let mut steps = 0;
        while lives(World::new(16, features(true), notes), &plans, habits, &[steps]) {
            steps += 1;
        }
    }
}

/// A device that returned chains unused did not process them: its successor must.
#[test]
fn chains_given_back_were_not_taken_before() {
    let plan = |parts| Plan {
        parts: vec![(1, false); parts],
        indirect: false,
    };
    let plans = [plan(1), plan(3), plan(2)];
    for (packed, notes) in [(false, Notes::Ring), (true, Notes::Ring), (true, Notes::Inflight)] {
        for kept in 0..3 {
            for kicks in [true, false] {
                let mut world = World::new(16, features(packed), notes);
                world.send(&plans, 3);
                let mut queue = world.device();
                if !kicks {
                    queue.disable_kicks();
                }
                let mut chains = Chains::for_queue(queue.size(), 8);
                assert_eq!(queue.pop(&mut chains, 8), Ok(3));
                queue.unpop(chains.slots(kept));
                let taken = world.device().taken_before();
                assert_eq!(taken, kept, "packed: {packed}, {notes:?}, kicks: {kicks}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_chain_arrives_and_comes_back_exactly_once(
        plans in plans(80, 300), event_idx: bool, in_order: bool, packed: bool,
        start in prop_oneof![Just(0u16), 65500u16..=65535, any::<u16>()],
        batch in 1usize..40, unpop in 0usize..3, publish_each in 0usize..4,
    ) {
        let features = QueueFeatures { event_idx, indirect: true, in_order, packed };
        let habits = Habits { batch, unpop, publish_each };
        let mut world = World::new(16, features, Notes::None);
        world.driver.start_at(start);
        lives(world, &plans, habits, &[]);
    }

    #[test]
    fn devices_may_die_again_and_again(
        plans in plans(40, 40), packed: bool, deaths in prop::collection::vec(0u32..300, 1..6),
        batch in 1usize..10, unpop in 0usize..3, publish_each in 0usize..4,
        notes in prop_oneof![Just(Notes::None), Just(Notes::Ring), Just(Notes::Inflight)],
    ) {
        let habits = Habits { batch, unpop, publish_each };
        lives(World::new(16, features(packed), notes), &plans, habits, &deaths);
    }
}

#[path = "any_order_tests.rs"]
mod any_order;
#[path = "queue_log_tests.rs"]
mod logged;
