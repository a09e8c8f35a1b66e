//! Ports whose guests get back what they send to themselves.

use std::time::{Duration, Instant};

use device::pair::Direction;
use packet::verify::{self, Verdict};

use super::*;
use crate::policy::guard::{Addresses, SourceGuard};
use crate::policy::rate_limit::PortLimits;
use crate::tests::fairness_tests::{Flood, assert_fair, compete, gso_packet};
use crate::tests::test_lanes::switch;
use crate::tests::test_port::scribble;
use model::rates::{PortRates, Rate, Rates};

/// Behind each of the first port's addresses.
const INNER: [Mac; 2] = [[2, 0, 0, 0, 5, 1], [2, 0, 0, 0, 5, 2]];

/// A port whose frames come back.
pub(super) fn hairpin(at: u8) -> FdbPort {
    fdb_port_with(at, |port| port.options.hairpin = true)
}

/// Ports of which the first is like that, with 16 receive buffers each.
fn world() -> World {
    world_of(hairpin(0), Offloads::NONE)
}

fn world_of(first: FdbPort, offloads: Offloads) -> World {
    World::offering(vec![first, fdb_port(1), fdb_port(2)], offloads).posting(16)
}

#[test]
fn frames_to_the_sender_itself_come_back_with_hairpin() {
    let mut world = world();
    for len in [14, 60, 64, 65, 1514] {
        let sent = [mac(0), BROADCAST].map(|to| frame(to, mac(0), len));
        sent.iter().for_each(|frame| _ = world.ports[0].send(frame));
        world.poll();
        assert_eq!(world.ports[0].take(), sent, "{len}");
        assert_eq!(world.ports[1].take(), sent[1..]);
    }
    let counters = &world.ports[0].counters;
    assert_eq!(counters.from_guest_frames.get(), 10);
    assert_eq!(counters.to_guest_frames.get(), 10);
    while world.ports[0].from_guest.take_used().is_some() {}
    assert_eq!(world.ports[0].from_guest.free_descriptors(), 256, "all went back");
}

#[test]
fn what_a_guest_sends_to_itself_is_lost_where_the_port_does_not_say_so() {
    for isolated in [false, true] {
        let mut world = world_of(
            fdb_port_with(0, |port| port.options.isolated = isolated),
            Offloads::NONE,
        );
        for to in [mac(0), BROADCAST] {
            world.ports[0].send(&frame(to, mac(0), 60));
        }
        world.poll();
        assert!(world.ports[0].got().is_empty());
        let counters = &world.ports[0].counters;
        assert_eq!(counters.from_guest_to_itself.get(), 1);
        assert_eq!(counters.from_guest_frames.get(), 1, "the group's");
    }
}

#[test]
fn isolated_guest_reaches_itself() {
    let isolated = fdb_port_with(0, |port| {
        (port.options.isolated, port.options.hairpin) = (true, true);
    });
    let mut world = world_of(isolated, Offloads::NONE);
    let sent = frame(mac(0), mac(0), 60);
    world.ports[0].send(&sent);
    world.poll();
    assert_eq!(world.ports[0].got(), [sent]);
}

#[test]
fn addresses_that_were_learned_reach_each_other_by_their_port() {
    let news = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
    let learned = crate::fdb::learned::Learned::new(Arc::new(news));
    let first = FdbPort {
        learned: Some(Arc::new(learned)),
        ..hairpin(0)
    };
    let mut world = world_of(first.clone(), Offloads::NONE);
    let its = INNER.map(|mac| (crate::fdb::FdbKey::new(0, mac), PortNumber(0)));
    let fdb = Fdb::new(vec![Some(first), None, None]).with_learned(its.into_iter());
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    world.rebuild_forwarding();
    let sent = [frame(INNER[0], INNER[1], 60), frame(mac(0), INNER[0], 61)];
    sent.iter().for_each(|frame| _ = world.ports[0].send(frame));
    // Nobody's.
    world.ports[0].send(&frame(STRANGER, INNER[0], 62));
    world.poll();
    assert_eq!(world.ports[0].got(), sent);
    assert_eq!(world.ports[0].counters.from_guest_no_station.get(), 1);
}

#[test]
fn returned_frames_have_the_tag_of_the_port() {
    let trunk = FdbPort {
        vlans: Vlans::Trunk(vec![100, 101]),
        ..hairpin(0)
    };
    let access = FdbPort {
        vlans: Vlans::Access(100),
        ..hairpin(1)
    };
    let mut world = World::of(vec![trunk, access]).posting(16);
    let sent = [
        tagged(&frame(mac(0), mac(0), 60), 100),
        tagged(&frame(mac(0), mac(0), 1000), 101),
        tagged(&frame(BROADCAST, mac(0), 60), 101),
    ];
    sent.iter().for_each(|frame| _ = world.ports[0].send(frame));
    world.ports[0].send(&tagged(&frame(mac(0), mac(0), 60), 102));
    // One that says a priority only.
    let bare = frame(mac(1), mac(1), 60);
    world.ports[1].send(&tagged(&bare, 5 << 13));
    world.poll();
    assert_eq!(world.ports[0].got(), sent);
    assert_eq!(world.ports[0].counters.from_guest_vlan.get(), 1);
    assert_eq!(world.ports[1].got(), [bare]);
}

#[test]
fn guest_without_buffers_loses_what_it_sends_to_itself_and_waits_for_nothing() {
    let mut world = World::of(vec![hairpin(0), hairpin(1)]);
    world.ports[0].post(2);
    world.ports[1].post(8);
    for to in [mac(0), mac(0), mac(0), BROADCAST, mac(1)] {
        world.ports[0].send(&frame(to, mac(0), 60));
    }
    world.poll();
    assert_eq!((world.ports[0].got().len(), world.ports[1].got().len()), (2, 2));
    let counters = &world.ports[0].counters;
    assert_eq!(counters.to_guest_no_buffer.get(), 2);
    assert_eq!(counters.from_guest_waits.get(), 0);
}

#[test]
fn limit_of_what_a_guest_gets_holds_for_what_it_sends_to_itself() {
    let mut world = world();
    let rate = Rate {
        per_second: 1,
        burst: 3,
    };
    let limits = PortLimits::new(PortRates {
        to_guest: Rates {
            bits: None,
            packets: Some(rate),
        },
        ..PortRates::default()
    });
    world.lanes.change(0, |lane, _| {
        lane.set_limits(&limits);
    });
    for to in [mac(0), mac(0), BROADCAST, mac(0), BROADCAST] {
        world.ports[0].send(&frame(to, mac(0), 60));
    }
    world.poll();
    assert_eq!(world.ports[0].got().len(), 3);
    assert_eq!(world.ports[0].counters.to_guest_limit.get(), 2);
    assert_eq!(world.ports[1].got().len(), 2);
}

#[test]
fn listener_hears_once_what_comes_back_and_nothing_of_what_does_not() {
    for (is_hairpin, heard) in [(true, 2), (false, 1)] {
        let first = fdb_port_with(0, |port| {
            (port.options.hairpin, port.options.promiscuous) = (is_hairpin, true);
        });
        let listener = fdb_port_with(1, |port| port.options.promiscuous = true);
        let mut world = World::of(vec![first, listener]).posting(16);
        for to in [mac(0), BROADCAST] {
            world.ports[0].send(&frame(to, mac(0), 60));
        }
        world.poll();
        assert_eq!(world.ports[0].got().len(), if is_hairpin { 2 } else { 0 });
        assert_eq!(world.ports[1].got().len(), heard);
    }
}

/// A guest that sends all offloads, and takes them or none.
fn asking(takes: bool) -> World {
    let sends = Offloads {
        csum: true,
        tso4: true,
        ..Offloads::NONE
    };
    let offloads = if takes { Offloads::all() } else { sends };
    world_of(hairpin(0), offloads)
}

/// Whether a packet's checksum is left to who gets it.
fn is_partial(frame: &[u8]) -> bool {
    let layers = packet::layers::parse(frame, frame.len() as u32).expect("TCP");
    verify::is_partial(frame, &layers) == Verdict::Partial
}

fn send_packet(world: &mut World, to: Mac, payload: usize) -> Vec<u8> {
    world.ports[0].send_gso(to, mac(0), payload, 1000)
}

#[test]
fn gso_packet_comes_back_whole_to_a_guest_that_takes_it_and_cut_to_one_that_does_not() {
    for to in [mac(0), BROADCAST] {
        for takes in [true, false] {
            let mut world = asking(takes);
            let packet = send_packet(&mut world, to, 8000);
            // Behind it, and not before what is cut of it.
            let last = frame(mac(0), mac(0), 60);
            world.ports[0].send(&last);
            world.poll();
            let mut got = world.ports[0].got();
            assert_eq!(got.pop(), Some(last));
            // Into buffers of 2048 bytes; or eight frames.
            assert_eq!(got.len(), if takes { 4 } else { 8 });
            let headers = 14 + 20 + 20;
            if takes {
                assert_eq!(got[0], packet[..got[0].len()]);
            }
            for (at, segment) in got.iter().enumerate().filter(|_| !takes) {
                assert_eq!(segment.len(), headers + 1000);
                assert_eq!(segment[..14], packet[..14]);
                assert_eq!(segment[headers..], packet[headers + at * 1000..][..1000]);
                assert!(!is_partial(segment), "it is completed");
            }
            assert_eq!(world.ports[0].counters.to_guest_no_buffer.get(), 0);
        }
    }
}

#[test]
fn rest_of_a_packet_that_a_guest_sends_to_itself_waits_for_its_buffers_and_nothing_else_does() {
    let mut world = asking(false);
    send_packet(&mut world, mac(0), 20_000);
    for to in [mac(0), mac(1)] {
        world.ports[0].send(&frame(to, mac(0), 60));
    }
    world.poll();
    assert_eq!(world.ports[0].got().len(), 16);
    assert_eq!(world.ports[1].got().len(), 1);
    let lost = |world: &World| world.ports[0].counters.to_guest_no_buffer.get();
    assert_eq!(lost(&world), 1, "it may not overtake the packet");
    world.ports[0].post(8);
    world.poll();
    assert_eq!((world.ports[0].got().len(), lost(&world)), (4, 1));
    world.ports[0].send(&frame(mac(0), mac(0), 60));
    world.poll();
    assert_eq!(world.ports[0].got().len(), 1);
}

#[test]
fn checksum_is_left_to_a_guest_that_takes_that_and_completed_for_one_that_does_not() {
    for takes in [true, false] {
        let mut world = asking(takes);
        let (_, sent) = gso_packet(mac(0), mac(0), 600, 1000);
        let mut header = [0; HEADER as usize];
        header[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 34, 0, 16, 0]);
        world.ports[0].send_with(header, &sent);
        world.poll();
        let got = world.ports[0].got();
        assert_eq!(got.len(), 1);
        assert_eq!(got[0] == sent, takes);
        assert_eq!((is_partial(&sent), is_partial(&got[0])), (true, takes));
    }
}

/// Whatever pair sent a flow of the same two last.
#[test]
fn frame_comes_back_by_the_pair_that_sent_it_or_by_the_first_if_that_receives_nothing() {
    for is_hairpin in [true, false] {
        let port = fdb_port_with(0, |port| {
            port.options.hairpin = is_hairpin;
            port.flows = Some(Arc::default());
        });
        let mut world = World::of(vec![port]);
        world.add_pair(0, 1, Offloads::NONE);
        world.rebuild_forwarding();
        world.ports.iter_mut().for_each(|port| port.post(16));
        let got = |world: &mut World| [0, 1].map(|pair: usize| world.ports[pair].got().len());
        let expected = |got: [usize; 2]| if is_hairpin { got } else { [0, 0] };
        for pair in [0, 1, 0] {
            world.ports[pair].send(&frame(mac(0), mac(0), 60));
            world.ports[pair].send(&frame(BROADCAST, mac(0), 60));
            world.poll();
            assert_eq!(got(&mut world), expected([2 - 2 * pair, 2 * pair]));
        }
        switch(&mut *world.lanes.slots[1].lane, Direction::ToGuest, false);
        world.rebuild_forwarding();
        world.ports[1].send(&frame(mac(0), mac(0), 60));
        world.ports[1].send(&frame(BROADCAST, mac(0), 60));
        world.poll();
        assert_eq!(got(&mut world), expected([2, 0]));
        switch(&mut *world.lanes.slots[0].lane, Direction::ToGuest, false);
        world.rebuild_forwarding();
        world.ports[1].send(&frame(mac(0), mac(0), 60));
        world.poll();
        let counters = &world.ports[1].counters;
        // A multicast frame is sent in any case.
        assert_eq!(counters.from_guest_frames.get(), if is_hairpin { 4 } else { 2 });
        assert_eq!(counters.from_guest_no_peer.get(), u64::from(is_hairpin));
        assert_eq!(
            counters.from_guest_to_itself.get(),
            if is_hairpin { 0 } else { 4 - 1 }
        );
    }
}

/// All that it gets it sends again, which is as much as it may send.
#[test]
fn guest_whose_frames_loop_for_ever_does_not_slow_others() {
    for to in [mac(0), BROADCAST] {
        let mut world = World::of(vec![hairpin(0), fdb_port(1), fdb_port(2)]).posting(128);
        let round = Flood::plain(&mut world, 0, &frame(to, mac(0), 1514));
        let usual = Flood::plain(&mut world, 1, &frame(mac(2), mac(1), 1514));
        let [round, usual] = compete(&mut world, [&round, &usual]);
        assert_fair(round, usual);
        let [came, sent] = {
            let counters = &world.ports[0].counters;
            [&counters.to_guest_frames, &counters.from_guest_frames].map(device::counters::Counter::get)
        };
        assert_eq!(came, sent, "all come back");
    }
}

/// What a guest has accepted that sends offloads and takes none.
const SENDS: Offloads = Offloads {
    csum: true,
    tso4: true,
    ..Offloads::NONE
};

/// A hairpin port of two pairs with queues of 1024 entries.
fn two_pairs(offloads: Offloads) -> World {
    let mut world = World::default();
    let fdb = Fdb::new(vec![Some(hairpin(0))]);
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    for pair in [0, 1] {
        let port = Port::new(Memory::new(1 << 23, 0), 1024, QueueFeatures::default(), offloads);
        world.add_port((0, pair), port, |pair, counters, of| {
            Box::new(PortLane::new(pair, counters, of))
        });
    }
    world.rebuild_forwarding();
    world.posting(800)
}

/// A budget is for 64 plain frames. The guest receives by the sending pair, or by its first while that one is disabled.
#[test]
fn copies_segments_descriptors_and_look_ups_of_frames_that_come_back_use_up_the_budget() {
    let line = |port| format!("direction=to-guest action=deny protocol=tcp destination-ports={port}\n");
    let many: String = (1..10_000).map(line).collect();
    let many = many + "direction=to-guest action=allow protocol=udp";
    for by_first in [false, true] {
        let sent_in_two_polls = |offloads, rules: &str, send: &dyn Fn(&mut Port, u32)| {
            let mut world = two_pairs(offloads);
            filter::filter_all(&mut world, 0..2, rules);
            switch(&mut *world.lanes.slots[1].lane, Direction::ToGuest, !by_first);
            world.rebuild_forwarding();
            (0..80).for_each(|number| send(&mut world.ports[1], number));
            (0..2).for_each(|_| _ = world.lanes.poll(1));
            let lost = world
                .ports
                .iter()
                .map(|port| port.counters.to_guest_no_buffer.get());
            assert_eq!(lost.sum::<u64>(), 0);
            std::iter::from_fn(|| world.ports[1].from_guest.take_used()).count()
        };
        let plain = |to: Mac| move |port: &mut Port, _| _ = port.send(&frame(to, mac(0), 60));
        let in_pieces = |port: &mut Port, _| port.send_in_pieces(&frame(mac(0), mac(0), 60), 6);
        let packet = |to| move |port: &mut Port, _| _ = port.send_gso(to, mac(0), 400, 100);
        let long = |port: &mut Port, _| _ = port.send_gso(mac(0), mac(0), 30_000, 1000);
        let flow = |port: &mut Port, number| _ = port.send(&filter::udp(mac(0), mac(0), number, 53));
        let sent = [
            sent_in_two_polls(SENDS, "", &plain(mac(0))),
            sent_in_two_polls(SENDS, "", &plain(BROADCAST)),
            sent_in_two_polls(SENDS, "", &in_pieces),
            sent_in_two_polls(SENDS, "", &packet(mac(0))),
            sent_in_two_polls(SENDS, "", &packet(BROADCAST)),
            sent_in_two_polls(Offloads::all(), "", &long),
            sent_in_two_polls(SENDS, &many, &flow),
        ];
        assert_eq!(sent, [80, 64, 43, 26, 22, 7, if by_first { 3 } else { 64 }]);
    }
}

#[test]
fn frame_behind_a_packet_of_many_segments_comes_back_behind_them() {
    let mut world = two_pairs(SENDS);
    let last = frame(mac(0), mac(0), 60);
    for segments in [10, 40, 60, 100, 400] {
        world.ports[0].send_gso(mac(0), mac(0), segments * 50, 50);
        world.ports[0].send(&last);
        (0..20).for_each(|_| world.poll());
        let got = world.ports[0].take();
        assert_eq!((got.len(), got.last()), (segments + 1, Some(&last)));
    }
}

/// Its receive buffers are where its frames are: it overwrites only itself, and others get the checked bytes.
#[test]
fn guest_that_receives_into_what_it_sends_changes_nothing_for_others() {
    let mut world = World::of(vec![hairpin(0), fdb_port(1)]);
    world.ports[1].post(64);
    let guest = &mut world.ports[0];
    let header = [0; HEADER as usize];
    let bytes = |to: Mac, len| [&header[..], &frame(to, mac(0), len)].concat();
    for shift in [0, 1, 12, 26, 40] {
        let at = guest.memory.ram.alloc(8192, 64).expect("memory");
        let over = at.checked_add(shift).expect("inside");
        guest.to_guest.add(&[Buffer::writable(over, 2048)]).expect("room");
        guest.to_guest.publish();
        // To itself, over itself; the next one is where the first was written.
        guest.memory.ram.write(at, &bytes(mac(0), 1000));
        let next = at.checked_add(1012).expect("inside");
        guest.memory.ram.write(next, &bytes(mac(1), 1000));
        for at in [at, next] {
            guest.from_guest.add(&[Buffer::readable(at, 1012)]).expect("room");
        }
        guest.from_guest.publish();
    }
    world.poll();
    let got = world.ports[1].got();
    assert_eq!(got.len(), 5);
    for frame in got {
        assert_eq!(
            (frame.len(), &frame[..6], &frame[6..12]),
            (1000, &mac(1)[..], &mac(0)[..])
        );
    }
    assert_eq!(world.ports[0].counters.to_guest_frames.get(), 5);
    assert!(world.lanes.slots[0].is_in_rounds());
}

/// The same, while a thread of the guest writes other addresses and requests there.
#[test]
fn guest_whose_frames_come_back_over_themselves_while_they_change_hurts_nobody() {
    let guard = SourceGuard {
        addresses: Addresses::new(&["192.0.2.1".parse().expect("valid")]),
        ..SourceGuard::default()
    };
    let first = FdbPort {
        source_guard: Some(Arc::new(guard)),
        ..hairpin(0)
    };
    let mut world = World::of(vec![first, fdb_port(1), fdb_port(2)]);
    (1..3).for_each(|port: usize| world.ports[port].post(200));
    let base = world.ports[0].memory.put(&[0; 64 * 2048]);
    let at = |offset: u64| base.checked_add(offset).expect("inside");
    let packet = |header: [u8; HEADER as usize], to: Mac, from: u8, ip: u8| {
        let ipv4 = [
            0x45, 0, 0, 200, 0, 0, 0, 0, 64, 99, 0, 0, 192, 0, 2, ip, 192, 0, 2, 9,
        ];
        let mut bytes = [&header[..], &to, &mac(from), &[8, 0], &ipv4].concat();
        bytes.resize(1012, 7);
        bytes
    };
    let plain = [0; HEADER as usize];
    let packets = [
        packet(plain, mac(0), 0, 1),
        packet(plain, BROADCAST, 0, 1),
        packet(plain, mac(1), 0, 1),
        packet(plain, mac(1), 2, 1),
        packet(plain, mac(2), 0, 2),
        packet([1, 1, 54, 0, 8, 0, 34, 0, 16, 0, 9, 9], mac(0), 2, 2),
    ];
    // Each place has each packet in turn, no two places the same.
    let writes = (0..64 * 6).map(|turn| (at(turn % 64 * 2048), packets[(turn * 5 % 6) as usize].clone()));
    let _scribbler = scribble(&world.ports[0], writes.collect());
    let counters = Arc::clone(&world.ports[0].counters);
    let begun = Instant::now();
    while counters.to_guest_frames.get() < 1000 || counters.from_guest_source_address.get() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{counters:?}");
        let guest = &mut world.ports[0];
        while guest.to_guest.take_used().is_some() {}
        while guest.from_guest.take_used().is_some() {}
        for number in 0..64 {
            let place = number * 2048;
            let _ = guest
                .to_guest
                .add(&[Buffer::writable(at(place + number % 30), 2048)]);
            let (head, rest) = (at(place), at(place + 30));
            let _ = guest
                .from_guest
                .add(&[Buffer::readable(head, 30), Buffer::readable(rest, 982)]);
        }
        guest.to_guest.publish();
        guest.from_guest.publish();
        world.poll();
        for port in &mut world.ports[1..] {
            let got = port.take();
            let is_its = |frame: &Vec<u8>| (&frame[6..12], frame[29]) == (&mac(0), 1);
            assert!(got.iter().all(is_its), "a frame that was not checked");
        }
    }
    assert!(world.lanes.slots.iter().all(Slot::is_in_rounds));
}

#[test]
fn guest_that_breaks_the_rules_of_its_receive_queue_leaves_and_what_it_sent_before_arrives() {
    for to in [mac(0), BROADCAST] {
        let mut world = world();
        let wrong = &mut world.ports[0];
        // Behind the good ones.
        let addr = wrong.memory.ram.alloc(2048, 64).expect("memory");
        wrong.to_guest.add(&[Buffer::readable(addr, 2048)]).expect("room");
        wrong.to_guest.publish();
        world.ports[0].send(&frame(mac(1), mac(0), 60));
        for _ in 0..17 {
            world.ports[0].send(&frame(to, mac(0), 62));
        }
        // Never looked at.
        world.ports[0].send(&frame(mac(2), mac(0), 63));
        // Copies of multicast use up budgets.
        (0..3).for_each(|_| world.poll());
        assert!(!world.lanes.slots[0].is_in_rounds());
        assert!(world.lanes.slots[1].is_in_rounds() && world.lanes.slots[2].is_in_rounds());
        assert_eq!(world.ports[1].got()[0], frame(mac(1), mac(0), 60));
        let last = frame(mac(2), mac(0), 63);
        assert!(!world.ports[2].got().contains(&last));
    }
}
