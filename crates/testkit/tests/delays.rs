//! What waits in one port, or in one worker, holds up nothing else: not other ports, not `status`, not the daemon's end.
//!
//! One daemon with a port whose queue is leased and two that a cable joins. Limits are long: they catch what hangs.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::{Daemon, Driver, DriverConfig, Frozen, Serve, VethPair, driver, require, wait};
use vhost::VhostBackend;
use virtqueue::GuestAddr;

/// Ports whose place in `status`, and in the names of the sockets, this is.
const LEASED: usize = 0;
const FREE: usize = 1;
const OTHER: usize = 2;
/// A daemon may take this long to end: it waits some seconds for what does not stop.
const END: Duration = Duration::from_secs(60);

fn config() -> DriverConfig {
    DriverConfig {
        regions: vec![(GuestAddr(0), 4 << 20)],
        queue_size: 64,
        ..DriverConfig::default()
    }
}

fn daemon(veth: &VethPair, options: &[(&str, &str)]) -> Daemon {
    let serve = options.iter().fold(
        Serve::interface(VethPair::NIC).leased(),
        |serve, (option, value)| serve.with(option, *value),
    );
    Daemon::start_ports(&veth.near, &serve, &["start-queue=0", "cable=c", "cable=c"])
}

fn socket(daemon: &Daemon, port: usize) -> std::path::PathBuf {
    daemon.path(&format!("port{port}.sock"))
}

fn connect(daemon: &Daemon, port: usize) -> Driver {
    let guest = Driver::connect(&socket(daemon, port), &config()).expect("accepted");
    daemon.await_port(port, "a lane runs", |port| port["lanes"][0]["running"] == true);
    guest
}

/// `status` answers, and VMMs come and go at a port, while something is wrong with another.
fn assert_others_go_on(daemon: &Daemon, port: usize) {
    for _ in 0..3 {
        drop(connect(daemon, port));
        daemon.await_port(port, "it is over", |port| port["connected"] == false);
    }
}

#[test]
fn steward_that_is_stopped_holds_up_neither_status_nor_other_ports() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = daemon(&veth, &[]);
    let guest = connect(&daemon, LEASED);
    let steward = |daemon: &mut Daemon, signal| {
        let lessor = daemon.lessor.as_mut().expect("leased");
        lessor.steward.signal(signal);
    };
    steward(&mut daemon, Signal::STOP);
    assert_others_go_on(&daemon, FREE);
    // Its port's session cannot end before the steward has taken the queue back, or been given up.
    drop(guest);
    daemon.await_port(LEASED, "busy", |port| {
        port["busy"]
            .as_str()
            .is_some_and(|busy| busy.contains("the end of its session"))
    });
    assert_others_go_on(&daemon, FREE);
    steward(&mut daemon, Signal::CONT);
    daemon.await_port(LEASED, "it is over", |port| port["connected"] == false);
    // Answers that came too late for whoever had asked are no harm.
    drop(connect(&daemon, LEASED));
    assert!(daemon.port(LEASED)["impaired"].is_null());
    assert!(!daemon.said().contains("steward's answer"), "{}", daemon.said());
}

#[test]
fn daemon_ends_although_its_steward_is_stopped() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = daemon(&veth, &[]);
    let _guest = connect(&daemon, LEASED);
    let lessor = daemon.lessor.as_mut().expect("leased");
    lessor.steward.signal(Signal::STOP);
    daemon.process().signal(Signal::TERM);
    assert!(daemon.process().wait(END).success());
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
    let mut guest = Driver::connect(socket, &config()).expect("accepted");
    while !stop.load(Ordering::Relaxed) {
        guest.set_memory().expect("accepted");
    }
}

fn changes_its_features(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &config()).expect("accepted");
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
) {
    require!(Root);
    let veth = VethPair::new();
    let daemon = daemon(&veth, &[]);
    let stop = AtomicBool::new(false);
    let socket = socket(&daemon, LEASED);
    std::thread::scope(|scope| {
        scope.spawn(|| delay(&socket, &stop));
        // Also if an assertion fails.
        let _stop = Stop(&stop);
        daemon.await_port(LEASED, "connected", |port| port["connected"] == true);
        assert_others_go_on(&daemon, FREE);
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
    let mut frozen = Frozen::thread(daemon.process().pid(), "worker-0");
    let is_named = || {
        let status = daemon.status();
        let hangs = status["workers"][0]["hangs"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        hangs.contains("has not finished a round for") && hangs.contains("port1.sock")
    };
    assert!(
        wait::until(2 * wait::SOON, is_named),
        "{:#}",
        daemon.status()["workers"]
    );
    let complaints = |daemon: &Daemon| daemon.said().matches("worker-0 has not finished a round").count();
    assert_eq!(complaints(&daemon), 1, "{}", daemon.said());
    // On the other worker; by number of lanes every second one would hang.
    assert_others_go_on(&daemon, OTHER);
    drop(frozen);
    let goes_on = || daemon.status()["workers"][0]["hangs"].is_null();
    assert!(wait::until(wait::SOON, goes_on));
    assert!(
        daemon.said().contains("worker-0 goes on after"),
        "{}",
        daemon.said()
    );
    frozen = Frozen::thread(daemon.process().pid(), "worker-0");
    // It waits for its lane.
    drop(first);
    daemon.await_port(FREE, "busy", |port| port["busy"].is_string());
    daemon.process().signal(Signal::TERM);
    let ended = wait::until(END, || {
        frozen.reap();
        daemon.process().ended().is_some()
    });
    assert!(ended, "{}", daemon.said());
    assert!(
        daemon.said().contains("it ends as if killed"),
        "{}",
        daemon.said()
    );
}
