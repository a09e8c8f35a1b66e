//! An uplink whose last queue is set up anew. That frames leave by it then is tested with real queues (testkit,
//! `network_mtu.rs`).

use std::time::{Duration, Instant};

use super::*;

const LONG: Duration = Duration::from_secs(3600);

/// Three ports, and an uplink without a queue.
fn world(back_in: Option<Duration>) -> World {
    let mut world = World::new(&[16, 16, 16]);
    world.renew(back_in);
    world
}

impl World {
    /// The uplink has a queue again in so long.
    fn renew(&mut self, back_in: Option<Duration>) {
        self.renew_with(back_in, None);
    }

    /// The same, while a port listens to what is for others.
    fn renew_with(&mut self, back_in: Option<Duration>, listens: Option<u8>) {
        let ports = (0..3).map(|at| fdb_port_with(at, |port| port.options.promiscuous = listens == Some(at)));
        let until = back_in.map(|wait| Instant::now() + wait);
        let fdb = Fdb::new(ports.map(Some).collect()).with_uplink_until(until);
        self.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
        self.rebuild_forwarding();
    }

    fn poll_thrice(&mut self) {
        (0..3).for_each(|_| self.poll());
    }
}

#[test]
fn frames_wait_for_it_and_those_behind_them() {
    for to in [STRANGER, BROADCAST] {
        let mut world = world(Some(LONG));
        let siblings = |from, len| frame(mac(1), mac(from), len);
        world.ports[0].send(&siblings(0, 60));
        world.ports[0].send(&frame(to, mac(0), 61));
        world.ports[0].send(&siblings(0, 62));
        world.ports[2].send(&siblings(2, 63));
        world.poll_thrice();
        assert_eq!(world.ports[1].got(), [siblings(0, 60), siblings(2, 63)]);
        assert_eq!(world.ports[0].counters.from_guest_frames.get(), 1);
        // It does not come back.
        world.renew(Some(Duration::ZERO));
        world.poll_thrice();
        assert_eq!(world.ports[1].got().last(), Some(&siblings(0, 62)));
        let counters = &world.ports[0].counters;
        assert_eq!(counters.from_guest_no_station.get(), u64::from(to == STRANGER));
    }
}

#[test]
fn promiscuous_port_gets_waiting_frames_once() {
    let mut world = world(Some(LONG));
    world.renew_with(Some(LONG), Some(2));
    let frames = [mac(1), STRANGER, BROADCAST].map(|to| frame(to, mac(0), 60));
    frames.iter().for_each(|frame| _ = world.ports[0].send(frame));
    (0..10).for_each(|_| world.poll());
    assert_eq!(world.ports[2].got(), frames[..1]);
    world.renew_with(None, Some(2));
    world.poll_thrice();
    assert_eq!(world.ports[2].got(), frames[1..]);
}

#[test]
fn frames_are_lost_when_it_does_not_come_back() {
    for back_in in [None, Some(Duration::ZERO)] {
        let mut world = world(back_in);
        world.ports[0].send(&frame(STRANGER, mac(0), 60));
        world.ports[0].send(&frame(BROADCAST, mac(0), 60));
        world.ports[0].send(&frame(mac(1), mac(0), 60));
        world.poll();
        assert_eq!(
            world.ports[1].got(),
            [frame(BROADCAST, mac(0), 60), frame(mac(1), mac(0), 60)]
        );
        let counters = &world.ports[0].counters;
        assert_eq!(counters.from_guest_no_station.get(), 1);
        assert_eq!(counters.from_guest_waits.get(), 0);
    }
}
