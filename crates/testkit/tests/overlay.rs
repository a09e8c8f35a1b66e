//! Guests of several hosts on one network over VXLAN: two hosts run the daemon, one has a bridge only.

mod evpn;
mod failures;
mod linux;

use rstest::rstest;
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::frame::assert_same;
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::lan::{BROADCAST, frame, mac};
use testkit::overlay::{Overlay, Station, Underlay, file};
use testkit::{Daemon, DriverConfig, Layout, Serve, require};

use crate::offload_kernel::cut;

/// Guests by number: ours of host 0 and host 1, the kernel's of host 2 and host 0.
const HOSTS: [usize; 4] = [0, 1, 2, 0];
/// A guest that has a port at hosts 0 and 1, and is at none of them at first.
const MOVER: usize = 4;

struct World {
    /// By number.
    stations: Vec<Station>,
    daemons: [Daemon; 2],
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
        let daemons =
            [0, 1].map(|host| overlay.hosts[host].start_daemon(serve, &file(&[(host, ""), (MOVER, "")])));
        let guests = [0, 1].map(|host| connect(&daemons[host], 0, host, config));
        let mut world = Self {
            stations: guests.into_iter().chain(ports).collect(),
            daemons,
            overlay,
        };
        world.await_all();
        world
    }

    /// Waits until all know where the others are, and reach them.
    #[track_caller]
    fn await_all(&mut self) {
        for (number, host) in self.overlay.hosts.iter().enumerate() {
            for (guest, &at) in HOSTS.iter().enumerate().filter(|&(_, &at)| at != number) {
                host.await_remote(mac(guest), Some(&self.overlay.hosts[at]));
            }
        }
        for (from, to) in pairs() {
            let [from, to] = self.stations.get_disjoint_mut([from, to]).expect("two");
            from.await_reaches(to);
        }
    }

    /// A frame arrives.
    #[track_caller]
    fn assert_passes(&mut self, from: usize, to: usize, len: usize) {
        let sent = frame(mac(to), mac(from), len, 1);
        self.stations[from].send(&sent);
        assert_same(&self.stations[to].received(), &sent);
    }

    /// A frame arrives at this guest only.
    #[track_caller]
    fn assert_delivers(&mut self, from: usize, to: usize, len: usize) {
        self.assert_passes(from, to, len);
        self.assert_delivers_to_all(from, 60);
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

const IPV6: Underlay = Underlay {
    is_ipv6: true,
    ..Underlay::PLAIN
};
const JUMBO: Underlay = Underlay {
    mtu: 9000,
    ..Underlay::PLAIN
};

#[rstest]
#[case(Underlay::PLAIN, Serve::file().leased())]
#[case(Underlay::PLAIN, Serve::file().by_root())]
#[case(IPV6, Serve::file())]
#[case(JUMBO, Serve::file())]
fn guests_of_all_hosts_reach_each_other(#[case] underlay: Underlay, #[case] serve: Serve) {
    require!(Root);
    let mut world = World::new(underlay, &serve, &DriverConfig::default());
    let longest = 14 + underlay.inner_mtu() as usize;
    for len in [60, 61, 590, longest] {
        for (from, to) in pairs() {
            world.assert_delivers(from, to, len);
        }
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
fn gso_packets_arrive_as_their_segments(#[values(Underlay::PLAIN, IPV6, JUMBO)] underlay: Underlay) {
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
                _ => {
                    let mut header = [0; HEADER];
                    header[..10].copy_from_slice(&request);
                    world.stations[from].driver().pairs[0]
                        .send_asking(&[(header, &bytes)], Layout::Pieces(4000));
                }
            }
            for segment in cut(&bytes, &request) {
                assert_same(&world.stations[to].received(), &segment);
            }
            world.assert_delivers_to_all(from, 60);
        }
    }
}
