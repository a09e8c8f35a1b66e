//! Guests of several hosts on one network over VXLAN: two hosts run the daemon, one has a bridge only.

mod by_xdp;
mod evpn;
mod failures;
mod linux;
mod questions;

use std::iter;

use rstest::rstest;
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::frame::assert_same;
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::lan::{BROADCAST, frame, mac};
use testkit::overlay::{Overlay, Station, Underlay, VXLAN, text};
use testkit::{Daemon, DriverConfig, Layout, Serve, assert_soon, require, wait};

use crate::offload_kernel::cut;

/// Guests by number: ours of host 0 and host 1, the kernel's of host 2 and host 0.
const HOSTS: [usize; 4] = [0, 1, 2, 0];
/// A guest that has a port at hosts 0 and 1, and is at none of them at first.
const MOVER: usize = 4;
/// An address that nobody has.
const NOBODY: usize = 10;

struct World {
    /// By number.
    stations: Vec<Station>,
    daemons: [Daemon; 2],
    /// Whether frames to other hosts and from there pass by the underlay of each.
    by_xdp: [bool; 2],
    overlay: Overlay,
}

impl World {
    fn new(underlay: Underlay, serve: &Serve, config: &DriverConfig) -> Self {
        Self::with_entries(Overlay::new(underlay, 3), serve, config)
    }

    /// With entries for the addresses of all.
    fn with_entries(overlay: Overlay, serve: &Serve, config: &DriverConfig) -> Self {
        for (guest, &host) in HOSTS.iter().enumerate() {
            overlay.add_entries(mac(guest), host);
        }
        Self::on(overlay, serve, config)
    }

    fn on(overlay: Overlay, serve: &Serve, config: &DriverConfig) -> Self {
        let ports = [2, 3].map(|guest| {
            let host = &overlay.hosts[HOSTS[guest]];
            let port = host.add_port("port0");
            host.add_entry(mac(guest), "port0");
            Station::port(port, guest)
        });
        let daemons = [0, 1].map(|number| {
            let host = &overlay.hosts[number];
            host.start_daemon(serve, &host.file(&[(number, ""), (MOVER, "")]))
        });
        let guests = [0, 1].map(|host| connect(&daemons[host], 0, host, config));
        let mut world = Self {
            stations: guests.into_iter().chain(ports).collect(),
            daemons,
            by_xdp: [overlay.hosts[0].underlay.by_xdp; 2],
            overlay,
        };
        world.await_all();
        world
    }

    /// Waits until all know where the others are, and reach them by the right way.
    #[track_caller]
    fn await_all(&mut self) {
        for (number, host) in self.overlay.hosts.iter().enumerate() {
            for (guest, &at) in HOSTS.iter().enumerate().filter(|&(_, &at)| at != number) {
                host.await_remote(mac(guest), Some(&self.overlay.hosts[at]));
            }
        }
        for (from, to) in pairs() {
            self.await_way(from, to, 60);
        }
        if self.by_xdp == [true; 2] {
            (0..2).for_each(|host| self.await_followed(host));
        }
    }

    /// Waits until a daemon that uses its underlay has set it up, and applied all changes of the kernel's tables until now.
    #[track_caller]
    fn await_followed(&self, host: usize) {
        let underlay = || self.daemons[host].status()["networks"][0]["underlay"].clone();
        let addresses = || underlay()["addresses"].as_u64().expect("a number");
        let before = addresses();
        // A change is read when all before it have been applied.
        for (word, after) in [("add", before + 1), ("del", before)] {
            let (nobody, at) = (text(mac(NOBODY)), self.overlay.hosts[2].address());
            self.overlay.hosts[host].bridge(&format!("fdb {word} {nobody} dev {VXLAN} dst {at}"));
            assert_soon!(addresses() == after, "{:#}", underlay());
        }
    }

    /// Waits until frames of this length from one to the other arrive by the right way.
    #[track_caller]
    fn await_way(&mut self, from: usize, to: usize, len: usize) {
        let takes_it = wait::until(wait::SOON, || {
            let before = self.counted(from, to);
            let [sender, receiver] = self.stations.get_disjoint_mut([from, to]).expect("two");
            sender.reaches(receiver, len) && self.counted(from, to) == self.expected(before, from, to)
        });
        assert!(takes_it, "from {from} to {to}: {:#}", self.daemons[0].status());
    }

    /// How many frames have left by the underlay of this guest's daemon, and have come by that of the other one's.
    fn counted(&self, from: usize, to: usize) -> [u64; 2] {
        let count = |guest: usize, name| match self.daemons.get(guest) {
            Some(daemon) if self.overlay.hosts[0].underlay.by_xdp => daemon.counter(name),
            _ => 0,
        };
        [count(from, "from_guest_encapsulated"), count(to, "redirected")]
    }

    /// That with one more frame.
    fn expected(&self, [left, came]: [u64; 2], from: usize, to: usize) -> [u64; 2] {
        let is_by_xdp = |guest| HOSTS[from] != HOSTS[to] && self.by_xdp.get(guest) == Some(&true);
        [left + u64::from(is_by_xdp(from)), came + u64::from(is_by_xdp(to))]
    }

    /// A frame arrives.
    #[track_caller]
    fn pass(&mut self, sent: &[u8], from: usize, to: usize) {
        self.stations[from].send(sent);
        assert_same(&self.stations[to].received(), sent);
    }

    /// A frame arrives, by the right way.
    #[track_caller]
    fn assert_passes(&mut self, from: usize, to: usize, len: usize) {
        self.assert_frame_passes(&frame(mac(to), mac(from), len, 1), from, to);
    }

    /// The same of this one.
    #[track_caller]
    fn assert_frame_passes(&mut self, sent: &[u8], from: usize, to: usize) {
        let before = self.counted(from, to);
        self.pass(sent, from, to);
        let (counted, expected) = (|| self.counted(from, to), self.expected(before, from, to));
        assert_soon!(
            counted() == expected,
            "from {from} to {to}: {:?}, not {expected:?}",
            counted()
        );
    }

    /// Guest `from` sends a GSO packet, and plain frames right after it.
    fn send_gso(&mut self, from: usize, bytes: &[u8], request: &[u8; 10], behind: &[&[u8]]) {
        let mut header = [0; HEADER];
        header[..10].copy_from_slice(request);
        let behind = behind.iter().map(|frame| ([0; HEADER], *frame));
        let frames: Vec<_> = iter::once((header, bytes)).chain(behind).collect();
        let pair = &mut self.stations[from].driver().pairs[0];
        pair.send_asking(&frames, Layout::Pieces(4000));
    }

    /// A frame arrives at this guest only.
    #[track_caller]
    fn assert_delivers(&mut self, from: usize, to: usize, len: usize) {
        self.pass(&frame(mac(to), mac(from), len, 1), from, to);
        self.assert_delivers_to_all(from, 60);
    }

    /// Frames of each guest arrive at each other one, by the right way.
    #[track_caller]
    fn assert_all_deliver(&mut self, len: usize) {
        let mut counts = [0, 1].map(|guest| self.counted(guest, guest));
        for (from, to) in pairs() {
            self.assert_delivers(from, to, len);
            let [left, came] = self.expected([0, 0], from, to);
            counts
                .get_mut(from)
                .into_iter()
                .for_each(|counts| counts[0] += left);
            counts
                .get_mut(to)
                .into_iter()
                .for_each(|counts| counts[1] += came);
        }
        let counted = || [0, 1].map(|guest| self.counted(guest, guest));
        assert_soon!(counted() == counts, "{:?}, not {counts:?}", counted());
    }

    /// A frame arrives at all others, once and before any other.
    #[track_caller]
    fn assert_delivers_to_all(&mut self, from: usize, len: usize) {
        let sent = frame(BROADCAST, mac(from), len, from as u8);
        self.stations[from].send(&sent);
        for to in (0..HOSTS.len()).filter(|&to| to != from) {
            assert_same(&self.stations[to].received(), &sent);
        }
    }
}

/// A guest connects to the port in that place of the daemon's file.
fn connect(daemon: &Daemon, port: usize, guest: usize, config: &DriverConfig) -> Station {
    let socket = daemon.path(&format!("vm{guest}.sock"));
    Station::guest(daemon.connect(port, &socket, config, 64), guest)
}

fn pairs() -> impl Iterator<Item = (usize, usize)> {
    let all = 0..HOSTS.len();
    all.clone()
        .flat_map(move |from| all.clone().map(move |to| (from, to)))
        .filter(|(from, to)| from != to)
}

const fn ipv6(underlay: Underlay) -> Underlay {
    Underlay {
        is_ipv6: true,
        ..underlay
    }
}

const fn jumbo(underlay: Underlay) -> Underlay {
    Underlay {
        mtu: 9000,
        ..underlay
    }
}

#[rstest]
#[case(Underlay::PLAIN, Serve::file().leased())]
#[case(Underlay::PLAIN, Serve::file().by_root())]
#[case(ipv6(Underlay::PLAIN), Serve::file())]
#[case(jumbo(Underlay::PLAIN), Serve::file())]
#[case(Underlay::BY_XDP, Serve::file().leased())]
#[case(Underlay::BY_XDP, Serve::file().by_root())]
#[case(ipv6(Underlay::BY_XDP), Serve::file())]
#[case(jumbo(Underlay::BY_XDP), Serve::file())]
fn guests_of_all_hosts_reach_each_other(#[case] underlay: Underlay, #[case] serve: Serve) {
    require!(Root);
    let mut world = World::new(underlay, &serve, &DriverConfig::default());
    let longest = 14 + underlay.inner_mtu() as usize;
    for len in [60, 61, 590, longest] {
        world.assert_all_deliver(len);
        for from in 0..HOSTS.len() {
            world.assert_delivers_to_all(from, len);
        }
    }
    for host in 0..2 {
        for to in [mac(1 - host), mac(2), BROADCAST] {
            // A tag would have room.
            world.stations[host].send(&frame(to, mac(host), longest + 5, 2));
        }
        world.daemons[host].await_counter("from_guest_too_long", 3);
        world.assert_delivers_to_all(host, longest);
    }
}

/// The longest one, too, which has no room for the outer headers.
#[rstest]
fn gso_packets_arrive_as_their_segments(
    #[values(
        Underlay::PLAIN,
        ipv6(Underlay::PLAIN),
        jumbo(Underlay::PLAIN),
        Underlay::BY_XDP,
        ipv6(Underlay::BY_XDP)
    )]
    underlay: Underlay,
) {
    require!(Root);
    let mut world = World::new(underlay, &Serve::file(), &DriverConfig::with(F_HOST_ALL));
    let mouth = world.overlay.hosts[2].open_gso_sender("port0");
    let [v4, v6] = [Ip::V4(0), Ip::V6(Vec::new())];
    for packet in [
        GsoPacket::tcp(v4.clone(), 65_535 - 20 - 32),
        GsoPacket::tcp(v6.clone(), 65_535 - 40 - 32),
        GsoPacket::tcp(v6, 10_000),
        GsoPacket::udp(v4, 40_000),
    ] {
        let size = 14 + underlay.inner_mtu() as usize - packet.header_len();
        let request = packet.request(size as u16);
        for (from, to) in pairs().filter(|&(from, _)| from != 3) {
            let bytes = [&mac(to)[..], &mac(from), &packet.bytes()[12..]].concat();
            match from {
                2 => mouth.send(&[&request[..], &bytes].concat()),
                _ => world.send_gso(from, &bytes, &request, &[]),
            }
            for segment in cut(&bytes, &request) {
                assert_same(&world.stations[to].received(), &segment);
            }
            world.assert_delivers_to_all(from, 60);
        }
    }
}
