//! VXLAN (RFC 7348) and Geneve (RFC 8926): the headers in front of a frame that is sent ([`Outer`]), and partial checksums
//! of packets inside.
//!
//! A Linux stack that sends a packet with a partial checksum through a tunnel leaves that checksum partial, and
//! computes the outer UDP checksum as if the inner one were complete: the bytes that the inner checksum covers then add
//! up to the complement of its pseudo-header (`lco_csum`, include/linux/skbuff.h; `udp_set_csum`, net/ipv4/udp.c). So
//! the inner field holds the sum of its pseudo-header, and the outer checksum is wrong until the inner one is complete.
//! Both can be recognised from the headers alone. A tunnel over IPv4, or over IPv6 if that is enabled, may omit the
//! outer checksum; then the inner field alone decides ([`crate::verify`] explains why that is enough).
//!
//! Tunnels are recognised by the destination port. A tunnel inside a tunnel is not parsed.

mod outer;

pub use self::outer::{Endpoints, Headers, OUTER_LENS, OUTER_MAX, Outer};

use crate::checksum::{ChecksumAt, Sum};
use crate::ethernet::Payload;
use crate::fields::udp;
use crate::layers::{self, Layers, Transport};
use crate::verify::{self, Unfinished, Verdict};
use crate::{HEADERS_MAX, bytes, ethertype, word};

/// The bytes of a frame that [`unfinished`] needs at most: the headers before Geneve's options, the options,
/// and the headers inside.
pub const TUNNEL_HEADERS_MAX: usize = HEADERS_MAX + GENEVE_MAX + HEADERS_MAX;

/// VXLAN: the port that IANA assigned, and Linux's default (drivers/net/vxlan).
const VXLAN_PORTS: [u16; 2] = [4789, 8472];
/// VXLAN's header: flags, one of which marks a network identifier and is always set.
const VXLAN_LEN: usize = 8;
const VXLAN_HAS_VNI: u8 = 0x08;
const GENEVE_PORT: u16 = 6081;
/// Geneve's header: version and length of the options in four bytes each; flags; type of the payload.
const GENEVE_LEN: usize = 8;
const GENEVE_PROTOCOL: usize = 2;
const GENEVE_MAX: usize = GENEVE_LEN + 63 * 4;

/// Whether a packet may be a tunnel's, judged by its destination port.
#[must_use]
#[inline]
pub fn is_tunnel(headers: &[u8], outer: &Layers) -> bool {
    outer.transport_kind == Transport::Udp && {
        let port = word(headers, usize::from(outer.transport) + udp::DESTINATION);
        port.is_some_and(|port| port == GENEVE_PORT || VXLAN_PORTS.contains(&port))
    }
}

/// Finds the partial checksum of the packet inside a tunnel packet, and the state of the outer checksum after
/// that is completed. `frame`: all its bytes, or at least the first [`TUNNEL_HEADERS_MAX`]; `outer`: its
/// parsed headers.
///
/// `None`: not a tunnel packet, no partial checksum inside, or an outer checksum that is wrong even then.
#[must_use]
#[inline]
pub fn unfinished(frame: &[u8], outer: &Layers) -> Option<(Unfinished, Verdict)> {
    is_tunnel(frame, outer)
        .then(|| unfinished_inside(frame, outer))
        .flatten()
}

#[inline(never)]
fn unfinished_inside(frame: &[u8], outer: &Layers) -> Option<(Unfinished, Verdict)> {
    let header = usize::from(outer.transport);
    let (port, len, outer_sum) = (
        word(frame, header + udp::DESTINATION)?,
        word(frame, header + udp::LEN)?,
        word(frame, header + udp::CHECKSUM)?,
    );
    if usize::from(len) != outer.ip_len_end as usize - header {
        return None;
    }
    let Payload { ethertype, at } = match port {
        GENEVE_PORT => geneve(frame, header + udp::BYTES)?,
        _ => vxlan(frame, header + udp::BYTES)?,
    };
    // Fits: it is within the headers, which are a few hundred bytes.
    let base = u16::try_from(at).ok()?;
    let inner_frame = frame.get(at..)?;
    let inner_len = outer.ip_len_end.checked_sub(base.into())?;
    let inner_frame = &inner_frame[..inner_frame.len().min(HEADERS_MAX).min(inner_len as usize)];
    let inner = match ethertype {
        ethertype::ETHERNET => layers::parse(inner_frame, inner_len)?,
        ethertype => layers::parse_ip(inner_frame, inner_len, 0, ethertype)?,
    };
    let is_partial = verify::is_partial(inner_frame, &inner) == Verdict::Partial;
    // Padding after the inner packet would be covered only by the outer checksum. A stack adds none.
    if !is_partial || inner.ip_len_end != inner_len {
        return None;
    }
    let at = inner.checksum_at();
    let unfinished = Unfinished {
        at: ChecksumAt {
            start: base + at.start,
            ..at
        },
        end: outer.ip_len_end,
    };
    if outer_sum == 0 {
        return Some((unfinished, Verdict::Unknown));
    }
    let covered = frame.get(header..unfinished.at.start.into())?;
    let inner_pseudo = verify::pseudo(inner_frame, &inner);
    let sum = verify::pseudo(frame, outer) + Sum::of(covered);
    let is_right = sum.add_word(inner_pseudo.complement()).fold() == 0xffff;
    is_right.then_some((unfinished, Verdict::Valid))
}

fn vxlan(frame: &[u8], at: usize) -> Option<Payload> {
    let header: &[u8; VXLAN_LEN] = bytes(frame, at)?;
    (header[0] & VXLAN_HAS_VNI != 0).then_some(Payload {
        at: at + VXLAN_LEN,
        ethertype: ethertype::ETHERNET,
    })
}

fn geneve(frame: &[u8], at: usize) -> Option<Payload> {
    let header: &[u8; GENEVE_LEN] = bytes(frame, at)?;
    let (version, options) = (header[0] >> 6, usize::from(header[0] & 0x3f) * 4);
    (version == 0).then_some(Payload {
        at: at + GENEVE_LEN + options,
        ethertype: word(header, GENEVE_PROTOCOL)?,
    })
}

#[cfg(test)]
mod tests;
