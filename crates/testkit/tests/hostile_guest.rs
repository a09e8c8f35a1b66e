//! What a guest's driver may do with frames that are valid, and made to cost as much as they can. Queues of any size are
//! tested in crate `dataplane` (`tests/request_tests.rs`).

use rstest::rstest;
use testkit::any_frame::{any_frame, any_header};
use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_HOST_ALL, F_RING_PACKED};
use testkit::{Daemon, Driver, DriverConfig, Layout, Noise, PacketPort, Serve, VethPair, frame, require};
use virtqueue::GuestAddr;

const MIB: u64 = 1 << 20;

#[rstest]
#[case::copied(Mode::Native, 1500, Placement::Copy, F_HOST_ALL)]
#[case::direct(Mode::Native, 1500, Placement::Direct, F_HOST_ALL | F_RING_PACKED)]
#[case::sent_direct(Mode::Native, 1500, Placement::SendDirect, F_RING_PACKED)]
#[case::skb(Mode::Skb, 1500, Placement::Copy, F_HOST_ALL)]
#[case::skb(Mode::Skb, 1500, Placement::Direct, F_HOST_ALL)]
#[case::in_pieces(Mode::Native, 9000, Placement::Copy, F_HOST_ALL)]
#[case::in_pieces_in_skb_mode(Mode::Skb, 9000, Placement::Copy, F_HOST_ALL)]
#[case::longest(Mode::Native, 65_535, Placement::Copy, F_HOST_ALL)]
#[case::longest(Mode::Native, 3822, Placement::Direct, F_HOST_ALL)]
fn frames_of_any_kind_with_any_request_leave_a_queue_that_sends(
    #[case] mode: Mode,
    #[case] mtu: u32,
    #[case] placement: Placement,
    #[case] features: u64,
) {
    require!(Root);
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 16 * MIB), (GuestAddr(1 << 32), 16 * MIB)],
        ..DriverConfig::with(features)
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
