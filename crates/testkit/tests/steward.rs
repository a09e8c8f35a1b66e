//! The daemon without privileges: queues leased from a steward, no capability, nobody's user, an empty network
//! namespace.
//!
//! The tests of all other files run this way, too, unless they say otherwise; here is what only a lease has.

use std::sync::Arc;
use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use serde_json::Value;
use testkit::daemon::{Placement, private_dir};
use testkit::driver::region_info;
use testkit::lan::{self, Lan};
use testkit::{
    Daemon, DriverConfig, Layout, Lessor, Rig, Serve, VethPair, frame, procfs, require, soak, wait,
};
use vhost::vhost_user::VhostUserFrontend;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;
use xsk::{OwnMemory, QueueId, Socket, SocketConfig, Umem};

const BUFFER: u32 = 2048;

fn leased(placement: Placement) -> Serve {
    Serve::interface(VethPair::NIC).placement(placement).leased()
}

fn rig(serve: &Serve) -> Rig {
    let mut rig = Rig::with(VethPair::new(), serve, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    rig
}

#[test]
fn daemon_without_any_capability_in_an_empty_namespace_carries_frames() {
    require!(Root);
    let veth = VethPair::new();
    let dir = private_dir();
    let lessor = Lessor::start(&veth.near, &dir, &[VethPair::NIC]);
    let mut daemon = Daemon::spawn_with(&veth.near, dir, Some(lessor), &leased(Placement::Copy));
    daemon.await_sockets(&[daemon.socket()]);
    let pid = daemon.process().pid();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(procfs::capabilities(pid, set), Some(0), "{set}");
    }
    assert_eq!(procfs::number(pid, "NoNewPrivs"), 1);
    let uids = procfs::status(pid, "Uid");
    assert_eq!(uids.as_deref(), Some("65534\t65534\t65534\t65534"));
    let interfaces = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).expect("it runs");
    assert!(!interfaces.contains(VethPair::NIC), "{interfaces}");
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    for seed in 0..20 {
        rig.assert_from_guest(&frame::plain(60 + usize::from(seed) * 70, seed), Layout::Whole);
        rig.assert_to_guest(&frame::plain(60 + usize::from(seed) * 70, seed));
    }
}

#[rstest]
fn frames_go_on_while_the_steward_is_restarted(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig(&leased(placement));
    for signal in [Signal::TERM, Signal::KILL] {
        rig.daemon.end_steward(signal);
        rig.daemon.await_port(0, "away", |port| {
            port["steering_note"]
                .as_str()
                .is_some_and(|note| note.contains("the steward is away"))
        });
        for _ in 0..10 {
            rig.assert_passes_both_ways();
        }
        assert!(rig.daemon.port(0)["impaired"].is_null());
        rig.daemon.restart_lessor(&rig.veth.near);
        rig.daemon
            .await_port(0, "back", |port| port["steering_note"].is_null());
        rig.assert_passes_both_ways();
    }
    // The lease is one like before: it hears of changes, and guests come and go.
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "1400"]);
    rig.daemon
        .await_port(0, "the MTU", |port| port["mtu"].as_u64() == Some(1400));
    rig.await_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["sessions"].as_u64(), Some(1));
}

#[rstest]
fn steward_that_is_killed_again_and_again_costs_no_frame(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig(&leased(placement));
    let program = |rig: &Rig| {
        rig.veth
            .near
            .output_of("ip", &["-d", "link", "show", VethPair::NIC])
    };
    let id = |text: &str| text.split("prog/xdp id ").nth(1).map(|rest| rest[..6].to_owned());
    let before = id(&program(&rig));
    assert!(before.is_some());
    for round in (0..40u8).cycle().take(soak::count(14, 200)) {
        rig.daemon.end_steward(Signal::KILL);
        rig.assert_passes_both_ways();
        rig.daemon.start_lessor_again(&rig.veth.near);
        // While it starts, takes over, is asked for the lease; and after that, or in the midst of it, it is killed
        // again.
        for seed in 0..round % 7 {
            rig.assert_from_guest(&frame::plain(60 + usize::from(round) * 8, seed), Layout::Whole);
            rig.assert_to_guest(&frame::plain(60 + usize::from(round) * 8, seed));
            std::thread::sleep(std::time::Duration::from_millis(u64::from(round % 5) * 2));
        }
    }
    let stood = rig.daemon.port(0);
    assert!(
        stood["impaired"].is_null() && stood["sessions"].as_u64() == Some(1),
        "{stood:#}"
    );
    rig.daemon
        .await_port(0, "back", |port| port["steering_note"].is_null());
    assert_eq!(id(&program(&rig)), before, "the same program all the while");
}

#[test]
fn daemon_that_dies_while_the_steward_is_away_has_its_queues_again_at_once() {
    require!(Root);
    let mut rig = rig(&leased(Placement::Copy));
    for _ in 0..3 {
        rig.daemon.end_steward(Signal::KILL);
        rig.daemon.kill();
        rig.daemon.restart_lessor(&rig.veth.near);
        rig.daemon.restart(&rig.veth.near, &leased(Placement::Copy));
        rig.daemon.await_listening();
        rig = rig.next_guest();
        rig.post(64, &[BUFFER]);
        rig.assert_passes_both_ways();
    }
}

#[test]
fn guest_that_comes_while_the_steward_is_away_is_served_when_it_is_back() {
    require!(Root);
    let mut rig = rig(&leased(Placement::Copy));
    rig.daemon.end_steward(Signal::KILL);
    rig = rig.next_guest();
    rig.daemon.await_impaired(0, "changes wait");
    rig.daemon.restart_lessor(&rig.veth.near);
    rig.post(64, &[BUFFER]);
    rig.daemon.await_recovered(0);
    rig.await_passes_both_ways();
}

#[test]
fn queue_that_another_process_has_is_tried_again_until_it_is_free() {
    require!(Root);
    let guest = DriverConfig::with_pairs(2);
    let serve = leased(Placement::Copy).with("--queues", "2");
    let mut rig = Rig::with(VethPair::with(2, 1500), &serve, &guest);
    // The old guest goes, and the new one is not served before the steward is back.
    rig.daemon.end_steward(Signal::KILL);
    rig = rig.next_guest_with(&guest);
    rig.daemon.await_impaired(0, "changes wait");
    let index = rig.veth.near.index_of(VethPair::NIC);
    let memory = OwnMemory::new(64 * 2048).expect("memory");
    let umem = Umem::aligned(Arc::new(memory), 2048, 0).expect("good");
    let config = SocketConfig {
        bind_timeout: wait::SOON,
        ..SocketConfig::new(index, QueueId(1))
    };
    let other = rig
        .veth
        .near
        .enter(|| Socket::open(&umem, &config))
        .expect("it is free");
    rig.daemon.restart_lessor(&rig.veth.near);
    rig.daemon
        .await_port(0, "back", |port| port["steering_note"].is_null());
    rig.daemon.await_impaired(0, "held by another AF_XDP socket");
    // Others wait less for it than the first time.
    rig.daemon.await_impaired(0, "after 200 ms");
    drop(other);
    rig.daemon.await_recovered(0);
    for pair in &mut rig.driver.pairs {
        let sent = frame::plain(100, 1);
        pair.send(&sent, Layout::Whole);
        frame::assert_same(&rig.wire.receive(wait::SOON).expect("it arrives"), &sent);
    }
    assert_eq!(rig.daemon.port(0)["sessions"].as_u64(), Some(2));
}

#[rstest]
fn memory_that_is_plugged_in_while_the_steward_is_away_ends_nothing(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig(&leased(placement));
    let more = GuestRam::new(&[(GuestAddr(16 << 30), 16 << 20)]).expect("memory");
    let regions = more.regions().expect("regions");
    let info = region_info(&regions[0]);
    rig.daemon.end_steward(Signal::KILL);
    rig.driver.frontend().add_mem_region(&info).expect("added");
    match placement {
        Placement::Copy => rig.assert_passes_both_ways(),
        // Other memory needs another socket.
        _ => rig.daemon.await_impaired(0, "changes wait"),
    }
    rig.daemon.restart_lessor(&rig.veth.near);
    rig.daemon.await_recovered(0);
    rig.await_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["sessions"].as_u64(), Some(1));
}

/// Registering takes some 40 ms here, and begins with asking the steward for sockets.
#[test]
fn memory_that_is_registered_while_the_steward_is_away_is_used_when_it_is_back() {
    require!(Root);
    let config = DriverConfig::with_memory(vec![(GuestAddr(0), 64 << 20), (GuestAddr(4 << 30), 256 << 20)]);
    for round in 0..4 {
        let mut rig = Rig::with(VethPair::new(), &leased(Placement::Direct), &config);
        std::thread::sleep(Duration::from_millis(15 * round));
        rig.daemon.end_steward(Signal::KILL);
        // The registration ends meanwhile.
        std::thread::sleep(Duration::from_millis(300));
        rig.daemon.restart_lessor(&rig.veth.near);
        let of_guest = |port: &Value| port["lanes"][0]["backing"] == "guest memory";
        rig.daemon.await_port(0, "direct", of_guest);
        rig.post(64, &[BUFFER]);
        rig.await_passes_both_ways();
        assert_eq!(rig.daemon.port(0)["sessions"].as_u64(), Some(1));
    }
}

#[test]
fn daemon_leases_anew_from_a_steward_that_knows_nothing_of_it() {
    require!(Root);
    let mut rig = rig(&leased(Placement::Copy));
    // It takes everything back at its end.
    rig.daemon.end_steward(Signal::INT);
    rig.daemon.await_impaired(0, "takes all leases back and ends");
    let said = rig.daemon.process().said();
    assert!(said.contains("takes all leases back and ends"), "{said}");
    for other in ["the steward is away", "trying nic0 again"] {
        assert!(!said.contains(other), "{said}");
    }
    rig.daemon.restart_lessor(&rig.veth.near);
    rig.await_passes_both_ways();
    // Its state is published after the lane is built.
    rig.daemon
        .await_port(0, "well again", |port| port["impaired"].is_null());
}

#[test]
fn network_leases_anew_from_a_steward_that_knows_nothing_of_it() {
    require!(Root);
    let text = lan::file(Some(VethPair::NIC), &[""]);
    let serve = Serve::file().leased();
    let mut lan = Lan::on(VethPair::new(), &serve, &text, 1, &DriverConfig::default());
    lan.daemon.end_steward(Signal::INT);
    let why = |lan: &Lan| lan.daemon.status()["networks"][0]["impaired"].clone();
    let keeps_the_reason = || {
        why(&lan)
            .as_str()
            .is_some_and(|why| why.contains("takes all leases back and ends"))
    };
    assert!(wait::until(wait::SOON, keeps_the_reason), "{}", why(&lan));
    lan.daemon.restart_lessor(&lan.veth.near);
    assert!(wait::until(wait::SOON, || why(&lan).is_null()), "{}", why(&lan));
}

/// What the one before had may be its helper's for a moment still.
#[rstest]
fn daemon_that_is_started_as_soon_as_one_was_killed_has_its_queues(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let serve = leased(placement);
    let mut rig = rig(&serve);
    for _ in 0..10 {
        rig.daemon.kill();
        rig.daemon.restart(&rig.veth.near, &serve);
        rig.daemon.await_listening();
        rig = rig.next_guest();
        rig.post(64, &[BUFFER]);
        rig.assert_passes_both_ways();
    }
    let lessor = rig.daemon.lessor.as_ref().expect("leased");
    let said = lessor.steward.said();
    // That of the first, and of each of the others.
    assert_eq!(said.matches(" leased ").count(), 11, "{said}");
}

#[test]
fn what_the_policy_does_not_allow_is_said_in_one_line() {
    require!(Root);
    let veth = VethPair::new();
    let refused = |serve: &Serve, words: &[&str]| {
        let dir = private_dir();
        let lessor = Lessor::start(&veth.near, &dir, &[VethPair::NIC]);
        Daemon::spawn_with(&veth.near, dir, Some(lessor), serve).assert_complains(words);
    };
    let nic9 = Serve::interface("nic9").leased();
    refused(
        &nic9,
        &[
            "steward refuses",
            "user 65534",
            "`interface = \"nic9\"`",
            "no rule",
            "(--user)",
        ],
    );
    let many = leased(Placement::Copy).with("--queues", "9");
    refused(&many, &["nic0 has 1 receive queue(s)", "ethtool -L"]);
}
