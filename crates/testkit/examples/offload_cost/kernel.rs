//! The kernel's side; see the head of `main.rs`.

use std::time::Duration;

use testkit::{NetNs, PacketPort, VethPair};

use crate::Work;

/// What has to live as long as it is measured.
pub(crate) type Guards = Option<(NetNs, Option<VethPair>)>;

const WHOLE: &str = "whole0";
const CUT: &str = "cut0";
const ARRIVAL_LIMIT: Duration = Duration::from_secs(2);

/// Software GSO.
pub(crate) fn segment(size: usize, copy: bool) -> (Work, Guards) {
    let netns = NetNs::new("gso");
    add_sink(&netns, WHOLE, &[]);
    add_sink(&netns, CUT, features(copy));
    let (measured, taken_off) = (sender(&netns, CUT, size), sender(&netns, WHOLE, size));
    let how = if copy {
        "payload copied, checksums"
    } else {
        "payload by reference"
    };
    let what = format!("kernel: software GSO ({how}), less the same GSO packet uncut");
    (work(size, what, measured, taken_off), Some((netns, None)))
}

/// Software GRO, or what is before and behind it.
pub(crate) fn coalesce(size: usize, contender: &str) -> (Work, Guards) {
    let features = features(contender != "kernel-partial");
    let gro = contender != "kernel-hop";
    let netns = NetNs::new("gso");
    add_sink(&netns, CUT, features);
    let pair = VethPair::with(1, 9000);
    set(&pair.near, VethPair::NIC, features);
    set(
        &pair.far,
        VethPair::WIRE,
        &["gro", if gro { "on" } else { "off" }],
    );
    let mut measured = sender(&pair.near, VethPair::NIC, size);
    check_merged(&pair, size, gro, &mut measured);
    let what = format!("kernel: {contender}, less the same GSO packet cut and dropped");
    let taken_off = sender(&netns, CUT, size);
    (work(size, what, measured, taken_off), Some((netns, Some(pair))))
}

/// What an interface does not do itself.
fn features(copy: bool) -> &'static [&'static str] {
    const SEGMENTATION: [&str; 4] = ["tso", "off", "tx-tcp-segmentation", "off"];
    const ALL: [&str; 6] = ["tx", "off", "sg", "off", "tso", "off"];
    if copy { &ALL } else { &SEGMENTATION }
}

/// An interface that drops all that is not redirected to it (`drivers/net/ifb.c` ifb_xmit).
fn add_sink(netns: &NetNs, name: &str, features: &[&str]) {
    netns.ip(&["link", "add", name, "type", "ifb"]);
    set(netns, name, features);
    netns.ip(&["link", "set", name, "mtu", "9000", "up"]);
}

fn set(netns: &NetNs, name: &str, features: &[&str]) {
    if !features.is_empty() {
        netns.run("ethtool", &[&["-K", name], features].concat());
    }
}

/// Sends a GSO packet each time.
fn sender(netns: &NetNs, interface: &str, size: usize) -> Box<dyn FnMut()> {
    let gso_packet = super::gso_packet(size);
    let frame = [&gso_packet.request(size as u16)[..], &gso_packet.bytes()].concat();
    let port = PacketPort::open_with_header(netns, interface);
    Box::new(move || port.send(&frame))
}

/// What arrives is what it ought to be, before anything is measured. GRO leaves the last segment alone and delivers it
/// first: software GSO makes that one the owner of the packet socket's memory.
fn check_merged(pair: &VethPair, size: usize, gro: bool, send: &mut dyn FnMut()) {
    let far = PacketPort::open(&pair.far, VethPair::WIRE);
    send();
    let two = [far.receive(ARRIVAL_LIMIT), far.receive(ARRIVAL_LIMIT)]
        .map(|frame| frame.map_or(0, |frame| frame.len()));
    assert_eq!(
        two.iter().any(|&len| len > 2 * size),
        gro,
        "frames of {two:?} bytes arrived"
    );
}

fn work(size: usize, what: String, measured: Box<dyn FnMut()>, taken_off: Box<dyn FnMut()>) -> Work {
    let bytes = super::gso_packet(size).payload_len;
    Work {
        measured,
        taken_off: Some(taken_off),
        units: bytes / size,
        bytes,
        what,
    }
}
