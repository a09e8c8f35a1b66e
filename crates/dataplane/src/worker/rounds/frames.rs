//! Frames for the rounds: those that guests send, and those that the null NIC receives.

use packet::checksum::{self, ChecksumAt};
use xsk::metadata::{Field, Layout};

use super::{Frames, Path};

/// Bytes of Ethernet, IPv4 and TCP headers.
pub(super) const TCP_HEADERS: u32 = 54;
/// Payload of a TCP segment, bytes: a frame of 1514.
const SEGMENT: u16 = 1460;
/// The layout's identifier, the last field of the hints before a frame.
const HINTS_ID: u32 = 7;

/// The MAC address of a guest.
pub(super) fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, number]
}

/// A chain of a guest: a virtio-net header, and a frame of `bytes` to the other guest.
pub(super) fn from_guest(frames: Frames, from: u8, bytes: u32) -> Vec<u8> {
    let [low, high] = SEGMENT.to_le_bytes();
    match frames {
        // VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4
        Frames::Gso => {
            let header = [1, 1, TCP_HEADERS as u8, 0, low, high, 34, 0, 16, 0, 0, 0];
            [&header[..], &tcp(from, bytes, 0)].concat()
        }
        _ => [&[0; 12][..], &udp(from, bytes)].concat(),
    }
}

/// The `number`th frame that the null NIC receives, and the length of the metadata before it.
pub(super) fn to_guest(path: Path, number: u32) -> (Vec<u8>, u32) {
    let bytes = path.frame_bytes;
    let frame = match path.frames {
        Frames::Gro => {
            let mut frame = tcp(1, bytes, number * (bytes - TCP_HEADERS));
            checksum::complete(&mut frame[34..], ChecksumAt { start: 0, offset: 16 }).expect("inside");
            frame
        }
        _ => udp(1, bytes),
    };
    let before = match path.frames {
        _ if path.network => [0, steer::note_layout().id()].map(u32::to_ne_bytes).concat(),
        Frames::Hints => hints(0),
        Frames::Tag => hints(0x8100),
        Frames::Plain | Frames::Gso | Frames::Gro => Vec::new(),
    };
    ([&before[..], &frame].concat(), before.len() as u32)
}

/// The layout of hints before a frame.
pub(super) fn layout() -> Layout {
    let fields = [
        (Field::Timestamp, 0),
        (Field::Hash, 8),
        (Field::Mark, 12),
        (Field::HashType, 16),
        (Field::VlanProto, 18),
        (Field::VlanTci, 20),
    ];
    Layout::new(HINTS_ID, 28, &fields).expect("a good one")
}

/// Hints in the form of [`layout`]. `tag`: type of the VLAN tag that the NIC removed; 0: none.
fn hints(tag: u16) -> Vec<u8> {
    let (timestamp, hash, mark) = (1_u64.to_ne_bytes(), 2_u32.to_ne_bytes(), 3_u32.to_ne_bytes());
    // XDP_RSS_L4; the tag of VLAN 100; two unused bytes.
    let (kind, tci) = (8_u16.to_ne_bytes(), 100_u16.to_ne_bytes());
    let id = HINTS_ID.to_ne_bytes();
    [
        &timestamp[..],
        &hash,
        &mark,
        &kind,
        &tag.to_be_bytes(),
        &tci,
        &[0; 2],
        &id,
    ]
    .concat()
}

/// A UDP datagram over IPv4 to the other guest, followed by zeros.
fn udp(from: u8, bytes: u32) -> Vec<u8> {
    let mut frame = ipv4(from, bytes);
    frame[16..18].copy_from_slice(&[0, 46]);
    frame[22..24].copy_from_slice(&[64, 17]);
    frame[34..40].copy_from_slice(&[0, 9, 0, 9, 0, 26]);
    let pseudo = checksum::pseudo_v4(address(from), address(1 - from), 17, 26);
    frame[40..42].copy_from_slice(&pseudo.fold().to_be_bytes());
    checksum::complete(&mut frame[34..60], ChecksumAt { start: 0, offset: 6 }).expect("inside");
    frame
}

/// A TCP segment over IPv4 to the other guest; its checksum is that of the pseudo-header only.
fn tcp(from: u8, bytes: u32, sequence: u32) -> Vec<u8> {
    let mut frame = ipv4(from, bytes);
    let ip_bytes = bytes as u16 - 14;
    frame[16..18].copy_from_slice(&ip_bytes.to_be_bytes());
    // DF: may not be fragmented.
    frame[20] = 0x40;
    frame[22..24].copy_from_slice(&[64, 6]);
    checksum::complete(&mut frame[14..34], ChecksumAt { start: 0, offset: 10 }).expect("inside");
    frame[34..38].copy_from_slice(&[0, 9, 0, 9]);
    frame[38..42].copy_from_slice(&sequence.to_be_bytes());
    // Five words of header, ACK, and a window.
    frame[46..50].copy_from_slice(&[5 << 4, 0x10, 0xff, 0xff]);
    let pseudo = checksum::pseudo_v4(address(from), address(1 - from), 6, u32::from(ip_bytes) - 20);
    frame[50..52].copy_from_slice(&pseudo.fold().to_be_bytes());
    frame
}

/// A frame of `bytes` with addresses only.
fn ipv4(from: u8, bytes: u32) -> Vec<u8> {
    let mut frame = vec![0; bytes as usize];
    frame[..6].copy_from_slice(&mac(1 - from));
    frame[6..12].copy_from_slice(&mac(from));
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    frame[26..30].copy_from_slice(&address(from));
    frame[30..34].copy_from_slice(&address(1 - from));
    frame
}

/// The IP address of a guest.
fn address(number: u8) -> [u8; 4] {
    [198, 18, 0, 1 + number]
}
