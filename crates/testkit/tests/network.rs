//! Guests that share a NIC: who reaches whom, by real sockets on a veth pair, from the configuration file on.

use rstest::rstest;
use testkit::guest::{Backend, Guest};
use testkit::lan::{BROADCAST, Lan, STRANGER, file, frame, guests, mac, tagged};
use testkit::world::{HOST, assert_stream, give_address, iperf_server};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, VethPair, require, soak, wait};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};

#[rstest]
fn everybody_reaches_everybody_and_nobody_hears_what_is_for_others(#[values(1, 2, 3)] workers: usize) {
    require!(Root);
    let mut lan = Lan::with_workers(workers, &["", "", "", ""], &DriverConfig::default());
    for len in [60, 64, 65, 590, 1514] {
        for from in 0..4 {
            for to in (0..4).filter(|&to| to != from) {
                let sent = frame(mac(to), mac(from), len, 1);
                lan.send(from, &sent);
                assert_eq!(lan.received(to), sent);
            }
            let out = frame(STRANGER, mac(from), len, 2);
            lan.send(from, &out);
            assert_eq!(lan.received_by_wire(), out);
            let back = frame(mac(from), STRANGER, len, 3);
            lan.wire.send(&back);
            assert_eq!(lan.received(from), back);
        }
    }
    lan.assert_quiet();
}

#[rstest]
fn groups_are_for_all(#[values(1, 2, 4)] workers: usize) {
    require!(Root);
    let mut lan = Lan::with_workers(workers, &["", "", ""], &DriverConfig::default());
    let sent = frame(BROADCAST, mac(0), 60, 1);
    lan.send(0, &sent);
    assert_eq!(lan.received(1), sent);
    assert_eq!(lan.received(2), sent);
    assert_eq!(lan.received_by_wire(), sent);
    let came = frame([0x01, 0, 0x5e, 0, 0, 1], STRANGER, 60, 2);
    lan.wire.send(&came);
    for guest in 0..3 {
        assert_eq!(lan.received(guest), came);
    }
    lan.assert_quiet();
}

#[rstest]
fn guest_sends_only_as_itself() {
    require!(Root);
    let mut lan = Lan::new(&["", ""], &DriverConfig::default());
    for from in [mac(1), STRANGER, BROADCAST] {
        lan.send(0, &frame(mac(1), from, 60, 1));
        lan.send(0, &frame(STRANGER, from, 60, 1));
    }
    lan.send(0, &tagged(&frame(mac(1), mac(0), 60, 1), 5));
    let honest = frame(STRANGER, mac(0), 60, 2);
    lan.send(0, &honest);
    assert_eq!(lan.received_by_wire(), honest);
    lan.daemon.await_counter("from_guest_source_address", 6);
    lan.daemon.await_counter("from_guest_vlan", 1);
    lan.assert_quiet();
}

#[rstest]
fn vlans_are_apart_and_have_their_tags_on_the_wire() {
    require!(Root);
    let ports = [
        "vlan = 100",
        "vlan = 100",
        "trunk = \"100-101\"",
        "vlan = 101",
        "",
    ];
    let mut lan = Lan::new(&ports, &DriverConfig::default());
    for len in [60, 65, 1514] {
        let bare = |to, from| frame(to, from, len, 1);
        lan.send(0, &bare(mac(1), mac(0)));
        assert_eq!(lan.received(1), bare(mac(1), mac(0)));
        lan.send(0, &bare(mac(2), mac(0)));
        assert_eq!(lan.received(2), tagged(&bare(mac(2), mac(0)), 100));
        lan.send(2, &tagged(&bare(mac(3), mac(2)), 101));
        assert_eq!(lan.received(3), bare(mac(3), mac(2)));
        // Nobody's in its VLAN: out.
        lan.send(0, &bare(mac(3), mac(0)));
        assert_eq!(lan.received_by_wire(), tagged(&bare(mac(3), mac(0)), 100));
        lan.send(2, &tagged(&bare(STRANGER, mac(2)), 101));
        assert_eq!(lan.received_by_wire(), tagged(&bare(STRANGER, mac(2)), 101));
        lan.wire.send(&tagged(&bare(mac(0), STRANGER), 100));
        assert_eq!(lan.received(0), bare(mac(0), STRANGER));
        lan.wire.send(&tagged(&bare(mac(2), STRANGER), 101));
        assert_eq!(lan.received(2), tagged(&bare(mac(2), STRANGER), 101));
        // Of no VLAN, or of another: for nobody here.
        lan.wire.send(&bare(mac(0), STRANGER));
        lan.wire.send(&tagged(&bare(mac(0), STRANGER), 101));
        lan.wire.send(&bare(mac(4), STRANGER));
        assert_eq!(lan.received(4), bare(mac(4), STRANGER));
    }
    let group = frame(BROADCAST, mac(0), 60, 3);
    lan.send(0, &group);
    assert_eq!(lan.received(1), group);
    assert_eq!(lan.received(2), tagged(&group, 100));
    assert_eq!(lan.received_by_wire(), tagged(&group, 100));
    lan.send(3, &frame(BROADCAST, mac(3), 60, 3));
    assert_eq!(lan.received(2), tagged(&frame(BROADCAST, mac(3), 60, 3), 101));
}

#[rstest]
fn announcement_stays_in_its_vlan_and_is_of_the_port_itself() {
    require!(Root);
    let ports = ["vlan = 100", "vlan = 100", "trunk = \"100-101\"", ""];
    let config = DriverConfig {
        protocol: DriverConfig::default().protocol | Protocol::RARP,
        ..DriverConfig::default()
    };
    let mut lan = Lan::new(&ports, &config);
    let announce = |lan: &mut Lan, guest: usize, address: [u8; 6]| {
        let payload = [&address[..], &[0; 2]].concat();
        assert_eq!(lan.guests[guest].say(FrontendReq::SEND_RARP, &payload, None), 0);
    };
    announce(&mut lan, 0, mac(3));
    announce(&mut lan, 0, mac(0));
    let bare = lan.received(1);
    assert_eq!(
        (&bare[..6], &bare[6..12], &bare[12..14]),
        (&BROADCAST[..], &mac(0)[..], &[0x80, 0x35][..])
    );
    assert_eq!(lan.received(2), tagged(&bare, 100));
    assert_eq!(lan.received_by_wire(), tagged(&bare, 100));
    lan.daemon.await_counter("from_guest_source_address", 1);
    // A trunk's in each of its VLANs.
    announce(&mut lan, 2, mac(2));
    for guest in [0, 1] {
        assert_eq!(lan.received(guest)[6..12], mac(2));
    }
    for vlan in [100u16, 101] {
        assert_eq!(
            lan.received_by_wire()[12..16],
            [[0x81, 0], vlan.to_be_bytes()].concat()
        );
    }
    // Nobody else's.
    let last = frame(mac(3), STRANGER, 60, 1);
    lan.wire.send(&last);
    assert_eq!(lan.received(3), last);
}

#[rstest]
fn network_without_an_uplink_needs_no_privilege() {
    let netns = NetNs::new("network");
    let text = file(None, &["", ""]);
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
    let mut guests = guests(&daemon, 2, &DriverConfig::default());
    let sent = frame(mac(1), mac(0), 1514, 1);
    guests[0].pairs[0].send(&frame(STRANGER, mac(0), 60, 1), Layout::Whole);
    guests[0].pairs[0].send(&sent, Layout::Whole);
    assert_eq!(
        guests[1].pairs[0].receive(wait::SOON).expect("it comes").frame,
        sent
    );
    daemon.await_counter("from_guest_no_station", 1);
}

/// Of the first guest, for its VMM.
const MAC_0: &str = "02:00:00:00:00:00";
/// What a guest inside a guest has.
const INNER: [u8; 6] = [0x02, 0, 0, 0, 2, 0];

#[rstest]
fn guest_has_further_addresses_where_its_port_learns() {
    require!(Root);
    let ports = ["learning = true", "learning = true", ""];
    let mut lan = Lan::new(&ports, &DriverConfig::default());
    // It moves to who used it last.
    for guest in [0, 1, 0] {
        let sent = frame(STRANGER, INNER, 60, guest as u8);
        lan.send(guest, &sent);
        assert_eq!(lan.received_by_wire(), sent);
        let back = frame(INNER, STRANGER, 60, guest as u8);
        let came = wait::until(wait::SOON, || {
            // Before the program knows whose it is such frames are the host's, or the other guest's.
            lan.wire.send(&back);
            let mut got = std::iter::from_fn(|| lan.guests[guest].pairs[0].receive(wait::QUIET));
            got.any(|got| got.frame == back)
        });
        assert!(came, "guest {guest}: {:#}", lan.daemon.status());
        // The worker may know it later than the program.
        let near = frame(INNER, mac(2), 60, 9);
        let came = wait::until(wait::SOON, || {
            lan.send(2, &near);
            let mut got = std::iter::from_fn(|| lan.guests[guest].pairs[0].receive(wait::QUIET));
            got.any(|got| got.frame == near)
        });
        assert!(came, "guest {guest}: {:#}", lan.daemon.status());
        for port in [0, 1, 2] {
            let learned = lan.daemon.port(port)["learned"].clone();
            let its = serde_json::json!([{"mac": "02:00:00:00:02:00", "vlan": 0}]);
            let none = serde_json::json!([]);
            assert_eq!(learned, if port == guest { its } else { none }, "port {port}");
        }
    }
    lan.send(0, &frame(STRANGER, mac(2), 60, 1));
    lan.daemon.await_counter("from_guest_source_address", 1);
}

#[test]
fn learned_addresses_make_room_for_a_port_that_is_added() {
    require!(Root);
    // All but two of the 1,024 addresses of the uplink's lease.
    let trunk = "trunk = \"1-1021\"";
    let mut lan = Lan::new(&["learning = true", trunk], &DriverConfig::default());
    let learned = |lan: &Lan| lan.daemon.port(0)["learned"].as_array().map_or(0, Vec::len);
    let inner = |number| [0x02, 0, 0, 0, 2, number];
    for number in [0, 1] {
        lan.send(0, &frame(STRANGER, inner(number), 60, number));
    }
    let is_full = || learned(&lan) == 2;
    assert!(wait::until(wait::SOON, is_full), "{:#}", lan.daemon.status());
    let is_refused = || {
        lan.send(0, &frame(STRANGER, inner(2), 60, 2));
        lan.daemon.counter("from_guest_not_learned") > 0
    };
    assert!(wait::until(wait::SOON, is_refused), "{:#}", lan.daemon.status());
    let three = file(Some(VethPair::NIC), &["learning = true", trunk, ""]);
    lan.daemon.reload_with(&format!("[daemon]\nworkers = 1\n{three}"));
    assert_eq!(learned(&lan), 1);
    let network = &lan.daemon.status()["networks"][0];
    assert_eq!(
        (&network["learned_evicted"], &network["impaired"]),
        (&1.into(), &().into())
    );
    let path = lan.daemon.path("vm2.sock");
    let mut added = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
    added.pairs[0].post(32, &[2048]);
    let runs = |port: &serde_json::Value| port["lanes"][0]["running"] == true;
    lan.daemon.await_port(2, "a lane runs", runs);
    let came = frame(mac(2), STRANGER, 60, 3);
    lan.wire.send(&came);
    assert_eq!(
        added.pairs[0].receive(wait::SOON).map(|got| got.frame),
        Some(came)
    );
}

#[rstest]
fn promiscuous_port_hears_what_the_network_moves(#[values(1, 2)] workers: usize) {
    require!(Root);
    let mut lan = Lan::with_workers(workers, &["", "", "promiscuous = true"], &DriverConfig::default());
    for sent in [
        frame(mac(1), mac(0), 1514, 1),
        frame(STRANGER, mac(0), 60, 2),
        frame(mac(2), mac(0), 60, 3),
    ] {
        lan.send(0, &sent);
        assert_eq!(lan.received(2), sent);
    }
    assert_eq!(lan.received(1), frame(mac(1), mac(0), 1514, 1));
    let came = frame(mac(0), STRANGER, 590, 4);
    lan.wire.send(&came);
    assert_eq!(lan.received(2), came);
    assert_eq!(lan.received(0), came);
}

#[rstest]
fn guest_gets_back_what_it_sends_to_itself_where_its_port_says_so(#[values(1, 2)] workers: usize) {
    require!(Root);
    let ports = ["hairpin = true\nlearning = true\nisolated = true", "", ""];
    let mut lan = Lan::with_workers(workers, &ports, &DriverConfig::default());
    for len in [60, 65, 1514] {
        let own = frame(mac(0), mac(0), len, 1);
        lan.send(0, &own);
        assert_eq!(lan.received(0), own);
        let group = frame(BROADCAST, mac(0), len, 2);
        lan.send(0, &group);
        (0..3).for_each(|guest| assert_eq!(lan.received(guest), group, "{guest}"));
        assert_eq!(lan.received_by_wire(), group);
    }
    lan.send(1, &frame(mac(1), mac(1), 60, 3));
    lan.daemon.await_counter("from_guest_to_itself", 1);
    lan.assert_quiet();
    // As a guest that stays connected hears it from now on.
    let ports = [
        "hairpin = true\nlearning = true\nisolated = true",
        "hairpin = true",
        "",
    ];
    let text = format!(
        "[daemon]\nworkers = {workers}\n{}",
        file(Some(VethPair::NIC), &ports)
    );
    let told = lan.daemon.reload_with(&text);
    assert!(
        told.contains("port vm1 has changed (hairpin), and goes on"),
        "{told}"
    );
    let own = frame(mac(1), mac(1), 1514, 4);
    lan.send(1, &own);
    assert_eq!(lan.received(1), own);
    // Of two that are behind one port each hears the other, as soon as that is known.
    lan.send(0, &frame(STRANGER, INNER, 60, 5));
    let near = frame(INNER, mac(0), 60, 6);
    let came = wait::until(wait::SOON, || {
        lan.send(0, &near);
        let got = lan.guests[0].pairs[0].receive(wait::QUIET);
        got.is_some_and(|got| got.frame == near)
    });
    assert!(came, "{:#}", lan.daemon.status());
}

/// A UDP packet of a flow between two stations, from the first or back.
fn packet(ends: [[u8; 6]; 2], flow: u16, back: bool) -> Vec<u8> {
    let [a, b] = ends.map(|mac| mac[5]);
    let mut ends = [(ends[0], a, 1000 + flow), (ends[1], b, 7)];
    if back {
        ends.reverse();
    }
    let [(from_mac, from, from_port), (to_mac, to, to_port)] = ends;
    let ip = [
        0x45,
        0,
        0,
        86,
        0,
        0,
        0,
        0,
        64,
        17,
        0,
        0,
        10,
        9,
        from_mac[4],
        from,
        10,
        9,
        to_mac[4],
        to,
    ];
    let ports = [from_port.to_be_bytes(), to_port.to_be_bytes()].concat();
    let mut bytes = [&to_mac[..], &from_mac, &[8, 0], &ip, &ports].concat();
    bytes.resize(100, flow as u8);
    bytes
}

#[rstest]
fn flow_comes_back_by_the_pair_that_sends_it(#[values(2, 4)] pairs: usize) {
    require!(Root);
    let config = DriverConfig {
        pairs,
        ..DriverConfig::default()
    };
    let keys = format!("queues = {pairs}");
    let mut lan = Lan::new(&[&keys, &keys], &config);
    for (at, pair) in (0..2).flat_map(|at| (0..pairs).map(move |pair| (at, pair))) {
        lan.guests[at].pairs[pair].post(32, &[2048]);
        lan.daemon
            .await_port(at, "all lanes run", |port| port["lanes"][pair]["running"] == true);
    }
    for flow in 0..8 {
        let pair = usize::from(flow) * 3 % pairs;
        for peer in [mac(1), STRANGER] {
            let (forth, back) = ([mac(0), peer], packet([mac(0), peer], flow, true));
            let forth = packet(forth, flow, false);
            lan.guests[0].pairs[pair].send(&forth, Layout::Whole);
            if peer == STRANGER {
                let mut came = std::iter::from_fn(|| lan.wire.receive(wait::SOON));
                assert!(came.any(|frame| frame == forth), "on the wire");
                lan.wire.send(&back);
            } else {
                let came = wait::until_some(wait::SOON, || {
                    let pairs = lan.guests[1].pairs.iter_mut();
                    pairs.filter_map(testkit::pair::Pair::poll).next()
                });
                assert_eq!(came.expect("it comes").frame, forth);
                lan.guests[1].pairs[0].send(&back, Layout::Whole);
            }
            let got = lan.guests[0].pairs[pair].receive(wait::SOON);
            assert_eq!(
                got.expect("by the pair that sent").frame,
                back,
                "flow {flow}, pair {pair}"
            );
        }
    }
}

#[rstest]
fn order_is_kept_between_workers_while_guests_come_and_go() {
    require!(Root);
    let mut lan = Lan::with_workers(2, &["", "", "", ""], &DriverConfig::default());
    for round in 0..20u8 {
        for (from, to) in [(0, 1), (0, 2), (1, 2), (1, 0)] {
            let frames: Vec<_> = (0..16)
                .map(|at| frame(mac(to), mac(from), 100 + at, round))
                .collect();
            let all: Vec<_> = frames.iter().map(Vec::as_slice).collect();
            lan.guests[from].pairs[0].send_batch(&all, Layout::Whole);
            // One is gone, with what is under way to it.
            if round % 4 == 0 {
                lan.send(from, &frame(mac(3), mac(from), 60, round));
            }
            for wanted in &frames {
                assert_eq!(lan.received(to), *wanted, "{from} to {to}, {round}");
            }
        }
        if round % 4 == 0 {
            let gone = lan.guests.pop();
            drop(gone);
            lan.daemon
                .await_port(3, "its lane is gone", |port| port["lanes"][0]["running"] != true);
            let path = lan.daemon.path("vm3.sock");
            let mut guest = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
            guest.pairs[0].post(32, &[2048]);
            lan.daemon
                .await_port(3, "a lane runs", |port| port["lanes"][0]["running"] == true);
            lan.guests.push(guest);
        }
    }
    let status = lan.daemon.status();
    let links = status["networks"][0]["links"]
        .as_array()
        .expect("what links count");
    let passed = links.iter().find(|counter| counter["name"] == "to_guest_frames");
    let passed = passed.and_then(|counter| counter["value"].as_u64());
    assert!(passed.is_some_and(|frames| frames > 320), "by links: {passed:?}");
    lan.assert_quiet();
}

/// Addresses of two guests, in the LAN's network.
const LINUX: [&str; 2] = ["10.77.0.11", "10.77.0.12"];

/// Rings of both forms: virtio_uml takes packed ones, QEMU split ones.
#[rstest]
fn linux_guests_and_the_lan_reach_each_other_by_tcp(
    #[values(false, true)] packed: bool,
    #[values(1, 2)] workers: usize,
) {
    require!(Root, Qemu, Uml);
    if soak::leaves_out(packed == (workers == 1)) {
        return;
    }
    let veth = VethPair::new();
    give_address(&veth);
    let text = file(Some(VethPair::NIC), &["", ""]);
    let text = format!("[daemon]\nworkers = {workers}\n{text}");
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
    let socket = |at: usize| daemon.path(&format!("vm{at}.sock"));
    let address = |at: usize| format!("{}/24", LINUX[at]);
    let first = if packed {
        Guest::boot_uml(&socket(0), &address(0))
    } else {
        let options = ["--mem", "256", "--mac", MAC_0];
        Guest::boot(Backend::Daemon(&socket(0)), &address(0), &options)
    };
    let guests = [first, Guest::boot_uml(&socket(1), &address(1))];
    guests[1].serve_iperf("");
    let _lan = iperf_server(&veth);
    for to in [LINUX[1], HOST] {
        let pinged = guests[0].run_until_success(10 * wait::SOON, &format!("ping -c 3 -W 20 {to}"));
        pinged.unwrap_or_else(|said| panic!("no ping of {to}: {said}\n{:#}", daemon.status()));
        for direction in ["", "-R"] {
            assert_stream(&guests[0], to, direction);
        }
    }
    // From one guest to the other GSO packets went as they were.
    let status = daemon.status();
    let spoofed = daemon.counter("from_guest_source_address");
    assert_eq!(spoofed, 0, "{status:#}");
}

/// Two addresses behind one port, each in a namespace of the guest: macvlan's mode is VEPA where none is said. So
/// nothing that one sends reaches the other inside the guest.
const MAKE_VEPA: &str = "set -e
for at in 1 2; do ip link add link eth0 vepa$at address 02:00:00:00:05:0$at type macvlan; done
unshare -n sleep 100000 >/dev/null 2>&1 &
echo $! >/tmp/inner
while [ $(readlink /proc/$!/ns/net) = $(readlink /proc/self/ns/net) ]; do sleep 0.1; done
ip link set vepa2 netns $!
ip addr add 10.77.0.21/24 dev vepa1; ip link set vepa1 up
nsenter -t $! -n sh -ec 'ip addr add 10.77.0.22/24 dev vepa2; ip link set vepa2 up; ip link set lo up'";

#[rstest]
fn linux_guest_with_macvlans_in_vepa_mode_hears_itself_where_its_port_says_so(
    #[values(1, 2)] workers: usize,
) {
    require!(Root, Uml);
    if soak::leaves_out(workers == 2) {
        return;
    }
    let veth = VethPair::new();
    give_address(&veth);
    let text = |keys: &str| {
        let ports = file(Some(VethPair::NIC), &[keys]);
        format!("[daemon]\nworkers = {workers}\n{ports}")
    };
    let daemon = Daemon::start_file(
        &veth.near,
        &Serve::file(),
        &[VethPair::NIC],
        &text("learning = true"),
    );
    let socket = daemon.path("vm0.sock");
    let guest = Guest::boot_uml(&socket, "");
    let _ = guest.run(MAKE_VEPA);
    let inner = |command: &str| format!("nsenter -t $(cat /tmp/inner) -n {command}");
    let ping = |command: &str| {
        let pinged = guest.run_until_success(10 * wait::SOON, command);
        pinged.unwrap_or_else(|said| panic!("{command}: {said}\n{:#}", daemon.status()));
    };
    let to_inner = "ping -c 2 -W 2 10.77.0.22";
    // The LAN knows both.
    ping(&format!("ping -c 2 -W 20 {HOST}"));
    ping(&inner(&format!("ping -c 2 -W 20 {HOST}")));
    assert!(!guest.try_run(to_inner).status.success(), "nothing comes back");
    daemon.reload_with(&text("learning = true\nhairpin = true"));
    ping(to_inner);
    guest.serve_iperf(&inner(""));
    for direction in ["", "-R"] {
        assert_stream(&guest, "10.77.0.22", direction);
    }
    // What comes back of duplicate address detection is known to be its own (RFC 7527).
    let _ = guest.run("ip link set vepa1 down && ip link set vepa1 up");
    let is_whole = "ip -6 addr show dev vepa1 | grep fe80: | grep -v -e tentative -e dadfailed";
    let whole = guest.run_until_success(10 * wait::SOON, is_whole);
    whole.unwrap_or_else(|said| panic!("{said}: {}", guest.run("ip -6 addr")));
    // Packets came back as they were, longer than any frame.
    let [frames, bytes] = ["frames", "bytes"].map(|of| daemon.counter_of("vm0", &format!("to_guest_{of}")));
    assert!(bytes > 1514 * frames, "{bytes} bytes in {frames} frames");
    let lost = daemon.counter("from_guest_source_address");
    assert_eq!(lost, 0, "{:#}", daemon.status());
}
