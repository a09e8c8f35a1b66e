//! The mode that is chosen where nobody asks for one (`mode = "auto"`): a tap on interfaces without zero-copy, and AF_XDP
//! where something needs that.

use std::time::Duration;

use rstest::rstest;
use serde_json::Value;
use testkit::daemon::{DIR, Mode};
use testkit::lan::{self, Lan, STRANGER, file, mac};
use testkit::{Driver, DriverConfig, Layout, NetNs, Rig, Serve, VethPair, frame, require, wait};

/// An interface of two queues, of which the first gets all frames.
fn veth() -> VethPair {
    let veth = VethPair::with(2, 1500);
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    veth
}

fn rig(serve: &Serve) -> Rig {
    let mut rig = Rig::with(veth(), serve, &DriverConfig::default());
    rig.post(64, &[1536]);
    rig
}

/// Ports with these keys, each with a queue of the interface.
fn ports(keys: &[&str]) -> String {
    let port = |(at, keys): (usize, &&str)| {
        let nic = VethPair::NIC;
        format!(
            "[port.vm{at}]\nsocket-path = \"{DIR}/vm{at}.sock\"\nifname = \"{nic}\"\nstart-queue = {at}\n\
             mac = \"02:00:00:00:00:0{at}\"\n{keys}\n"
        )
    };
    keys.iter().enumerate().map(port).collect()
}

fn lan(text: &str, guests: usize) -> Lan {
    Lan::on(veth(), &Serve::file(), text, guests, &DriverConfig::default())
}

/// Frames reach a guest, as soon as the mode is settled.
#[track_caller]
fn await_received(lan: &mut Lan, guest: usize) {
    let mut number = 0;
    let passes = wait::until(wait::SOON, || {
        number = u8::wrapping_add(number, 1);
        let sent = lan::frame(mac(guest), STRANGER, 300, number);
        lan.wire.send(&sent);
        let pair = &mut lan.guests[guest].pairs[0];
        let got = std::iter::from_fn(|| pair.receive(Duration::from_millis(100)));
        got.into_iter().any(|got| got.frame == sent)
    });
    assert!(passes, "guest {guest}: {:#}", lan.daemon.status());
}

#[track_caller]
fn assert_sent(lan: &mut Lan, guest: usize) {
    let sent = lan::frame(STRANGER, mac(guest), 300, 1);
    lan.send(guest, &sent);
    let mut got = std::iter::from_fn(|| lan.wire.receive(wait::SOON));
    assert!(got.any(|got| got == sent), "guest {guest}");
}

fn is_said(status: &Value, words: &str) -> bool {
    let said = status.to_string();
    said.contains(words)
}

fn has_program(netns: &NetNs) -> bool {
    let shown = netns.output_of("ip", &["-d", "link", "show", VethPair::NIC]);
    shown.contains("prog/xdp")
}

#[rstest]
fn interface_without_zero_copy_is_in_tap_mode_and_status_says_why() {
    require!(Root);
    let mut rig = rig(&Serve::interface(VethPair::NIC).mode(Mode::Auto));
    rig.assert_passes_both_ways();
    let port = rig.daemon.port(0);
    assert_eq!(
        (&port["attached"], &port["lanes"][0]["mode"]),
        (&"tap".into(), &"tap".into())
    );
    assert!(
        is_said(&port, "tap mode is used: the driver has no zero-copy"),
        "{port:#}"
    );
    assert!(!has_program(&rig.veth.near));
}

#[rstest]
#[case::send_direct(&["--memory", "send-direct"])]
#[case::force_copy(&["--force-copy"])]
#[case::busy_poll(&["--busy-poll-us", "50"])]
fn what_only_af_xdp_has_is_had(#[case] options: &[&str]) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).mode(Mode::Auto);
    let serve = match options {
        [option, value] => serve.with(option, *value),
        _ => options.iter().fold(serve, |serve, option| serve.flag(option)),
    };
    let mut rig = rig(&serve);
    rig.assert_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["attached"], "native");
}

#[rstest]
fn guest_that_wants_an_xdp_program_gets_it_and_the_others_go_on() {
    require!(Root);
    let mut lan = lan(&ports(&["mode = \"auto\"", "mode = \"auto\""]), 2);
    for guest in 0..2 {
        await_received(&mut lan, guest);
        assert_sent(&mut lan, guest);
    }
    assert!(!has_program(&lan.veth.near));
    lan.daemon
        .reload_with(&ports(&["mode = \"auto\"", "mode = \"native\""]));
    // A port of another mode is another port.
    let mut driver =
        Driver::connect(&lan.daemon.path("vm1.sock"), &DriverConfig::default()).expect("accepted");
    driver.pairs[0].post(32, &[2048]);
    lan.guests[1] = driver;
    await_received(&mut lan, 0);
    (0..2).for_each(|guest| assert_sent(&mut lan, guest));
    assert!(has_program(&lan.veth.near));
    let port = lan.daemon.port(0);
    assert_eq!(
        (&port["attached"], &port["sessions"]),
        (&"native".into(), &1.into()),
        "{port:#}"
    );
}

#[rstest]
fn guest_beside_a_network_has_both_by_af_xdp() {
    require!(Root);
    let text = file(Some(VethPair::NIC), &[""]).replacen("[port.vm0]", "mode = \"auto\"\n[port.vm0]", 1);
    let alone = ports(&["", "mode = \"auto\""]);
    let alone = &alone[alone.find("[port.vm1]").expect("it is there")..];
    let mut lan = lan(&format!("{text}{alone}"), 2);
    await_received(&mut lan, 0);
    (0..2).for_each(|guest| assert_sent(&mut lan, guest));
    let said = lan.daemon.status();
    assert!(is_said(&said, "tap mode not used: "), "{said:#}");
}

/// Which a guest gets by AF_XDP only, before and while it runs.
#[rstest]
fn guest_with_an_address_of_the_host_is_by_af_xdp() {
    require!(Root);
    let mut lan = lan(&ports(&["mode = \"auto\"", "mode = \"auto\""]), 2);
    await_received(&mut lan, 0);
    assert!(!has_program(&lan.veth.near));
    let near = &lan.veth.near;
    near.ip(&["link", "set", VethPair::NIC, "address", "02:00:00:00:00:00"]);
    for guest in 0..2 {
        let is_native = |port: &Value| port["attached"] == "native" && port["impaired"].is_null();
        lan.daemon.await_port(guest, "another mode", is_native);
    }
    await_received(&mut lan, 0);
    (0..2).for_each(|guest| assert_sent(&mut lan, guest));
    let port = lan.daemon.port(0);
    assert!(is_said(&port, "tap mode not used: "), "{port:#}");
    assert_eq!(port["sessions"], 1);
}

#[rstest]
fn longest_frames_of_any_mtu_pass(#[values(68, 1279, 1280, 3900, 9000, 65_500)] mtu: u32) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).mode(Mode::Auto);
    let mut rig = Rig::with(VethPair::with(1, mtu), &serve, &DriverConfig::default());
    rig.post(64, &[1536]);
    assert_eq!(rig.daemon.port(0)["attached"], "tap");
    let (short, long) = (frame::plain(60, 1), frame::plain(mtu as usize + 14, 2));
    let reaches = wait::until(wait::SOON, || {
        rig.wire.send(&short);
        rig.driver.pairs[0].receive(Duration::from_millis(100)).is_some()
    });
    assert!(reaches, "{:#}", rig.daemon.port(0));
    for sent in [&short, &long] {
        rig.assert_from_guest(sent, Layout::Whole);
        rig.assert_to_guest(sent);
    }
}

#[rstest]
fn interface_that_was_moved_away_and_back_is_in_tap_mode_again() {
    require!(Root);
    let mut rig = rig(&Serve::interface(VethPair::NIC).mode(Mode::Auto).leased());
    rig.assert_passes_both_ways();
    for _ in 0..2 {
        let (near, far) = (&rig.veth.near, &rig.veth.far);
        near.ip(&["link", "set", VethPair::NIC, "netns", far.name()]);
        rig.daemon.await_impaired(0, "gone");
        let (near, far) = (&rig.veth.near, &rig.veth.far);
        far.ip(&["link", "set", VethPair::NIC, "netns", near.name()]);
        near.ip(&["link", "set", VethPair::NIC, "up"]);
        rig.await_passes_both_ways();
    }
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
    rig.veth
        .near
        .ip(&["link", "set", VethPair::NIC, "name", "other0"]);
    rig.veth.near.ip(&["link", "set", "other0", "up"]);
    rig.await_passes_both_ways();
}
