//! One user that asks too much: the interface, the log and the places of others are left alone.

use crate::common;

use std::time::{Duration, Instant};

use common::{POLICY, World, lessee, raw::Raw, refusal, soon, take, wanted};
use rustix::process::Signal;
use steer::ModeRequest;
use steward_client::listing;
use steward_protocol::{Answer, Reason, Refusal, Request, Wanted};
use testkit::{assert_has, require, wait};

fn in_mode(mode: ModeRequest) -> Wanted {
    Wanted { mode, ..wanted(0, 1) }
}

fn report(answer: Answer) -> Refusal {
    match answer {
        Answer::Refused(refusal) => refusal,
        other => panic!("it should have been refused: {other:?}"),
    }
}

#[test]
fn refused_leases_in_a_storm_never_touch_the_interface_and_an_honest_lease_goes_on() {
    require!(Root);
    let policy = format!("{POLICY}[[allow]]\nuser = 4321\ninterface = \"nic0\"\nqueues = \"all\"\n");
    let world = World::lingering(&policy, "60");
    let mut storm: Vec<Raw> = (0..16)
        .map(|_| Raw::connect_as(&world.socket(), 4321, 4321))
        .collect();
    // A queue that does not exist; one that the policy has not; an interface that is not there.
    let bad = [wanted(7, 1), wanted(255, 1), common::wanted_of("nowhere0", 0, 1)];
    let round = |storm: &mut Vec<Raw>| {
        for (connection, wanted) in storm.iter_mut().zip(bad.iter().cycle()) {
            report(connection.ask(&Request::Lease(wanted.clone())));
        }
    };
    (0..10).for_each(|_| round(&mut storm));
    assert_eq!((world.attached(0), world.program()), (0, None));
    let begun = Instant::now();
    let lease = world.lease(0, 1).expect("allowed");
    println!("an honest lease beside 16 connections: {:?}", begun.elapsed());
    let program = world.program();
    (0..10).for_each(|_| round(&mut storm));
    let in_use = report(storm[0].ask(&Request::Lease(wanted(0, 1))));
    assert_eq!(in_use.reason, Reason::Taken);
    assert_eq!((world.attached(1), world.program()), (1, program));
    lease.counters(0, soon()).expect("ours");
    // What one user may cause to be logged: some lines, and a few more while time passes.
    let lines = world.steward.said().matches("refused: ").count();
    assert!((1..30).contains(&lines), "{lines} lines");
}

#[test]
fn program_stays_a_while_for_the_next_lease() {
    require!(Root);
    let world = World::lingering(POLICY, "1");
    drop(world.lease(0, 2).expect("allowed"));
    world.await_no_program();
    let world = World::lingering(POLICY, "60");
    drop(world.lease(0, 2).expect("allowed"));
    let program = world.program();
    assert!(program.is_some());
    let again = || world.lease(0, 2).ok();
    // The queues are taken back at once.
    let _again = wait::until_some(wait::SOON, again).expect("free");
    assert_eq!((world.program(), world.attached(1)), (program, 1));
}

/// How often one user may have had a program attached since then: four times, and once more in each five seconds.
fn most_attached(since: Instant) -> usize {
    4 + since.elapsed().as_secs() as usize / 5
}

#[test]
fn program_in_another_mode_is_attached_for_a_lease_and_not_again_and_again() {
    require!(Root);
    let world = World::lingering(POLICY, "60");
    let mut modes = [ModeRequest::Skb, ModeRequest::Native].into_iter().cycle();
    let (mut attached, begun) = (0, Instant::now());
    let refused = loop {
        let wanted = in_mode(modes.next().expect("endless"));
        match take(&world.socket(), &wanted) {
            Ok(_) => attached += 1,
            Err(steward_client::LeaseError::Refused(refusal)) if refusal.reason == Reason::Taken => {
                std::thread::sleep(Duration::from_millis(10));
                modes.next();
            }
            Err(error) => break refusal::<()>(Err(error)),
        }
        assert!(attached < 40, "no end");
    };
    assert_eq!(refused.reason, Reason::Limit);
    assert_has(&refused.text, &["user 0 had the program attached to nic0"]);
    assert_has(&refused.text, &["try again in "]);
    let attached = world.attached(4);
    assert!((4..=most_attached(begun)).contains(&attached), "{attached}");
}

#[test]
fn mode_that_an_interface_refuses_is_not_tried_again_and_again() {
    require!(Root);
    // A macvlan has no native mode.
    let policy =
        POLICY.replace("nic0", "mv0") + "[[allow]]\nuser = 4321\ninterface = \"mv0\"\nqueues = \"all\"\n";
    let world = World::lingering(&policy, "60");
    world
        .veth
        .near
        .ip(&["link add link", testkit::VethPair::NIC, "name mv0 type macvlan"]);
    let wanted = Wanted {
        mode: ModeRequest::Native,
        ..common::wanted_of("mv0", 0, 1)
    };
    let begun = Instant::now();
    let reasons: Vec<Reason> = (0..8)
        .map(|_| refusal(take(&world.socket(), &wanted)).reason)
        .collect();
    let is_tried = |reason: &&Reason| **reason == Reason::Program;
    let tried = reasons.iter().filter(is_tried).count();
    let is_known = |reason: &Reason| [Reason::Program, Reason::Limit].contains(reason);
    assert!(
        reasons.iter().all(is_known) && (4..=most_attached(begun)).contains(&tried),
        "{reasons:?}"
    );
    // Another user is told the reason itself.
    let mut other = Raw::connect_as(&world.socket(), 4321, 4321);
    assert_eq!(report(other.ask(&Request::Lease(wanted))).reason, Reason::Program);
}

#[test]
fn program_without_leases_outlives_a_crash_for_the_next_lease_and_no_orderly_end() {
    require!(Root);
    let mut world = World::kept_lingering(POLICY, "60");
    drop(world.lease(0, 1).expect("allowed"));
    let program = world.program();
    world.restart_after(Signal::KILL);
    let lease = wait::until_some(wait::SOON, || world.lease(0, 1).ok()).expect("free");
    assert_eq!((world.program(), world.attached(0)), (program, 0));
    drop(lease);
    world.await_that(|| listing::leases(&world.socket()).is_ok_and(|all| all.is_empty()));
    world.end_steward(Signal::TERM);
    world.await_nothing();
}

#[test]
fn numbers_of_one_group_share_the_places_of_its_rule() {
    require!(Root);
    let world = World::with(
        2,
        &format!("{POLICY}[[allow]]\ngroup = 4242\ninterface = \"nic0\"\nqueues = \"0-1\"\n"),
    );
    // As many as queues, and sixteen who only ask.
    let _those: Vec<Raw> = (0..18)
        .map(|uid| Raw::connect_as(&world.socket(), 100_000 + uid, 4242))
        .collect();
    let one_more = Raw::connect_as(&world.socket(), 200_000, 4242);
    let refusal = one_more.refusal(wait::SOON);
    assert_eq!(refusal.reason, Reason::Limit, "{refusal}");
    assert_has(&refusal.text, &["no room for user 200000"]);
    // Who comes by another rule has its own.
    world.lease(0, 1).expect("allowed");
}

#[test]
fn connection_that_asks_for_no_lease_ends_and_one_with_a_lease_stays() {
    require!(Root);
    let world = World::new();
    let lease = world.lease(0, 1).expect("allowed");
    let idle = Raw::connect(&world.socket());
    let refusal = idle.refusal(3 * wait::SOON);
    assert_eq!(refusal.reason, Reason::Limit, "{refusal}");
    assert!(idle.is_over(wait::SOON));
    lease.counters(0, soon()).expect("ours");
}

#[test]
fn lessee_comes_back_though_others_of_its_user_have_taken_all_connections() {
    require!(Root);
    let policy = format!("[limits]\nconnections = 5\n{POLICY}");
    let mut world = World::kept_for(&policy, "60");
    let lease = world.lease(0, 1).expect("allowed");
    world.restart_after(Signal::KILL);
    let mut flood = lessee::spawn(&world, "storm::child_takes_all_connections", 0);
    flood.await_text("all taken");
    common::await_lease(&lease, "back", |lease| !lease.is_away());
    lease.counters(0, soon()).expect("ours");
}

/// As root, which the other lessee is, too: no privilege is given up.
#[test]
#[ignore = "run in a process of its own"]
fn child_takes_all_connections() {
    let mut taken: Vec<Raw> = (0..5).map(|_| Raw::connect(&lessee::socket())).collect();
    println!("all taken");
    // Each that ends is replaced at once.
    loop {
        taken.retain(|connection| !connection.is_over(Duration::ZERO));
        taken.resize_with(5, || Raw::connect(&lessee::socket()));
        std::thread::sleep(Duration::from_millis(5));
    }
}
