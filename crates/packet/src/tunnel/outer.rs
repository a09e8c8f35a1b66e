//! The headers in front of a frame that is sent by a tunnel: Ethernet, with or without a VLAN tag, IPv4 or IPv6, UDP, and
//! VXLAN or Geneve, which is as long without options.
//!
//! They are as Linux writes them by default (`vxlan_xmit_one`, drivers/net/vxlan; `geneve_xmit_skb`, drivers/net/geneve.c),
//! except for two fields. The UDP source port, a hash of the inner flow by which the network spreads flows over its paths, is
//! 49152 to 65535 (RFC 7348, section 5; RFC 8926, section 3.3). The UDP checksum is 0, "none": over IPv6 the receiver has to
//! accept that (RFC 6935). DF is not set.

use std::net::IpAddr;

use super::{GENEVE_PROTOCOL, VXLAN_HAS_VNI, VXLAN_LEN};
use crate::checksum::Sum;
use crate::ethernet::{self, ADDRESS_BYTES, HEADER_BYTES, Mac, Skip, TAG_BYTES};
use crate::ethertype::{ETHERNET, IPV4, IPV6, VLAN};
use crate::fields::{ipv4, ipv6, udp};
use crate::{protocol, put16};

/// Most bytes of these headers: those over IPv6, with a tag.
pub const OUTER_MAX: usize = IP + ipv6::BYTES + udp::BYTES + VXLAN_LEN;
/// The same over IPv4.
const OUTER_V4: usize = IP + ipv4::BYTES + udp::BYTES + VXLAN_LEN;
/// The lengths that the headers of a decapsulated frame can have had.
pub const OUTER_LENS: [u64; 4] = [
    (OUTER_V4 - TAG_BYTES) as u64,
    OUTER_V4 as u64,
    (OUTER_MAX - TAG_BYTES) as u64,
    OUTER_MAX as u64,
];
/// Where the IP header begins in the template. Headers without a tag begin at `TAG_BYTES`, so that it stays there.
const IP: usize = HEADER_BYTES + TAG_BYTES;
/// The first of the UDP source ports, of which there are a power of two (RFC 7348, section 5: dynamic ports).
const FIRST_SOURCE_PORT: u16 = 49_152;
/// The bits of a traffic class that are ECN (RFC 3168).
const ECN: u8 = 3;
/// Congestion was experienced; it would be reported (RFC 3168).
const CE: u8 = 3;
const ECT_0: u8 = 2;

/// The ends of a tunnel, and how packets get from one to the other.
#[derive(Debug, Clone, Copy)]
pub struct Endpoints {
    /// MAC address of the next hop.
    pub to: Mac,
    /// MAC address of the interface by which packets leave.
    pub from: Mac,
    /// VLAN of that interface; 0: packets have no tag.
    pub vlan: u16,
    /// The host's address.
    pub local: IpAddr,
    /// The VTEP's.
    pub remote: IpAddr,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// The headers of the tunnel are Geneve's, else VXLAN's.
    pub is_geneve: bool,
    /// UDP port of the VTEP.
    pub port: u16,
    /// Number of the network, 24 bits.
    pub vni: u32,
}

/// The headers for frames to one VTEP, without what differs by frame.
#[derive(Debug, Clone)]
pub struct Outer {
    template: [u8; OUTER_MAX],
    /// Where they begin: 0 with a tag, else `TAG_BYTES`.
    start: usize,
    /// Sum of the IPv4 header in the template; `None`: it is IPv6.
    sum: Option<Sum>,
}

impl Outer {
    /// The headers of packets between these ends.
    ///
    /// `None`: the addresses are of different families, or the VNI has more than 24 bits.
    #[must_use]
    pub fn new(ends: &Endpoints) -> Option<Self> {
        let [0, vni @ ..] = ends.vni.to_be_bytes() else {
            return None;
        };
        let mut template = [0; OUTER_MAX];
        let start = if ends.vlan == 0 { TAG_BYTES } else { 0 };
        template[start..][..6].copy_from_slice(&ends.to);
        template[start + 6..][..6].copy_from_slice(&ends.from);
        if ends.vlan != 0 {
            put16(&mut template, ADDRESS_BYTES, VLAN);
            put16(&mut template, ADDRESS_BYTES + 2, ends.vlan);
        }
        let ip = &mut template[IP..];
        let (ethertype, sum) = match (ends.local, ends.remote) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => {
                (ip[0], ip[ipv4::TTL], ip[ipv4::PROTOCOL]) = (0x45, ends.ttl, protocol::UDP);
                ip[ipv4::SOURCE..][..4].copy_from_slice(&local.octets());
                ip[ipv4::DESTINATION..][..4].copy_from_slice(&remote.octets());
                (IPV4, Some(Sum::of(&ip[..ipv4::BYTES])))
            }
            (IpAddr::V6(local), IpAddr::V6(remote)) => {
                (ip[0], ip[ipv6::NEXT], ip[ipv6::HOPS]) = (0x60, protocol::UDP, ends.ttl);
                ip[ipv6::SOURCE..][..16].copy_from_slice(&local.octets());
                ip[ipv6::DESTINATION..][..16].copy_from_slice(&remote.octets());
                (IPV6, None)
            }
            _ => return None,
        };
        put16(&mut template, IP - 2, ethertype);
        let mut outer = Self { template, start, sum };
        let (udp, tunnel) = (outer.udp(), outer.udp() + udp::BYTES);
        put16(&mut outer.template, udp + udp::DESTINATION, ends.port);
        match ends.is_geneve {
            true => put16(&mut outer.template, tunnel + GENEVE_PROTOCOL, ETHERNET),
            false => outer.template[tunnel] = VXLAN_HAS_VNI,
        }
        outer.template[tunnel + 4..][..3].copy_from_slice(&vni);
        Some(outer)
    }

    /// Bytes of the headers.
    #[must_use]
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.end() - self.start
    }

    /// Whether they have a tag.
    #[must_use]
    #[inline]
    pub fn is_tagged(&self) -> bool {
        self.start == 0
    }

    /// Where they end.
    #[inline]
    fn end(&self) -> usize {
        match self.sum {
            Some(_) => OUTER_V4,
            None => OUTER_MAX,
        }
    }

    /// Where the UDP header begins.
    #[inline]
    fn udp(&self) -> usize {
        self.end() - VXLAN_LEN - udp::BYTES
    }

    /// The headers for a frame. `inner`: its first bytes, of which the ECN bits are copied (RFC 6040, section 4.1);
    /// `len`: its length, at most 65,535 with these headers; `flow`: a hash of its flow; `id`: another number for each
    /// packet, by which an IPv4 receiver puts fragments together.
    #[must_use]
    #[inline(always)]
    pub fn headers(&self, inner: &[u8], len: u16, flow: u16, id: u16) -> Headers {
        let mut made = Headers {
            bytes: self.template,
            // The mask changes nothing, but the compiler then knows that it is in range.
            start: self.start & TAG_BYTES,
            end: self.end(),
        };
        let headers = &mut made.bytes;
        let ecn = ecn(inner);
        // Does not wrap: the caller has checked the length.
        let udp_len = len.wrapping_add((udp::BYTES + VXLAN_LEN) as u16);
        match self.sum {
            Some(sum) => {
                let len = udp_len.wrapping_add(ipv4::BYTES as u16);
                headers[IP + ipv4::TOS] = ecn;
                put16(headers, IP + ipv4::LEN, len);
                put16(headers, IP + ipv4::ID, id);
                let sum = sum.add_word(ecn.into()).add_word(len).add_word(id);
                put16(headers, IP + ipv4::CHECKSUM, sum.complement());
            }
            None => {
                headers[IP + ipv6::LOW_CLASS] = ecn << 4;
                put16(headers, IP + ipv6::LEN, udp_len);
            }
        }
        let udp = self.udp();
        put16(headers, udp + udp::SOURCE, FIRST_SOURCE_PORT | flow);
        put16(headers, udp + udp::LEN, udp_len);
        made
    }
}

/// The headers for a frame.
#[derive(Debug, Clone, Copy)]
pub struct Headers {
    bytes: [u8; OUTER_MAX],
    start: usize,
    end: usize,
}

impl AsRef<[u8]> for Headers {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }
}

/// The ECN bits for a frame's outer header; 0 if the frame has no IP header.
#[inline]
fn ecn(frame: &[u8]) -> u8 {
    let class = ethernet::payload(frame, Skip::TwoTags).and_then(|payload| match payload.ethertype {
        IPV4 => frame.get(payload.at + ipv4::TOS).copied(),
        IPV6 => frame.get(payload.at + ipv6::LOW_CLASS).map(|low| low >> 4),
        _ => None,
    });
    match class.unwrap_or(0) & ECN {
        // The inner header keeps the mark (RFC 6040, section 4.1, compatibility with Linux).
        CE => ECT_0,
        ecn => ecn,
    }
}

#[cfg(test)]
mod tests;
