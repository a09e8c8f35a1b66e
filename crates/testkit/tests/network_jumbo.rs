//! Frames longer than a chunk on a network of guarded ports: between guests, the host and the LAN, with tags and
//! without.

use std::net::Ipv4Addr;

use rstest::rstest;
use testkit::driver::F_HOST_ALL;
use testkit::frame::{assert_same, ipv4};
use testkit::lan::{self, BROADCAST, HOST, Lan, STRANGER, mac, tagged, with_host};
use testkit::{DriverConfig, Layout, PacketPort, Serve, VethPair, require, wait};

const MTU: u32 = 9000;
/// What each guest may send from: an address of its own, and that of GSO packets here.
const PORTS: [&str; 4] = [
    "ips = [\"192.0.2.10\", \"10.9.0.1\"]",
    "ips = [\"192.0.2.11\", \"10.9.0.1\"]",
    "ips = [\"192.0.2.12\", \"10.9.0.1\"]\nvlan = 100",
    "ips = [\"192.0.2.13\", \"10.9.0.1\"]\ntrunk = \"100-101\"",
];
/// Around what one chunk and two of them hold, and what the interface does.
const LENGTHS: [usize; 11] = [1514, 1515, 2048, 2049, 3839, 3840, 3841, 4097, 7681, 8900, 9014];

/// UDP over IPv4 in a frame of so many bytes, with the address of the guest of that number as its source.
fn packet(to: [u8; 6], from: [u8; 6], guest: u8, len: usize) -> Vec<u8> {
    let [own, all] = [Ipv4Addr::new(192, 0, 2, 10 + guest), Ipv4Addr::BROADCAST];
    let payload: Vec<u8> = (0..len - 34).map(|at| (at * 7 + at / 251) as u8).collect();
    [&to[..], &from, &[8, 0], &ipv4(own, all, 17, &payload)].concat()
}

struct World {
    lan: Lan,
    host: PacketPort,
}

impl World {
    fn new(keys: &str) -> Self {
        let veth = VethPair::with(1, MTU);
        veth.carry_no_gso_packets();
        let text = lan::file(Some(VethPair::NIC), &PORTS);
        let text = text.replacen("uplink", &format!("{keys}\nuplink"), 1);
        let config = DriverConfig::with(F_HOST_ALL);
        let lan = Lan::on(with_host(veth), &Serve::file(), &text, PORTS.len(), &config);
        Self {
            host: PacketPort::open(&lan.veth.near, VethPair::NIC),
            lan,
        }
    }

    fn send(&mut self, guest: usize, frame: &[u8], layout: Layout) {
        self.lan.guests[guest].pairs[0].send(frame, layout);
    }

    #[track_caller]
    fn assert_got(&mut self, guest: usize, frame: &[u8]) {
        assert_same(&self.lan.received(guest), frame);
    }
}

#[track_caller]
fn assert_hears(port: &PacketPort, frame: &[u8]) {
    let is_ours = |got: &Vec<u8>| got[6..12] == frame[6..12];
    let got = std::iter::from_fn(|| port.receive(wait::SOON)).find(is_ours);
    assert_same(&got.expect("it comes"), frame);
}

#[rstest]
fn long_frames_reach_whom_they_are_for(
    #[values(
        "segments = \"whole\"",
        "segments = \"by-reference\"",
        "mode = \"skb\"",
        "mode = \"tap\"",
        "mode = \"tap\"\nsegments = \"whole\""
    )]
    keys: &str,
) {
    require!(Root);
    let mut world = World::new(keys);
    for len in LENGTHS {
        for layout in [Layout::Whole, Layout::Pieces(1000), Layout::Indirect(333)] {
            let sent = packet(mac(1), mac(0), 0, len);
            world.send(0, &sent, layout);
            world.assert_got(1, &sent);
            let sent = packet(STRANGER, mac(0), 0, len);
            world.send(0, &sent, layout);
            assert_hears(&world.lan.wire, &sent);
            let sent = packet(HOST, mac(0), 0, len);
            world.send(0, &sent, layout);
            assert_hears(&world.host, &sent);
        }
        for (from, source) in [(&world.lan.wire, STRANGER), (&world.host, HOST)] {
            from.send(&packet(mac(0), source, 99, len));
        }
        let mut sources = [0; 2].map(|_| {
            let got = world.lan.received(0);
            let source = got[6..12].try_into().expect("six bytes");
            assert_same(&got, &packet(mac(0), source, 99, len));
            source
        });
        sources.sort_unstable();
        assert_eq!(sources, [STRANGER, HOST]);
        // To a group.
        let sent = packet(BROADCAST, mac(0), 0, len);
        world.send(0, &sent, Layout::Whole);
        world.assert_got(1, &sent);
        assert_hears(&world.lan.wire, &sent);
        assert_hears(&world.host, &sent);
        let sent = packet(BROADCAST, HOST, 99, len);
        world.host.send(&sent);
        assert_hears(&world.lan.wire, &sent);
        (0..2).for_each(|guest| world.assert_got(guest, &sent));
        let sent = packet(BROADCAST, STRANGER, 99, len);
        world.lan.wire.send(&sent);
        assert_hears(&world.host, &sent);
        (0..2).for_each(|guest| world.assert_got(guest, &sent));
    }
    for counter in ["ip_source", "headers", "host_no_room", "no_peer"] {
        assert_eq!(
            world.lan.daemon.counter(&format!("from_guest_{counter}")),
            0,
            "{counter}"
        );
    }
}

/// Tags are put in and taken off.
#[rstest]
fn long_frames_of_vlans_reach_whom_they_are_for() {
    require!(Root);
    let mut world = World::new("");
    for len in LENGTHS {
        let sent = packet(mac(3), mac(2), 2, len);
        world.send(2, &sent, Layout::Pieces(1000));
        world.assert_got(3, &tagged(&sent, 100));
        let sent = packet(mac(2), mac(3), 3, len);
        world.send(3, &tagged(&sent, 100), Layout::Whole);
        world.assert_got(2, &sent);
        for (guest, to) in [(2, STRANGER), (2, BROADCAST), (3, STRANGER), (3, HOST), (2, HOST)] {
            let sent = packet(to, mac(guest), guest as u8, len);
            let with_tag = tagged(&sent, 100);
            let shown = if guest == 3 { &with_tag } else { &sent };
            world.send(guest, shown, Layout::Pieces(1000));
            if to != HOST {
                assert_hears(&world.lan.wire, &with_tag);
            }
            if to != STRANGER {
                assert_hears(&world.host, &with_tag);
            }
            if to == BROADCAST {
                world.assert_got(3, &with_tag);
            }
        }
        for (is_host, source) in [(true, HOST), (false, STRANGER)] {
            for to in [mac(2), mac(3), BROADCAST] {
                let sent = packet(to, source, 99, len);
                let with_tag = tagged(&sent, 100);
                let from = if is_host { &world.host } else { &world.lan.wire };
                from.send(&with_tag);
                if to != mac(3) {
                    world.assert_got(2, &sent);
                }
                if to != mac(2) {
                    world.assert_got(3, &with_tag);
                }
            }
        }
    }
}
