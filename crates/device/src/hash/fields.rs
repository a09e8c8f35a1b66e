//! Of what a frame's hash is computed (VirtIO 1.3, 5.1.6.4.3.2 to 5.1.6.4.3.4).
//!
//! What the specification leaves open, and what is done here:
//!
//! - VLAN tags, two at most, are skipped.
//! - A fragment has no ports, its first piece neither: so all pieces of a packet have one hash, and go one way.
//! - Where the headers are longer than what is looked at ([`MOST_HEAD`] bytes), contradict themselves, or end with the
//!   packet, what is behind is taken for absent: there are no ports then, and addresses remain.
//! - Padding behind the packet is no part of it.

use super::{HashType, HashTypes};

/// Bytes of a frame's beginning that are read. It bounds the time that a hostile sender can cost.
pub const MOST_HEAD: usize = 256;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPES_VLAN: [u16; 2] = [0x8100, 0x88a8];
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The fields that are hashed. They stay where they are: a copy would be written in pieces and read in others, for
/// which a CPU has to wait.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    kind: HashType,
    source: &'a [u8],
    destination: &'a [u8],
    ports: &'a [u8],
}

/// The hash types of a kind of packet, best first.
struct Kinds {
    tcp: HashType,
    udp: HashType,
    ip: HashType,
}

const V4: Kinds = Kinds {
    tcp: HashType::TcpV4,
    udp: HashType::UdpV4,
    ip: HashType::Ipv4,
};
const V6: Kinds = Kinds {
    tcp: HashType::TcpV6,
    udp: HashType::UdpV6,
    ip: HashType::Ipv6,
};
const V6_EX: Kinds = Kinds {
    tcp: HashType::TcpV6Ex,
    udp: HashType::UdpV6Ex,
    ip: HashType::Ipv6Ex,
};

/// What follows the last IP header.
#[derive(Debug, Clone, Copy)]
enum Transport<'a> {
    Tcp(&'a [u8; 4]),
    Udp(&'a [u8; 4]),
    Other,
}

impl<'a> Input<'a> {
    /// Of the frame that begins so, for the first of `types` that it allows; `None`: no hash is calculated.
    #[inline]
    #[must_use]
    pub fn of(head: &'a [u8], types: HashTypes) -> Option<Self> {
        let head = &head[..head.len().min(MOST_HEAD)];
        let (ethertype, packet) = network_layer(head)?;
        match ethertype {
            ETHERTYPE_IPV4 => ipv4(packet, types),
            ETHERTYPE_IPV6 => ipv6(packet, types),
            _ => None,
        }
    }

    /// Which type it is for.
    #[inline]
    #[must_use]
    pub fn kind(&self) -> HashType {
        self.kind
    }

    /// The input of the hash, one part behind the other: [`HashType::input_bytes`].
    #[inline]
    #[must_use]
    pub fn parts(&self) -> [&'a [u8]; 3] {
        [self.source, self.destination, self.ports]
    }
}

impl Kinds {
    /// The first one that is enabled and that the packet allows, and its ports.
    #[inline]
    fn choose<'a>(&self, transport: Transport<'a>, types: HashTypes) -> Option<(HashType, &'a [u8])> {
        match transport {
            Transport::Tcp(ports) if types.has(self.tcp) => Some((self.tcp, ports)),
            Transport::Udp(ports) if types.has(self.udp) => Some((self.udp, ports)),
            _ => types.has(self.ip).then_some((self.ip, &[])),
        }
    }
}

/// The type of what is behind Ethernet header and VLAN tags, and that.
#[inline]
fn network_layer(head: &[u8]) -> Option<(u16, &[u8])> {
    let mut at = 12;
    for _ in 0..3 {
        let ethertype = word(head, at)?;
        if !ETHERTYPES_VLAN.contains(&ethertype) {
            return Some((ethertype, &head[at + 2..]));
        }
        at += 4;
    }
    None
}

#[inline]
fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// The ports at the beginning of what `protocol` names, which is `at` that place of the packet.
#[inline]
fn transport(packet: &[u8], protocol: u8, at: usize) -> Transport<'_> {
    let Some(ports) = packet.get(at..).and_then(|rest| rest.first_chunk::<4>()) else {
        return Transport::Other;
    };
    match protocol {
        TCP => Transport::Tcp(ports),
        UDP => Transport::Udp(ports),
        _ => Transport::Other,
    }
}

/// Without the bytes behind its `end`; a length of 0 is ignored (GSO, jumbograms).
#[inline]
fn cut(packet: &[u8], header: usize, end: usize) -> &[u8] {
    let end = if end > header { end } else { packet.len() };
    &packet[..packet.len().min(end)]
}

#[inline]
fn ipv4(packet: &[u8], types: HashTypes) -> Option<Input<'_>> {
    /// MORE_FRAGMENTS and the offset.
    const FRAGMENT: u16 = 0x3fff;
    let header = packet.first_chunk::<20>()?;
    let header_bytes = usize::from(header[0] & 15) * 4;
    if header[0] >> 4 != 4 || header_bytes < header.len() {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let fragment = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT;
    let transport = match fragment {
        0 => transport(cut(packet, header_bytes, total), header[9], header_bytes),
        _ => Transport::Other,
    };
    let (kind, ports) = V4.choose(transport, types)?;
    Some(Input {
        kind,
        source: &header[12..16],
        destination: &header[16..20],
        ports,
    })
}

#[inline]
fn ipv6(packet: &[u8], types: HashTypes) -> Option<Input<'_>> {
    let header = packet.first_chunk::<40>()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let packet = cut(packet, header.len(), header.len() + payload);
    let (source, destination) = (&header[8..24], &header[24..40]);
    let input = |(kind, ports)| Input {
        kind,
        source,
        destination,
        ports,
    };
    let next = header[6];
    if !is_extension(next) {
        return V6.choose(transport(packet, next, header.len()), types).map(input);
    }
    let extensions = Extensions::walk(packet, next, header.len());
    match V6_EX.choose(extensions.transport, types) {
        Some((kind, ports)) => Some(Input {
            kind,
            source: extensions.home_address.unwrap_or(source),
            destination: extensions.routed_to.unwrap_or(destination),
            ports,
        }),
        None => V6.choose(extensions.transport, types).map(input),
    }
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
/// Mobility, HIP, Shim6.
const OTHERS: [u8; 3] = [135, 139, 140];

/// Whether that is an extension header of IPv6 that can be gone past (IANA, "IPv6 Extension Header Types").
#[inline]
fn is_extension(next: u8) -> bool {
    match next {
        HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION_OPTIONS => true,
        next => OTHERS.contains(&next),
    }
}

/// Parsed extension headers.
struct Extensions<'a> {
    /// Of the destination options (RFC 6275, 6.3).
    home_address: Option<&'a [u8]>,
    /// Of the routing header of type 2 (RFC 6275, 6.4).
    routed_to: Option<&'a [u8]>,
    transport: Transport<'a>,
}

impl<'a> Extensions<'a> {
    /// Goes through the headers from the first on, which is `at` that place. Each has 8 bytes at least, so there are no
    /// more than [`MOST_HEAD`] has room for.
    fn walk(packet: &'a [u8], first: u8, mut at: usize) -> Self {
        let mut found = Self {
            home_address: None,
            routed_to: None,
            transport: Transport::Other,
        };
        let mut next = first;
        while is_extension(next) {
            let Some(start) = packet.get(at..).and_then(|rest| rest.first_chunk::<8>()) else {
                return found;
            };
            let len = match next {
                FRAGMENT => 8,
                AUTHENTICATION => (usize::from(start[1]) + 2) * 4,
                _ => (usize::from(start[1]) + 1) * 8,
            };
            let Some(body) = packet.get(at..at + len) else {
                return found;
            };
            match next {
                // Offset and MORE_FRAGMENTS; a packet that is whole may have the header, too.
                FRAGMENT if u16::from_be_bytes([start[2], start[3]]) & 0xfff9 != 0 => return found,
                ROUTING => found.routed_to = found.routed_to.or(home_route(body)),
                DESTINATION_OPTIONS => found.home_address = found.home_address.or(home_address(body)),
                _ => (),
            }
            (next, at) = (start[0], at + len);
        }
        found.transport = transport(packet, next, at);
        found
    }
}

/// The address in a routing header of type 2, which has exactly one, not yet visited.
fn home_route(body: &[u8]) -> Option<&[u8]> {
    let is_one = body.len() == 24 && body[2] == 2 && body[3] == 1;
    is_one.then(|| &body[8..])
}

/// The home address among destination options.
fn home_address(body: &[u8]) -> Option<&[u8]> {
    const PAD1: u8 = 0;
    const HOME_ADDRESS: u8 = 0xc9;
    let mut options = body.get(2..)?;
    while let [kind, rest @ ..] = options {
        if *kind == PAD1 {
            options = rest;
            continue;
        }
        let (len, rest) = rest.split_first()?;
        let (value, rest) = rest.split_at_checked(usize::from(*len))?;
        if *kind == HOME_ADDRESS && value.len() == 16 {
            return Some(value);
        }
        options = rest;
    }
    None
}
