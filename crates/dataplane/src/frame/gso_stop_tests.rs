//! A GSO packet in hand when its lane is stopped, or when the interface goes or comes up again: the rest is sent where
//! it can be, and counted once where it cannot.

use super::*;
use crate::tests::test_lanes::switch;
use crate::tests::test_siblings::Others;
use device::pair::Direction;

#[test]
fn stopped_lane_sends_the_rest_and_its_base_is_behind_it() {
    for setup in Setup::all() {
        let mut world = World::new(setup.with_ring(8, 4));
        world.send(20_000, 1000, 1);
        world.send_plain(60);
        world.poll();
        let bases = world.stop_lane(setup);
        assert_eq!(bases.from_guest & 0x7fff, 1, "{setup:?}");
        assert_eq!(
            world.wire().sent.len(),
            20,
            "all of it, and not the one behind it"
        );
        assert_eq!(world.counters.from_guest_rest_of_super_frame.get(), 0);
        world.assert_sent(false);
        assert!(world.driver.take_used().is_some() && world.driver.take_used().is_none());
    }
}

#[test]
fn what_cannot_be_sent_when_the_lane_is_stopped_is_counted_once() {
    for setup in Setup::all() {
        for link in [LinkState::Up, LinkState::Down, LinkState::Gone] {
            let mut world = World::new(setup.with_ring(8, 0));
            world.send(20_000, 1000, 1);
            world.poll();
            world.wire().link = link;
            let bases = world.stop_lane(setup);
            assert_eq!(bases.from_guest & 0x7fff, 1, "{setup:?}");
            assert!(world.driver.take_used().is_some());
            assert_eq!(world.counters.from_guest_rest_of_super_frame.get(), 1);
        }
    }
}

#[test]
fn interface_that_is_gone_takes_the_rest_with_it() {
    for setup in Setup::all() {
        let mut world = World::halfway(setup);
        world.wire().link = LinkState::Gone;
        for _ in 0..10 {
            world.poll();
        }
        assert_eq!(
            world.counters.from_guest_rest_of_super_frame.get(),
            1,
            "{setup:?}"
        );
        assert!(world.driver.take_used().is_some());
        assert_eq!(
            world.lane.enable_notifications(&mut Others::default()),
            Work::None
        );
        world.assert_sent(false);
    }
}

#[test]
fn interface_that_comes_up_again_sends_the_rest() {
    for setup in Setup::all() {
        let mut world = World::halfway(setup);
        world.wire().link = LinkState::Down;
        for _ in 0..10 {
            world.poll();
        }
        assert!(world.wire().sent.len() < 20);
        world.wire().link = LinkState::Up;
        world.finish();
        world.assert_sent(true);
    }
}

/// The rest is ours: neither a queue that is switched off nor other memory stops it.
#[test]
fn rest_goes_out_of_a_queue_that_is_switched_off() {
    for setup in Setup::all() {
        let mut world = World::new(setup.with_ring(8, 4));
        world.send(20_000, 1000, 1);
        world.send_plain(60);
        world.poll();
        switch(&mut *world.lane, Direction::FromGuest, false);
        for _ in 0..20 {
            world.poll();
        }
        assert_eq!(world.wire().sent.len(), 20, "{setup:?}");
        switch(&mut *world.lane, Direction::FromGuest, true);
        world.finish();
        world.assert_sent(true);
    }
}

/// As when the guest's memory changes: the next lane is made over other memory, with the same queue.
#[test]
fn packet_in_hand_goes_out_before_its_lane_is_stopped() {
    let setup = Setup::new(false, Sends::PLAIN);
    let mut world = World::halfway(setup);
    world.stop_lane(setup);
    world.assert_sent(true);
}
