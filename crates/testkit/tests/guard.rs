//! What guests of a network may not send: other's addresses, other VLANs, what routers and servers say. By real frames
//! on a veth pair, from the configuration file on.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::{F_CSUM, HEADER};
use testkit::frame::{ipv4, ipv6, udp_ports};
use testkit::lan::{BROADCAST, Lan, STRANGER, file, frame, guests, mac, tagged};
use testkit::{
    Daemon, DriverConfig, Layout, NetNs, PacketPort, Pair, Rig, Serve, VethPair, require, soak, wait,
};
use virtqueue::driver::Buffer;

const OWN: &str = "192.0.2.10";
const OTHER: &str = "192.0.2.11";
const OWN_6: &str = "2001:db8::10";
const OTHER_6: &str = "2001:db8::11";
/// Of the first guest's MAC address.
const LINK_LOCAL: &str = "fe80::ff:fe00:0";
const IPS: &str = "ips = [\"192.0.2.10\", \"2001:db8::10\", \"2001:db8:1::/64\"]";

/// A frame of the first guest's.
fn of_guest(to: [u8; 6], kind: u16, packet: &[u8]) -> Vec<u8> {
    [&to[..], &mac(0), &kind.to_be_bytes(), packet].concat()
}

fn udp(to: [u8; 6], from: &str, ports: [u16; 2]) -> Vec<u8> {
    let (from, all) = (from.parse().expect("valid"), Ipv4Addr::BROADCAST);
    of_guest(to, 0x0800, &ipv4(from, all, 17, &udp_ports(ports)))
}

fn over_ipv6(to: [u8; 6], from: &str, next: u8, payload: &[u8]) -> Vec<u8> {
    let (from, all): (_, Ipv6Addr) = (from.parse().expect("valid"), "ff02::1".parse().expect("valid"));
    of_guest(to, 0x86dd, &ipv6(from, all, next, payload))
}

fn arp(to: [u8; 6], operation: u8, hardware: [u8; 6], sender: &str) -> Vec<u8> {
    let address = |text: &str| text.parse::<Ipv4Addr>().expect("valid").octets();
    let head = [0, 1, 8, 0, 6, 4, 0, operation];
    let packet = [
        &head[..],
        &hardware,
        &address(sender),
        &[0; 6],
        &address("192.0.2.1"),
    ]
    .concat();
    of_guest(to, 0x0806, &packet)
}

/// Neighbour discovery of that kind, with an option for a link-layer address.
fn neighbour(to: [u8; 6], from: &str, kind: u8, target: &str, (option, hardware): (u8, [u8; 6])) -> Vec<u8> {
    over_ipv6(to, from, 58, &message(kind, target, (option, hardware)))
}

fn message(kind: u8, target: &str, (option, hardware): (u8, [u8; 6])) -> Vec<u8> {
    let target = target.parse::<Ipv6Addr>().expect("valid").octets();
    [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target, &[option, 1], &hardware].concat()
}

/// Behind so many headers with options.
fn behind_options(count: usize, next: u8, payload: &[u8]) -> Vec<u8> {
    let header = |at: usize| [if at + 1 < count { 60 } else { next }, 0, 1, 4, 0, 0, 0, 0];
    let headers: Vec<u8> = (0..count).flat_map(header).collect();
    [&headers[..], payload].concat()
}

/// What a guest with these addresses may not send, and where that is counted.
fn forged(to: [u8; 6]) -> Vec<(&'static str, Vec<u8>)> {
    let advertised = message(134, OTHER_6, (1, mac(0)));
    let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &udp(to, OTHER, [1, 2])[14..]].concat();
    let fragment = |next, payload: &[u8]| [&[next, 0, 0, 1, 0, 0, 0, 1], payload].concat();
    vec![
        ("ip_source", udp(to, OTHER, [1, 2])),
        ("ip_source", udp(to, "0.0.0.0", [1, 2])),
        ("ip_source", over_ipv6(to, OTHER_6, 6, &[0; 20])),
        ("ip_source", over_ipv6(to, "fe80::1", 6, &[0; 20])),
        ("ip_source", over_ipv6(to, "::", 17, &udp_ports([546, 547]))),
        ("arp", arp(to, 1, mac(0), OTHER)),
        ("arp", arp(to, 2, mac(0), OTHER)),
        ("arp", arp(to, 2, mac(1), OWN)),
        ("arp", arp(to, 3, mac(0), OWN)),
        ("neighbour", neighbour(to, OWN_6, 136, OTHER_6, (2, mac(0)))),
        ("neighbour", neighbour(to, OWN_6, 136, OWN_6, (2, mac(1)))),
        ("neighbour", neighbour(to, OWN_6, 135, OTHER_6, (1, mac(1)))),
        ("neighbour", neighbour(to, "::", 135, OTHER_6, (14, mac(1)))),
        ("router", over_ipv6(to, LINK_LOCAL, 58, &advertised)),
        (
            "router",
            over_ipv6(to, LINK_LOCAL, 60, &behind_options(3, 58, &advertised)),
        ),
        (
            "router",
            over_ipv6(to, LINK_LOCAL, 44, &fragment(58, &advertised)),
        ),
        ("router", neighbour(to, LINK_LOCAL, 137, OWN_6, (2, mac(0)))),
        (
            "headers",
            over_ipv6(to, LINK_LOCAL, 60, &behind_options(40, 58, &advertised)),
        ),
        (
            "headers",
            over_ipv6(
                to,
                LINK_LOCAL,
                44,
                &fragment(60, &behind_options(2, 58, &[])[..8]),
            ),
        ),
        ("dhcp_server", udp(to, OWN, [67, 68])),
        (
            "dhcp_server",
            over_ipv6(to, LINK_LOCAL, 17, &udp_ports([547, 546])),
        ),
        ("protocol", of_guest(to, 0x8035, &[0; 46])),
        ("protocol", frame(to, mac(0), 60, 1)),
        ("protocol", of_guest(to, 44, &snap)),
    ]
}

/// And what it may.
fn honest(to: [u8; 6]) -> Vec<Vec<u8>> {
    vec![
        udp(to, OWN, [1, 2]),
        udp(to, "0.0.0.0", [68, 67]),
        arp(to, 1, mac(0), OWN),
        arp(to, 2, mac(0), OWN),
        over_ipv6(to, OWN_6, 6, &[0; 20]),
        over_ipv6(to, LINK_LOCAL, 17, &udp_ports([546, 547])),
        over_ipv6(to, "::", 58, &[133, 0, 0, 0, 0, 0, 0, 0]),
        neighbour(to, LINK_LOCAL, 136, OWN_6, (2, mac(0))),
        neighbour(to, LINK_LOCAL, 135, OTHER_6, (1, mac(0))),
        neighbour(to, "::", 135, "2001:db8:1::7", (14, mac(1))),
        over_ipv6(to, OWN_6, 60, &behind_options(20, 6, &[0; 20])),
    ]
}

#[rstest]
fn addresses_change_while_the_guest_stays() {
    let netns = NetNs::new("guard");
    let text = |keys: &str| file(None, &[keys, ""]);
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text(""));
    let mut both = guests(&daemon, 2, &DriverConfig::default());
    let (own, other) = (udp(mac(1), OWN, [1, 2]), udp(mac(1), OTHER, [1, 2]));
    let mut arrives = |frame: &[u8]| {
        let (from, to) = both.split_at_mut(1);
        from[0].pairs[0].send(frame, Layout::Whole);
        let got = to[0].pairs[0].receive(wait::SOON);
        assert_eq!(got.expect("it comes").frame, frame);
    };
    arrives(&own);
    arrives(&other);
    let said = daemon.reload_with(&text(IPS));
    assert!(said.contains("port vm0 has changed (ips), and goes on"), "{said}");
    daemon.await_port(0, "the guest stays", |port| port["connected"] == true);
    arrives(&own);
    // What was told a moment ago holds soon.
    let refused = || daemon.counter_of("vm0", "from_guest_ip_source") > 0;
    let soon = wait::until(wait::SOON, || {
        both[0].pairs[0].send(&other, Layout::Whole);
        refused()
    });
    assert!(soon, "{:#}", daemon.status());
    let said = daemon.reload_with(&text("ips = \"192.0.2.11\"\nrouter = true"));
    assert!(said.contains("has changed (ips, router), and goes on"), "{said}");
}

/// A header that leaves a checksum to us, summed from the frame's begin and stored there.
fn asking(field: u16) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = 1;
    header[8..10].copy_from_slice(&field.to_le_bytes());
    header
}

#[rstest]
fn checksum_is_no_way_to_change_what_was_judged() {
    require!(Root);
    let mut lan = Lan::new(&[IPS, "", ""], &DriverConfig::with(F_CSUM));
    let sent = udp(STRANGER, OWN, [1, 2]);
    // The address in the Ethernet header, its kind, both IPv4 addresses, the ports.
    for field in [6, 10, 12, 26, 28, 30, 34, 36] {
        lan.guests[0].pairs[0].send_asking(&[(asking(field), &sent)], Layout::Whole);
    }
    lan.daemon.await_counter("from_guest_checksum_in_headers", 8);
    // Without addresses: what says where from, and of which VLAN.
    for field in [6, 8, 10, 11, 12, 13] {
        let plain = frame(STRANGER, mac(2), 60, 1);
        lan.guests[2].pairs[0].send_asking(&[(asking(field), &plain)], Layout::Whole);
    }
    lan.daemon.await_counter("from_guest_checksum_in_headers", 14);
    // UDP's own.
    let mut header = asking(0);
    (header[6], header[8]) = (34, 6);
    lan.guests[0].pairs[0].send_asking(&[(header, &udp(mac(1), OWN, [1, 2]))], Layout::Whole);
    assert_eq!(lan.received(1)[..40], udp(mac(1), OWN, [1, 2])[..40]);
    lan.assert_quiet();
}

/// A guest that sends a frame over and over, and meanwhile makes others of its addresses. What arrives is the honest
/// one, whole, and there was something to catch.
fn forge_meanwhile(
    guest: &mut Pair,
    honest: &[u8],
    (daemon, judges): (&Daemon, &[&str]),
    mut arrived: impl FnMut() -> Option<Vec<u8>>,
) {
    let caught = || -> Vec<u64> {
        let count = |name: &&str| daemon.counter(&format!("from_guest_{name}"));
        judges.iter().map(count).collect()
    };
    // Rules judge the IP address only.
    let other = if judges.len() > 1 { mac(1) } else { mac(0) };
    let all_caught = || caught().iter().all(|&count| count > 0);
    let bytes = [&[0; HEADER][..], honest].concat();
    let addr = guest.ram().alloc(4096, 4096).expect("room");
    guest.ram().write(addr, &bytes);
    let over = Arc::new(AtomicBool::new(false));
    let forger = std::thread::spawn({
        let (ram, over) = (Arc::clone(guest.ram()), Arc::clone(&over));
        move || {
            let place = |at: usize| addr.checked_add((HEADER + at) as u64).expect("inside");
            while !over.load(Ordering::Relaxed) {
                for (source, last) in [(mac(0), 10), (other, 11), (mac(0), 11), (other, 10)] {
                    ram.write(place(6), &source);
                    ram.write(place(29), &[last]);
                }
            }
        }
    });
    let mut got = 0;
    let end = Instant::now() + wait::SOON;
    while (got < 2_000 || !all_caught()) && Instant::now() < end {
        for _ in 0..16 {
            let buffer = Buffer::readable(addr, bytes.len() as u32);
            guest.send_buffers(&[buffer], false);
        }
        while let Some(frame) = arrived() {
            assert_eq!(frame, honest, "what was never judged");
            got += 1;
        }
        guest.reap_sent();
    }
    over.store(true, Ordering::Relaxed);
    forger.join().expect("it ends");
    assert!(got > 100, "{got} frames");
    assert!(all_caught(), "{:?}", caught());
}

#[rstest]
fn header_that_changes_meanwhile_is_sent_as_it_was_judged() {
    require!(Root);
    let mut lan = Lan::new(&[IPS, ""], &DriverConfig::default());
    let honest = udp(mac(1), OWN, [1, 2]);
    let (from, to) = lan.guests.split_at_mut(1);
    let arrived = || to[0].pairs[0].poll().map(|received| received.frame);
    let judges = &["source_address", "ip_source"];
    forge_meanwhile(&mut from[0].pairs[0], &honest, (&lan.daemon, judges), arrived);
}

/// A guest with a queue to itself.
fn own_queue(placement: Placement, segments: &str, options: &[(&str, &str)], config: &DriverConfig) -> Rig {
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    let serve = serve
        .with("--segments", segments)
        .with("--mac", "02:00:00:00:00:00");
    let serve = options.iter().fold(serve, |serve, (option, value)| match *value {
        "" => serve.flag(option),
        value => serve.with(option, value),
    });
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    Rig::with(veth, &serve, config)
}

const OWN_IPS: (&str, &str) = ("--ips", "192.0.2.10,2001:db8::10,2001:db8:1::/64");
const OWN_RULE: (&str, &str) = ("--rule", "direction=from-guest action=allow source=192.0.2.10");

/// What the wire gets next of the guest.
#[track_caller]
fn on_wire(rig: &Rig) -> Vec<u8> {
    let is_ours = |got: &Vec<u8>| got[6..12] == mac(0);
    let got = std::iter::from_fn(|| rig.wire.receive(wait::SOON)).find(is_ours);
    got.unwrap_or_else(|| panic!("nothing on the wire: {:#}", rig.daemon.status()))
}

/// Copied, from guest memory, and from there but for the bytes that were judged.
#[rstest]
fn guest_with_a_queue_of_its_own_is_guarded_as_well(
    #[values(
        (Placement::Copy, "auto"),
        (Placement::SendDirect, "auto"),
        (Placement::Direct, "auto"),
        (Placement::Direct, "by-reference"),
        (Placement::Tap, "auto")
    )]
    (placement, segments): (Placement, &str),
    #[values(Layout::Whole, Layout::HeaderApart, Layout::Pieces(100))] layout: Layout,
) {
    require!(Root);
    let mut rig = own_queue(
        placement,
        segments,
        &[OWN_IPS, ("--vlan", "0,100")],
        &DriverConfig::default(),
    );
    let mut expected = BTreeMap::<&str, u64>::new();
    for (counter, frame) in forged(STRANGER) {
        for frame in [tagged(&frame, 100), frame] {
            rig.pair().send(&frame, layout);
            *expected.entry(counter).or_default() += 1;
        }
    }
    rig.pair().send(&frame(STRANGER, mac(1), 60, 1), layout);
    let honest_one = udp(STRANGER, OWN, [1, 2]);
    rig.pair().send(&tagged(&honest_one, 101), layout);
    expected.extend([("source_address", 1), ("vlan", 1)]);
    for frame in honest(STRANGER) {
        // With something behind it, so that it is longer than what is looked at.
        for len in [frame.len(), 300, 1514] {
            let mut frame = frame.clone();
            frame.resize(len, 0x5a);
            rig.pair().send(&frame, layout);
            assert_eq!(on_wire(&rig), frame);
        }
    }
    for (counter, count) in expected {
        rig.daemon.await_counter(&format!("from_guest_{counter}"), count);
    }
}

#[rstest]
fn header_in_the_guests_own_memory_is_sent_as_it_was_judged(
    #[values(
        (Placement::Copy, "auto"),
        (Placement::SendDirect, "auto"),
        (Placement::Direct, "auto"),
        (Placement::Direct, "by-reference")
    )]
    (placement, segments): (Placement, &str),
    #[values(60, 1000)] len: usize,
    #[values(OWN_IPS, OWN_RULE)] option: (&str, &str),
) {
    if soak::leaves_out((len == 1000) == (placement == Placement::Copy)) {
        return;
    }
    require!(Root);
    let mut rig = own_queue(placement, segments, &[option], &DriverConfig::default());
    let mut honest = udp(STRANGER, OWN, [1, 2]);
    honest.resize(len, 0x5a);
    let Rig {
        driver, wire, daemon, ..
    } = &mut rig;
    let is_ours = |got: &Vec<u8>| got[..6] == STRANGER;
    let arrived = || std::iter::from_fn(|| wire.receive(Duration::from_millis(5))).find(is_ours);
    let judges: &[&str] = match option == OWN_IPS {
        true => &["source_address", "ip_source"],
        false => &["filter"],
    };
    forge_meanwhile(&mut driver.pairs[0], &honest, (daemon, judges), arrived);
}

#[rstest]
fn no_guest_gets_into_another_vlan() {
    require!(Root);
    let ports = ["vlan = 100", "trunk = \"100,102\"", "vlan = 101", ""];
    let mut lan = Lan::new(&ports, &DriverConfig::default());
    let service = |frame: &[u8], kind: u16| {
        let mut frame = tagged(frame, 101);
        frame[12..14].copy_from_slice(&kind.to_be_bytes());
        frame
    };
    let mut refused = 0;
    for to in [mac(2), mac(3), STRANGER, BROADCAST] {
        for guest in [0, 1, 3] {
            let plain = frame(to, mac(guest), 60, 1);
            let mut hops = vec![
                tagged(&plain, 101),
                tagged(&tagged(&plain, 101), 100),
                tagged(&tagged(&plain, 100), 101),
                tagged(&tagged(&plain, 101), 0),
                // What others take for a tag.
                service(&plain, 0x88a8),
                service(&plain, 0x9100),
                tagged(&service(&plain, 0x88a8), 100),
                tagged(&service(&plain, 0x9100), 100),
            ];
            if guest == 1 {
                // A trunk has no frames of no VLAN.
                hops.extend([plain.clone(), tagged(&plain, 0)]);
            }
            refused += hops.len() as u64;
            for hop in hops {
                lan.send(guest, &hop);
            }
        }
    }
    lan.daemon.await_counter("from_guest_vlan", refused);
    // A priority is no VLAN: the frame is of the port's own.
    lan.send(0, &tagged(&frame(mac(1), mac(0), 60, 2), 7 << 13));
    assert_eq!(
        lan.received(1),
        tagged(&frame(mac(1), mac(0), 60, 2), 7 << 13 | 100)
    );
    lan.send(0, &tagged(&frame(STRANGER, mac(0), 60, 2), 7 << 13));
    let sent = tagged(&frame(STRANGER, mac(0), 60, 2), 7 << 13 | 100);
    assert_eq!(lan.received_by_wire(), sent);
    lan.send(1, &tagged(&frame(mac(0), mac(1), 60, 3), 100));
    assert_eq!(lan.received(0), frame(mac(0), mac(1), 60, 3));
    let wire = std::iter::from_fn(|| lan.wire.receive(Duration::ZERO));
    let ours: Vec<_> = wire.filter(|frame| frame[6..11] == mac(0)[..5]).collect();
    assert_eq!(ours, Vec::<Vec<u8>>::new());
}

#[rstest]
fn port_with_vlans_is_refused_where_tags_are_taken_off(
    #[values("vlan = 100", "trunk = \"100-101\"")] keys: &str,
) {
    require!(Root);
    let veth = VethPair::new();
    let take_tags_off = |how| veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", how]);
    take_tags_off("on");
    let (one, both) = ([""], ["", keys]);
    // Without hints: a veth tells of tags.
    let without = |ports: &[&str]| {
        let text = file(Some(VethPair::NIC), ports);
        text.replacen("[network.lan]\n", "[network.lan]\nhints = \"none\"\n", 1)
    };
    let [one, both] = [&one[..], &both].map(without);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &one);
    let mut first = guests(&daemon, 1, &DriverConfig::default());
    daemon.write_file(&both);
    let (done, said) = daemon.reload();
    assert!(!done && said.contains("`ethtool -K nic0 rxvlan off`"), "{said}");
    assert!(daemon.port_named("vm1").is_none());
    // The others go on.
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let plain = frame(mac(0), STRANGER, 60, 1);
    wire.send(&plain);
    assert_eq!(
        first[0].pairs[0].receive(wait::SOON).expect("it goes on").frame,
        plain
    );
    // With what the remedy says it is there.
    take_tags_off("off");
    daemon.reload_with(&both);
    assert!(daemon.port_named("vm1").is_some());
}
