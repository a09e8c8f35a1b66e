//! What guests, and others on the host, do to a network in tap mode.

use std::time::Duration;

use rstest::rstest;
use serde_json::Value;
use testkit::any_frame::{any_request, nearly_right};
use testkit::driver::{F_GUEST_ALL, F_HOST_ALL};
use testkit::foreign::{Side, detach_all};
use testkit::gso_packet::{GsoPacket, Ip, NEEDS_CSUM, header, heard};
use testkit::lan::{BROADCAST, Lan, STRANGER, assert_reaches, file, frame, guests, mac, once, tagged};
use testkit::noise::Noise;
use testkit::pair::Received;
use testkit::{Daemon, DriverConfig, Layout, NetNs, PacketPort, Serve, VethPair, require, soak, wait};

use super::{assert_passes, await_passes, lan, taps};

/// A counter of the way to the wire.
fn counter(lan: &Lan, name: &str) -> u64 {
    let network = lan.daemon.network();
    let queues = network["queues"].as_array().into_iter().flatten();
    let counters = queues.filter_map(|queue| queue["counters"].as_array());
    let counters = counters.flatten().filter(|counter| counter["name"] == name);
    counters.filter_map(|counter| counter["value"].as_u64()).sum()
}

/// The name of the device that leads to the wire.
fn tap(lan: &Lan) -> String {
    let all = taps(&lan.veth.near);
    let name = all.split([':', ' ']).find(|word| word.starts_with("vaxu"));
    name.expect("there is one").to_owned()
}

/// The steward hears of changes of qdiscs; what somebody does to a program alone it sees then, too.
#[rstest]
fn what_somebody_takes_away_comes_back() {
    require!(Root);
    let mut lan = lan(&Serve::file().leased(), &["", ""], 0);
    assert_passes(&mut lan, 0);
    let tap = tap(&lan);
    lan.veth.near.ip(&["link", "set", &tap, "down"]);
    assert_reaches(&mut lan.guests[0], 0, &lan.wire);
    for (times, interface) in [(1, VethPair::NIC), (2, &tap)] {
        let (near, side) = (&lan.veth.near, Side::Ingress);
        assert!(detach_all(near, interface, side) > 0);
        near.run("tc", &["qdisc", "add", "dev", interface, "clsact"]);
        near.run("tc", &["qdisc", "del", "dev", interface, "clsact"]);
        // The steward sets the device down until its programs are there again.
        let noticed = wait::until(wait::SOON, || {
            let steward = &lan.daemon.lessor.as_ref().expect("leased").steward;
            let said = steward.to_string();
            said.matches("another program has detached a program that joins it")
                .count()
                == times
        });
        assert!(noticed);
        await_passes(&mut lan);
    }
    assert_eq!(self::tap(&lan), tap, "the same device");
    assert!(lan.daemon.network()["impaired"].is_null());
}

#[rstest]
fn kernel_refuses_no_frame_whatever_a_guest_asks_for() {
    require!(Root);
    const FRAMES: usize = 300;
    let mut lan = lan(&Serve::file(), &["", ""], F_HOST_ALL);
    let mut noise = Noise::new(0x9e37_79b9_7f4a_7c15);
    for number in 0..soak::count(FRAMES, 100 * FRAMES) {
        let (mut frame, header) = any_request(&mut noise);
        if let Some(addresses) = frame.get_mut(..12) {
            addresses.copy_from_slice(&[STRANGER, mac(0)].concat());
        }
        let layout = match noise.index(3) {
            0 => Layout::Indirect((frame.len() + 12).div_ceil(noise.one(&[1, 2, 19, 200]))),
            _ => Layout::Whole,
        };
        let pair = &mut lan.guests[0].pairs[0];
        pair.send_asking(&[(header, &frame)], layout);
        let is_done = wait::until(wait::SOON, || {
            pair.reap_sent();
            pair.from_guest.driver.in_flight() == 0
        });
        assert!(is_done, "frame {number} stays");
        while lan.wire.receive(Duration::ZERO).is_some() {}
    }
    assert!(lan.daemon.counter("from_guest_super_frames_unsegmented") > 0);
    assert_eq!(counter(&lan, "to_guest_host_refused"), 0);
    let sent = frame(mac(0), mac(1), 300, 1);
    lan.send(1, &sent);
    assert!(!lan.guests[0].await_close(wait::QUIET));
}

/// The kernel takes none of these whole.
#[rstest]
fn udp_packet_of_many_segments_leaves_in_segments(#[values(129, 300)] segments: usize) {
    require!(Root);
    let mut lan = lan(&Serve::file(), &["", ""], F_HOST_ALL);
    let packet = GsoPacket::udp(Ip::V4(0), segments * 100);
    let (sent, request) = packet.between(STRANGER, mac(0), &[], 100);
    lan.guests[0].pairs[0].send_asking(&[(header(request), &sent)], Layout::Whole);
    let headers = packet.header_len();
    for number in 0..segments {
        let ours = |got: &Vec<u8>| got[6..12] == mac(0);
        let got = std::iter::from_fn(|| lan.wire.receive(wait::SOON)).find(ours);
        let got = got.unwrap_or_else(|| panic!("segment {number}: {}", lan.daemon.said()));
        let payload = &sent[headers + number * 100..][..100];
        assert_eq!(&got[headers..], payload, "segment {number}");
    }
    assert_eq!(counter(&lan, "to_guest_host_refused"), 0);
}

/// MTU and 18 bytes, as in the other modes: the kernel counts a tag only where there is one.
#[rstest]
fn untagged_frames_and_segments_are_as_long_as_tagged_ones(#[values(1, 2)] workers: usize) {
    require!(Root);
    let ports = file(Some(VethPair::NIC), &["", ""]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
    let text = format!("[daemon]\nworkers = {workers}\n{ports}");
    let config = DriverConfig::with(F_HOST_ALL);
    let mut lan = Lan::on(VethPair::new(), &Serve::file(), &text, 2, &config);
    let packet = GsoPacket::tcp(Ip::V4(0), 9_000);
    let headers = packet.header_len();
    for guest in 0..2 {
        for len in 1514..=1518 {
            let sent = frame(STRANGER, mac(guest), len, len as u8);
            lan.send(guest, &sent);
            let mut got = std::iter::from_fn(|| lan.wire.receive(wait::SOON));
            assert!(got.any(|got| got == sent), "{len} bytes");

            let (sent, request) = packet.between(STRANGER, mac(guest), &[], (len - headers) as u16);
            lan.guests[guest].pairs[0].send_asking(&[(header(request), &sent)], Layout::Whole);
            let mut payload: Vec<u8> = Vec::new();
            while payload.len() < 9_000 {
                let got = lan.wire.receive(wait::SOON);
                let got = got.unwrap_or_else(|| panic!("segments of {len} bytes: {}", lan.daemon.said()));
                if got[6..12] == mac(guest) {
                    payload.extend(&got[headers..]);
                }
            }
            assert_eq!(payload, sent[headers..]);
        }
        let name = format!("vm{guest}");
        lan.send(guest, &frame(STRANGER, mac(guest), 1519, 0));
        let (sent, request) = packet.between(STRANGER, mac(guest), &[], (1519 - headers) as u16);
        lan.guests[guest].pairs[0].send_asking(&[(header(request), &sent)], Layout::Whole);
        assert_passes(&mut lan, guest as u8);
        assert_eq!(lan.daemon.counter_of(&name, "from_guest_too_long"), 1);
        let counted = wait::until(wait::SOON, || {
            let all = status_sum(&lan.daemon.status(), "from_guest_segment_too_long");
            all == guest as u64 + 1
        });
        assert!(counted, "{:#}", lan.daemon.status());
    }
}

/// All counters of that name, of ports, links and queues.
fn status_sum(status: &Value, name: &str) -> u64 {
    match status {
        Value::Object(fields) if fields.get("name").is_some_and(|its| its == name) => {
            fields.get("value").and_then(Value::as_u64).unwrap_or(0)
        }
        Value::Object(fields) => fields.values().map(|value| status_sum(value, name)).sum(),
        Value::Array(values) => values.iter().map(|value| status_sum(value, name)).sum(),
        _ => 0,
    }
}

/// Packets pass whole or in segments, as it is switched, and never in part.
#[rstest]
fn host_that_switches_offloads_loses_nothing() {
    require!(Root);
    let mut lan = lan(&Serve::file(), &["trunk = \"5\"", ""], F_HOST_ALL | F_GUEST_ALL);
    let tap = tap(&lan);
    let ear = PacketPort::open_to_read_with_header(&lan.veth.far, VethPair::WIRE);
    let mouth = PacketPort::open_gso_sender(&lan.veth);
    let mut packet = GsoPacket::tcp(Ip::V4(0), 20_000);
    packet.tags = 1;
    let features = ["gro", "gso", "tso", "tx", "rx", "rxvlan", "txvlan", "sg"];
    let on_nic = features.map(|feature| (VethPair::NIC, feature));
    let on_tap = ["tso", "tx", "sg"].map(|feature| (tap.as_str(), feature));
    let mut number = 0;
    for (interface, feature) in on_nic.into_iter().chain(on_tap) {
        for state in ["off", "on"] {
            // Not every driver has each.
            let set = ["-K", interface, feature, state];
            let _ = lan.veth.near.command("ethtool").args(set).output();
            number += 1;
            packet.flow = 4000 + number;
            let headers = packet.header_len();
            let (mut sent, request) = packet.between(STRANGER, mac(0), &[], 1000);
            sent[14..16].copy_from_slice(&[0, 5]);
            lan.guests[0].pairs[0].send_asking(&[(header(request), &sent)], Layout::Whole);
            let mut payload: Vec<u8> = Vec::new();
            while payload.len() < 20_000 {
                let (got, _) = heard(&ear, mac(0));
                payload.extend(&got[headers..]);
            }
            assert!(payload == sent[headers..], "{interface} {feature} {state}");

            let (mut sent, request) = packet.between(mac(0), STRANGER, &[], 1000);
            sent[14..16].copy_from_slice(&[0, 5]);
            mouth.send(&[&request[..], &sent].concat());
            let mut payload: Vec<u8> = Vec::new();
            while payload.len() < 20_000 {
                let got = lan.guests[0].pairs[0].receive(wait::SOON);
                let got = got.unwrap_or_else(|| panic!("{interface} {feature} {state}: {}", payload.len()));
                assert_eq!(got.frame[12..16], [0x81, 0, 0, 5]);
                payload.extend(&got.frame[headers..]);
            }
            assert!(payload == sent[headers..], "{interface} {feature} {state}");
        }
    }
    assert_eq!(counter(&lan, "to_guest_host_refused"), 0);
}

/// By whoever is at the other end of a veth pair, and may make packets of any kind.
#[rstest]
fn packet_of_the_wire_asks_for_nothing_that_is_not_in_it(#[values(0, F_GUEST_ALL)] offloads: u64) {
    require!(Root);
    let mut lan = lan(&Serve::file(), &["", ""], offloads);
    let mouth = PacketPort::open_gso_sender(&lan.veth);
    let mut noise = Noise::new(0x2545_f491_4f6c_dd1d);
    let mut came = 0;
    for number in 0..soak::count(200, 20_000) {
        let (mut frame, header) = nearly_right(&mut noise);
        frame[..12].copy_from_slice(&[mac(0), STRANGER].concat());
        // The kernel refuses some.
        let _ = mouth.try_send(&[&header[..10], &frame].concat());
        // The guest may have no buffers left for the last one.
        let last = once(mac(0), STRANGER, 60);
        let is_last = wait::until(wait::SOON, || {
            lan.wire.send(&last);
            std::iter::from_fn(|| lan.guests[0].pairs[0].receive(wait::QUIET)).any(|got| {
                came += 1;
                assert_asks_for_what_is_there(&got);
                got.frame == last
            })
        });
        assert!(is_last, "{number}");
    }
    assert!(came > 250, "{came} came: they show little");
}

#[track_caller]
fn assert_asks_for_what_is_there(got: &Received) {
    let word = |at: usize| usize::from(u16::from_le_bytes([got.header[at], got.header[at + 1]]));
    if got.header[0] & NEEDS_CSUM != 0 {
        assert!(word(6) + word(8) + 2 <= got.frame.len(), "{:?}", got.header);
    }
    if got.header[1] != 0 {
        assert_ne!(got.header[0] & NEEDS_CSUM, 0, "{:?}", got.header);
        assert!((1..0xffff).contains(&word(4)), "{:?}", got.header);
    }
}

/// Whose own address is the host's, and not of the wire.
#[rstest]
fn bridge_as_uplink_carries_packets_whole_and_the_host_stays_out_of_reach() {
    require!(Root);
    let veth = VethPair::new();
    let near = &veth.near;
    near.ip(&["link", "add", "br0", "type", "bridge"]);
    near.ip(&["link", "set", VethPair::NIC, "master", "br0"]);
    near.ip(&["link", "set", "br0", "address", "02:00:00:00:09:01", "up"]);
    let host = PacketPort::open(near, "br0");
    let text =
        file(Some("br0"), &["", ""]).replacen("[port.vm0]", "mode = \"tap\"\nhost = false\n[port.vm0]", 1);
    let daemon = Daemon::start_file(near, &Serve::file(), &["br0"], &text);
    let mut lan = Lan {
        guests: guests(&daemon, 2, &DriverConfig::with(F_HOST_ALL | F_GUEST_ALL)),
        daemon,
        wire: PacketPort::open(&veth.far, VethPair::WIRE),
        veth,
    };
    assert_reaches(&mut lan.guests[0], 0, &lan.wire);
    let packet = GsoPacket::tcp(Ip::V4(0), 30_000);
    let (sent, request) = packet.between(STRANGER, mac(0), &[], 1000);
    lan.guests[0].pairs[0].send_asking(&[(header(request), &sent)], Layout::Whole);
    let mut payload: Vec<u8> = Vec::new();
    while payload.len() < 30_000 {
        let got = lan.wire.receive(wait::SOON).expect("it comes");
        if got[6..12] == mac(0) && got[12..14] == sent[12..14] {
            payload.extend(&got[packet.header_len()..]);
        }
    }
    assert!(payload == sent[packet.header_len()..]);
    let mouth = PacketPort::open_gso_sender(&lan.veth);
    let (sent, request) = packet.between(mac(0), STRANGER, &[], 1000);
    mouth.send(&[&request[..], &sent].concat());
    assert!(
        lan.guests[0].pairs[0]
            .receive(wait::SOON)
            .expect("it comes")
            .frame
            == sent
    );
    // To the host's address from a guest, then from the wire: only that comes.
    const HOST: [u8; 6] = [0x02, 0, 0, 0, 9, 1];
    lan.send(0, &once(HOST, mac(0), 100));
    assert_passes(&mut lan, 1);
    let last = once(HOST, STRANGER, 100);
    lan.wire.send(&last);
    let before = host.receive_before(&last);
    assert!(before.iter().all(|got| got[..6] != HOST), "{before:02x?}");
}

/// As with an XDP program: a switch that sends frames to groups back, or a guest's address in somebody else's.
#[rstest]
fn frame_to_a_group_that_comes_back_reaches_no_guest(#[values(1, 2)] workers: usize) {
    require!(Root);
    let ports =
        file(Some(VethPair::NIC), &["", "vlan = 5"]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
    let text = format!("[daemon]\nworkers = {workers}\n{ports}");
    let config = DriverConfig::with(0);
    let mut lan = Lan::on(VethPair::new(), &Serve::file(), &text, 2, &config);
    assert_reaches(&mut lan.guests[0], 0, &lan.wire);
    for (number, [guest, other]) in [[0, 0], [1, 1], [0, 1]].into_iter().enumerate() {
        let on_wire = |frame: Vec<u8>| match other {
            0 => frame,
            _ => tagged(&frame, 5),
        };
        let sent = once(BROADCAST, mac(guest), 100);
        lan.wire.send(&on_wire(sent.clone()));
        let last = once(mac(other), STRANGER, 60);
        lan.wire.send(&on_wire(last.clone()));
        let before = lan.guests[other].pairs[0].receive_before(&last);
        // An address of another VLAN is another station.
        let comes = usize::from(guest != other);
        assert_eq!(before.iter().filter(|got| got.frame == sent).count(), comes);
        let returned = counter(&lan, "returned_frames");
        assert_eq!(returned, 2.min(number as u64 + 1));
    }
}

#[rstest]
fn uplink_is_followed_under_another_name_and_comes_back_from_another_namespace() {
    require!(Root);
    let mut lan = lan(&Serve::file().leased(), &["", ""], 0);
    assert_passes(&mut lan, 0);
    lan.veth.near.ip(&["link", "set", VethPair::NIC, "name", "nic9"]);
    assert_passes(&mut lan, 1);
    lan.veth.near.ip(&["link", "set", "nic9", "mtu", "1400"]);
    lan.daemon
        .await_network("the MTU", |network| network["mtu"] == 1400);
    lan.veth.near.ip(&["link", "set", "nic9", "name", VethPair::NIC]);
    assert_passes(&mut lan, 2);
    let other = NetNs::new("other");
    lan.veth
        .near
        .ip(&["link", "set", VethPair::NIC, "netns", other.name()]);
    lan.daemon
        .await_network("gone", |network| network["impaired"].is_string());
    let left = || taps(&lan.veth.near);
    assert!(wait::until(wait::SOON, || !left().contains("vaxu")), "{}", left());
    other.ip(&["link", "set", VethPair::NIC, "netns", lan.veth.near.name()]);
    lan.veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    assert_reaches(&mut lan.guests[0], 0, &lan.wire);
}
