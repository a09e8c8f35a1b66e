//! Lessees that do harm with what they have: descriptors, sockets, their own connection; and a damaged journal.

use crate::common;

use std::fs;
use std::os::fd::AsFd;
use std::time::Duration;

use common::hostile::{BIND, assert_serves, leased, limit_descriptors, memfd, registration};
use common::raw::Raw;
use common::{World, lessee, wanted};
use rustix::process::Signal;
use steward_protocol::{Answer, Request};
use testkit::{frame, require, soak, wait};

/// A message may carry its own connection: then the kernel does not close it with the process.
#[test]
fn lease_ends_with_its_process_though_a_message_has_its_connection() {
    require!(Root);
    let world = World::new();
    let mut running = lessee::spawn(&world, "hostile_lessee::child_leaves_its_connection_in_itself", 0);
    running.await_text("waits for 60 s");
    running.wait(wait::SOON);
    let freed = || {
        let lease = world.lease(0, 1).ok()?;
        lessee::Echo::try_open(&lease, 0).ok()
    };
    let echo = wait::until_some(wait::SOON / 2, freed);
    assert!(echo.is_some(), "{}", world.steward);
    assert_serves(&world);
}

/// The queue is not free while somebody has the socket, which goes along, too.
#[test]
#[ignore = "run in a process of its own"]
fn child_leaves_its_connection_in_itself() {
    let mut connection = Raw::connect(&lessee::socket());
    connection.lease(wanted(0, 1));
    let memory = memfd(2 << 20);
    connection.send_with(&registration(0, 1).encode(70), &memory, 1);
    assert_eq!(connection.receive(wait::SOON), Some((70, Answer::Done)));
    let socket = connection.ask_for_descriptor(&BIND);
    let wait = Request::Await {
        queue: 0,
        wait_ms: 60_000,
    };
    for serial in 71..75 {
        connection.send(&wait.encode(serial)).expect("room");
    }
    let files = [connection.socket.as_fd(), socket.as_fd()];
    let all = registration(0, 2).encode(75);
    connection.try_send_all(&all, &files).expect("room");
    println!("waits for 60 s");
}

#[test]
fn socket_that_outlives_its_lease_gets_no_frames() {
    require!(Root);
    let world = World::of_one_queue();
    let first = world.lease(0, 1).expect("free");
    let mut kept = lessee::Echo::open(&first, 0);
    let sent = frame::plain(100, 1);
    world.wire.try_send(&sent).expect("it is up");
    kept.run(wait::SOON);
    assert_eq!(world.wire.receive(wait::SOON), Some(sent));
    drop(first);
    let second = wait::until_some(wait::SOON, || world.lease(0, 1).ok()).expect("free");
    let umem = lessee::umem();
    let config = xsk::SocketConfig {
        bind_timeout: Duration::from_millis(50),
        ..lessee::config(&second.facts(), 0)
    };
    let prepared = second.register(&umem, &config).expect("a next socket");
    let refused = second.bind(prepared).expect_err("the queue has a socket");
    assert!(refused.to_string().contains("EBUSY"), "{refused}");
    world.wire.try_send(&frame::plain(100, 2)).expect("it is up");
    kept.run(Duration::from_millis(100));
    assert_eq!(world.wire.receive(Duration::from_millis(100)), None);
    drop(kept);
    let mut echo = lessee::Echo::open(&second, 0);
    world.wire.try_send(&frame::plain(100, 3)).expect("it is up");
    echo.run(wait::SOON);
    assert_eq!(world.wire.receive(wait::SOON), Some(frame::plain(100, 3)));
}

#[test]
fn lease_that_could_not_be_recorded_is_recorded_as_soon_as_that_is_possible() {
    require!(Root);
    let mut world = World::kept();
    let token = [7; 16];
    let mut connection = leased(&world);
    limit_descriptors(&world, None);
    assert_eq!(connection.ask(&Request::Keep { token }), Answer::Done);
    world.steward.await_text("may not outlive this process");
    limit_descriptors(&world, Some(1024));
    assert!(matches!(connection.ask(&Request::Facts), Answer::Facts(_)));
    let path = world.dir.path().join("state/state.toml");
    let is_recorded = || fs::read_to_string(&path).is_ok_and(|text| text.contains("token"));
    assert!(wait::until(wait::SOON, is_recorded), "{}", world.steward);
    world.restart_after(Signal::KILL);
    let mut connection = Raw::connect(&world.socket());
    assert!(matches!(
        connection.ask(&Request::Resume { token }),
        Answer::Facts(_)
    ));
    drop(connection);
    world.await_nothing();
}

#[test]
fn journal_that_is_cut_at_any_byte_costs_leases_and_leaves_nothing() {
    require!(Root);
    let mut world = World::kept();
    let path = world.dir.path().join("state/state.toml");
    let mut cuts = None;
    loop {
        let lease = world.lease(0, 1).expect("allowed");
        world.end_steward(Signal::KILL);
        let text = fs::read_to_string(&path).expect("records");
        let cuts = cuts.get_or_insert_with(|| {
            // Lines are short but for one.
            let step = text.len() / soak::count(24, text.len());
            // Without the last line's end it is whole.
            (0..text.len() - 1).step_by(step.max(1))
        });
        let Some(cut) = cuts.next() else {
            break;
        };
        fs::write(&path, &text[..cut]).expect("ours");
        world.restart();
        drop(lease);
        world.await_nothing();
        drop(world.lease(0, 1).unwrap_or_else(|error| panic!("{cut}: {error}")));
        world.await_nothing();
    }
}
