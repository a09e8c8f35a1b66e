//! The state of a received packet's checksum.
//!
//! A packet that never left the host may have a *partial* checksum: the field holds the sum of the pseudo-header,
//! to be completed before a wire (CHECKSUM_PARTIAL, include/linux/skbuff.h). AF_XDP does not report that, so it is
//! recognised by its value. One packet in 65,536 with a valid checksum looks the same; treating that as partial
//! does no harm, since its bytes are right, and completing it writes a valid checksum again.

use crate::checksum::{ChecksumAt, Sum, pseudo_v4, pseudo_v6};
use crate::fields::{ipv4, ipv6, udp};
use crate::layers::{Ip, Layers, Transport};
use crate::{be16, field};

/// State of a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is valid.
    Valid,
    /// It holds the sum of the pseudo-header.
    Partial,
    /// It is wrong, or there is none (UDP over IPv4 may omit it), or it was not verified.
    Unknown,
}

/// A partial checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unfinished {
    /// Where it is in the frame.
    pub at: ChecksumAt,
    /// End of the covered bytes, from the frame's first.
    pub end: u32,
}

impl Unfinished {
    /// For a packet with a partial checksum.
    #[inline]
    #[must_use]
    pub fn of(layers: &Layers) -> Self {
        Self {
            at: layers.checksum_at(),
            end: layers.ip_len_end,
        }
    }
}

/// The sum of a packet's pseudo-header. `headers`: the frame from its first byte on, as it was parsed.
#[inline]
#[must_use]
pub fn pseudo(headers: &[u8], layers: &Layers) -> Sum {
    let ip = usize::from(layers.ip);
    let protocol = layers.transport_kind.protocol();
    let len = layers.ip_len_end - u32::from(layers.transport);
    match layers.version {
        Ip::V4 => pseudo_v4(
            field(headers, ip + ipv4::SOURCE),
            field(headers, ip + ipv4::DESTINATION),
            protocol,
            len,
        ),
        Ip::V6 => pseudo_v6(
            field(headers, ip + ipv6::SOURCE),
            field(headers, ip + ipv6::DESTINATION),
            protocol,
            len,
        ),
    }
}

/// Checks only for a partial checksum: returns `Partial` or `Unknown`.
#[inline]
#[must_use]
pub fn is_partial(headers: &[u8], layers: &Layers) -> Verdict {
    match checksum(headers, layers) {
        Some(field) if is_same(field, pseudo(headers, layers).fold()) => Verdict::Partial,
        _ => Verdict::Unknown,
    }
}

/// Verifies a packet. `headers`: the frame from its first byte on, as it was parsed. `partial`: its checksum
/// may be partial. `sum` returns the sum of the packet from the transport header to its end, checksum field
/// included; it is not called if the checksum field alone decides.
#[inline]
#[must_use]
pub fn verify(headers: &[u8], layers: &Layers, partial: bool, sum: impl FnOnce() -> Sum) -> Verdict {
    let Some(field) = checksum(headers, layers) else {
        return Verdict::Unknown;
    };
    let pseudo = pseudo(headers, layers);
    if partial && is_same(field, pseudo.fold()) {
        return Verdict::Partial;
    }
    match (pseudo + sum()).fold() {
        0xffff => Verdict::Valid,
        _ => Verdict::Unknown,
    }
}

/// The checksum field; `None` if there is no checksum, or it does not cover the whole packet.
#[inline]
fn checksum(headers: &[u8], layers: &Layers) -> Option<u16> {
    let transport = usize::from(layers.transport);
    let at = layers.checksum_at().field();
    let field = be16(headers, at);
    if layers.transport_kind == Transport::Udp {
        let len = be16(headers, transport + udp::LEN);
        if field == 0 || u32::from(len) != layers.ip_len_end - u32::from(layers.transport) {
            return None;
        }
    }
    Some(field)
}

/// Whether a field holds the sum of a pseudo-header. That is never 0, because it has a protocol; as 0xffff it may be
/// written in its other form.
#[inline]
fn is_same(field: u16, pseudo: u16) -> bool {
    field == pseudo || (field == 0 && pseudo == 0xffff)
}

#[cfg(test)]
mod tests;
