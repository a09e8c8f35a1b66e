//! The request in the virtio-net header of a frame (VirtIO 1.3, 5.1.6; `linux/virtio_net.h`).

use super::Malformed;
use crate::checksum::ChecksumAt;
use crate::net_header::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM};

/// The kind of packet to segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GsoKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over either IP version: each segment is a datagram (USO).
    Udp,
}

/// A request for segmentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gso {
    /// The kind of packet.
    pub kind: GsoKind,
    /// CWR is set, for the first segment only. Valid only with TCP. The segmentation uses the flag in the TCP
    /// header.
    pub ecn: bool,
    /// Payload bytes of each segment but the last.
    pub size: u16,
}

/// The request of one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Request {
    /// The checksum to complete. Not checked against the frame: see [`crate::checksum::complete`].
    pub csum: Option<ChecksumAt>,
    /// The frame is a GSO packet.
    pub gso: Option<Gso>,
}

impl Request {
    /// Of a frame that is not a GSO packet: to complete this checksum.
    #[inline]
    #[must_use]
    pub fn of_partial(at: ChecksumAt) -> Self {
        Self {
            csum: Some(at),
            gso: None,
        }
    }

    /// The first ten bytes of the header for a frame to a guest that performs these offloads; `hdr_len`:
    /// bytes of the frame's headers, if it is a GSO packet.
    #[must_use]
    pub fn to_header(&self, hdr_len: u16) -> [u8; 10] {
        let mut bytes = [0; 10];
        if let Some(ChecksumAt { start, offset }) = self.csum {
            bytes[0] = NEEDS_CSUM;
            bytes[6..8].copy_from_slice(&start.to_le_bytes());
            bytes[8..].copy_from_slice(&offset.to_le_bytes());
        }
        if let Some(gso) = self.gso {
            let kind = match gso.kind {
                GsoKind::Tcp4 => GSO_TCPV4,
                GsoKind::Tcp6 => GSO_TCPV6,
                GsoKind::Udp => GSO_UDP_L4,
            };
            bytes[1] = kind | if gso.ecn { GSO_ECN } else { 0 };
            bytes[2..4].copy_from_slice(&hdr_len.to_le_bytes());
            bytes[4..6].copy_from_slice(&gso.size.to_le_bytes());
        }
        bytes
    }

    /// Reads the first ten bytes of the header: a private copy. `hdr_len` is a hint that a device need not
    /// trust, and is ignored, as are flags other than NEEDS_CSUM, which a driver must not set.
    ///
    /// # Errors
    /// A request that the specification forbids, or that is not supported.
    #[inline]
    pub fn from_header(bytes: &[u8; 10]) -> Result<Self, Malformed> {
        let [flags, gso_type, _, _, size @ .., _, _, _, _] = bytes;
        let csum = (flags & NEEDS_CSUM != 0).then(|| ChecksumAt {
            start: u16::from_le_bytes([bytes[6], bytes[7]]),
            offset: u16::from_le_bytes([bytes[8], bytes[9]]),
        });
        if *gso_type == GSO_NONE {
            return Ok(Self { csum, gso: None });
        }
        let kind = match gso_type & !GSO_ECN {
            GSO_TCPV4 => GsoKind::Tcp4,
            GSO_TCPV6 => GsoKind::Tcp6,
            GSO_UDP_L4 => GsoKind::Udp,
            _ => return Err(Malformed::GsoType(*gso_type)),
        };
        let (ecn, size) = (gso_type & GSO_ECN != 0, u16::from_le_bytes(*size));
        if ecn && kind == GsoKind::Udp {
            return Err(Malformed::EcnWithoutTcp(*gso_type));
        }
        // The largest value is special in Linux (GSO_BY_FRAGS, include/linux/skbuff.h), which refuses it here.
        if matches!(size, 0 | u16::MAX) {
            return Err(Malformed::SegmentSize(size));
        }
        if csum.is_none() {
            return Err(Malformed::GsoWithoutChecksum);
        }
        Ok(Self {
            csum,
            gso: Some(Gso { kind, ecn, size }),
        })
    }
}
