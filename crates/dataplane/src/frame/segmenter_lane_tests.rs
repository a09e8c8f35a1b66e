//! Chunks that several descriptors share, through whole lanes: where they are when traffic, session or guest have
//! ended.

use std::collections::BTreeSet;

use super::*;
use crate::tests::test_lanes::copy_lane;
use crate::tests::test_siblings::Others;

/// Setups in which segments refer to one copy of the payload.
fn referring() -> impl Iterator<Item = Setup> {
    Setup::all()
        .into_iter()
        .filter(|setup| !setup.direct && setup.sends.refers)
}

impl World {
    /// Stops the lane. All chunks must be in the pool or with the NIC, each once; how many those with the NIC are.
    #[track_caller]
    fn stop(&mut self, setup: Setup) -> usize {
        self.stop_lane(setup);
        let mut queue = self.wire().given_back.take().expect("it was given back");
        let wire = self.wire.lock().expect("no panic");
        let in_ring = wire.ring.iter().map(|desc| desc.frame.offset());
        let done = wire.done.iter().map(xsk::Frame::offset);
        let with_nic: BTreeSet<_> = in_ring.chain(done).collect();
        let descriptors = wire.ring.len() + wire.done.len();
        drop(wire);
        assert_eq!(
            queue.references.total(),
            descriptors - with_nic.len(),
            "{setup:?}"
        );
        let pool: Vec<_> = std::iter::from_fn(|| queue.pool.take()).collect();
        let mut all: Vec<_> = pool
            .iter()
            .map(xsk::Frame::offset)
            .chain(with_nic.iter().copied())
            .collect();
        queue.pool.extend(pool);
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!((all.len(), count), (setup.chunks, setup.chunks), "{setup:?}");
        self.wire().given_back = Some(queue);
        with_nic.len()
    }

    /// The next guest on the same queue.
    fn next_guest(&mut self, setup: Setup) {
        let queue = self.wire().given_back.take().expect("it was given back");
        let next = World::new(setup);
        (self.memory, self.counters) = (next.memory, next.counters);
        let (guest, driver) = guest(&self.memory, setup);
        self.driver = driver;
        self.lane = Box::new(copy_lane(guest, queue, Arc::clone(&self.counters)));
    }
}

#[test]
fn payload_is_shared_and_the_pool_is_whole_when_all_is_sent() {
    for setup in referring() {
        let setup = Setup {
            each_kick: 0,
            ..setup
        };
        let mut world = World::new(setup);
        world.send(20_000, 1000, 3);
        world.poll();
        let with_nic = world.chunks_in_the_ring();
        let descriptors = world.wire().ring.len();
        // 1984 or 2048 bytes of payload in a chunk, headers of 16 or 32 segments.
        assert_eq!(with_nic, if setup.sends.checksum { 11 + 2 } else { 10 + 1 });
        assert!((40..=50).contains(&descriptors), "{descriptors}");
        assert_eq!(world.counters.from_guest_referred_segments.get(), 20);
        world.wire().each_kick = 64;
        world.finish();
        world.poll();
        world.assert_sent(true);
        assert_eq!(world.stop(setup), 0);
    }
}

impl World {
    fn chunks_in_the_ring(&self) -> usize {
        let wire = self.wire();
        let chunks: BTreeSet<_> = wire.ring.iter().map(|desc| desc.frame.offset()).collect();
        chunks.len()
    }
}

/// What the kernel still has when a session ends is the next guest's, and it takes part in the next guest's traffic.
#[test]
fn no_chunk_is_lost_or_doubled_by_a_session_that_ends_in_the_middle_of_a_frame() {
    for setup in referring() {
        for (ring, each_kick) in [(64, 1), (64, 3), (8, 0), (8, 1), (7, 2), (64, 0)] {
            let setup = Setup {
                ring,
                each_kick,
                ..setup
            };
            let mut world = World::new(setup);
            world.send(20_000, 1000, 3);
            world.send_plain(100);
            world.send(3000, 1448, 1);
            world.poll();
            if each_kick == 0 {
                world.wire().link = LinkState::Down;
            }
            world.stop(setup);
            world.wire().link = LinkState::Up;
            world.wire().each_kick = 5;
            // What the first guest did not get rid of is not wanted any more.
            let rest = world.wire().ring.iter().filter(|desc| !desc.more).count();
            let known = world.wire().sent.len() + rest;
            world.wanted.truncate(known);
            for _ in 0..3 {
                world.next_guest(setup);
                world.send(20_000, 1000, 1);
                world.send(10, 1, 1);
                world.finish();
                while matches!(
                    world.lane.enable_notifications(&mut Others::default()),
                    Work::Later(_)
                ) {
                    world.poll();
                }
                world.assert_sent(true);
                assert_eq!(world.stop(setup), 0);
            }
        }
    }
}

#[test]
fn guest_that_breaks_the_rules_behind_a_gso_packet_takes_no_chunk_with_it() {
    for setup in referring() {
        let mut world = World::new(setup);
        let (header, frame) = gso_packet(20_000, 1000, 0);
        world.add(&[&header[..], &[0, 0], &frame].concat(), 3);
        let addr = world.memory.ram.alloc(64, 64).expect("room");
        world.driver.add(&[Buffer::writable(addr, 64)]).expect("room");
        world.driver.publish();
        assert!(
            world.lane.poll(&mut Others::default()).is_err(),
            "a buffer to write, from the guest"
        );
        assert_eq!(world.stop(setup), 0);
    }
}

/// A segment for every byte: as many descriptors refer to a chunk as ever can.
#[test]
fn segments_of_one_byte_are_sent_by_reference() {
    for setup in referring() {
        let setup = Setup {
            ring: 1024,
            chunks: 600,
            each_kick: 64,
            ..setup
        };
        let mut world = World::new(setup);
        world.send(2000, 1, 2);
        world.finish();
        world.assert_sent(true);
        assert_eq!(world.counters.from_guest_referred_segments.get(), 2000);
        assert_eq!(world.stop(setup), 0);
    }
}

/// A driver that takes two descriptors a frame has no room for payload that lies in two chunks.
#[test]
fn segments_are_built_whole_where_a_frame_may_not_have_enough_pieces() {
    for setup in referring() {
        let setup = Setup {
            sends: Sends {
                most_pieces: 2,
                ..setup.sends
            },
            ..setup
        };
        let mut world = World::new(setup);
        world.send(20_000, 1000, 3);
        world.finish();
        world.assert_sent(true);
        assert_eq!(world.counters.from_guest_referred_segments.get(), 0);
    }
}
