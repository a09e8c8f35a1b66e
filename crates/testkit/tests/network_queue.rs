//! A port of a network that has a queue of the NIC for itself: its frames to the LAN leave by that, and all else is as
//! for any port of the network. Rings, layouts, VLANs, multicast and several pairs are tested in crate
//! `dataplane` (`network_tests/own_queue.rs`).

mod life;

use rstest::rstest;
use testkit::lan::{Ear, HOST, Lan, STRANGER, frame, mac, port, with_host};
use testkit::{DriverConfig, Serve, VethPair, require};

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
    let redirected = lan.daemon.counter_of("vm0", "redirected");
    assert_eq!(redirected > 0, queue_0 == Queue0::Ports, "by its own queue");
    // By its own queue: nobody else's lane has the kernel send.
    let kicks = lan.daemon.port(OWN)["lanes"][0]["counters"].to_string();
    assert!(lan.daemon.counter_of("vm0", "nic_kicks") >= 5, "{kicks}");
}
