//! Lanes of guests that have a cable, or a queue, to themselves, and filter rules.

use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use virtqueue::QueueFeatures;

use crate::lane::{Lane, Work};
use crate::policy::filter::{Filter, PortFilter, Rule};
use crate::policy::guard::Guard;
use crate::port_lane::PortLane;
use crate::tests::test_guest::Memory;
use crate::tests::test_nic::Over;
use crate::tests::test_port::Port;
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use device::pair::QueuePair;
use model::config::Placement;

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
