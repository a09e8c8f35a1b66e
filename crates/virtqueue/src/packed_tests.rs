use super::*;
use crate::driver::{Buffer, DriverFeatures, GuestRam, PackedDriver};
use crate::layout::{PACKED_AVAIL, PACKED_USED};
use crate::{GuestAddr, IndirectRule, RingFormat, RingShape, TrustedFiles};

/// A driver and a device on one ring. Memory is two regions with a gap between; the ring is in the first.
struct Pair {
    ram: Arc<GuestRam>,
    driver: PackedDriver,
    queue: PackedQueue,
    chains: Chains,
}

const LOW: u64 = 0x10_0000;
const LOW_LEN: u64 = 0x8_0000;
const HIGH: u64 = 0x1_0000_0000;
const HIGH_LEN: u64 = 0x4000;
const GOOD: u64 = LOW + 0x4_0000;
const AVAIL: u16 = PACKED_AVAIL;

const FULL: QueueFeatures = QueueFeatures {
    event_idx: false,
    indirect: true,
    in_order: false,
    packed: true,
};
const EVENT_IDX: QueueFeatures = QueueFeatures {
    event_idx: true,
    ..FULL
};

impl Pair {
    fn new(size: u32) -> Self {
        Self::with(size, FULL, (0, true))
    }

    fn with(size: u32, features: QueueFeatures, start: (u16, bool)) -> Self {
        let size = QueueSize::packed(size).unwrap();
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(LOW), LOW_LEN), (GuestAddr(HIGH), HIGH_LEN)]).unwrap());
        let driver_features = DriverFeatures {
            event_idx: features.event_idx,
            in_order: features.in_order,
        };
        let mut driver = PackedDriver::new(&ram, size, driver_features).unwrap();
        if start != (0, true) {
            driver.start_at(start.0, start.1);
        }
        let memory = Arc::new(MemoryMap::new(ram.regions().unwrap(), 4096, &TrustedFiles).unwrap());
        let shape = RingShape::new(RingFormat::Packed, size);
        let rings = RingLayout::from_user(&memory, shape, driver.ring_user_addresses()).unwrap();
        let queue = PackedQueue::new(&memory, rings, features, QueueStart::at(driver.base())).unwrap();
        Self {
            ram,
            driver,
            queue,
            chains: Chains::for_queue(size, 16),
        }
    }

    /// The device dies, and another one is told `base`.
    fn replace(&mut self, base: u32) {
        let memory = Arc::clone(&self.queue.ring.memory);
        let shape = RingShape::new(RingFormat::Packed, self.queue.size);
        let rings = RingLayout::from_user(&memory, shape, self.driver.ring_user_addresses()).unwrap();
        self.queue = PackedQueue::new(&memory, rings, self.queue.features, QueueStart::at(base)).unwrap();
    }

    fn pop(&mut self) -> Result<usize, GuestFault> {
        self.queue.pop(&mut self.chains, 64)
    }

    /// Adds `count` chains of one byte.
    fn add(&mut self, count: u64) {
        for i in 0..count {
            self.driver
                .add(&[Buffer::readable(GuestAddr(GOOD + i), 1)])
                .unwrap();
        }
        self.driver.publish();
    }

    /// Takes everything and gives it back.
    fn serve(&mut self) -> usize {
        let count = self.pop().unwrap();
        for chain in &self.chains {
            self.queue.push_used(chain.id, 0);
        }
        self.queue.publish();
        count
    }

    fn back(&mut self) -> usize {
        std::iter::from_fn(|| self.driver.take_used()).count()
    }

    /// Writes `descs` to slots 0, 1, …, the first one last.
    fn post(&mut self, descs: &[PackedDescriptor]) {
        for (slot, desc) in descs.iter().enumerate().rev() {
            self.driver.write_slot(slot as u16, *desc);
        }
    }

    fn fault(&mut self, descs: &[PackedDescriptor]) -> GuestFault {
        self.post(descs);
        let fault = self.pop().expect_err("must be refused");
        assert!(
            self.chains.is_empty() && self.chains.buffers.is_empty(),
            "a fault leaves nothing behind"
        );
        assert_eq!(self.queue.base(), 0x8000_8000, "a fault takes nothing");
        fault
    }

    fn gather(&self, index: usize) -> Vec<u8> {
        let chain = &self.chains.chains[index];
        let mut bytes = Vec::new();
        for buffer in self.chains.readable(chain) {
            let mut part = vec![0; buffer.len as usize];
            assert!(self.queue.ring.memory.copy_from_guest(buffer.offset, &mut part));
            bytes.extend(part);
        }
        bytes
    }
}

/// Available in the first lap.
fn desc(addr: u64, len: u32, flags: u16) -> PackedDescriptor {
    PackedDescriptor {
        addr,
        len,
        id: 7,
        flags: flags | AVAIL,
    }
}

// What a driver by the book sees.

#[test]
fn a_list_arrives_with_its_bytes_and_goes_back() {
    let mut pair = Pair::new(8);
    pair.ram.write(GuestAddr(GOOD), b"header+payload");
    let parts = [
        Buffer::readable(GuestAddr(GOOD), 7),
        Buffer::readable(GuestAddr(GOOD + 7), 7),
        Buffer::writable(GuestAddr(HIGH), 100),
    ];
    let id = pair.driver.add(&parts).unwrap();
    assert_eq!(pair.pop(), Ok(0), "not visible before publish");
    assert!(pair.driver.publish(), "kicks are on at first");
    assert_eq!(pair.pop(), Ok(1));
    let chain = pair.chains.chains[0];
    assert_eq!(chain.id, ChainId { head: id, slots: 3 });
    assert_eq!((chain.readable, chain.writable), (2, 1));
    assert_eq!((chain.readable_bytes, chain.writable_bytes), (14, 100));
    assert_eq!(pair.gather(0), b"header+payload");
    assert_eq!(
        pair.chains.writable(&chain)[0],
        crate::Buffer {
            offset: LOW_LEN,
            len: 100,
            room_before: 0
        }
    );
    pair.queue.push_used(chain.id, 99);
    assert_eq!(pair.driver.take_used(), None, "not visible before publish");
    assert!(pair.queue.publish());
    let used = pair.driver.take_used().unwrap();
    assert_eq!((used.head, used.len), (id, 99));
    assert_eq!(pair.driver.free_descriptors(), 8);
    let first = pair.driver.read_slot(0);
    assert_eq!(first.flags, PACKED_AVAIL | PACKED_USED | DESC_WRITE | DESC_NEXT);
    for slot in 1..3 {
        let flags = pair.driver.read_slot(slot).flags & (PACKED_AVAIL | PACKED_USED);
        assert_eq!(flags, PACKED_AVAIL | PACKED_USED, "later slots are marked, too");
    }
    assert_eq!(pair.queue.base(), 0x8003_8003);
}

#[test]
fn the_id_is_that_of_the_last_descriptor() {
    let mut pair = Pair::new(4);
    let last = PackedDescriptor {
        id: 0xbeef,
        ..desc(GOOD, 1, 0)
    };
    pair.post(&[desc(GOOD, 1, DESC_NEXT), last]);
    assert_eq!(pair.pop(), Ok(1));
    let id = ChainId {
        head: 0xbeef,
        slots: 2,
    };
    assert_eq!(pair.chains.chains[0].id, id);
}

#[test]
fn indirect_table_is_taken_in_order_and_need_not_be_aligned() {
    let mut pair = Pair::new(8);
    pair.ram.write(GuestAddr(GOOD), b"abcd");
    let table = GuestAddr(LOW + 0x5_0003);
    // NEXT means nothing in a table of a packed ring.
    pair.driver.write_table_entry(table, 0, desc(GOOD, 1, DESC_NEXT));
    pair.driver.write_table_entry(table, 1, desc(GOOD + 1, 3, 0));
    pair.post(&[desc(table.get(), 32, DESC_INDIRECT | DESC_WRITE)]);
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.gather(0), b"abcd");
    assert_eq!(pair.chains.chains[0].id.slots, 1);
}

#[test]
fn indirect_table_may_have_as_many_entries_as_the_queue() {
    let mut pair = Pair::new(5);
    let part = Buffer::readable(GuestAddr(GOOD), 1);
    pair.driver.add_indirect(&[part; 5]).unwrap();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.chains.chains[0].readable, 5);
}

#[test]
fn list_as_long_as_the_queue_is_no_loop() {
    let mut pair = Pair::with(5, FULL, (3, false));
    let part = Buffer::readable(GuestAddr(GOOD), 1);
    pair.driver.add(&[part; 5]).unwrap();
    pair.driver.publish();
    assert_eq!(pair.serve(), 1);
    assert_eq!(pair.back(), 1);
    assert_eq!(pair.queue.base(), 0x8003_8003);
}

#[test]
fn unpopped_chains_come_again() {
    let mut pair = Pair::with(8, FULL, (6, true));
    for i in 0..3 {
        let buffers = [1, 2].map(|len| Buffer::readable(GuestAddr(GOOD + i), len));
        pair.driver.add(&buffers).unwrap();
    }
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(3));
    assert_eq!((pair.chains.slots(0), pair.chains.slots(1)), (6, 4));
    assert_eq!(pair.chains.slots(3), 0);
    pair.queue.unpop(pair.chains.slots(1));
    assert_eq!(pair.pop(), Ok(2));
    assert_eq!(pair.chains.buffers[0].offset, 0x4_0001);
}

#[test]
fn a_batch_ends_when_its_buffers_are_full_and_allocates_nothing() {
    let mut pair = Pair::new(64);
    let part = Buffer::readable(GuestAddr(GOOD), 1);
    for _ in 0..4 {
        pair.driver.add_indirect(&[part; 60]).unwrap();
    }
    pair.driver.publish();
    pair.chains = Chains::for_queue(pair.queue.size, 4);
    let room = (pair.chains.chains.capacity(), pair.chains.buffers.capacity());
    let mut batches = 0;
    let mut taken = 0;
    while taken < 4 {
        let count = pair.queue.pop(&mut pair.chains, 4).unwrap();
        assert!(count > 0);
        (taken, batches) = (taken + count, batches + 1);
    }
    assert!(batches > 1);
    assert_eq!(
        (pair.chains.chains.capacity(), pair.chains.buffers.capacity()),
        room
    );
    assert_eq!(pair.pop(), Ok(0));
}

#[test]
fn mergeable_buffers_become_visible_together() {
    let mut pair = Pair::with(4, FULL, (3, true));
    for i in 0..3 {
        pair.driver
            .add(&[Buffer::writable(GuestAddr(GOOD + 0x100 * i), 0x100)])
            .unwrap();
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

// Notifications.

#[test]
fn flags_suppress_kicks_and_calls() {
    let mut pair = Pair::new(8);
    pair.queue.disable_kicks();
    assert_eq!(pair.driver.device_events(), 1 << 16);
    let part = [Buffer::readable(GuestAddr(GOOD), 1)];
    pair.driver.add(&part);
    assert!(!pair.driver.publish());
    assert!(pair.queue.enable_kicks(), "one is there already: do not sleep");
    pair.pop().unwrap();
    assert!(!pair.queue.enable_kicks());
    assert_eq!(pair.driver.device_events(), 0);
    pair.driver.add(&part);
    assert!(pair.driver.publish());
    pair.pop().unwrap();
    let id = |head| ChainId { head, slots: 1 };
    pair.queue.push_used(id(0), 0);
    assert!(pair.queue.publish(), "the first in any case");
    pair.driver.disable_calls();
    pair.queue.push_used(id(1), 0);
    assert!(!pair.queue.publish());
    assert!(pair.driver.enable_calls());
}

#[test]
fn event_idx_calls_only_when_crossed() {
    let mut pair = Pair::with(8, EVENT_IDX, (5, false));
    pair.add(6);
    pair.pop().unwrap();
    let mut publish = |head, (offset, wrap)| {
        let event = Wish::at(Position { offset, wrap });
        pair.driver.set_driver_events(event.0);
        pair.queue.push_used(ChainId { head, slots: 1 }, 0);
        pair.queue.publish()
    };
    assert!(publish(0, (7, true)), "the first in any case");
    assert!(publish(1, (6, false)));
    assert!(!publish(2, (6, false)), "passed");
    assert!(!publish(3, (2, true)), "not yet");
    assert!(!publish(4, (2, true)), "not yet");
    assert!(publish(5, (2, true)));
}

#[test]
fn event_idx_suppression_outlives_the_wrap() {
    let mut pair = Pair::with(250, EVENT_IDX, (0, true));
    pair.queue.disable_kicks();
    for _ in 0..1000 {
        for _ in 0..200 {
            pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
        }
        assert!(!pair.driver.publish(), "a poller is not kicked");
        while pair.serve() > 0 {}
        assert_eq!(pair.back(), 200);
    }
}

// A successor.

#[test]
fn a_successor_goes_on_where_the_ring_stands_whatever_base_it_is_told() {
    for laps in 0..5 {
        for start in [(0, true), (0, false), (5, true), (7, false)] {
            let mut pair = Pair::with(8, FULL, start);
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
    let mut pair = Pair::new(8);
    // A device that leaves the later slots of lists alone.
    for slot in [0, 2, 4] {
        let mut used = desc(GOOD, 0, PACKED_USED);
        pair.driver.write_slot(slot, used);
        used.flags = AVAIL;
        pair.driver.write_slot(slot + 1, used);
    }
    pair.replace(0x8006_8006);
    assert_eq!(pair.queue.base(), 0x8006_8006);
    pair.replace(0x8006);
    assert_eq!(pair.queue.base(), 0x8006_8006);
    let memory = Arc::clone(&pair.queue.ring.memory);
    let shape = RingShape::new(RingFormat::Packed, pair.queue.size);
    let rings = RingLayout::from_user(&memory, shape, pair.driver.ring_user_addresses()).unwrap();
    let refused = PackedQueue::new(&memory, rings, FULL, QueueStart::at(0x8008)).unwrap_err();
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
    let mut pair = Pair::with(8, FULL, start);
    let part = Buffer::writable(GuestAddr(GOOD), 100);
    let ids: Vec<_> = lengths
        .iter()
        .map(|&parts| pair.driver.add(&vec![part; parts]).unwrap())
        .collect();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(lengths.len()));
    for (at, chain) in pair.chains.chains[..pushed].iter().enumerate() {
        pair.queue.push_used(chain.id, 10 + at as u32);
    }
    pair.replace(0x8000_8000);
    let back: Vec<_> = std::iter::from_fn(|| pair.driver.take_used())
        .map(|used| (used.head, used.len))
        .collect();
    let expected: Vec<_> = (0..pushed).map(|at| (ids[at], 10 + at as u32)).collect();
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

// What a driver can do wrong, each by its name.

/// The packed form of an index jump: more is said to be available than the ring has.
#[test]
fn slot_that_is_made_available_again_before_it_was_used_is_a_fault() {
    let mut pair = Pair::new(4);
    pair.add(4);
    assert_eq!(pair.pop(), Ok(4));
    assert_eq!(pair.pop(), Ok(0));
    let again = PackedDescriptor {
        flags: PACKED_USED,
        ..desc(GOOD, 1, 0)
    };
    pair.driver.write_slot(0, again);
    assert!(pair.queue.enable_kicks(), "no sleep on nonsense: pop must tell");
    assert_eq!(pair.pop(), Err(GuestFault::RingOverrun { at: 0 }));
}

#[test]
fn list_that_runs_into_a_slot_under_way_is_a_fault() {
    let mut pair = Pair::new(4);
    pair.add(2);
    assert_eq!(pair.pop(), Ok(2));
    let lap = PackedDescriptor {
        flags: PACKED_USED,
        ..desc(GOOD, 1, 0)
    };
    pair.driver.write_slot(0, lap);
    pair.driver.write_slot(3, desc(GOOD, 1, DESC_NEXT));
    pair.driver.write_slot(2, desc(GOOD, 1, DESC_NEXT));
    assert_eq!(pair.pop(), Err(GuestFault::RingOverrun { at: 0 }));
}

#[test]
fn list_that_goes_on_in_a_slot_not_available_is_a_fault() {
    let fault = Pair::new(4).fault(&[desc(GOOD, 1, DESC_NEXT)]);
    assert_eq!(fault, GuestFault::ChainIncomplete { head: 0, at: 1 });
}

#[test]
fn list_without_an_end_is_a_fault() {
    let ring = [desc(GOOD, 1, DESC_NEXT); 4];
    let fault = Pair::new(4).fault(&ring);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 4 });
    assert_eq!(Pair::new(1).fault(&ring[..1]).name(), "descriptor-loop");
}

/// CVE-2020-10725.
#[test]
fn zero_length_is_a_fault() {
    for addr in [GOOD, 0, u64::MAX] {
        let fault = Pair::new(4).fault(&[desc(addr, 0, DESC_WRITE)]);
        assert_eq!(fault, GuestFault::ZeroLength { head: 0 });
        let second = [desc(GOOD, 1, DESC_NEXT), desc(addr, 0, 0)];
        assert_eq!(Pair::new(4).fault(&second), GuestFault::ZeroLength { head: 0 });
    }
}

/// CVE-2018-1059: only the start of a range was checked.
#[test]
fn buffer_outside_memory_is_a_fault() {
    for (addr, len) in [
        (0, 1),
        (LOW - 1, 2),
        (LOW + LOW_LEN, 1),
        (LOW + LOW_LEN - 1, 2),
        (HIGH + HIGH_LEN - 1, 2),
        (HIGH, u32::MAX),
    ] {
        let fault = Pair::new(4).fault(&[desc(addr, len, 0)]);
        let addr = GuestAddr(addr);
        assert_eq!(fault, GuestFault::OutsideMemory { head: 0, addr, len });
    }
    let fault = Pair::new(4).fault(&[desc(u64::MAX - 1, u32::MAX, 0)]);
    assert_eq!(fault.name(), "address-wrap");
}

#[test]
fn readable_after_writable_is_a_fault() {
    let fault = Pair::new(4).fault(&[desc(GOOD, 1, DESC_WRITE | DESC_NEXT), desc(GOOD, 1, 0)]);
    assert_eq!(fault, GuestFault::WritableBeforeReadable { head: 0 });
}

#[test]
fn bad_indirect_descriptors_are_faults() {
    let mut pair = Pair::with(
        4,
        QueueFeatures {
            indirect: false,
            ..FULL
        },
        (0, true),
    );
    let fault = pair.fault(&[desc(GOOD, 16, DESC_INDIRECT)]);
    assert_eq!(fault.name(), "indirect-not-negotiated");
    for (len, flags, why) in [
        (16, DESC_NEXT, IndirectRule::WithNext),
        (0, 0, IndirectRule::Length),
        (17, 0, IndirectRule::Length),
        (u32::MAX, 0, IndirectRule::Length),
        (80, 0, IndirectRule::TooLong),
        (0xffff_fff0, 0, IndirectRule::TooLong),
    ] {
        let fault = Pair::new(4).fault(&[desc(GOOD, len, DESC_INDIRECT | flags)]);
        assert_eq!(fault, GuestFault::IndirectInvalid { head: 0, len, why });
    }
    let fault = Pair::new(4).fault(&[desc(HIGH + HIGH_LEN - 16, 32, DESC_INDIRECT)]);
    assert_eq!(fault.name(), "outside-memory");
    let mut pair = Pair::new(4);
    pair.driver
        .write_table_entry(GuestAddr(GOOD), 0, desc(GOOD, 16, DESC_INDIRECT));
    let fault = pair.fault(&[desc(GOOD, 16, DESC_INDIRECT)]);
    assert_eq!(fault, GuestFault::NestedIndirect { head: 0 });
}

#[test]
fn sound_chains_before_a_bad_one_are_served() {
    let mut pair = Pair::new(8);
    pair.add(3);
    pair.driver.add(&[Buffer::readable(GuestAddr(0), 1)]).unwrap();
    pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(3));
    assert!(matches!(
        pair.pop(),
        Err(GuestFault::OutsideMemory { head: 3, .. })
    ));
    assert_eq!(pair.queue.base(), 0x8000_8003);
}

#[path = "packed_properties.rs"]
mod properties;
