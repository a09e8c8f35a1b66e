//! What rules look at of a frame.
//!
//! The headers are read from a copy of the frame's first bytes. What they say of lengths is held against the frame: a
//! packet that says it is longer than it is, or ends inside its headers, is judged by nobody, since its receiver may read
//! something else than was read here.

use model::config::{ARP, DCCP, ICMP, ICMP_V6, IPV4, IPV6, LLC, SCTP, TCP, UDP, UDP_LITE};

use crate::ethernet::{self, ADDRESS_BYTES, TAG, TAG_BYTES};
use crate::ipv6::{AUTHENTICATION, FRAGMENT_BYTES, HOST_IDENTITY, MOBILITY, SHIM, Upper};

const FIRST_TYPE: u16 = 0x0600;
/// SNAP whose protocol is an ethertype (IEEE 802; RFC 1042 for IP), and that of bridges (00-00-F8, IEEE 802.1H), which
/// wireless stations take off alike: some receivers take such frames like others.
const SNAP: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0];
const BRIDGE_TUNNEL: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0xf8];
/// The same with that type.
const SNAP_BYTES: usize = SNAP.len() + 2;

/// Headers of IPv6 that are protocols of their own to rules: none but hosts that agreed on it go on behind them (IPsec,
/// shim6), or nobody does (mobility, RFC 6275; host identity, RFC 7401).
const NOT_FOLLOWED: [u8; 4] = [AUTHENTICATION, MOBILITY, HOST_IDENTITY, SHIM];

const IPV4_BYTES: usize = 20;
/// Of the word with flags: where the fragment belongs, and that more of them follow.
const FRAGMENT_AT: u16 = 0x1fff;
const MORE_FRAGMENTS: u16 = 0x2000;
/// Where an untagged frame has its IP header, and with IPv4 without options the end of its ports.
const IPV4_AT: usize = ADDRESS_BYTES + 2;
const PLAIN_BYTES: usize = IPV4_AT + IPV4_BYTES + 4;
const IPV6_BYTES: usize = 40;
/// What the first of several fragments has to have of what it carries: all that rules look at.
const FIRST_BYTES: usize = 8;

/// Multicast listeners' queries, reports and dones (RFC 2710, RFC 3810).
const LISTENERS: [u8; 4] = [130, 131, 132, 143];
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Hop limit of neighbour discovery, which no router has passed on then; with another one receivers ignore it
/// (RFC 4861, 6.1 and 7.1).
const NEIGHBOURS_HOPS: u8 = 255;
/// The one of what listeners say (RFC 2710, section 3; RFC 3810, section 5).
const LISTENERS_HOPS: u8 = 1;

/// A frame has ports, or an ICMP type.
const HAS_PORTS: u8 = 1;
/// It is one of several fragments.
const IS_FRAGMENT: u8 = 2;
/// It is what IPv6 has in ARP's place.
const IS_OF_THE_LINK: u8 = 4;

/// The frame's headers contradict themselves, or go on behind the bytes that are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// All of a frame that rules look at: two frames with the same key are alike to all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowKey {
    /// Addresses; of IPv4 in the second half.
    source: [u64; 2],
    destination: [u64; 2],
    /// Source and destination port, of ICMP type and code in the second half: 32 bits; ethertype: 16; protocol, 0 where
    /// there is no IP: 8; flags: 8. In one word, as they are written, compared and hashed: a CPU that reads at once what was
    /// written in pieces waits for them.
    rest: u64,
}

/// A key, and how many of the frame's bytes it was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Looked {
    /// The key.
    pub key: FlowKey,
    /// So many bytes, from the first on.
    pub bytes: usize,
}

impl FlowKey {
    /// Of a frame. `head`: its first bytes, all of them or as many as are looked at; `len`: its length.
    /// Errors: [`Malformed`].
    #[inline]
    pub fn of(head: &[u8], len: usize) -> Result<Looked, Malformed> {
        let (ethertype, at) = match word(head, ADDRESS_BYTES).ok_or(Malformed)? {
            TAG => (
                word(head, ADDRESS_BYTES + TAG_BYTES).ok_or(Malformed)?,
                ADDRESS_BYTES + TAG_BYTES + 2,
            ),
            ethertype => (ethertype, ADDRESS_BYTES + 2),
        };
        match ethertype {
            ..FIRST_TYPE => of_llc(head, at, len),
            ethertype => of_type(ethertype, head, at, len),
        }
    }

    /// What [`Self::of`] says of most frames, found in few steps: TCP and UDP over IPv4 without a tag, options or
    /// fragments. `None`: ask that.
    #[inline]
    pub fn of_plain(head: &[u8], len: usize) -> Option<Looked> {
        let head: &[u8; PLAIN_BYTES] = head.first_chunk()?;
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let double = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (protocol, end) = (head[23], IPV4_AT + usize::from(word(16)));
        let is_plain = word(12) == IPV4
            && head[IPV4_AT] == 0x45
            && word(20) & (FRAGMENT_AT | MORE_FRAGMENTS) == 0
            && matches!(protocol, TCP | UDP)
            && (PLAIN_BYTES..=len).contains(&end);
        is_plain.then(|| Looked {
            key: Self {
                source: [0, double(26).into()],
                destination: [0, double(30).into()],
                rest: rest(double(34), IPV4, protocol, HAS_PORTS),
            },
            bytes: PLAIN_BYTES,
        })
    }

    /// Of no frame.
    pub(crate) const NONE: Self = Self {
        source: [0; 2],
        destination: [0; 2],
        rest: 0,
    };

    /// Whether both are alike. All of them is compared whatever is found first: most often they are.
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

    /// 0 where there is no IP.
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

    /// A hash of all of it. Who knows how it is made can send flows with the same one, and gains nothing: it is a hint
    /// where in the cache to look.
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

    /// Without it no address is found on the link: ARP, and what IPv6 has in its place. What a router says of itself is
    /// not to be said by a guest of which nothing is said.
    pub(crate) fn is_of_the_link(&self, to_guest: bool) -> bool {
        let is_message = self.flags() & IS_OF_THE_LINK != 0;
        self.ethertype() == ARP || (is_message && (to_guest || self.icmp_type() != ROUTER_ADVERTISEMENT))
    }

    fn icmp_type(&self) -> u8 {
        self.rest.to_be_bytes()[2]
    }

    /// The key of an IPv6 packet with that hop limit: of the link are messages that no router has passed on.
    #[inline]
    fn with_hops(self, hops: u8) -> Self {
        if (self.protocol(), self.flags()) != (ICMP_V6, HAS_PORTS) {
            return self;
        }
        let needed = match self.icmp_type() {
            ROUTER_SOLICITATION | ROUTER_ADVERTISEMENT | NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT => {
                NEIGHBOURS_HOPS
            }
            kind if LISTENERS.contains(&kind) => LISTENERS_HOPS,
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

/// The lowest 16 bits.
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

/// Both halves of a product, as wyhash does it.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    // The halves.
    #[allow(clippy::cast_possible_truncation)]
    let folded = (product >> 64) as u64 ^ product as u64;
    folded
}

fn wide([high, low]: [u64; 2]) -> u128 {
    u128::from(high) << 64 | u128::from(low)
}

/// Whether more than the first 64 bytes say what [`FlowKey::of`] wants to know of a frame that begins with these:
/// options, headers behind that of IPv6, or a type behind LLC.
#[inline]
pub fn is_long(head: &[u8; 64]) -> bool {
    let (ethertype, ip) = match u16::from_be_bytes([head[12], head[13]]) {
        TAG => (u16::from_be_bytes([head[16], head[17]]), 18),
        ethertype => (ethertype, 14),
    };
    match ethertype {
        IPV4 => head[ip] & 0xf > 5,
        IPV6 => !matches!(head[ip + 6], TCP | UDP | ICMP_V6),
        other => other < FIRST_TYPE,
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*bytes))
}

#[inline]
fn double(bytes: &[u8; 8]) -> u64 {
    u64::from_be_bytes(*bytes)
}

/// Of a frame that has an ethertype, and behind it what begins there.
#[inline]
fn of_type(ethertype: u16, head: &[u8], at: usize, len: usize) -> Result<Looked, Malformed> {
    match ethertype {
        // Receivers take off tags of VLAN 0, any number of them, and read what is behind the last.
        kind if ethernet::is_tag(kind) => Err(Malformed),
        IPV4 => of_ipv4(head, at, len),
        IPV6 => of_ipv6(head, at, len),
        ethertype => Ok(Looked {
            key: FlowKey {
                rest: rest(0, ethertype, 0, 0),
                ..FlowKey::NONE
            },
            bytes: at,
        }),
    }
}

/// Of a frame whose type is a length.
#[cold]
#[inline(never)]
fn of_llc(head: &[u8], at: usize, len: usize) -> Result<Looked, Malformed> {
    let behind = at + SNAP_BYTES;
    let known = &head[at..behind.min(head.len())];
    let kind = known.strip_prefix(&SNAP).or(known.strip_prefix(&BRIDGE_TUNNEL));
    match kind {
        Some(&[a, b]) if u16::from_be_bytes([a, b]) >= FIRST_TYPE => {
            of_type(u16::from_be_bytes([a, b]), head, behind, len)
        }
        _ => Ok(Looked {
            key: FlowKey {
                rest: rest(0, LLC, 0, 0),
                ..FlowKey::NONE
            },
            // What stands there says that it is no SNAP.
            bytes: at + known.len(),
        }),
    }
}

#[inline]
fn of_ipv4(head: &[u8], at: usize, len: usize) -> Result<Looked, Malformed> {
    let header: &[u8; IPV4_BYTES] = head.get(at..).and_then(<[u8]>::first_chunk).ok_or(Malformed)?;
    let header_bytes = usize::from(header[0] & 0xf) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let (payload, end) = (at + header_bytes, at + total);
    if header[0] >> 4 != 4 || header_bytes < IPV4_BYTES || total < header_bytes || end > len {
        return Err(Malformed);
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    let (is_first, is_last) = (fragment & FRAGMENT_AT == 0, fragment & MORE_FRAGMENTS == 0);
    let address = |at: usize| {
        let [a, b, c, d] = [header[at], header[at + 1], header[at + 2], header[at + 3]];
        [0, u64::from(u32::from_be_bytes([a, b, c, d]))]
    };
    let key = FlowKey {
        source: address(12),
        destination: address(16),
        rest: rest(
            0,
            IPV4,
            header[9],
            if is_first && is_last { 0 } else { IS_FRAGMENT },
        ),
    };
    if !is_first {
        return Ok(Looked { key, bytes: payload });
    }
    with_ports(key, (head, payload, end))
}

#[inline]
fn of_ipv6(head: &[u8], at: usize, len: usize) -> Result<Looked, Malformed> {
    let header: &[u8; IPV6_BYTES] = head.get(at..).and_then(<[u8]>::first_chunk).ok_or(Malformed)?;
    let end = at + IPV6_BYTES + usize::from(u16::from_be_bytes([header[4], header[5]]));
    if header[0] >> 4 != 6 || end > len {
        return Err(Malformed);
    }
    let address = |at: usize| {
        let double = |at: usize| header[at..].first_chunk().map_or(0, double);
        [double(at), double(at + 8)]
    };
    let key = FlowKey {
        source: address(8),
        destination: address(24),
        rest: rest(0, IPV6, header[6], 0),
    };
    let payload = at + IPV6_BYTES;
    let Looked { key, bytes } = match header[6] {
        TCP | UDP | ICMP_V6 => with_ports(key, (head, payload, end)),
        _ => behind_further_headers(key, (head, payload, end)),
    }?;
    Ok(Looked {
        key: key.with_hops(header[7]),
        bytes,
    })
}

#[cold]
#[inline(never)]
fn behind_further_headers(
    key: FlowKey,
    (head, payload, end): (&[u8], usize, usize),
) -> Result<Looked, Malformed> {
    let known = &head[..end.min(head.len())];
    let upper = Upper::behind((key.protocol(), payload), known, &NOT_FOLLOWED).ok_or(Malformed)?;
    let flags = if upper.fragment { IS_FRAGMENT } else { 0 };
    match upper.protocol {
        Some(protocol) => with_ports(
            FlowKey {
                rest: rest(0, IPV6, protocol, flags),
                ..key
            },
            (head, upper.at, end),
        ),
        // A later fragment: its header says what the first one began with.
        None => Ok(Looked {
            key: FlowKey {
                rest: rest(0, IPV6, known[upper.at - FRAGMENT_BYTES], flags),
                ..key
            },
            bytes: upper.at,
        }),
    }
}

/// With what the packet's payload begins with, from `at` to `end`, where that is said.
/// Errors: it is not there.
#[inline]
fn with_ports(key: FlowKey, (head, at, end): (&[u8], usize, usize)) -> Result<Looked, Malformed> {
    let known = head.get(at..end.min(head.len())).ok_or(Malformed)?;
    let (ports, bytes) = match key.protocol() {
        TCP | UDP | DCCP | SCTP | UDP_LITE => {
            (known.first_chunk().map(|ports| u32::from_be_bytes(*ports)), 4)
        }
        protocol if protocol == icmp_of(key.ethertype()) => {
            let kind = known
                .first_chunk()
                .map(|kind| u32::from(u16::from_be_bytes(*kind)));
            (kind, 2)
        }
        _ => return Ok(Looked { key, bytes: at }),
    };
    let is_cut = key.is_fragment() && known.len() < FIRST_BYTES;
    let ports = ports.filter(|_| !is_cut).ok_or(Malformed)?;
    let rest = key.rest | u64::from(ports) << 32 | u64::from(HAS_PORTS);
    Ok(Looked {
        key: FlowKey { rest, ..key },
        bytes: at + bytes,
    })
}

/// The number of ICMP in that version of IP.
#[inline]
pub(crate) fn icmp_of(ethertype: u16) -> u8 {
    match ethertype {
        IPV4 => ICMP,
        _ => ICMP_V6,
    }
}
