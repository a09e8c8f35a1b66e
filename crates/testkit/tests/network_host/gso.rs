//! GSO packets between the host and guests pass whole.

use rstest::rstest;
use testkit::driver::{F_GUEST_ALL, F_HOST_ALL};
use testkit::gso_packet::{GsoPacket, Ip, header, heard};
use testkit::{Layout, PacketPort, Serve, VethPair, kernel, require, wait};

use super::{HOST, Lan, file, mac};

#[rstest]
fn gso_packets_pass_whole_both_ways(
    #[values(1, 2)] workers: usize,
    #[values(&[], &[0x81, 0, 0, 100])] tag: &[u8],
) {
    require!(Root);
    let keys = if tag.is_empty() { "" } else { "trunk = \"100\"" };
    let text = format!("[daemon]\nworkers = {workers}\n{}", file("", &[keys, keys]));
    let mut lan = Lan::with(&Serve::file(), &text, &[F_HOST_ALL | F_GUEST_ALL; 2]);
    let ear = PacketPort::open_to_read_with_header(&lan.veth.near, VethPair::NIC);
    let mouth = PacketPort::open_with_header(&lan.veth.near, VethPair::NIC);
    // UDP packets that are to be cut pass whole since Linux 6.2.
    let udp = (kernel::version() >= (6, 2)).then(|| GsoPacket::udp(Ip::V4(0), 40_000));
    let kinds = [
        GsoPacket::tcp(Ip::V4(0), 60_000),
        GsoPacket::tcp(Ip::V6(Vec::new()), 30_001),
    ];
    for packet in kinds.into_iter().chain(udp) {
        // In so many pieces that they are not written from where they lie, too.
        for (guest, piece) in [(0, 9000), (1, 9000), (0, 1000), (1, 1000)] {
            let (frame, request) = packet.between(HOST, mac(guest), tag, 1000);
            lan.guests[guest].pairs[0].send_asking(&[(header(request), &frame)], Layout::Pieces(piece));
            let (got, asked) = heard(&ear, mac(guest));
            assert_eq!(got.len(), frame.len(), "guest {guest}: whole");
            assert_eq!(got, frame);
            // Kind, and bytes of a segment.
            assert_eq!((asked[1], &asked[4..6]), (request[1], &request[4..6]));

            let (frame, request) = packet.between(mac(guest), HOST, tag, 1000);
            mouth.send(&[&request[..], &frame].concat());
            let got = lan.guests[guest].pairs[0].receive(wait::SOON).expect("it comes");
            assert_eq!(got.frame.len(), frame.len(), "guest {guest}: whole");
            assert_eq!(got.frame, frame);
            assert_eq!((got.header[1], &got.header[4..6]), (request[1], &request[4..6]));
        }
    }
}
