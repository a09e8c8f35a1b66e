//! GSO packets through whole lanes, over a NIC whose ring, completions and link the test decides about.

use std::sync::{Arc, Mutex, MutexGuard};

use packet::segment::Request;
use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};

use super::*;
use crate::lane::limits::{BATCH, SEGMENTS};
use crate::lane::{Lane, Work};
use crate::nic::queue::{LinkState, MOST_PIECES, SHORTEST_BY_DMA};
use crate::nic::tap::SendTap;
use crate::port_lane::PortLane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::{Over, Wire};
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use device::pair::{Bases, QueuePair};
use model::config::Placement;

#[path = "segmenter_lane_tests.rs"]
mod segmenter_lane;
#[path = "send_tap_tests.rs"]
mod send_tap;
#[path = "gso_stop_tests.rs"]
mod stop;

#[derive(Clone, Copy, Debug)]
struct Setup {
    /// Frames are sent from guest RAM.
    direct: bool,
    /// And received into it.
    into_guest: bool,
    packed: bool,
    sends: Sends,
    /// Entries of the TX ring.
    ring: usize,
    /// Chunks to send from.
    chunks: usize,
    each_kick: usize,
}

const WITH_METADATA: Sends = Sends {
    most_pieces: MOST_PIECES,
    checksum: true,
    zero_copy: false,
    by_dma: false,
    refers: false,
};
const BY_REFERENCE: Sends = Sends {
    refers: true,
    ..WITH_METADATA
};
const BY_DMA: Sends = Sends {
    zero_copy: true,
    by_dma: true,
    ..BY_REFERENCE
};
const BY_REFERENCE_SUMMED: Sends = Sends {
    checksum: false,
    ..BY_REFERENCE
};

impl Setup {
    fn new(direct: bool, sends: Sends) -> Self {
        Self {
            direct,
            into_guest: direct,
            packed: false,
            sends,
            ring: 64,
            chunks: 40,
            each_kick: usize::MAX,
        }
    }

    /// With a TX ring of so many entries, of which the kernel takes so many at each kick.
    fn with_ring(self, ring: usize, each_kick: usize) -> Self {
        Self {
            ring,
            each_kick,
            ..self
        }
    }

    /// All that there are to be tested with the same expectations.
    fn all() -> Vec<Self> {
        let copy = [Sends::PLAIN, WITH_METADATA, BY_REFERENCE, BY_REFERENCE_SUMMED]
            .map(|sends| Self::new(false, sends));
        let direct = [Sends::PLAIN, WITH_METADATA, BY_REFERENCE].map(|sends| Self::new(true, sends));
        let send_direct = [WITH_METADATA, BY_DMA].map(|sends| Self {
            into_guest: false,
            ..Self::new(true, sends)
        });
        let split: Vec<_> = copy.into_iter().chain(direct).chain(send_direct).collect();
        let packed = split.iter().map(|&setup| Self {
            packed: true,
            ..setup
        });
        split.iter().copied().chain(packed).collect()
    }
}

/// World of a lane, and where its NIC and memory are once it was stopped (copy placement).
struct World {
    memory: Memory,
    driver: QueueDriver,
    lane: Box<dyn Lane>,
    wire: Arc<Mutex<Wire>>,
    counters: Arc<PairCounters>,
    /// What was sent must be this.
    wanted: Vec<Vec<u8>>,
}

fn guest(memory: &Memory, setup: Setup) -> (QueuePair, QueueDriver) {
    let features = QueueFeatures {
        packed: setup.packed,
        indirect: true,
        ..QueueFeatures::default()
    };
    let vring = || {
        let journal = if setup.direct || !setup.packed {
            Journal::Ring
        } else {
            Journal::None
        };
        let (mut vring, driver) = memory.vring(64, features, journal);
        // Without one the queue is polled.
        let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
        vring.kick = Some(kick.expect("a descriptor"));
        (vring, driver)
    };
    let (from_guest, driver) = vring();
    let (mut to_guest, _) = vring();
    to_guest.enabled = false;
    let offloads = Offloads {
        csum: true,
        tso4: true,
        ..Offloads::NONE
    };
    (memory.side(from_guest, to_guest, offloads), driver)
}

impl World {
    fn new(setup: Setup) -> Self {
        Self::with_tap(setup, None)
    }

    /// Of copy placement, with a tap for packets that leave unsegmented.
    fn with_tap(setup: Setup, send_tap: Option<SendTap>) -> Self {
        let placement = match (setup.direct, setup.into_guest) {
            (false, _) => Placement::Copy,
            (true, false) => Placement::SendDirect,
            (true, true) => Placement::Direct,
        };
        let over = Over {
            to_receive: 0,
            ring: (setup.ring, setup.each_kick),
            sends: setup.sends,
            ..Over::new(placement, setup.chunks)
        };
        let memory = over.memory(4 << 20);
        let (guest, driver) = guest(&memory, setup);
        let counters = Arc::default();
        let (lane, wire) = over.lane_with(guest, &memory, &counters, send_tap);
        Self {
            memory,
            driver,
            lane,
            wire,
            counters,
            wanted: Vec::new(),
        }
    }

    /// With a GSO packet of 20 segments, of which some were sent.
    fn halfway(setup: Setup) -> Self {
        let mut world = Self::new(setup.with_ring(8, 4));
        world.send(20_000, 1000, 1);
        world.poll();
        assert!(world.wire().sent.len() < 20);
        world
    }

    /// The lane is stopped; where its queues stand.
    fn stop_lane(&mut self, setup: Setup) -> Bases {
        let lane = std::mem::replace(&mut self.lane, Self::new(setup).lane);
        lane.stop().pair.expect("a guest").bases
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().expect("no panic")
    }

    /// Sends TCP over IPv4 with so much payload, in segments of `size` bytes, spread over `cuts` descriptors.
    fn send(&mut self, payload_len: usize, size: u16, cuts: usize) {
        let (header, frame) = gso_packet(payload_len, size, self.wanted.len() as u32);
        self.wanted.extend(segments(&frame, &header));
        self.add(&[&header[..], &[0, 0], &frame].concat(), cuts);
    }

    /// Sends a frame that asks for nothing.
    fn send_plain(&mut self, len: usize) {
        let frame: Vec<u8> = (0..len).map(|at| at as u8 ^ self.wanted.len() as u8).collect();
        self.add(&[&[0; 12][..], &frame].concat(), 1);
        self.wanted.push(frame);
    }

    fn add(&mut self, bytes: &[u8], cuts: usize) {
        let addr = self
            .memory
            .ram
            .alloc(bytes.len() as u64, 64)
            .expect("memory is left");
        self.memory.ram.write(addr, bytes);
        let step = bytes.len().div_ceil(cuts);
        let buffers: Vec<_> = (0..bytes.len())
            .step_by(step)
            .map(|at| {
                let addr = addr.checked_add(at as u64).expect("inside");
                Buffer::readable(addr, step.min(bytes.len() - at) as u32)
            })
            .collect();
        self.driver.add(&buffers).expect("room in the ring");
        self.driver.publish();
    }

    fn poll(&mut self) -> usize {
        self.lane.poll(&mut Others::default()).expect("no fault")
    }

    /// Polls until all chains are returned.
    fn finish(&mut self) {
        for _ in 0..1000 {
            self.poll();
            while self.driver.take_used().is_some() {}
            if self.driver.in_flight() == 0 && self.wire().sent.len() >= self.wanted.len() {
                return;
            }
        }
        let (sent, wanted) = (self.wire().sent.len(), self.wanted.len());
        panic!(
            "{} chains never come back, {sent} of {wanted} frames were sent",
            self.driver.in_flight()
        );
    }

    /// What was sent is a beginning of what is wanted, or all of it.
    fn assert_sent(&self, all: bool) {
        let wire = self.wire();
        for (at, (frame, checksum)) in wire.sent.iter().enumerate() {
            let mut frame = frame.clone();
            if let Some(at) = *checksum {
                checksum::complete(&mut frame, at).expect("inside");
            }
            assert!(frame == self.wanted[at], "frame {at} is another");
        }
        assert!(!all || wire.sent.len() == self.wanted.len());
    }
}

/// The ten bytes of a virtio-net header, and a frame.
fn gso_packet(payload_len: usize, size: u16, number: u32) -> ([u8; 10], Vec<u8>) {
    let mut frame = vec![0u8; 54 + payload_len];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&((40 + payload_len) as u16).to_be_bytes());
    (frame[22], frame[23]) = (64, 6);
    frame[38..42].copy_from_slice(&number.to_be_bytes());
    (frame[46], frame[47]) = (0x50, 0x18);
    let partial = checksum::pseudo_v4([0; 4], [0; 4], 6, 20 + payload_len as u32).fold();
    frame[50..52].copy_from_slice(&partial.to_be_bytes());
    for (at, byte) in frame[54..].iter_mut().enumerate() {
        *byte = (at * 31 + (at >> 8)) as u8 ^ number as u8;
    }
    let [low, high] = size.to_le_bytes();
    ([1, 1, 54, 0, low, high, 34, 0, 16, 0], frame)
}

fn segments(frame: &[u8], request: &[u8; 10]) -> Vec<Vec<u8>> {
    let gso = Request::from_header(request)
        .expect("good")
        .gso
        .expect("asked for");
    let plan = Plan::new(frame, frame.len() as u32, gso).expect("good");
    let cut = |index| {
        let payload = plan.payload(index);
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        segment.extend(&frame[payload.start as usize..payload.end as usize]);
        checksum::complete(&mut segment, plan.checksum_at()).expect("inside");
        segment
    };
    (0..plan.segments()).map(cut).collect()
}

#[test]
fn segments_are_sent_in_order_with_any_room() {
    for setup in Setup::all() {
        for (ring, chunks, each_kick) in [(64, 40, 64), (5, 40, 64), (64, 3, 64), (7, 6, 2), (19, 19, 1)] {
            let mut world = World::new(Setup {
                ring,
                chunks,
                each_kick,
                ..setup
            });
            for (payload_len, size, cuts) in
                [(20_000, 1000, 7), (1, 1000, 1), (3000, 100, 20), (2900, 1448, 3)]
            {
                world.send_plain(60);
                world.send(payload_len, size, cuts);
                world.send_plain(100);
            }
            world.finish();
            world.assert_sent(true);
            assert_eq!(world.counters.from_guest_super_frames.get(), 4, "{setup:?}");
            assert_eq!(world.counters.from_guest_frames.get(), world.wanted.len() as u64);
        }
    }
}

#[test]
fn frames_that_ask_for_nothing_and_others_leave_in_their_order() {
    for setup in Setup::all() {
        for (ring, chunks) in [(64, 40), (5, 40), (64, 3)] {
            let mut world = World::new(Setup {
                ring,
                chunks,
                ..setup
            });
            for len in [100, 14, 31, 32, 60, 63, 64, 65] {
                world.send_plain(60);
                world.send_plain(len);
                if setup.sends.must_fill_up(len as u32) {
                    // With nothing of what was in the chunk before.
                    let short = world.wanted.last_mut().expect("just now");
                    short.resize(SHORTEST_BY_DMA as usize, 0);
                }
                // Its checksum is asked for.
                let (mut header, mut frame) = gso_packet(len, 1448, len as u32);
                header[1..6].fill(0);
                world.add(&[&header[..], &[0, 0], &frame].concat(), 1);
                checksum::complete(
                    &mut frame,
                    ChecksumAt {
                        start: 34,
                        offset: 16,
                    },
                )
                .expect("inside");
                world.wanted.push(frame);
            }
            world.finish();
            world.assert_sent(true);
        }
    }
}

#[test]
fn checksums_are_left_to_the_nic_where_it_takes_them_and_completed_by_us_elsewhere() {
    for setup in Setup::all() {
        let mut world = World::new(setup);
        world.send(3000, 1000, 2);
        world.finish();
        let left = world.wire().sent.iter().filter(|sent| sent.1.is_some()).count();
        assert_eq!(left, if setup.sends.checksum { 3 } else { 0 });
        assert_eq!(world.counters.from_guest_checksums_left.get(), left as u64);
        assert_eq!(world.counters.from_guest_checksums.get(), 3 - left as u64);
    }
}

/// A chain is used before anything of it is sent, in copy placement also that of a GSO packet that goes out in
/// portions; in direct placement after everything was sent.
#[test]
fn chains_are_given_back_when_they_cannot_be_sent_twice() {
    for setup in Setup::all() {
        let mut world = World::new(setup.with_ring(8, 4));
        world.send(20_000, 1000, 3);
        world.send_plain(60);
        world.poll();
        assert!(world.wire().sent.len() < 20);
        assert_eq!(world.driver.take_used().is_some(), !setup.direct);
        assert!(world.driver.take_used().is_none(), "the frame behind it waits");
        world.finish();
        world.assert_sent(true);
    }
}

#[test]
fn lane_with_a_gso_packet_in_hand_neither_sleeps_nor_spins() {
    for setup in Setup::all() {
        let mut world = World::new(setup.with_ring(8, 0));
        world.send(20_000, 1000, 3);
        world.send(20_000, 1000, 3);
        for _ in 0..3 {
            world.poll();
            assert!(
                matches!(
                    world.lane.enable_notifications(&mut Others::default()),
                    Work::Later(_)
                ),
                "{setup:?}"
            );
            world.lane.disable_notifications();
        }
        world.wire().each_kick = 64;
        world.finish();
        world.poll();
        assert_eq!(
            world.lane.enable_notifications(&mut Others::default()),
            Work::None
        );
    }
}

/// Room for some segments but not for all: the GSO packet waits, and does not make the worker spin.
#[test]
fn gso_packet_that_waits_for_room_behind_others_does_not_spin() {
    let mut world = World::new(Setup {
        each_kick: 0,
        ..Setup::new(false, WITH_METADATA)
    });
    world.send(30_000, 1000, 3);
    world.send(30_000, 1000, 3);
    world.poll();
    assert_eq!(world.poll(), 0);
    assert!(matches!(
        world.lane.enable_notifications(&mut Others::default()),
        Work::Later(_)
    ));
    world.wire().each_kick = 64;
    world.finish();
    world.assert_sent(true);
}

/// A segment of several descriptors needs more room than there is, and yet the ring is not full.
#[test]
fn gso_packet_in_hand_that_needs_several_descriptors_does_not_spin() {
    let setup = Setup {
        ring: 8,
        each_kick: 0,
        ..Setup::new(false, WITH_METADATA)
    };
    let mut world = World::new(setup);
    world
        .lane
        .change_vrings(&mut |_, vring| vring.guest.frame_limit = 9018);
    for _ in 0..2 {
        world.send(60_000, 5800, 1);
    }
    world.poll();
    assert_eq!(world.poll(), 0);
    assert!(world.wire().ring.len() < 8);
    assert!(matches!(
        world.lane.enable_notifications(&mut Others::default()),
        Work::Later(_)
    ));
    world.wire().each_kick = 64;
    world.finish();
    world.assert_sent(true);
}

/// Payload in more pieces than a frame may have descriptors is gathered.
#[test]
fn payload_in_small_pieces_is_sent() {
    for setup in Setup::all() {
        let mut world = World::new(setup);
        world.send(1460 * 2, 1460, 60);
        world.finish();
        world.assert_sent(true);
    }
}

/// As many frames as a guest's queue holds, again and again; returns how many it sent in `polls` polls.
fn neighbour(setup: Setup, polls: usize) -> usize {
    let mut world = World::new(setup);
    for _ in 0..polls {
        while world.driver.free_descriptors() > 0 {
            world.send_plain(60);
        }
        world.poll();
        while world.driver.take_used().is_some() {}
    }
    world.wire().sent.len()
}

#[test]
fn guest_of_many_segments_sends_no_more_than_its_neighbour() {
    const POLLS: usize = 24;
    for setup in Setup::all() {
        let setup = Setup {
            ring: 4096,
            chunks: 1200,
            ..setup
        };
        let fair = neighbour(setup, POLLS);
        // One that becomes 2,000 frames, and many that become 200 each.
        for (payload, count) in [(2000, 1), (200, 20)] {
            let mut world = World::new(setup);
            for _ in 0..count {
                world.send(payload, 1, 1);
            }
            for polled in 0..POLLS {
                let before = world.wire().sent.len();
                world.poll();
                let sent = world.wire().sent.len() - before;
                assert!(sent <= BATCH + SEGMENTS, "{setup:?}: {sent} in breath {polled}");
            }
            let sent = world.wire().sent.len();
            assert!(
                sent <= fair + SEGMENTS,
                "{setup:?}: {sent}, and its neighbour {fair}"
            );
            assert!(
                sent >= BATCH * (POLLS - 1),
                "{setup:?}: its own turns, but {sent}"
            );
            world.finish();
            world.assert_sent(true);
        }
    }
}

/// To another guest packets pass whole: few of them are as much work as a budget of frames.
#[test]
fn guest_of_long_packets_to_another_has_a_budget_of_bytes() {
    const PACKETS: usize = 40;
    let offloads = Offloads {
        csum: true,
        tso4: true,
        guest_csum: true,
        guest_tso4: true,
        ..Offloads::NONE
    };
    let (header, frame) = gso_packet(60_000, 1448, 1);
    let bytes = HEADER + frame.len() as u32;
    let side = |memory: &Memory| {
        let vring = || memory.vring(64, QueueFeatures::default(), Journal::None);
        let ((from_guest, sending), (to_guest, receiving)) = (vring(), vring());
        let addr = memory.ram.alloc(bytes.into(), 64).expect("memory is left");
        (
            memory.side(from_guest, to_guest, offloads),
            sending,
            receiving,
            addr,
        )
    };
    let (memory, other) = (Memory::new(1 << 20, 0), Memory::new(1 << 20, 0));
    let (guest, mut sending, _, from) = side(&memory);
    let packet = [&header[..], &[0, 0], &frame].concat();
    memory.ram.write(from, &packet);
    let (receiver, _, mut receiving, to) = side(&other);
    // All lie in the same place: what is in them is no matter.
    for _ in 0..PACKETS {
        sending
            .add(&[Buffer::readable(from, bytes)])
            .expect("room in the ring");
        receiving
            .add(&[Buffer::writable(to, bytes)])
            .expect("room in the ring");
    }
    sending.publish();
    receiving.publish();
    let mut sender = PortLane::of_cable(guest, Arc::default());
    let mut receiver = PortLane::of_cable(receiver, Arc::default());
    let mut passed = 0;
    while passed < PACKETS {
        sender.poll(&mut Others::one(&mut receiver)).expect("no fault");
        let now = std::iter::from_fn(|| receiving.take_used()).count();
        assert!(
            (1..=BATCH * 8192 / frame.len() + 1).contains(&now),
            "{now} in one breath"
        );
        passed += now;
    }
}

#[test]
fn gso_packet_of_too_many_segments_is_dropped_and_the_next_one_is_sent() {
    for setup in Setup::all() {
        let mut world = World::new(setup);
        let (header, frame) = gso_packet(MOST_SEGMENTS as usize + 1, 1, 0);
        world.add(&[&header[..], &[0, 0], &frame].concat(), 1);
        world.send(3000, 1000, 1);
        world.finish();
        world.assert_sent(true);
        assert_eq!(world.counters.from_guest_too_many_segments.get(), 1);
    }
}
