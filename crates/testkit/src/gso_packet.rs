//! GSO packets as a guest hands them over: headers for a packet longer than the wire takes, a partial checksum, and the
//! virtio-net header that asks for segmentation (VirtIO 1.3, 5.1.6). Lengths and sums are made here, by the letter and
//! not by the `packet` crate, which is tested with them.

use std::time::Duration;

use crate::driver::HEADER;
use crate::frame::{FROM, TO};
use crate::{PacketPort, wait};

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
pub const NEEDS_CSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_ECN`.
pub const GSO_ECN: u8 = 0x80;

/// TCP flags.
pub const FIN: u8 = 0x01;
/// TCP flags.
pub const PSH: u8 = 0x08;
/// TCP flags.
pub const ACK: u8 = 0x10;
/// TCP flags.
pub const ECE: u8 = 0x40;
/// TCP flags.
pub const CWR: u8 = 0x80;

/// The IP header's version and what follows its fixed part.
#[derive(Debug, Clone)]
pub enum Ip {
    /// IPv4 with that many words of options.
    V4(usize),
    /// IPv6 with extension headers of these types, eight bytes each, PadN inside.
    V6(Vec<u8>),
}

/// The transport header.
#[derive(Debug, Clone)]
pub enum Transport {
    /// TCP with these flags and that many words of options.
    Tcp(u8, usize),
    /// UDP.
    Udp,
}

/// A packet of any length up to what an IP header can say.
#[derive(Debug, Clone)]
pub struct GsoPacket {
    /// 802.1Q tags, 802.1ad outside when there are two.
    pub tags: usize,
    /// Network layer.
    pub ip: Ip,
    /// Transport layer.
    pub transport: Transport,
    /// Bytes behind the transport header.
    pub payload_len: usize,
    /// Port of the sender: tells flows apart.
    pub flow: u16,
}

impl GsoPacket {
    /// The packet from one address to another, with a tag or none, and its request for segments of `size` bytes of payload.
    pub fn between(&self, to: [u8; 6], from: [u8; 6], tag: &[u8], size: u16) -> (Vec<u8>, [u8; 10]) {
        let mut request = self.request(size);
        for at in [2, 6] {
            request[at] += tag.len() as u8;
        }
        ([&to[..], &from, tag, &self.bytes()[12..]].concat(), request)
    }

    /// TCP with ACK and PSH, the twelve bytes of a timestamp option, no tag.
    pub fn tcp(ip: Ip, payload_len: usize) -> Self {
        let transport = Transport::Tcp(ACK | PSH, 3);
        Self {
            tags: 0,
            ip,
            transport,
            payload_len,
            flow: 4000,
        }
    }

    /// UDP, no tag.
    pub fn udp(ip: Ip, payload_len: usize) -> Self {
        Self {
            tags: 0,
            ip,
            transport: Transport::Udp,
            payload_len,
            flow: 4000,
        }
    }

    /// The frame. Its checksum field holds the sum of the pseudo-header.
    pub fn bytes(&self) -> Vec<u8> {
        let len = self.transport_header(0).len() + self.payload_len;
        let sum = fold(
            &[
                self.addresses(),
                (len as u32).to_be_bytes().to_vec(),
                vec![0, 0, 0, self.protocol()],
            ]
            .concat(),
        );
        let mut frame = [self.link(), self.network_header(len), self.transport_header(sum)].concat();
        frame.extend((0..self.payload_len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8)));
        frame
    }

    /// Bytes before the payload.
    pub fn header_len(&self) -> usize {
        self.checksum_start() + self.transport_header(0).len()
    }

    /// The first ten bytes of the virtio-net header: segments of `size` bytes of payload.
    pub fn request(&self, size: u16) -> [u8; 10] {
        let [size_low, size_high] = size.to_le_bytes();
        let [header_low, header_high] = (self.header_len() as u16).to_le_bytes();
        let [start_low, start_high] = (self.checksum_start() as u16).to_le_bytes();
        let (gso_type, offset) = match (&self.transport, &self.ip) {
            (Transport::Udp, _) => (5, 6),
            (Transport::Tcp(flags, _), ip) => {
                let ecn = if flags & CWR == 0 { 0 } else { GSO_ECN };
                (ecn | if matches!(ip, Ip::V4(_)) { 1 } else { 4 }, 16)
            }
        };
        [
            NEEDS_CSUM,
            gso_type,
            header_low,
            header_high,
            size_low,
            size_high,
            start_low,
            start_high,
            offset,
            0,
        ]
    }

    fn checksum_start(&self) -> usize {
        self.link().len() + self.network_header(0).len()
    }

    fn link(&self) -> Vec<u8> {
        const TPIDS: [&[[u8; 2]]; 3] = [&[], &[[0x81, 0]], &[[0x88, 0xa8], [0x81, 0]]];
        let mut bytes = [TO, FROM].concat();
        for (vlan, tpid) in TPIDS[self.tags].iter().enumerate() {
            bytes.extend(tpid);
            bytes.extend([0x60, 5 + vlan as u8]);
        }
        bytes.extend(if matches!(self.ip, Ip::V4(_)) {
            [0x08, 0]
        } else {
            [0x86, 0xdd]
        });
        bytes
    }

    fn addresses(&self) -> Vec<u8> {
        match self.ip {
            Ip::V4(_) => vec![10, 9, 0, 1, 10, 9, 0, 2],
            Ip::V6(_) => (0..32).map(|i| if i % 16 == 0 { 0xfd } else { i }).collect(),
        }
    }

    fn protocol(&self) -> u8 {
        if matches!(self.transport, Transport::Udp) {
            17
        } else {
            6
        }
    }

    fn network_header(&self, payload: usize) -> Vec<u8> {
        match &self.ip {
            Ip::V4(options) => {
                let len = 20 + options * 4;
                let [high, low] = ((len + payload) as u16).to_be_bytes();
                // ECT(0); an identification that wraps; DF.
                let fixed = [
                    0x40 | (len / 4) as u8,
                    2,
                    high,
                    low,
                    0xff,
                    0xfe,
                    0x40,
                    0,
                    64,
                    self.protocol(),
                    0,
                    0,
                ];
                let mut header = [&fixed[..], &self.addresses(), &vec![1; options * 4]].concat();
                let checksum = !fold(&header);
                header[10..12].copy_from_slice(&checksum.to_be_bytes());
                header
            }
            Ip::V6(extensions) => {
                let [high, low] = ((extensions.len() * 8 + payload) as u16).to_be_bytes();
                let mut next = extensions.iter().copied().chain([self.protocol()]);
                let fixed = [
                    0x60,
                    0x21,
                    0x23,
                    0x45,
                    high,
                    low,
                    next.next().unwrap_or_default(),
                    63,
                ];
                let mut header = [&fixed[..], &self.addresses()].concat();
                for next in next {
                    header.extend([next, 0, 1, 4, 0, 0, 0, 0]);
                }
                header
            }
        }
    }

    fn transport_header(&self, checksum: u16) -> Vec<u8> {
        let mut header = [self.flow.to_be_bytes(), 9u16.to_be_bytes()].concat();
        match self.transport {
            Transport::Tcp(flags, options) => {
                // A sequence number that wraps within the GSO packet.
                header.extend(0xffff_f000u32.to_be_bytes());
                header.extend(77u32.to_be_bytes());
                header.extend([(5 + options as u8) << 4, flags, 0x12, 0x34]);
                header.extend(checksum.to_be_bytes());
                header.extend([0, 0]);
                header.extend(match options {
                    3 => vec![1, 1, 8, 10, 0, 1, 2, 3, 0, 4, 5, 6],
                    _ => vec![1; options * 4],
                });
            }
            Transport::Udp => {
                header.extend(((8 + self.payload_len) as u16).to_be_bytes());
                header.extend(checksum.to_be_bytes());
            }
        }
        header
    }
}

/// The sum of RFC 1071, as it is written there; a checksum is what is left to all ones.
pub fn fold(bytes: &[u8]) -> u16 {
    let sum = bytes.chunks(2).fold(0u32, |sum, word| {
        sum + u32::from(word[0]) * 256 + u32::from(*word.get(1).unwrap_or(&0))
    });
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// A virtio-net header with this request: its last two bytes are 0.
pub fn header(request: [u8; 10]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..10].copy_from_slice(&request);
    header
}

/// The next frame from an address that a port with virtio-net headers receives, and the first ten bytes of its header.
///
/// # Panics
/// If none comes.
#[track_caller]
pub fn heard(ear: &PacketPort, from: [u8; 6]) -> (Vec<u8>, [u8; 10]) {
    let mut bytes = vec![0; 70_000];
    let frame = wait::until_some(wait::SOON, || {
        let (len, tag) = ear.read_into(&mut bytes, Duration::from_millis(100)).ok()?;
        let (header, frame) = bytes[..len].split_at(10);
        let mut frame = frame.to_vec();
        frame.splice(12..12, tag.into_iter().flatten());
        (frame[6..12] == from).then(|| (frame, header.try_into().expect("ten bytes")))
    });
    frame.expect("it comes")
}
