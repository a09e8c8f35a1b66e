//! Received frames in several pieces, of which one may be missing, through whole lanes over a NIC that the test plays.

use std::sync::{Arc, Mutex};

use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};

use crate::lane::Lane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::{Over, Wire};
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::QueuePair;
use model::config::Placement;

const BUFFERS: usize = 16;

fn guest(memory: &Memory, offloads: Offloads) -> (QueuePair, QueueDriver) {
    let vring = || memory.vring(64, QueueFeatures::default(), Journal::None);
    let ((to_guest, mut driver), (from_guest, _)) = (vring(), vring());
    for _ in 0..BUFFERS {
        let addr = memory.ram.alloc(4096, 4096).expect("memory is left");
        let buffer = Buffer::writable(addr, 2048);
        driver.add(&[buffer]).expect("room in the ring");
    }
    driver.publish();
    (memory.side(from_guest, to_guest, offloads), driver)
}

struct World {
    lane: Box<dyn Lane>,
    wire: Arc<Mutex<Wire>>,
    driver: QueueDriver,
    counters: Arc<PairCounters>,
}

impl World {
    fn new(direct: bool, offloads: Offloads) -> Self {
        let over = match direct {
            true => Over::new(Placement::Direct, 8),
            false => Over::new(Placement::Copy, 64),
        };
        let over = Over { fill: 32, ..over };
        let memory = over.memory(1 << 20);
        let (guest, driver) = guest(&memory, offloads);
        let counters = Arc::default();
        let (lane, wire) = over.lane(guest, &memory, &counters);
        Self {
            lane,
            wire,
            driver,
            counters,
        }
    }

    /// A frame comes in pieces of these lengths; `whole`: with its end.
    fn receive(&mut self, pieces: &[u32], whole: bool) {
        let mut wire = self.wire.lock().expect("no panic");
        for (at, &len) in pieces.iter().enumerate() {
            wire.receive(len, !whole || at + 1 < pieces.len());
        }
    }

    /// Bytes of the frames that the guest got, without their headers; `None`: a buffer with nothing in it.
    fn delivered(&mut self) -> Vec<Option<u32>> {
        for _ in 0..4 {
            self.lane.poll(&mut Others::default()).expect("no fault");
        }
        let used = std::iter::from_fn(|| self.driver.take_used());
        used.map(|used| used.len.checked_sub(HEADER)).collect()
    }
}

/// Without a look at frames, and with one.
fn copying() -> [World; 2] {
    let looked_at = Offloads {
        guest_csum: true,
        guest_tso4: true,
        ..Offloads::NONE
    };
    [Offloads::NONE, looked_at].map(|offloads| World::new(false, offloads))
}

#[test]
fn pieces_are_one_frame_in_copy_placement() {
    for mut world in copying() {
        world.receive(&[1000, 400], true);
        world.receive(&[60], true);
        assert_eq!(world.delivered(), [Some(1400), Some(60)]);
        assert_eq!(world.counters.to_guest_in_pieces.get(), 0);
    }
}

/// What is longer than a frame can be was several.
#[test]
fn pieces_are_longer_together_when_frames_may_be() {
    for mut world in copying() {
        for (limit, lost, delivered) in [(1518, 1, None), (2018, 1, Some(2000)), (1518, 2, None)] {
            world.lane.set_frame_limit(limit);
            world.receive(&[1000, 1000], true);
            world.receive(&[60], true);
            let expected: Vec<_> = delivered.into_iter().chain([60]).map(Some).collect();
            assert_eq!(world.delivered(), expected, "{limit}");
            assert_eq!(world.counters.to_guest_in_pieces.get(), lost);
        }
    }
}

#[test]
fn frame_without_its_end_does_not_become_part_of_the_next() {
    for mut world in copying() {
        world.receive(&[1000], false);
        world.receive(&[1000, 400], true);
        world.receive(&[60], true);
        assert_eq!(
            world.delivered(),
            [Some(60)],
            "neither, as nobody can tell them apart"
        );
        assert_eq!(world.counters.to_guest_in_pieces.get(), 1);
        // No chunk is lost.
        let given = world.wire.lock().expect("no panic").given.len();
        assert_eq!(given, 32);
    }
}

#[test]
fn pieces_are_no_frames_in_direct_placement() {
    let mut world = World::new(true, Offloads::NONE);
    assert_eq!(world.delivered(), []);
    world.receive(&[200], true);
    world.receive(&[3840, 100], true);
    world.receive(&[60], true);
    assert_eq!(world.delivered(), [Some(200), None, None, Some(60)]);
    assert_eq!(world.counters.to_guest_in_pieces.get(), 1);
    assert_eq!(world.counters.to_guest_frames.get(), 2);
}
