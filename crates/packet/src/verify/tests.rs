use etherparse::PacketBuilder;

use super::*;
use crate::layers::parse;

fn look(frame: &[u8], partial: bool) -> Verdict {
    let layers = parse(frame, frame.len() as u32).expect("TCP or UDP");
    let transport = &frame[usize::from(layers.transport)..layers.ip_len_end as usize];
    verify(frame, &layers, partial, || Sum::of(transport))
}

fn udp(payload: &[u8]) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .udp(7, 9);
    let mut frame = Vec::new();
    builder.write(&mut frame, payload).expect("memory");
    frame
}

fn tcp6(payload: &[u8]) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv6([1; 16], [2; 16], 64)
        .tcp(7, 9, 1, 2);
    let mut frame = Vec::new();
    builder.write(&mut frame, payload).expect("memory");
    frame
}

/// With the pseudo-header's sum in its checksum field.
fn partial(mut frame: Vec<u8>) -> Vec<u8> {
    let layers = parse(&frame, frame.len() as u32).expect("TCP or UDP");
    let at = usize::from(layers.transport + layers.transport_kind.checksum_offset());
    let sum = pseudo(&frame, &layers).fold();
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

#[test]
fn right_checksum_is_valid_and_every_flipped_bit_is_not() {
    for frame in [udp(b"hello"), udp(b"hell"), tcp6(b"hello"), tcp6(&[0x55; 1000])] {
        assert_eq!(look(&frame, true), Verdict::Valid);
        for at in frame.len() - 12..frame.len() {
            for bit in 0..8 {
                let mut flipped = frame.clone();
                flipped[at] ^= 1 << bit;
                assert_eq!(look(&flipped, true), Verdict::Unknown, "byte {at} bit {bit}");
            }
        }
    }
}

#[test]
fn partial_checksum_is_one_only_where_they_occur() {
    for frame in [partial(udp(b"hello")), partial(tcp6(b"hello"))] {
        assert_eq!(
            (look(&frame, true), look(&frame, false)),
            (Verdict::Partial, Verdict::Unknown)
        );
        let layers = parse(&frame, frame.len() as u32).expect("TCP or UDP");
        assert_eq!(is_partial(&frame, &layers), Verdict::Partial);
    }
    let whole = udp(b"hello");
    let layers = parse(&whole, whole.len() as u32).expect("UDP");
    assert_eq!(is_partial(&whole, &layers), Verdict::Unknown);
}

#[test]
fn datagram_without_a_checksum_or_with_another_length_is_unknown() {
    let mut none = udp(b"hello");
    none[40..42].fill(0);
    assert_eq!(look(&none, true), Verdict::Unknown);
    let mut shorter = udp(b"hello");
    shorter[38..40].copy_from_slice(&10u16.to_be_bytes());
    assert_eq!(look(&shorter, true), Verdict::Unknown);
    let mut shorter = partial(udp(b"hello"));
    shorter[38..40].copy_from_slice(&10u16.to_be_bytes());
    let layers = parse(&shorter, shorter.len() as u32).expect("UDP");
    assert_eq!(is_partial(&shorter, &layers), Verdict::Unknown);
}

#[test]
fn padding_behind_the_packet_is_no_part_of_it() {
    let mut frame = udp(b"hello");
    frame.extend([0xaa; 13]);
    assert_eq!(look(&frame, true), Verdict::Valid);
    let mut frame = partial(udp(b"hello"));
    frame.extend([0xaa; 13]);
    assert_eq!(look(&frame, true), Verdict::Partial);
}

#[test]
fn zero_is_the_other_form_of_all_ones() {
    for is_udp in [false, true] {
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 0], 64);
        let mut frame = Vec::new();
        let written = match is_udp {
            false => builder.tcp(7, 9, 1, 2).write(&mut frame, b"hello"),
            true => builder.udp(7, 9).write(&mut frame, b"hello"),
        };
        written.expect("memory");
        let layers = parse(&frame, frame.len() as u32).expect("TCP or UDP");
        let is_partial_with = |frame: &mut [u8], field: u16| {
            let at = layers.checksum_at().field();
            frame[at..at + 2].copy_from_slice(&field.to_be_bytes());
            is_partial(frame, &layers) == Verdict::Partial
        };
        assert!(!is_partial_with(&mut frame, 0));
        // The end of the destination address makes the sum all ones.
        let missing = 0xffff - pseudo(&frame, &layers).fold();
        frame[32..34].copy_from_slice(&missing.to_be_bytes());
        let found = [0xffff, 0, 0xfffe, 1].map(|field| is_partial_with(&mut frame, field));
        // A datagram with 0 has no checksum.
        assert_eq!(found, [true, !is_udp, false, false], "{is_udp}");
    }
}
