//! A network whose uplink has no XDP program (`mode = "tap"`): frames come and go by a tap device, GSO packets whole.

mod hostile;

use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::Mode;
use testkit::driver::{F_GUEST_ALL, F_HOST_ALL};
use testkit::gso_packet::{GsoPacket, Ip, header, heard};
use testkit::lan::{BROADCAST, Lan, STRANGER, assert_reaches, file, frame, guests, mac, once, port};
use testkit::{
    Daemon, DriverConfig, Layout, NetNs, PacketPort, Serve, VethPair, assert_soon, foreign, kernel, require,
    wait,
};

/// Ports with these keys in a network in tap mode.
fn lan(serve: &Serve, ports: &[&str], features: u64) -> Lan {
    let text = file(Some(VethPair::NIC), ports).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
    Lan::on(
        VethPair::new(),
        serve,
        &text,
        ports.len(),
        &DriverConfig::with(features),
    )
}

/// Frames pass both ways, and between guests.
#[track_caller]
fn assert_passes(lan: &mut Lan, number: u8) {
    let sent = frame(STRANGER, mac(0), 300, number);
    lan.send(0, &sent);
    assert!(std::iter::from_fn(|| lan.wire.receive(wait::SOON)).any(|got| got == sent));
    let sent = frame(mac(0), STRANGER, 300, number);
    lan.wire.send(&sent);
    await_frame(lan, 0, &sent);
    let sent = frame(mac(1), mac(0), 300, number);
    lan.send(0, &sent);
    await_frame(lan, 1, &sent);
}

/// A guest gets a frame, whatever comes before.
#[track_caller]
fn await_frame(lan: &mut Lan, guest: usize, frame: &[u8]) {
    while lan.received(guest) != frame {}
}

/// The same as soon as frames pass again: some are lost until then.
#[track_caller]
fn await_passes(lan: &mut Lan) {
    let sent = once(mac(0), STRANGER, 200);
    assert_soon!({
        lan.wire.send(&sent);
        let got = lan.guests[0].pairs[0].receive(Duration::from_millis(100));
        got.is_some_and(|got| got.frame == sent)
    });
    assert_passes(lan, 255);
}

/// The devices by which networks reach the wire.
fn taps(netns: &NetNs) -> String {
    netns.output_of("ip", &["-o", "link", "show", "type", "tun"])
}

fn has_program(netns: &NetNs) -> bool {
    netns
        .output_of("ip", &["-d", "link", "show", VethPair::NIC])
        .contains("prog/xdp")
}

#[rstest]
fn gso_packets_pass_whole_to_the_wire_and_from_it(#[values(1, 2)] workers: usize) {
    require!(Root);
    let ports = file(Some(VethPair::NIC), &["", ""]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
    let text = format!("[daemon]\nworkers = {workers}\n{ports}");
    let config = DriverConfig::with(F_HOST_ALL | F_GUEST_ALL);
    let mut lan = Lan::on(VethPair::new(), &Serve::file(), &text, 2, &config);
    assert!(!has_program(&lan.veth.near));
    let ear = PacketPort::open_to_read_with_header(&lan.veth.far, VethPair::WIRE);
    let mouth = PacketPort::open_gso_sender(&lan.veth);
    // UDP packets that are to be cut pass whole since Linux 6.2.
    let udp = (kernel::version() >= (6, 2)).then(|| GsoPacket::udp(Ip::V4(0), 40_000));
    let kinds = [
        GsoPacket::tcp(Ip::V4(0), 60_000),
        GsoPacket::tcp(Ip::V6(Vec::new()), 30_001),
    ];
    let mut sent = 0;
    for packet in kinds.into_iter().chain(udp) {
        for (guest, piece) in [(0, 9000), (1, 4000)] {
            let (frame, request) = packet.between(STRANGER, mac(guest), &[], 1000);
            lan.guests[guest].pairs[0].send_asking(&[(header(request), &frame)], Layout::Pieces(piece));
            let (got, asked) = heard(&ear, mac(guest));
            assert_eq!(got.len(), frame.len(), "guest {guest}: whole");
            assert!(got == frame);
            assert_eq!((asked[1], &asked[4..6]), (request[1], &request[4..6]));
            sent += 1;

            let (frame, request) = packet.between(mac(guest), STRANGER, &[], 1000);
            mouth.send(&[&request[..], &frame].concat());
            let got = lan.guests[guest].pairs[0].receive(wait::SOON).expect("it comes");
            assert_eq!(got.frame.len(), frame.len(), "guest {guest}: whole");
            assert!(got.frame == frame);
            assert_eq!((got.header[1], &got.header[4..6]), (request[1], &request[4..6]));
        }
    }
    let whole = lan.daemon.counter("from_guest_super_frames_unsegmented");
    assert_eq!(whole, sent, "{:#}", lan.daemon.status());
}

#[rstest]
fn frames_go_on_while_the_steward_is_restarted() {
    require!(Root);
    let mut lan = lan(&Serve::file().leased(), &["", ""], 0);
    assert_passes(&mut lan, 0);
    let before = taps(&lan.veth.near);
    for signal in [Signal::TERM, Signal::KILL] {
        lan.daemon.end_steward(signal);
        for number in 0..10 {
            assert_passes(&mut lan, number);
        }
        lan.daemon.restart_lessor(&lan.veth.near);
        assert_passes(&mut lan, 20);
    }
    assert_eq!(taps(&lan.veth.near), before, "others than before");
    assert!(lan.daemon.network()["impaired"].is_null());
    // The lease is one like before: it hears of changes, and ends with its holder.
    lan.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "1400"]);
    lan.daemon
        .await_network("the MTU", |network| network["mtu"] == 1400);
    assert_passes(&mut lan, 21);
    lan.daemon.terminate();
    let left = || taps(&lan.veth.near);
    assert_soon!(left().is_empty(), "{}", left());
}

#[rstest]
fn mode_changes_under_guests() {
    require!(Root);
    let text = file(Some(VethPair::NIC), &["", ""]);
    let config = DriverConfig::default();
    let mut lan = Lan::on(VethPair::new(), &Serve::file().leased(), &text, 2, &config);
    await_passes(&mut lan);
    let told = lan
        .daemon
        .reload_with(&text.replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1));
    assert!(told.contains("network lan has changed (mode)"), "{told}");
    await_passes(&mut lan);
    assert!(!has_program(&lan.veth.near));
    let told = lan.daemon.reload_with(&text);
    assert!(told.contains("network lan has changed (mode)"), "{told}");
    await_passes(&mut lan);
    assert!(has_program(&lan.veth.near));
    assert!(!taps(&lan.veth.near).contains("vaxu"));
    assert_eq!(lan.daemon.port(0)["sessions"].as_u64(), Some(1));
}

#[rstest]
fn tap_or_uplink_that_is_deleted_comes_back() {
    require!(Root);
    let mut lan = lan(&Serve::file().leased(), &["", ""], 0);
    assert_passes(&mut lan, 0);
    let name = taps(&lan.veth.near);
    let name = name.split([':', ' ']).find(|word| word.starts_with("vaxu"));
    let name = name.expect("there is one").to_owned();
    lan.veth.near.ip(&["link", "delete", &name]);
    await_passes(&mut lan);
    for state in ["down", "up"] {
        lan.veth.near.ip(&["link", "set", VethPair::NIC, state]);
        lan.daemon
            .await_network("the link", |network| network["up"] == (state == "up"));
        if state == "down" {
            let lost = wait::until(wait::SOON, || {
                lan.send(0, &frame(STRANGER, mac(0), 60, 1));
                std::thread::sleep(Duration::from_millis(10));
                lan.daemon.counter("from_guest_interface_down") > 0
            });
            assert!(lost);
            // Those to groups reach the other guest all the same.
            let to_group = frame(BROADCAST, mac(0), 60, 2);
            lan.send(0, &to_group);
            await_frame(&mut lan, 1, &to_group);
        }
    }
    lan.veth.await_near();
    await_passes(&mut lan);
    lan.veth.near.ip(&["link", "delete", VethPair::NIC]);
    lan.daemon
        .await_network("gone", |network| network["impaired"].is_string());
    lan.veth.join(1, 1500);
    lan.wire = PacketPort::open(&lan.veth.far, VethPair::WIRE);
    await_passes(&mut lan);
}

#[rstest]
fn program_of_somebody_else_stays_and_has_the_frames_before(#[values(Mode::Native, Mode::Skb)] mode: Mode) {
    require!(Root);
    let veth = VethPair::new();
    let _foreign = foreign::Foreign::attach(&veth.near, VethPair::NIC, mode, 0);
    let text = file(Some(VethPair::NIC), &["", ""]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
    let mut lan = Lan::on(veth, &Serve::file(), &text, 2, &DriverConfig::default());
    assert_passes(&mut lan, 0);
    assert!(has_program(&lan.veth.near));
}

/// Whose lower device hands it packets that GRO has joined, or that a veth's peer has sent whole: no XDP program takes
/// them (docs/hardware.md). Of other kinds of interfaces: `scripts/kernels --wire uppers`.
#[rstest]
fn uplink_above_another_interface_carries_packets_whole() {
    require!(Root);
    let veth = VethPair::new();
    veth.near.ip(&[
        "link add link",
        VethPair::NIC,
        "name above0 type macvlan mode passthru",
    ]);
    veth.near.ip(&["link", "set", "above0", "up"]);
    let text = file(Some("above0"), &["", ""]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &["above0"], &text);
    let mut lan = Lan {
        guests: guests(&daemon, 2, &DriverConfig::with(F_HOST_ALL | F_GUEST_ALL)),
        daemon,
        wire: PacketPort::open(&veth.far, VethPair::WIRE),
        veth,
    };
    await_passes(&mut lan);
    let mouth = PacketPort::open_gso_sender(&lan.veth);
    let packet = GsoPacket::tcp(Ip::V4(0), 60_000);
    let (frame, request) = packet.between(mac(0), STRANGER, &[], 1000);
    mouth.send(&[&request[..], &frame].concat());
    let got = lan.guests[0].pairs[0].receive(wait::SOON).expect("it comes");
    assert!(got.frame == frame, "{} bytes", got.frame.len());
}

#[rstest]
fn guests_of_two_networks_in_tap_mode_reach_each_other_over_a_veth_pair() {
    require!(Root);
    let mut lan = lan(&Serve::file(), &["", ""], 0);
    let text = format!(
        "[network.lan]\nuplink = \"{}\"\nmode = \"tap\"\n{}",
        VethPair::WIRE,
        port(2, "")
    );
    let other = Daemon::start_file(&lan.veth.far, &Serve::file(), &[VethPair::WIRE], &text);
    let mut guest = other.connect(0, &other.path("vm2.sock"), &DriverConfig::with(0), 32);
    for (to, number) in [(BROADCAST, 1), (mac(2), 2)] {
        let sent = frame(to, mac(0), 300, number);
        lan.send(0, &sent);
        let got = std::iter::from_fn(|| guest.pairs[0].receive(wait::SOON)).any(|got| got.frame == sent);
        assert!(got, "{number}: {:#}\n{:#}", lan.daemon.status(), other.status());
    }
}

#[rstest]
fn second_steward_leaves_the_taps_of_an_uplink_that_was_renamed() {
    require!(Root);
    let mut lan = lan(&Serve::file().leased(), &["", ""], 0);
    assert_passes(&mut lan, 0);
    let near = &lan.veth.near;
    near.ip(&["link", "add", "nic1", "type", "veth", "peer", "name", "wire1"]);
    let before = taps(near);
    near.ip(&["link", "set", VethPair::NIC, "name", "nic9"]);
    let text = format!(
        "[network.lan]\nuplink = \"nic1\"\nmode = \"tap\"\n{}",
        port(2, "")
    );
    let _other = Daemon::start_file(near, &Serve::file().leased(), &["nic1"], &text);
    assert!(taps(near).contains(before.trim()), "{before}{}", taps(near));
    assert_passes(&mut lan, 1);
}

/// What is killed leaves nothing that takes frames.
#[rstest]
fn frames_to_stations_go_on_when_all_are_killed(#[values(false, true)] again: bool) {
    require!(Root);
    let mut lan = lan(&Serve::file().leased(), &["", ""], 0);
    assert_passes(&mut lan, 0);
    lan.daemon.end_steward(Signal::KILL);
    lan.daemon.kill();
    let near = &lan.veth.near;
    assert_soon!(taps(near).is_empty(), "{}", taps(near));
    if again {
        // Another steward, with a state of its own.
        let text =
            file(Some(VethPair::NIC), &["", ""]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1);
        let daemon = Daemon::start_file(near, &Serve::file().leased(), &[VethPair::NIC], &text);
        lan.guests = guests(&daemon, 2, &DriverConfig::with(0));
        let _old = std::mem::replace(&mut lan.daemon, daemon);
        await_passes(&mut lan);
        return;
    }
    near.ip(&[
        "link add mv0 link",
        VethPair::NIC,
        "address 02:00:00:00:00:00 type macvlan mode bridge",
    ]);
    near.ip(&["link", "set", "mv0", "up"]);
    let ear = PacketPort::open(near, "mv0");
    let sent = frame(mac(0), STRANGER, 200, 9);
    lan.wire.send(&sent);
    assert!(
        std::iter::from_fn(|| ear.receive(wait::SOON)).any(|got| got == sent),
        "it is lost"
    );
}

/// Every receiver gets a guest's broadcast once; the guest itself gets none.
#[rstest]
fn networks_in_tap_mode_on_one_interface_give_nobody_its_own_frames() {
    require!(Root);
    let network = |name: &str, queue: u32| {
        format!(
            "[network.{name}]\nuplink = \"{}\"\nmode = \"tap\"\nstart-queue = {queue}\n",
            VethPair::NIC
        )
    };
    let ports = [
        port(0, "").replace("\"lan\"", "\"a\""),
        port(1, "").replace("\"lan\"", "\"b\""),
    ];
    let text = [network("a", 0), network("b", 1), ports.concat()].concat();
    let mut lan = Lan::on(
        VethPair::with(2, 1500),
        &Serve::file().leased(),
        &text,
        2,
        &DriverConfig::with(0),
    );
    for guest in 0..2 {
        assert_reaches(&mut lan.guests[guest], guest, &lan.wire);
    }
    for guest in 0..2 {
        let (sent, other) = (frame(BROADCAST, mac(guest), 200, guest as u8), 1 - guest);
        lan.send(guest, &sent);
        let on_wire = std::iter::from_fn(|| lan.wire.receive(wait::SOON)).any(|got| got == sent);
        assert!(on_wire, "guest {guest}");
        // By the host's ingress, where both networks' programs are: what comes back has come by then.
        await_frame(&mut lan, other, &sent);
        let again = [guest, other].map(|to| {
            let last = frame(mac(to), STRANGER, 100, guest as u8);
            lan.wire.send(&last);
            let before = std::iter::from_fn(|| Some(lan.received(to)).filter(|got| *got != last));
            before.filter(|got| *got == sent).count()
        });
        assert_eq!(again, [0, 0], "guest {guest}");
    }
}
