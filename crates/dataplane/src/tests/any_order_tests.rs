//! A NIC that gives receive buffers back in another order than it was given them, as drivers do in zero-copy that keep
//! the buffer of a frame which was dropped: direct placement, over a NIC that the test plays.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};

use virtqueue::driver::{Buffer, QueueDriver, Used};
use virtqueue::{
    FileRange, InflightFile, InflightRegion, InflightShape, Journal, QueueFeatures, TrustedFiles,
};
use xsk::{Frame, RxDesc, UmemOffset, XDP_PACKET_HEADROOM};

use crate::lane::Lane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::{Over, Wire};
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;
use model::config::Placement;

const ENTRIES: u16 = 16;
const CHUNKS: usize = 40;
/// Buffers of the guest: large enough for each frame, or so small that frames come by the bounce area.
const LARGE: u32 = 2048;
const SMALL: u32 = 600;

/// A guest's memory and its receive queue, whose lanes come and go.
struct World {
    memory: Memory,
    region: InflightFile,
    features: QueueFeatures,
    lane: Box<dyn Lane>,
    wire: Arc<Mutex<Wire>>,
    driver: QueueDriver,
    heads: HashMap<u16, Buffer>,
    counters: Arc<PairCounters>,
}

fn shape(features: QueueFeatures) -> InflightShape {
    InflightShape {
        queues: 1,
        entries: ENTRIES,
        packed: features.packed,
    }
}

/// What a lane notes what is under way in.
fn journal(region: &InflightFile, features: QueueFeatures) -> Journal {
    let range = FileRange {
        offset: 0,
        bytes: region.bytes,
    };
    let region = InflightRegion::open(region.file.as_fd(), range, shape(features), &TrustedFiles);
    Journal::Inflight(Arc::new(region.expect("fits")).queue(0).expect("one queue"))
}

impl World {
    fn new(features: QueueFeatures, bytes: &[u32]) -> Self {
        let memory = over().memory(1 << 20);
        let region = InflightRegion::create(shape(features)).expect("memory");
        let (vring, driver) = memory.vring(ENTRIES.into(), features, journal(&region, features));
        let (lane, wire, counters) = lane(&memory, vring);
        let mut world = Self {
            memory,
            region,
            features,
            lane,
            wire,
            driver,
            heads: HashMap::new(),
            counters,
        };
        for &len in bytes {
            let at = world.memory.ram.alloc(4096, 4096).expect("memory is left");
            world.post(Buffer::writable(at, len));
        }
        world.poll();
        world
    }

    /// Another lane on the same ring, whatever became of the one before.
    fn succeed(&mut self) {
        let journal = journal(&self.region, self.features);
        let vring = self.memory.enter(&self.driver, self.features, journal);
        (self.lane, self.wire, self.counters) = lane(&self.memory, vring);
        self.poll();
    }

    fn post(&mut self, buffer: Buffer) {
        let head = self.driver.add(&[buffer]).expect("room in the ring");
        assert!(self.heads.insert(head, buffer).is_none());
        self.driver.publish();
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().expect("no panic")
    }

    fn poll(&mut self) {
        (0..3).for_each(|_| _ = self.lane.poll(&mut Others::default()).expect("no fault"));
    }

    /// The NIC receives into the buffers that it has at these places, in this order.
    fn receive(&mut self, order: &[usize], len: u32) {
        let mut wire = self.wire();
        let mut given: Vec<Option<Frame>> = wire.given.drain(..).map(Some).collect();
        for (number, &at) in (0u32..).zip(order) {
            let frame = given[at].take().expect("once");
            wire.given.push_front(frame);
            wire.receive(len + number, false);
        }
        wire.given.extend(given.into_iter().flatten());
        drop(wire);
        self.poll();
    }

    /// Lengths of what the guest got, whose buffers it has again; empty ones are 0.
    fn delivered(&mut self) -> Vec<u32> {
        let mut frames = Vec::new();
        while let Some(used) = self.driver.take_used() {
            let buffer = self.heads.remove(&used.head).expect("used once");
            assert!(used.len <= buffer.len);
            frames.push(used.len.saturating_sub(HEADER));
            self.post(buffer);
        }
        frames
    }
}

/// Nothing is sent.
fn over() -> Over {
    Over {
        ring: (16, 0),
        ..Over::new(Placement::Direct, CHUNKS)
    }
}

fn lane(
    memory: &Memory,
    to_guest: device::pair::Vring,
) -> (Box<dyn Lane>, Arc<Mutex<Wire>>, Arc<PairCounters>) {
    let (from_guest, _) = memory.vring(64, QueueFeatures::default(), Journal::None);
    let guest = memory.side(from_guest, to_guest, Offloads::NONE);
    let counters = Arc::default();
    let (lane, wire) = over().lane(guest, memory, &counters);
    (lane, wire, counters)
}

/// Split and packed, with the driver's word that it does not rely on order, and without.
fn rings(in_order: bool) -> [QueueFeatures; 2] {
    [false, true].map(|packed| QueueFeatures {
        packed,
        in_order,
        ..QueueFeatures::default()
    })
}

#[test]
fn frames_reach_the_guest_in_order_from_any_buffer() {
    for features in rings(false) {
        // The third frame comes by the bounce area: its buffer cannot take the longest one in place.
        for bytes in [
            [LARGE; 8],
            [LARGE, LARGE, SMALL, LARGE, LARGE, LARGE, LARGE, LARGE],
        ] {
            let mut world = World::new(features, &bytes);
            let with_nic = world.wire().given.len();
            world.receive(&[1, 0, 2], 100);
            assert_eq!(world.delivered(), [100, 101, 102], "{features:?}");
            // One that the driver keeps holds up none.
            for _ in 0..40 {
                world.poll();
                let last = world.wire().given.len() - 1;
                world.receive(&[last, 1], 200);
                assert_eq!(world.delivered(), [200, 201], "{features:?}");
            }
            world.poll();
            assert_eq!(world.wire().given.len(), with_nic, "{features:?}: none is lost");
            assert_eq!(world.counters.to_guest_frames.get(), 3 + 80, "{features:?}");
        }
    }
}

#[test]
fn guest_that_relies_on_order_gets_its_buffers_in_order() {
    for features in rings(true) {
        let mut world = World::new(features, &[LARGE; 8]);
        world.receive(&[1, 2], 100);
        assert!(world.delivered().is_empty(), "{features:?}");
        world.receive(&[0], 200);
        assert_eq!(world.delivered(), [200, 100, 101], "{features:?}");
    }
}

/// As behind a NIC's time stamp.
#[test]
fn frame_that_is_not_where_its_buffer_begins_is_moved_there() {
    const FURTHER: u64 = 16;
    for features in rings(false) {
        let mut world = World::new(features, &[LARGE; 2]);
        let (header, frame) = ([7; HEADER as usize], [9; 300]);
        {
            let mut wire = world.wire();
            let chunk = wire.given.pop_front().expect("the lane gave some");
            let at = chunk.offset().get() + u64::from(XDP_PACKET_HEADROOM) + FURTHER;
            let written = [&header[..], &frame[..]].concat();
            let before = UmemOffset::new(at - u64::from(HEADER));
            wire.umem.write(before, &written).expect("inside");
            wire.received.push_back(RxDesc {
                frame: chunk,
                data: UmemOffset::new(at),
                len: frame.len() as u32,
                more: false,
            });
        }
        world.poll();
        let used = world.driver.take_used().expect("it is back");
        let buffer = world.heads[&used.head];
        let found = world.memory.ram.read_vec(buffer.addr, used.len as usize);
        assert_eq!(found, [&header[..], &frame[..]].concat(), "{features:?}");
    }
}

/// What was overtaken is given back with nothing in it, as nothing can be rewound to; all else is rewound to.
#[test]
fn lane_that_stops_leaves_each_buffer_to_its_successor_or_to_the_guest() {
    for features in rings(false) {
        for (order, empty) in [(&[0, 1][..], 0), (&[3, 5][..], 6)] {
            let mut world = World::new(features, &[LARGE; 8]);
            world.receive(order, 100);
            let nobodys = idle(&world.memory);
            let bases = std::mem::replace(&mut world.lane, nobodys)
                .stop()
                .pair
                .expect("a guest")
                .bases;
            let used: Vec<_> = std::iter::from_fn(|| world.driver.take_used()).collect();
            let lens: Vec<_> = used.iter().map(|used| used.len.saturating_sub(HEADER)).collect();
            assert_eq!(lens[..2], [100, 101], "{features:?}");
            assert_eq!(lens[2..], vec![0; empty], "{features:?}");
            if !features.packed {
                assert_eq!(bases.to_guest, world.driver.base(), "all that was taken is used");
            }
            // The guest posts them again, and the successor takes each once.
            let buffer = |used: &Used| world.heads.remove(&used.head).expect("used once");
            let buffers: Vec<_> = used.iter().map(buffer).collect();
            buffers.into_iter().for_each(|buffer| world.post(buffer));
            world.succeed();
            assert_eq!(world.wire().given.len(), 8, "{features:?}");
            world.receive(&[7, 6, 5, 4, 3, 2, 1, 0], 300);
            assert_eq!(world.delivered().len(), 8, "{features:?}");
        }
    }
}

/// A daemon that dies leaves no word but the inflight region.
#[test]
fn successor_of_a_lane_that_died_takes_each_buffer_that_was_out_and_no_other() {
    for features in rings(false) {
        let mut world = World::new(features, &[LARGE; 8]);
        for round in 0..20 {
            world.receive(&[3, 5], 100);
            assert_eq!(world.delivered(), [100, 101], "{features:?}, round {round}");
            // Its rings and tables are gone.
            world.succeed();
            assert_eq!(world.wire().given.len(), 8, "{features:?}, round {round}");
            let mut with_nic: Vec<_> = world.wire().given.iter().map(Frame::offset).collect();
            with_nic.sort_unstable_by_key(|offset| offset.get());
            with_nic.dedup();
            assert_eq!(with_nic.len(), 8, "{features:?}, round {round}: none twice");
        }
    }
}

/// A lane that has no guest.
fn idle(memory: &Memory) -> Box<dyn Lane> {
    let (vring, _) = memory.vring(64, QueueFeatures::default(), Journal::None);
    lane(memory, vring).0
}
