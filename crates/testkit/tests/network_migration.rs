//! A guest that moves from a network of one host to that of another, with its address.
//!
//! ```text
//!   host 0:  guest ┐                      ┌ guest, later  :host 1
//!             peer ┴ lan ── nic0 ═ wire0 ─┤   wire1 ═ nic0 ── lan ┴ peer
//!                                        br0 ─ lan ═ the LAN's station
//! ```
//!
//! The bridge stands for the switch, and `lan` is a port of it: it learns from the guest's announcement where the guest
//! is now.

use rstest::rstest;
use testkit::lan::{self, BROADCAST, STRANGER, mac, tagged};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, PacketPort, Serve, VethPair, require, wait};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

/// The station's interface.
const LAN: &str = "station";
/// Numbers of the guest that moves and of those that stay, by their host.
const GUEST: usize = 0;
const PEERS: [usize; 2] = [1, 2];

/// A frame as the LAN has it.
fn on_wire(frame: &[u8], vlan: u16) -> Vec<u8> {
    match vlan {
        0 => frame.to_vec(),
        _ => tagged(frame, vlan),
    }
}

/// Who sends a frame, or receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Station {
    Guest,
    Peer(usize),
    Lan,
}

impl Station {
    fn mac(self) -> [u8; 6] {
        match self {
            Self::Guest => mac(GUEST),
            Self::Peer(host) => mac(PEERS[host]),
            Self::Lan => STRANGER,
        }
    }
}

struct Hosts {
    guest: Driver,
    peers: [Driver; 2],
    lan: PacketPort,
    daemons: [Daemon; 2],
    vlan: u16,
    veth: VethPair,
    _second: NetNs,
}

fn connect(daemon: &Daemon, guest: usize) -> Driver {
    let mut config = DriverConfig::default();
    config.protocol |= VhostUserProtocolFeatures::RARP;
    let path = daemon.path(&format!("vm{guest}.sock"));
    let mut driver = Driver::connect(&path, &config).expect("accepted");
    driver.pairs[0].post(64, &[2048]);
    driver
}

impl Hosts {
    /// `mode`: the key of the network, or nothing.
    fn new(vlan: u16, mode: &str) -> Self {
        let veth = VethPair::new();
        let second = NetNs::new("second");
        let far = &veth.far;
        let name = second.name();
        far.ip(&["link add wire1 type veth peer name", VethPair::NIC, "netns", name]);
        far.ip(&["link add br0 type bridge forward_delay 0 mcast_snooping 0"]);
        far.ip(&["link", "add", "lan", "type", "veth", "peer", "name", LAN]);
        for wire in [VethPair::WIRE, "wire1", "lan"] {
            // A tag is in the frame, as on a cable, not beside it.
            far.run("ethtool", &["-K", wire, "txvlan", "off"]);
            far.ip(&["link", "set", wire, "master", "br0", "up"]);
        }
        far.ip(&["link", "set", LAN, "up"]);
        far.ip(&["link", "set", "br0", "up"]);
        second.ip(&["link", "set", VethPair::NIC, "up"]);
        let daemon = |host: usize| {
            let netns = [&veth.near, &second][host];
            // So that XDP sees tags.
            netns.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
            let mut text = format!("[network.lan]\nuplink = \"{}\"\n{mode}\n", VethPair::NIC);
            let keys = match vlan {
                0 => String::new(),
                _ => format!("vlan = {vlan}"),
            };
            text.extend([GUEST, PEERS[host]].map(|guest| lan::port(guest, &keys)));
            Daemon::start_file(netns, &Serve::file(), &[VethPair::NIC], &text)
        };
        let daemons = [daemon(0), daemon(1)];
        Self {
            guest: connect(&daemons[0], GUEST),
            peers: [0, 1].map(|host| connect(&daemons[host], PEERS[host])),
            lan: PacketPort::open(&veth.far, LAN),
            daemons,
            vlan,
            veth,
            _second: second,
        }
    }

    fn driver(&mut self, station: Station) -> Option<&mut Driver> {
        match station {
            Station::Guest => Some(&mut self.guest),
            Station::Peer(host) => Some(&mut self.peers[host]),
            Station::Lan => None,
        }
    }

    /// A frame to that address arrives, perhaps not the first of its kind: switches learn.
    #[track_caller]
    fn assert_reaches(&mut self, from: Station, (to, address): (Station, [u8; 6])) {
        let sent = lan::once(address, from.mac(), 60);
        let wire = on_wire(&sent, self.vlan);
        let arrives = wait::until(wait::SOON, || {
            match self.driver(from) {
                Some(driver) => {
                    driver.pairs[0].reap_sent();
                    driver.pairs[0].send(&sent, Layout::Whole);
                }
                None => self.lan.send(&wire),
            }
            let lan = to == Station::Lan;
            let mut next = || match self.driver(to) {
                Some(driver) => driver.pairs[0].receive(wait::QUIET).map(|got| got.frame),
                None => self.lan.receive(wait::QUIET),
            };
            std::iter::from_fn(&mut next).any(|got| got == *if lan { &wire } else { &sent })
        });
        let said = self.daemons.each_ref().map(Daemon::said);
        assert!(arrives, "{from:?} does not reach {to:?}: {said:?}");
    }

    #[track_caller]
    fn assert_all_reach_all(&mut self) {
        let all = [Station::Guest, Station::Peer(0), Station::Peer(1), Station::Lan];
        for from in all {
            for to in all.into_iter().filter(|&to| to != from) {
                self.assert_reaches(from, (to, to.mac()));
            }
        }
    }

    /// Behind which of its ports the switch believes the guest to be.
    fn whereabouts(&self) -> String {
        let said = self.veth.far.output_of("bridge", &["fdb", "show", "br", "br0"]);
        let mine = said.lines().find(|line| line.starts_with("02:00:00:00:00:00"));
        mine.unwrap_or_default().to_owned()
    }
}

#[rstest]
#[case(0, "")]
#[case(100, "")]
#[case(0, "mode = \"tap\"")]
#[case(100, "mode = \"tap\"")]
fn guest_moves_to_another_host_with_its_address(#[case] vlan: u16, #[case] mode: &str) {
    require!(Root);
    let mut hosts = Hosts::new(vlan, mode);
    hosts.assert_all_reach_all();
    assert!(
        hosts.whereabouts().contains(VethPair::WIRE),
        "{}",
        hosts.whereabouts()
    );
    // What QEMU does: the destination is there, the source goes, and the address is announced.
    let arrived = connect(&hosts.daemons[1], GUEST);
    drop(std::mem::replace(&mut hosts.guest, arrived));
    let payload = [&mac(GUEST)[..], &[0; 2]].concat();
    assert_eq!(hosts.guest.say(FrontendReq::SEND_RARP, &payload, None), 0);
    let is_announced = |got: &Vec<u8>| {
        let start = on_wire(&[&BROADCAST[..], &mac(GUEST), &[0x80, 0x35]].concat(), vlan);
        got.starts_with(&start)
    };
    let mut came = std::iter::from_fn(|| hosts.lan.receive(wait::SOON));
    assert!(
        came.any(|got| is_announced(&got)),
        "no announcement in VLAN {vlan}"
    );
    assert!(hosts.whereabouts().contains("wire1"), "{}", hosts.whereabouts());
    hosts.assert_all_reach_all();
    // As with ARP: who stayed at the first host hears its groups, although that still has its port.
    hosts.assert_reaches(Station::Guest, (Station::Peer(0), BROADCAST));
    assert!(hosts.whereabouts().contains("wire1"), "{}", hosts.whereabouts());
}
