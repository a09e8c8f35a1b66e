//! Linux guests whose ports are kept to IP addresses, with real DHCP servers that advertise themselves as IPv6 routers
//! (dnsmasq) on the LAN and on the host: they get their addresses, talk by TCP, and lie in vain.

use std::net::Ipv6Addr;

use rstest::rstest;
use testkit::frame::ipv6;
use testkit::gso_packet::fold;
use testkit::guest::Guest;
use testkit::lan::{file, mac};
use testkit::world::{HOST, give_address};
use testkit::{
    Daemon, Driver, DriverConfig, Layout, NetNs, Running, Serve, VethPair, dnsmasq, require, wait,
};
use virtqueue::GuestAddr;

const HOST_6: &str = "2001:db8:77::1";
/// What servers give to the two guests.
const GIVEN: [&str; 2] = ["10.77.0.50", "10.77.0.51"];

fn mac_text(guest: usize) -> String {
    let [.., last] = mac(guest);
    format!("02:00:00:00:00:{last:02x}")
}

/// One that gives those of these guests their addresses, and advertises itself as a router of a network
/// (2001:db8:NET::/64), at an interface that has addresses of both.
fn start_dnsmasq(netns: &NetNs, interface: &str, serves: &[usize], network: u16) -> Running {
    let host = |guest: usize| {
        let what = if serves.contains(&guest) {
            GIVEN[guest]
        } else {
            "ignore"
        };
        format!("--dhcp-host={},{what}", mac_text(guest))
    };
    let network = format!("--dhcp-range=2001:db8:{network}::,ra-only,64,10m");
    dnsmasq::start(netns, interface, &["--enable-ra", &network, &host(0), &host(1)])
}

/// Gives an interface an address of IPv6, at once.
fn give_address_6(netns: &NetNs, interface: &str, address: &str) {
    let key = format!("net.ipv6.conf.{interface}.disable_ipv6=0");
    netns.run("sysctl", &["-qw", &key]);
    let address = format!("{address}/64");
    netns.ip(&["address", "add", &address, "dev", interface, "nodad"]);
}

fn boot(daemon: &Daemon, guest: usize) -> Guest {
    let socket = daemon.path(&format!("vm{guest}.sock"));
    Guest::boot_uml(&socket, "")
}

/// A guest has made itself an address of an advertised network.
#[track_caller]
fn await_prefix(guest: &Guest, network: u16) {
    let has = format!("ip -6 addr show dev eth0 scope global | grep -v tentative | grep 2001:db8:{network}:");
    let got = guest.run_until_success(10 * wait::SOON, &has);
    got.unwrap_or_else(|said| panic!("no advertisement: {said}\n{}", guest.run("ip addr")));
}

/// The host, at its own interface: the uplink.
const UPLINK: &str = "10.77.0.3";
const UPLINK_6: &str = "2001:db8:78::3";

const PORTS: usize = 64;

/// A guest that testkit plays, with receive buffers.
fn played(daemon: &Daemon, port: usize) -> Driver {
    let config = DriverConfig::with_memory(vec![(GuestAddr(0), 4 << 20)]);
    let path = daemon.path(&format!("vm{port}.sock"));
    let mut driver = Driver::connect(&path, &config).expect("accepted");
    driver.pairs[0].post(200, &[2048]);
    driver
}

/// A guest that would give others their addresses, from a range of its own.
fn serve_dhcp(guest: &Guest) {
    let keys = "interface eth0\nstart 10.66.0.10\nend 10.66.0.20\nlease_file /tmp/leases\noption subnet 255.255.0.0\n";
    let _ = guest.run(&format!(
        "printf '{}' >/tmp/udhcpd.conf && touch /tmp/leases",
        keys.replace('\n', "\\n")
    ));
    guest.start("udhcpd", "udhcpd -f /tmp/udhcpd.conf");
}

/// A router advertisement of a guest's, for a network that nobody has.
fn advertisement(guest: usize) -> Vec<u8> {
    let mac = mac(guest);
    let own: Ipv6Addr = format!("fe80::ff:fe00:{guest:x}").parse().expect("valid");
    let all: Ipv6Addr = "ff02::1".parse().expect("valid");
    let prefix: Ipv6Addr = "2001:db8:bad::".parse().expect("valid");
    let mut message = [
        &[134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0][..],
        &[1, 1],
        &mac,
    ]
    .concat();
    // A network of 64 bits, on the link, for addresses that guests make themselves; for half an hour.
    message.extend([3, 4, 64, 0xc0, 0, 0, 7, 8, 0, 0, 7, 8, 0, 0, 0, 0]);
    message.extend(prefix.octets());
    // RFC 4443, 2.3.
    let len = (message.len() as u32).to_be_bytes();
    let summed = [&own.octets()[..], &all.octets(), &len, &[0, 0, 0, 58], &message].concat();
    message[2..4].copy_from_slice(&(!fold(&summed)).to_be_bytes());
    let packet = ipv6(own, all, 58, &message);
    [&[0x33, 0x33, 0, 0, 0, 1][..], &mac, &[0x86, 0xdd], &packet].concat()
}

/// One guest has its lease from the LAN, the other from the host, both hear both routers; and one that plays server and
/// router itself is heard by nobody, until its port says that it is one.
#[rstest]
fn linux_guests_get_addresses_of_the_lan_and_the_host_and_not_of_each_other() {
    require!(Root, Uml, Dnsmasq);
    let veth = VethPair::new();
    give_address(&veth);
    give_address_6(&veth.far, VethPair::WIRE, HOST_6);
    let near = &veth.near;
    near.ip(&["link", "set", VethPair::NIC, "arp", "on"]);
    near.ip(&["address", "add", &format!("{UPLINK}/24"), "dev", VethPair::NIC]);
    give_address_6(near, VethPair::NIC, UPLINK_6);
    let ips = |own: &str| format!("ips = [\"{own}\", \"2001:db8:77::/64\", \"2001:db8:78::/64\"]");
    let own = GIVEN.map(ips);
    let keys = |server: &str, router: &str| {
        let server = format!("{}\n{server}", own[1]);
        let router = format!("ips = [\"10.77.0.60\"]\n{router}");
        let ports = [&own[0], &server, &router].map(String::as_str);
        file(Some(VethPair::NIC), &[&ports[..], &[""; PORTS - 3]].concat())
    };
    let daemon = Daemon::start_file(near, &Serve::file(), &[VethPair::NIC], &keys("", ""));
    let servers = [
        start_dnsmasq(&veth.far, VethPair::WIRE, &[0], 77),
        start_dnsmasq(near, VethPair::NIC, &[1], 78),
    ];
    let guests = [boot(&daemon, 0), boot(&daemon, 1)];
    // The others are no machines: one that lies, and those who hear what they are not meant to hear.
    let mut others: Vec<_> = (2..PORTS).map(|port| played(&daemon, port)).collect();
    let mut liar = others.remove(0);
    guests[1].ask_for_address();
    serve_dhcp(&guests[1]);
    guests[0].ask_for_address();
    for (guest, given) in guests.iter().zip(GIVEN) {
        let has = guest.run("ip addr show dev eth0");
        assert!(has.contains(given) && !has.contains("10.66."), "{has}");
        (77..=78).for_each(|network| await_prefix(guest, network));
    }
    for (server, given) in servers.iter().zip(GIVEN) {
        let said = server.said();
        let acknowledged = said
            .lines()
            .any(|line| line.contains("DHCPACK") && line.contains(given));
        assert!(acknowledged, "{said}");
    }
    let refused = |port: &str, what: &str| daemon.counter_of(port, &format!("from_guest_{what}"));
    let lied = || refused("vm1", "dhcp_server") > 0;
    assert!(wait::until(wait::SOON, lied), "{:#}", daemon.status());
    assert_eq!(refused("vm0", "dhcp_server"), 0);
    liar.pairs[0].send(&advertisement(2), Layout::Whole);
    daemon.await_counter("from_guest_router", 1);
    // Everybody reaches everybody.
    for (guest, other) in guests.iter().zip([GIVEN[1], GIVEN[0]]) {
        for to in [other, UPLINK, HOST, UPLINK_6, HOST_6] {
            let pinged = guest.run_until_success(4 * wait::SOON, &format!("ping -c 2 -W 20 {to}"));
            pinged.unwrap_or_else(|said| panic!("no ping of {to}: {said}\n{:#}", daemon.status()));
        }
    }
    for to in [GIVEN[0], GIVEN[1], HOST] {
        near.run("ping", &["-q", "-c", "2", "-W", "20", to]);
    }
    for to in [GIVEN[0], GIVEN[1], UPLINK] {
        veth.far.run("ping", &["-q", "-c", "2", "-W", "20", to]);
    }
    // Who has nothing to do with it heard what is for all, and no more.
    for (port, other) in (3..).zip(&mut others) {
        let heard: Vec<_> = std::iter::from_fn(|| other.pairs[0].poll()).collect();
        assert!(!heard.is_empty(), "port {port} hears no groups");
        let private = heard.iter().find(|got| got.frame[0] & 1 == 0);
        assert_eq!(private, None, "port {port}");
    }
    // Nobody heard what was refused.
    let has = guests[0].run("ip -6 addr show dev eth0");
    assert!(!has.contains("2001:db8:bad:"), "{has}");
    // Where the file says that they are what they say they are, they are heard.
    drop(servers);
    daemon.reload_with(&keys("dhcp-server = true", "router = true"));
    let _ = guests[0].run("ip addr flush dev eth0 scope global");
    let asked = guests[0].run_until_success(
        10 * wait::SOON,
        "udhcpc -i eth0 -n -q -t 10 -s /tmp/take && ip addr show dev eth0 | grep 10.66.0.",
    );
    asked.unwrap_or_else(|said| panic!("no address: {said}\n{:#}", daemon.status()));
    let before = daemon.counter("from_guest_router");
    let heard = wait::until(2 * wait::SOON, || {
        liar.pairs[0].reap_sent();
        liar.pairs[0].send(&advertisement(2), Layout::Whole);
        guests[0]
            .try_run("ip -6 addr show dev eth0 | grep 2001:db8:bad:")
            .status
            .success()
    });
    assert!(heard, "{}", guests[0].run("ip -6 addr show dev eth0"));
    assert_eq!(daemon.counter("from_guest_router"), before);
}
