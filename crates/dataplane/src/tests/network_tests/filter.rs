//! Filter rules of ports, as their lanes go by them.

use std::net::Ipv4Addr;
use std::ops::Range;

use super::hairpin::hairpin;
use super::multicast::Copies;
use super::*;
use crate::policy::capture::{Capture, Seen, Wanted};
use crate::policy::filter::{Filter, PortFilter, Rule, Rules};
use crate::uplink::multicast_lane::MulticastLane;

/// A port has these rules from now on, a line each.
pub(super) fn filter(world: &mut World, port: usize, rules: &str) -> PortFilter {
    filter_all(world, port..port + 1, rules)
}

/// The same of several, which have them in common.
pub(super) fn filter_all(world: &mut World, ports: Range<usize>, rules: &str) -> PortFilter {
    let rules = rules
        .lines()
        .map(|words| words.trim().parse::<Rule>().expect(words));
    let filter = PortFilter::new(&Filter {
        rule: rules.collect(),
        ..Filter::default()
    });
    ports.for_each(|port| set(world, port, &filter));
    world.rebuild_forwarding();
    filter
}

fn set(world: &mut World, port: usize, filter: &PortFilter) {
    let lane_filter = filter.for_a_lane(0);
    world.lanes.change(port, |lane, _| {
        drop(lane.set_filter(lane_filter));
    });
}

/// As many as there can be, of which the last one allows UDP: an unknown flow is work for twelve frames.
fn many(direction: &str) -> String {
    let rule = |at: usize| {
        format!(
            "direction={direction} action=deny protocol=tcp destination-ports={}",
            at + 1
        )
    };
    let all: Vec<String> = (0..9_999).map(rule).collect();
    all.join("\n") + &format!("\ndirection={direction} action=allow protocol=udp")
}

pub(super) fn udp(to: Mac, from: Mac, source: u32, port: u16) -> Vec<u8> {
    let mut frame = frame(to, from, 60);
    frame[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17]);
    frame[26..30].copy_from_slice(&Ipv4Addr::from_bits(source).octets());
    frame[34..36].copy_from_slice(&[4, 0]);
    frame[36..38].copy_from_slice(&port.to_be_bytes());
    frame
}

fn counts(rules: Option<&Rules>) -> Vec<u64> {
    rules
        .expect("some")
        .counts()
        .into_iter()
        .map(|(_, count)| count)
        .collect()
}

#[test]
fn frame_that_waits_for_a_buffer_is_counted_and_captured_once_by_both_ports_rules() {
    let mut world = World::new(&[0, 1]);
    let rules = "direction=from-guest action=deny protocol=udp destination-ports=7
                 direction=from-guest action=allow protocol=udp
                 direction=to-guest action=deny protocol=udp destination-ports=9
                 direction=to-guest action=allow protocol=udp";
    let capture = Arc::new(Capture::new(Wanted {
        from_guest: true,
        to_guest: true,
    }));
    let [sender, receiver] = [0, 1].map(|port| {
        let mut filter = filter(&mut world, port, rules);
        filter.capture = Some(Arc::clone(&capture));
        set(&mut world, port, &filter);
        filter
    });
    for port in [1, 7, 2, 9, 3, 7, 4, 9] {
        world.ports[0].send(&udp(mac(1), mac(0), 1, port));
    }
    // The rules allow it, its source address does not.
    world.ports[0].send(&udp(mac(1), STRANGER, 1, 5));
    let mut got = Vec::new();
    for _ in 0..12 {
        // A buffer at a time: all of the guest's frames but one are put back.
        world.poll();
        got.extend(world.ports[1].got());
        world.ports[1].post(1);
    }
    let wanted = [1, 2, 3, 4].map(|port| udp(mac(1), mac(0), 1, port));
    assert_eq!(got, wanted);
    assert_eq!(counts(sender.from_guest.as_deref()), [2, 6]);
    assert_eq!(counts(receiver.to_guest.as_deref()), [2, 4]);
    assert_eq!(world.ports[0].counters.from_guest_filter.get(), 2);
    assert_eq!(world.ports[1].counters.to_guest_filter.get(), 2);
    let records: Vec<_> = std::iter::from_fn(|| capture.take()).collect();
    let seen = |to_guest| {
        let its = records.iter().filter(|record| record.to_guest == to_guest);
        its.map(|record| (record.bytes()[37], record.about.seen))
            .collect::<Vec<_>>()
    };
    let denied = |rule| Seen::Denied(Some(rule));
    let frames = [
        (1, Seen::Passed),
        (7, denied(0)),
        (2, Seen::Passed),
        (9, Seen::Passed),
        (3, Seen::Passed),
    ];
    assert_eq!(
        seen(false),
        [
            &frames[..],
            &[
                (7, denied(0)),
                (4, Seen::Passed),
                (9, Seen::Passed),
                (5, Seen::Refused)
            ]
        ]
        .concat()
    );
    assert_eq!(
        seen(true),
        [
            (1, Seen::Passed),
            (2, Seen::Passed),
            (9, denied(2)),
            (3, Seen::Passed),
            (4, Seen::Passed),
            (9, denied(2))
        ]
    );
}

#[test]
fn guest_that_sends_new_flows_all_the_time_sends_fewer_frames_and_its_neighbour_as_many() {
    let mut world = World::new(&[0, 0, 200]);
    let rules = many("from-guest");
    let filters = [0, 1].map(|port| filter(&mut world, port, &rules));
    let (mut flow, mut room) = (0, [128; 2]);
    let sent = |filters: &[PortFilter; 2]| {
        filters
            .each_ref()
            .map(|filter| counts(filter.from_guest.as_deref())[9_999])
    };
    let mut before = [0; 2];
    for round in 0..50 {
        for _ in 0..room[0] {
            flow += 1;
            world.ports[0].send(&udp(mac(2), mac(0), flow, 53));
        }
        for _ in 0..room[1] {
            world.ports[1].send(&udp(mac(2), mac(1), 1, 53));
        }
        world.poll();
        world.ports[2].take();
        room = [0, 1].map(|port| {
            let driver = &mut world.ports[port].from_guest;
            std::iter::from_fn(|| driver.take_used()).count()
        });
        let after = sent(&filters);
        // Once the neighbour's flow is known.
        if round > 2 {
            assert_eq!(after[1] - before[1], 64, "a whole turn");
            assert!(after[0] - before[0] <= 2, "{} of 64", after[0] - before[0]);
        }
        before = after;
    }
    assert!(before[0] >= 50, "it is not starved: {before:?}");
}

#[test]
fn uplink_that_brings_new_flows_all_the_time_has_shorter_batches() {
    let mut world = World::new(&[200]).with_uplink(1024);
    let port_filter = filter(&mut world, 0, &many("to-guest"));
    world.poll();
    for flow in 0..320 {
        world.arrive(&udp(mac(0), STRANGER, flow, 53));
    }
    let (mut rounds, mut got) = (0, 0);
    while counts(port_filter.to_guest.as_deref())[9_999] < 320 {
        world.poll();
        got += world.ports[0].take().len();
        rounds += 1;
        assert!(rounds < 100, "all are delivered");
    }
    assert!(rounds > 20, "{rounds} rounds for what were 5 batches");
    assert_eq!(got, 320);
}

#[test]
fn decision_does_not_outlive_the_table_that_it_was_made_by() {
    let mut world = World::new(&[0, 8, 8]);
    filter(&mut world, 0, "direction=from-guest action=allow protocol=udp");
    for _ in 0..3 {
        world.ports[0].send(&udp(mac(1), mac(0), 1, 53));
    }
    world.poll();
    assert_eq!(world.ports[1].got().len(), 3);
    assert_eq!(world.ports[0].counters.filter_misses.get(), 1);
    // Other lanes come and go, and the table stays.
    world.rebuild_forwarding();
    world.ports[0].send(&udp(mac(1), mac(0), 1, 53));
    world.poll();
    assert_eq!(world.ports[1].got().len(), 1);
    assert_eq!(world.ports[0].counters.filter_misses.get(), 1);
    let fdb = Arc::clone(&world.lanes.fdbs[NETWORK]);
    let known = (0..3).map(|number| fdb.port(PortNumber(number)).cloned());
    world
        .lanes
        .fdbs
        .insert(NETWORK.into(), Arc::new(Fdb::new(known.collect())));
    world.rebuild_forwarding();
    world.ports[0].send(&udp(mac(1), mac(0), 1, 53));
    world.ports[0].send(&udp(mac(2), mac(0), 1, 53));
    world.poll();
    assert_eq!((world.ports[1].got().len(), world.ports[2].got().len()), (1, 1));
    assert_eq!(world.ports[0].counters.filter_misses.get(), 3);
}

/// What a network does while 64 new flows to groups come to its first eight ports, which are filtered: the ninth sends
/// to the tenth all the time.
fn assert_multicast_delays_no_port(mut world: World) {
    const FRAMES: u64 = 64;
    let looked_up = |world: &World| -> u64 {
        world.ports[..8]
            .iter()
            .map(|port| port.counters.filter_misses.get())
            .sum()
    };
    let (mut room, mut rounds, mut got) = (64, 0, 0);
    while looked_up(&world) < 8 * FRAMES {
        let before = looked_up(&world);
        for _ in 0..room {
            world.ports[8].send(&frame(mac(9), mac(8), 60));
        }
        world.poll();
        // A frame is eight look-ups, of twelve each. One that was begun is done.
        let in_a_round = looked_up(&world) - before;
        assert!(in_a_round <= 8, "{in_a_round} look-ups in a round");
        let to_it = world.ports[9]
            .take()
            .into_iter()
            .filter(|frame| frame.starts_with(&mac(9)));
        assert_eq!(to_it.count(), 64, "a whole turn");
        room = std::iter::from_fn(|| world.ports[8].from_guest.take_used()).count();
        got += world.ports[..8]
            .iter_mut()
            .map(|port| port.take().len())
            .sum::<usize>();
        rounds += 1;
        assert!(rounds < 200, "all are looked up");
    }
    world.poll();
    got += world.ports[..8]
        .iter_mut()
        .map(|port| port.take().len())
        .sum::<usize>();
    assert_eq!(got as u64, 8 * FRAMES);
}

#[test]
fn multicast_flows_from_an_uplink_delay_no_port() {
    let mut world = World::new(&[100; 10]).with_uplink(1024);
    filter_all(&mut world, 0..8, &many("to-guest"));
    world.poll();
    for flow in 0..64 {
        world.arrive(&udp(BROADCAST, STRANGER, flow, 53));
    }
    assert_multicast_delays_no_port(world);
}

#[test]
fn multicast_flows_of_the_host_delay_no_port() {
    let mut world = World::new(&[100; 10]);
    let copies = (0..64).map(|flow| (0, udp(BROADCAST, STRANGER, flow, 53)));
    let role = Role::Multicast {
        network: NETWORK.into(),
    };
    world.add_slot(
        Box::new(MulticastLane::new(Copies::new(copies), false, Arc::default())),
        role,
    );
    filter_all(&mut world, 0..8, &many("to-guest"));
    assert_multicast_delays_no_port(world);
}

/// Two ports of VLAN 100, the second of which hears everything, with an uplink.
fn heard() -> World {
    let port = |at: u8| {
        fdb_port_with(at, |port| {
            port.vlans = Vlans::Access(100);
            port.options.promiscuous = at == 1;
        })
    };
    World::of(vec![port(0), port(1)]).with_uplink(1024).posting(200)
}

#[test]
fn copies_for_a_listener_that_are_new_flows_all_the_time_make_shorter_batches() {
    let mut world = heard();
    filter(&mut world, 1, &many("to-guest"));
    world.poll();
    for flow in 0..320 {
        world.arrive(&tagged(&udp(mac(0), STRANGER, flow, 53), 100));
    }
    let (mut rounds, mut heard) = (0, 0);
    while heard < 320 {
        world.poll();
        world.ports[0].take();
        heard += world.ports[1].take().len();
        rounds += 1;
        assert!(rounds < 100, "all are delivered");
    }
    assert!(rounds > 20, "{rounds} rounds for what were 5 batches");
}

#[test]
fn copy_for_a_listener_is_filtered_as_it_is_written() {
    let mut world = heard();
    let rules = "direction=to-guest action=allow protocol=udp destination-ports=53";
    let filter = filter(&mut world, 1, rules);
    world.poll();
    let [allowed, refused] = [53, 54].map(|port| udp(mac(0), STRANGER, 1, port));
    // Without the network's tag each has one: more than one is refused.
    for sent in [
        &tagged(&refused, 0),
        &tagged(&allowed, 0),
        &tagged(&tagged(&allowed, 0), 0),
    ] {
        world.arrive(&tagged(sent, 100));
    }
    world.poll();
    assert_eq!(world.ports[1].got(), [tagged(&allowed, 0)]);
    assert_eq!(counts(filter.to_guest.as_deref()), [1]);
    assert_eq!(world.ports[1].counters.to_guest_filter.get(), 1);
    assert_eq!(world.ports[1].counters.to_guest_filter_headers.get(), 1);
}

#[test]
fn frame_that_comes_back_to_its_sender_passes_its_rules_both_ways() {
    let other = fdb_port(1);
    let mut world = World::of(vec![hairpin(0), other]).posting(16);
    let rules = "direction=from-guest action=allow protocol=udp destination-ports=53-54
                 direction=to-guest action=allow protocol=udp destination-ports=53";
    filter(&mut world, 0, rules);
    for to in [mac(0), BROADCAST] {
        let [none, out, back] = [55, 54, 53].map(|port| udp(to, mac(0), 1, port));
        for sent in [&none, &out, &back] {
            world.ports[0].send(sent);
        }
        world.poll();
        assert_eq!(world.ports[0].take(), std::slice::from_ref(&back));
        // The group's other member has no rules.
        let of_group = if to == BROADCAST {
            vec![out, back]
        } else {
            Vec::new()
        };
        assert_eq!(world.ports[1].take(), of_group);
    }
    let counters = &world.ports[0].counters;
    assert_eq!(counters.from_guest_filter.get(), 2);
    assert_eq!(counters.to_guest_filter.get(), 2);
}

#[test]
fn rules_apply_between_a_guest_and_the_host() {
    let known = vec![fdb_port(0)];
    let mut world = World::of(known.clone()).posting(16);
    let (host, _) = host::add_host(&mut world, known, true);
    let rules = "direction=from-guest action=allow protocol=udp destination-ports=53
                 direction=to-guest action=allow protocol=udp destination-ports=80";
    filter(&mut world, 0, rules);
    let to_host = |port| udp(host::HOST, mac(0), 1, port);
    let to_guest = |port| udp(mac(0), host::HOST, 1, port);
    for (from, to) in [(54, 81), (53, 80)] {
        world.ports[0].send(&to_host(from));
        assert!(host::write(&host, &to_guest(to)));
    }
    (0..2).for_each(|_| world.poll());
    assert_eq!(host::read(&host), [to_host(53)]);
    assert_eq!(world.ports[0].got(), [to_guest(80)]);
    let counters = &world.ports[0].counters;
    let refused = (counters.from_guest_filter.get(), counters.to_guest_filter.get());
    assert_eq!(refused, (1, 1));
}

#[test]
fn packet_that_is_cut_is_judged_once() {
    let ports = [0, 1].map(fdb_port);
    let sends = Offloads {
        csum: true,
        tso4: true,
        ..Offloads::NONE
    };
    let mut world = World::offering(ports.into(), sends);
    world.ports[1].post(16);
    let filter = filter(&mut world, 1, "direction=to-guest action=allow protocol=tcp");
    world.ports[0].send_gso(mac(1), mac(0), 9000, 1000);
    world.ports[0].send(&udp(mac(1), mac(0), 1, 9));
    world.poll();
    assert_eq!(world.ports[1].got().len(), 9);
    assert_eq!(counts(filter.to_guest.as_deref()), [1]);
    let counters = &world.ports[1].counters;
    assert_eq!(
        (counters.filter_misses.get(), counters.to_guest_filter.get()),
        (2, 1)
    );
}
