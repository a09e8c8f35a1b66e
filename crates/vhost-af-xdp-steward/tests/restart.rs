//! Stewards that end, die and come back while lessees go on.

use crate::common;

use std::fs;
use std::time::{Duration, Instant};

use common::{World, await_lease, bare, lessee, raw::Raw, soon, take};
use rustix::process::Signal;
use steward_client::LeaseError;
use steward_protocol::{Answer, Reason, Request};
use testkit::{assert_has, assert_soon, frame, procfs, require, wait};

/// Every frame comes back, for that long.
#[track_caller]
fn assert_echoes_for(world: &World, time: Duration) {
    let until = Instant::now() + time;
    let mut seed = 0u8;
    while Instant::now() < until {
        seed = seed.wrapping_add(1);
        assert!(world.echo(&frame::plain(100, seed), wait::SOON), "no echo");
    }
}

#[test]
fn frames_go_on_without_a_steward_and_all_requests_work_with_the_next() {
    require!(Root);
    let mut world = World::kept_for(common::POLICY, "10");
    let mut running = lessee::start(&world, "restart::child_echoes_and_asks", 0);
    world.await_echo();
    let program = world.program();
    for signal in [Signal::TERM, Signal::KILL, Signal::TERM, Signal::KILL] {
        world.end_steward(signal);
        assert_echoes_for(&world, Duration::from_millis(150));
        assert_eq!(world.program(), program);
        let report = running.said().matches("all requests work").count();
        world.restart();
        assert_soon!(
            running.said().matches("all requests work").count() > report + 1,
            "{running}"
        );
        assert_echoes_for(&world, Duration::from_millis(50));
        assert_eq!(world.program(), program);
    }
    // Past the grace period it is a lease like any other, and ends like one.
    std::thread::sleep(Duration::from_millis(10_300));
    assert_echoes_for(&world, Duration::from_millis(50));
    running.signal(Signal::KILL);
    running.wait(wait::SOON);
    world.await_nothing();
}

/// Uses its lease as far as that goes without a second socket: that would end the one in use.
#[test]
#[ignore = "run in a process of its own"]
fn child_echoes_and_asks() {
    lessee::give_up_privileges();
    let lease = lessee::lease();
    let mut echo = lessee::Echo::open(&lease, lessee::queue());
    let conf = bare(1518);
    println!("echoing");
    let mut asked = Instant::now();
    loop {
        echo.run(Duration::from_millis(5));
        if let Err(error) = lease.take_changes() {
            println!("lease over: {error}");
            return;
        }
        if asked.elapsed() < Duration::from_millis(10) {
            continue;
        }
        asked = Instant::now();
        let counted = lease.counters(0, soon()).map(|counters| counters.redirected > 0);
        match (
            lease.activate(0, conf),
            counted,
            lessee::register(&lease, lessee::queue()),
        ) {
            (Ok(()), Ok(true), Ok(_)) => println!("all requests work"),
            (Err(LeaseError::Away { .. }), ..)
            | (_, Err(LeaseError::Away { .. }), _)
            | (.., Err(LeaseError::Away { .. })) => {}
            other => println!("wrong: {other:?}"),
        }
    }
}

#[test]
fn queue_is_handed_to_a_successor_over_a_restart() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    let first = lessee::Echo::open(&lease, 0);
    // Registered with one steward, bound by the next, which does not know of it.
    let (umem, config) = (lessee::umem(), lessee::config(&lease.facts(), 0));
    let prepared = lease.register(&umem, &config).expect("a successor");
    world.end_steward(Signal::KILL);
    assert!(matches!(
        lessee::register(&lease, 0),
        Err(LeaseError::Away { .. })
    ));
    assert!(lease.is_away());
    world.restart();
    await_lease(&lease, "back", |lease| !lease.is_away());
    drop(first);
    let mut second =
        lessee::Echo::of_registered(&lease, prepared, 0).unwrap_or_else(|error| panic!("{error}"));
    world.wire.try_send(&frame::plain(100, 3)).expect("sent");
    let echo = wait::until_some(wait::SOON, || {
        second.run(Duration::from_millis(10));
        world.wire.receive(Duration::ZERO)
    });
    assert_eq!(echo, Some(frame::plain(100, 3)));
}

#[test]
fn queues_are_kept_while_their_lessee_may_come_back() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    world.restart_after(Signal::KILL);
    let mut other = lessee::spawn(&world, "restart::child_asks_for_a_lease", 0);
    other.await_text("Taken");
    await_lease(&lease, "back", |lease| !lease.is_away());
    assert_eq!(common::refusal(world.lease(0, 1)).reason, Reason::Taken);
    drop(lease);
    world.await_nothing();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_asks_for_a_lease() {
    let taken = take(&lessee::socket(), &common::wanted(lessee::queue(), 1));
    println!("{:?}", common::refusal(taken).reason);
}

#[test]
fn queues_of_a_lessee_that_does_not_come_back_are_taken_back() {
    require!(Root);
    let mut world = World::kept_for(common::POLICY, "0.5");
    // It lives, but does not look after its lease.
    let lease = world.lease(0, 1).expect("allowed");
    world.restart_after(Signal::KILL);
    world.await_nothing();
    assert!(world.steward.said().contains("has not come back"));
    let over = wait::until_some(wait::SOON, || lease.take_changes().err());
    let over = over.expect("its lease is over").to_string();
    assert_has(&over, &["no lease waits for this lessee"]);
    world.lease(0, 1).expect("free");
}

#[test]
fn lessee_that_asks_again_instead_of_coming_back_gets_its_queues() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    world.end_steward(Signal::KILL);
    drop(lease);
    world.restart();
    let _lease = world.lease(0, 1).expect("its own process had it");
}

#[test]
fn queues_of_a_lessee_that_died_meanwhile_are_free_at_once() {
    require!(Root);
    let mut world = World::kept();
    let mut running = lessee::start(&world, "restart::child_echoes_and_asks", 0);
    world.end_steward(Signal::KILL);
    running.signal(Signal::KILL);
    running.wait(wait::SOON);
    world.restart();
    world.lease(0, 1).expect("nobody can come back to it");
    world.await_nothing();
}

#[test]
fn policy_is_asked_again_when_a_lessee_comes_back() {
    require!(Root);
    let mut world = World::kept();
    let mut running = lessee::start(&world, "restart::child_echoes_and_asks", 0);
    world.end_steward(Signal::KILL);
    let policy = common::POLICY.replace("\"0-1\"", "\"1\"");
    common::write_policy(&world.dir, &policy);
    world.restart();
    running.await_text("lease over");
    running.wait(wait::SOON);
    assert!(world.steward.said().contains("may not lease queue 0"));
    world.await_nothing();
}

#[test]
fn token_of_another_is_of_no_use() {
    require!(Root);
    let mut world = World::kept();
    let mut raw = Raw::connect(&world.socket());
    let token = [7; 16];
    let Answer::Facts(facts) = raw.ask(&Request::Lease(common::wanted(0, 1))) else {
        panic!("leased")
    };
    assert_eq!(raw.ask(&Request::Keep { token }), Answer::Done);
    let refused =
        |answer: Answer| matches!(answer, Answer::Refused(refusal) if refusal.reason == Reason::Lease);
    assert!(refused(raw.ask(&Request::Keep { token: [8; 16] })), "once");
    // While its lessee is connected a token opens nothing, nor is there a second lease for the lessee.
    assert!(refused(
        Raw::connect(&world.socket()).ask(&Request::Resume { token })
    ));
    assert!(refused(raw.ask(&Request::Resume { token })));
    world.restart_after(Signal::KILL);
    let mut other = Raw::connect(&world.socket());
    assert!(refused(other.ask(&Request::Resume { token: [8; 16] })));
    assert!(refused(other.ask(&Request::Facts)));
    // Another user who has learned it.
    let mut running = lessee::spawn(&world, "restart::child_tries_a_token", 0);
    running.await_text("refused");
    assert_eq!(other.ask(&Request::Resume { token }), Answer::Facts(facts));
    // Once.
    assert!(refused(
        Raw::connect(&world.socket()).ask(&Request::Resume { token })
    ));
}

#[test]
#[ignore = "run in a process of its own"]
fn child_tries_a_token() {
    lessee::give_up_privileges();
    let answer = Raw::connect(&lessee::socket()).ask(&Request::Resume { token: [7; 16] });
    println!(
        "{}",
        if matches!(answer, Answer::Refused(_)) {
            "refused"
        } else {
            "given"
        }
    );
}

#[test]
fn interface_that_went_while_the_steward_was_away_is_found_gone_and_leased_again() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    let before = lease.facts();
    world.end_steward(Signal::KILL);
    world.veth.near.ip(&["link", "delete", testkit::VethPair::NIC]);
    world.restart();
    await_lease(&lease, "gone", |lease| {
        lease.facts().mode.is_none() && !lease.is_away()
    });
    world.veth.join(1, 1500);
    await_lease(&lease, "there", |lease| lease.facts().mode.is_some());
    assert_ne!(lease.facts().generation, before.generation);
    // And gone and back again, all while it is away.
    let before = lease.facts();
    world.end_steward(Signal::TERM);
    world.veth.near.ip(&["link", "delete", testkit::VethPair::NIC]);
    world.veth.join(1, 1500);
    world.restart();
    await_lease(&lease, "there again", |lease| {
        lease.facts().mode.is_some() && lease.facts().generation != before.generation
    });
    drop(lease);
    world.await_nothing();
}

#[test]
fn program_that_cannot_be_taken_over_is_replaced_and_the_lessee_is_told() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    let before = lease.facts();
    world.end_steward(Signal::KILL);
    // As one of a version with other maps.
    let pinned = world.bpffs.as_ref().expect("kept").pinned();
    let counts = pinned
        .iter()
        .find(|path| path.ends_with("counts"))
        .expect("pinned");
    let sockets = pinned
        .iter()
        .find(|path| path.ends_with("sockets"))
        .expect("pinned");
    fs::remove_file(counts).expect("ours");
    fs::rename(sockets, counts).expect("one file system");
    world.restart();
    await_lease(&lease, "another program", |lease| {
        !lease.is_away() && lease.facts().generation != before.generation
    });
    let facts = lease.facts();
    assert_ne!(facts.program, before.program);
    assert_eq!(world.program(), Some(facts.program));
    let _echo = lessee::Echo::open(&lease, 0);
    drop(lease);
    world.await_nothing();
}

#[test]
fn records_that_are_damaged_or_of_another_boot_are_not_used_and_everything_is_taken_back() {
    require!(Root);
    let mut world = World::kept();
    let path = world.dir.path().join("state/state.toml");
    let other_boot = |text: String| {
        let lines = text.lines().map(|line| match line.starts_with("boot = ") {
            true => "boot = \"another\"\n".to_owned(),
            false => format!("{line}\n"),
        });
        lines.collect()
    };
    let damages: [&dyn Fn(String) -> String; 4] = [
        &|text| text.replace('=', "-"),
        &|text| text[..text.len() / 2].to_owned(),
        &|text| text.replace("wanted = \"", "wanted = \"zz"),
        &other_boot,
    ];
    for damage in damages {
        let lease = world.lease(0, 1).expect("allowed");
        world.end_steward(Signal::KILL);
        let text = fs::read_to_string(&path).expect("records");
        fs::write(&path, damage(text)).expect("ours");
        world.restart();
        world.await_no_program();
        drop(lease);
        let lease = world.lease(0, 1).expect("free");
        drop(lease);
        world.await_nothing();
    }
}

#[test]
fn listener_is_given_to_the_service_manager_and_taken_from_it() {
    require!(Root);
    let mut world = World::kept();
    world.end_steward(Signal::TERM);
    let notify = world.dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&notify).expect("a socket");
    let mut command = world.command();
    command.env("NOTIFY_SOCKET", notify);
    world.start_as(command);
    let (name, listener) = common::raw::receive_any_stored(&manager);
    assert_eq!(name, "listener");
    world.steward.await_text("ready");
    let lease = world.lease(0, 1).expect("allowed");
    world.end_steward(Signal::TERM);
    // Nobody is refused meanwhile: who connects waits.
    assert!(world.socket().exists());
    lease.take_changes().expect("it waits");
    world.start_as(world.command_with_listener(&listener));
    await_lease(&lease, "back", |lease| !lease.is_away());
}

#[test]
fn stations_stay_accepted_while_the_service_manager_waits_for_the_next_steward() {
    require!(Root);
    const OURS: &str = "02:00:00:00:00:aa";
    let mut world = World::kept();
    world.end_steward(Signal::TERM);
    let policy =
        format!("[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nmacs = [\"{OURS}\"]\n");
    common::write_policy(&world.dir, &policy);
    let notify = world.dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&notify).expect("a socket");
    let mut command = world.command();
    command.env("NOTIFY_SOCKET", &notify);
    world.start_as(command);
    let (_name, listener) = common::raw::receive_any_stored(&manager);
    drop(listener);
    world.steward.await_text("ready");
    let accepts = |world: &World| world.accepts(OURS);
    let wanted = common::filtered(0, &[[2, 0, 0, 0, 0, 0xaa]], &[]);
    let lease = take(&world.socket(), &wanted).expect("allowed");
    let (name, stations) = common::raw::receive_any_stored(&manager);
    assert!(name.starts_with("stations-"), "{name}");
    world.end_steward(Signal::KILL);
    assert!(accepts(&world), "the manager has the socket");
    // What it passes to the next one is replaced by what that one makes, and then nobody has it.
    world.start_as(world.command_with("stations-1-1-0", &stations));
    await_lease(&lease, "back", |lease| !lease.is_away());
    drop(stations);
    assert!(accepts(&world));
    drop(lease);
    assert_soon!(!accepts(&world));
}

#[test]
fn interrupted_steward_takes_everything_back() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    let pins = world.bpffs.as_ref().expect("kept").pins();
    assert!(pins.exists());
    world.end_steward(Signal::INT);
    world.await_nothing();
    assert!(!pins.exists());
    // The lessee is told that this is for good, and does not wait for the steward to come back.
    common::assert_refused_with(lease.take_changes(), "takes all leases back and ends: start");
    // The next one makes the place for programs again.
    world.restart();
    world.lease(0, 1).expect("free");
}

#[test]
fn leftovers_can_be_removed_without_a_running_steward() {
    require!(Root);
    let mut world = World::kept();
    let _lease = world.lease(0, 1).expect("allowed");
    // Not under a steward that runs.
    let refused = world.take_back();
    assert_has(&refused, &["another steward keeps its state in"]);
    world.end_steward(Signal::KILL);
    assert!(world.program().is_some());
    // Its policy may be gone, too.
    fs::remove_file(world.dir.path().join("policy.toml")).expect("ours");
    let report = world.take_back();
    assert!(
        report.contains("program detached") && !report.contains("ERROR"),
        "{report}"
    );
    world.await_nothing();
}

#[test]
fn leases_outlive_a_steward_with_no_more_capabilities_than_its_unit_gives_it() {
    require!(Root);
    let mut world = World::kept();
    for _ in 0..2 {
        world.end_steward(Signal::TERM);
        world.restart_with("-all,+net_admin,+net_raw,+bpf,+ipc_lock,+setuid");
        let effective = procfs::capabilities(world.steward.pid(), "CapEff");
        assert_eq!(effective, Some(0x80_0000_7080));
        let lease = world.lease(0, 1).expect("allowed");
        let _echo = lessee::Echo::open(&lease, 0);
        world.end_steward(Signal::KILL);
        world.restart_with("-all,+net_admin,+net_raw,+bpf,+ipc_lock,+setuid");
        await_lease(&lease, "back", |lease| !lease.is_away());
        drop(lease);
        world.await_nothing();
        assert!(!world.steward.said().contains("WARN"));
    }
}

/// Points of a steward's life, in their order.
const POINTS: [&str; 14] = [
    "attached",
    "pins-made",
    "pinned",
    "records-written",
    "recorded",
    "leased",
    "kept",
    "deactivated",
    "taken-back",
    "detached",
    "unpinned",
    "forgotten",
    "adopted",
    "resumed",
];

#[test]
fn steward_that_dies_at_any_step_leaves_nothing_that_the_next_does_not_clean_up() {
    require!(Root);
    let mut world = World::kept();
    for point in POINTS {
        world.end_steward(Signal::KILL);
        // Something to take over, for the points that are about that. Its lessee comes back in its own time; those whose
        // records are left by the others never do, and are waited for.
        let takes_over = matches!(point, "adopted" | "resumed");
        world.grace = if takes_over { "10" } else { "1" };
        let before = takes_over.then(|| {
            world.restart();
            let lease = world.lease(0, 1).expect("allowed");
            world.end_steward(Signal::KILL);
            lease
        });
        world.restart_to_crash(point);
        let die = wait::until(wait::SOON, || {
            if world.steward.ended().is_none()
                && let Some(lease) = &before
            {
                let _ = lease.take_changes();
            } else if world.steward.ended().is_none() {
                drop(world.lease(0, 1));
            }
            world.steward.ended().is_some()
        });
        assert!(die, "it never came to {point}");
        world.restart();
        if let Some(lease) = &before {
            await_lease(lease, point, |lease| !lease.is_away());
        }
        drop(before);
        world.await_nothing();
        let lease = world
            .lease(0, 1)
            .unwrap_or_else(|error| panic!("{point}: {error}"));
        drop(lease);
        world.await_nothing();
    }
}

#[test]
fn foreign_program_that_was_attached_meanwhile_is_not_touched() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    let index = lease.facts().ifindex;
    drop(lease);
    world.await_nothing();
    world.end_steward(Signal::KILL);
    let foreign = world
        .veth
        .near
        .enter(|| steer::Program::attach(index, steer::ModeRequest::Xdp, false).expect("free"));
    world.restart();
    let refusal = common::refusal(world.lease(0, 1));
    assert_eq!(refusal.reason, Reason::Program, "{refusal}");
    assert_eq!(world.program(), Some(foreign.id()));
    world.end_steward(Signal::INT);
    assert_eq!(world.program(), Some(foreign.id()));
}
