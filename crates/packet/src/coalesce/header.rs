//! Headers for delivery: the virtio-net header, and the GSO packet's own headers.

use crate::checksum::{ChecksumAt, Sum};
use crate::fields::{ipv4, ipv6, tcp, udp};
use crate::layers::{Ip, Layers, Transport};
use crate::net_header::{DATA_VALID, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM};
use crate::put16;
use crate::verify::{self, Verdict};

/// A virtio-net header without `num_buffers` (VirtIO 1.3, 5.1.6; include/uapi/linux/virtio_net.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetHeader {
    /// NEEDS_CSUM (1) or DATA_VALID (2).
    pub flags: u8,
    /// 0, TCPV4 (1), TCPV6 (4) or UDP_L4 (5), with ECN (0x80).
    pub gso_type: u8,
    /// Bytes of headers, with a `gso_type` only.
    pub hdr_len: u16,
    /// Bytes of payload of each segment but the last.
    pub gso_size: u16,
    /// Offset of the transport header, with NEEDS_CSUM only.
    pub csum_start: u16,
    /// Offset of the checksum field from there.
    pub csum_offset: u16,
}

impl NetHeader {
    /// No offload.
    pub const NONE: Self = Self {
        flags: 0,
        gso_type: 0,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
    };

    /// Its bytes in memory.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; 10] {
        let mut bytes = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (place, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// For a frame that is not a GSO packet.
    #[inline]
    #[must_use]
    pub fn of_frame(layers: &Layers, verdict: Verdict) -> Self {
        match verdict {
            Verdict::Unknown => Self::NONE,
            Verdict::Valid => Self {
                flags: DATA_VALID,
                ..Self::NONE
            },
            Verdict::Partial => Self::of_partial(layers.checksum_at()),
        }
    }

    /// For a frame with a partial checksum.
    #[inline]
    #[must_use]
    pub fn of_partial(at: ChecksumAt) -> Self {
        Self {
            flags: NEEDS_CSUM,
            csum_start: at.start,
            csum_offset: at.offset,
            ..Self::NONE
        }
    }

    /// For a GSO packet whose segments have `size` bytes of payload.
    #[inline]
    pub(super) fn of_gso_packet(layers: &Layers, size: u32, cwr: bool) -> Self {
        let gso_type = match (layers.transport_kind, layers.version) {
            (Transport::Udp, _) => GSO_UDP_L4,
            (Transport::Tcp, Ip::V4) => GSO_TCPV4,
            (Transport::Tcp, Ip::V6) => GSO_TCPV6,
        };
        Self {
            gso_type: if cwr { gso_type | GSO_ECN } else { gso_type },
            hdr_len: layers.payload,
            // A frame that was merged is no longer than an IP packet.
            #[allow(clippy::cast_possible_truncation)]
            gso_size: size as u16,
            ..Self::of_frame(layers, Verdict::Partial)
        }
    }
}

/// See [`super::Batch::rewrite`].
pub(super) fn rewrite(headers: &mut [u8], layers: &Layers, frame_len: u32, flags: u8) {
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    let layers = Layers {
        ip_len_end: frame_len,
        ..*layers
    };
    // A group is closed before it is longer than an IP packet.
    #[allow(clippy::cast_possible_truncation)]
    let length_from = |at: usize| (frame_len as usize - at) as u16;
    match layers.version {
        Ip::V4 => {
            put16(headers, ip + ipv4::LEN, length_from(ip));
            put16(headers, ip + ipv4::CHECKSUM, 0);
        }
        Ip::V6 => put16(headers, ip + ipv6::LEN, length_from(ip + ipv6::BYTES)),
    }
    if layers.transport_kind == Transport::Udp {
        put16(headers, transport + udp::LEN, length_from(transport));
    } else {
        headers[transport + tcp::FLAGS] |= flags;
    }
    if layers.version == Ip::V4 {
        let sum = Sum::of(&headers[ip..ip + ipv4::BYTES]).complement();
        put16(headers, ip + ipv4::CHECKSUM, sum);
    }
    let partial = verify::pseudo(headers, &layers).fold();
    put16(headers, layers.checksum_at().field(), partial);
}
