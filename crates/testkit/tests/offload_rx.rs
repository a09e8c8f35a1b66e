//! Offloads of frames to the guest, over a real veth: checksums checked, completed or marked, and segments coalesced.
//!
//! GSO packets are cut into segments here and sent by a packet socket; what a stack on the other end of a veth leaves
//! unfinished comes from the kernel's own sockets. How many segments are joined for which buffers is tested in crate
//! `dataplane` (`tests/join_tests.rs`).

mod local_stack;
mod tunnels;

use packet::segment::{Gso, GsoKind, Plan};
use packet::{checksum, layers, verify};
use rstest::rstest;
use testkit::control_queue::{self, ControlQueue, guest_offloads};
use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_CTRL_GUEST_OFFLOADS, F_CTRL_VQ, F_GUEST_ALL, F_GUEST_CSUM, F_RING_PACKED, HEADER};
use testkit::gso_packet::{ACK, CWR, GsoPacket, Ip, PSH, Transport};
use testkit::pair::Received;
use testkit::{DriverConfig, Rig, Serve, VethPair, frame, require, skip_half, wait};
use vhost::vhost_user::VhostUserFrontend;

const SPLIT: u64 = 0;
/// A usual buffer, and more of them than a GSO packet needs.
const BUFFER: u32 = 1536;
const BUFFERS: usize = 200;
/// Payload of a segment at an MTU of 1500 with timestamps.
const MSS: u16 = 1448;
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;

fn rig(placement: Placement, mode: Mode, features: u64) -> Rig {
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .mode(mode)
        .offload("all");
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::with(features));
    rig.post(BUFFERS, &[BUFFER]);
    rig
}

fn tcp4(payload: usize) -> GsoPacket {
    GsoPacket::tcp(Ip::V4(0), payload)
}

fn kind(whole: &GsoPacket) -> GsoKind {
    match (&whole.transport, &whole.ip) {
        (Transport::Udp, _) => GsoKind::Udp,
        (_, Ip::V4(_)) => GsoKind::Tcp4,
        (_, Ip::V6(_)) => GsoKind::Tcp6,
    }
}

/// The frames on the wire of which a GSO packet is made, with partial checksums or whole ones.
fn segments(whole: &GsoPacket, size: u16, partial: bool) -> Vec<Vec<u8>> {
    let bytes = whole.bytes();
    let gso = Gso {
        kind: kind(whole),
        ecn: true,
        size,
    };
    let plan = Plan::new(&bytes, bytes.len() as u32, gso).expect("a good request");
    let segment = |index| {
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        let payload = plan.payload(index);
        segment.extend(&bytes[payload.start as usize..payload.end as usize]);
        if !partial {
            checksum::complete(&mut segment, plan.checksum_at()).expect("inside");
        }
        segment
    };
    (0..plan.segments()).map(segment).collect()
}

/// The header is that of the GSO packet, for segments of `size` bytes, and the frame is it.
#[track_caller]
fn assert_is(got: &Received, whole: &GsoPacket, size: u16) {
    frame::assert_same(&got.frame, &whole.bytes());
    assert_eq!(got.header[..10], whole.request(size));
    let chains = (got.frame.len() + HEADER).div_ceil(BUFFER as usize);
    assert_eq!(got.chains, chains, "every buffer but the last is full");
}

/// The frame as it is when somebody completed its checksum.
fn completed(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let layers = layers::parse(&frame, frame.len() as u32).expect("TCP or UDP");
    let partial = verify::pseudo(&frame, &layers).fold();
    let offset = layers.transport_kind.checksum_offset();
    let at = usize::from(layers.transport + offset);
    frame[at..at + 2].copy_from_slice(&partial.to_be_bytes());
    let end = layers.ip_len_end as usize;
    checksum::complete(&mut frame[..end], layers.checksum_at()).expect("inside");
    frame
}

#[rstest]
fn segments_arrive_as_one_gso_packet(
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
    #[values(false, true)] partial: bool,
) {
    skip_half!(mode, ring, partial);
    require!(Root);
    let mut rig = rig(Placement::Copy, mode, F_GUEST_ALL | ring);
    let (v4, v6) = (|| Ip::V4(0), |extensions: &[u8]| Ip::V6(extensions.to_vec()));
    let udp = |ip, payload| GsoPacket::udp(ip, payload);
    let tagged = |whole: GsoPacket| GsoPacket { tags: 1, ..whole };
    for (whole, size) in [
        (tcp4(2 * 1448), MSS),
        (tcp4(44 * 1448 + 17), MSS),
        (tcp4(64 * 500), 500),
        (GsoPacket::tcp(v6(&[]), 30_000), 1428),
        (GsoPacket::tcp(v6(&[0, 60]), 10_000), 1400),
        (tagged(tcp4(20_000)), MSS),
        (tagged(GsoPacket::tcp(v6(&[]), 20_000)), 1400),
        (udp(v4(), 30_000), 1472),
        (udp(v6(&[]), 10_001), 1000),
        (
            GsoPacket {
                transport: Transport::Tcp(ACK | CWR | PSH, 3),
                ..tcp4(9_000)
            },
            MSS,
        ),
    ] {
        let before = rig.daemon.counter("to_guest_coalesced_frames");
        let frames = segments(&whole, size, partial);
        rig.burst_to_guest(&frames);
        let got = rig.flush_to_guest();
        assert_eq!(
            got.len(),
            1,
            "{whole:?} of {} frames: {:?}",
            frames.len(),
            got.iter().map(|got| got.frame.len()).collect::<Vec<_>>()
        );
        assert_is(&got[0], &whole, size);
        let after = rig.daemon.counter("to_guest_coalesced_frames");
        assert_eq!(after - before, frames.len() as u64);
    }
}

/// By the control queue, where the VMM passes that on.
#[rstest]
fn guest_that_turns_its_offloads_off_gets_frames_as_a_wire_has_them(
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let features = F_GUEST_ALL | F_CTRL_VQ | F_CTRL_GUEST_OFFLOADS;
    let mut rig = rig(Placement::Copy, mode, features);
    let mut control = ControlQueue::new(&rig.driver, 2);
    assert_eq!(control.start(&mut rig.driver), [0; 6]);
    let frames = segments(&tcp4(5 * 1448), MSS, true);
    let all = rig.driver.features() & F_GUEST_ALL;
    for (on, arrive) in [(all, 1), (F_GUEST_CSUM, 5), (0, 5), (all, 1)] {
        assert_eq!(control.ask(&guest_offloads(on)), control_queue::OK);
        rig.burst_to_guest(&frames);
        let got = rig.flush_to_guest();
        assert_eq!(got.len(), arrive, "{on:#x}");
        if on == 0 {
            for (got, sent) in got.iter().zip(&frames) {
                assert_eq!(got.header[..2], [0, 0]);
                frame::assert_same(&got.frame, &completed(sent));
            }
        }
    }
}

#[rstest]
fn jumbo_segments_in_several_chunks_are_coalesced(
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(false, true)] partial: bool,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).mode(mode).offload("all");
    let mut rig = Rig::with(VethPair::with(1, 9000), &serve, &DriverConfig::with(F_GUEST_ALL));
    rig.post(BUFFERS, &[BUFFER]);
    for (payload, size) in [(7 * 8948, 8948), (40_001, 3801), (30_000, 8947)] {
        let whole = tcp4(payload);
        rig.burst_to_guest(&segments(&whole, size, partial));
        let got = rig.flush_to_guest();
        let lengths: Vec<_> = got.iter().map(|got| (got.frame.len(), got.header)).collect();
        assert_eq!(got.len(), 1, "{size}: {lengths:?}");
        assert_is(&got[0], &whole, size);
    }
    // Alone, and completed where nobody takes partial ones.
    rig.burst_to_guest(&segments(&tcp4(8948), 8948, partial));
    let got = rig.flush_to_guest();
    assert_eq!(got[0].header[0], if partial { NEEDS_CSUM } else { DATA_VALID });
}

#[rstest]
fn frames_of_a_pair_that_is_off_are_looked_at_too(#[values(0, F_GUEST_ALL)] features: u64) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .with("--queues", "2")
        .offload("all");
    let config = DriverConfig {
        pairs: 2,
        ..DriverConfig::with(features)
    };
    let mut rig = Rig::with(VethPair::with(2, 1500), &serve, &config);
    for index in [2, 3] {
        rig.driver
            .frontend()
            .set_vring_enable(index, false)
            .expect("it may be switched off");
    }
    rig.post(100, &[BUFFER]);
    for round in 0..40 {
        let whole = GsoPacket {
            flow: 6000 + round,
            ..tcp4(1448)
        };
        let frames = segments(&whole, MSS, round % 2 == 0);
        rig.wire.send(&frames[0]);
        let got = rig.pair().receive(wait::SOON).expect("it arrives");
        let partial = round % 2 == 0;
        match (features, partial) {
            (0, _) => frame::assert_same(&got.frame, &completed(&frames[0])),
            (_, true) => assert_eq!(got.header[0], NEEDS_CSUM),
            (_, false) => assert_eq!(got.header[0], DATA_VALID),
        }
    }
    // The flow decides which of the wire's queues a frame takes, and so to which of the NIC's it comes.
    assert!(rig.daemon.counter("spilled_frames") > 0);
}
