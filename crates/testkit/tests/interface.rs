//! What happens to the interface, or around it, while the daemon runs or wants to start.

use rstest::rstest;
use testkit::daemon::{Mode, Placement, binary, private_dir};
use testkit::{Daemon, DriverConfig, Layout, NetNs, Rig, Serve, VethPair, frame, require, wait};
use vhost::VhostBackend;
use virtqueue::GuestAddr;

const BUFFER: u32 = 2048;

/// Number of the XDP program on an interface, as the kernel tells.
fn program_on(netns: &NetNs, interface: &str) -> Option<u64> {
    let text = netns.output_of("ip", &["-j", "link", "show", "dev", interface]);
    let links: serde_json::Value = serde_json::from_str(&text).expect("ip prints JSON");
    links[0]["xdp"]["prog"]["id"].as_u64()
}

/// With queues leased from a steward, and by root without one: what is said is the same.
fn both_ways(name: &str) -> [Serve; 2] {
    [Serve::interface(name).leased(), Serve::interface(name).by_root()]
}

/// A daemon that cannot start says so, by `words`, and leaves nothing behind.
#[track_caller]
fn assert_refused(netns: &NetNs, serve: &Serve, words: &[&str]) {
    Daemon::spawn(netns, serve).assert_complains(words);
}

#[rstest]
fn interface_that_goes_down_and_up_carries_frames_again(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let mut rig = Rig::new(placement, mode);
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
    for seed in 0..10 {
        rig.pair().send(&frame::plain(100, seed), Layout::Whole);
    }
    std::thread::sleep(wait::QUIET);
    rig.daemon.process().check();
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    // They come back to the guest, sent or dropped, by now at the latest: in direct placement the kernel may hold them
    // until the interface is up.
    rig.pair().await_sent();
    rig.await_passes_both_ways();
    rig.assert_passes_both_ways();
}

#[rstest]
fn interface_that_is_deleted_leaves_the_guest_connected_and_is_picked_up_when_it_is_back(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = Rig::new(placement, Mode::Native);
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
    rig.veth.near.ip(&["link", "delete", VethPair::NIC]);
    rig.daemon.await_impaired(0, "gone");
    rig.pair().send(&frame::plain(100, 1), Layout::Whole);
    rig.veth.join(1, 1500);
    rig.wire = testkit::PacketPort::open(&rig.veth.far, VethPair::WIRE);
    rig.daemon.await_recovered(0);
    rig.await_passes_both_ways();
}

#[test]
fn second_daemon_on_the_same_interface_is_refused_and_the_first_goes_on() {
    require!(Root);
    let mut rig = Rig::new(Placement::Copy, Mode::Native);
    rig.post(16, &[BUFFER]);
    let id = program_on(&rig.veth.near, VethPair::NIC)
        .expect("the first one's")
        .to_string();
    // One by root, and one of another steward's. A program on a link is not taken off by `ip link`.
    let words = [
        VethPair::NIC,
        &id,
        "end its holder (daemons share an interface by vhost-af-xdp-steward",
        "guests as ports of one daemon",
    ];
    for serve in both_ways(VethPair::NIC) {
        assert_refused(&rig.veth.near, &serve, &words);
    }
    rig.assert_passes_both_ways();
}

#[rstest]
fn kill_leaves_no_program_and_no_queue_behind(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.post(16, &[BUFFER]);
    rig.assert_passes_both_ways();
    assert!(program_on(&rig.veth.near, VethPair::NIC).is_some());
    rig.daemon.kill();
    let gone = wait::until(wait::SOON, || program_on(&rig.veth.near, VethPair::NIC).is_none());
    assert!(gone, "the program is still attached");
    let again = Daemon::start(&rig.veth.near, &serve);
    assert!(program_on(&rig.veth.near, VethPair::NIC).is_some());
    drop(again);
}

#[rstest]
fn sigterm_ends_it_at_once_and_leaves_nothing(#[values(Mode::Native, Mode::Skb)] mode: Mode) {
    require!(Root);
    let mut rig = Rig::new(Placement::Copy, mode);
    rig.post(16, &[BUFFER]);
    rig.assert_passes_both_ways();
    let status = rig.daemon.terminate();
    assert!(status.success(), "{status}");
    assert!(!rig.daemon.socket().exists() && !rig.daemon.path("control").exists());
    let gone = wait::until(wait::SOON, || program_on(&rig.veth.near, VethPair::NIC).is_none());
    assert!(gone, "the program is still attached");
}

/// Leased, and found out by the daemon itself.
#[test]
fn status_says_what_is_known_of_the_driver() {
    require!(Root);
    let veth = VethPair::new();
    for serve in both_ways(VethPair::NIC) {
        let mut daemon = Daemon::start(&veth.near, &serve);
        let driver = daemon.port(0)["driver"].clone();
        let said = driver.as_str().expect("said");
        assert!(said.starts_with("veth: zero-copy none"), "{said}");
        daemon.terminate();
    }
}

#[test]
fn guest_whose_memory_cannot_be_registered_goes_on_by_copying_and_says_so() {
    require!(Root);
    let veth = VethPair::new();
    let dir = private_dir();
    let mut command = veth.near.command("setpriv");
    command
        .args(["--bounding-set", "-ipc_lock", "prlimit", "--memlock=8388608"])
        .arg(binary());
    let serve = Serve::interface(VethPair::NIC).placement(Placement::Direct);
    let mut daemon = Daemon::spawn_by(command, dir, &serve);
    daemon.await_listening();
    let config = DriverConfig::with_memory(vec![(GuestAddr(0), 128 << 20)]);
    let mut rig = Rig::around(veth, daemon, &config);
    rig.post(64, &[2048]);
    rig.daemon.await_port(0, "why it copies", |port| {
        let fallbacks = port["lanes"][0]["fallbacks"].to_string();
        fallbacks.contains("direct not used") && fallbacks.contains("RLIMIT_MEMLOCK")
    });
    rig.assert_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["sessions"].as_u64(), Some(1));
}

#[test]
fn direct_lane_is_not_started_while_frames_are_longer_than_its_chunks() {
    require!(Root);
    // Natively the driver does not let the MTU grow that far beside a program without multi-buffer support.
    let serve = Serve::interface(VethPair::NIC)
        .placement(Placement::Direct)
        .mode(Mode::Skb);
    let veth = VethPair::new();
    let mut command = veth.near.command(binary());
    command.env("RUST_LOG", "debug");
    let mut daemon = Daemon::spawn_by(command, private_dir(), &serve);
    daemon.await_listening();
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "4000"]);
    rig.daemon.await_impaired(0, "lower the MTU");
    let started = |rig: &Rig| rig.daemon.said().matches("lane runs").count();
    let before = started(&rig);
    assert!(before > 0);
    rig.driver.stop_pair(0).expect("stopped");
    rig.driver.start_pair(0).expect("started");
    // It is done when what comes after it is answered.
    rig.driver.frontend().get_features().expect("answered");
    assert_eq!(started(&rig), before);
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "1500"]);
    rig.daemon.await_recovered(0);
    rig.await_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["sessions"].as_u64(), Some(1));
}
