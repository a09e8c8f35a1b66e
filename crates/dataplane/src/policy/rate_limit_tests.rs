//! Limits of ports of a network, as their lanes keep them. Rates are so low that nothing flows in while a test runs,
//! even where that stands still for a minute.

use std::cmp::Reverse;
use std::sync::Arc;

use super::*;
use crate::lane::Work;
use crate::tests::fairness_tests::{gso_packet, with_offloads};
use crate::tests::network_tests::{BROADCAST, STRANGER, World, frame, mac};
use crate::tests::test_guest::HEADER;
use device::counters::PairCounters;
use device::offloads::Offloads;
use model::rates::Rate;

/// Bytes of the frames here.
const LEN: usize = 1000;

/// So many of them, of which the next one passes in two hours.
fn frames(count: u64) -> Rates {
    Rates {
        bits: Some(Rate {
            per_second: 1,
            burst: count * LEN as u64 * 8,
        }),
        packets: None,
    }
}

fn limit(world: &mut World, port: usize, from_guest: Rates, to_guest: Rates) {
    let limits = PortLimits::new(PortRates { from_guest, to_guest });
    world.lanes.change(port, |lane, _| {
        lane.set_limits(&limits);
    });
    world.rebuild_forwarding();
}

/// What the lane of a port is to do that is about to sleep.
fn enable_notifications(world: &mut World, port: usize) -> Work {
    world.lanes.enable_notifications(port).expect("in the rounds")
}

fn counters(world: &World, port: usize) -> Arc<PairCounters> {
    Arc::clone(&world.ports[port].counters)
}

#[test]
fn guest_that_sends_more_than_it_may_waits_and_goes_on_when_the_limit_is_lifted() {
    let mut world = World::new(&[0, 64]);
    world
        .lanes
        .slots
        .iter_mut()
        .for_each(|slot| slot.lane.disable_notifications());
    limit(&mut world, 0, frames(10), Rates::default());
    for _ in 0..30 {
        world.ports[0].send(&frame(mac(1), mac(0), LEN));
    }
    for _ in 0..3 {
        world.poll();
    }
    assert_eq!(world.ports[1].got().len(), 10);
    let counted = counters(&world, 0);
    assert_eq!(counted.from_guest_frames.get(), 10);
    assert_eq!(counted.from_guest_limit_waits.get(), 1, "it is not tried in vain");
    // It sleeps, for as long as a frame takes; nobody is asked for kicks.
    let Work::Later(Reverse(wait)) = enable_notifications(&mut world, 0) else {
        panic!("it would sleep for good, or not at all");
    };
    assert!((7900..=8000).contains(&wait.as_secs()), "{wait:?}");
    assert!(
        !world.ports[0].send(&frame(mac(1), mac(0), LEN)),
        "its kicks tell nothing"
    );
    limit(&mut world, 0, Rates::default(), Rates::default());
    world.poll();
    world.poll();
    assert_eq!(world.ports[1].got().len(), 21);
    assert_eq!(enable_notifications(&mut world, 0), Work::None);
}

#[test]
fn frame_that_has_to_wait_for_another_reason_is_not_counted_twice() {
    let mut world = World::new(&[0, 1]);
    limit(&mut world, 0, frames(3), Rates::default());
    for _ in 0..5 {
        world.ports[0].send(&frame(mac(1), mac(0), LEN));
    }
    let mut got = 0;
    for _ in 0..4 {
        // A buffer at a time: all of the guest's frames but one are put back.
        world.poll();
        got += world.ports[1].got().len();
        world.ports[1].post(1);
    }
    assert_eq!(got, 3);
    assert_eq!(counters(&world, 1).to_guest_no_buffer.get(), 0);
}

#[test]
fn runs_that_pass_without_a_look_at_each_frame_cost_as_much() {
    for (from_guest, to_guest) in [(frames(200), Rates::default()), (Rates::default(), frames(200))] {
        let mut world = World::new(&[0, 60]);
        limit(&mut world, 0, from_guest, Rates::default());
        limit(&mut world, 1, Rates::default(), to_guest);
        let mut got = 0;
        for _ in 0..4 {
            for _ in 0..60 {
                world.ports[0].send(&frame(mac(1), mac(0), LEN));
            }
            world.poll();
            got += world.ports[1].got().len();
            world.ports[1].post(60);
        }
        assert_eq!(got, 200);
    }
}

#[test]
fn frames_beyond_a_guests_limit_are_dropped_from_any_sender() {
    let mut world = World::new(&[0, 64, 64]).with_uplink(256);
    limit(&mut world, 1, Rates::default(), frames(9));
    world.poll();
    for at in 0..8 {
        let group = if at % 2 == 0 { BROADCAST } else { mac(1) };
        world.ports[0].send(&frame(group, mac(0), LEN));
        world.arrive(&frame(group, STRANGER, LEN));
        world.poll();
    }
    assert_eq!(world.ports[1].got().len(), 9);
    assert_eq!(counters(&world, 1).to_guest_limit.get(), 7);
    // Others lose nothing by it.
    assert_eq!(world.ports[2].got().len(), 8);
    assert_eq!(counters(&world, 0).from_guest_limit_waits.get(), 0);
    assert_eq!(world.given(), 128, "all chunks are with the NIC again");
}

#[test]
fn limit_of_what_a_guest_gets_is_changed_for_frames_of_the_uplink_too() {
    let mut world = World::new(&[64]).with_uplink(64);
    world.poll();
    let mut counts = Vec::new();
    for most in [Some(2), Some(1), None] {
        limit(
            &mut world,
            0,
            Rates::default(),
            most.map_or_else(Rates::default, frames),
        );
        for _ in 0..5 {
            world.arrive(&frame(mac(0), STRANGER, LEN));
        }
        world.poll();
        counts.push(world.ports[0].got().len());
    }
    assert_eq!(counts, [2, 1, 5]);
    assert_eq!(counters(&world, 0).to_guest_limit.get(), 3 + 4);
}

#[test]
fn pairs_of_a_port_share_its_limits() {
    let limits = PortLimits::new(PortRates {
        from_guest: frames(3),
        to_guest: frames(3),
    });
    let shared = limits.clone();
    let cost = Cost::frame(LEN as u32);
    let take = |limits: &PortLimits| {
        let limit = limits.from_guest.as_ref().expect("one");
        limit.take(cost, Ticks::now()).is_ok()
    };
    let taken: Vec<_> = (0..5)
        .map(|at| take(if at % 2 == 0 { &limits } else { &shared }))
        .collect();
    assert_eq!(taken, [true, true, true, false, false]);
}

#[test]
fn throttled_guest_waits_for_a_millisecond_or_half_a_burst() {
    for (burst, wait_us) in [(1000, 1000), (3, 1000), (1, 500)] {
        let rate = Some(Rate {
            per_second: 1000,
            burst,
        });
        for (bits, packets) in [(rate, None), (None, rate)] {
            let limit = RateLimit::new(Rates { bits, packets }).expect("one");
            assert_eq!(limit.least_wait().duration(), Duration::from_micros(wait_us));
        }
    }
}

#[test]
fn packet_over_the_limit_of_packets_takes_nothing_of_that_of_bits() {
    let limit = RateLimit::new(Rates {
        bits: frames(5).bits,
        packets: Some(Rate {
            per_second: 1,
            burst: 3600,
        }),
    });
    let limit = limit.expect("two");
    let now = Ticks::now();
    let many = Cost {
        frames: 3600,
        bytes: 0,
    };
    assert_eq!(limit.take(many, now), Ok(()));
    for _ in 0..5 {
        assert!(limit.take(Cost::frame(LEN as u32), now).is_err());
    }
    limit.give_back(many);
    let taken = (0..7).filter(|_| limit.take(Cost::frame(LEN as u32), now).is_ok());
    assert_eq!(taken.count(), 5);
}

/// The headers may be others when the packet is cut.
#[test]
fn gso_packet_costs_its_segments_even_if_its_headers_are_wrong() {
    let mut world = World::new(&[0, 64]);
    with_offloads(&mut world, 0, Offloads::all());
    let packets = Some(Rate {
        per_second: 1,
        burst: 3600,
    });
    let rates = Rates { bits: None, packets };
    limit(&mut world, 0, rates, Rates::default());
    let (asked, mut packet) = gso_packet(mac(1), mac(0), 3600, 1);
    // An IP version that there is not.
    packet[14] = 0;
    let mut header = [0; HEADER as usize];
    header[..asked.len()].copy_from_slice(&asked);
    world.ports[0].send_with(header, &packet);
    world.ports[0].send(&frame(mac(1), mac(0), LEN));
    world.poll();
    assert_eq!(counters(&world, 0).from_guest_limit_waits.get(), 1);
    assert!(world.ports[1].got().is_empty());
}

#[test]
fn policer_returns_what_it_took() {
    let limit = RateLimit::new(frames(3)).expect("one");
    let mut policer = Policer::new(Some(&limit));
    let counters = PairCounters::default();
    let allows = |policer: &mut Policer<'_>, len| policer.allows(|| Cost::frame(len), &counters);
    let len = LEN as u32;
    assert!(allows(&mut policer, 2 * len));
    policer.give_back();
    assert!(allows(&mut policer, 3 * len) && !allows(&mut policer, len));
    // Further pieces of a frame are charged, too.
    let limit = RateLimit::new(frames(3)).expect("one");
    let mut policer = Policer::new(Some(&limit));
    policer.charge(Cost::bytes(2 * len));
    assert!(allows(&mut policer, len) && !allows(&mut policer, 1));
}

/// A frame of 1,006 bytes takes 515.07 units of time here, rounded up once for a run.
#[test]
fn frames_of_a_run_that_are_not_sent_return_as_much_as_they_took() {
    let bits = Some(Rate {
        per_second: 1_000_000_000_000,
        burst: 1 << 20,
    });
    let now = Ticks::now();
    let wait_after = |sent: u64, returned: usize| {
        let limit = RateLimit::new(Rates { bits, packets: None }).expect("one");
        let mut throttle = Throttle::default();
        throttle.set(Some(&limit));
        throttle.now = Some(now);
        throttle.charge(Cost::of(sent, sent * 1006));
        throttle.give_back(&vec![Cost::frame(1006); returned]);
        let burst = Cost::of(0, (1 << 20) / 8);
        limit
            .take(burst, now)
            .expect_err("not all of it is left")
            .duration()
    };
    assert_eq!(wait_after(60, 59), wait_after(1, 0));
}

/// A limit is for what a guest sends, whatever becomes of it, as those of `tc` (`police`) and Open vSwitch are.
#[test]
fn frames_that_are_lost_because_the_link_is_down_count() {
    let mut world = World::new(&[0]);
    let wire = world.add_sending_uplink();
    wire.kernel.ask_for_kicks();
    // Kicks fail from now on.
    drop(wire);
    limit(&mut world, 0, frames(3), Rates::default());
    for _ in 0..5 {
        world.ports[0].send(&frame(STRANGER, mac(0), LEN));
        world.poll();
    }
    let counted = counters(&world, 0);
    assert_eq!(counted.from_guest_interface_down.get(), 2, "all but the first");
    assert_eq!(counted.from_guest_limit_waits.get(), 1);
}
