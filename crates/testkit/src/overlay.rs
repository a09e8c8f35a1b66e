//! Hosts with one network over VXLAN: by entries that a test makes, or by those of FRR's EVPN.
//!
//! ```text
//!   host 0                            fabric          host 1, 2…
//!   guest ── Daemon ── vx100 ┬ br100                    br100 ┬ vx100 ── Daemon ── guest
//!                      UDP ──┴─ u0 ════ br0 ════ u0 ── UDP ───┘   └ port ═ PacketPort
//! ```
//!
//! `vx100` learns nothing. A frame to an address without an entry goes to all other hosts. With [`Underlay::BY_XDP`], `u0`
//! is the underlay of the daemon's network.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::directory::private_dir;
use crate::{Daemon, Driver, Layout, NetNs, PacketPort, Running, Serve, wait};
use crate::{driver, lan};

/// The VXLAN device of each host.
pub const VXLAN: &str = "vx100";
/// The interface of each host that carries its packets.
pub const NIC: &str = "u0";
/// The bridge of each host, which has that device as a port.
pub const BRIDGE: &str = "br100";
/// The reflector's number, as if it were a host.
const REFLECTOR: usize = 8;
/// A router's.
const ROUTER: usize = 9;

/// The network that carries the VXLAN packets.
#[derive(Clone, Copy, Debug)]
pub struct Underlay {
    /// Between IPv6 addresses.
    pub is_ipv6: bool,
    /// Of all of its interfaces.
    pub mtu: u32,
    /// Queues of each host's interface. The first receives all frames until [`Overlay::spread`].
    pub queues: u32,
    /// Networks of daemons have it as their underlay.
    pub by_xdp: bool,
}

impl Underlay {
    /// IPv4, MTU 1500.
    pub const PLAIN: Self = Self {
        is_ipv6: false,
        mtu: 1500,
        queues: 1,
        by_xdp: false,
    };
    /// The same, by AF_XDP.
    pub const BY_XDP: Self = Self {
        by_xdp: true,
        ..Self::PLAIN
    };

    /// What the outer IP, UDP and VXLAN headers and the inner Ethernet header leave for the network above it.
    pub fn inner_mtu(self) -> u32 {
        self.mtu - if self.is_ipv6 { 70 } else { 50 }
    }

    fn address(self, host: usize) -> String {
        let number = host + 1;
        match self.is_ipv6 {
            true => format!("fd09::{number}"),
            false => format!("10.9.0.{number}"),
        }
    }

    /// The hardware address of that host's interface.
    fn mac(host: usize) -> [u8; 6] {
        [0x02, 9, 0, 0, 0, host as u8]
    }

    /// Connects a namespace, with that host's address.
    fn connect(self, fabric: &NetNs, netns: &NetNs, host: usize) {
        let (mtu, queues, far) = (self.mtu.to_string(), self.queues.to_string(), format!("f{host}"));
        let peer = ["type veth peer name", &far, "mtu", &mtu, "numtxqueues", &queues];
        let mac = text(Self::mac(host));
        let near = [
            "link add",
            NIC,
            "address",
            &mac,
            "mtu",
            &mtu,
            "numrxqueues",
            &queues,
            "numtxqueues",
            &queues,
        ];
        netns.ip(&[&near[..], &peer, &["netns", fabric.name()]].concat());
        fabric.ip(&["link set", &far, "master br0 up"]);
        if self.by_xdp {
            // So that XDP sees frames as they would be on a wire.
            fabric.run("ethtool", &["-K", &far, "tx", "off"]);
        }
        netns.ip(&["link set", NIC, "up"]);
        let (mut address, mut version) = (format!("{}/24", self.address(host)), "ipv4");
        if self.is_ipv6 {
            allow_ipv6(netns, NIC);
            address += " nodad";
            version = "ipv6";
        }
        // Neighbours stay REACHABLE for the time of a test.
        let reachable = format!("net.{version}.neigh.{NIC}.base_reachable_time_ms=3600000");
        netns.run("sysctl", &["-qw", &reachable]);
        netns.ip(&["address add dev", NIC, &address]);
    }
}

fn allow_ipv6(netns: &NetNs, interface: &str) {
    let setting = format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6");
    netns.enter(|| std::fs::write(setting, "0").expect("there is IPv6"));
}

/// A host of the network.
#[must_use]
pub struct Host {
    /// FRR, if the network has it.
    pub frr: Option<Frr>,
    /// Its namespace.
    pub netns: NetNs,
    /// That of all hosts.
    pub underlay: Underlay,
    number: usize,
}

impl Host {
    fn new(underlay: Underlay, fabric: &NetNs, number: usize) -> Self {
        let netns = NetNs::new("host");
        underlay.connect(fabric, &netns, number);
        let host = Self {
            frr: None,
            netns,
            underlay,
            number,
        };
        host.add_network(100);
        host
    }

    /// Adds a bridge, and a VXLAN device with this VNI as a port of it, whose names end with the VNI.
    pub fn add_network(&self, vni: u32) {
        let bridge = format!("br{vni}");
        self.netns.ip(&[
            "link add",
            &bridge,
            "type bridge mcast_snooping 0 forward_delay 0",
        ]);
        // For IPv6 neighbours on it; it has no address, and sends nothing.
        self.netns.ip(&["link set", &bridge, "addrgenmode none"]);
        allow_ipv6(&self.netns, &bridge);
        self.netns.ip(&["link set", &bridge, "up"]);
        self.add_device(vni);
    }

    /// Adds [`VXLAN`], without an entry.
    pub fn add_vxlan(&self) {
        self.add_device(100);
    }

    fn add_device(&self, vni: u32) {
        let (device, bridge) = (format!("vx{vni}"), format!("br{vni}"));
        let mtu = self.underlay.inner_mtu().to_string();
        let mut kind = format!("type vxlan id {vni} dstport 4789 nolearning local");
        if self.underlay.is_ipv6 && self.underlay.by_xdp {
            kind = kind.replace("local", "udp6zerocsumtx udp6zerocsumrx local");
        }
        self.netns
            .ip(&["link add", &device, "mtu", &mtu, &kind, &self.address()]);
        self.netns.ip(&["link set", &device, "master", &bridge, "up"]);
        self.bridge(&format!("link set dev {device} learning off"));
    }

    /// Runs a command of bridge(8).
    pub fn bridge(&self, words: &str) {
        let words: Vec<_> = words.split(' ').collect();
        self.netns.run("bridge", &words);
    }

    /// Its address in the underlay.
    pub fn address(&self) -> String {
        self.underlay.address(self.number)
    }

    /// The file of a daemon whose network has [`VXLAN`] as its uplink, and a port with these keys for each of these guests.
    pub fn file(&self, ports: &[(usize, &str)]) -> String {
        let mut text = format!("[network.lan]\nuplink = \"{VXLAN}\"\nmode = \"auto\"\n");
        if self.underlay.by_xdp {
            text += &format!("underlay = \"{NIC}\"\n");
        }
        text.extend(ports.iter().map(|&(guest, keys)| lan::port(guest, keys)));
        text
    }

    /// The hardware address of [`NIC`].
    pub fn nic_mac(&self) -> [u8; 6] {
        Underlay::mac(self.number)
    }

    /// Sets the state of another host as its kernel's neighbour.
    pub fn set_neighbour(&self, other: &Self, state: &str) {
        let (address, mac) = (other.address(), text(other.nic_mac()));
        let words = [
            "neighbour replace",
            &address,
            "lladdr",
            &mac,
            "dev",
            NIC,
            "nud",
            state,
        ];
        self.netns.ip(&words);
    }

    /// Gives one of its two links an address.
    fn number_link(&self, link: usize) {
        let address = format!("10.8.{link}.{}/24", self.number + 1);
        self.netns
            .ip(&["address add", &address, "dev", &format!("u{link}")]);
    }

    /// The next hop of routes to it by one of two links.
    fn behind(&self, link: usize) -> String {
        format!("via 10.8.{link}.{} dev u{link}", self.number + 1)
    }

    /// Starts a daemon with a [`file`](Self::file).
    pub fn start_daemon(&self, serve: &Serve, text: &str) -> Daemon {
        Daemon::start_file(&self.netns, serve, &[VXLAN, NIC], text)
    }

    /// Adds a port with that name to the bridge, and opens what is at its other end.
    pub fn add_port(&self, name: &str) -> PacketPort {
        let (mtu, guest) = (self.underlay.inner_mtu().to_string(), format!("{name}-guest"));
        let peer = ["type veth peer name", &guest, "mtu", &mtu];
        self.netns
            .ip(&[&["link add", name, "mtu", &mtu], &peer[..]].concat());
        // So that both ends see frames as they would be on a wire.
        for end in [name, &guest] {
            self.netns.run("ethtool", &["-K", end, "tx", "off"]);
            self.netns.ip(&["link set", end, "arp off up"]);
        }
        self.netns.ip(&["link set", name, "master", BRIDGE]);
        self.netns.await_sender(&guest);
        PacketPort::open(&self.netns, &guest)
    }

    /// Adds a port with that name to the bridge, and a Linux stack with this address (and prefix length) at its other end.
    pub fn add_stack(&self, name: &str, address: &str) -> NetNs {
        let (mtu, stack) = (self.underlay.inner_mtu().to_string(), NetNs::new("stack"));
        let peer = ["type veth peer name eth0 mtu", &mtu, "netns", stack.name()];
        self.netns
            .ip(&[&["link add", name, "mtu", &mtu], &peer[..]].concat());
        self.netns.ip(&["link set", name, "master", BRIDGE, "up"]);
        stack.ip(&["address add", address, "dev eth0"]);
        stack.ip(&["link set eth0 up"]);
        stack
    }

    /// Adds an entry so that frames to all are copied to another host.
    pub fn add_copies_to(&self, other: &Self) {
        self.bridge(&format!(
            "fdb append {} dev {VXLAN} dst {}",
            text([0; 6]),
            other.address()
        ));
    }

    /// Adds an entry for an address on another host.
    pub fn add_remote(&self, mac: [u8; 6], other: &Self) {
        self.bridge(&format!(
            "fdb add {} dev {VXLAN} dst {}",
            text(mac),
            other.address()
        ));
        self.add_entry(mac, VXLAN);
    }

    /// Adds an entry for an address at one of its ports.
    pub fn add_entry(&self, mac: [u8; 6], port: &str) {
        self.bridge(&format!("fdb add {} dev {port} master static", text(mac)));
    }

    /// Removes such an entry.
    pub fn remove_entry(&self, mac: [u8; 6], port: &str) {
        self.bridge(&format!("fdb del {} dev {port} master", text(mac)));
    }

    /// Opens what is at the other end of a port for sending, with virtio-net headers; GSO packets remain whole.
    pub fn open_gso_sender(&self, name: &str) -> PacketPort {
        let guest = format!("{name}-guest");
        let on = ["-K", &guest, "tx", "on", "tso", "on", "tx-udp-segmentation", "on"];
        self.netns.run("ethtool", &on);
        PacketPort::open_with_header(&self.netns, &guest)
    }

    /// The entries of the bridge's forwarding database, a line each.
    pub fn entries(&self) -> String {
        // Those that change while the kernel lists them may be missing.
        let list = || self.netns.output_of("bridge", &["fdb", "show", "br", BRIDGE]);
        let twice = wait::until_some(wait::SOON, || Some(list()).filter(|listed| *listed == list()));
        twice.expect("they come to rest")
    }

    /// What is known of neighbours on the bridge, a line each.
    pub fn neighbours(&self) -> String {
        self.netns.output_of("ip", &["neighbour", "show", "dev", BRIDGE])
    }

    /// The underlay address of the host where frames to this address go. That of the bridge's entry says whether it is
    /// elsewhere; that of the VXLAN device, which may be older, says where.
    pub fn remote(&self, mac: [u8; 6]) -> Option<String> {
        let (entries, start) = (self.entries(), format!("{} dev {VXLAN} ", text(mac)));
        let mut its = entries.lines().filter_map(|line| line.strip_prefix(&start));
        its.clone().find(|entry| entry.contains("master"))?;
        let host = its.find_map(|entry| entry.strip_prefix("dst "))?;
        host.split(' ').next().map(str::to_owned)
    }

    /// Waits until frames to this address go to another host, or to none (`None`).
    ///
    /// # Panics
    /// If they never do.
    #[track_caller]
    pub fn await_remote(&self, mac: [u8; 6], host: Option<&Self>) {
        let expected = host.map(Self::address);
        let became = wait::until(wait::SOON, || self.remote(mac) == expected);
        assert!(became, "{} at {expected:?}: {}", text(mac), self.described());
    }

    /// For messages.
    fn described(&self) -> String {
        self.entries() + &self.frr.as_ref().map(Frr::said).unwrap_or_default()
    }

    /// Waits until the bridge has an IP address as that of a guest, or does not have it.
    ///
    /// # Panics
    /// If that never comes about.
    #[track_caller]
    pub fn await_neighbour(&self, ip: &str, mac: [u8; 6], is_known: bool) {
        let line = format!("{ip} lladdr {} ", text(mac));
        let became = || self.neighbours().lines().any(|known| known.starts_with(&line)) == is_known;
        assert!(wait::until(wait::SOON, became), "{ip}: {}", self.neighbours());
    }
}

/// An address as commands have it.
pub fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Hosts of one network.
#[must_use]
pub struct Overlay {
    /// By number.
    pub hosts: Vec<Host>,
    /// FRR's route reflector, if there is FRR.
    pub reflector: Option<(Frr, NetNs)>,
    /// What connects the hosts.
    fabric: NetNs,
}

impl Overlay {
    /// So many hosts, which know each other but no address of a guest.
    pub fn new(underlay: Underlay, hosts: usize) -> Self {
        let overlay = Self::unconnected(underlay, hosts);
        for (host, other) in overlay.pairs() {
            host.add_copies_to(other);
        }
        overlay
    }

    /// The same, where each has a second link to the others by a second switch (`br1`), and its address by both, with
    /// equal routes.
    pub fn with_two_links(underlay: Underlay, hosts: usize) -> Self {
        let overlay = Self::new(underlay, hosts);
        let fabric = &overlay.fabric;
        fabric.ip(&["link add br1 type bridge mcast_snooping 0 forward_delay 0"]);
        fabric.ip(&["link set br1 up"]);
        for host in &overlay.hosts {
            let netns = &host.netns;
            let far = format!("g{}", host.number);
            netns.ip(&["link add u1 type veth peer name", &far, "netns", fabric.name()]);
            fabric.ip(&["link set", &far, "master br1 up"]);
            netns.ip(&["link set u1 up"]);
            fabric.await_sender(&far);
            netns.ip(&["address flush dev", NIC]);
            netns.ip(&["address add", &format!("{}/32", host.address()), "dev lo"]);
            for link in 0..2 {
                host.number_link(link);
            }
            netns.run(
                "sysctl",
                &["-qw", "net.ipv4.conf.all.ignore_routes_with_linkdown=1"],
            );
        }
        for (host, other) in overlay.pairs() {
            let hops = [0, 1].map(|link| format!("nexthop {}", other.behind(link)));
            host.netns
                .ip(&["route add", &other.address(), &hops[0], &hops[1]]);
        }
        overlay
    }

    /// Frames of a host to the others, and theirs to it, leave by this one of two links.
    pub fn use_link(&self, host: usize, link: usize) {
        let is_its = |(from, to): &(&Host, &Host)| [from.number, to.number].contains(&host);
        for (from, to) in self.pairs().filter(is_its) {
            from.netns.ip(&["route replace", &to.address(), &to.behind(link)]);
        }
    }

    /// Makes the first of two links of a host again, which was removed.
    pub fn restore_first_link(&self, host: usize) {
        let host = &self.hosts[host];
        host.underlay.connect(&self.fabric, &host.netns, host.number);
        host.netns.ip(&["address flush dev", NIC]);
        host.number_link(0);
    }

    /// Whether one of the two switches has power. Returns when all hosts know.
    ///
    /// # Panics
    /// If one does not come to know.
    #[track_caller]
    pub fn set_switch(&self, link: usize, is_up: bool) {
        let (state, name) = (if is_up { "up" } else { "down" }, ["f", "g"][link]);
        for host in &self.hosts {
            let far = format!("{name}{}", host.number);
            self.fabric.ip(&["link set", &far, state]);
        }
        for host in &self.hosts {
            let routes = || host.netns.output_of("ip", &["route"]);
            let knows = wait::until(wait::SOON, || routes().contains("linkdown") != is_up);
            assert!(knows, "{}", routes());
        }
    }

    /// The same, where FRR makes all entries. FRR 8 has no EVPN over IPv6.
    ///
    /// # Panics
    /// If FRR does not start.
    pub fn with_frr(underlay: Underlay, hosts: usize) -> Self {
        Self::with_frr_timers(underlay, hosts, "60 180")
    }

    /// The same, with other than BGP's usual timers: seconds between two messages, and without any until a neighbour is
    /// taken for dead.
    ///
    /// # Panics
    /// If FRR does not start.
    pub fn with_frr_timers(underlay: Underlay, hosts: usize, timers: &str) -> Self {
        let mut overlay = Self::unconnected(underlay, hosts);
        let netns = NetNs::new("reflector");
        Underlay::PLAIN.connect(&overlay.fabric, &netns, REFLECTOR);
        let clients: Vec<_> = overlay.hosts.iter().map(|host| host.number).collect();
        overlay.reflector = Some((Frr::start(&netns, REFLECTOR, &clients, timers), netns));
        for host in &mut overlay.hosts {
            host.frr = Some(Frr::start(&host.netns, host.number, &[REFLECTOR], timers));
        }
        overlay.await_hosts();
        overlay
    }

    fn unconnected(underlay: Underlay, hosts: usize) -> Self {
        let fabric = NetNs::new("fabric");
        fabric.ip(&["link add br0 type bridge mcast_snooping 0 forward_delay 0"]);
        fabric.ip(&["link set br0 up"]);
        Self {
            hosts: (0..hosts)
                .map(|number| Host::new(underlay, &fabric, number))
                .collect(),
            reflector: None,
            fabric,
        }
    }

    /// Each host with each other one.
    fn pairs(&self) -> impl Iterator<Item = (&Host, &Host)> {
        let others = |host: &Host| {
            let number = host.number;
            self.hosts.iter().filter(move |other| other.number != number)
        };
        self.hosts
            .iter()
            .flat_map(move |host| others(host).map(move |other| (host, other)))
    }

    /// Adds an entry for an address on each host but that where it is.
    pub fn add_entries(&self, mac: [u8; 6], host: usize) {
        for (other, host) in self.pairs().filter(|(_, of)| of.number == host) {
            other.add_remote(mac, host);
        }
    }

    /// Waits until the route reflector has an address from this host only.
    ///
    /// # Panics
    /// If that never comes about, or there is no reflector.
    #[track_caller]
    pub fn await_announced_only_by(&self, mac: [u8; 6], host: usize) {
        let (frr, _) = self.reflector.as_ref().expect("there is one");
        let (announced, expected) = (|| frr.announcers(mac), [self.hosts[host].address()]);
        let became = wait::until(wait::SOON, || announced() == expected);
        assert!(became, "{}: {:?}, not {expected:?}", text(mac), announced());
    }

    /// A router in the underlay, and its address.
    ///
    /// # Panics
    /// Only as namespaces do.
    pub fn add_router(&self) -> (NetNs, String) {
        let (netns, underlay) = (NetNs::new("router"), self.hosts[0].underlay);
        underlay.connect(&self.fabric, &netns, ROUTER);
        for set in [
            "ip_forward=1",
            "conf.all.send_redirects=0",
            &format!("conf.{NIC}.send_redirects=0"),
        ] {
            netns.run("sysctl", &["-qw", &format!("net.ipv4.{set}")]);
        }
        (netns, underlay.address(ROUTER))
    }

    /// Sends frames to a host as they are, past the bridge of the fabric, which looks into them.
    pub fn wire_to(&self, host: usize) -> PacketPort {
        PacketPort::open(&self.fabric, &format!("f{host}"))
    }

    /// Spreads frames to a host over all queues of its interface.
    pub fn spread(&self, host: usize) {
        let (far, queues) = (format!("f{host}"), self.hosts[host].underlay.queues.to_string());
        self.fabric.run("ethtool", &["-L", &far, "tx", &queues]);
        // Otherwise the queue by which a frame left decides.
        for other in self.hosts.iter().filter(|other| other.number != host) {
            other.netns.run("ethtool", &["-L", NIC, "tx", "1"]);
        }
    }

    /// Whether the link of a host to the underlay is up.
    pub fn set_link(&self, host: usize, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        self.fabric.ip(&["link set", &format!("f{host}"), state]);
    }

    /// Whether the underlay forwards what comes from a host, and to it; the link stays up.
    pub fn set_forwarding(&self, host: usize, forwards: bool) {
        let state = if forwards { "forwarding" } else { "disabled" };
        let port = ["link", "set", "dev", &format!("f{host}"), "state", state];
        self.fabric.run("bridge", &port);
    }

    /// Waits until each host sends frames to all to each other one.
    #[track_caller]
    fn await_hosts(&self) {
        for (host, other) in self.pairs() {
            let to_all = format!("{} dev {VXLAN} dst {} ", text([0; 6]), other.address());
            let comes = wait::until(wait::SOON, || host.entries().contains(&to_all));
            assert!(comes, "{}", host.described());
        }
    }
}

/// FRR's zebra and bgpd in a namespace.
#[must_use]
pub struct Frr {
    bgpd: Running,
    zebra: Running,
    dir: TempDir,
}

impl Frr {
    /// With these BGP neighbours, all in one autonomous system: hosts of the reflector, or that of a host.
    fn start(netns: &NetNs, number: usize, neighbours: &[usize], timers: &str) -> Self {
        let address = |number| Underlay::PLAIN.address(number);
        let for_each = |command: &str| -> String {
            let line = |&number| format!("neighbor {} {command}\n", address(number));
            neighbours.iter().map(line).collect()
        };
        let role = match number {
            REFLECTOR => for_each("route-reflector-client"),
            _ => "advertise-all-vni\nno dup-addr-detection\n".to_owned(),
        };
        let text = [
            &format!(
                "router bgp 65000\nbgp router-id {}\nno bgp default ipv4-unicast\n",
                address(number)
            ),
            &for_each("remote-as 65000"),
            &for_each("timers connect 1"),
            &for_each(&format!("timers {timers}")),
            "address-family l2vpn evpn\n",
            &for_each("activate"),
            &role,
        ]
        .concat();
        let dir = private_dir();
        let write = |name, text: &str| std::fs::write(dir.path().join(name), text).expect("writable");
        write("bgpd.conf", &text);
        write("zebra.conf", "");
        // The package makes the group, and FRR insists on it.
        write("group", "root:x:0:\nfrrvty:x:0:\n");
        Self {
            zebra: start_zebra(netns, &dir),
            bgpd: run(netns, &dir, "bgpd"),
            dir,
        }
    }

    /// Restarts bgpd, and zebra too if asked for; does something while they are down.
    ///
    /// # Panics
    /// If one does not end.
    pub fn restart(&mut self, netns: &NetNs, with_zebra: bool, while_down: impl FnOnce()) {
        end(&mut self.bgpd);
        if with_zebra {
            end(&mut self.zebra);
        }
        while_down();
        if with_zebra {
            self.zebra = start_zebra(netns, &self.dir);
        }
        self.bgpd = run(netns, &self.dir, "bgpd");
    }

    /// What bgpd answers to a command, by the socket of vtysh, which itself would want a password.
    fn answer(&self, command: &str) -> String {
        let path = self.dir.path().join("bgpd.vty");
        let mut vty = UnixStream::connect(path).expect("bgpd runs");
        vty.set_read_timeout(Some(wait::SOON)).expect("not zero");
        vty.write_all(&[command.as_bytes(), &[0]].concat())
            .expect("bgpd runs");
        let mut text = Vec::new();
        // Three zeros and a status are behind it.
        BufReader::new(vty)
            .read_until(0, &mut text)
            .expect("bgpd answers");
        text.pop();
        String::from_utf8(text).expect("UTF-8")
    }

    /// The hosts whose announcements of an address it has.
    fn announcers(&self, mac: [u8; 6]) -> Vec<String> {
        let said = self.answer("show bgp l2vpn evpn route type macip json");
        let routes: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
        let is_its = |route: &String| route.contains(&format!("[{}]", text(mac)));
        let has_it = |routes: &Value| routes.as_object().is_some_and(|routes| routes.keys().any(is_its));
        let by_distinguisher = routes.as_object().expect("an object").iter();
        let its = by_distinguisher.filter(|(_, routes)| has_it(routes));
        // It starts with the host's address.
        its.filter_map(|(distinguisher, _)| distinguisher.split_once(':'))
            .map(|(host, _)| host.to_owned())
            .collect()
    }

    /// What both have logged.
    pub fn said(&self) -> String {
        self.zebra.said() + &self.bgpd.said()
    }
}

fn end(program: &mut Running) {
    program.signal(rustix::process::Signal::TERM);
    program.wait(wait::SOON);
}

/// Starts zebra, and waits until bgpd can connect to it.
fn start_zebra(netns: &NetNs, dir: &TempDir) -> Running {
    let socket = dir.path().join("zserv");
    let _ = std::fs::remove_file(&socket);
    let mut zebra = run(netns, dir, "zebra");
    assert!(wait::until(wait::SOON, || socket.exists()), "{zebra}");
    zebra.check();
    zebra
}

/// Starts a program of FRR as root, with its own `/etc/group` and `/var/tmp`.
fn run(netns: &NetNs, dir: &TempDir, program: &str) -> Running {
    const SCRIPT: &str = "mount --bind group /etc/group; mount -t tmpfs none /var/tmp
        export LD_LIBRARY_PATH=$(echo $FRR_DIR/usr/lib/*/frr)
        exec $FRR_DIR/usr/lib/frr/$0 --user root --group root --log stdout --config_file $PWD/$0.conf \
            --pid_file $PWD/$0.pid --socket $PWD/zserv --vty_socket $PWD";
    let mut command = netns.command("sh");
    command.args(["-ec", SCRIPT, program]).current_dir(dir.path());
    Running::start(command)
}

/// What sends and receives frames on the network.
pub struct Station {
    /// Its address.
    pub mac: [u8; 6],
    end: End,
}

enum End {
    /// Of our daemon.
    Guest(Driver),
    /// Of the kernel's bridge.
    Port(PacketPort),
}

impl Station {
    /// A guest of a daemon.
    pub fn guest(driver: Driver, guest: usize) -> Self {
        Self {
            mac: lan::mac(guest),
            end: End::Guest(driver),
        }
    }

    /// A guest of the kernel's, at a port of the bridge.
    pub fn port(port: PacketPort, guest: usize) -> Self {
        Self {
            mac: lan::mac(guest),
            end: End::Port(port),
        }
    }

    /// The same guest, on another connection.
    ///
    /// # Panics
    /// If it is not our daemon's, or refused.
    pub fn resume(self, socket: &Path) -> Self {
        let End::Guest(guest) = self.end else {
            panic!("a port of the kernel's");
        };
        let guest = guest.resume(driver::connect(socket)).expect("accepted again");
        Self {
            end: End::Guest(guest),
            ..self
        }
    }

    /// The driver of a guest that the daemon serves.
    ///
    /// # Panics
    /// If it is not our daemon's.
    pub fn driver(&mut self) -> &mut Driver {
        match &mut self.end {
            End::Guest(guest) => guest,
            End::Port(_) => panic!("a port of the kernel's"),
        }
    }

    /// Sends a frame.
    pub fn send(&mut self, frame: &[u8]) {
        match &mut self.end {
            End::Guest(guest) => {
                guest.pairs[0].reap_sent();
                guest.pairs[0].send(frame, Layout::Whole);
            }
            End::Port(port) => port.send(frame),
        }
    }

    /// The next frame that it receives from a guest.
    pub fn receive(&mut self, limit: Duration) -> Option<Vec<u8>> {
        let mut next = || match &mut self.end {
            End::Guest(guest) => guest.pairs[0].receive(limit).map(|got| got.frame),
            End::Port(port) => port.receive(limit),
        };
        std::iter::from_fn(&mut next).find(|frame| frame[6..11] == lan::mac(0)[..5])
    }

    /// The next frame that it receives, but for those of [`Self::reaches`].
    ///
    /// # Panics
    /// If none comes.
    #[track_caller]
    pub fn received(&mut self) -> Vec<u8> {
        std::iter::from_fn(|| self.receive(wait::SOON))
            .find(|frame| !is_probe(frame))
            .unwrap_or_else(|| panic!("nothing comes to {}", text(self.mac)))
    }

    /// Sends frames to another one until one arrives: what is still being configured may lose some.
    ///
    /// # Panics
    /// If none does.
    #[track_caller]
    pub fn await_reaches(&mut self, other: &mut Self) {
        let arrives = wait::until(wait::SOON, || self.reaches(other, 200));
        assert!(arrives, "{} does not reach {}", text(self.mac), text(other.mac));
    }

    /// Sends a frame of this length to another one; whether it arrives.
    pub fn reaches(&mut self, other: &mut Self, len: usize) -> bool {
        let sent = lan::once(other.mac, self.mac, len);
        self.send(&sent);
        std::iter::from_fn(|| other.receive(wait::QUIET)).any(|got| got == sent)
    }
}

/// Whether a frame is one of [`Station::reaches`], of which some may arrive late: numbers of [`lan::once`] begin so.
fn is_probe(frame: &[u8]) -> bool {
    frame[14..].starts_with(&[0xff; 2])
}
