//! Frames to test with. All bytes are determined by length and seed, so two that should differ do.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU32, Ordering};

/// Destination of all test frames: nobody's, so no stack answers.
pub const TO: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0b];
/// Source of all test frames.
pub const FROM: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0a];
/// An EtherType for local experiments (IEEE 802, 0x88B5): no stack looks inside.
pub const EXPERIMENTAL: u16 = 0x88b5;
/// Bytes of an Ethernet header.
pub const HEADER: usize = 14;

/// A frame of `len` bytes, header included; a shorter one than a header is the beginning of one.
pub fn plain(len: usize, seed: u8) -> Vec<u8> {
    let header = [&TO[..], &FROM, &EXPERIMENTAL.to_be_bytes()].concat();
    filled(header, len, seed)
}

/// A frame of `len` bytes with an 802.1Q tag for `vlan`.
pub fn tagged(len: usize, vlan: u16, seed: u8) -> Vec<u8> {
    let tag = [0x8100u16.to_be_bytes(), vlan.to_be_bytes()].concat();
    let header = [&TO[..], &FROM, &tag, &EXPERIMENTAL.to_be_bytes()].concat();
    filled(header, len, seed)
}

/// Bytes of a numbered frame.
pub const NUMBERED: usize = 64;

/// A frame that carries a number.
pub fn numbered(number: u32) -> Vec<u8> {
    let mut frame = plain(NUMBERED, 0x33);
    frame[HEADER..HEADER + 4].copy_from_slice(&number.to_be_bytes());
    frame
}

/// A frame like no other: the last one of what a test sends, behind which nothing is under way.
pub fn last() -> Vec<u8> {
    static SERIAL: AtomicU32 = AtomicU32::new(u32::MAX);
    // Only a number; nothing is published with it.
    numbered(SERIAL.fetch_sub(1, Ordering::Relaxed))
}

/// A frame as one sends it back who swaps its addresses.
pub fn swapped(frame: &[u8]) -> Vec<u8> {
    [&frame[6..12], &frame[..6], &frame[12..]].concat()
}

/// The number of a frame; `None` if it is no [`numbered`] one.
pub fn number_of(frame: &[u8]) -> Option<u32> {
    let number = u32::from_be_bytes(frame.get(HEADER..HEADER + 4)?.try_into().ok()?);
    (frame == numbered(number)).then_some(number)
}

/// A UDP datagram over IPv4 in a frame of `len` bytes; `flow` is its source port, so that NICs with several queues tell
/// flows apart. Its sums are zero: nobody looks at them.
pub fn udp(flow: u16, len: usize) -> Vec<u8> {
    let word = |value: usize| u16::try_from(value).expect("short").to_be_bytes();
    let payload = len.saturating_sub(HEADER);
    let ip = [
        &[0x45, 0][..],
        &word(payload),
        &[0; 4],
        &[64, 17, 0, 0],
        &[10, 9, 0, 1],
        &[10, 9, 0, 2],
    ]
    .concat();
    let udp = [
        flow.to_be_bytes(),
        word(9),
        word(payload.saturating_sub(ip.len())),
        [0; 2],
    ]
    .concat();
    let header = [&TO[..], &FROM, &0x0800u16.to_be_bytes(), &ip, &udp].concat();
    filled(header, len, flow as u8)
}

/// The same from an address of its own for each `flow`, for NICs whose hash is Toeplitz's, with a key that is made at
/// boot. Of a flow's bits each adds its own part of the key to that hash: flows that differ in six bits, as 32 source
/// ports in a row do, come to one of two queues, all of them, with one key of 64. Here they differ in 24.
pub fn udp_from_afar(flow: u16, len: usize) -> Vec<u8> {
    let mut frame = udp(flow, len);
    let [_, address @ ..] = u32::from(flow).wrapping_mul(0x9e37_79b1).to_be_bytes();
    frame[HEADER + 13..HEADER + 16].copy_from_slice(&address);
    frame
}

/// The same, a datagram like no other.
pub fn udp_once(flow: u16, len: usize) -> Vec<u8> {
    let mut frame = udp(flow, len);
    // Behind the headers.
    frame[42..46].copy_from_slice(&last()[HEADER..HEADER + 4]);
    frame
}

/// An IPv4 packet without options.
///
/// # Panics
/// If it is too long.
pub fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(20 + payload.len()).expect("short").to_be_bytes();
    let head = [&[0x45, 0][..], &len, &[0, 1, 0, 0, 64, protocol, 0, 0]].concat();
    [&head[..], &from.octets(), &to.octets(), payload].concat()
}

/// An IPv6 packet whose header names what comes next.
///
/// # Panics
/// If it is too long.
pub fn ipv6(from: Ipv6Addr, to: Ipv6Addr, next: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(payload.len()).expect("short").to_be_bytes();
    let head = [&[0x60, 0, 0, 0][..], &len, &[next, 255]].concat();
    [&head[..], &from.octets(), &to.octets(), payload].concat()
}

/// A UDP datagram between these ports, of twelve bytes; without a checksum.
pub fn udp_ports([from, to]: [u16; 2]) -> Vec<u8> {
    let head = [from.to_be_bytes(), to.to_be_bytes(), [0, 20], [0, 0]].concat();
    [&head[..], &[0x5a; 12]].concat()
}

/// A frame of a VXLAN tunnel to this address and UDP port 4789, with another frame in it.
///
/// # Panics
/// If it is too long.
pub fn vxlan(local: IpAddr, vni: u32, inner: &[u8]) -> Vec<u8> {
    in_tunnel((4789, [8, 0, 0, 0]), local, vni, inner)
}

/// The same of Geneve.
///
/// # Panics
/// As [`vxlan`].
pub fn geneve(local: IpAddr, vni: u32, inner: &[u8]) -> Vec<u8> {
    in_tunnel((6081, [0, 0, 0x65, 0x58]), local, vni, inner)
}

/// `tunnel`: UDP port, and the first bytes of the header.
fn in_tunnel((port, start): (u16, [u8; 4]), local: IpAddr, vni: u32, inner: &[u8]) -> Vec<u8> {
    let header = [&start[..], &(vni << 8).to_be_bytes(), inner].concat();
    let len = u16::try_from(8 + header.len()).expect("short").to_be_bytes();
    let ports = [50_000u16, port].map(u16::to_be_bytes).concat();
    let udp = [&ports[..], &len, &[0, 0], &header].concat();
    let (kind, ip) = match local {
        IpAddr::V4(to) => ([8, 0], ipv4(Ipv4Addr::new(10, 9, 0, 2), to, 17, &udp)),
        IpAddr::V6(to) => ([0x86, 0xdd], ipv6(Ipv6Addr::LOCALHOST, to, 17, &udp)),
    };
    let mut frame = [&TO[..], &FROM, &kind, &ip].concat();
    if local.is_ipv4() {
        sum_ipv4(&mut frame);
    }
    frame
}

/// Computes the checksum of an IPv4 header without options again.
///
/// # Panics
/// If the frame is too short.
pub fn sum_ipv4(frame: &mut [u8]) {
    let header = &mut frame[HEADER..HEADER + 20];
    header[10..12].fill(0);
    let words = header
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn filled(mut header: Vec<u8>, len: usize, seed: u8) -> Vec<u8> {
    let payload = len.saturating_sub(header.len());
    header.extend((0..payload).map(|i| {
        (i as u8)
            .wrapping_mul(31)
            .wrapping_add((i >> 8) as u8)
            .wrapping_add(seed)
    }));
    header.truncate(len);
    header
}

/// Panics, with the first difference, unless both are the same.
///
/// # Panics
/// See there.
#[track_caller]
pub fn assert_same(got: &[u8], sent: &[u8]) {
    let at = got.iter().zip(sent).position(|(a, b)| a != b);
    let around = |bytes: &[u8], at: usize| {
        format!(
            "{:02x?}",
            &bytes[at.saturating_sub(4)..(at + 12).min(bytes.len())]
        )
    };
    if let Some(at) = at {
        panic!(
            "byte {at} differs: got …{}…, sent …{}…",
            around(got, at),
            around(sent, at)
        );
    }
    assert_eq!(got.len(), sent.len(), "lengths differ");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_length_asked_for() {
        for len in [0, 1, 13, 14, 60, 1514] {
            assert_eq!((plain(len, 1).len(), tagged(len, 5, 1).len()), (len, len));
        }
        assert_ne!(plain(60, 1), plain(60, 2));
    }
}
