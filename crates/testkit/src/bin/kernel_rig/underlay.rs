//! An underlay in a VLAN: the vxlan device's local address is on a VLAN device of the NIC. The far end is a kernel without a
//! daemon.

use testkit::overlay::{VXLAN, text};
use testkit::{Daemon, DriverConfig, Layout, NetNs, PacketPort, Serve, VethPair, kernel, lan, wait};

use crate::kit::Seen;

/// The number of the far end's station, which is at its vxlan device.
const STACK: usize = 9;

/// Frames pass both ways, all by AF_XDP; panics if they do not.
pub(crate) fn run() -> Seen {
    let seen = [false, true].map(|is_ipv6| exchange(is_ipv6, "off"));
    let [_, seen] = seen;
    match kernel::version() >= (6, 8) {
        // The program can read VLAN tags that the driver removed from frames and reports.
        true => exchange(false, "on"),
        false => seen,
    }
}

/// MTU of the vxlan device, if its packets have 1500 bytes.
fn mtu(is_ipv6: bool) -> usize {
    if is_ipv6 { 1430 } else { 1450 }
}

/// Creates a VLAN device on `below`, with the address of `host`, and a vxlan device that sends `guest`'s frames to `other`.
fn lay((netns, below): (&NetNs, &str), is_ipv6: bool, [host, other]: [usize; 2], guest: usize) {
    let ip = |line: String| netns.ip(&line.split(' ').collect::<Vec<_>>());
    let address = |host: usize| match is_ipv6 {
        true => format!("fd09::{host}"),
        false => format!("10.9.0.{host}"),
    };
    let (near, far, mac) = (address(host), address(other), |host| text(lan::mac(16 + host)));
    let (prefix, keys) = match is_ipv6 {
        true => ("64 nodad", "udp6zerocsumtx udp6zerocsumrx local"),
        false => ("24", "local"),
    };
    let mtu = mtu(is_ipv6);
    ip(format!(
        "link add link {below} name v0 address {} type vlan id 5",
        mac(host)
    ));
    if is_ipv6 {
        netns.run("sysctl", &["-qw", "net.ipv6.conf.v0.disable_ipv6=0"]);
    }
    ip("link set v0 up".to_owned());
    ip(format!("address add {near}/{prefix} dev v0"));
    ip(format!("neighbour add {far} lladdr {} dev v0", mac(other)));
    ip(format!(
        "link add {VXLAN} mtu {mtu} type vxlan id 100 dstport 4789 nolearning {keys} {near}"
    ));
    ip(format!("link set {VXLAN} arp off up"));
    let guest = text(lan::mac(guest));
    netns.run("bridge", &["fdb", "add", &guest, "dev", VXLAN, "dst", &far]);
}

/// Exchanges frames of three lengths. `offload`: `on` if the driver removes VLAN tags from frames, and reports them.
fn exchange(is_ipv6: bool, offload: &str) -> Seen {
    let veth = VethPair::new();
    veth.near
        .run("ethtool", &["-K", VethPair::NIC, "rxvlan", offload]);
    // So that XDP sees frames as they would be on a wire.
    let off = ["-K", VethPair::WIRE, "tx", "off", "txvlan", offload];
    veth.far.run("ethtool", &off);
    lay((&veth.near, VethPair::NIC), is_ipv6, [1, 2], STACK);
    lay((&veth.far, VethPair::WIRE), is_ipv6, [2, 1], 0);
    let (nic, port) = (VethPair::NIC, lan::port(0, ""));
    let file = format!("[network.lan]\nuplink = \"{VXLAN}\"\nmode = \"auto\"\nunderlay = \"{nic}\"\n{port}");
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VXLAN, nic], &file);
    let mut guest = lan::guests(&daemon, 1, &DriverConfig::default()).remove(0);
    let stack = PacketPort::open(&veth.far, VXLAN);
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
        leaves && comes && wait::until(wait::QUIET, || counted() == before.map(|count| count + 1))
    };
    for len in [60, 1000, 14 + mtu(is_ipv6)] {
        // Until the network has its underlay the kernel does it.
        let passes = wait::until(wait::SOON, || pass(len));
        assert!(passes, "{len} bytes: {:?} {:#}", counted(), daemon.status());
    }
    let underlay = daemon.status()["networks"][0]["underlay"].clone();
    Seen {
        mode: underlay["queues"][0]["mode"]
            .as_str()
            .unwrap_or("none")
            .to_owned(),
        note: String::new(),
    }
}
