//! Threads of the daemon: none for a port that nobody has connected to, one for a port with a VMM.

use std::fs;

use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, VethPair, require, wait};
use virtqueue::GuestAddr;

const MANY: usize = 50;

/// The names of a process's threads, sorted, without those that answer at the control socket meanwhile.
fn threads(daemon: &mut Daemon) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.process().pid())).expect("it runs");
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    let is_counted = |name: &String| !["control", "sample"].contains(&name.trim_end());
    let mut names: Vec<_> = tasks.flatten().filter_map(name).filter(is_counted).collect();
    names.sort();
    names
}

/// So many threads, soon.
fn await_threads(daemon: &mut Daemon, count: usize, when: &str) {
    let is_so = wait::until(wait::SOON, || threads(daemon).len() == count);
    assert!(is_so, "{when}: {count} threads, and not {:?}", threads(daemon));
}

fn assert_few_threads(netns: &NetNs, serve: &Serve, ports: &[&str]) {
    let one = threads(&mut Daemon::start_ports(netns, serve, &ports[..1])).len();
    let mut daemon = Daemon::start_ports(netns, serve, ports);
    await_threads(&mut daemon, one, "idle");
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 1 << 20)],
        queue_size: 64,
        ..DriverConfig::default()
    };
    let guest = |at: usize| Driver::connect(&daemon.path(&format!("port{at}.sock")), &config);
    let mut guests: Vec<_> = (0..ports.len()).map(|at| guest(at).expect("accepted")).collect();
    await_threads(&mut daemon, one + ports.len(), "all connected");
    guests.truncate(1);
    await_threads(&mut daemon, one + 1, "one connected");
    drop(guests);
    await_threads(&mut daemon, one, "idle again");
}

#[test]
fn ports_without_a_vmm_have_no_thread_and_those_with_one_have_one() {
    require!(Root);
    assert_few_threads(&NetNs::new("threads"), &Serve::null(), &["queues=1"; MANY]);
}

#[test]
fn ports_with_queues_of_an_interface_have_no_more_threads() {
    require!(Root);
    let veth = VethPair::with(4, 1500);
    let ports = ["start-queue=0", "start-queue=1", "start-queue=2", "start-queue=3"];
    assert_few_threads(&veth.near, &Serve::interface(VethPair::NIC), &ports);
}
