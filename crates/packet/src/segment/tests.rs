//! Tests of requests, and of packets that are refused. Segments are compared with etherparse in
//! `tests/segment_properties.rs`, and with the kernel in testkit's `tests/offload_kernel.rs`.

use super::{Gso, GsoKind, Malformed, Plan, Request};
use crate::checksum::ChecksumAt;
use crate::layers::{Ip, Transport};

fn header(flags: u8, gso_type: u8, size: u16) -> [u8; 10] {
    let [low, high] = size.to_le_bytes();
    [flags, gso_type, 0xff, 0xff, low, high, 34, 0, 16, 0]
}

/// Ethernet, IPv4, TCP or UDP, 3000 bytes.
fn frame(protocol: u8) -> Vec<u8> {
    let mut frame = vec![0; 14 + 20 + 20 + 3000];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&3040u16.to_be_bytes());
    frame[23] = protocol;
    frame[46] = 0x50;
    frame[38..40].copy_from_slice(&3020u16.to_be_bytes());
    frame
}

fn plan(frame: &[u8], kind: GsoKind, size: u16) -> Result<Plan, Malformed> {
    Plan::new(
        frame,
        frame.len() as u32,
        Gso {
            kind,
            ecn: false,
            size,
        },
    )
}

#[test]
fn requests_are_read() {
    let none = Request::from_header(&header(0, 0, 1460));
    assert_eq!(none, Ok(Request::default()));
    let csum = Request::from_header(&header(0xff, 0, 0)).unwrap();
    assert_eq!(
        csum,
        Request {
            csum: Some(ChecksumAt {
                start: 34,
                offset: 16
            }),
            gso: None
        }
    );
    for (gso_type, kind, ecn) in [
        (1, GsoKind::Tcp4, false),
        (4, GsoKind::Tcp6, false),
        (5, GsoKind::Udp, false),
        (0x81, GsoKind::Tcp4, true),
        (0x84, GsoKind::Tcp6, true),
    ] {
        let request = Request::from_header(&header(1, gso_type, 1460)).unwrap();
        assert_eq!(
            request.gso,
            Some(Gso {
                kind,
                ecn,
                size: 1460
            })
        );
    }
}

#[test]
fn bad_requests_are_refused() {
    for gso_type in [2, 3, 6, 0x21, 0x41, 0x80, 0x83, 0xff] {
        assert_eq!(
            Request::from_header(&header(1, gso_type, 1460)),
            Err(Malformed::GsoType(gso_type))
        );
    }
    assert_eq!(
        Request::from_header(&header(1, 0x85, 1460)),
        Err(Malformed::EcnWithoutTcp(0x85))
    );
    assert_eq!(
        Request::from_header(&header(1, 1, 0)),
        Err(Malformed::SegmentSize(0))
    );
    assert_eq!(
        Request::from_header(&header(0, 1, 1460)),
        Err(Malformed::GsoWithoutChecksum)
    );
}

#[test]
fn other_protocol_than_asked_is_refused() {
    let (version, tcp, udp) = (Ip::V4, frame(6), frame(17));
    for (frame, transport, asked) in [
        (&tcp, Transport::Tcp, GsoKind::Tcp6),
        (&tcp, Transport::Tcp, GsoKind::Udp),
        (&udp, Transport::Udp, GsoKind::Tcp4),
    ] {
        let refused = plan(frame, asked, 1460).unwrap_err();
        assert_eq!(
            refused,
            Malformed::Protocol {
                asked,
                version,
                transport
            }
        );
    }
    assert_eq!(
        plan(&tcp[..50], GsoKind::Tcp4, 1460).unwrap_err(),
        Malformed::Headers(50)
    );
}

#[test]
fn lengths_that_lie_are_refused() {
    let mut padded = frame(6);
    padded.push(0);
    let refused = plan(&padded, GsoKind::Tcp4, 1460).unwrap_err();
    assert_eq!(
        refused,
        Malformed::Length {
            claimed: 3054,
            frame_len: 3055
        }
    );
    let mut udp = frame(17);
    udp[39] -= 1;
    let refused = plan(&udp, GsoKind::Udp, 1460).unwrap_err();
    assert_eq!(
        refused,
        Malformed::Length {
            claimed: 3053,
            frame_len: 3054
        }
    );
}

#[test]
fn no_longer_than_a_segment_is_one_segment() {
    let frame = frame(6);
    for (size, segments, longest) in [
        (2999, 2, 3053),
        (3000, 1, 3054),
        (3001, 1, 3054),
        (u16::MAX, 1, 3054),
        (1, 3000, 55),
    ] {
        let plan = plan(&frame, GsoKind::Tcp4, size).unwrap();
        assert_eq!(
            (plan.segments(), plan.segment_bytes_max()),
            (segments, longest),
            "{size}"
        );
    }
    let empty = {
        let mut frame = frame[..54].to_vec();
        frame[16..18].copy_from_slice(&40u16.to_be_bytes());
        frame
    };
    let plan = plan(&empty, GsoKind::Tcp4, 1460).unwrap();
    assert_eq!((plan.segments(), plan.payload(0)), (1, 54..54));
}
