//! Headers for delivery: the virtio-net header, and the GSO packet's own headers.

use crate::checksum::Sum;
use crate::fields::{ipv4, ipv6, tcp, udp};
use crate::layers::{Ip, Layers, Transport};
use crate::net_header::DATA_VALID;
use crate::put16;
use crate::segment::{Gso, GsoKind, Request};
use crate::verify::{self, Verdict};

/// The virtio-net header of a frame that is not a GSO packet, without `num_buffers`.
#[inline]
pub(super) fn of_frame(layers: &Layers, verdict: Verdict) -> [u8; 10] {
    match verdict {
        Verdict::Unknown => [0; 10],
        Verdict::Valid => [DATA_VALID, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        Verdict::Partial => Request::of_partial(layers.checksum_at()).to_header(0),
    }
}

/// The virtio-net header of a GSO packet whose segments have `size` bytes of payload, without `num_buffers`.
#[inline]
pub(super) fn of_gso_packet(layers: &Layers, size: u32, cwr: bool) -> [u8; 10] {
    let kind = match (layers.transport_kind, layers.version) {
        (Transport::Udp, _) => GsoKind::Udp,
        (Transport::Tcp, Ip::V4) => GsoKind::Tcp4,
        (Transport::Tcp, Ip::V6) => GsoKind::Tcp6,
    };
    // A frame that was merged is no longer than an IP packet.
    #[allow(clippy::cast_possible_truncation)]
    let size = size as u16;
    let request = Request {
        csum: Some(layers.checksum_at()),
        gso: Some(Gso { kind, ecn: cwr, size }),
    };
    request.to_header(layers.payload)
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
