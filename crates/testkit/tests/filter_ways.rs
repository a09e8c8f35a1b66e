//! Filter rules of ports of networks, for the host's own stack; with a queue of the port's own and without.

use std::net::{Ipv4Addr, UdpSocket};

use rstest::rstest;
use testkit::filter_rules::{HOST, tables, udp};
use testkit::lan::{Lan, mac, port};
use testkit::{DriverConfig, Serve, VethPair, require, wait};

/// Of the uplink, hence the host's.
const HOST_MAC: [u8; 6] = [0x02, 0, 0, 0, 2, 0];
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);

/// A network, and two ports in it: the first with these keys and rules.
fn lan(workers: usize, keys: &str, list: &[&str]) -> Lan {
    let veth = VethPair::with(2, 1500);
    // What the wire sends comes to queue 0.
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    veth.near
        .ip(&["link", "set", VethPair::NIC, "address", "02:00:00:00:02:00"]);
    veth.await_near();
    let network = format!(
        "[daemon]\nworkers = {workers}\n[network.lan]\nuplink = \"{}\"\nstart-queue = 0\n",
        VethPair::NIC
    );
    let text = [network, port(0, keys), tables(0, list), port(1, "")].concat();
    Lan::on(veth, &Serve::file(), &text, 2, &DriverConfig::default())
}

/// Keys of a port with a queue of its own in that placement; empty: without one.
fn own(memory: &str) -> String {
    if memory.is_empty() {
        return String::new();
    }
    format!(
        "ifname = \"{}\"\nstart-queue = 1\nmemory = \"{memory}\"",
        VethPair::NIC
    )
}

/// The port of a datagram of these tests.
fn port_of(frame: &[u8]) -> Option<u16> {
    let is_udp = frame[12..14] == [8, 0] && frame[23] == 17 && frame[26..29] == HOST.octets()[..3];
    is_udp.then(|| u16::from_be_bytes([frame[36], frame[37]]))
}

/// That of the next one that a guest gets.
#[track_caller]
fn next(lan: &mut Lan, guest: usize) -> u16 {
    loop {
        let got = lan.received(guest);
        if let Some(port) = port_of(&got) {
            return port;
        }
    }
}

const FROM: &str = "direction=from-guest action=allow protocol=udp destination-ports=53";
const TO: &str = "direction=to-guest action=allow protocol=udp destination-ports=80";

/// With the sum of the IP header, which a stack wants.
fn summed(frame: Vec<u8>) -> Vec<u8> {
    let mut frame = frame;
    let words = frame[14..34].chunks(2);
    let sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    frame
}

/// By sockets of the host, not by frames.
#[rstest]
fn they_hold_for_what_the_hosts_own_stack_says_and_hears(
    #[values("", "copy", "send-direct")] memory: &str,
    #[values(1, 2)] workers: usize,
) {
    require!(Root);
    let mut lan = lan(workers, &own(memory), &[FROM, TO]);
    let near = &lan.veth.near;
    near.ip(&["address", "add", "10.0.0.1/24", "dev", VethPair::NIC]);
    let address = GUEST.to_string();
    let known = ["neigh", "replace", &address, "lladdr", "02:00:00:00:00:00", "dev"];
    near.ip(&[&known[..], &[VethPair::NIC]].concat());
    let [refused, allowed] = near.enter(|| {
        [54, 53].map(|port| {
            let socket = UdpSocket::bind((HOST, port)).expect("free");
            socket.set_read_timeout(Some(wait::SOON)).expect("a socket");
            socket
        })
    });
    for round in 1..=20u8 {
        for port in [54, 53] {
            lan.send(0, &summed(udp(HOST_MAC, mac(0), GUEST, port)));
        }
        let mut bytes = [0; 64];
        let (_, from) = allowed.recv_from(&mut bytes).expect("it arrives");
        assert_eq!(from.ip(), GUEST);
        for port in [81, 80] {
            allowed.send_to(&[round; 20], (GUEST, port)).expect("sent");
        }
        assert_eq!(next(&mut lan, 0), 80);
    }
    refused.set_nonblocking(true).expect("a socket");
    assert!(refused.recv_from(&mut [0; 64]).is_err(), "nothing came");
    assert_eq!(lan.daemon.counter_of("vm0", "from_guest_filter"), 20);
    assert!(lan.daemon.counter_of("vm0", "to_guest_filter") >= 20);
}
