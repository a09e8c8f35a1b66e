//! Segmentation: splits one GSO packet of a guest into many frames for the wire.
//!
//! A [`Request`] is the offload request in the virtio-net header of a frame. A [`Plan`] is computed from the
//! GSO packet's headers and returns for each segment the range of its payload in the GSO packet and its
//! headers. It neither contains nor moves payload: the caller copies or references that.
//!
//! The rules are those of the kernel's software segmentation, so that a guest sees no difference between us and a tap:
//!
//! - IPv4's identification increases by one per segment (`net/ipv4/af_inet.c` inet_gso_segment; the fixed one
//!   that TCP may request there has no virtio counterpart), length and header checksum are the segment's.
//! - IPv6's payload length is the segment's; extension headers are repeated (`net/ipv6/ip6_offload.c`
//!   ipv6_gso_segment).
//! - TCP's sequence number advances by the payload; FIN and PSH are on the last segment only, CWR on the first only
//!   (`net/ipv4/tcp_offload.c` tcp_gso_segment).
//! - UDP's length is the segment's (`net/ipv4/udp_offload.c` __udp_gso_segment).
//! - The transport checksum field holds the pseudo-header's sum. It is taken from the GSO packet's and
//!   corrected by the difference of lengths, as the kernel does, so that it is also right if a routing header
//!   contains another final destination.
//!
//! A GSO packet that is no longer than one segment is one segment.
//!
//! Segments may leave by a tunnel ([`Plan::in_tunnel`]): each then has the tunnel's headers before its own.

use std::ops::Range;

use crate::checksum::{ChecksumAt, OutOfFrame, Sum};
use crate::fields::{ipv4, ipv6, tcp, udp};
use crate::layers::{self, Ip, Layers, Transport};
use crate::tunnel::Outer;
use crate::{HEADERS_MAX, be16, be32, put16};

mod request;
#[cfg(test)]
mod tests;

pub use request::{Gso, GsoKind, Request};

const FIN_PSH: u8 = tcp::FIN | tcp::PSH;

/// Why a guest's request cannot be met. The frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A `gso_type` that is not in the specification, or not supported (UFO, tunnels).
    #[error("GSO type {0:#x} is not known")]
    GsoType(u8),
    /// ECN with a type that is not TCP.
    #[error("GSO type {0:#x} asks for ECN, which only TCP has")]
    EcnWithoutTcp(u8),
    /// A segment size of zero, or of 65,535.
    #[error("GSO with segments of {0} bytes")]
    SegmentSize(u16),
    /// GSO without a partial checksum (VirtIO 1.3, 5.1.6.2).
    #[error("GSO without NEEDS_CSUM")]
    GsoWithoutChecksum,
    /// Headers that do not parse: see [`layers::parse`].
    #[error("a GSO packet of {0} bytes whose headers cannot be parsed")]
    Headers(u32),
    /// Headers of another protocol than that of the GSO type.
    #[error("GSO of type {asked:?} for a GSO packet of {version:?} and {transport:?}")]
    Protocol {
        /// The requested type.
        asked: GsoKind,
        /// IP version of the GSO packet.
        version: Ip,
        /// Transport protocol of the GSO packet.
        transport: Transport,
    },
    /// An IP or UDP length field that does not match the GSO packet.
    #[error("a GSO packet whose packet ends at byte {claimed}, not at {frame_len}")]
    Length {
        /// End according to the length field.
        claimed: u32,
        /// Bytes of the GSO packet.
        frame_len: u32,
    },
    /// A checksum that is not in the frame.
    #[error(transparent)]
    Checksum(OutOfFrame),
    /// A checksum position of a GSO packet that does not match its headers.
    #[error(
        "a GSO packet with a checksum from byte {}, stored {} bytes behind that, whose headers have it at {} and {}",
        asked.start, asked.offset, found.start, found.offset
    )]
    ChecksumPlace {
        /// The position in the virtio-net header.
        asked: ChecksumAt,
        /// The position according to the packet's headers.
        found: ChecksumAt,
    },
    /// A VLAN tag must be removed or inserted, but the request is not only for bytes after it.
    #[error(
        "a tagged frame of {len} bytes that ends with its tag, or with a checksum that begins before byte {least}"
    )]
    Tag {
        /// Bytes of the frame.
        len: u32,
        /// The first byte after a tag.
        least: usize,
    },
}

/// How a GSO packet is segmented, with the template of its segments' headers.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The GSO packet's headers, with zeros in fields that every segment sets and that the sums below must not include.
    template: [u8; HEADERS_MAX],
    layers: Layers,
    /// Bytes of headers before each segment's payload, and where its checksum is.
    header_len: u32,
    checksum_at: ChecksumAt,
    /// Payload bytes of each segment but the last.
    size: u32,
    segments: u32,
    /// IPv4: sum of the header without length, identification and checksum.
    ip_sum: Sum,
    ip_id: u16,
    /// Sum of the pseudo-header without the length.
    pseudo_sum: Sum,
    sequence: u32,
    tunnel: Option<Tunnel>,
}

/// The tunnel that segments leave by: arguments of [`Outer::headers`].
#[derive(Debug, Clone)]
pub struct Tunnel {
    /// The headers before those of each segment.
    pub outer: Outer,
    /// The flow of all segments.
    pub flow: u16,
    /// IPv4 identification of the first segment's packet; the next ones follow.
    pub id: u16,
}

impl Plan {
    /// Checks a GSO packet's headers against the request. `headers`: a private copy of its first
    /// min(`frame_len`, [`HEADERS_MAX`]) bytes, or more; `frame_len`: its bytes, without the virtio-net header.
    ///
    /// # Errors
    /// What is wrong with the headers.
    #[inline]
    pub fn new(headers: &[u8], frame_len: u32, gso: Gso) -> Result<Self, Malformed> {
        let layers = layers::parse(headers, frame_len).ok_or(Malformed::Headers(frame_len))?;
        check_protocol(&layers, gso.kind)?;
        check_lengths(headers, &layers, frame_len)?;
        let size = u32::from(gso.size);
        if size == 0 {
            return Err(Malformed::SegmentSize(gso.size));
        }
        let (ip, transport, payload) = (layers.ip.into(), layers.transport.into(), layers.payload.into());
        let mut template = [0; HEADERS_MAX];
        template[..payload].copy_from_slice(&headers[..payload]);
        let ip_id = be16(&template, ip + ipv4::ID);
        let mut ip_sum = Sum::default();
        if layers.version == Ip::V4 {
            put16(&mut template, ip + ipv4::LEN, 0);
            put16(&mut template, ip + ipv4::ID, 0);
            put16(&mut template, ip + ipv4::CHECKSUM, 0);
            ip_sum = Sum::of_short(&template[ip..transport]);
        }
        let checksum = be16(&template, layers.checksum_at().field());
        let old_len = frame_len - u32::from(layers.transport);
        let sequence = be32(&template, transport + tcp::SEQUENCE);
        Ok(Self {
            template,
            layers,
            header_len: layers.payload.into(),
            checksum_at: layers.checksum_at(),
            size,
            segments: (frame_len - u32::from(layers.payload)).div_ceil(size).max(1),
            ip_sum,
            ip_id,
            // The complement subtracts.
            pseudo_sum: Sum::default().add_word(checksum).add_u32(!old_len),
            sequence,
            tunnel: None,
        })
    }

    /// The same segments in a tunnel.
    #[must_use]
    pub fn in_tunnel(mut self, tunnel: Tunnel) -> Self {
        self.header_len += tunnel.outer.len() as u32;
        self.checksum_at.start += tunnel.outer.len() as u16;
        self.tunnel = Some(tunnel);
        self
    }

    /// Bytes of the tunnel's headers in front of each segment; 0 without one.
    #[must_use]
    #[inline]
    pub fn outer_len(&self) -> usize {
        self.tunnel.as_ref().map_or(0, |tunnel| tunnel.outer.len())
    }

    /// Bytes of headers before each segment's payload.
    #[inline]
    pub fn header_len(&self) -> usize {
        self.header_len as usize
    }

    /// The GSO packet's version of IP.
    #[inline]
    pub fn version(&self) -> Ip {
        self.layers.version
    }

    /// Number of segments; at least one.
    #[inline]
    pub fn segments(&self) -> u32 {
        self.segments
    }

    /// Bytes of the longest segment, headers included.
    #[inline]
    pub fn segment_bytes_max(&self) -> u32 {
        let payload = self.payload(0);
        self.header_len + (payload.end - payload.start)
    }

    /// The range of a segment's payload in the GSO packet.
    ///
    /// # Panics
    /// If there is no such segment.
    #[must_use]
    #[inline]
    pub fn payload(&self, index: u32) -> Range<u32> {
        assert!(index < self.segments, "segment {index} of {}", self.segments);
        let begin = u32::from(self.layers.payload) + index * self.size;
        begin..begin.saturating_add(self.size).min(self.layers.ip_len_end)
    }

    /// Where the transport checksum of a segment is.
    #[inline]
    pub fn checksum_at(&self) -> ChecksumAt {
        self.checksum_at
    }

    /// Writes the headers of a segment to the first [`Plan::header_len`] bytes of `out`. The transport checksum
    /// field gets the sum of the pseudo-header: [`crate::checksum::complete`] or the NIC completes it.
    ///
    /// # Panics
    /// If there is no such segment, or `out` is too short.
    #[inline]
    pub fn write_header(&self, index: u32, out: &mut [u8]) {
        match &self.tunnel {
            None => self.write_own_header(index, out),
            Some(tunnel) => self.write_all_headers(tunnel, index, out),
        }
    }

    #[inline(never)]
    fn write_all_headers(&self, tunnel: &Tunnel, index: u32, out: &mut [u8]) {
        let Tunnel { outer, flow, id } = tunnel;
        let (before, own) = out.split_at_mut(outer.len());
        self.write_own_header(index, own);
        let payload = self.payload(index);
        // It fits into 16 bits, as the GSO packet does.
        let len = u32::from(self.layers.payload) + (payload.end - payload.start);
        let headers = outer.headers(own, len as u16, *flow, id.wrapping_add(index as u16));
        before.copy_from_slice(headers.as_ref());
    }

    #[inline(always)]
    fn write_own_header(&self, index: u32, out: &mut [u8]) {
        let payload = self.payload(index);
        let header_len = usize::from(self.layers.payload);
        let out = &mut out[..header_len];
        out.copy_from_slice(&self.template[..header_len]);
        let (ip, transport) = (usize::from(self.layers.ip), usize::from(self.layers.transport));
        let len = header_len + (payload.end - payload.start) as usize;
        match self.layers.version {
            Ip::V4 => {
                // Both fit: they are at most those of the GSO packet.
                let (total, id) = ((len - ip) as u16, self.ip_id.wrapping_add(index as u16));
                put16(out, ip + ipv4::LEN, total);
                put16(out, ip + ipv4::ID, id);
                put16(
                    out,
                    ip + ipv4::CHECKSUM,
                    self.ip_sum.add_word(total).add_word(id).complement(),
                );
            }
            Ip::V6 => put16(out, ip + ipv6::LEN, (len - ip - ipv6::BYTES) as u16),
        }
        let checksum = self.pseudo_sum.add_u32((len - transport) as u32).fold();
        match self.layers.transport_kind {
            Transport::Tcp => {
                let sequence = self.sequence.wrapping_add(index * self.size);
                let at = transport + tcp::SEQUENCE;
                out[at..at + 4].copy_from_slice(&sequence.to_be_bytes());
                let flags = &mut out[transport + tcp::FLAGS];
                *flags &= if index == 0 { 0xff } else { !tcp::CWR };
                *flags &= if index + 1 == self.segments {
                    0xff
                } else {
                    !FIN_PSH
                };
                put16(out, transport + tcp::CHECKSUM, checksum);
            }
            Transport::Udp => {
                put16(out, transport + udp::LEN, (len - transport) as u16);
                put16(out, transport + udp::CHECKSUM, checksum);
            }
        }
    }
}

fn check_protocol(layers: &Layers, asked: GsoKind) -> Result<(), Malformed> {
    let (version, transport) = (layers.version, layers.transport_kind);
    match (asked, version, transport) {
        (GsoKind::Tcp4, Ip::V4, Transport::Tcp)
        | (GsoKind::Tcp6, Ip::V6, Transport::Tcp)
        | (GsoKind::Udp, _, Transport::Udp) => Ok(()),
        _ => Err(Malformed::Protocol {
            asked,
            version,
            transport,
        }),
    }
}

/// Checks that the IP packet fills the whole GSO packet: padding or a wrong length would get into the segments.
fn check_lengths(headers: &[u8], layers: &Layers, frame_len: u32) -> Result<(), Malformed> {
    let mut claimed = layers.ip_len_end;
    if claimed == frame_len && layers.transport_kind == Transport::Udp {
        claimed =
            u32::from(layers.transport) + u32::from(be16(headers, usize::from(layers.transport) + udp::LEN));
    }
    if claimed == frame_len {
        Ok(())
    } else {
        Err(Malformed::Length { claimed, frame_len })
    }
}
