//! A driver that names buffers which it does not have, in what it received and in what it sent: through whole lanes of
//! each placement, over a NIC that the test plays.
//!
//! After each poll no two of the buffers with the NIC are the same. The guest gets each frame that arrived in a buffer
//! that the NIC had, in order, and nothing else. And the fate of frames that the NIC has when a lane stops.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use virtqueue::driver::{Buffer, QueueDriver, Used};
use virtqueue::{Journal, QueueFeatures};
use xsk::{Frame, UmemOffset};

use crate::lane::Lane;
use crate::tests::test_guest::HEADER;
use crate::tests::test_nic::{Over, Wire, frame_at};
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;
use model::config::Placement;

const BUFFERS: usize = 16;
/// Chunks of ours.
const CHUNKS: usize = 40;
const ROUNDS: usize = 300;
const ALL: [Placement; 3] = [Placement::Copy, Placement::SendDirect, Placement::Direct];

/// Numbers without a pattern (xorshift).
struct Noise(u64);

impl Noise {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

struct World {
    lane: Box<dyn Lane>,
    wire: Arc<Mutex<Wire>>,
    to_guest: QueueDriver,
    from_guest: QueueDriver,
    /// Of the heads of the receive queue.
    buffers: HashMap<u16, Buffer>,
    /// What the guest sends, in two pieces: gathered in a chunk of ours, in each placement.
    frame: [Buffer; 2],
    counters: Arc<PairCounters>,
}

impl World {
    fn new(placement: Placement, offloads: Offloads) -> Self {
        // Nothing is sent before the test says so.
        let over = Over {
            to_receive: if placement == Placement::Direct {
                0
            } else {
                BUFFERS
            },
            ring: (16, 0),
            fill: 32,
            ..Over::new(placement, CHUNKS)
        };
        let memory = over.memory(1 << 20);
        let vring = || memory.vring(64, QueueFeatures::default(), Journal::None);
        let ((to_guest, receiving), (from_guest, sending)) = (vring(), vring());
        let guest = memory.side(from_guest, to_guest, offloads);
        let space = |bytes| memory.ram.alloc(bytes, 4096).expect("memory is left");
        let frame = [
            Buffer::readable(space(100), 100),
            Buffer::readable(space(100), 100),
        ];
        let buffers: Vec<_> = (0..BUFFERS)
            .map(|_| Buffer::writable(space(4096), 2048))
            .collect();
        let counters = Arc::default();
        let (lane, wire) = over.lane(guest, &memory, &counters);
        let mut world = Self {
            lane,
            wire,
            to_guest: receiving,
            from_guest: sending,
            buffers: HashMap::new(),
            frame,
            counters,
        };
        buffers.into_iter().for_each(|buffer| world.post(buffer));
        world.poll();
        world
    }

    fn post(&mut self, buffer: Buffer) {
        let head = self.to_guest.add(&[buffer]).expect("room in the ring");
        self.buffers.insert(head, buffer);
        self.to_guest.publish();
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().expect("no panic")
    }

    fn poll(&mut self) {
        for _ in 0..3 {
            self.lane.poll(&mut Others::default()).expect("no fault");
        }
        let all = self.with_nic();
        let mut once = all.clone();
        once.dedup();
        assert_eq!(all, once, "the NIC has a buffer twice");
    }

    /// Where the buffers begin that the NIC has.
    fn with_nic(&self) -> Vec<u64> {
        let wire = self.wire();
        let sending = wire.ring.iter().map(|desc| desc.frame.offset());
        let all = wire.given.iter().map(Frame::offset).chain(sending);
        let mut all: Vec<_> = all.map(UmemOffset::get).collect();
        all.sort_unstable();
        all
    }

    /// A place that the NIC does not have: ours, another buffer's middle, or behind all memory.
    fn elsewhere(&self, noise: &mut Noise) -> UmemOffset {
        let all = self.with_nic();
        loop {
            let chunk = u64::from(self.wire().umem.chunk_size());
            let place = noise.below(1 << 21) / chunk * chunk + [0, chunk / 2][noise.below(2) as usize];
            if !all.contains(&place) {
                return UmemOffset::new(place);
            }
        }
    }

    /// Bytes of the frames that the guest got, whose buffers it gives back.
    fn delivered(&mut self) -> Vec<u32> {
        let used: Vec<_> = std::iter::from_fn(|| self.to_guest.take_used()).collect();
        // Heads are free once they are taken: all are looked up before one is used again.
        let buffer = |used: &Used| self.buffers.remove(&used.head).expect("used once");
        let buffers: Vec<_> = used.iter().map(buffer).collect();
        buffers.into_iter().for_each(|buffer| self.post(buffer));
        used.iter().map(|used| used.len - HEADER).collect()
    }

    /// Frames of the guest that it got back; as many are sent anew.
    fn send(&mut self, most: usize) -> usize {
        let back = std::iter::from_fn(|| self.from_guest.take_used()).count();
        for _ in 0..most {
            self.from_guest.add(&self.frame);
        }
        self.from_guest.publish();
        back
    }
}

/// Of each placement, with frames that are looked at and such that are not.
fn worlds() -> impl Iterator<Item = (String, World)> {
    let looked_at = Offloads {
        guest_csum: true,
        ..Offloads::NONE
    };
    ALL.into_iter().flat_map(move |placement| {
        [Offloads::NONE, looked_at].map(|offloads| {
            let name = format!("{placement:?}, {offloads:?}");
            (name, World::new(placement, offloads))
        })
    })
}

#[test]
fn buffers_that_a_nic_does_not_have_are_counted_and_nothing_else() {
    for (name, mut world) in worlds() {
        let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
        let (mut real, mut unexpected) = (0, 0);
        for round in 0..ROUNDS {
            let mut sent = Vec::new();
            for _ in 0..noise.below(5) {
                let elsewhere = world.elsewhere(&mut noise);
                let mut wire = world.wire();
                let again = wire.given[0].offset();
                let len = 60 + noise.below(1000) as u32;
                wire.receive(len, false);
                sent.push(len);
                // Twice, elsewhere, both, or as it should be.
                for offset in [again, elsewhere].into_iter().take(noise.below(3) as usize) {
                    wire.receive_into(frame_at(offset), 99, false);
                    unexpected += 1;
                }
            }
            world.poll();
            real += sent.len() as u64;
            assert_eq!(world.delivered(), sent, "{name}, round {round}");
            assert_eq!(world.counters.to_guest_stray.get(), unexpected, "{name}");
            world.poll();
        }
        assert_eq!(world.counters.to_guest_frames.get(), real, "{name}");
        assert!(unexpected > 100 && real > 100);
        assert_eq!(world.wire().given.len(), BUFFERS, "{name}: none is lost");
    }
}

#[test]
fn buffers_that_were_sent_twice_or_never_are_counted_and_nothing_else() {
    for (name, mut world) in worlds() {
        let mut noise = Noise(0x1234_5678_9abc_def1);
        let (mut real, mut unexpected) = (0, 0);
        for _ in 0..ROUNDS {
            let back = world.send(4);
            assert!(back <= 16, "{name}");
            world.poll();
            for _ in 0..noise.below(5) {
                let elsewhere = world.elsewhere(&mut noise);
                let mut wire = world.wire();
                let Some(desc) = wire.ring.pop_front() else { break };
                let again = desc.frame.offset();
                wire.done.push_back(desc.frame);
                real += 1;
                for offset in [again, elsewhere].into_iter().take(noise.below(3) as usize) {
                    wire.done.push_back(frame_at(offset));
                    unexpected += 1;
                }
            }
            world.poll();
            assert_eq!(world.counters.from_guest_strays.get(), unexpected, "{name}");
        }
        let out = world.wire().ring.len() as u64;
        assert_eq!(world.counters.from_guest_frames.get(), real + out, "{name}");
        assert!(unexpected > 100 && real > 100, "{name}: {unexpected}, {real}");
    }
}

/// Where frames are copied they may have several pieces.
#[test]
fn only_the_frame_with_an_unexpected_piece_is_lost() {
    for (name, mut world) in worlds().take(4) {
        let ours = world.elsewhere(&mut Noise(7));
        let lose_one = |world: &World, more| world.wire().receive_into(frame_at(ours), 70, more);
        let piece = |world: &World, len, more| world.wire().receive(len, more);
        // In its middle, at its beginning, at its end.
        piece(&world, 1000, true);
        lose_one(&world, true);
        piece(&world, 400, false);
        lose_one(&world, true);
        piece(&world, 401, false);
        piece(&world, 1000, true);
        lose_one(&world, false);
        // Whole ones.
        piece(&world, 61, false);
        piece(&world, 1000, true);
        piece(&world, 300, false);
        world.poll();
        assert_eq!(world.delivered(), [61, 1300], "{name}");
        assert_eq!(world.counters.to_guest_stray.get(), 3, "{name}");
        assert_eq!(world.counters.to_guest_in_pieces.get(), 3, "{name}");
        assert_eq!(world.wire().given.len(), BUFFERS, "{name}: none is lost");
    }
}

/// A queue of copy placement outlives the lane, and sends them later.
#[test]
fn frames_that_are_with_the_nic_when_a_lane_stops_are_counted_where_they_are_given_up() {
    for (name, mut world) in worlds() {
        world.send(3);
        world.poll();
        assert_eq!(world.wire().ring.len(), 3, "{name}");
        let World {
            lane, counters, wire, ..
        } = world;
        let lost = if name.starts_with("Copy") { 0 } else { 3 };
        lane.stop();
        assert_eq!(counters.from_guest_queue_stopped.get(), lost, "{name}");
        assert_eq!(
            wire.lock().expect("no panic").given_back.is_some(),
            lost == 0,
            "{name}"
        );
    }
}
