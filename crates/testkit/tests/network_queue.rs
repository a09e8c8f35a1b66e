//! A port of a network that has a queue of the NIC for itself: its frames to the LAN leave by that, and all else is as
//! for any port of the network.

mod life;

use std::collections::BTreeSet;

use rstest::rstest;
use testkit::driver::{F_IN_ORDER, F_RING_PACKED};
use testkit::lan::{BROADCAST, Ear, HOST, Lan, STRANGER, frame, mac, port, tagged, with_host};
use testkit::{Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, require, skip_half, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};

/// The guest whose port has a queue of its own.
const OWN: usize = 0;

/// What the wire sends comes to queue 0. Either the network has that, or the port: then what is for other ports does
/// not reach them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue0 {
    Networks,
    Ports,
}

/// A port's keys with which it has a queue of its own.
fn own(queue_0: Queue0, memory: &str, keys: &str) -> String {
    let queue = u8::from(queue_0 == Queue0::Networks);
    format!(
        "ifname = \"{}\"\nstart-queue = {queue}\nmemory = \"{memory}\"\n{keys}",
        VethPair::NIC
    )
}

fn network(queue_0: Queue0, workers: usize) -> String {
    let queue = u8::from(queue_0 == Queue0::Ports);
    format!(
        "[daemon]\nworkers = {workers}\n[network.lan]\nuplink = \"{}\"\nstart-queue = {queue}\n",
        VethPair::NIC
    )
}

/// Two queues, of which the wire's frames come to the first.
fn uplink() -> VethPair {
    let veth = VethPair::with(2, 1500);
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    with_host(veth)
}

/// Ports with these keys behind those of [`OWN`]'s, which has those at first.
fn lan(queue_0: Queue0, memory: &str, ports: &[&str], workers: usize) -> Lan {
    let mut text = network(queue_0, workers);
    for (guest, keys) in ports.iter().enumerate() {
        let keys = match guest {
            OWN => own(queue_0, memory, keys),
            _ => (*keys).to_owned(),
        };
        text += &port(guest, &keys);
    }
    let lan = Lan::on(
        uplink(),
        &Serve::file(),
        &text,
        ports.len(),
        &DriverConfig::default(),
    );
    let shown = lan.daemon.port(OWN);
    let mode = shown["lanes"][0]["mode"].as_str().expect("it runs").to_owned();
    assert!(mode != "network", "it has its queue: {shown:#}");
    lan
}

/// Frames of the LAN to a guest arrive once the wire's queue is served.
fn send_back(lan: &mut Lan, guest: usize, frame: &[u8]) {
    lan.wire.send(frame);
    assert_eq!(lan.received(guest), frame, "guest {guest}");
}

#[rstest]
fn it_reaches_everybody_and_everybody_it(
    #[values("copy", "send-direct", "direct")] memory: &str,
    #[values(Queue0::Networks, Queue0::Ports)] queue_0: Queue0,
    #[values(1, 2)] workers: usize,
) {
    skip_half!(memory == "send-direct", matches!(queue_0, Queue0::Ports), workers);
    require!(Root);
    let mut lan = lan(queue_0, memory, &["", "", ""], workers);
    let shown = lan.daemon.port(OWN);
    let says_why = shown["lanes"][0]["fallbacks"]
        .to_string()
        .contains("direct not used: ");
    assert_eq!(says_why, memory == "direct", "{shown:#}");
    let host = Ear::on(&lan.veth.near, VethPair::NIC);
    // More frames than its ring has entries, so that each is given back.
    for round in 0..60 {
        let len = [60, 64, 65, 590, 1514][round % 5];
        for (from, to) in [(OWN, 1), (1, OWN), (OWN, 2), (2, OWN)] {
            let sent = frame(mac(to), mac(from), len, round as u8);
            lan.send(from, &sent);
            assert_eq!(lan.received(to), sent, "{from} to {to}");
        }
        for guest in [OWN, 1] {
            let out = frame(STRANGER, mac(guest), len, round as u8);
            lan.send(guest, &out);
            assert_eq!(lan.received_by_wire(), out, "guest {guest}");
        }
        send_back(&mut lan, OWN, &frame(mac(OWN), STRANGER, len, round as u8));
        let to_host = frame(HOST, mac(OWN), len, round as u8);
        lan.send(OWN, &to_host);
        host.hears(&to_host);
        let back = frame(mac(OWN), HOST, len, round as u8);
        host.0.send(&back);
        assert_eq!(lan.received(OWN), back);
        for guest in &mut lan.guests {
            guest.pairs[0].await_sent();
        }
    }
    if queue_0 == Queue0::Networks {
        lan.assert_quiet();
    }
    // By its own queue: nobody else's lane has the kernel send.
    let kicks = lan.daemon.port(OWN)["lanes"][0]["counters"].to_string();
    assert!(lan.daemon.counter_of("vm0", "nic_kicks") >= 60, "{kicks}");
}

#[rstest]
fn every_kind_of_ring_and_layout_goes_every_way(
    #[values("copy", "send-direct")] memory: &str,
    #[values(0, F_IN_ORDER, F_RING_PACKED, F_RING_PACKED | F_IN_ORDER)] features: u64,
) {
    require!(Root);
    let text = [
        network(Queue0::Networks, 1),
        port(OWN, &own(Queue0::Networks, memory, "")),
        port(1, ""),
    ]
    .concat();
    let config = DriverConfig::with(features);
    let mut lan = Lan::on(uplink(), &Serve::file(), &text, 2, &config);
    let layouts = [
        Layout::Whole,
        Layout::HeaderApart,
        Layout::Pieces(200),
        Layout::Indirect(300),
    ];
    for round in 0..40usize {
        let layout = layouts[round % 4];
        let frames = [
            frame(STRANGER, mac(OWN), 1000, round as u8),
            // Done before the NIC is done with the first one.
            frame(mac(1), mac(OWN), 1514, round as u8),
            // For nobody: nothing comes of it but its chain.
            frame(mac(1), STRANGER, 100, round as u8),
            frame(BROADCAST, mac(OWN), 600, round as u8),
        ];
        let all: Vec<_> = frames.iter().map(Vec::as_slice).collect();
        lan.guests[OWN].pairs[0].send_batch(&all, layout);
        for wanted in [&frames[1], &frames[3]] {
            assert_eq!(lan.received(1), *wanted);
        }
        for wanted in [&frames[0], &frames[3]] {
            assert_eq!(lan.received_by_wire(), *wanted);
        }
        lan.guests[OWN].pairs[0].await_sent();
    }
    lan.daemon.await_counter("from_guest_source_address", 40);
    lan.assert_quiet();
}

/// Sends UDP flows to the guest by all queues of the NIC; each arrives, once, at one of its pairs.
#[track_caller]
fn all_flows_arrive(guest: &mut Driver, wire: &PacketPort, len: usize) -> Vec<usize> {
    const FLOWS: u16 = 64;
    let flow = |flow| {
        let mut packet = testkit::frame::udp(flow, len);
        packet[..6].copy_from_slice(&mac(OWN));
        packet
    };
    let mut missing: BTreeSet<u16> = (0..FLOWS).collect();
    let mut counts = vec![0; guest.pairs.len()];
    (0..FLOWS).for_each(|at| wire.send(&flow(at)));
    let all = wait::until(wait::SOON, || {
        for (pair, count) in guest.pairs.iter_mut().zip(&mut counts) {
            while let Some(got) = pair.poll() {
                let at = (0..FLOWS).find(|&at| got.frame == flow(at));
                let at = at.expect("as it was sent");
                assert!(missing.remove(&at), "flow {at} comes twice");
                *count += 1;
            }
        }
        missing.is_empty()
    });
    assert!(all, "missing: {missing:?}");
    counts
}

#[rstest]
fn frames_reach_it_by_whichever_queue_they_come(
    #[values("copy", "send-direct")] memory: &str,
    #[values(1, 2)] pairs: usize,
    #[values(1, 2)] workers: usize,
) {
    skip_half!(memory == "copy", pairs, workers);
    require!(Root);
    let queues = u32::try_from(pairs + 1).expect("few");
    let keys = own(Queue0::Networks, memory, &format!("queues = {pairs}"));
    let text = [network(Queue0::Networks, workers), port(OWN, &keys)].concat();
    let config = DriverConfig::with_pairs(pairs);
    let mut lan = Lan::on(VethPair::with(queues, 1500), &Serve::file(), &text, 1, &config);
    for pair in 1..pairs {
        lan.guests[OWN].pairs[pair].post(64, &[2048]);
    }
    lan.guests[OWN].pairs[0].post(64, &[2048]);
    lan.daemon.await_port(OWN, "all lanes run", |port| {
        (0..pairs).all(|pair| port["lanes"][pair]["running"] == true)
    });
    let switch = |guest: &mut Driver, on: bool| {
        for index in 2..2 * pairs {
            guest.frontend().set_vring_enable(index, on).expect("switched");
        }
    };
    for (round, on) in [true, false, true, false].into_iter().enumerate() {
        switch(&mut lan.guests[OWN], on);
        let counts = all_flows_arrive(&mut lan.guests[OWN], &lan.wire, 200 + round);
        assert!(on || counts[0] == 64, "by the first pair: {counts:?}");
        let out = frame(STRANGER, mac(OWN), 60, round as u8);
        lan.send(OWN, &out);
        assert_eq!(lan.received_by_wire(), out);
    }
    let program = lan.daemon.port(OWN).to_string();
    assert!(
        lan.daemon.counter_of("vm0", "redirected") > 0,
        "by its queue: {program}"
    );
}

/// Which worker has the port, and which one the uplink, is up to how many ports there are.
#[rstest]
fn groups_and_announcements_leave_once_whichever_worker_has_the_uplink(
    #[values("copy", "send-direct")] memory: &str,
    #[values(0, 1, 2)] others: usize,
) {
    require!(Root);
    let mut text = network(Queue0::Networks, 2) + "host = false\n";
    text += &port(OWN, &own(Queue0::Networks, memory, ""));
    text.extend((1..=others).map(|number| port(number, "")));
    let config = DriverConfig {
        protocol: DriverConfig::default().protocol | Protocol::RARP,
        ..DriverConfig::default()
    };
    let mut lan = Lan::on(uplink(), &Serve::file(), &text, 1 + others, &config);
    for round in 0..20 {
        let sent = frame(BROADCAST, mac(OWN), 590, round);
        lan.send(OWN, &sent);
        assert_eq!(lan.received_by_wire(), sent);
        for other in 1..=others {
            assert_eq!(lan.received(other), sent);
        }
    }
    let mut payload = [0; 8];
    payload[..6].copy_from_slice(&mac(OWN));
    assert_eq!(lan.guests[OWN].say(FrontendReq::SEND_RARP, &payload, None), 0);
    let announced: Vec<_> = (1..=others).map(|other| lan.received(other)).collect();
    let is_announcement = |frame: &[u8]| frame[..14] == [&BROADCAST[..], &mac(OWN), &[0x80, 0x35]].concat();
    assert!(
        announced.iter().all(|frame| is_announcement(frame)),
        "{announced:?}"
    );
    let last = frame(BROADCAST, mac(OWN), 60, 1);
    lan.send(OWN, &last);
    let on_wire = std::iter::from_fn(|| lan.wire.receive(wait::SOON)).take_while(|frame| *frame != last);
    assert_eq!(on_wire.filter(|frame| is_announcement(frame)).count(), 1);
}

#[rstest]
fn vlan_has_its_tag_on_the_wire_and_none_at_the_guest(
    #[values("copy", "send-direct")] memory: &str,
    #[values(Queue0::Networks, Queue0::Ports)] queue_0: Queue0,
) {
    require!(Root);
    let mut lan = lan(
        queue_0,
        memory,
        &["vlan = 100", "vlan = 100", "trunk = \"100-101\""],
        1,
    );
    for len in [60, 65, 1514] {
        let bare = |to, from| frame(to, from, len, 1);
        lan.send(OWN, &bare(mac(1), mac(OWN)));
        assert_eq!(lan.received(1), bare(mac(1), mac(OWN)));
        lan.send(OWN, &bare(mac(2), mac(OWN)));
        assert_eq!(lan.received(2), tagged(&bare(mac(2), mac(OWN)), 100));
        lan.send(2, &tagged(&bare(mac(OWN), mac(2)), 100));
        assert_eq!(lan.received(OWN), bare(mac(OWN), mac(2)));
        lan.send(OWN, &bare(STRANGER, mac(OWN)));
        assert_eq!(lan.received_by_wire(), tagged(&bare(STRANGER, mac(OWN)), 100));
        // Of no VLAN, or of another: not for it.
        lan.wire.send(&bare(mac(OWN), STRANGER));
        lan.wire.send(&tagged(&bare(mac(OWN), STRANGER), 101));
        let came = frame(mac(OWN), STRANGER, len, 7);
        lan.wire.send(&tagged(&came, 100));
        assert_eq!(lan.received(OWN), came);
    }
}
