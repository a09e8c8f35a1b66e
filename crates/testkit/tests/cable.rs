//! Two guests of one process on one cable: GSO packets and partial checksums pass as they are, and a guest that comes
//! back gets the next frame.

use std::time::Duration;

use rstest::rstest;
use testkit::driver::F_RING_PACKED;
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Pair, Serve, frame, require, wait};
use virtqueue::driver::Buffer;

/// Every offload that there is: csum, guest-csum, guest-tso4 to guest-ecn, tso4 to ecn, guest-uso4, guest-uso6, uso.
const ALL: u64 = 1 | 1 << 1 | 7 << 7 | 7 << 11 | 7 << 54;

struct Cable {
    a: Driver,
    b: Driver,
    daemon: Daemon,
    _netns: NetNs,
}

impl Cable {
    fn new(a: &DriverConfig, b: &DriverConfig) -> Self {
        let netns = NetNs::new("cable");
        let serve = Serve::cable("x").offload("all");
        let daemon = Daemon::start_ports(&netns, &serve, &["queues=2", "queues=1"]);
        let guest = |name, config| Driver::connect(&daemon.path(name), config).expect("it is accepted");
        Self {
            a: guest("port0.sock", a),
            b: guest("port1.sock", b),
            daemon,
            _netns: netns,
        }
    }
}

fn taking(offloads: u64) -> DriverConfig {
    let mut config = DriverConfig::default();
    config.features |= offloads;
    config
}

/// Sends a frame with a header, in descriptors of at most 16 KiB.
fn send(pair: &mut Pair, header: [u8; 10], bytes: &[u8]) {
    let whole = [&header[..], &[0, 0], bytes].concat();
    let place = pair.ram().alloc(whole.len() as u64, 64).expect("room");
    pair.ram().write(place, &whole);
    let buffers: Vec<Buffer> = (0..whole.len())
        .step_by(16 << 10)
        .map(|at| {
            let len = (whole.len() - at).min(16 << 10);
            Buffer::readable(place.checked_add(at as u64).expect("inside"), len as u32)
        })
        .collect();
    pair.send_buffers(&buffers, true);
}

fn gso_packet(payload_len: usize) -> GsoPacket {
    GsoPacket {
        payload_len,
        ..GsoPacket::tcp(Ip::V4(0), 0)
    }
}

#[rstest]
fn gso_packet_and_partial_checksum_pass_untouched(#[values(0, F_RING_PACKED)] packed: u64) {
    require!(Root);
    let mut cable = Cable::new(&taking(ALL | packed), &taking(ALL | packed));
    cable.b.pairs[0].post(128, &[1526]);
    let request = gso_packet(60_000).request(1448);
    let bytes = gso_packet(60_000).bytes();
    send(&mut cable.a.pairs[0], request, &bytes);
    let got = cable.b.pairs[0].receive(wait::SOON).expect("it arrives");
    frame::assert_same(&got.frame, &bytes);
    assert_eq!(got.header[..10], request);
    assert!(got.chains > 1, "in {} buffer(s)", got.chains);
    // One segment, whose checksum is partial.
    let bytes = gso_packet(1000).bytes();
    let partial = [1, 0, 0, 0, 0, 0, request[6], request[7], request[8], request[9]];
    send(&mut cable.a.pairs[0], partial, &bytes);
    let got = cable.b.pairs[0].receive(wait::SOON).expect("it arrives");
    frame::assert_same(&got.frame, &bytes);
    assert_eq!(got.header[..10], partial);
    cable.a.pairs[0].await_sent();
}

#[test]
fn frames_to_nobody_are_counted_and_a_guest_that_comes_back_gets_the_next() {
    require!(Root);
    let mut cable = Cable::new(&taking(ALL), &taking(ALL));
    let sent = frame::plain(300, 7);
    drop(cable.b);
    cable
        .daemon
        .await_port(1, "nobody is there", |port| port["connected"] == false);
    cable.a.pairs[0].send(&sent, Layout::Whole);
    cable.a.pairs[0].await_sent();
    cable.daemon.await_counter("from_guest_no_peer", 1);
    let mut back = Driver::connect(&cable.daemon.path("port1.sock"), &taking(ALL)).expect("accepted");
    back.pairs[0].post(16, &[1526]);
    cable.a.pairs[0].send(&sent, Layout::Whole);
    let got = back.pairs[0]
        .receive(Duration::from_secs(10))
        .expect("it arrives");
    frame::assert_same(&got.frame, &sent);
}
