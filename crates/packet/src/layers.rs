//! Finds where the layers of a frame begin.
//!
//! Handled: Ethernet, up to two VLAN tags, IPv4 with options, IPv6 with hop-by-hop, routing and destination
//! options headers, TCP or UDP. Everything else, including fragments, is `None` and is passed on unchanged.
//! Only fields that the offsets depend on are verified, not checksums.

use crate::checksum::ChecksumAt;
use crate::ethernet::{self, Payload, Skip};
use crate::fields::{tcp, udp};
use crate::ip::{Follow, Fragment, Ipv4, Ipv6, Upper};
use crate::{HEADERS_MAX, ethertype, protocol};

/// Version of the IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ip {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The IP protocol number.
    #[must_use]
    pub fn protocol(self) -> u8 {
        match self {
            Self::Tcp => protocol::TCP,
            Self::Udp => protocol::UDP,
        }
    }

    /// Where the checksum is in the transport header: `csum_offset` of a virtio-net header.
    #[must_use]
    pub fn checksum_offset(self) -> u16 {
        match self {
            Self::Tcp => tcp::CHECKSUM as u16,
            Self::Udp => udp::CHECKSUM as u16,
        }
    }
}

/// Offsets from the beginning of the frame, in bytes. Each header is inside the parsed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// The IP header.
    pub ip: u16,
    /// The TCP or UDP header.
    pub transport: u16,
    /// The bytes after the transport header.
    pub payload: u16,
    /// Which IP.
    pub version: Ip,
    /// Which transport.
    pub transport_kind: Transport,
    /// End of the IP packet according to its length field, within the frame and not before `payload`; bytes
    /// after it are padding.
    pub ip_len_end: u32,
}

impl Layers {
    /// Where the transport checksum is.
    #[inline]
    pub fn checksum_at(&self) -> ChecksumAt {
        ChecksumAt {
            start: self.transport,
            offset: self.transport_kind.checksum_offset(),
        }
    }
}

/// Finds the layers. `headers`: the frame, or its first bytes, of which [`HEADERS_MAX`] are enough; `frame_len`: bytes
/// of the frame.
///
/// `None`: the frame is of another protocol, is a fragment, has more than [`HEADERS_MAX`] bytes of headers, is shorter
/// than its headers claim, or contradicts itself.
#[must_use]
#[inline]
pub fn parse(headers: &[u8], frame_len: u32) -> Option<Layers> {
    let headers = &headers[..headers.len().min(HEADERS_MAX).min(frame_len as usize)];
    let Payload { ethertype, at } = ethernet::payload(headers, Skip::TwoTags)?;
    parse_ip(headers, frame_len, at, ethertype)
}

/// As [`parse`], from an IP header at offset `ip` with type `ethertype`. `headers` must be no longer than
/// [`HEADERS_MAX`].
// One call for each version: frames of others need none of the registers that its walk saves.
#[inline]
pub(crate) fn parse_ip(headers: &[u8], frame_len: u32, ip: usize, ethertype: u16) -> Option<Layers> {
    match ethertype {
        ethertype::IPV4 => parse_v4(headers, frame_len, ip),
        ethertype::IPV6 => parse_v6(headers, frame_len, ip),
        _ => None,
    }
}

#[inline(never)]
fn parse_v4(headers: &[u8], frame_len: u32, at: usize) -> Option<Layers> {
    let ip = Ipv4::at(headers, at)?;
    parse_upper(headers, frame_len, (Ip::V4, at, ip.span.end), ip.upper)
}

#[inline(never)]
fn parse_v6(headers: &[u8], frame_len: u32, at: usize) -> Option<Layers> {
    let ip = Ipv6::at(headers, at)?;
    let upper = ip.upper_with(headers, Follow::Usual, |_, _| ())?;
    parse_upper(headers, frame_len, (Ip::V6, at, ip.span.end), upper)
}

#[inline]
fn parse_upper(
    headers: &[u8],
    frame_len: u32,
    (version, ip, ip_len_end): (Ip, usize, usize),
    upper: Upper,
) -> Option<Layers> {
    let transport = upper.at;
    let (transport_kind, transport_len) = match upper.protocol {
        _ if upper.fragment != Fragment::None => return None,
        protocol::TCP => (Transport::Tcp, tcp_len(headers, transport)?),
        protocol::UDP => (Transport::Udp, udp::BYTES),
        _ => return None,
    };
    let payload = transport + transport_len;
    if payload > headers.len() || ip_len_end > frame_len as usize || payload > ip_len_end {
        return None;
    }
    Some(Layers {
        ip: ip as u16,
        transport: transport as u16,
        payload: payload as u16,
        version,
        transport_kind,
        ip_len_end: ip_len_end as u32,
    })
}

#[inline]
fn tcp_len(headers: &[u8], transport: usize) -> Option<usize> {
    let len = usize::from(headers.get(transport + tcp::OFFSET)? >> 4) * 4;
    (len >= tcp::BYTES).then_some(len)
}

#[cfg(test)]
mod tests;
