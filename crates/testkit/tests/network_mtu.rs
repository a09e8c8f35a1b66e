//! An MTU that changes under a network whose uplink has several queues: each is set up anew in its turn if it has to
//! be, and the guests' frames leave by the others meanwhile.
//!
//! A copy of one of the daemon's sockets keeps its queue taken, see `mtu.rs`.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::holdings::{copies_of_sockets, xdp_sockets};
use testkit::lan::{self, Lan, STRANGER, mac};
use testkit::{DriverConfig, Layout, Serve, VethPair, frame, require, wait};

const QUEUES: u32 = 2;
/// Flows of the wire that are enough for each queue to have some.
const FLOWS: u16 = 64;
/// How long guests' frames wait for an uplink of which no queue is left (`network/uplink.rs`).
const LONGEST_WAIT: Duration = Duration::from_secs(5);

fn set_mtu(lan: &Lan, mtu: u64) {
    let near = &lan.veth.near;
    near.ip(&["link", "set", VethPair::NIC, "mtu", &mtu.to_string()]);
}

/// A datagram of a flow, like no other.
fn datagram(to: [u8; 6], from: [u8; 6], flow: u16, len: usize) -> Vec<u8> {
    let mut frame = frame::udp_once(flow, len);
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame
}

/// A frame of the guest's leaves.
#[track_caller]
fn assert_leaves(lan: &mut Lan, flow: u16, len: usize) {
    let sent = datagram(STRANGER, mac(0), flow, len);
    lan.send(0, &sent);
    let got = lan.wire.receive(wait::SOON);
    frame::assert_same(&got.unwrap_or_else(|| panic!("{:#}", lan.daemon.status())), &sent);
}

/// Frames of many flows come to the guest, and leave it.
#[track_caller]
fn assert_all_pass(lan: &mut Lan, len: usize) {
    for flow in 0..FLOWS {
        assert_leaves(lan, flow, len);
        let sent = datagram(mac(0), STRANGER, flow, len);
        lan.wire.send(&sent);
        frame::assert_same(&lan.received(0), &sent);
    }
}

/// Keeps the socket of one of the uplink's queues open.
fn hold(lan: &mut Lan) -> OwnedFd {
    let pid = lan.daemon.process().pid();
    let uplinks = xdp_sockets(pid);
    assert_eq!(uplinks.len(), QUEUES as usize);
    let mut copies = copies_of_sockets(pid).into_iter();
    let of_uplink = copies.find(|(inode, _)| uplinks.contains(inode));
    of_uplink.expect("the daemon has it").1
}

#[test]
fn guest_s_frames_leave_while_queues_of_the_uplink_follow_another_mtu() {
    require!(Root);
    let veth = VethPair::with(QUEUES, 1500);
    veth.far.ip(&["link", "set", VethPair::WIRE, "mtu", "3000"]);
    let text = lan::file(Some(VethPair::NIC), &[""]);
    let text = text.replacen(
        "[network.lan]\n",
        &format!("[network.lan]\nqueues = {QUEUES}\n"),
        1,
    );
    let mut lan = Lan::on(veth, &Serve::file(), &text, 1, &DriverConfig::default());
    assert_all_pass(&mut lan, 1514);
    let held = hold(&mut lan);
    set_mtu(&lan, 3000);
    let is_running = |network: &Value| {
        let queues = network["queues"].as_array().expect("queues").iter();
        queues.filter(|queue| queue["running"] == true).count()
    };
    let Lan {
        daemon, guests, wire, ..
    } = &mut lan;
    let follow = || {
        let became = wait::until(wait::SOON, || {
            let network = &daemon.status()["networks"][0];
            network["impaired"].is_string() && network["mtu"] == 3000 && is_running(network) == 1
        });
        assert!(became, "{:#}", daemon.status());
    };
    // Also while the last queue is set up anew, unless that takes too long.
    let guest = &mut guests[0].pairs[0];
    let mut last_left = Instant::now();
    wait::rounds_during(follow, |round| {
        let flow = u16::try_from(round % u32::from(FLOWS)).expect("small");
        let sent = datagram(STRANGER, mac(0), flow, 1514);
        let begun = Instant::now();
        guest.send(&sent, Layout::Whole);
        guest.await_sent();
        let waited = last_left.elapsed();
        match wire.receive(wait::SOON) {
            Some(got) => frame::assert_same(&got, &sent),
            None => assert!(waited >= LONGEST_WAIT, "lost after {waited:?}"),
        }
        last_left = begun;
    });
    // The guest may send such frames as soon as its port knows.
    let leaves = wait::until(wait::SOON, || {
        lan.send(0, &datagram(STRANGER, mac(0), 0, 3014));
        lan.wire
            .receive(Duration::from_millis(200))
            .is_some_and(|got| got.len() == 3014)
    });
    assert!(leaves, "{:#}", lan.daemon.status());
    lan.daemon.await_port(0, "the MTU", |port| port["mtu"] == 3000);
    // Those that were on their way when the first one came.
    let last = datagram(STRANGER, mac(0), 0, 3000);
    lan.send(0, &last);
    let _ = lan.wire.receive_before(&last);
    drop(held);
    lan.daemon.await_network("recovered", |network| {
        network["impaired"].is_null() && is_running(network) == QUEUES as usize
    });
    assert_all_pass(&mut lan, 3014);
    shrink(&mut lan);
}

/// To an MTU that all queues do for: nothing is lost, and no socket is another.
#[track_caller]
fn shrink(lan: &mut Lan) {
    let pid = lan.daemon.process().pid();
    let sockets = xdp_sockets(pid);
    set_mtu(lan, 1500);
    let follows = wait::until(wait::SOON, || {
        assert_all_pass(lan, 1514);
        lan.daemon.network()["mtu"] == 1500
    });
    assert!(follows, "{:#}", lan.daemon.network());
    assert_all_pass(lan, 1514);
    // As soon as its port knows.
    let before = lan.daemon.counter_of("vm0", "from_guest_too_long");
    let is_refused = wait::until(wait::SOON, || {
        lan.guests[0].pairs[0].send(&datagram(STRANGER, mac(0), 0, 3014), Layout::Whole);
        lan.daemon.counter_of("vm0", "from_guest_too_long") > before
    });
    assert!(is_refused, "{:#}", lan.daemon.status());
    assert_eq!(xdp_sockets(pid), sockets);
}
