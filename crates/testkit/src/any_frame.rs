//! Frames of any kind, sound and spoiled ones, with anything that a driver may ask to be done with them.

use crate::gso_packet::Ip;
use crate::{GsoPacket, Noise};

/// A frame of any kind: whole packets, spoiled ones, ones cut off, with more behind.
pub fn any_frame(noise: &mut Noise) -> Vec<u8> {
    let extensions = || {
        [
            0, 43, 60, 60, 0, 43, 44, 51, 0, 60, 0, 60, 0, 60, 0, 60, 0, 60, 0, 60, 0,
        ]
    };
    let ip = match noise.index(5) {
        0 => Ip::V4(noise.one(&[1, 10])),
        1 => Ip::V6(vec![]),
        2 => Ip::V6(extensions()[..noise.index(22)].to_vec()),
        _ => Ip::V4(0),
    };
    let payload_len = noise.one(&[
        0, 1, 2, 3, 5, 47, 100, 1000, 1400, 1446, 1460, 3000, 20_001, 65_400,
    ]);
    let mut frame = GsoPacket {
        tags: noise.index(3),
        ..match noise.index(3) {
            0 => GsoPacket::udp(ip, payload_len),
            _ => GsoPacket::tcp(ip, payload_len),
        }
    }
    .bytes();
    if noise.index(6) == 0 {
        // Another type: ARP, VLAN without an end, MPLS, PPPoE, a length, something.
        let kind: u16 = noise.one(&[0x0806, 0x8100, 0x88a8, 0x8847, 0x8864, 100, 0xffff]);
        frame[12..14].copy_from_slice(&kind.to_be_bytes());
    }
    for _ in 0..noise.one(&[0, 0, 0, 1, 1, 3]) {
        let (at, any) = (noise.index(frame.len().min(120)), noise.index(256) as u8);
        frame[at] = noise.one(&[0, 1, 0x0f, 0x7f, 0x80, 0xff, any]);
    }
    match noise.index(5) {
        0 => frame.truncate(noise.index(frame.len() + 1)),
        1 => frame.truncate(noise.index(61)),
        2 => frame.resize(frame.len() + noise.one(&[1, 6, 46, 1518]), 0xee),
        _ => {}
    }
    frame
}

/// What the driver asks to be done with it: right, or nearly, or anything.
pub fn any_header(noise: &mut Noise, frame: &[u8]) -> [u8; 12] {
    let len = frame.len();
    let mut header = [0; 12];
    header[0] = noise.one(&[0, 1, 1, 1, 1, 2, 4, 0xff]);
    header[1] = noise.one(&[0, 0, 1, 1, 4, 5, 0x81, 0x84, 0x85, 2, 3, 0x80, 0xff]);
    let words = [
        noise.one(&[0, 14, 54, 66, len, 0xffff]),
        noise.one(&[0, 1, 8, 48, 536, 1000, 1446, 1460, 1461, 0x7fff, 0xffff]),
        noise.one(&[
            0,
            13,
            14,
            34,
            34,
            38,
            42,
            54,
            54,
            len.wrapping_sub(2),
            len.wrapping_sub(1),
            len,
            0xffff,
        ]),
        noise.one(&[0, 1, 6, 6, 16, 16, 16, len, 0xffff]),
        noise.one(&[0, 1, 2, 0xffff]),
    ];
    for (place, word) in header[2..].chunks_exact_mut(2).zip(words) {
        place.copy_from_slice(&(word as u16).to_le_bytes());
    }
    header
}

/// A frame and its virtio-net header: nearly right, or random.
pub fn any_request(noise: &mut Noise) -> (Vec<u8>, [u8; 12]) {
    match noise.index(2) {
        0 => nearly_right(noise),
        _ => {
            let frame = any_frame(noise);
            let header = any_header(noise, &frame);
            (frame, header)
        }
    }
}

/// A GSO packet with sound headers, and what it asks for.
pub fn nearly_right(noise: &mut Noise) -> (Vec<u8>, [u8; 12]) {
    let payload = noise.one(&[0, 1, 100, 2000, 2048, 20_001, 64_000]);
    let ip = match noise.index(2) {
        0 => Ip::V4(0),
        _ => Ip::V6(vec![]),
    };
    let packet = match noise.index(3) {
        0 => GsoPacket::udp(ip, payload),
        _ => GsoPacket::tcp(ip, payload),
    };
    let frame = packet.bytes();
    let mut header = [0; 12];
    header[..10].copy_from_slice(&packet.request(noise.one(&[0, 1, 48, 1000, 1448, 9000, 65_535])));
    let right = packet.header_len();
    // How long they are is a hint (VirtIO 1.3, 5.1.6.2).
    let said = noise.one(&[right, right, 0, 14, frame.len(), 65_535]) as u16;
    header[2..4].copy_from_slice(&said.to_le_bytes());
    (frame, header)
}
