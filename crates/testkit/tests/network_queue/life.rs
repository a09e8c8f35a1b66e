//! Ports with a queue of their own that come and go, daemons and stewards that are killed, interfaces that go away.

use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::driver;
use testkit::lan::{Lan, STRANGER, assert_reaches, frame, guest, mac, none_is_lost, port};
use testkit::{Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, require, wait};

use super::{OWN, Queue0, lan, network, own, uplink};

#[rstest]
fn it_comes_and_goes_and_the_others_lose_no_frame(
    #[values(false, true)] leased: bool,
    #[values("copy", "send-direct")] memory: &str,
) {
    require!(Root);
    let veth = uplink();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    let serve = Serve::file().leased_if(leased);
    let stays = [network(Queue0::Networks, 1), port(1, ""), port(2, "")].concat();
    let daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &stays);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut guests = [1, 2].map(|number| guest(&daemon, number));
    for _ in 0..3 {
        none_is_lost(&mut guests, [1, 2], None, || {
            let with = [&*stays, &port(OWN, &own(Queue0::Networks, memory, ""))].concat();
            let told = daemon.reload_with(&with);
            assert!(told.contains("port vm0 began"), "{told}");
            let mut guest_of_own = guest(&daemon, OWN);
            assert_reaches(&mut guest_of_own, OWN, &wire);
            // Without its queue, and its guest comes again.
            let told = daemon.reload_with(&[&*stays, &port(OWN, "")].concat());
            assert!(told.contains("port vm0 has changed"), "{told}");
            drop(guest_of_own);
            assert_reaches(&mut guest(&daemon, OWN), OWN, &wire);
            daemon.reload_with(&stays);
        });
    }
}

#[rstest]
fn it_goes_on_after_daemon_and_steward_were_killed(#[values("copy", "send-direct")] memory: &str) {
    require!(Root);
    let serve = Serve::file().leased();
    let text = [
        network(Queue0::Networks, 1),
        port(OWN, &own(Queue0::Networks, memory, "")),
        port(1, ""),
    ]
    .concat();
    let mut lan = Lan::on(uplink(), &serve, &text, 2, &DriverConfig::default());
    for _ in 0..3 {
        let to_port = frame(mac(1), mac(OWN), 200, 1);
        let to_wire = frame(STRANGER, mac(OWN), 200, 1);
        // Some of it is under way then.
        for _ in 0..8 {
            lan.send(OWN, &to_port);
            lan.send(OWN, &to_wire);
        }
        lan.daemon.kill();
        lan.daemon.restart_file(&lan.veth.near, &serve);
        let again = |(number, guest): (usize, Driver)| {
            let path = lan.daemon.path(&format!("vm{number}.sock"));
            guest.resume(driver::connect(&path)).expect("accepted")
        };
        lan.guests = std::mem::take(&mut lan.guests)
            .into_iter()
            .enumerate()
            .map(again)
            .collect();
        assert_reaches(&mut lan.guests[OWN], OWN, &lan.wire);
        lan.daemon.end_steward(Signal::KILL);
        assert_reaches(&mut lan.guests[OWN], OWN, &lan.wire);
        lan.daemon.restart_lessor(&lan.veth.near);
        assert_reaches(&mut lan.guests[OWN], OWN, &lan.wire);
        // What was under way to the other guest, and then something new.
        let last = frame(mac(1), mac(OWN), 300, 9);
        lan.send(OWN, &last);
        let mut came = std::iter::from_fn(|| lan.guests[1].pairs[0].receive(wait::SOON));
        assert!(came.any(|got| got.frame == last));
    }
}

#[rstest]
fn while_its_interface_is_down_it_reaches_the_other_ports(#[values("copy", "send-direct")] memory: &str) {
    require!(Root);
    let mut lan = lan(Queue0::Networks, memory, &["", ""], 1);
    for round in 0..3 {
        lan.veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
        let down = || !lan.daemon.port(OWN)["impaired"].is_null();
        assert!(wait::until(wait::SOON, down), "{:#}", lan.daemon.port(OWN));
        for number in 0..200 {
            let pair = &mut lan.guests[OWN].pairs[0];
            // Lost, and no obstacle to what comes behind it.
            pair.send(&frame(STRANGER, mac(OWN), 300, number), Layout::Whole);
            let sent = frame(mac(1), mac(OWN), 300, number);
            pair.send(&sent, Layout::Whole);
            assert_eq!(lan.received(1), sent, "round {round}");
            lan.guests[OWN].pairs[0].await_sent();
            let back = frame(mac(OWN), mac(1), 300, number);
            lan.guests[1].pairs[0].reap_sent();
            lan.send(1, &back);
            assert_eq!(lan.received(OWN), back, "round {round}");
        }
        lan.veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
        assert_reaches(&mut lan.guests[OWN], OWN, &lan.wire);
    }
}

#[rstest]
fn without_its_interface_it_reaches_the_other_ports(#[values("copy", "send-direct")] memory: &str) {
    require!(Root);
    let mut lan = lan(Queue0::Networks, memory, &["", ""], 1);
    lan.veth.near.ip(&["link", "del", VethPair::NIC]);
    let sent = frame(mac(1), mac(OWN), 100, 1);
    let arrives = wait::until(wait::SOON, || {
        lan.guests[OWN].pairs[0].reap_sent();
        lan.send(OWN, &sent);
        let got = lan.guests[1].pairs[0].receive(Duration::from_millis(100));
        got.is_some_and(|got| got.frame == sent)
    });
    assert!(arrives, "{:#}", lan.daemon.status());
    let gone = || lan.daemon.port(OWN)["lanes"][0]["mode"] == "network";
    assert!(wait::until(wait::SOON, gone), "{:#}", lan.daemon.status());
    lan.veth.join(2, 1500);
    lan.veth
        .near
        .run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    lan.daemon
        .await_that(|| lan.daemon.port(OWN)["lanes"][0]["mode"] != "network");
    let wire = PacketPort::open(&lan.veth.far, VethPair::WIRE);
    assert_reaches(&mut lan.guests[OWN], OWN, &wire);
}
