//! A port of a network that has a queue of the NIC for itself: its frames to the LAN leave by that, and all else is as
//! for any port of the network. Rings, layouts, VLANs and multicast are tested in crate `dataplane`
//! (`network_tests/own_queue.rs`).

mod life;

use std::collections::BTreeSet;

use rstest::rstest;
use testkit::lan::{Ear, HOST, Lan, STRANGER, frame, mac, port, with_host};
use testkit::{Driver, DriverConfig, PacketPort, Serve, VethPair, require, skip_half, wait};
use vhost::vhost_user::VhostUserFrontend;

/// The guest whose port has a queue of its own.
const OWN: usize = 0;

/// What the wire sends comes to queue 0. Either the network has that, or the port: then what is for other ports does
/// not reach them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue0 {
    Networks,
    Ports,
}

/// A port's keys with which it has a queue of its own.
fn own(queue_0: Queue0, memory: &str, keys: &str) -> String {
    let queue = u8::from(queue_0 == Queue0::Networks);
    format!(
        "ifname = \"{}\"\nstart-queue = {queue}\nmemory = \"{memory}\"\n{keys}",
        VethPair::NIC
    )
}

fn network(queue_0: Queue0, workers: usize) -> String {
    let queue = u8::from(queue_0 == Queue0::Ports);
    format!(
        "[daemon]\nworkers = {workers}\n[network.lan]\nuplink = \"{}\"\nstart-queue = {queue}\n",
        VethPair::NIC
    )
}

/// Two queues, of which the wire's frames come to the first.
fn uplink() -> VethPair {
    let veth = VethPair::with(2, 1500);
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    with_host(veth)
}

/// Ports with these keys behind those of [`OWN`]'s, which has those at first.
fn lan(queue_0: Queue0, memory: &str, ports: &[&str], workers: usize) -> Lan {
    let mut text = network(queue_0, workers);
    for (guest, keys) in ports.iter().enumerate() {
        let keys = match guest {
            OWN => own(queue_0, memory, keys),
            _ => (*keys).to_owned(),
        };
        text += &port(guest, &keys);
    }
    let lan = Lan::on(
        uplink(),
        &Serve::file(),
        &text,
        ports.len(),
        &DriverConfig::default(),
    );
    let shown = lan.daemon.port(OWN);
    let mode = shown["lanes"][0]["mode"].as_str().expect("it runs").to_owned();
    assert!(mode != "network", "it has its queue: {shown:#}");
    lan
}

/// Frames of the LAN to a guest arrive once the wire's queue is served.
fn send_back(lan: &mut Lan, guest: usize, frame: &[u8]) {
    lan.wire.send(frame);
    assert_eq!(lan.received(guest), frame, "guest {guest}");
}

#[rstest]
fn it_reaches_everybody_and_everybody_it(
    #[values("copy", "send-direct", "direct")] memory: &str,
    #[values(Queue0::Networks, Queue0::Ports)] queue_0: Queue0,
) {
    require!(Root);
    let mut lan = lan(queue_0, memory, &["", "", ""], 2);
    let shown = lan.daemon.port(OWN);
    let says_why = shown["lanes"][0]["fallbacks"]
        .to_string()
        .contains("direct not used: ");
    assert_eq!(says_why, memory == "direct", "{shown:#}");
    let host = Ear::on(&lan.veth.near, VethPair::NIC);
    for (round, len) in [60, 64, 65, 590, 1514].into_iter().enumerate() {
        for (from, to) in [(OWN, 1), (1, OWN), (OWN, 2), (2, OWN)] {
            let sent = frame(mac(to), mac(from), len, round as u8);
            lan.send(from, &sent);
            assert_eq!(lan.received(to), sent, "{from} to {to}");
        }
        for guest in [OWN, 1] {
            let out = frame(STRANGER, mac(guest), len, round as u8);
            lan.send(guest, &out);
            assert_eq!(lan.received_by_wire(), out, "guest {guest}");
        }
        send_back(&mut lan, OWN, &frame(mac(OWN), STRANGER, len, round as u8));
        let to_host = frame(HOST, mac(OWN), len, round as u8);
        lan.send(OWN, &to_host);
        host.hears(&to_host);
        let back = frame(mac(OWN), HOST, len, round as u8);
        host.0.send(&back);
        assert_eq!(lan.received(OWN), back);
        for guest in &mut lan.guests {
            guest.pairs[0].await_sent();
        }
    }
    if queue_0 == Queue0::Networks {
        lan.assert_quiet();
    }
    // By its own queue: nobody else's lane has the kernel send.
    let kicks = lan.daemon.port(OWN)["lanes"][0]["counters"].to_string();
    assert!(lan.daemon.counter_of("vm0", "nic_kicks") >= 5, "{kicks}");
}

/// Sends UDP flows to the guest by all queues of the NIC; each arrives, once, at one of its pairs.
#[track_caller]
fn all_flows_arrive(guest: &mut Driver, wire: &PacketPort, len: usize) -> Vec<usize> {
    const FLOWS: u16 = 64;
    let flow = |flow| {
        let mut packet = testkit::frame::udp(flow, len);
        packet[..6].copy_from_slice(&mac(OWN));
        packet
    };
    let mut missing: BTreeSet<u16> = (0..FLOWS).collect();
    let mut counts = vec![0; guest.pairs.len()];
    (0..FLOWS).for_each(|at| wire.send(&flow(at)));
    let all = wait::until(wait::SOON, || {
        for (pair, count) in guest.pairs.iter_mut().zip(&mut counts) {
            while let Some(got) = pair.poll() {
                let at = (0..FLOWS).find(|&at| got.frame == flow(at));
                let at = at.expect("as it was sent");
                assert!(missing.remove(&at), "flow {at} comes twice");
                *count += 1;
            }
        }
        missing.is_empty()
    });
    assert!(all, "missing: {missing:?}");
    counts
}

#[rstest]
fn frames_reach_it_by_whichever_queue_they_come(
    #[values("copy", "send-direct")] memory: &str,
    #[values(1, 2)] pairs: usize,
    #[values(1, 2)] workers: usize,
) {
    skip_half!(memory == "copy", pairs, workers);
    require!(Root);
    let queues = u32::try_from(pairs + 1).expect("few");
    let keys = own(Queue0::Networks, memory, &format!("queues = {pairs}"));
    let text = [network(Queue0::Networks, workers), port(OWN, &keys)].concat();
    let config = DriverConfig::with_pairs(pairs);
    let mut lan = Lan::on(VethPair::with(queues, 1500), &Serve::file(), &text, 1, &config);
    for pair in 1..pairs {
        lan.guests[OWN].pairs[pair].post(64, &[2048]);
    }
    lan.guests[OWN].pairs[0].post(64, &[2048]);
    lan.daemon.await_port(OWN, "all lanes run", |port| {
        (0..pairs).all(|pair| port["lanes"][pair]["running"] == true)
    });
    let switch = |guest: &mut Driver, on: bool| {
        for index in 2..2 * pairs {
            guest.frontend().set_vring_enable(index, on).expect("switched");
        }
    };
    for (round, on) in [true, false, true, false].into_iter().enumerate() {
        switch(&mut lan.guests[OWN], on);
        let counts = all_flows_arrive(&mut lan.guests[OWN], &lan.wire, 200 + round);
        assert!(on || counts[0] == 64, "by the first pair: {counts:?}");
        let out = frame(STRANGER, mac(OWN), 60, round as u8);
        lan.send(OWN, &out);
        assert_eq!(lan.received_by_wire(), out);
    }
    let program = lan.daemon.port(OWN).to_string();
    assert!(
        lan.daemon.counter_of("vm0", "redirected") > 0,
        "by its queue: {program}"
    );
}
