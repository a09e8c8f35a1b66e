//! A network on two workers, with their threads.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::*;
use crate::lane::Lane;
use crate::tests::test_lanes::kicks;
use crate::worker::polling::Waits;
use crate::worker::workers::{LaneAt, Workers};

/// A guest, and what wakes the worker for its queue.
struct Guest {
    port: Port,
    kick: OwnedFd,
}

impl Guest {
    /// The port of that number, given to the workers; where it is.
    fn new(workers: &Workers, number: u8) -> (Self, LaneAt) {
        let mut world = World::default();
        world.add_pair(number.into(), 0, Offloads::NONE);
        let slot = world.lanes.slots.pop().expect("its lane");
        let port = world.ports.pop().expect("just added");
        let kick = kicks(&*slot.lane).swap_remove(0);
        let lane = NewLane {
            lane: slot.lane,
            role: slot.role,
            node: None,
            on_fault: Box::new(|fault| panic!("{fault:?}")),
        };
        let at = workers.add(lane, &"test".into());
        (Self { port, kick }, at)
    }

    fn send(&mut self, frame: &[u8]) {
        if self.port.send(frame) {
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    #[track_caller]
    fn next(&mut self) -> Vec<Vec<u8>> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let got = self.port.take();
            if !got.is_empty() {
                return got;
            }
            assert!(Instant::now() < deadline, "nothing comes");
            std::thread::yield_now();
        }
    }
}

/// The workers do not poll: each frame finds them asleep, or about to be.
#[test]
fn frames_between_workers_that_sleep_are_not_slept_through() {
    let workers = Workers::start(2, &[], Waits::default()).expect("threads");
    let known = (0..2).map(|port| Some(fdb_port(port)));
    workers.set_fdb(&NETWORK.into(), Some(&Arc::new(Fdb::new(known.collect()))));
    // Lanes leave, and others come.
    for rounds in [2000, 100] {
        let (one, at) = Guest::new(&workers, 0);
        let (other, another) = Guest::new(&workers, 1);
        assert_ne!(at.worker, another.worker, "spread by load");
        exchange(one, other, rounds);
        for at in [at, another] {
            workers.remove(at).map(Lane::stop).expect("it is there");
        }
    }
}

/// Frames forth and back, one at a time.
fn exchange(mut one: Guest, mut other: Guest, rounds: usize) {
    one.port.post(32);
    other.port.post(32);
    // What was told is in effect.
    std::thread::sleep(Duration::from_millis(100));
    for number in 0..rounds {
        let forth = frame(mac(1), mac(0), 60 + number % 400);
        one.send(&forth);
        assert_eq!(other.next(), [forth], "{number}");
        let back = frame(mac(0), mac(1), 60 + number % 300);
        other.send(&back);
        assert_eq!(one.next(), [back], "{number}");
        while one.port.from_guest.take_used().is_some() {}
        while other.port.from_guest.take_used().is_some() {}
    }
}
