//! Packets that are to be cut into very many frames.

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::gso_packet::Ip;
use testkit::{Bystander, Driver, DriverConfig, GsoPacket, Layout, require, soak, wait};

fn header(request: [u8; 10]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..10].copy_from_slice(&request);
    header
}

#[rstest]
#[case::of_tcp(GsoPacket::tcp(Ip::V4(0), 65_000))]
#[case::of_tcp_over_ipv6(GsoPacket::tcp(Ip::V6(vec![]), 65_000))]
#[case::of_udp(GsoPacket::udp(Ip::V4(0), 65_000))]
fn packets_of_64_kib_in_segments_of_one_byte_hold_up_nobody_else(#[case] packet: GsoPacket) {
    require!(Root);
    let scene = Bystander::with(Placement::Copy, 1, |serve| serve.offload("all"));
    let config = DriverConfig::with(F_HOST_ALL);
    let mut guest = Driver::connect(&scene.socket(1), &config).expect("accepted");
    let (header, bytes) = (header(packet.request(1)), packet.bytes());
    let pair = &mut guest.pairs[0];
    // Each packet is 65,000 frames.
    let mut packets = soak::count(2, 320);
    while packets > 0 {
        let burst = packets.min(8);
        pair.send_asking(&vec![(header, &bytes[..]); burst], Layout::Whole);
        pair.reap_sent();
        packets -= burst;
    }
    scene.await_frames(100);
    // They come to an end, one way or the other, and one after the other.
    loop {
        let left = pair.from_guest.driver.in_flight();
        if left == 0 {
            break;
        }
        let goes_on = wait::until(6 * wait::SOON, || {
            pair.reap_sent();
            pair.from_guest.driver.in_flight() < left
        });
        assert!(goes_on, "{left} packets stay with the daemon");
    }
    drop(guest);
    scene.assert_unharmed();
}
