//! Tunnels whose far end is a kernel without a daemon: VXLAN with the local address on a VLAN device of the NIC, and Geneve,
//! in tap mode and by an underlay.

use testkit::overlay::{VXLAN, text};
use testkit::{Daemon, DriverConfig, Layout, NetNs, PacketPort, Serve, VethPair, frame, kernel, lan, wait};

use crate::kit::Seen;

/// The number of the far end's station, which is at its tunnel device.
const STACK: usize = 9;
/// The Geneve device of each end.
const GENEVE: &str = "gnv100";
/// Another one with its VNI, whose remote is host 3.
const SECOND: &str = "gnv100b";

/// How the tunnel is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Case {
    is_ipv6: bool,
    is_geneve: bool,
    /// Its packets are in a VLAN; `on`: the driver removes tags from frames, and reports them.
    vlan: Option<&'static str>,
    has_underlay: bool,
}

const IN_VLAN: Case = Case {
    is_ipv6: false,
    is_geneve: false,
    vlan: Some("off"),
    has_underlay: true,
};
const BY_GENEVE: Case = Case {
    is_geneve: true,
    vlan: None,
    ..IN_VLAN
};

/// Frames pass both ways, all by AF_XDP; panics if they do not.
pub(crate) fn in_vlan() -> Seen {
    let seen = [false, true].map(|is_ipv6| exchange(Case { is_ipv6, ..IN_VLAN }));
    let [_, seen] = seen;
    match kernel::version() >= (6, 8) {
        // The program can read VLAN tags that the driver removed from frames and reports.
        true => exchange(Case {
            vlan: Some("on"),
            ..IN_VLAN
        }),
        false => seen,
    }
}

/// Frames pass both ways by the kernel's Geneve, then by AF_XDP; panics if they do not.
pub(crate) fn geneve() -> Seen {
    exchange(Case {
        has_underlay: false,
        ..BY_GENEVE
    });
    let seen = [false, true].map(|is_ipv6| exchange(Case { is_ipv6, ..BY_GENEVE }));
    let [_, seen] = seen;
    seen
}

impl Case {
    /// The tunnel device of each end.
    fn device(self) -> &'static str {
        if self.is_geneve { GENEVE } else { VXLAN }
    }

    /// MTU of the tunnel device, if its packets have 1500 bytes.
    fn mtu(self) -> usize {
        if self.is_ipv6 { 1430 } else { 1450 }
    }

    fn address(self, host: usize) -> String {
        match self.is_ipv6 {
            true => format!("fd09::{host}"),
            false => format!("10.9.0.{host}"),
        }
    }

    /// The interface with the address of a host.
    fn carrier(self, below: &str) -> &str {
        if self.vlan.is_some() { "v0" } else { below }
    }

    /// Gives an end the address of `host` and a tunnel device that sends `guest`'s frames to `other`.
    fn lay(self, (netns, below): (&NetNs, &str), [host, other]: [usize; 2], guest: usize) {
        let ip = |line: String| netns.ip(&line.split(' ').collect::<Vec<_>>());
        let (near, far, mac) = (self.address(host), self.address(other), text(lan::mac(16 + host)));
        let (device, mtu, carrier) = (self.device(), self.mtu(), self.carrier(below));
        match self.vlan {
            Some(_) => ip(format!(
                "link add link {below} name {carrier} address {mac} type vlan id 5"
            )),
            None => ip(format!("link set {below} address {mac}")),
        }
        let (prefix, checksums) = match self.is_ipv6 {
            true => ("64 nodad", "udp6zerocsumtx udp6zerocsumrx "),
            false => ("24", ""),
        };
        if self.is_ipv6 {
            netns.run(
                "sysctl",
                &["-qw", &format!("net.ipv6.conf.{carrier}.disable_ipv6=0")],
            );
        }
        ip(format!("link set {carrier} up"));
        ip(format!("address add {near}/{prefix} dev {carrier}"));
        self.resolve(netns, carrier, other, other);
        let kind = match self.is_geneve {
            true => format!("geneve id 100 {checksums}remote {far}"),
            false => format!("vxlan id 100 dstport 4789 nolearning {checksums}local {near}"),
        };
        ip(format!("link add {device} mtu {mtu} type {kind}"));
        ip(format!("link set {device} arp off up"));
        if !self.is_geneve {
            let guest = text(lan::mac(guest));
            netns.run("bridge", &["fdb", "add", &guest, "dev", device, "dst", &far]);
        }
    }

    /// Adds an address of a host as a neighbour.
    fn resolve(self, netns: &NetNs, carrier: &str, address: usize, host: usize) {
        let (address, mac) = (self.address(address), text(lan::mac(16 + host)));
        netns.ip(&["neighbour", "add", &address, "lladdr", &mac, "dev", carrier]);
    }
}

/// Exchanges frames of three lengths.
fn exchange(case: Case) -> Seen {
    let veth = VethPair::new();
    let offload = case.vlan.unwrap_or("off");
    veth.near
        .run("ethtool", &["-K", VethPair::NIC, "rxvlan", offload]);
    // So that XDP sees frames as they would be on a wire.
    let off = ["-K", VethPair::WIRE, "tx", "off", "txvlan", offload];
    veth.far.run("ethtool", &off);
    case.lay((&veth.near, VethPair::NIC), [1, 2], STACK);
    case.lay((&veth.far, VethPair::WIRE), [2, 1], 0);
    let (device, nic, port) = (case.device(), VethPair::NIC, lan::port(0, ""));
    let underlay = match case.has_underlay {
        // Without effect on Geneve.
        true => format!(
            "underlay = \"{nic}\"\ndrop-unknown-senders = {}\n",
            case.is_geneve
        ),
        false => String::new(),
    };
    let file = format!("[network.lan]\nuplink = \"{device}\"\nmode = \"auto\"\n{underlay}{port}");
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[device, nic], &file);
    let mut guest = lan::guests(&daemon, 1, &DriverConfig::default()).remove(0);
    let stack = PacketPort::open(&veth.far, device);
    let counted = || ["from_guest_encapsulated", "redirected"].map(|name| daemon.counter(name));
    let mut number = 0;
    let mut pass = |len: usize| {
        number += 1;
        let before = counted();
        let between = |to, from| lan::frame(lan::mac(to), lan::mac(from), len, number);
        let (from_guest, to_guest) = (between(STACK, 0), between(0, STACK));
        let pair = &mut guest.pairs[0];
        pair.reap_sent();
        pair.send(&from_guest, Layout::Whole);
        stack.send(&to_guest);
        let leaves = std::iter::from_fn(|| stack.receive(wait::QUIET)).any(|got| got == from_guest);
        let comes = std::iter::from_fn(|| pair.receive(wait::QUIET)).any(|got| got.frame == to_guest);
        let wanted = before.map(|count| count + u64::from(case.has_underlay));
        leaves && comes && wait::until(wait::QUIET, || counted() == wanted)
    };
    let mut assert_pass = |len| {
        // Until the network has its underlay the kernel does it.
        let passes = wait::until(wait::SOON, || pass(len));
        assert!(passes, "{len} bytes: {:?} {:#}", counted(), daemon.status());
    };
    for len in [60, 1000, 14 + case.mtu()] {
        assert_pass(len);
    }
    if case.is_geneve && case.has_underlay {
        lose_route(case, &veth, &daemon);
        assert_pass(1000);
        choose_another_address(case, &veth);
        assert_pass(1000);
    }
    if case.is_geneve && case.has_underlay && !case.is_ipv6 {
        assert_second_device_gets_its_frames(case, &veth);
    }
    let network = daemon.status()["networks"][0].clone();
    let lanes = if case.has_underlay {
        &network["underlay"]
    } else {
        &network
    };
    Seen {
        mode: lanes["queues"][0]["mode"].as_str().unwrap_or("none").to_owned(),
        note: String::new(),
    }
}

/// Has the route to the far end choose another local address, which the far end sends to from then on.
fn choose_another_address(case: Case, veth: &VethPair) {
    let ip = |netns: &NetNs, line: String| netns.ip(&line.split(' ').collect::<Vec<_>>());
    let (near, far) = (case.carrier(VethPair::NIC), case.carrier(VethPair::WIRE));
    let (other, to) = (case.address(7), case.address(2));
    let prefix = if case.is_ipv6 { "64" } else { "24" };
    ip(
        &veth.near,
        format!("address add {other}/{prefix} dev {near} nodad"),
    );
    ip(&veth.near, format!("route add {to} dev {near} src {other}"));
    case.resolve(&veth.far, far, 7, 1);
    ip(
        &veth.far,
        format!("link set {GENEVE} type geneve id 100 remote {other}"),
    );
}

/// Takes the route to the far end away, and puts it back.
fn lose_route(case: Case, veth: &VethPair, daemon: &Daemon) {
    let to = case.address(2);
    let unreachable = |act| veth.near.ip(&["route", act, "unreachable", &to]);
    unreachable("add");
    daemon.await_network("without a next hop", |network| {
        network["underlay"]["resolved"] == 0
    });
    unreachable("del");
    daemon.await_network("with a next hop", |network| network["underlay"]["resolved"] == 1);
    assert!(
        !daemon.said().contains("underlay is not used"),
        "{}",
        daemon.said()
    );
}

/// The kernel tells devices with one VNI apart by the sender.
fn assert_second_device_gets_its_frames(case: Case, veth: &VethPair) {
    let remote = case.address(3);
    let make = [
        "link", "add", SECOND, "type", "geneve", "id", "100", "remote", &remote,
    ];
    veth.near.ip(&make);
    veth.near.ip(&["link", "set", SECOND, "arp", "off", "up"]);
    let second = PacketPort::open(&veth.near, SECOND);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let inner = lan::frame(lan::mac(0), lan::mac(STACK), 100, 0);
    let mut packet = frame::geneve(case.address(7).parse().expect("an address"), 100, &inner);
    packet[..6].copy_from_slice(&lan::mac(17));
    packet[29] = 3;
    frame::sum_ipv4(&mut packet);
    wire.send(&packet);
    assert_eq!(second.receive(wait::SOON), Some(inner));
}
