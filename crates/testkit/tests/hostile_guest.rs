//! What a guest's driver may do with rings and frames that are valid, and made to cost as much as they can.

use rstest::rstest;
use testkit::any_frame::{any_frame, any_header};
use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_EVENT_IDX, F_HOST_ALL, F_INDIRECT, F_MRG_RXBUF, F_RING_PACKED, F_VERSION_1};
use testkit::gso_packet::Ip;
use testkit::{
    Daemon, Driver, DriverConfig, GsoPacket, Layout, Noise, PacketPort, Serve, TwoGuests, VethPair, frame,
    require, skip_half, wait,
};
use virtqueue::GuestAddr;

const MIB: u64 = 1 << 20;
/// The largest queue that there is.
const LARGEST: u16 = 32_768;

fn config(features: u64, queue_size: u16) -> DriverConfig {
    DriverConfig {
        features: F_VERSION_1 | features,
        queue_size: queue_size.into(),
        regions: vec![(GuestAddr(0), 16 * MIB)],
        ..DriverConfig::default()
    }
}

#[rstest]
fn frames_of_any_kind_with_any_request_leave_a_queue_that_sends(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
    #[values(0, F_HOST_ALL)] offloads: u64,
) {
    skip_half!(placement, ring, offloads);
    require!(Root);
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 16 * MIB), (GuestAddr(1 << 32), 16 * MIB)],
        ..config(F_MRG_RXBUF | F_INDIRECT | F_EVENT_IDX | ring | offloads, 256)
    };
    let mut guests = TwoGuests::new(placement, &config);
    send_any_frames(&mut guests.liar, &guests.wire, 1500);
    guests.assert_honest_guest_sends();
    assert_eq!(guests.daemon.port(0)["last_closed"], serde_json::Value::Null);
}

#[rstest]
#[case::skb(Mode::Skb, 1500, Placement::Copy)]
#[case::skb(Mode::Skb, 1500, Placement::Direct)]
#[case::in_pieces(Mode::Native, 9000, Placement::Copy)]
#[case::in_pieces_in_skb_mode(Mode::Skb, 9000, Placement::Copy)]
#[case::longest(Mode::Native, 65_535, Placement::Copy)]
#[case::longest(Mode::Native, 3822, Placement::Direct)]
fn frames_of_any_kind_leave_a_queue_that_sends_on_other_interfaces(
    #[case] mode: Mode,
    #[case] mtu: u32,
    #[case] placement: Placement,
) {
    require!(Root);
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 16 * MIB), (GuestAddr(1 << 32), 16 * MIB)],
        ..config(F_MRG_RXBUF | F_INDIRECT | F_EVENT_IDX | F_HOST_ALL, 256)
    };
    let veth = VethPair::with(1, mtu);
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    let daemon = Daemon::start(&veth.near, &serve);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut guest = Driver::connect(&daemon.socket(), &config).expect("accepted");
    send_any_frames(&mut guest, &wire, mtu as usize);
    assert_eq!(daemon.port(0)["last_closed"], serde_json::Value::Null);
}

/// Sends frames of any kind, behind which a usual one still arrives.
fn send_any_frames(guest: &mut Driver, wire: &PacketPort, mtu: usize) {
    const FRAMES: usize = 600;
    let mut noise = Noise::new(0x9e37_79b9_7f4a_7c15);
    let pair = &mut guest.pairs[0];
    for at in 1..=FRAMES {
        let frame = any_frame(&mut noise);
        let header = any_header(&mut noise, &frame);
        let layout = match noise.index(4) {
            0 => Layout::HeaderApart,
            1 => Layout::Indirect((frame.len() + 12).div_ceil(noise.one(&[2, 5, 17, 19, 200]))),
            _ => Layout::Whole,
        };
        pair.send_asking(&[(header, &frame)], layout);
        if at % 30 == 0 {
            pair.await_sent();
            let last = frame::last();
            pair.send(&last, Layout::Whole);
            for got in wire.receive_before(&last) {
                assert!((14..=mtu + 18).contains(&got.len()), "{} bytes", got.len());
            }
        }
    }
}

#[rstest]
fn queues_of_one_entry_and_of_the_most_move_frames(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values((0, 1), (0, LARGEST), (F_RING_PACKED, 1), (F_RING_PACKED, 3), (F_RING_PACKED, LARGEST))]
    (ring, entries): (u64, u16),
) {
    require!(Root);
    let config = config(
        F_MRG_RXBUF | F_INDIRECT | F_EVENT_IDX | F_HOST_ALL | ring,
        entries,
    );
    let veth = VethPair::new();
    veth.carry_no_gso_packets();
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    let daemon = Daemon::start(&veth.near, &serve);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut guest = Driver::connect(&daemon.socket(), &config).expect("accepted");
    let pair = &mut guest.pairs[0];
    pair.post(usize::from(entries.min(64)), &[2048]);
    let gso_packet = GsoPacket::tcp(Ip::V4(0), 40_000);
    for round in 0..5 {
        let (there, back) = (frame::plain(60, round), frame::plain(1514, round));
        pair.send(&there, Layout::Whole);
        frame::assert_same(&wire.receive(wait::SOON).expect("sent"), &there);
        wire.send(&back);
        frame::assert_same(&pair.receive(wait::SOON).expect("received").frame, &back);
        let header = [&gso_packet.request(1000)[..], &[0; 2]].concat();
        let asking = header.try_into().expect("twelve bytes");
        pair.send_asking(&[(asking, &gso_packet.bytes())], Layout::Indirect(60_000));
        (0..40).for_each(|_| drop(wire.receive(wait::SOON).expect("a segment")));
    }
    pair.await_sent();
}
