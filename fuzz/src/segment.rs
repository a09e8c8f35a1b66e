//! Segmentation: any virtio-net header over any GSO packet.
//!
//! Invariants: a plan covers the payload once and in order, with no more segments than bytes; each segment has the
//! layers of the GSO packet, lengths that are its own, a good IPv4 header checksum, a partial checksum that differs
//! from the GSO packet's by the difference of lengths; the headers of all but the first, or the last, differ from
//! the GSO packet's only where the rules say so.

use packet::HEADERS_MAX;
use packet::checksum::{ChecksumAt, Sum, complete};
use packet::layers::{Ip, Layers, Transport, parse};
use packet::segment::{Plan, Request};

#[derive(arbitrary::Arbitrary, Debug)]
struct Input<'a> {
    header: [u8; 10],
    /// Bytes behind those of `frame`; length fields are then made to fit.
    more: u16,
    frame: &'a [u8],
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let mut frame = input.frame.to_vec();
    lengthen(&mut frame, input.more);
    let Ok(request) = Request::from_header(&input.header) else {
        return;
    };
    if let Some(at) = request.csum {
        check_complete(&frame, at);
    }
    let Some(gso) = request.gso else { return };
    let headers = &frame[..frame.len().min(HEADERS_MAX)];
    let Ok(plan) = Plan::new(headers, frame.len() as u32, gso) else {
        return;
    };
    let layers = parse(headers, frame.len() as u32).expect("was planned");
    assert_eq!(plan.header_len(), usize::from(layers.payload));
    let mut at = u32::from(layers.payload);
    for index in 0..plan.segments() {
        let payload = plan.payload(index);
        assert_eq!(payload.start, at, "segment {index}");
        assert!(payload.end - payload.start <= u32::from(gso.size));
        assert!(payload.end > payload.start || plan.segments() == 1);
        at = payload.end;
        // All of many have the same code behind them.
        if index < 64 || index + 2 > plan.segments() {
            check_segment(&plan, index, &frame, &layers);
        }
    }
    assert_eq!(at as usize, frame.len());
}

fn lengthen(frame: &mut Vec<u8>, more: u16) {
    let Some(layers) = parse(frame, frame.len() as u32) else {
        return;
    };
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    let len = (frame.len() + usize::from(more)).min(ip + usize::from(u16::MAX));
    frame.resize(len.max(frame.len()), 0x5a);
    let len = frame.len();
    match layers.version {
        Ip::V4 => put(frame, ip + 2, len - ip),
        Ip::V6 => put(frame, ip + 4, len - ip - 40),
    }
    if layers.transport_kind == Transport::Udp {
        put(frame, transport + 4, len - transport);
    }
}

fn check_complete(frame: &[u8], at: ChecksumAt) {
    let ChecksumAt { start, offset } = at;
    let mut completed = frame.to_vec();
    let field = usize::from(start) + usize::from(offset);
    if complete(&mut completed, at).is_err() {
        assert!(field + 2 > frame.len());
        assert_eq!(completed, frame);
        return;
    }
    assert_eq!(completed[..field], frame[..field]);
    assert_eq!(completed[field + 2..], frame[field + 2..]);
}

fn check_segment(plan: &Plan, index: u32, frame: &[u8], layers: &Layers) {
    let payload = plan.payload(index);
    let mut segment = vec![0xa5; plan.header_len()];
    plan.write_header(index, &mut segment);
    let header = segment.clone();
    segment.extend(&frame[payload.start as usize..payload.end as usize]);
    let len = segment.len() as u32;
    assert!(len <= plan.segment_bytes_max());
    let ip_len_end = len;
    assert_eq!(
        parse(&segment, len),
        Some(Layers {
            ip_len_end,
            ..*layers
        })
    );

    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    let at = plan.checksum_at();
    let field = usize::from(at.start + at.offset);
    let partial =
        |bytes: &[u8], len: usize| Sum::default().add_word(word(bytes, field)).add_u32(!(len as u32));
    let without_len = partial(&header, segment.len() - transport).fold() % 0xffff;
    assert_eq!(
        without_len,
        partial(frame, frame.len() - transport).fold() % 0xffff
    );

    // What may differ, made equal: all else is the GSO packet's.
    let mut wanted = frame[..header.len()].to_vec();
    let mut same = |range: std::ops::Range<usize>| wanted[range.clone()].copy_from_slice(&header[range]);
    same(field..field + 2);
    if layers.version == Ip::V4 {
        assert_eq!(Sum::of(&header[ip..transport]).fold(), 0xffff);
        let id = word(frame, ip + 4).wrapping_add(index as u16);
        assert_eq!(word(&header, ip + 4), id);
        same(ip + 2..ip + 6);
        same(ip + 10..ip + 12);
    } else {
        same(ip + 4..ip + 6);
    }
    if layers.transport_kind == Transport::Udp {
        assert_eq!(
            usize::from(word(&header, transport + 4)),
            segment.len() - transport
        );
        same(transport + 4..transport + 6);
    } else {
        let advance = payload.start - u32::from(layers.payload);
        assert_eq!(
            sequence(&header, transport),
            sequence(frame, transport).wrapping_add(advance)
        );
        same(transport + 4..transport + 8);
        let flags = &mut wanted[transport + 13];
        *flags &= if index == 0 { 0xff } else { !0x80 };
        *flags &= if index + 1 == plan.segments() { 0xff } else { !0x09 };
    }
    assert_eq!(header, wanted);
    complete(&mut segment, at).expect("in the header");
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn sequence(bytes: &[u8], transport: usize) -> u32 {
    u32::from(word(bytes, transport + 4)) << 16 | u32::from(word(bytes, transport + 6))
}

fn put(bytes: &mut [u8], at: usize, value: usize) {
    bytes[at..at + 2].copy_from_slice(&(value as u16).to_be_bytes());
}
