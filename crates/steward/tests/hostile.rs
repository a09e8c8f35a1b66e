//! Peers that do not keep to the protocol, or use it to do harm: each loses its own connection, and others notice nothing.

mod common;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::raw::Raw;
use common::{POLICY, World, soon, take, wanted};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use steward::client::LeaseError;
use steward::protocol::{Answer, MESSAGE_MAX, Reason, Request};
use testkit::{require, wait};

/// Another holder gets its answers.
#[track_caller]
fn assert_serves(world: &World) {
    // A lease that was dropped lasts while a process that another test starts has its connection, from fork to exec.
    let free = || match world.lease(1, 1) {
        Err(LeaseError::Refused(refusal)) if refusal.reason == Reason::Taken => None,
        leased => Some(leased),
    };
    let (lease, sockets) = wait::until_some(wait::SOON, free)
        .expect("free")
        .unwrap_or_else(|error| panic!("{error}: {}", world.steward));
    assert_eq!(sockets.len(), 1);
    lease.counters(1, soon()).expect("ours");
}

/// How often others must get their answers in a flood.
const FLOODS: usize = 30;

/// The connection is closed with a word about it.
#[track_caller]
fn assert_closed(connection: &Raw) {
    let said = connection.receive(wait::SOON);
    let Some((0, Answer::Refused(refusal))) = said else {
        panic!("{said:?}")
    };
    assert_eq!(refusal.reason, Reason::Malformed, "{refusal}");
    assert!(connection.is_over(wait::SOON));
}

#[test]
fn messages_that_are_cut_too_long_or_unknown_close_their_connection() {
    require!(Root);
    let world = World::new();
    let descriptors = world.descriptors();
    let valid = Request::Lease(wanted(0, 1)).encode(1);
    let changed = |at: usize, value: u8| {
        let mut bytes = valid.clone();
        bytes[at] = value;
        bytes
    };
    let messages = [
        valid[..7].to_vec(),
        valid[..20].to_vec(),
        [&valid[..], &[0]].concat(),
        vec![0; MESSAGE_MAX],
        vec![0xff; MESSAGE_MAX + 1],
        vec![1; 60_000],
        // Another version.
        changed(0, valid[0] + 1),
        changed(2, 99),
        changed(4, 0),
        changed(8, b'/'),
    ];
    for bytes in messages {
        let connection = Raw::connect(&world.socket());
        connection.send(&bytes).expect("room");
        assert_closed(&connection);
    }
    // An empty message is indistinguishable from the end of the connection.
    let connection = Raw::connect(&world.socket());
    connection.send(&[]).expect("room");
    assert!(connection.is_over(wait::SOON));
    assert_serves(&world);
    world.await_descriptors(descriptors);
}

#[test]
fn descriptors_that_nobody_asked_for_close_the_connection_and_stay_nowhere() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let file = std::fs::File::open("/dev/null").expect("there");
    for count in [1, 253] {
        let connection = Raw::connect(&world.socket());
        connection.send_with(&Request::Facts.encode(1), &file, count);
        assert_closed(&connection);
        // With a connection that has a lease, too.
        let mut connection = Raw::connect(&world.socket());
        assert!(matches!(
            connection.ask(&Request::Lease(wanted(0, 1))),
            Answer::Facts(_)
        ));
        connection.send_with(&Request::Facts.encode(9), &file, count);
        assert_closed(&connection);
    }
    world.await_no_program();
    world.await_descriptors(before);
    assert_serves(&world);
}

#[test]
fn requests_out_of_turn_are_refused_and_do_no_harm() {
    require!(Root);
    let world = World::new();
    let mut connection = Raw::connect(&world.socket());
    let reason = |answer: Answer| match answer {
        Answer::Refused(refusal) => Some(refusal.reason),
        _ => None,
    };
    for request in [
        Request::Facts,
        Request::Socket { queue: 0 },
        Request::Counters { queue: 0 },
        Request::Memlock { bytes: 1 },
    ] {
        assert_eq!(
            reason(connection.ask(&request)),
            Some(Reason::Lease),
            "{request:?}"
        );
    }
    assert_eq!(reason(connection.ask(&Request::Lease(wanted(0, 1)))), None);
    assert_eq!(
        reason(connection.ask(&Request::Lease(wanted(1, 1)))),
        Some(Reason::Lease)
    );
    assert_eq!(
        reason(connection.ask(&Request::Deactivate { queue: u32::MAX })),
        Some(Reason::Lease)
    );
    assert_eq!(reason(connection.ask(&Request::Facts)), None);
}

#[test]
fn flood_of_requests_does_not_keep_others_from_their_answers() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let mut floods: Vec<Raw> = (0..8).map(|_| Raw::connect(&world.socket())).collect();
    assert!(matches!(
        floods[0].ask(&Request::Lease(wanted(0, 1))),
        Answer::Facts(_)
    ));
    assert_serves(&world);
    let quiet = world.descriptors();
    let socket = Request::Socket { queue: 0 }.encode(5);
    // Nobody reads what they are answered: sockets for the one, refusals for the others.
    for _ in 0..FLOODS {
        floods
            .iter()
            .for_each(|flood| while flood.send(&socket).is_ok() {});
        assert_serves(&world);
    }
    // What waits for the one that does not read is little, and nothing of it stays with the steward.
    // The last lease of those that were served may be under way to its end.
    let few = wait::until(wait::SOON, || world.descriptors() <= quiet + 2);
    assert!(few, "{quiet} descriptors became {}", world.descriptors());
    drop(floods);
    world.await_descriptors(before);
    world.await_no_program();
}

#[test]
fn slow_reader_gets_all_its_answers_in_order_and_the_last_state() {
    require!(Root);
    let world = World::new();
    let mut connection = Raw::connect(&world.socket());
    assert!(matches!(
        connection.ask(&Request::Lease(wanted(0, 1))),
        Answer::Facts(_)
    ));
    let mut asked = 1;
    while connection
        .send(&Request::Counters { queue: 0 }.encode(asked + 1))
        .is_ok()
    {
        asked += 1;
    }
    assert!(asked > 20);
    for mtu in ["1400", "1300", "1200"] {
        world.veth.near.ip(&["link", "set", "nic0", "mtu", mtu]);
    }
    wait::a_moment();
    assert_serves(&world);
    let (mut next, mut mtu) = (2, 1500);
    while next <= asked || mtu != 1200 {
        match connection.receive(wait::SOON) {
            Some((0, Answer::Changed(facts))) => mtu = facts.mtu,
            Some((serial, Answer::Counters(_))) => {
                assert_eq!(serial, next);
                next += 1;
            }
            other => panic!("{other:?} after {next} of {asked}, MTU {mtu}"),
        }
    }
}

#[test]
fn connections_are_limited_for_each_user_and_free_again_when_closed() {
    require!(Root);
    let world = World::with(2, &format!("[limits]\nconnections = 5\n{POLICY}"));
    let before = world.descriptors();
    for _ in 0..3 {
        let connections: Vec<Raw> = (0..5).map(|_| Raw::connect(&world.socket())).collect();
        wait::a_moment();
        let sixth = Raw::connect(&world.socket());
        let said = sixth.receive(wait::SOON);
        let Some((0, Answer::Refused(refusal))) = said else {
            panic!("{said:?}")
        };
        assert_eq!(refusal.reason, Reason::Limit);
        assert!(refusal.text.contains("`connections`"), "{refusal}");
        assert!(sixth.is_over(wait::SOON));
        drop(connections);
        world.await_descriptors(before);
    }
    assert_serves(&world);
}

#[test]
fn steward_without_descriptors_serves_on_and_accepts_again_when_it_has_some() {
    require!(Root);
    let world = World::new();
    let (lease, _sockets) = world.lease(0, 1).expect("allowed");
    let set = |count: usize| {
        let pid = world.steward.pid().to_string();
        let limit = format!("--nofile={count}:");
        let done = Command::new("prlimit").args(["--pid", &pid, &limit]).status();
        assert!(done.expect("prlimit(1)").success());
    };
    // The lowest number that is not in use.
    let used = |number: usize| Path::new(&format!("/proc/{}/fd/{number}", world.steward.pid())).is_symlink();
    set((0..).find(|&number| !used(number)).expect("few are"));
    let waiting = Raw::connect(&world.socket());
    wait::a_moment();
    // No socket can be made, and it says so; what needs none works.
    let refusal = common::refusal(lease.socket(0));
    assert_eq!(refusal.reason, Reason::Kernel, "{refusal}");
    lease.deactivate(0).expect("ours");
    set(1024);
    lease.socket(0).expect("ours");
    drop(waiting);
    assert_serves(&world);
}

/// Descriptors that a process has sent and nobody has taken count for its user, and no process of that user may send more while
/// they are more than it may have open.
#[test]
fn descriptors_on_their_way_between_others_cost_a_request_and_not_the_lease() {
    require!(Root);
    let world = World::new();
    let (lease, _sockets) = world.lease(0, 1).expect("allowed");
    let (sender, receiver) = Raw::pair();
    let file = std::fs::File::open("/dev/null").expect("there");
    (0..3).for_each(|_| sender.send_with(&[0], &file, 253));
    let pid = world.steward.pid().to_string();
    let done = Command::new("prlimit")
        .args(["--pid", &pid, "--nofile=500:"])
        .status();
    assert!(done.expect("prlimit(1)").success());
    match lease.socket(0) {
        // With CAP_SYS_RESOURCE the steward may.
        Ok(_) => {}
        Err(LeaseError::Refused(refusal)) => {
            assert_eq!(refusal.reason, Reason::Kernel, "{refusal}");
            assert!(refusal.text.contains("on their way"), "{refusal}");
        }
        Err(error) => panic!("the lease is lost: {error}"),
    }
    drop((sender, receiver));
    let again = wait::until(wait::SOON, || lease.socket(0).is_ok());
    assert!(again, "{}", world.steward);
    assert_serves(&world);
}

#[test]
fn user_without_a_rule_is_turned_away_at_the_door() {
    require!(Root);
    let world = World::with(
        1,
        "[[allow]]\nuser = HOLDER\ninterface = \"nic0\"\nqueues = \"all\"\n",
    );
    let refusal = common::refusal(take(&world.socket(), &wanted(0, 1)));
    assert_eq!(refusal.reason, Reason::NotAllowed);
    assert!(refusal.text.contains("user 0"), "{refusal}");
}

#[test]
fn any_messages_in_any_order_leave_the_steward_serving() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let kind = prop_oneof![8 => 1u16..8, 1 => any::<u16>()];
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        Just(Request::Lease(wanted(0, 1)).encode(1)[8..].to_vec()),
        (0u32..3).prop_map(|queue| queue.to_ne_bytes().to_vec()),
        (0u32..3, prop_oneof![Just(0u32), Just(12), Just(20)], 0u32..70_000)
            .prop_map(|(queue, header, limit)| [queue, header, limit].map(u32::to_ne_bytes).concat()),
    ];
    let message = (kind, 0u32..4, body).prop_map(|(kind, serial, body)| {
        let head = [1u16.to_ne_bytes(), kind.to_ne_bytes()].concat();
        [head, serial.to_ne_bytes().to_vec(), body].concat()
    });
    let mut runner = TestRunner::new(Config {
        cases: 150,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&prop::collection::vec(message, 1..20), |messages| {
        let connection = Raw::connect(&world.socket());
        for bytes in messages {
            if connection.send(&bytes).is_err() {
                break;
            }
        }
        let _ = connection.receive(Duration::from_millis(5));
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}: {}", world.steward));
    assert_serves(&world);
    world.await_descriptors(before);
    world.await_no_program();
}
