//! What a guest leaves to the device when it sends: checksums and segmentation, on their way to the NIC.
//!
//! The guest is a driver in this process, the NIC one end of a veth pair. On the other end is a packet socket, which
//! sees each segment, or the kernel's own UDP. A checksum that the kernel was asked to complete (XDP TX
//! metadata) stays partial on a veth, and the receiver is told so; what a packet socket shows is then completed here
//! before it is compared.

mod hostile;

use std::net::UdpSocket;

use packet::checksum::{self, ChecksumAt};
use packet::segment::Request;
use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_HOST_ALL, F_RING_PACKED, HEADER};
use testkit::gso_packet::{ACK, CWR, ECE, FIN, GsoPacket, Ip, PSH, Transport, header};
use testkit::{DriverConfig, Layout, NetNs, Rig, Serve, VethPair, frame, require, skip_half, wait};

use crate::offload_kernel::cut;

/// Offloads of frames from the guest.
const ALL: &str = "csum,tso4,tso6,ecn,uso";
/// Beside F_RING_PACKED.
const SPLIT: u64 = 0;
/// A checksum that is yet to be completed (`TP_STATUS_CSUMNOTREADY`, `linux/if_packet.h`).
const NOT_READY: u32 = 1 << 3;

fn rig(placement: Placement, mode: Mode, ring: u64) -> Rig {
    rig_of(VethPair::new(), (placement, mode), ring | F_HOST_ALL)
}

/// One of the two that follow.
type MakeRig = fn(VethPair, (Placement, Mode), u64) -> Rig;
fn rig_of(veth: VethPair, (placement, mode): (Placement, Mode), features: u64) -> Rig {
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    rig_serving(veth, &serve.offload(ALL).with("--segments", "whole"), features)
}

/// The kernel copies on a veth, so that segments refer to their payload only where that is asked for.
fn rig_by_reference(veth: VethPair, (placement, mode): (Placement, Mode), features: u64) -> Rig {
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    let serve = serve.offload(ALL).with("--segments", "by-reference");
    rig_serving(veth, &serve, features)
}

fn rig_serving(veth: VethPair, serve: &Serve, features: u64) -> Rig {
    Rig::with(veth, serve, &DriverConfig::with(features))
}

fn completed(mut frame: Vec<u8>, at: ChecksumAt) -> Vec<u8> {
    checksum::complete(&mut frame, at).expect("inside");
    frame
}

/// The next frame on the wire, its checksum completed if that was left to the receiver.
#[track_caller]
fn next_on_the_wire(rig: &Rig, at: ChecksumAt) -> Vec<u8> {
    let (frame, status) = rig
        .wire
        .receive_with_status(wait::SOON)
        .unwrap_or_else(|| panic!("nothing more arrives: {:#}", rig.daemon.status()));
    match status & NOT_READY {
        0 => frame,
        _ => completed(frame, at),
    }
}

/// Sends a GSO packet and sees its segments arrive, in order, byte for byte.
#[track_caller]
fn assert_cut(rig: &mut Rig, gso_packet: &GsoPacket, size: u16, layout: Layout) {
    let (bytes, request) = (gso_packet.bytes(), gso_packet.request(size));
    rig.pair().send_asking(&[(header(request), &bytes)], layout);
    assert_segments_arrive(rig, &bytes, request);
}

#[track_caller]
fn assert_segments_arrive(rig: &Rig, bytes: &[u8], request: [u8; 10]) {
    let at = Request::from_header(&request)
        .expect("good")
        .csum
        .expect("asked for");
    for (index, wanted) in cut(bytes, &request).iter().enumerate() {
        let got = next_on_the_wire(rig, at);
        if &got != wanted {
            eprintln!("segment {index} of {} bytes, {request:02x?}", bytes.len());
            frame::assert_same(&got, wanted);
        }
    }
}

/// All of them, with both IP versions, options, extension headers and tags.
fn kinds() -> Vec<GsoPacket> {
    let (hop_by_hop, destination) = (0, 60);
    let ips = [
        Ip::V4(0),
        Ip::V4(3),
        Ip::V6(vec![]),
        Ip::V6(vec![hop_by_hop, destination]),
    ];
    let mut kinds = Vec::new();
    for (at, ip) in ips.into_iter().enumerate() {
        let mut tcp = GsoPacket::tcp(ip.clone(), 0);
        let mut udp = GsoPacket::udp(ip, 0);
        tcp.tags = at % 3;
        udp.tags = (at + 1) % 3;
        kinds.extend([tcp, udp]);
    }
    let mut last = GsoPacket::tcp(Ip::V4(0), 0);
    last.transport = Transport::Tcp(ACK | PSH | FIN | CWR | ECE, 0);
    kinds.push(last);
    kinds
}

#[rstest]
fn gso_packets_arrive_as_their_segments(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
    #[values(false, true)] by_reference: bool,
) {
    skip_half!(placement, mode, ring);
    require!(Root);
    let make: MakeRig = if by_reference { rig_by_reference } else { rig_of };
    let mut rig = make(VethPair::new(), (placement, mode), ring | F_HOST_ALL);
    assert_gso_packets_arrive(&mut rig);
    let segments = rig.daemon.counter("from_guest_referred_segments");
    let gathered = rig.daemon.counter("from_guest_frames") - segments;
    assert_eq!(
        segments > 10 * gathered,
        by_reference,
        "{segments} by reference, {gathered} not"
    );
}

/// Sends GSO packets of all kinds.
fn assert_gso_packets_arrive(rig: &mut Rig) {
    let layouts = [
        Layout::Whole,
        Layout::HeaderApart,
        Layout::Pieces(1000),
        Layout::Indirect(4096),
        Layout::Pieces(HEADER + 33),
    ];
    let mut sent = 0;
    for (at, kind) in kinds().into_iter().enumerate() {
        for (payload_len, size) in [
            (1, 1400),
            (1400, 1400),
            (1401, 1400),
            (9000, 1000),
            (65_000, 1391),
        ] {
            let layout = layouts[(at + payload_len) % layouts.len()];
            // No more descriptors than the ring has.
            let layout = match layout {
                Layout::Pieces(size) if payload_len / size > 200 => Layout::Indirect(size * 8),
                layout => layout,
            };
            let payload_len = payload_len.min(65_400 - kind.header_len());
            let gso_packet = GsoPacket {
                payload_len,
                ..kind.clone()
            };
            assert_cut(rig, &gso_packet, size, layout);
            sent += 1;
        }
    }
    rig.pair().await_sent();
    assert!(rig.flush_from_guest().is_empty(), "nothing else arrives");
    rig.daemon.await_counter("from_guest_super_frames", sent);
    rig.assert_from_guest(&frame::plain(60, 1), Layout::Whole);
}

/// Where the kernel copies, a GSO packet leaves by a tap, and a veth hands it on as it is. Frames of its flow that are no
/// such packets keep their place among them.
#[rstest]
fn gso_packets_leave_unsegmented_and_in_order_where_the_kernel_copies(
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .placement(Placement::Copy)
        .mode(mode);
    let mut rig = rig_serving(VethPair::new(), &serve.offload(ALL), ring | F_HOST_ALL);
    let (mut packets, mut frames) = (0, 0);
    for kind in kinds() {
        let (small, small_request, small_at) = partial(&kind, 100);
        let many = GsoPacket {
            payload_len: 60_000,
            ..kind.clone()
        };
        let request = many.request(1391);
        let at = Request::from_header(&request)
            .expect("good")
            .csum
            .expect("asked for");
        for layout in [Layout::Whole, Layout::HeaderApart, Layout::Indirect(4096)] {
            let batch = [
                (header(small_request), &small[..]),
                (header(request), &many.bytes()[..]),
                (header(small_request), &small[..]),
                (header(request), &many.bytes()[..]),
            ];
            rig.pair().send_asking(&batch, layout);
            for (_, bytes) in &batch {
                let at = if bytes.len() > 2000 { at } else { small_at };
                let got = next_on_the_wire(&rig, at);
                frame::assert_same(&got, &completed(bytes.to_vec(), at));
            }
            packets += 2;
            frames += 2 + 2 * cut(&many.bytes(), &request).len() as u64;
        }
    }
    rig.pair().await_sent();
    assert!(rig.flush_from_guest().is_empty(), "nothing else arrives");
    rig.daemon
        .await_counter("from_guest_super_frames_unsegmented", packets);
    assert_eq!(rig.daemon.counter("from_guest_super_frames"), packets);
    // As on a wire.
    rig.daemon.await_counter("from_guest_frames", frames);
}

/// A frame whose checksum is to be completed, and where that is.
fn partial(kind: &GsoPacket, payload_len: usize) -> (Vec<u8>, [u8; 10], ChecksumAt) {
    let frame = GsoPacket {
        payload_len,
        ..kind.clone()
    };
    let mut request = frame.request(0);
    request[1] = 0;
    let at = Request::from_header(&request)
        .expect("good")
        .csum
        .expect("asked for");
    (frame.bytes(), request, at)
}

#[rstest]
fn checksums_are_completed(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
) {
    skip_half!(placement, mode, ring);
    require!(Root);
    let mut rig = rig(placement, mode, ring);
    let mut sent = 0;
    for kind in kinds() {
        for payload_len in [0, 1, 2, 35, 1380] {
            let (bytes, request, at) = partial(&kind, payload_len);
            for layout in [Layout::Whole, Layout::HeaderApart, Layout::Pieces(40)] {
                rig.pair().send_asking(&[(header(request), &bytes)], layout);
                frame::assert_same(&next_on_the_wire(&rig, at), &completed(bytes.clone(), at));
                sent += 1;
            }
        }
    }
    // The running kernel takes TX metadata wherever it copies.
    assert_eq!(rig.daemon.counter("from_guest_checksums_left"), sent);
    assert_eq!(
        rig.daemon.port(0)["lanes"][0]["checksums"],
        "kernel (TX metadata)"
    );
}

/// A macvlan in front of the veth: a device of which nobody can say that the kernel does not forget the metadata.
#[rstest]
fn daemon_sums_where_nobody_else_is_known_to(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    const NIC: &str = "macvlan0";
    let veth = VethPair::new();
    let add = ["link", "add", NIC, "link", VethPair::NIC];
    let kind = ["type", "macvlan", "mode", "vepa"];
    veth.near.ip(&[&add[..], &kind].concat());
    veth.near.ip(&["link", "set", NIC, "arp", "off", "up"]);
    let serve = Serve::interface(NIC)
        .placement(placement)
        .mode(Mode::Skb)
        .offload(ALL);
    let mut rig = rig_serving(veth, &serve.with("--segments", "whole"), F_HOST_ALL);
    assert_eq!(rig.daemon.port(0)["lanes"][0]["checksums"], "daemon");
    for kind in kinds() {
        let many = GsoPacket {
            payload_len: 10_000,
            ..kind
        };
        let (bytes, asked) = (many.bytes(), many.request(1000));
        rig.pair()
            .send_asking(&[(header(asked), &bytes)], Layout::Pieces(2000));
        for wanted in cut(&bytes, &asked) {
            let (got, status) = rig.wire.receive_with_status(wait::SOON).expect("it arrives");
            assert_eq!(status & NOT_READY, 0);
            frame::assert_same(&got, &wanted);
        }
    }
}

#[rstest]
fn checksums_of_jumbo_frames_are_completed(#[values(false, true)] of_transport: bool) {
    require!(Root);
    let mode = (Placement::Copy, Mode::Native);
    let mut rig = rig_of(VethPair::with(1, 9000), mode, F_HOST_ALL);
    for payload_len in [4000, 4032, 4033, 8901] {
        let (bytes, mut request, mut at) = partial(&GsoPacket::udp(Ip::V4(0), 0), payload_len);
        if !of_transport {
            // Somewhere else: summed by the daemon. At a place that lies across the end of the first chunk.
            at = ChecksumAt {
                start: 333,
                offset: 3698,
            };
            request[6..8].copy_from_slice(&at.start.to_le_bytes());
            request[8..10].copy_from_slice(&at.offset.to_le_bytes());
        }
        rig.pair()
            .send_asking(&[(header(request), &bytes)], Layout::Pieces(1234));
        frame::assert_same(&next_on_the_wire(&rig, at), &completed(bytes, at));
    }
    assert_eq!(
        rig.daemon.counter("from_guest_checksums"),
        if of_transport { 0 } else { 4 }
    );
}

/// Gives the wire's end the address that all frames are sent to, 10.9.0.2, and a neighbour at 10.9.0.1.
fn give_the_wire_a_stack(far: &NetNs) {
    let wire = VethPair::WIRE;
    let mac = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    far.ip(&["link", "set", wire, "address", &mac(frame::TO)]);
    far.ip(&["addr", "add", "10.9.0.2/24", "dev", wire]);
    far.ip(&["neigh add 10.9.0.1 lladdr", &mac(frame::FROM), "dev", wire]);
}

#[rstest]
fn kernels_udp_takes_datagrams_whose_checksum_was_left_to_us(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values("on", "off")] tx: &str,
) {
    skip_half!(placement, mode, tx == "on");
    require!(Root);
    let veth = VethPair::new();
    // Off: the interface cannot do checksums, so the kernel sums before it sends.
    veth.near.run("ethtool", &["-K", VethPair::NIC, "tx", tx]);
    let mut rig = rig_of(veth, (placement, mode), F_HOST_ALL);
    give_the_wire_a_stack(&rig.veth.far);
    let socket = rig
        .veth
        .far
        .enter(|| UdpSocket::bind("10.9.0.2:9").expect("free"));
    socket.set_read_timeout(Some(wait::SOON)).expect("not zero");
    let kind = GsoPacket::udp(Ip::V4(0), 0);
    let mut buffer = [0; 2000];

    let (bytes, request, at) = partial(&kind, 1001);
    rig.pair()
        .send_asking(&[(header(request), &bytes)], Layout::Whole);
    let got = socket.recv(&mut buffer).expect("it arrives");
    frame::assert_same(&buffer[..got], &bytes[kind.header_len()..]);
    let (frame, status) = rig.wire.receive_with_status(wait::SOON).expect("seen, too");
    if tx == "off" {
        assert_eq!(status & NOT_READY, 0);
        frame::assert_same(&frame, &completed(bytes, at));
    } else {
        assert_ne!(status & NOT_READY, 0, "nobody sums on a veth");
    }

    let many = GsoPacket {
        payload_len: 20_000,
        ..kind.clone()
    };
    let bytes = many.bytes();
    rig.pair()
        .send_asking(&[(header(many.request(1400)), &bytes)], Layout::Pieces(4096));
    for wanted in bytes[kind.header_len()..].chunks(1400) {
        let got = socket.recv(&mut buffer).expect("it arrives");
        frame::assert_same(&buffer[..got], wanted);
    }

    // To see that somebody looks: the same datagram with a wrong checksum, not left to us; a good one behind it comes
    // first.
    let (mut wrong, ..) = partial(&kind, 1001);
    wrong[40] ^= 0x55;
    rig.pair().send(&wrong, Layout::Whole);
    let (bytes, request, _) = partial(&kind, 77);
    rig.pair()
        .send_asking(&[(header(request), &bytes)], Layout::Whole);
    let got = socket.recv(&mut buffer).expect("it arrives");
    assert_eq!(got, bytes.len() - kind.header_len(), "nobody checks");
}
