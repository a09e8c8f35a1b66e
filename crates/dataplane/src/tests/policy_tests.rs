//! Lanes of guests that have a cable, or a queue, to themselves, and filter rules.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use packet::ethernet::Mac;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::QueueFeatures;
use virtqueue::driver::Buffer;

use crate::lane::{Lane, Work};
use crate::policy::filter::{Filter, PortFilter, Rule};
use crate::policy::guard::{Addresses, Guard, SourceGuard};
use crate::policy::rate_limit::PortLimits;
use crate::port_lane::PortLane;
use crate::tests::fairness_tests::gso_packet;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::{Over, PLACEMENTS, own_queue, sent};
use crate::tests::test_port::{Port, forge};
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use device::pair::QueuePair;
use model::config::Placement;
use model::rates::{PortRates, Rate, Rates};

/// A guest with so many receive buffers.
fn guest(buffers: usize) -> (Port, QueuePair) {
    let memory = Memory::new(1 << 20, 0);
    let (mut guest, pair) = Port::new(memory, 256, QueueFeatures::default(), Offloads::NONE);
    guest.post(buffers);
    (guest, pair)
}

fn udp(flow: u32, port: u16) -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17]);
    frame[26..30].copy_from_slice(&flow.to_be_bytes());
    frame[36..38].copy_from_slice(&port.to_be_bytes());
    frame
}

fn rules(lines: &[&str]) -> PortFilter {
    PortFilter::new(&Filter {
        rule: lines
            .iter()
            .map(|words| words.parse::<Rule>().expect(words))
            .collect(),
        ..Filter::default()
    })
}

/// As many as there can be: an unknown flow is work for twelve frames.
fn many(direction: &str) -> PortFilter {
    let line = |at| format!("direction={direction} action=deny protocol=tcp destination-ports={at}");
    let lines: Vec<String> = (1..10_000).map(line).collect();
    let last = format!("direction={direction} action=allow protocol=udp");
    let lines: Vec<&str> = lines.iter().map(String::as_str).chain([&*last]).collect();
    rules(&lines)
}

#[test]
fn frame_that_waits_for_a_buffer_is_counted_once_by_both_ends_rules() {
    let (mut a, from) = guest(0);
    let (mut b, to) = guest(0);
    let mut from = PortLane::of_cable(from, Arc::clone(&a.counters));
    let mut to = PortLane::of_cable(to, Arc::clone(&b.counters));
    let sends = rules(&[
        "direction=from-guest action=deny protocol=udp destination-ports=7",
        "direction=from-guest action=allow protocol=udp",
    ]);
    let gets = rules(&[
        "direction=to-guest action=deny protocol=udp destination-ports=9",
        "direction=to-guest action=allow protocol=udp",
    ]);
    drop(from.set_filter(sends.for_a_lane(0)));
    drop(to.set_filter(gets.for_a_lane(0)));
    for port in [1, 7, 2, 9, 3, 7, 4, 9] {
        a.send(&udp(1, port));
    }
    let mut got = Vec::new();
    for _ in 0..12 {
        from.poll(&mut Others::one(&mut to)).expect("no fault");
        got.extend(
            b.got()
                .iter()
                .map(|frame| u16::from_be_bytes([frame[36], frame[37]])),
        );
        b.post(1);
    }
    assert_eq!(got, [1, 2, 3, 4]);
    let counts = |rules: Option<Arc<_>>| -> Vec<u64> {
        let rules: Arc<crate::policy::filter::Rules> = rules.expect("some");
        rules.counts().into_iter().map(|(_, count)| count).collect()
    };
    assert_eq!(counts(sends.from_guest), [2, 6]);
    assert_eq!(counts(gets.to_guest), [2, 4]);
    assert_eq!(a.counters.from_guest_filter.get(), 2);
    assert_eq!(b.counters.to_guest_filter.get(), 2);
}

#[test]
fn new_flows_all_the_time_use_up_the_budget_whichever_port_has_the_rules() {
    for of_sender in [true, false] {
        let (mut a, from) = guest(0);
        let (mut b, to) = guest(200);
        let mut from = PortLane::of_cable(from, Arc::clone(&a.counters));
        let mut to = PortLane::of_cable(to, Arc::clone(&b.counters));
        match of_sender {
            true => drop(from.set_filter(many("from-guest").for_a_lane(0))),
            false => drop(to.set_filter(many("to-guest").for_a_lane(0))),
        }
        (0..128).for_each(|flow| _ = a.send(&udp(flow, 53)));
        let mut got = 0;
        for round in 0..100 {
            from.poll(&mut Others::one(&mut to)).expect("no fault");
            let of_a_poll = b.got().len();
            assert!(of_a_poll <= 2, "{of_a_poll} in round {round}");
            got += of_a_poll;
        }
        assert_eq!(got, 128);
    }
}

fn over() -> Over {
    Over {
        fill: 512,
        ..Over::new(Placement::Copy, 512)
    }
}

#[test]
fn new_flows_that_a_queue_brings_all_the_time_make_shorter_batches() {
    let (mut guest, pair) = guest(200);
    let (mut lane, wire) = over().lane(pair, &guest.memory, &guest.counters);
    drop(lane.set_filter(many("to-guest").for_a_lane(0)));
    for flow in 0..192 {
        wire.lock().expect("no panic").arrive(&udp(flow, 53));
    }
    let (mut rounds, mut got) = (0, 0);
    while got < 192 {
        lane.poll(&mut Others::default()).expect("no fault");
        got += guest.got().len();
        rounds += 1;
        assert!(rounds < 400, "all are delivered");
    }
    assert!(rounds > 10, "{rounds} rounds for what were 3 batches");
}

/// A datagram whose ports lie behind 40 bytes of IPv4 options.
fn udp_behind_options(port: u16) -> Vec<u8> {
    let mut frame = vec![0; 100];
    frame[12..24].copy_from_slice(&[8, 0, 0x4f, 0, 0, 86, 0, 0, 0, 0, 64, 17]);
    frame[76..78].copy_from_slice(&port.to_be_bytes());
    frame[78..80].copy_from_slice(&26u16.to_be_bytes());
    frame
}

#[test]
fn rules_of_the_other_end_read_long_headers_behind_those_that_a_guard_has_read() {
    for is_guarded in [false, true] {
        let (mut a, from) = guest(0);
        let (mut b, to) = guest(10);
        let mut from = PortLane::of_cable(from, Arc::clone(&a.counters));
        let mut to = PortLane::of_cable(to, Arc::clone(&b.counters));
        if is_guarded {
            from.set_guard(Some(&Guard {
                mac: [0; 6],
                vlans: Vec::new(),
                source_guard: None,
            }));
        }
        let allow = rules(&["direction=to-guest action=allow protocol=udp destination-ports=53"]);
        drop(to.set_filter(allow.for_a_lane(0)));
        a.send(&udp_behind_options(53));
        from.poll(&mut Others::one(&mut to)).expect("no fault");
        assert!(b.to_guest.take_used().is_some(), "guarded: {is_guarded}");
        assert_eq!(b.counters.to_guest_filter_headers.get(), 0);
    }
}

#[test]
fn frames_for_a_disabled_pair_keep_no_worker_awake_while_the_first_pair_has_no_buffers() {
    let eventfd = || Some(eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"));
    let lane = |is_enabled: bool| {
        let (guest, mut pair) = guest(0);
        (pair.from_guest.kick, pair.to_guest.kick) = (eventfd(), eventfd());
        pair.to_guest.enabled = is_enabled;
        let (lane, wire) = over().lane(pair, &guest.memory, &guest.counters);
        (guest, lane, wire)
    };
    let ((_second, mut lane, wire), (_first, mut first, _)) = (lane(false), lane(true));
    wire.lock().expect("no panic").receive(60, false);
    for has_first in [true, false] {
        let mut others = match has_first {
            true => Others::one(&mut *first),
            false => Others::default(),
        };
        lane.poll(&mut others).expect("no fault");
        assert_eq!(lane.enable_notifications(&mut others), Work::None, "{has_first}");
        lane.disable_notifications();
    }
}

/// In as many buffers as it needs.
#[test]
fn gso_packet_and_partial_checksum_pass_a_cable_untouched() {
    for packed in [false, true] {
        let features = QueueFeatures {
            packed,
            ..QueueFeatures::default()
        };
        let end = || Port::new(Memory::new(1 << 20, 0), 256, features, Offloads::all());
        let ((mut a, from), (mut b, to)) = (end(), end());
        let mut from = PortLane::of_cable(from, Arc::clone(&a.counters));
        let mut to = PortLane::of_cable(to, Arc::clone(&b.counters));
        b.post(40);
        let (asked, packet) = gso_packet([2; 6], MAC, 60_000, 1448);
        let (_, segment) = gso_packet([2; 6], MAC, 1000, 1448);
        // The checksum's place is the same.
        let partial = [&[1, 0, 0, 0, 0, 0], &asked[6..]].concat();
        for (header, bytes) in [(asked.to_vec(), packet), (partial, segment)] {
            let sent = [&header[..], &[0, 0]].concat().try_into().expect("twelve bytes");
            a.send_with(sent, &bytes);
            from.poll(&mut Others::one(&mut to)).expect("no fault");
            let header = header.try_into().expect("ten bytes");
            assert!(b.take_merged() == [(header, bytes)], "packed: {packed}");
        }
    }
}

const MAC: Mac = [2, 0, 0, 0, 0, 1];
const IP: u32 = Ipv4Addr::new(192, 0, 2, 10).to_bits();

/// Its source guard, which allows one IPv4 address without a VLAN and in VLAN 100.
fn guard() -> Guard {
    Guard {
        mac: MAC,
        vlans: vec![0, 100],
        source_guard: Some(SourceGuard {
            addresses: Addresses::new(&["192.0.2.10".parse().expect("valid")]),
            ..SourceGuard::default()
        }),
    }
}

/// A datagram of `len` bytes to this port.
fn datagram(mac: Mac, ip: u32, port: u16, len: usize) -> Vec<u8> {
    let mut frame = udp(ip, port);
    frame[6..12].copy_from_slice(&mac);
    frame.resize(len, 0x5a);
    frame
}

fn tagged(mut frame: Vec<u8>, vlan: u8) -> Vec<u8> {
    frame.splice(12..12, [0x81, 0, 0, vlan]);
    frame
}

/// In a TX ring without room for all, so that frames wait and are checked again.
#[test]
fn guest_with_a_queue_of_its_own_sends_what_guard_and_rules_allow() {
    let honest = |len| datagram(MAC, IP, 53, len);
    let of_other_mac = datagram([2, 0, 0, 0, 0, 2], IP, 53, 60);
    let of_other_ip = datagram(MAC, IP + 1, 53, 300);
    let mut arp = honest(60);
    arp[12..14].copy_from_slice(&[8, 6]);
    // Frame, bytes of a descriptor, whether the guard allows it, whether the rules do.
    let frames = [
        (honest(60), 2048, true, true),
        (of_other_mac, 2048, false, true),
        (of_other_ip.clone(), 2048, false, true),
        (tagged(honest(60), 100), 2048, true, true),
        (datagram(MAC, IP, 54, 60), 2048, true, false),
        // Counted by the one that looks first, which is the guard.
        (datagram(MAC, IP + 1, 54, 60), 2048, false, false),
        (honest(1000), HEADER as usize, true, true),
        (of_other_ip.clone(), HEADER as usize, false, true),
        (honest(1000), 40, true, true),
        (of_other_ip, 40, false, true),
        (arp, 2048, false, true),
        (tagged(honest(60), 101), 2048, false, true),
        (honest(1514), 2048, true, true),
    ];
    for placement in PLACEMENTS {
        for (has_guard, has_rules) in [(true, false), (false, true), (true, true)] {
            let over = Over {
                ring: (4, 1),
                ..Over::new(placement, 16)
            };
            let (mut guest, mut lane, wire) = own_queue(over, Offloads::NONE);
            lane.set_guard(has_guard.then(guard).as_ref());
            let lines = ["direction=from-guest action=allow protocol=udp destination-ports=53"];
            let filter = rules(if has_rules { &lines } else { &[] });
            drop(lane.set_filter(filter.for_a_lane(0)));
            for (frame, piece, ..) in &frames {
                guest.send_in_pieces(frame, *piece);
            }
            for _ in 0..200 {
                lane.poll(&mut Others::default()).expect("no fault");
            }
            let case = format!("{placement:?}, guard: {has_guard}, rules: {has_rules}");
            let allowed = frames
                .iter()
                .filter(|&&(.., by_guard, by_rules)| (by_guard || !has_guard) && (by_rules || !has_rules));
            assert!(sent(&wire).iter().eq(allowed.map(|(frame, ..)| frame)), "{case}");
            let counters = &guest.counters;
            let of_guard = [
                &counters.from_guest_source_address,
                &counters.from_guest_ip_source,
                &counters.from_guest_arp,
                &counters.from_guest_vlan,
            ];
            let refused = of_guard.map(device::counters::Counter::get);
            assert_eq!(refused, if has_guard { [1, 4, 1, 1] } else { [0; 4] }, "{case}");
            let by_rules = u64::from(has_rules) * if has_guard { 1 } else { 2 };
            assert_eq!(counters.from_guest_filter.get(), by_rules, "{case}");
        }
    }
}

/// What the guard refuses takes nothing of the limit. So low a rate that nothing flows in for two hours.
#[test]
fn limits_hold_for_a_guest_with_a_queue_of_its_own() {
    let five = Rates {
        bits: Some(Rate {
            per_second: 1,
            burst: 5 * 1000 * 8,
        }),
        packets: None,
    };
    for placement in PLACEMENTS {
        let (mut guest, mut lane, wire) = own_queue(Over::new(placement, 64), Offloads::NONE);
        let limit = |lane: &mut dyn Lane, from_guest, to_guest| {
            lane.set_limits(&PortLimits::new(PortRates { from_guest, to_guest }));
        };
        lane.set_guard(Some(&guard()));
        limit(&mut *lane, five, five);
        guest.post(20);
        for port in 0..10 {
            guest.send(&datagram(MAC, IP + 1, port, 1000));
            guest.send(&datagram(MAC, IP, port, 1000));
        }
        let poll = |lane: &mut dyn Lane| {
            (0..4).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
        };
        poll(&mut *lane);
        assert_eq!(sent(&wire).len(), 5, "{placement:?}");
        assert_eq!(guest.counters.from_guest_limit_waits.get(), 1, "{placement:?}");
        if placement != Placement::Direct {
            let frame = datagram(MAC, IP, 9, 1000);
            (0..9).for_each(|_| wire.lock().expect("no panic").arrive(&frame));
            poll(&mut *lane);
            assert_eq!(guest.got().len(), 5, "{placement:?}");
            assert_eq!(guest.counters.to_guest_limit.get(), 4, "{placement:?}");
        }
        limit(&mut *lane, Rates::default(), Rates::default());
        poll(&mut *lane);
        let expected = (0..10).map(|port| datagram(MAC, IP, port, 1000));
        assert!(sent(&wire).into_iter().eq(expected), "{placement:?}");
        assert_eq!(guest.counters.from_guest_ip_source.get(), 10, "{placement:?}");
    }
}

/// Most of these frames are charged a run at a time, the last ones one by one.
#[test]
fn exactly_as_many_frames_pass_as_the_limits_of_a_guest_with_a_queue_of_its_own_allow() {
    let hundred = Rates {
        bits: Some(Rate {
            per_second: 1,
            burst: 100 * 1000 * 8,
        }),
        packets: None,
    };
    for placement in PLACEMENTS {
        let (mut guest, mut lane, wire) = own_queue(Over::new(placement, 64), Offloads::NONE);
        lane.set_limits(&PortLimits::new(PortRates {
            from_guest: hundred,
            to_guest: hundred,
        }));
        let frame = datagram(MAC, IP, 1, 1000);
        guest.post(160);
        (0..150).for_each(|_| _ = guest.send(&frame));
        for _ in 0..5 {
            if placement != Placement::Direct {
                (0..30).for_each(|_| wire.lock().expect("no panic").arrive(&frame));
            }
            (0..4).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
        }
        assert_eq!(sent(&wire).len(), 100, "{placement:?}");
        assert_eq!(guest.counters.from_guest_limit_waits.get(), 1, "{placement:?}");
        if placement != Placement::Direct {
            assert_eq!(guest.got().len(), 100, "{placement:?}");
            assert_eq!(guest.counters.to_guest_limit.get(), 50, "{placement:?}");
        }
    }
}

#[test]
fn rest_of_a_frame_beyond_the_limit_is_no_frame_once_the_limit_is_gone() {
    for placement in [Placement::Copy, Placement::SendDirect] {
        let (mut guest, mut lane, wire) = own_queue(Over::new(placement, 64), Offloads::NONE);
        let packets = Some(Rate {
            per_second: 1,
            burst: 1,
        });
        lane.set_limits(&PortLimits::new(PortRates {
            to_guest: Rates { bits: None, packets },
            ..PortRates::default()
        }));
        guest.post(8);
        let frame = datagram(MAC, IP, 9, 1000);
        let mut got_after = |lane: &mut dyn Lane, piece: &[u8], more| {
            let mut wire = wire.lock().expect("no panic");
            wire.arrive(piece);
            wire.received.back_mut().expect("just now").more = more;
            drop(wire);
            lane.poll(&mut Others::default()).expect("no fault");
            guest.got().len()
        };
        assert_eq!(got_after(&mut *lane, &frame, false), 1, "{placement:?}");
        assert_eq!(got_after(&mut *lane, &frame[..500], true), 0, "{placement:?}");
        lane.set_limits(&PortLimits::new(PortRates::default()));
        assert_eq!(got_after(&mut *lane, &frame[500..], false), 0, "{placement:?}");
        assert_eq!(got_after(&mut *lane, &frame, false), 1, "{placement:?}");
    }
}

#[test]
fn gso_packet_of_a_guest_with_a_queue_of_its_own_costs_its_segments() {
    let packets = Some(Rate {
        per_second: 1,
        burst: 50,
    });
    let from_guest = Rates { bits: None, packets };
    for placement in PLACEMENTS {
        let over = Over {
            ring: (256, 256),
            ..Over::new(placement, 512)
        };
        let (mut guest, mut lane, wire) = own_queue(over, Offloads::all());
        lane.set_limits(&PortLimits::new(PortRates {
            from_guest,
            ..PortRates::default()
        }));
        guest.send_gso([2; 6], MAC, 110, 1);
        guest.send(&datagram(MAC, IP, 1, 60));
        for _ in 0..10 {
            lane.poll(&mut Others::default()).expect("no fault");
        }
        assert_eq!(sent(&wire).len(), 110, "{placement:?}");
        assert_eq!(guest.counters.from_guest_limit_waits.get(), 1, "{placement:?}");
    }
}

#[test]
fn header_that_changes_meanwhile_leaves_a_queue_of_the_guests_own_as_it_was_checked() {
    for placement in PLACEMENTS {
        for (len, has_guard) in [(60, true), (1000, true), (1000, false)] {
            let (mut guest, mut lane, wire) = own_queue(Over::new(placement, 64), Offloads::NONE);
            let allow = "direction=from-guest action=allow source=192.0.2.10";
            let lines = [allow];
            let filter = rules(if has_guard { &[] } else { &lines });
            lane.set_guard(has_guard.then(guard).as_ref());
            drop(lane.set_filter(filter.for_a_lane(0)));
            let honest = datagram(MAC, IP, 53, len);
            let bytes = [&[0; HEADER as usize][..], &honest].concat();
            let addr = guest.memory.put(&bytes);
            // Rules know no MAC address.
            let other = if has_guard { [2, 0, 0, 0, 0, 2] } else { MAC };
            let _forger = forge(&guest, addr, [MAC, other]);
            let (mut count, begun) = (0, Instant::now());
            let counters = Arc::clone(&guest.counters);
            let refused = || match has_guard {
                true => counters
                    .from_guest_source_address
                    .get()
                    .min(counters.from_guest_ip_source.get()),
                false => counters.from_guest_filter.get(),
            };
            while count < 500 || refused() == 0 {
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "{count} sent, {} refused",
                    refused()
                );
                while guest.from_guest.take_used().is_some() {}
                for _ in 0..16 {
                    let buffer = Buffer::readable(addr, bytes.len() as u32);
                    guest.from_guest.add(&[buffer]).expect("room");
                }
                guest.from_guest.publish();
                (0..4).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
                for (frame, _) in wire.lock().expect("no panic").sent.drain(..) {
                    assert!(frame == honest, "{placement:?}: a frame that was not checked");
                    count += 1;
                }
            }
        }
    }
}
