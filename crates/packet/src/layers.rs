//! Where the layers of a frame begin.
//!
//! Handled: Ethernet, up to two VLAN tags, IPv4 with options, IPv6 with hop-by-hop, routing and destination options
//! headers, TCP or UDP. Everything else, fragments too, is `None`: it is passed on as it is. Nothing is verified but
//! what the offsets depend on; checksums are not.

use crate::checksum::ChecksumAt;

/// Most bytes of headers that are handled: two tags, IPv6 and TCP at their longest leave 134 for extension headers.
pub const HEADERS_MAX: usize = 256;

const ETHERNET_LEN: usize = 14;
const ETHERTYPE_AT: usize = 12;
const TAG_LEN: usize = 4;
const TAGS_MAX: usize = 2;
const IPV4_MIN: usize = 20;
const IPV6_LEN: usize = 40;
const TCP_MIN: usize = 20;
pub(crate) const UDP_LEN: usize = 8;

/// IP protocol number of TCP.
pub const TCP: u8 = 6;
/// IP protocol number of UDP.
pub const UDP: u8 = 17;

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
            Self::Tcp => TCP,
            Self::Udp => UDP,
        }
    }

    /// Where the checksum is in the transport header: `csum_offset` of a virtio-net header.
    #[must_use]
    pub fn checksum_offset(self) -> u16 {
        match self {
            Self::Tcp => 16,
            Self::Udp => 6,
        }
    }
}

/// Offsets from the beginning of the frame, in bytes. Each header lies in the bytes that were parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// The IP header.
    pub ip: u16,
    /// The TCP or UDP header.
    pub transport: u16,
    /// What follows the transport header.
    pub payload: u16,
    /// Which IP.
    pub version: Ip,
    /// Which transport.
    pub transport_kind: Transport,
    /// End of the IP packet by its own length field, within the frame and not before `payload`; what lies behind is
    /// padding.
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
    let mut ip = ETHERNET_LEN;
    let mut ethertype = word(headers, ETHERTYPE_AT)?;
    let mut tags = 0;
    while matches!(ethertype, 0x8100 | 0x88a8) && tags < TAGS_MAX {
        ethertype = word(headers, ip + 2)?;
        ip += TAG_LEN;
        tags += 1;
    }
    parse_ip(headers, frame_len, ip, ethertype)
}

/// The same from the IP header on, which lies at `ip` and is of that type. `headers`: as of [`parse`], and no longer
/// than [`HEADERS_MAX`].
#[inline]
pub(crate) fn parse_ip(headers: &[u8], frame_len: u32, ip: usize, ethertype: u16) -> Option<Layers> {
    let (version, protocol, transport, ip_len_end) = match ethertype {
        0x0800 => parse_v4(headers, ip)?,
        0x86dd => parse_v6(headers, ip)?,
        _ => return None,
    };
    let (transport_kind, transport_len) = match protocol {
        TCP => (Transport::Tcp, tcp_len(headers, transport)?),
        UDP => (Transport::Udp, UDP_LEN),
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

/// Version, protocol, offset of the transport header, end of the packet.
type Network = (Ip, u8, usize, usize);

#[inline]
fn parse_v4(headers: &[u8], ip: usize) -> Option<Network> {
    let header = headers.get(ip..ip + IPV4_MIN)?;
    let len = usize::from(header[0] & 0x0f) * 4;
    // Neither "more fragments" nor an offset; "don't fragment" and the reserved bit do not matter.
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    if header[0] >> 4 != 4 || len < IPV4_MIN || fragment {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    Some((Ip::V4, header[9], ip + len, ip + total))
}

#[inline]
fn parse_v6(headers: &[u8], ip: usize) -> Option<Network> {
    const EXTENSIONS: [u8; 3] = [
        0,  /* hop-by-hop */
        43, /* routing */
        60, /* destination options */
    ];
    let header = headers.get(ip..ip + IPV6_LEN)?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let end = ip + IPV6_LEN + usize::from(u16::from_be_bytes([header[4], header[5]]));
    let mut next = header[6];
    let mut at = ip + IPV6_LEN;
    // Each is at least eight bytes long, so HEADERS_MAX bounds them.
    while EXTENSIONS.contains(&next) {
        let extension = headers.get(at..at + 2)?;
        next = extension[0];
        at += (usize::from(extension[1]) + 1) * 8;
    }
    Some((Ip::V6, next, at, end))
}

#[inline]
fn tcp_len(headers: &[u8], transport: usize) -> Option<usize> {
    let len = usize::from(headers.get(transport + 12)? >> 4) * 4;
    (len >= TCP_MIN).then_some(len)
}

#[inline]
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

#[cfg(test)]
mod tests;
