//! VMMs that come again and again, and two at a time.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use testkit::daemon::Placement;
use testkit::driver::F_PROTOCOL_FEATURES;
use testkit::world::Setting;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, World, driver, message, require, soak, wait};
use vhost::VhostBackend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};
use virtqueue::driver::GuestRam;

/// How long a second VMM waits for the first to go, and more.
const REFUSAL: Duration = Duration::from_secs(40);

/// A VMM that learns what is offered and leaves, as QEMU does when its guest uses something else already.
fn decline(daemon: &Daemon) {
    let ram = GuestRam::new(&DriverConfig::small().regions)
        .expect("memory")
        .into();
    let greeted =
        Driver::greet(driver::connect(&daemon.socket()), &DriverConfig::small(), ram).expect("greeted");
    assert!(greeted.features() & F_PROTOCOL_FEATURES != 0);
}

fn lines(daemon: &Daemon, words: &str) -> usize {
    daemon.said().lines().filter(|line| line.contains(words)).count()
}

#[test]
fn vmm_that_leaves_for_what_is_offered_is_told_apart_and_said_once() {
    require!(Root);
    let netns = NetNs::new("near");
    let daemon = Daemon::start(&netns, &Serve::null().offload("none"));
    let is_why = |port: &serde_json::Value| {
        let impaired = port["impaired"].as_str();
        impaired.is_some_and(|why| why.contains("uses features that an earlier daemon offered"))
    };
    decline(&daemon);
    daemon.await_port(0, "gone", |port| {
        port["connected"] == false && port["sessions"] == 1
    });
    assert!(!is_why(&daemon.port(0)), "a VMM may look once");
    for _ in 0..6 {
        decline(&daemon);
    }
    daemon.await_port(0, "declined", is_why);
    assert_eq!(lines(&daemon, "earlier daemon"), 1);
    // One that takes what there is shows that it is over.
    let guest = Driver::connect(&daemon.socket(), &DriverConfig::small()).expect("accepted");
    drop(guest);
    daemon.await_port(0, "served", |port| port["impaired"].is_null());
}

/// A VMM that learns how many queue pairs there are and leaves, as QEMU does at its start when it wants more.
#[test]
fn vmm_that_wants_more_queue_pairs_is_reported_once_with_the_remedy() {
    require!(Root);
    let netns = NetNs::new("near");
    let daemon = Daemon::start(&netns, &Serve::null());
    let ask = || {
        let socket = driver::connect(&daemon.socket());
        let ask = |request| {
            message::send(&socket, request, &[], None);
            message::receive(&socket)
        };
        let _ = ask(FrontendReq::GET_FEATURES);
        let with = VhostUserProtocolFeatures::MQ.bits().to_ne_bytes();
        message::try_tell(&socket, FrontendReq::SET_PROTOCOL_FEATURES, &with).expect("taken");
        assert_eq!(ask(FrontendReq::GET_QUEUE_NUM), 1);
    };
    for _ in 0..3 {
        ask();
    }
    daemon.await_impaired(0, "disconnect when they read 1 queue pair(s)");
    let before = lines(&daemon, "connected");
    for _ in 0..2 {
        ask();
    }
    daemon.await_port(0, "counted", |port| {
        port["sessions"] == 5 && port["connected"] == false
    });
    assert_eq!(lines(&daemon, "queue pair(s)"), 1);
    assert_eq!(lines(&daemon, "connected"), before);
    drop(Driver::connect(&daemon.socket(), &DriverConfig::small()).expect("accepted"));
    daemon.await_port(0, "served", |port| port["impaired"].is_null());
}

#[test]
fn who_leaves_without_a_message_is_no_session() {
    require!(Root);
    let netns = NetNs::new("near");
    let daemon = Daemon::start(&netns, &Serve::null());
    for _ in 0..3 {
        drop(driver::connect(&daemon.socket()));
    }
    drop(Driver::connect(&daemon.socket(), &DriverConfig::small()).expect("accepted"));
    daemon.await_port(0, "gone", |port| {
        port["sessions"] == 1 && port["connected"] == false
    });
    assert_eq!(lines(&daemon, "a VMM connected"), 1);
}

/// QEMU, whose running guest uses offloads that the next daemon does not have, until one is there that has.
#[test]
fn linux_guest_that_uses_more_than_is_offered_is_told_of_and_online_again_with_the_old_options() {
    require!(Root, Qemu);
    let mut world = World::new(Setting {
        options: &["--reconnect", "20"],
        ..Setting::new(Placement::Copy)
    });
    world.assert_pings();
    let with = world.serve.clone();
    for serve in [with.clone().offload("none"), with] {
        world.daemon.process().signal(Signal::TERM);
        world.daemon.process().wait(wait::SOON);
        let less = serve.args().contains(&"none".to_owned());
        world.daemon.restart(&world.veth.near, &serve);
        world.daemon.await_ready();
        match less {
            true => world
                .daemon
                .await_impaired(0, "uses features that an earlier daemon offered"),
            false => world
                .daemon
                .await_port(0, "connected", |port| port["lanes"][0]["running"] == true),
        }
    }
    world.assert_pings();
}

#[test]
fn vmm_that_comes_and_goes_all_the_time_is_not_in_the_log_each_time() {
    require!(Root);
    let netns = NetNs::new("near");
    let daemon = Daemon::start(&netns, &Serve::null());
    // The last ones wait, as do all later ones in a soak.
    let visits = soak::count(280, 1000);
    for _ in 0..visits {
        drop(Driver::connect(&daemon.socket(), &DriverConfig::small()).expect("accepted"));
    }
    daemon.await_port(0, "counted", |port| {
        port["sessions"].as_u64() >= Some(visits as u64)
    });
    // 20 at once, and one each 30 seconds: as many as this takes on the slowest of machines.
    let said = lines(&daemon, "connected");
    assert!((20..100).contains(&said), "{said} lines");
}

/// True when the connection is over; false after `limit`.
fn is_closed(mut stream: &UnixStream, limit: Duration) -> bool {
    stream.set_read_timeout(Some(limit)).expect("not zero");
    matches!(stream.read(&mut [0]), Ok(0))
}

#[test]
fn second_vmm_at_a_port_is_refused_and_both_are_named() {
    require!(Root);
    let netns = NetNs::new("near");
    let daemon = Daemon::start(&netns, &Serve::null());
    let mut first = Driver::connect(&daemon.socket(), &DriverConfig::small()).expect("accepted");
    // Whoever only looks whether somebody listens is no VMM.
    drop(driver::connect(&daemon.socket()));
    let second = driver::connect(&daemon.socket());
    assert!(is_closed(&second, REFUSAL), "it waits for ever");
    // Both are this process.
    let own = std::process::id();
    let words = format!("process {own} connected while process {own} has this port, and is refused");
    daemon.await_that(|| lines(&daemon, &words) == 1);
    let is_told = |port: &Value| {
        port["turned_away"]
            .as_str()
            .is_some_and(|text| text.contains(&words))
    };
    daemon.await_port(0, "turned away", is_told);
    let port = daemon.port(0);
    // Nothing happened to the first.
    assert_eq!((&port["connected"], &port["sessions"]), (&true.into(), &1.into()));
    first.set_memory().expect("accepted");
}

#[test]
fn vmm_that_connects_before_the_first_is_gone_is_served_when_it_is() {
    require!(Root);
    let netns = NetNs::new("near");
    let daemon = Daemon::start(&netns, &Serve::null());
    for _ in 0..3 {
        let first = Driver::connect(&daemon.socket(), &DriverConfig::small()).expect("accepted");
        let second = driver::connect(&daemon.socket());
        std::thread::sleep(wait::QUIET);
        drop(first);
        let mut second = Driver::start(second, &DriverConfig::small()).expect("accepted");
        second.frontend().get_features().expect("it answers");
    }
    assert_eq!(lines(&daemon, "is refused"), 0);
}
