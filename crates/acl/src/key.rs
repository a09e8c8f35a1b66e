//! The fields of a frame that rules can match.
//!
//! The headers are read from a copy of the frame's first bytes, and their lengths are checked against the
//! frame. A packet that claims to be longer than it is, or ends inside its headers, is malformed, since its
//! receiver may parse it differently.

use packet::ethernet::{self, ADDRESS_BYTES, HEADER_BYTES, Payload, Skip};
use packet::ethertype::{self, ARP, FIRST, IPV4, IPV6};
use packet::fields::ipv4;
use packet::icmp::*;
use packet::ip::{Follow, Fragment, Ipv4, Ipv6, Upper};
use packet::protocol::{DCCP, ICMP, ICMP_V6, SCTP, TCP, UDP, UDP_LITE};

/// Where an untagged frame has its IP header, and with IPv4 without options its ports, and their end.
const IPV4_AT: usize = HEADER_BYTES;
const PORTS_AT: usize = IPV4_AT + ipv4::BYTES;
const PLAIN_BYTES: usize = PORTS_AT + 4;
/// Minimum payload of a first fragment: all bytes that rules can match.
const FIRST_BYTES: usize = 8;

/// Hop limit of neighbour discovery, which proves that no router forwarded it; receivers ignore other values
/// (RFC 4861, 6.1 and 7.1).
const NEIGHBOURS_HOPS: u8 = 255;
/// Hop limit of multicast listener discovery (RFC 2710, section 3; RFC 3810, section 5).
const LISTENERS_HOPS: u8 = 1;

/// The frame has ports, or an ICMP type.
const HAS_PORTS: u8 = 1;
/// It is one of several fragments.
const IS_FRAGMENT: u8 = 2;
/// It is one of the ICMPv6 messages that replace ARP.
const IS_OF_THE_LINK: u8 = 4;

/// The frame's headers contradict themselves, or are longer than the bytes that are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// All fields that rules can match: rules cannot distinguish two frames with the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowKey {
    /// Addresses; of IPv4 in the second half.
    source: [u64; 2],
    destination: [u64; 2],
    /// Source and destination port (ICMP: type and code in the second half), 32 bits; ethertype, 16;
    /// protocol, 0 without IP, 8; flags, 8. One word, because they are written, compared and hashed together:
    /// a CPU that reads at once what was written in pieces stalls.
    rest: u64,
}

/// A key, and the number of the frame's bytes that it was read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Looked {
    /// The key.
    pub key: FlowKey,
    /// Number of bytes, from the first on.
    pub bytes: usize,
}

impl FlowKey {
    /// The key of a frame. `head`: its first bytes, of which [`packet::SHORT_HEAD`] suffice unless
    /// [`packet::ip::is_long`]; `len`: its length. Errors: [`Malformed`].
    #[inline]
    pub fn of(head: &[u8], len: usize) -> Result<Looked, Malformed> {
        let payload = ethernet::payload(head, Skip::Vlan).ok_or(Malformed)?;
        let Payload { ethertype, at } = match payload.ethertype {
            ..FIRST => ethernet::behind_llc(head, payload.at),
            _ => payload,
        };
        match ethertype {
            // Receivers remove any number of tags with VLAN 0, and parse the payload after the last.
            kind if ethertype::is_tag(kind) => Err(Malformed),
            IPV4 => of_ipv4(head, at, len),
            IPV6 => of_ipv6(head, at, len),
            ethertype => Ok(Looked {
                key: Self {
                    rest: rest(0, ethertype, 0, 0),
                    ..Self::NONE
                },
                bytes: at,
            }),
        }
    }

    /// A fast version of [`Self::of`] for most frames: TCP and UDP over IPv4 without a tag, options or
    /// fragments. `None`: use [`Self::of`].
    #[inline]
    pub fn of_plain(head: &[u8], len: usize) -> Option<Looked> {
        let head: &[u8; PLAIN_BYTES] = head.first_chunk()?;
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let double = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (protocol, end) = (
            head[IPV4_AT + ipv4::PROTOCOL],
            IPV4_AT + usize::from(word(IPV4_AT + ipv4::LEN)),
        );
        let is_plain = word(ADDRESS_BYTES) == IPV4
            && head[IPV4_AT] == 0x45
            && word(IPV4_AT + ipv4::FRAGMENT) & ipv4::FRAGMENT_BITS == 0
            && matches!(protocol, TCP | UDP)
            && (PLAIN_BYTES..=len).contains(&end);
        is_plain.then(|| Looked {
            key: Self {
                source: [0, double(IPV4_AT + ipv4::SOURCE).into()],
                destination: [0, double(IPV4_AT + ipv4::DESTINATION).into()],
                rest: rest(double(PORTS_AT), IPV4, protocol, HAS_PORTS),
            },
            bytes: PLAIN_BYTES,
        })
    }

    /// The key of no frame.
    pub(crate) const NONE: Self = Self {
        source: [0; 2],
        destination: [0; 2],
        rest: 0,
    };

    /// Whether both are equal. Compares all words without a branch: mostly they are equal.
    #[inline]
    pub(crate) fn is(&self, other: &Self) -> bool {
        let [a, b] = self.source;
        let [c, d] = self.destination;
        let differs = (a ^ other.source[0])
            | (b ^ other.source[1])
            | (c ^ other.destination[0])
            | (d ^ other.destination[1])
            | (self.rest ^ other.rest);
        differs == 0
    }

    pub(crate) fn ethertype(&self) -> u16 {
        low(self.rest >> 16)
    }

    /// 0 without IP.
    pub(crate) fn protocol(&self) -> u8 {
        self.rest.to_be_bytes()[6]
    }

    fn flags(&self) -> u8 {
        self.rest.to_be_bytes()[7]
    }

    pub(crate) fn source(&self) -> u128 {
        wide(self.source)
    }

    pub(crate) fn destination(&self) -> u128 {
        wide(self.destination)
    }

    /// The source port; `None`: it has none.
    pub(crate) fn source_port(&self) -> Option<u16> {
        self.has_ports().then_some(low(self.rest >> 48))
    }

    /// The destination port, or ICMP's type and code.
    pub(crate) fn destination_port(&self) -> Option<u16> {
        self.has_ports().then_some(low(self.rest >> 32))
    }

    /// A hash of the whole key. A sender that knows the function can send flows with equal hashes, but gains
    /// nothing: the hash is only a hint where to look in the cache.
    #[inline]
    pub fn hash(&self) -> u64 {
        let [a, b] = self.source;
        let [c, d] = self.destination;
        fold(
            fold(a ^ FACTORS[0], c ^ FACTORS[1]) ^ b,
            fold(d ^ FACTORS[2], self.rest ^ FACTORS[3]),
        )
    }

    /// Whether it is one of several fragments.
    pub(crate) fn is_fragment(&self) -> bool {
        self.flags() & IS_FRAGMENT != 0
    }

    fn has_ports(&self) -> bool {
        self.flags() & HAS_PORTS != 0
    }

    /// Whether it is needed to resolve addresses on the link: ARP, and the ICMPv6 messages that replace it.
    /// Router advertisements from a guest are excluded: they need a rule.
    pub(crate) fn is_of_the_link(&self, to_guest: bool) -> bool {
        let is_message = self.flags() & IS_OF_THE_LINK != 0;
        self.ethertype() == ARP || (is_message && (to_guest || self.icmp_type() != ROUTER_ADVERTISEMENT))
    }

    fn icmp_type(&self) -> u8 {
        self.rest.to_be_bytes()[2]
    }

    /// The key of an IPv6 packet with that hop limit: only messages that no router forwarded count as link messages.
    #[inline]
    fn with_hops(self, hops: u8) -> Self {
        if (self.protocol(), self.flags()) != (ICMP_V6, HAS_PORTS) {
            return self;
        }
        let needed = match self.icmp_type() {
            ROUTER_SOLICITATION | ROUTER_ADVERTISEMENT | NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT => {
                NEIGHBOURS_HOPS
            }
            LISTENER_QUERY | LISTENER_REPORT | LISTENER_DONE | LISTENER_REPORT_V2 => LISTENERS_HOPS,
            _ => return self,
        };
        let its = if hops == needed { IS_OF_THE_LINK } else { 0 };
        Self {
            rest: self.rest | u64::from(its),
            ..self
        }
    }
}

/// The last word of a key.
#[inline]
fn rest(ports: u32, ethertype: u16, protocol: u8, flags: u8) -> u64 {
    u64::from(ports) << 32 | u64::from(ethertype) << 16 | u64::from(protocol) << 8 | u64::from(flags)
}

/// Its lowest 16 bits.
#[inline]
#[allow(clippy::cast_possible_truncation)]
fn low(bits: u64) -> u16 {
    bits as u16
}

const FACTORS: [u64; 4] = [
    0x2d35_8dcc_aa6c_78a5,
    0x8bb8_4b93_962e_acc9,
    0x4b33_a62e_d433_d4a3,
    0x4d5a_2da5_1de1_aa47,
];

/// XOR of both halves of the product, as in wyhash.
#[inline]
pub fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    // The halves.
    #[allow(clippy::cast_possible_truncation)]
    let folded = (product >> 64) as u64 ^ product as u64;
    folded
}

fn wide([high, low]: [u64; 2]) -> u128 {
    u128::from(high) << 64 | u128::from(low)
}

#[inline]
fn of_ipv4(head: &[u8], at: usize, len: usize) -> Result<Looked, Malformed> {
    let ip = Ipv4::at(head, at).ok_or(Malformed)?;
    let packet = ip.span.packet(head, len).ok_or(Malformed)?;
    let addresses = [ip.source, ip.destination].map(|address| [0, u32::from_be_bytes(*address).into()]);
    of_packet((IPV4, addresses), packet, ip.upper)
}

#[inline]
fn of_ipv6(head: &[u8], at: usize, len: usize) -> Result<Looked, Malformed> {
    let ip = Ipv6::at(head, at).ok_or(Malformed)?;
    let packet = ip.span.packet(head, len).ok_or(Malformed)?;
    let upper = ip.upper(packet, Follow::Usual).ok_or(Malformed)?;
    let addresses = [ip.source, ip.destination].map(|address| {
        let half = |at| packet::bytes(address, at).map_or(0, |half| u64::from_be_bytes(*half));
        [half(0), half(8)]
    });
    let Looked { key, bytes } = of_packet((IPV6, addresses), packet, upper)?;
    Ok(Looked {
        key: key.with_hops(ip.hop_limit),
        bytes,
    })
}

/// The key of a packet between these addresses, with its ports, or the ICMP type and code, if it has any.
/// Errors: it ends before them.
#[inline]
fn of_packet(
    (ethertype, [source, destination]): (u16, [[u64; 2]; 2]),
    packet: &[u8],
    upper: Upper,
) -> Result<Looked, Malformed> {
    let Upper {
        protocol,
        at,
        fragment,
    } = upper;
    let (ports, bytes, has_ports) = match protocol {
        _ if fragment == Fragment::Later => (0, 0, 0),
        TCP | UDP | DCCP | SCTP | UDP_LITE => {
            let ports = packet::bytes(packet, at).ok_or(Malformed)?;
            (u32::from_be_bytes(*ports), 4, HAS_PORTS)
        }
        protocol if protocol == icmp_of(ethertype) => {
            (packet::word(packet, at).ok_or(Malformed)?.into(), 2, HAS_PORTS)
        }
        _ => (0, 0, 0),
    };
    let is_fragment = match fragment {
        Fragment::None => 0,
        _ if has_ports != 0 && packet.len() < at + FIRST_BYTES => return Err(Malformed),
        _ => IS_FRAGMENT,
    };
    Ok(Looked {
        key: FlowKey {
            source,
            destination,
            rest: rest(ports, ethertype, protocol, has_ports | is_fragment),
        },
        bytes: at + bytes,
    })
}

/// The protocol number of ICMP in that version of IP.
#[inline]
pub(crate) fn icmp_of(ethertype: u16) -> u8 {
    match ethertype {
        IPV4 => ICMP,
        _ => ICMP_V6,
    }
}
