//! Guests ask for MAC addresses (ARP, ND), and the bridge of their host answers out of its tables, or passes it on.

use std::net::{IpAddr, Ipv6Addr};

use rstest::rstest;
use rustix::process::Signal;
use testkit::frame::{assert_same, ipv6};
use testkit::lan::{BROADCAST, frame, mac};
use testkit::overlay::{BRIDGE, Overlay, Station, Underlay, VXLAN};
use testkit::{DriverConfig, Serve, require, wait};

use super::{MOVER, World, connect};

/// Of guest 2; the bridge has them as neighbours.
const KNOWN: [&str; 2] = ["10.77.0.3", "fd77::3"];

/// A question of guest 0 for the MAC address of that IP address.
fn question(target: &str) -> Vec<u8> {
    match target.parse().expect("valid") {
        IpAddr::V4(target) => arp([10, 77, 0, 1], target.octets()),
        IpAddr::V6(target) => {
            let group = Ipv6Addr::from_bits(0xff02 << 112 | 0x1_ff00_0000 | target.to_bits() & 0xff_ffff);
            let head = [&[0x33, 0x33], &group.octets()[12..], &mac(0), &[0x86, 0xdd]].concat();
            let asks = [
                &[135, 0, 0, 0, 0, 0, 0, 0],
                &target.octets()[..],
                &[1, 1],
                &mac(0),
            ]
            .concat();
            let sender = "fd77::1".parse().expect("valid");
            [head, ipv6(sender, group, 58, &asks)].concat()
        }
    }
}

fn arp(sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let head = [&BROADCAST[..], &mac(0), &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    let mut frame = [&head[..], &mac(0), &sender, &[0; 6], &target].concat();
    frame.resize(60, 0);
    frame
}

/// Whether a frame answers guest 0 that guest 2 has the address.
fn answers(frame: &[u8], question: &[u8]) -> bool {
    frame[..12] == [mac(0), mac(2)].concat()
        && match question[12] {
            8 => frame[20..32] == [&[0, 2], &mac(2)[..], &question[38..42]].concat(),
            // With the address asked for, and an option with the MAC address.
            _ => frame[54] == 136 && frame[62..78] == question[62..78] && frame[80..86] == mac(2),
        }
}

/// Guest 0 of host 0 asks, where there is another guest, too.
struct Asked {
    world: World,
    other: Station,
}

impl Asked {
    fn new(underlay: Underlay, serve: &Serve) -> Self {
        let overlay = Overlay::new(underlay, 3);
        let world = World::with_entries(overlay, serve, &DriverConfig::default());
        let other = connect(&world.daemons[0], 1, MOVER, &DriverConfig::default());
        // Not before: they end when the address of the bridge changes, with its first port.
        let netns = &world.overlay.hosts[0].netns;
        for ip in KNOWN {
            netns.ip(&[
                "neighbour add",
                ip,
                "lladdr 02:00:00:00:00:02 nud noarp dev",
                BRIDGE,
            ]);
        }
        let mut asked = Self { world, other };
        asked.set_port("neigh_suppress on");
        asked.await_advertised(2);
        asked.teach();
        asked
    }

    /// Sets flags of the bridge's port to other hosts.
    fn set_port(&self, flags: &str) {
        let words = format!("link set dev {VXLAN} {flags}");
        let words: Vec<_> = words.split(' ').collect();
        self.world.overlay.hosts[0].netns.run("bridge", &words);
    }

    /// Waits until the bridge has so many addresses of guests at the network's tap.
    #[track_caller]
    fn await_advertised(&self, count: usize) {
        let host = &self.world.overlay.hosts[0];
        let of_guest = |line: &&str| line.contains(" dev vaxh") && line.contains(" static");
        let has_them = || host.entries().lines().filter(of_guest).count() == count;
        assert!(wait::until(wait::SOON, has_them), "{}", host.entries());
    }

    /// Waits until a question reaches host 1. By the first one to the wire the programs learn that there are more. Some
    /// may be lost or arrive twice: [`Station::received`] leaves out those with this kind of hardware.
    #[track_caller]
    fn teach(&mut self) {
        let mut first = question("10.77.0.9");
        first[14..16].fill(0xff);
        let arrives = wait::until(wait::SOON, || {
            self.send(&first);
            self.world.stations[1].receive(wait::QUIET).is_some()
        });
        assert!(arrives);
    }

    fn send(&mut self, frame: &[u8]) {
        self.world.stations[0].send(frame);
    }

    /// This is the next frame of all these, and of the other guest.
    #[track_caller]
    fn assert_arrives(&mut self, at: &[usize], sent: &[u8]) {
        for &to in at {
            assert_same(&self.world.stations[to].received(), sent);
        }
        assert_same(&self.other.received(), sent);
    }

    /// All frames that guest 0 sends now reach all others, once and in this order.
    #[track_caller]
    fn assert_reach_all(&mut self, frames: &[Vec<u8>]) {
        for sent in frames {
            self.send(sent);
        }
        for sent in frames {
            self.assert_arrives(&[1, 2, 3], sent);
        }
    }

    /// The bridge answers what it knows, and other hosts get only what it does not know.
    #[track_caller]
    fn assert_answered(&mut self) {
        for ip in KNOWN {
            let asked = question(ip);
            self.send(&asked);
            let answer = self.world.stations[0].received();
            assert!(answers(&answer, &asked), "{answer:02x?}");
            // The bridge does not keep it from its other ports.
            self.assert_arrives(&[3], &asked);
        }
        self.assert_reach_all(&unknown());
    }
}

fn unknown() -> [Vec<u8>; 3] {
    ["10.77.0.4", "fd77::4", "10.77.0.5"].map(question)
}

/// Frames to groups that no bridge answers.
fn others() -> [Vec<u8>; 3] {
    let [own, known] = [[10, 77, 0, 1], [10, 77, 0, 3]];
    // They announce an address, and ask whether it is free.
    [
        frame(BROADCAST, mac(0), 100, 1),
        arp(own, own),
        arp([0; 4], known),
    ]
}

#[rstest]
#[case(Underlay::PLAIN, Serve::file().leased())]
#[case(Underlay::PLAIN, Serve::file().by_root())]
#[case(Underlay::BY_XDP, Serve::file())]
fn bridge_answers_guests_what_it_knows(#[case] underlay: Underlay, #[case] serve: Serve) {
    require!(Root);
    let mut asked = Asked::new(underlay, &serve);
    for _ in 0..2 {
        asked.assert_answered();
    }
    for frame in others() {
        asked.assert_reach_all(&[frame]);
    }
}

#[test]
fn bridge_answers_guests_after_its_steward_was_killed() {
    require!(Root);
    let mut asked = Asked::new(Underlay::PLAIN, &Serve::file().leased());
    let daemon = &mut asked.world.daemons[0];
    daemon.end_steward(Signal::KILL);
    asked.assert_answered();
    asked.world.daemons[0].restart_lessor(&asked.world.overlay.hosts[0].netns);
    asked.teach();
    asked.assert_answered();
}

#[test]
fn questions_reach_all_while_the_bridge_cannot_have_them() {
    require!(Root);
    let mut asked = Asked::new(Underlay::PLAIN, &Serve::file());
    // It learns addresses of other hosts, so the network's tap is no port of it.
    asked.set_port("learning on");
    asked.await_advertised(0);
    asked.world.await_all();
    for frame in others() {
        asked.assert_reach_all(&[frame]);
    }
    asked.assert_reach_all(&unknown());
    asked.assert_reach_all(&KNOWN.map(question));
    asked.set_port("learning off");
    asked.await_advertised(2);
    asked.teach();
    asked.assert_answered();
    let netns = &asked.world.overlay.hosts[0].netns;
    netns.ip(&["link set", BRIDGE, "down"]);
    asked.teach();
    for sent in unknown() {
        asked.send(&sent);
        asked.assert_arrives(&[1, 2], &sent);
    }
}
