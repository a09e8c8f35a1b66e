//! Filter rules of guests that have queues of an interface, or a cable, to themselves: no network knows them.

use rstest::rstest;
use testkit::daemon::DIR;
use testkit::filter_rules::{HOST, framed, tables, udp};
use testkit::frame::{ipv6, udp_ports};
use testkit::lan::{Lan, STRANGER, mac};
use testkit::{DriverConfig, Layout, Serve, VethPair, require, wait};

/// A port with queue 0 to itself.
fn port(memory: &str, keys: &str, list: &[&str]) -> String {
    let socket = format!("socket-path = \"{DIR}/vm0.sock\"");
    let key = if memory == "tap" { "mode" } else { "memory" };
    let queue = format!("ifname = \"{}\"\n{key} = \"{memory}\"", VethPair::NIC);
    format!("[port.vm0]\n{socket}\n{queue}\n{keys}\n{}", tables(0, list))
}

fn alone(memory: &str, keys: &str, list: &[&str]) -> Lan {
    let text = port(memory, keys, list);
    Lan::on(
        VethPair::new(),
        &Serve::file(),
        &text,
        1,
        &DriverConfig::default(),
    )
}

/// What the wire gets next of the guest.
#[track_caller]
fn on_wire(lan: &Lan) -> Vec<u8> {
    let mut got = std::iter::from_fn(|| lan.wire.receive(wait::SOON));
    let got = got.find(|frame| frame[6..12] == mac(0));
    got.unwrap_or_else(|| panic!("nothing on the wire: {}", lan.daemon.said()))
}

/// What the guest gets next of the wire's.
#[track_caller]
fn to_guest(lan: &mut Lan) -> Vec<u8> {
    loop {
        let got = lan.received(0);
        if got[6..12] == STRANGER {
            return got;
        }
    }
}

fn sent(port: u16) -> Vec<u8> {
    udp(STRANGER, mac(0), HOST, port)
}

fn back(port: u16) -> Vec<u8> {
    udp(mac(0), STRANGER, HOST, port)
}

/// Over IPv6 behind a header with options: behind what is copied of other frames.
fn long(port: u16) -> Vec<u8> {
    let options = [&[17, 4, 1, 34][..], &[0; 36], &udp_ports([7, port])].concat();
    let of = |last: u16| std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last);
    framed(STRANGER, mac(0), 0x86dd, &ipv6(of(1), of(2), 0, &options))
}

const FROM: &str = "direction=from-guest action=allow protocol=udp destination-ports=53";

#[rstest]
fn it_sends_what_rules_allow(
    #[values("copy", "send-direct", "direct", "tap")] memory: &str,
    #[values("", "guard = true\nmac = \"02:00:00:00:00:00\"")] guard: &str,
) {
    require!(Root);
    let mut lan = alone(memory, guard, &[FROM]);
    let layouts = [Layout::Whole, Layout::HeaderApart, Layout::Pieces(40)];
    // More than its ring has entries.
    for round in 0..100 {
        let frames = [sent(54), sent(53), long(54), long(53)];
        let all: Vec<_> = frames.iter().map(Vec::as_slice).collect();
        lan.guests[0].pairs[0].send_batch(&all, layouts[round % 3]);
        assert_eq!([on_wire(&lan), on_wire(&lan)], [sent(53), long(53)]);
        lan.guests[0].pairs[0].await_sent();
    }
    assert_eq!(lan.daemon.counter_of("vm0", "from_guest_filter"), 200);
    // What it gets is not judged.
    lan.wire.send(&back(9));
    assert_eq!(to_guest(&mut lan), back(9));
    // A packet that ends inside its headers.
    let mut cut = sent(53);
    cut[17] = 22;
    lan.send(0, &cut);
    lan.send(0, &sent(53));
    assert_eq!(on_wire(&lan), sent(53));
    assert_eq!(lan.daemon.counter_of("vm0", "from_guest_headers"), 1);
}
