//! Each port is an actor: whatever waits in one, or in one worker, for an hour if need be, holds up nothing else: not
//! other ports, not `status`, not the daemon's end.
//!
//! One daemon with a port whose queue is leased from a steward that it waits for an hour for, or was given from
//! outside, one of the null NIC, and two that a cable joins. Limits are long: they catch what hangs.
//! `scripts/bench --only held-up` measures how long things take.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::four_ports::{
    FREE, GIVEN, LEASED, NULL, OTHER, connect, daemon, daemon_with_given_queue, socket,
};
use testkit::{Daemon, Driver, DriverConfig, Frozen, VethPair, assert_soon, driver, require, wait};
use vhost::VhostBackend;

/// A daemon may take this long to end: it waits some seconds for what does not stop.
const END: Duration = Duration::from_secs(60);

/// `status` answers, and VMMs come to these ports, are served, and go, while something is wrong with another.
fn assert_others_go_on(daemon: &Daemon, ports: &[usize]) {
    drop(daemon.status());
    for &port in ports {
        for _ in 0..3 {
            drop(connect(daemon, port));
            daemon.await_port(port, "it is over", |port| port["connected"] == false);
        }
    }
}

fn assert_ends_in_order(daemon: &mut Daemon) {
    daemon.process().signal(Signal::TERM);
    let ended = daemon.process().wait(END);
    assert!(ended.success());
    assert!(!daemon.said().contains("as if killed"));
}

#[test]
fn steward_that_is_stopped_holds_up_neither_status_nor_other_ports() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = daemon(&veth, &[]);
    let guest = connect(&daemon, LEASED);
    daemon.signal_steward(Signal::STOP);
    assert_others_go_on(&daemon, &[NULL, FREE, OTHER]);
    // The end of its port's session may have to wait until the steward has taken the queue back.
    drop(guest);
    assert_others_go_on(&daemon, &[NULL, FREE, OTHER]);
    daemon.signal_steward(Signal::CONT);
    daemon.await_port(LEASED, "it is over", |port| port["connected"] == false);
    // Answers that came too late are no harm.
    drop(connect(&daemon, LEASED));
    assert!(daemon.port(LEASED)["impaired"].is_null());
    assert!(!daemon.said().contains("steward's answer"));
}

#[test]
fn daemon_ends_although_its_steward_is_stopped() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = daemon(&veth, &[]);
    let _guest = connect(&daemon, LEASED);
    daemon.signal_steward(Signal::STOP);
    assert_ends_in_order(&mut daemon);
}

#[test]
fn daemon_ends_while_a_port_waits_for_a_steward_that_is_stopped() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = daemon(&veth, &[]);
    let guest = connect(&daemon, LEASED);
    daemon.signal_steward(Signal::STOP);
    // Another MTU needs the steward, and the end of the session may need it: the port waits for one or the other.
    veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "1400"]);
    drop(guest);
    std::thread::sleep(wait::QUIET);
    assert_ends_in_order(&mut daemon);
}

/// Does what holds its port up until it is told to stop.
type Delay = fn(&Path, &AtomicBool);

fn stalls_in_a_header(socket: &Path, stop: &AtomicBool) {
    stall(&driver::connect(socket), &[3, 0, 0, 0, 1, 0], stop);
}

fn stalls_in_a_payload(socket: &Path, stop: &AtomicBool) {
    // SET_VRING_ENABLE, version 1, eight bytes; and only one of them.
    stall(
        &driver::connect(socket),
        &[18, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0],
        stop,
    );
}

fn stall(mut vmm: &UnixStream, bytes: &[u8], stop: &AtomicBool) {
    vmm.write_all(bytes).expect("somebody reads");
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(wait::QUIET);
    }
}

fn reads_no_answers(socket: &Path, stop: &AtomicBool) {
    let vmm = driver::connect(socket);
    vmm.set_nonblocking(true).expect("a socket");
    // GET_FEATURES.
    while !stop.load(Ordering::Relaxed) {
        if (&vmm).write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).is_err() {
            std::thread::sleep(wait::QUIET);
        }
    }
}

fn changes_its_memory(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &DriverConfig::small()).expect("accepted");
    while !stop.load(Ordering::Relaxed) {
        guest.set_memory().expect("accepted");
    }
}

fn changes_its_features(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &DriverConfig::small()).expect("accepted");
    let features = guest.features();
    while !stop.load(Ordering::Relaxed) {
        // Lanes are stopped and started for each.
        guest
            .frontend()
            .set_features(features ^ testkit::driver::F_MTU)
            .expect("accepted");
        guest.frontend().set_features(features).expect("accepted");
    }
}

#[rstest]
fn vmm_holds_up_neither_status_nor_other_ports_that(
    #[values(
        stalls_in_a_header,
        stalls_in_a_payload,
        reads_no_answers,
        changes_its_memory,
        changes_its_features
    )]
    delay: Delay,
    #[values(false, true)] queue_is_given: bool,
) {
    require!(Root);
    let veth = VethPair::new();
    if queue_is_given {
        let (mut daemon, _program) = daemon_with_given_queue(&veth);
        assert_holds_up_nobody(&daemon, NULL, delay, &[GIVEN, FREE]);
        assert_holds_up_nobody(&daemon, GIVEN, delay, &[NULL, FREE]);
        assert_ends_in_order(&mut daemon);
    } else {
        let daemon = daemon(&veth, &[]);
        assert_holds_up_nobody(&daemon, LEASED, delay, &[NULL, FREE]);
    }
}

/// A VMM does that at a port, and these others go on.
fn assert_holds_up_nobody(daemon: &Daemon, held: usize, delay: Delay, others: &[usize]) {
    let stop = AtomicBool::new(false);
    let socket = socket(daemon, held);
    std::thread::scope(|scope| {
        scope.spawn(|| delay(&socket, &stop));
        // Also if an assertion fails.
        let _stop = Stop(&stop);
        daemon.await_port(held, "connected", |port| port["connected"] == true);
        assert_others_go_on(daemon, others);
    });
}

/// Sets a flag when dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn worker_that_hangs_is_named_and_holds_up_neither_status_nor_other_workers_nor_the_end() {
    require!(Root);
    let veth = VethPair::new();
    // Workers that poll are awake.
    let mut daemon = daemon(&veth, &[("--workers", "2"), ("--spin-us", "600000000")]);
    let first = connect(&daemon, FREE);
    let _second = connect(&daemon, OTHER);
    let ports = [FREE, OTHER].map(|port| format!("port{port}.sock"));
    let mut frozen = Frozen::thread(daemon.process().pid(), "worker-0");
    let is_named = || {
        let status = daemon.status();
        let hangs = status["workers"][0]["hangs"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        // In which of both memories it is, nobody knows.
        hangs.contains("has not finished a round for") && ports.iter().all(|port| hangs.contains(port))
    };
    assert!(
        wait::until(2 * wait::SOON, is_named),
        "{:#}",
        daemon.status()["workers"]
    );
    let complaints = || daemon.said().matches("worker-0 has not finished a round").count();
    daemon.await_that(|| complaints() > 0);
    assert_eq!(complaints(), 1);
    // On the other worker; by number of lanes every second one would hang.
    assert_others_go_on(&daemon, &[NULL]);
    drop(frozen);
    assert_soon!(daemon.status()["workers"][0]["hangs"].is_null());
    daemon.await_that(|| daemon.said().contains("worker-0 goes on after"));
    frozen = Frozen::thread(daemon.process().pid(), "worker-0");
    // It waits for its lane.
    drop(first);
    daemon.await_port(FREE, "busy", |port| port["busy"].is_string());
    daemon.process().signal(Signal::TERM);
    let ended = wait::until(END, || {
        frozen.reap();
        daemon.process().ended().is_some()
    });
    assert!(ended);
    assert!(daemon.said().contains("it ends as if killed"));
}
