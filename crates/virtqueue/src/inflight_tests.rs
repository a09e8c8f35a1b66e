use std::os::fd::AsFd;

use super::*;
use crate::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
use crate::{
    ChainId, Chains, FileRange, GuestAddr, Journal, MemoryMap, Queue, QueueFeatures, QueueStart, RingError,
    RingFormat, RingShape, TrustedFiles,
};

const QUEUE: u16 = 8;

fn whole(bytes: u64) -> FileRange {
    FileRange { offset: 0, bytes }
}

fn shape(queues: u16, entries: u16, packed: bool) -> InflightShape {
    InflightShape {
        queues,
        entries,
        packed,
    }
}

/// A file of `len` bytes, written as a predecessor or a VMM would.
struct File(OwnedFd);

impl File {
    fn put(&self, at: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.0, bytes, at).unwrap(), bytes.len());
    }

    fn put16(&self, at: u64, value: u16) {
        self.put(at, &value.to_ne_bytes());
    }

    fn put64(&self, at: u64, value: u64) {
        self.put(at, &value.to_ne_bytes());
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert_eq!(rustix::io::pread(&self.0, &mut bytes, at).unwrap(), N);
        bytes
    }

    fn get16(&self, at: u64) -> u16 {
        u16::from_ne_bytes(self.get(at))
    }

    fn open(&self, packed: bool) -> Result<InflightRegion, InflightError> {
        self.open_sized(packed, QUEUE)
    }

    fn open_sized(&self, packed: bool, queue: u16) -> Result<InflightRegion, InflightError> {
        let bytes = shape(1, queue, packed).bytes().unwrap();
        InflightRegion::open(
            self.0.as_fd(),
            whole(bytes),
            shape(1, queue, packed),
            &TrustedFiles,
        )
    }
}

/// A driver, a ring and a region.
struct World {
    ram: Arc<GuestRam>,
    memory: Arc<MemoryMap>,
    driver: QueueDriver,
    file: File,
}

impl World {
    fn new(packed: bool) -> Self {
        Self::sized(packed, QUEUE)
    }

    fn sized(packed: bool, queue: u16) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)]).unwrap());
        let shape = RingShape::new(RingFormat::of(packed), QueueSize::packed(queue.into()).unwrap());
        Self {
            driver: QueueDriver::new(&ram, shape, DriverFeatures::default()).unwrap(),
            memory: Arc::new(MemoryMap::new(ram.regions().unwrap(), 0, &TrustedFiles).unwrap()),
            ram,
            file: File(
                InflightRegion::create(self::shape(1, queue, packed))
                    .unwrap()
                    .file,
            ),
        }
    }

    fn packed(&self) -> bool {
        self.driver.format() == RingFormat::Packed
    }

    fn device(&self) -> Queue {
        let region = self.file.open_sized(self.packed(), self.driver.size().get());
        let region = Arc::new(region.unwrap());
        self.device_with(&region).unwrap()
    }

    fn device_with(&self, region: &Arc<InflightRegion>) -> Result<Queue, RingError> {
        let features = QueueFeatures {
            packed: self.packed(),
            ..QueueFeatures::default()
        };
        let start = QueueStart {
            base: 0x8000_8000,
            journal: Journal::Inflight(region.queue(0).unwrap()),
            log: None,
        };
        Queue::new(&self.memory, self.driver.rings(&self.memory), features, start)
    }

    /// Chains of one byte each, `count` of them.
    fn send(&mut self, count: u64) -> Vec<u16> {
        let add = |at| {
            let addr = self.ram.alloc(16, 16).unwrap();
            self.ram.write(addr, &[at as u8]);
            self.driver.add(&[Buffer::readable(addr, 1)]).unwrap()
        };
        let ids = (0..count).map(add).collect();
        self.driver.publish();
        ids
    }
}

fn pop(queue: &mut Queue) -> Vec<ChainId> {
    let mut chains = Chains::for_queue(queue.size(), 3);
    let mut ids = Vec::new();
    while queue.pop(&mut chains, 3).unwrap() > 0 {
        assert!(chains.len() <= 3);
        ids.extend(chains.iter().map(|chain| chain.id));
    }
    ids
}

fn heads(ids: &[ChainId]) -> Vec<u16> {
    ids.iter().map(|id| id.head).collect()
}

/// The device takes these chains, of which four were taken before, returns some unused, and dies, too; the next one
/// serves them all.
fn assert_is_done_by_two(world: &mut World, mut queue: Queue, (chains, unpop): (&[u16], u16)) {
    assert_eq!(heads(&pop(&mut queue)), chains);
    queue.unpop(unpop);
    pop(&mut queue);
    queue.unpop(unpop);
    let mut queue = world.device();
    assert_eq!(queue.taken_before(), 4);
    let taken = pop(&mut queue);
    assert_eq!(heads(&taken), chains);
    taken.iter().for_each(|&id| queue.push_used(id, 0));
    queue.publish();
    let back = std::iter::from_fn(|| world.driver.take_used());
    assert_eq!(back.count(), chains.len());
    let next = world.send(3);
    assert_eq!(heads(&pop(&mut queue)), next);
}

fn is_inflight(world: &World, index: u64) -> bool {
    let at = if world.packed() {
        32 + 32 * index
    } else {
        16 + 16 * index
    };
    world.file.get::<1>(at) == [1]
}

// Layout.

#[test]
fn sizes_are_those_of_the_structures() {
    assert_eq!(shape(1, 256, false).bytes(), Some(4160));
    assert_eq!(shape(1, 256, true).bytes(), Some(8256));
    assert_eq!(shape(4, 8, false).bytes(), Some(4 * 192));
    assert_eq!(
        shape(u16::MAX, 32768, true).bytes(),
        Some(65535 * (32 * 32769 + 32))
    );
    let InflightFile { file, bytes } = InflightRegion::create(shape(1, 8, true)).unwrap();
    let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
    assert_eq!(rustix::fs::fcntl_get_seals(&file), Ok(seals));
    // A part of a longer file is enough.
    assert!(InflightRegion::open(file.as_fd(), whole(bytes), shape(1, 7, true), &TrustedFiles).is_ok());
    for (queues, size) in [(0, 8), (1, 0), (1, 32769)] {
        assert_eq!(shape(queues, size, false).bytes(), None);
        assert!(InflightRegion::create(shape(queues, size, true)).is_err());
    }
}

#[test]
fn split_states_lie_where_the_specification_says() {
    let mut world = World::new(false);
    let ids = world.send(3);
    let mut queue = world.device();
    assert_eq!(
        world.file.get::<16>(0),
        *[0u64.to_ne_bytes(), {
            let header = [1u16, QUEUE, 0, 0].map(u16::to_ne_bytes);
            header.concat().try_into().unwrap()
        }]
        .concat()
    );
    let taken = pop(&mut queue);
    assert_eq!(heads(&taken), ids);
    for (number, &head) in (0u64..).zip(&ids) {
        let at = 16 + 16 * u64::from(head);
        assert_eq!(world.file.get::<1>(at), [1]);
        assert_eq!(world.file.get::<8>(at + 8), number.to_ne_bytes());
    }
    taken[..2].iter().for_each(|&id| queue.push_used(id, 0));
    queue.publish();
    assert_eq!(world.file.get16(12), ids[1], "last_batch_head");
    assert_eq!(world.file.get16(14), 2, "used_idx");
    assert_eq!(world.file.get16(16 + 16 * u64::from(ids[1]) + 6), ids[0], "next");
    let marks: Vec<_> = ids.iter().map(|&head| is_inflight(&world, head.into())).collect();
    assert_eq!(marks, [false, false, true]);
}

#[test]
fn packed_states_lie_where_the_specification_says() {
    let mut world = World::new(true);
    let buffers = [
        Buffer::readable(GuestAddr(0x8_0000), 100),
        Buffer::writable(GuestAddr(0x9_0000), 200),
    ];
    let id = world.driver.add(&buffers).unwrap();
    world.driver.publish();
    let mut queue = world.device();
    let taken = pop(&mut queue);
    let words = |at: u64, count: u64| {
        (0..count)
            .map(|i| world.file.get16(at + 2 * i))
            .collect::<Vec<_>>()
    };
    // version, desc_num, free_head, old_free_head, used_idx, old_used_idx
    assert_eq!(words(8, 6), [1, QUEUE, 2, 2, 0, 0]);
    assert_eq!(world.file.get::<2>(20), [1, 1], "both wrap counters");
    assert_eq!(world.file.get::<1>(32), [1], "inflight");
    // next, last, num
    assert_eq!(words(34, 3), [1, 1, 2]);
    assert_eq!(world.file.get::<8>(40), 0u64.to_ne_bytes(), "counter");
    // id, flags; then length and address, of both descriptors
    assert_eq!(words(48, 2), [id, 0x81]);
    assert_eq!(world.file.get::<4>(52), 100u32.to_ne_bytes());
    assert_eq!(world.file.get::<8>(56), 0x8_0000u64.to_ne_bytes());
    assert_eq!(words(80, 2), [id, 0x82]);
    assert_eq!(world.file.get::<4>(84), 200u32.to_ne_bytes());
    assert_eq!(world.file.get::<8>(88), 0x9_0000u64.to_ne_bytes());
    queue.push_used(taken[0], 7);
    queue.publish();
    assert_eq!(words(8, 6), [1, QUEUE, 0, 0, 2, 2]);
    assert_eq!(world.file.get::<1>(32), [0]);
    assert_eq!(words(66, 1), [2], "the last one leads to what was free");
}

// What a VMM can do wrong.

#[test]
fn region_that_does_not_fit_its_file_is_refused() {
    let InflightFile { file: fd, bytes } = InflightRegion::create(shape(2, QUEUE, false)).unwrap();
    let open = |bytes, offset, queues| {
        InflightRegion::open(
            fd.as_fd(),
            FileRange { offset, bytes },
            shape(queues, QUEUE, false),
            &TrustedFiles,
        )
        .unwrap_err()
    };
    assert!(matches!(open(bytes, 0, 3), InflightError::TooShort { .. }));
    assert!(matches!(open(bytes - 1, 0, 2), InflightError::TooShort { .. }));
    assert!(matches!(
        open(bytes, 64, 2),
        InflightError::File(FileError::Range { .. })
    ));
    assert!(matches!(open(bytes, 1, 2), InflightError::Misaligned { .. }));
    assert!(matches!(
        open(u64::MAX, 64, 2),
        InflightError::File(FileError::Range { .. })
    ));
    assert!(matches!(open(bytes, 0, 0), InflightError::Shape { .. }));
    let (reader, _writer) = io::pipe().unwrap();
    let refused = InflightRegion::open(
        reader.as_fd(),
        whole(bytes),
        shape(2, QUEUE, false),
        &TrustedFiles,
    );
    assert!(matches!(refused, Err(InflightError::File(FileError::NotAFile))));
}

#[test]
fn region_of_another_layout_is_refused() {
    for (at, value) in [(8, 2), (10, QUEUE + 1), (10, 0), (0, 1)] {
        let world = World::new(false);
        assert!(world.file.open(false).is_ok()); // fills it in
        world.file.put16(at, value);
        assert!(matches!(
            world.file.open(false),
            Err(InflightError::Unknown { .. })
        ));
    }
    // Never used: it is filled in.
    let world = World::new(false);
    world.file.put(0, &[0; 16]);
    assert!(world.file.open(false).is_ok());
    assert_eq!((world.file.get16(8), world.file.get16(10)), (1, QUEUE));
    // Each queue has a header of its own, behind the states of the queue before.
    let InflightFile { file, bytes } = InflightRegion::create(shape(2, QUEUE, false)).unwrap();
    InflightRegion::open(file.as_fd(), whole(bytes), shape(2, QUEUE, false), &TrustedFiles).unwrap();
    let two = File(file);
    assert_eq!((two.get16(192 + 8), two.get16(192 + 10)), (1, QUEUE));
}

#[test]
fn region_for_another_queue_is_refused() {
    let world = World::new(false);
    for (size, packed) in [(QUEUE / 2, false), (QUEUE, true)] {
        let refused = world.device_with(&fresh_region(size, packed)).unwrap_err();
        assert_eq!(
            refused,
            RingError::Inflight {
                ring: RingFormat::Split,
                size: QUEUE,
                region: RingFormat::of(packed),
                entries: size,
            }
        );
        let said = refused.to_string();
        assert!(said.contains(&format!("split ring of {QUEUE} entries")), "{said}");
    }
    assert!(Arc::new(world.file.open(false).unwrap()).queue(1).is_none());
}

fn fresh_region(size: u16, packed: bool) -> Arc<InflightRegion> {
    let InflightFile { file: fd, bytes } = InflightRegion::create(shape(1, size, packed)).unwrap();
    let region = InflightRegion::open(fd.as_fd(), whole(bytes), shape(1, size, packed), &TrustedFiles);
    Arc::new(region.unwrap())
}

/// As after a reset; the ring that was there before left nothing in flight.
#[test]
fn ring_that_comes_back_shorter_or_longer_is_noted_in_the_region_of_the_longest() {
    for packed in [false, true] {
        let region = fresh_region(4 * QUEUE, packed);
        for size in [4 * QUEUE, QUEUE, 4 * QUEUE, 2 * QUEUE] {
            let mut world = World::sized(packed, size);
            if size < 4 * QUEUE {
                // The mark of a descriptor that the ring does not have.
                region.queue(0).unwrap().set(size, Field::at(0), 1u8);
            }
            let mut queue = world.device_with(&region).unwrap();
            assert_eq!(queue.taken_before(), 0, "{size}, packed: {packed}");
            // All of it, so that each state is used.
            let ids = world.send(u64::from(size));
            let taken = pop(&mut queue);
            assert_eq!(heads(&taken), ids);
            // The device dies, with used elements that it did not publish.
            taken[..2].iter().for_each(|&id| queue.push_used(id, 0));
            drop(queue);
            let mut queue = world.device_with(&region).unwrap();
            assert_eq!(queue.taken_before(), ids.len(), "{size}, packed: {packed}");
            let taken = pop(&mut queue);
            assert_eq!(heads(&taken), ids);
            taken.iter().for_each(|&id| queue.push_used(id, 0));
            queue.publish();
            assert_eq!(std::iter::from_fn(|| world.driver.take_used()).count(), ids.len());
        }
    }
}

/// CVE-2021-3839 and its like: indices and counts in the region that lead out of it.
#[test]
fn split_region_full_of_nonsense_is_emptied() {
    type Lie = fn(&File);
    let lies: [Lie; 5] = [
        |file| {
            file.put16(14, 100); // used_idx: a batch longer than the queue
            file.put(16 + 16, &[1]); // and a chain that is not in it
        },
        |file| {
            file.put16(14, 0xffff); // a batch of one
            file.put16(12, QUEUE); // that is not there
        },
        |file| {
            file.put16(14, 0xfffe); // a batch of two
            file.put16(16 + 6, 0xffff); // whose second is not there
        },
        |file| (0..u64::from(QUEUE)).for_each(|head| file.put(16 + 16 * head, &[1])), // more than were sent
        |file| (0..64).for_each(|at| file.put64(16 + 8 * at % 128, 0xffff_ffff_ffff_ff01)),
    ];
    for lie in lies {
        let mut world = World::new(false);
        let ids = world.send(3);
        lie(&world.file);
        let mut queue = world.device();
        assert_eq!(queue.taken_before(), 0);
        let taken = pop(&mut queue);
        assert_eq!(heads(&taken), ids);
        taken.iter().for_each(|&id| queue.push_used(id, 0));
        queue.publish();
        assert!((0..u64::from(QUEUE)).all(|index| !is_inflight(&world, index)));
        assert_eq!(world.file.get16(14), 3);
    }
}

#[test]
fn packed_region_full_of_nonsense_is_made_anew() {
    type Lie = fn(&File);
    let lies: [Lie; 9] = [
        |file| file.put16(16, QUEUE),     // used_idx
        |file| file.put16(18, 0xffff),    // old_used_idx
        |file| file.put16(14, QUEUE + 1), // old_free_head
        |file| file.put16(32 + 2, 0),     // a free list without an end
        |file| file.put16(16, 3),         // another place than the ring says
        |file| {
            file.put16(14, 1); // state 0 is out
            file.put(32, &[1]);
            file.put16(32 + 6, 3); // with a state that is not there
            file.put16(32 + 2, 0xfff0);
        },
        |file| {
            file.put16(14, 1);
            file.put(32, &[1]);
            file.put16(32 + 6, 2); // with itself twice
            file.put16(32 + 2, 0);
        },
        |file| {
            file.put16(14, 1);
            file.put(32, &[1]); // with no state at all
        },
        |file| (0..32).for_each(|at| file.put64(32 + 8 * at, 0xffff_ffff_ffff_ff01)),
    ];
    for (number, lie) in lies.iter().enumerate() {
        let mut world = World::new(true);
        drop(world.device()); // links the free list
        let ids = world.send(3);
        lie(&world.file);
        let mut queue = world.device();
        assert_eq!(queue.taken_before(), 0, "lie {number}");
        let taken = pop(&mut queue);
        assert_eq!(heads(&taken), ids, "lie {number}");
        taken.iter().for_each(|&id| queue.push_used(id, 0));
        queue.publish();
        assert!((0..u64::from(QUEUE)).all(|index| !is_inflight(&world, index)));
        assert_eq!((world.file.get16(16), world.file.get16(18)), (3, 3));
    }
}

/// A buffer that the region names must be in guest memory, too.
#[test]
fn packed_region_that_names_a_buffer_outside_memory_is_the_guests_fault() {
    let mut world = World::new(true);
    world.send(2);
    pop(&mut world.device());
    world.file.put64(64 + 24, 1 << 40);
    let mut queue = world.device();
    assert_eq!(queue.taken_before(), 2);
    let mut chains = Chains::default();
    assert_eq!(queue.pop(&mut chains, 2), Ok(1), "the sound one first");
    let fault = queue.pop(&mut chains, 2).unwrap_err();
    assert_eq!(fault.name(), "outside-memory");
}

// What a predecessor left.

#[test]
fn chains_that_a_split_predecessor_used_out_of_order_are_not_done_again() {
    let mut world = World::new(false);
    let ids = world.send(6);
    // It took all six, and used the second and the fourth; the driver has not looked yet.
    for (number, &head) in (0u64..).zip(&ids) {
        let at = 16 + 16 * u64::from(head);
        world.file.put(at, &[u8::from(number != 1 && number != 3)]);
        world.file.put64(at + 8, 10 + number);
    }
    world.file.put16(14, 2);
    let offset = |at| world.memory.translate_user(at, 2).unwrap();
    let used = offset(world.driver.ring_user_addresses().used);
    let elements = [ids[1].into(), 0, ids[3].into(), 0].map(u32::to_le_bytes);
    assert!(world.memory.copy_to_guest(used + 4, elements.as_flattened()));
    assert!(world.memory.copy_to_guest(used + 2, &2u16.to_le_bytes()));
    // The driver takes them back, and writes over the first entries of its ring.
    assert!(world.driver.take_used().is_some() && world.driver.take_used().is_some());
    let new = world.send(2);
    let queue = world.device();
    assert_eq!((queue.taken_before(), queue.base()), (4, 2));
    let left = [&[ids[0], ids[2], ids[4], ids[5]], &new[..]].concat();
    assert_is_done_by_two(&mut world, queue, (&left, 3));
}

#[test]
fn chains_that_a_packed_predecessor_used_out_of_order_are_not_done_again() {
    let mut world = World::new(true);
    let ids = world.send(6);
    let mut queue = world.device();
    pop(&mut queue);
    drop(queue);
    // It used the second and the fourth: their used descriptors are in slots 0 and 1.
    for (slot, id) in [(0, ids[1]), (1, ids[3])] {
        let used = crate::layout::PackedDescriptor {
            addr: 0,
            len: 0,
            id,
            flags: 0x8080,
        };
        world.driver.packed().write_slot(slot, used);
    }
    for state in [1u64, 3] {
        world.file.put(32 + 32 * state, &[0]);
    }
    world.file.put16(32 + 32 * 3 + 2, 6); // 1 and 3 go in front of what is free
    world.file.put16(32 + 32 + 2, 3);
    [12, 14].iter().for_each(|&at| world.file.put16(at, 1));
    [16, 18].iter().for_each(|&at| world.file.put16(at, 2));
    assert!(world.driver.take_used().is_some() && world.driver.take_used().is_some());
    let new = world.send(3);
    let queue = world.device();
    assert_eq!((queue.taken_before(), queue.base()), (4, 0x8002_8002));
    let left = [&[ids[0], ids[2], ids[4], ids[5]], &new[..]].concat();
    assert_is_done_by_two(&mut world, queue, (&left, 4));
}

/// Its chains are no longer in the slots in which the driver made them available, but in the next ones, over the end
/// of a lap.
#[test]
fn packed_batch_that_was_not_published_is_available_again_where_its_chains_are_now() {
    let mut world = World::new(true);
    let mut queue = world.device();
    let serve = |queue: &mut Queue, world: &mut World| {
        let taken = pop(queue);
        taken.iter().for_each(|&id| queue.push_used(id, 0));
        queue.publish();
        std::iter::from_fn(|| world.driver.take_used()).count()
    };
    world.send(6);
    assert_eq!(serve(&mut queue, &mut world), 6);
    let ids = world.send(3);
    let taken = pop(&mut queue);
    let second = world.driver.packed().read_slot(7);
    queue.push_used_in_any_order(taken[2], 0);
    queue.publish();
    assert_eq!(world.driver.take_used().map(|used| used.head), Some(ids[2]));
    taken[..2]
        .iter()
        .for_each(|&id| queue.push_used_in_any_order(id, 0));
    for _ in 0..2 {
        queue = world.device();
        assert_eq!(queue.taken_before(), 2);
        assert_eq!(world.driver.take_used(), None);
        let expected = crate::layout::PackedDescriptor {
            flags: crate::layout::PACKED_USED,
            ..second
        };
        assert_eq!(world.driver.packed().read_slot(0), expected);
    }
    assert_eq!(serve(&mut queue, &mut world), 2);
}

// What a VMM can do while it is read.

/// Numbers by xorshift, the same in each run.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// A predecessor took chains of one descriptor each, all that the driver made available, and died.
fn taken_and_left(packed: bool, queue: u16) -> World {
    let mut world = World::sized(packed, queue);
    world.send(queue.into());
    pop(&mut world.device());
    world
}

#[test]
fn numbers_that_change_at_each_read_only_change_the_order() {
    const QUEUE: u16 = 64;
    for (packed, seed) in [false, true]
        .into_iter()
        .flat_map(|packed| (1..20).map(move |seed| (packed, seed)))
    {
        let world = taken_and_left(packed, QUEUE);
        let Bytes { header, state } = shape(1, QUEUE, packed).sizes();
        let (file, mut next) = (File(world.file.0.try_clone().unwrap()), random(seed));
        let scribble = move || {
            for index in 0..u64::from(QUEUE) {
                file.put64(header + state * index + 8, next());
            }
        };
        let mut queue = crash::with_writer(scribble, || world.device());
        assert_eq!(queue.taken_before(), QUEUE.into());
        let mut taken = heads(&pop(&mut queue));
        taken.sort_unstable();
        assert_eq!(taken, (0..QUEUE).collect::<Vec<_>>());
    }
}

#[test]
fn region_of_which_anything_changes_at_each_read_ends_no_device() {
    const QUEUE: u16 = 32;
    for (packed, seed) in [false, true]
        .into_iter()
        .flat_map(|packed| (1..200).map(move |seed| (packed, seed)))
    {
        let world = taken_and_left(packed, QUEUE);
        let bytes = shape(1, QUEUE, packed).bytes().unwrap();
        let (file, mut next) = (File(world.file.0.try_clone().unwrap()), random(seed));
        // Not the header, of which a version that changes is only refused; small numbers, which look like indices.
        let scribble = move || {
            let at = 12 + next() % (bytes - 12);
            file.put(
                at / 2 * 2,
                &((next() % u64::from(QUEUE + 2)) as u16).to_ne_bytes(),
            );
        };
        crash::with_writer(scribble, || {
            let mut queue = world.device();
            let mut chains = Chains::for_queue(queue.size(), 16);
            // Or until the guest is at fault: what the region names may be anywhere.
            for _ in 0..2 * QUEUE {
                if !queue.pop(&mut chains, 16).is_ok_and(|taken| taken > 0) {
                    break;
                }
                let some = chains.len() / 2;
                queue.unpop(chains.slots(some));
                chains
                    .iter()
                    .take(some)
                    .for_each(|chain| queue.push_used(chain.id, 0));
                queue.publish();
            }
        });
    }
}
