use super::*;
use crate::TrustedFiles;
use crate::driver::{Buffer, DriverFeatures, GuestRam, SplitDriver};
use crate::layout::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY};
use crate::{GuestAddr, IndirectRule};

/// A driver and a device on one ring. Memory is two regions with a gap between; the ring is in the first.
struct Pair {
    ram: Arc<GuestRam>,
    driver: SplitDriver,
    queue: SplitQueue,
    chains: Chains,
}

const LOW: u64 = 0x10_0000;
const LOW_LEN: u64 = 0x8_0000;
const HIGH: u64 = 0x1_0000_0000;
const HIGH_LEN: u64 = 0x4000;

const FULL: QueueFeatures = QueueFeatures {
    event_idx: false,
    indirect: true,
    in_order: false,
    packed: false,
};

impl Pair {
    fn new(size: u16) -> Self {
        Self::with(size, FULL, 0)
    }

    fn with(size: u16, features: QueueFeatures, start: u16) -> Self {
        let size = QueueSize::new(size.into()).unwrap();
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(LOW), LOW_LEN), (GuestAddr(HIGH), HIGH_LEN)]).unwrap());
        let driver_features = DriverFeatures {
            event_idx: features.event_idx,
            in_order: features.in_order,
        };
        let mut driver = SplitDriver::new(&ram, size, driver_features).unwrap();
        driver.start_at(start);
        let memory = Arc::new(MemoryMap::new(ram.regions().unwrap(), 4096, &TrustedFiles).unwrap());
        let rings = RingLayout::from_user(
            &memory,
            RingShape::new(RingFormat::Split, size),
            driver.ring_user_addresses(),
        )
        .unwrap();
        let queue = SplitQueue::new(&memory, rings, features, QueueStart::at(start.into())).unwrap();
        Self {
            ram,
            driver,
            queue,
            chains: Chains::for_queue(size, 16),
        }
    }

    fn pop(&mut self) -> Result<usize, GuestFault> {
        self.queue.pop(&mut self.chains, 64)
    }

    /// Makes `descs` descriptors 0, 1, … of the ring and publishes a chain that starts at the first.
    fn post(&mut self, descs: &[Descriptor]) {
        for (index, desc) in descs.iter().enumerate() {
            self.driver.write_descriptor(index as u16, *desc);
        }
        self.driver.set_avail_entry(0, 0);
        self.driver.set_avail_idx(1);
    }

    fn fault(&mut self, descs: &[Descriptor]) -> GuestFault {
        self.post(descs);
        let fault = self.pop().expect_err("must be refused");
        assert!(
            self.chains.is_empty() && self.chains.buffers.is_empty(),
            "a fault leaves nothing behind"
        );
        assert_eq!(self.queue.next_avail, 0, "a fault takes nothing");
        fault
    }

    fn gather(&self, index: usize) -> Vec<u8> {
        let chain = &self.chains.chains[index];
        let mut bytes = Vec::new();
        for buffer in self.chains.readable(chain) {
            let mut part = vec![0; buffer.len as usize];
            assert!(self.queue.memory.copy_from_guest(buffer.offset, &mut part));
            bytes.extend(part);
        }
        bytes
    }
}

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        addr,
        len,
        flags,
        next,
    }
}

const GOOD: u64 = LOW + 0x4_0000;

// What a driver by the book sees.

#[test]
fn a_chain_arrives_with_its_bytes_and_goes_back() {
    let mut pair = Pair::new(8);
    pair.ram.write(GuestAddr(GOOD), b"header+payload");
    let parts = [
        Buffer::readable(GuestAddr(GOOD), 7),
        Buffer::readable(GuestAddr(GOOD + 7), 7),
        Buffer::writable(GuestAddr(HIGH), 100),
    ];
    let head = pair.driver.add(&parts).unwrap();
    assert!(pair.driver.publish(), "kicks are on at first");
    assert_eq!(pair.queue.available(), Ok(1));
    assert_eq!(pair.pop(), Ok(1));
    let chain = pair.chains.chains[0];
    assert_eq!((chain.id.head, chain.readable, chain.writable), (head, 2, 1));
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
    assert_eq!((used.head, used.len), (head, 99));
    assert_eq!(pair.driver.free_descriptors(), 8);
}

#[test]
fn indirect_table_need_not_be_aligned() {
    let mut pair = Pair::new(8);
    pair.ram.write(GuestAddr(GOOD), b"abcd");
    let table = GuestAddr(LOW + 0x5_0003);
    let bytes = |d: Descriptor| [d.to_words().0.to_le_bytes(), d.to_words().1.to_le_bytes()].concat();
    pair.ram.write(table, &bytes(desc(GOOD, 1, DESC_NEXT, 1)));
    pair.ram
        .write(table.checked_add(16).unwrap(), &bytes(desc(GOOD + 1, 3, 0, 0)));
    pair.post(&[desc(table.get(), 32, DESC_INDIRECT, 0)]);
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.gather(0), b"abcd");
}

#[test]
fn indirect_table_may_end_a_direct_chain_and_its_write_flag_is_ignored() {
    let mut pair = Pair::new(8);
    pair.ram.write(GuestAddr(GOOD), b"abcd");
    let table = LOW + 0x5_0000;
    pair.driver
        .write_table_entry(GuestAddr(table), 0, desc(GOOD + 2, 2, 0, 0));
    pair.post(&[
        desc(GOOD, 2, DESC_NEXT, 1),
        desc(table, 16, DESC_INDIRECT | DESC_WRITE, 0),
    ]);
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.gather(0), b"abcd");
}

#[test]
fn indirect_table_may_have_as_many_entries_as_the_queue() {
    let mut pair = Pair::new(4);
    let part = Buffer::readable(GuestAddr(GOOD), 1);
    pair.driver.add_indirect(&[part; 4]).unwrap();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(1));
    assert_eq!(pair.chains.chains[0].readable, 4);
}

#[test]
fn buffers_at_region_edges_are_taken_whole() {
    for (addr, len, offset) in [
        (LOW + LOW_LEN - 1, 1, LOW_LEN - 1),
        (HIGH, HIGH_LEN as u32, LOW_LEN),
        (LOW, LOW_LEN as u32, 0),
    ] {
        let mut pair = Pair::new(4);
        pair.post(&[desc(addr, len, DESC_WRITE, 0)]);
        assert_eq!(pair.pop(), Ok(1));
        assert_eq!(
            (pair.chains.buffers[0].offset, pair.chains.buffers[0].len),
            (offset, len)
        );
    }
}

#[test]
fn unpopped_chains_come_again() {
    let mut pair = Pair::new(8);
    for i in 0..4 {
        pair.driver
            .add(&[Buffer::readable(GuestAddr(GOOD + i), 1)])
            .unwrap();
    }
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(4));
    pair.queue.unpop(3);
    pair.chains.truncate(1);
    assert_eq!((pair.chains.len(), pair.chains.buffers.len()), (1, 1));
    assert_eq!(pair.queue.available(), Ok(3));
    assert_eq!(pair.pop(), Ok(3));
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
    let mut pair = Pair::new(8);
    for i in 0..3 {
        pair.driver
            .add(&[Buffer::writable(GuestAddr(GOOD + 0x100 * i), 0x100)])
            .unwrap();
    }
    pair.driver.publish();
    pair.pop().unwrap();
    for chain in &pair.chains {
        pair.queue.push_used(chain.id, 0x100);
        assert_eq!(pair.driver.used_idx(), 0);
    }
    assert_eq!(pair.queue.used_idx.wrapping_sub(pair.queue.used_published), 3);
    pair.queue.publish();
    assert_eq!(pair.driver.used_idx(), 3);
    assert!(!pair.queue.publish(), "nothing new, no call");
}

#[test]
fn a_successor_goes_on_where_the_ring_stands() {
    let mut pair = Pair::with(8, FULL, 65530);
    for _ in 0..8 {
        pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
    }
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(8));
    for chain in &pair.chains.chains[..5] {
        pair.queue.push_used(chain.id, 0);
    }
    pair.queue.publish();
    // It dies with three chains under way; the driver has seen the call or not.
    pair.driver.set_avail_flags(AVAIL_NO_INTERRUPT);
    let memory = Arc::clone(&pair.queue.memory);
    let rings = RingLayout::from_user(
        &memory,
        RingShape::new(RingFormat::Split, pair.queue.size),
        pair.driver.ring_user_addresses(),
    )
    .unwrap();
    let used_idx = pair.queue.used_idx;
    pair.queue = SplitQueue::new(&memory, rings, FULL, QueueStart::at(used_idx.into())).unwrap();
    assert_eq!(pair.queue.used_idx, 65530u16.wrapping_add(5));
    assert_eq!(pair.pop(), Ok(3));
    for chain in &pair.chains {
        pair.queue.push_used(chain.id, 0);
    }
    assert!(pair.queue.publish(), "the first publication calls in any case");
    assert_eq!(std::iter::from_fn(|| pair.driver.take_used()).count(), 8);
}

// Notifications.

#[test]
fn flags_suppress_kicks_and_calls() {
    let mut pair = Pair::new(8);
    pair.queue.disable_kicks();
    assert_eq!(pair.driver.used_flags(), USED_NO_NOTIFY);
    let part = [Buffer::readable(GuestAddr(GOOD), 1)];
    pair.driver.add(&part);
    assert!(!pair.driver.publish());
    assert!(pair.queue.enable_kicks(), "one is there already: do not sleep");
    pair.pop().unwrap();
    assert!(!pair.queue.enable_kicks());
    pair.driver.add(&part);
    assert!(pair.driver.publish());
    pair.pop().unwrap();
    pair.queue.push_used(ChainId::split(0), 0);
    pair.queue.publish();
    pair.driver.disable_calls();
    pair.queue.push_used(ChainId::split(1), 0);
    assert!(!pair.queue.publish());
    assert!(pair.driver.enable_calls());
}

#[test]
fn event_idx_calls_only_when_crossed() {
    let mut pair = Pair::with(
        8,
        QueueFeatures {
            event_idx: true,
            ..FULL
        },
        65534,
    );
    for _ in 0..6 {
        pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]);
    }
    pair.driver.publish();
    pair.pop().unwrap();
    let mut publish = |head, event| {
        pair.driver.set_used_event(event);
        pair.queue.push_used(ChainId::split(head), 0);
        pair.queue.publish()
    };
    assert!(publish(0, 5), "the first in any case");
    assert!(publish(1, 65535));
    assert!(!publish(2, 65535), "passed");
    assert!(!publish(3, 3), "not yet");
    assert!(!publish(4, 3), "not yet");
    assert!(publish(5, 3));
    assert_eq!(pair.driver.used_flags(), 0, "unused with event idx");
}

#[test]
fn event_idx_suppression_outlives_the_wrap() {
    let mut pair = Pair::with(
        256,
        QueueFeatures {
            event_idx: true,
            ..FULL
        },
        0,
    );
    pair.queue.disable_kicks();
    for _ in 0..1000 {
        for _ in 0..200 {
            pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
        }
        assert!(!pair.driver.publish(), "a poller is not kicked");
        while pair.pop().unwrap() > 0 {
            for chain in &pair.chains {
                pair.queue.push_used(chain.id, 0);
            }
        }
        pair.queue.publish();
        while pair.driver.take_used().is_some() {}
    }
}

// What a driver can do wrong, each by its name.

#[test]
fn avail_index_jump_is_a_fault() {
    for (next, jump) in [(0, 5u16), (0, 65535), (65533, 3), (65533, 65532)] {
        let mut pair = Pair::with(4, FULL, next);
        pair.driver.set_avail_idx(jump);
        let fault = GuestFault::AvailIndexJump {
            found: jump,
            next,
            size: 4,
        };
        assert_eq!(pair.pop(), Err(fault));
        assert_eq!(pair.queue.available(), Err(fault));
        assert!(pair.queue.enable_kicks(), "no sleep on nonsense: pop must tell");
    }
}

#[test]
fn more_chains_than_the_ring_has_entries_are_a_fault() {
    for start in [0, 65533] {
        let mut pair = Pair::with(4, FULL, start);
        for _ in 0..4 {
            pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
        }
        pair.driver.publish();
        assert_eq!(pair.pop(), Ok(4));
        let (next, found) = (start.wrapping_add(4), start.wrapping_add(5));
        pair.driver.set_avail_idx(found);
        let size = 4;
        assert_eq!(pair.pop(), Err(GuestFault::AvailIndexJump { found, next, size }));
        // Used, but the driver cannot know yet.
        pair.queue.push_used(ChainId::split(0), 0);
        assert!(pair.pop().is_err());
        pair.queue.publish();
        assert_eq!(pair.pop(), Ok(1));
    }
}

/// CVE-2020-10723: a head that was cut to 16 bits, or not checked.
#[test]
fn head_out_of_range_is_a_fault() {
    for head in [4u16, 5, 32768, 65535] {
        let mut pair = Pair::new(4);
        pair.driver.set_avail_entry(0, head);
        pair.driver.set_avail_idx(1);
        assert_eq!(pair.pop(), Err(GuestFault::HeadOutOfRange { head, size: 4 }));
    }
}

#[test]
fn next_out_of_range_is_a_fault() {
    for next in [4u16, 65535] {
        let fault = Pair::new(4).fault(&[desc(GOOD, 1, DESC_NEXT, next)]);
        assert_eq!(
            fault,
            GuestFault::NextOutOfRange {
                head: 0,
                next,
                size: 4
            }
        );
    }
}

#[test]
fn descriptor_loop_is_a_fault() {
    let own = Pair::new(4).fault(&[desc(GOOD, 1, DESC_NEXT, 0)]);
    assert_eq!(own, GuestFault::DescriptorLoop { head: 0, limit: 4 });
    let ring: Vec<_> = (0..4).map(|i| desc(GOOD, 1, DESC_NEXT, (i + 1) % 4)).collect();
    assert_eq!(Pair::new(4).fault(&ring).name(), "descriptor-loop");
}

#[test]
fn chain_as_long_as_the_queue_is_no_loop() {
    let mut pair = Pair::new(4);
    let chain: Vec<_> = (0..4)
        .map(|i| desc(GOOD, 1, if i < 3 { DESC_NEXT } else { 0 }, i + 1))
        .collect();
    pair.post(&chain);
    assert_eq!(pair.pop(), Ok(1));
}

/// CVE-2020-10725.
#[test]
fn zero_length_is_a_fault() {
    for addr in [GOOD, 0, u64::MAX] {
        assert_eq!(
            Pair::new(4).fault(&[desc(addr, 0, DESC_WRITE, 0)]),
            GuestFault::ZeroLength { head: 0 }
        );
        let second = [desc(GOOD, 1, DESC_NEXT, 1), desc(addr, 0, 0, 0)];
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
        (LOW + LOW_LEN - 1, 2), // the next region follows in the map, but not for the guest
        (HIGH + HIGH_LEN - 1, 2), // private memory follows in the map
        (HIGH, u32::MAX),
    ] {
        let fault = Pair::new(4).fault(&[desc(addr, len, 0, 0)]);
        assert_eq!(
            fault,
            GuestFault::OutsideMemory {
                head: 0,
                addr: GuestAddr(addr),
                len
            }
        );
    }
}

#[test]
fn address_wrap_is_a_fault() {
    for (addr, len) in [
        (u64::MAX, 1),
        (u64::MAX - 1, u32::MAX),
        (u64::MAX - 0xffff, 0x20_0000),
    ] {
        let fault = Pair::new(4).fault(&[desc(addr, len, 0, 0)]);
        assert_eq!(
            fault,
            GuestFault::AddressWrap {
                head: 0,
                addr: GuestAddr(addr),
                len
            }
        );
    }
}

#[test]
fn readable_after_writable_is_a_fault() {
    let fault = Pair::new(4).fault(&[desc(GOOD, 1, DESC_WRITE | DESC_NEXT, 1), desc(GOOD, 1, 0, 0)]);
    assert_eq!(fault, GuestFault::WritableBeforeReadable { head: 0 });
}

#[test]
fn indirect_without_the_feature_is_a_fault() {
    let mut pair = Pair::with(4, QueueFeatures::default(), 0);
    let fault = pair.fault(&[desc(GOOD, 16, DESC_INDIRECT, 0)]);
    assert_eq!(fault.name(), "indirect-not-negotiated");
}

#[test]
fn indirect_with_next_is_a_fault() {
    let fault = Pair::new(4).fault(&[desc(GOOD, 16, DESC_INDIRECT | DESC_NEXT, 1)]);
    assert_eq!(fault.name(), "indirect-with-next");
}

#[test]
fn indirect_table_of_odd_or_no_length_is_a_fault() {
    for len in [0, 1, 15, 17, 31, u32::MAX] {
        let fault = Pair::new(4).fault(&[desc(GOOD, len, DESC_INDIRECT, 0)]);
        assert_eq!(
            fault,
            GuestFault::IndirectInvalid {
                head: 0,
                len,
                why: IndirectRule::Length
            }
        );
    }
}

#[test]
fn indirect_table_longer_than_the_queue_is_a_fault() {
    for len in [80, 0xffff_fff0, 0x10_0000] {
        let fault = Pair::new(4).fault(&[desc(GOOD, len, DESC_INDIRECT, 0)]);
        assert_eq!(
            fault,
            GuestFault::IndirectInvalid {
                head: 0,
                len,
                why: IndirectRule::TooLong
            }
        );
    }
}

#[test]
fn indirect_table_outside_memory_is_a_fault() {
    let fault = Pair::new(4).fault(&[desc(HIGH + HIGH_LEN - 16, 32, DESC_INDIRECT, 0)]);
    assert_eq!(fault.name(), "outside-memory");
    let fault = Pair::new(4).fault(&[desc(u64::MAX - 15, 32, DESC_INDIRECT, 0)]);
    assert_eq!(fault.name(), "address-wrap");
}

#[test]
fn nested_indirect_is_a_fault() {
    let mut pair = Pair::new(4);
    pair.driver
        .write_table_entry(GuestAddr(GOOD), 0, desc(GOOD, 16, DESC_INDIRECT, 0));
    assert_eq!(
        pair.fault(&[desc(GOOD, 16, DESC_INDIRECT, 0)]),
        GuestFault::NestedIndirect { head: 0 }
    );
}

#[test]
fn loop_and_range_inside_an_indirect_table_are_faults() {
    let mut pair = Pair::new(4);
    pair.driver
        .write_table_entry(GuestAddr(GOOD), 0, desc(GOOD, 1, DESC_NEXT, 0));
    let fault = pair.fault(&[desc(GOOD, 32, DESC_INDIRECT, 0)]);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 2 });
    // Inside guest memory, but past the table.
    pair.driver
        .write_table_entry(GuestAddr(GOOD), 0, desc(GOOD, 1, DESC_NEXT, 2));
    let fault = pair.fault(&[desc(GOOD, 32, DESC_INDIRECT, 0)]);
    assert_eq!(
        fault,
        GuestFault::NextOutOfRange {
            head: 0,
            next: 2,
            size: 2
        }
    );
}

#[test]
fn direct_and_indirect_together_longer_than_the_queue_are_a_fault() {
    let mut pair = Pair::new(4);
    for i in 0..4 {
        let flags = if i < 3 { DESC_NEXT } else { 0 };
        pair.driver
            .write_table_entry(GuestAddr(GOOD), i, desc(GOOD, 1, flags, i + 1));
    }
    let fault = pair.fault(&[desc(GOOD, 1, DESC_NEXT, 1), desc(GOOD, 64, DESC_INDIRECT, 0)]);
    assert_eq!(fault, GuestFault::DescriptorLoop { head: 0, limit: 4 });
}

/// A sum of lengths that does not fit 32 bits: CVE-2020-10722.
#[test]
fn chain_of_four_gigabytes_is_a_fault() {
    let size = QueueSize::new(4).unwrap();
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 3 << 30)]).unwrap()); // not touched, so not there
    let driver = SplitDriver::new(&ram, size, DriverFeatures::default()).unwrap();
    let memory = Arc::new(MemoryMap::new(ram.regions().unwrap(), 0, &TrustedFiles).unwrap());
    let rings = RingLayout::from_user(
        &memory,
        RingShape::new(RingFormat::Split, size),
        driver.ring_user_addresses(),
    )
    .unwrap();
    let mut queue = SplitQueue::new(&memory, rings, FULL, QueueStart::default()).unwrap();
    driver.write_descriptor(0, desc(0, 3 << 30, DESC_NEXT, 1));
    driver.write_descriptor(1, desc(0, 1 << 30, 0, 0));
    driver.set_avail_idx(1);
    let fault = queue.pop(&mut Chains::default(), 1).unwrap_err();
    assert_eq!(fault, GuestFault::ChainTooLong { head: 0 });
}

#[test]
fn sound_chains_before_a_bad_one_are_served() {
    let mut pair = Pair::new(8);
    for _ in 0..3 {
        pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
    }
    let bad = pair.driver.add(&[Buffer::readable(GuestAddr(0), 1)]).unwrap();
    pair.driver.add(&[Buffer::readable(GuestAddr(GOOD), 1)]).unwrap();
    pair.driver.publish();
    assert_eq!(pair.pop(), Ok(3));
    assert!(matches!(pair.pop(), Err(GuestFault::OutsideMemory { head, .. }) if head == bad));
    assert_eq!(pair.queue.next_avail, 3);
}

/// The place of a note must not be one that the driver has yet to read, with all its descriptors out.
#[test]
fn notes_for_a_successor_leave_unread_used_elements_alone() {
    for event_idx in [false, true] {
        let mut pair = Pair::with(4, QueueFeatures { event_idx, ..FULL }, 0);
        pair.queue.take_over(crate::Journal::Ring).unwrap();
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
            assert_eq!(pair.driver.used_flags() & 1, u16::from(!event_idx));
        }
        pair.queue.publish();
        assert!(!pair.queue.enable_kicks());
        assert_eq!(pair.driver.used_flags() & 1, 0);
        let back: Vec<_> = std::iter::from_fn(|| pair.driver.take_used())
            .map(|used| used.head)
            .collect();
        assert_eq!(back, heads);
        // The next lap: two out, none read.
        (0..4).for_each(|_| assert!(pair.driver.add(&buffer).is_some()));
        pair.driver.publish();
        assert_eq!(pair.queue.pop(&mut pair.chains, 2), Ok(2));
        let memory = Arc::clone(&pair.queue.memory);
        let shape = RingShape::new(RingFormat::Split, pair.queue.size);
        let rings = RingLayout::from_user(&memory, shape, pair.driver.ring_user_addresses()).unwrap();
        for kicks in [true, false] {
            if !kicks {
                pair.queue.disable_kicks();
            }
            let start = QueueStart {
                base: 4,
                journal: crate::Journal::Ring,
                log: None,
            };
            let successor = SplitQueue::new(&memory, rings, pair.queue.features, start).unwrap();
            assert_eq!(successor.taken_before, 2, "two were out, kicks: {kicks}");
        }
    }
}

#[path = "split_properties.rs"]
mod properties;
