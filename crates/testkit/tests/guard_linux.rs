//! Linux guests whose ports are kept to IP addresses, on a LAN with a real DHCP server that advertises itself as an
//! IPv6 router (dnsmasq): they get their addresses, talk by TCP, and lie in vain.

use rstest::rstest;
use testkit::guest::{Backend, Guest};
use testkit::lan::{file, mac};
use testkit::world::{HOST, give_address, iperf_server, received_bytes};
use testkit::{Daemon, Running, Serve, VethPair, require, wait};

const HOST_6: &str = "2001:db8:77::1";
/// What the server gives to the two guests.
const GIVEN: [&str; 2] = ["10.77.0.50", "10.77.0.51"];

/// On the far end of the wire.
fn dnsmasq(veth: &VethPair) -> Running {
    let host = |guest: usize| {
        let [.., last] = mac(guest);
        format!("--dhcp-host=02:00:00:00:00:{last:02x},{}", GIVEN[guest])
    };
    let mut command = veth.far.command("dnsmasq");
    command.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--user=root",
        "--port=0",
        "--log-facility=-",
    ]);
    command.args(["--pid-file", "--leasefile-ro", "--enable-ra", "--bind-interfaces"]);
    command.args([
        "--interface",
        VethPair::WIRE,
        "--dhcp-range=10.77.0.50,10.77.0.99,255.255.255.0,10m",
    ]);
    command.args(["--dhcp-range=2001:db8:77::,ra-only,64,10m", &host(0), &host(1)]);
    let mut server = Running::start(command);
    server.await_text("started");
    server
}

fn boot(daemon: &Daemon, guest: usize) -> Guest {
    let [.., last] = mac(guest);
    let mac = format!("02:00:00:00:00:{last:02x}");
    let socket = daemon.path(&format!("vm{guest}.sock"));
    Guest::boot(Backend::Daemon(&socket), "", &["--mem", "256", "--mac", &mac])
}

/// Has a guest ask for an address, and take what it gets.
fn ask(guest: &Guest) {
    let _ = guest.run(
        "printf '#!/bin/sh\n[ \"$1\" = bound ] && ip addr add $ip/24 dev eth0; true\n' >/tmp/take && chmod +x /tmp/take",
    );
    let asked = guest.run_until_success(10 * wait::SOON, "udhcpc -i eth0 -n -q -t 10 -s /tmp/take");
    asked.unwrap_or_else(|said| panic!("no address: {said}"));
}

#[rstest]
fn linux_guest_gets_its_addresses_and_keeps_to_them() {
    require!(Root, Qemu, Dnsmasq);
    let veth = VethPair::new();
    give_address(&veth);
    veth.far.run(
        "sysctl",
        &["-qw", &format!("net.ipv6.conf.{}.disable_ipv6=0", VethPair::WIRE)],
    );
    veth.far.ip(&[
        "address",
        "add",
        &format!("{HOST_6}/64"),
        "dev",
        VethPair::WIRE,
        "nodad",
    ]);
    let _server = dnsmasq(&veth);
    let _iperf = iperf_server(&veth);
    // The second one's are not what the server gives.
    let ips = [
        "ips = [\"10.77.0.50\", \"2001:db8:77::/64\"]",
        "ips = [\"10.77.0.99\", \"2001:db8:78::/64\"]",
    ];
    let text = file(Some(VethPair::NIC), &ips);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
    let guests = [boot(&daemon, 0), boot(&daemon, 1)];
    guests.iter().for_each(ask);
    for (guest, given) in guests.iter().zip(GIVEN) {
        let has = guest.run("ip addr show dev eth0");
        assert!(has.contains(given), "{has}");
        let advertised = "ip -6 addr show dev eth0 scope global | grep -v tentative | grep 2001:db8:77:";
        let got = guest.run_until_success(10 * wait::SOON, advertised);
        got.unwrap_or_else(|said| panic!("no advertisement: {said}\n{}", guest.run("ip addr")));
    }
    for to in [HOST, HOST_6] {
        for direction in ["", "-R"] {
            let said = guests[0].run(&format!("iperf3 -c {to} -n 10M -J {direction}"));
            let received = received_bytes(&said, "sum_received");
            assert!(received > 1_000_000, "{to}: {received} bytes {direction}: {said}");
        }
        // Whose address it is does not matter to the other one's stack.
        let said = guests[1].try_run(&format!("ping -c 3 -W 5 {to}"));
        assert!(
            !said.status.success(),
            "{to} answers a guest with an address that is not its own"
        );
    }
    let refused = |port: &str, what: &str| daemon.counter_of(port, &format!("from_guest_{what}"));
    for what in [
        "arp",
        "ip_source",
        "router",
        "dhcp_server",
        "neighbour",
        "headers",
    ] {
        assert_eq!(refused("vm0", what), 0, "{what}: {:#}", daemon.status());
    }
    assert!(daemon.counter_of("vm0", "from_guest_frames") > 1_000);
    // Its ARP, and its neighbour discovery.
    assert!(refused("vm1", "arp") > 0, "{:#}", daemon.status());
    assert!(
        refused("vm1", "ip_source") + refused("vm1", "neighbour") > 0,
        "{:#}",
        daemon.status()
    );
    // The address of the LAN's host is nobody's to take: who has it goes on answering with its own MAC.
    let _ = guests[1].run(&format!("ip addr add {HOST}/24 dev eth0"));
    for _ in 0..3 {
        let _ = guests[1].try_run(&format!("arping -c 2 -w 2 -U -I eth0 {HOST}"));
    }
    let known = guests[0].run(&format!("arping -f -w 20 -I eth0 {HOST}"));
    assert!(!known.contains("02:00:00:00:00:01"), "{known}");
    let said = guests[0].run(&format!("iperf3 -c {HOST} -n 1M -J"));
    assert!(received_bytes(&said, "sum_received") > 500_000, "{said}");
}
