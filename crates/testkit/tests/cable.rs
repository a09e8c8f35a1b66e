//! Two guests of one process on one cable: GSO packets and partial checksums pass as they are, to a guest that takes
//! them; to one that does not, as the frames that a wire would carry.

use std::time::Duration;

use packet::HEADERS_MAX;
use packet::checksum;
use packet::segment::{Plan, Request};
use rstest::rstest;
use testkit::driver::F_RING_PACKED;
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::pair::Received;
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Pair, Serve, frame, require, wait};
use virtqueue::driver::Buffer;

/// Every offload that there is: csum, guest-csum, guest-tso4 to guest-ecn, tso4 to ecn, guest-uso4, guest-uso6, uso.
const ALL: u64 = 1 | 1 << 1 | 7 << 7 | 7 << 11 | 7 << 54;
/// Those of frames from the guest.
const SENDING: u64 = 1 | 7 << 11 | 1 << 56;
/// Header of a frame that asks for nothing.
const PLAIN: [u8; 10] = [0; 10];

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

    /// What arrives at `b` before a frame that `a` sends now.
    fn arriving(&mut self) -> Vec<Received> {
        let last = frame::last();
        self.a.pairs[0].send(&last, Layout::Whole);
        self.b.pairs[0].receive_before(&last)
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

/// What a wire carries of a GSO packet: its segments, with whole checksums.
fn cut(bytes: &[u8], request: &[u8; 10]) -> Vec<Vec<u8>> {
    let gso = Request::from_header(request)
        .expect("good")
        .gso
        .expect("asked for");
    let plan = Plan::new(&bytes[..HEADERS_MAX], bytes.len() as u32, gso).expect("good");
    let one = |index| {
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        let payload = plan.payload(index);
        segment.extend(&bytes[payload.start as usize..payload.end as usize]);
        checksum::complete(&mut segment, plan.checksum_at()).expect("inside");
        segment
    };
    (0..plan.segments()).map(one).collect()
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
fn guest_that_takes_no_offload_gets_whole_frames() {
    require!(Root);
    let mut cable = Cable::new(&taking(SENDING), &taking(0));
    cable.b.pairs[0].post(128, &[1526]);
    let request = gso_packet(20_000).request(1448);
    let bytes = gso_packet(20_000).bytes();
    send(&mut cable.a.pairs[0], request, &bytes);
    for expected in cut(&bytes, &request) {
        let got = cable.b.pairs[0].receive(wait::SOON).expect("a segment");
        frame::assert_same(&got.frame, &expected);
        assert_eq!(got.header[..10], PLAIN);
    }
    assert!(cable.arriving().is_empty());
}

#[test]
fn guest_that_takes_checksums_only_gets_segments_with_partial_ones() {
    require!(Root);
    let mut cable = Cable::new(&taking(SENDING), &taking(1 << 1));
    cable.b.pairs[0].post(16, &[1526]);
    let request = gso_packet(3000).request(1448);
    let bytes = gso_packet(3000).bytes();
    send(&mut cable.a.pairs[0], request, &bytes);
    let segments = cut(&bytes, &request);
    assert_eq!(segments.len(), 3);
    for expected in segments {
        let got = cable.b.pairs[0].receive(wait::SOON).expect("a segment");
        let mut whole = got.frame.clone();
        let at = |at| u16::from_le_bytes([got.header[at], got.header[at + 1]]);
        let asked = checksum::ChecksumAt {
            start: at(6),
            offset: at(8),
        };
        assert_eq!((got.header[0], got.header[1]), (1, 0));
        checksum::complete(&mut whole, asked).expect("inside");
        frame::assert_same(&whole, &expected);
    }
    assert!(cable.arriving().is_empty());
}

#[test]
fn headers_that_lie_are_dropped_and_the_next_frame_passes() {
    require!(Root);
    let mut cable = Cable::new(&taking(ALL), &taking(ALL));
    cable.b.pairs[0].post(128, &[1526]);
    let good = gso_packet(10_000).request(1448);
    let bytes = gso_packet(10_000).bytes();
    let mut lies = Vec::new();
    for (at, value) in [
        (0, 0),
        (1, 2),
        (1, 4),
        (1, 5),
        (6, 3),
        (7, 0xff),
        (8, 0),
        (9, 0xff),
    ] {
        let mut lie = good;
        lie[at] = value;
        lies.push(lie);
    }
    // No bytes a segment; segments longer than the wire carries.
    lies.push(
        [&good[..4], &[0, 0], &good[6..]]
            .concat()
            .try_into()
            .expect("ten"),
    );
    lies.push(
        [&good[..4], &[0xff, 0x20], &good[6..]]
            .concat()
            .try_into()
            .expect("ten"),
    );
    // A frame for each byte.
    lies.push(
        [&good[..4], &[1, 0], &good[6..]]
            .concat()
            .try_into()
            .expect("ten"),
    );
    for lie in &lies {
        send(&mut cable.a.pairs[0], *lie, &bytes);
    }
    cable.a.pairs[0].await_sent();
    let dropped = [
        "from_guest_offload_malformed",
        "from_guest_offload_not_negotiated",
        "from_guest_segment_too_long",
        "from_guest_too_many_segments",
    ]
    .map(|name| cable.daemon.counter(name));
    assert_eq!(dropped.iter().sum::<u64>(), lies.len() as u64, "{dropped:?}");
    assert!(cable.arriving().is_empty(), "a lie arrived");
    send(&mut cable.a.pairs[0], good, &bytes);
    frame::assert_same(
        &cable.b.pairs[0].receive(wait::SOON).expect("it arrives").frame,
        &bytes,
    );
}

#[test]
fn frames_wait_for_a_slow_guest_and_keep_their_order() {
    require!(Root);
    let mut cable = Cable::new(&taking(ALL), &taking(ALL));
    let count = 600;
    let frames: Vec<Vec<u8>> = (0..count).map(frame::numbered).collect();
    let sent = std::thread::scope(|scope| {
        let pair = &mut cable.a.pairs[0];
        let sender = scope.spawn(move || {
            for frame in &frames {
                pair.send(frame, Layout::Whole);
            }
            pair.await_sent();
        });
        let pair = &mut cable.b.pairs[0];
        pair.post(64, &[1526]);
        for number in 0..count {
            let got = pair.receive(wait::SOON).expect("it arrives");
            assert_eq!(frame::number_of(&got.frame), Some(number));
        }
        sender.join()
    });
    sent.expect("all of them");
}

#[test]
fn other_pairs_reach_the_first_one_and_both_ways_work() {
    require!(Root);
    let two = DriverConfig {
        pairs: 2,
        ..taking(ALL)
    };
    let mut cable = Cable::new(&two, &taking(ALL));
    cable.b.pairs[0].post(16, &[1526]);
    let sent = frame::plain(300, 7);
    cable.a.pairs[1].send(&sent, Layout::Whole);
    frame::assert_same(
        &cable.b.pairs[0].receive(wait::SOON).expect("it arrives").frame,
        &sent,
    );
    cable.a.pairs[0].post(16, &[1526]);
    cable.b.pairs[0].send(&sent, Layout::Whole);
    frame::assert_same(
        &cable.a.pairs[0].receive(wait::SOON).expect("it arrives").frame,
        &sent,
    );
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
