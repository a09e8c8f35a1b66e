//! The input of a frame's hash (VirtIO 1.3, 5.1.6.4.3.2 to 5.1.6.4.3.4).
//!
//! Choices where the specification leaves them open:
//!
//! - VLAN tags, two at most, are skipped.
//! - A fragment has no ports, not even the first: so all fragments of a packet have one hash and go to one queue.
//! - If the headers are longer than the part that is read ([`HEADERS_MAX`] bytes), contradict themselves, or end with
//!   the packet, everything after them counts as absent: the hash is of the addresses, without ports.
//! - Padding after the packet is not part of it.

use packet::HEADERS_MAX;
use packet::ethernet::{self, Payload, Skip};
use packet::ethertype::{IPV4, IPV6};
use packet::ip::{Follow, Fragment, Ipv4, Ipv6, Upper};
use packet::protocol::{DESTINATION_OPTIONS, ROUTING, TCP, UDP};

use super::{HashType, HashTypes};

/// The fields that are hashed. They are references: a copy would be written and read in pieces of different
/// sizes, which stalls store forwarding.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    kind: HashType,
    source: &'a [u8],
    destination: &'a [u8],
    ports: &'a [u8],
}

/// The hash types of a kind of packet: with the ports of TCP, with those of UDP, and without.
type Kinds = [HashType; 3];

const V4: Kinds = [HashType::TcpV4, HashType::UdpV4, HashType::Ipv4];
const V6: Kinds = [HashType::TcpV6, HashType::UdpV6, HashType::Ipv6];
const V6_EX: Kinds = [HashType::TcpV6Ex, HashType::UdpV6Ex, HashType::Ipv6Ex];

/// What follows the last IP header.
#[derive(Debug, Clone, Copy)]
enum Transport<'a> {
    Tcp(&'a [u8; 4]),
    Udp(&'a [u8; 4]),
    Other,
}

impl<'a> Input<'a> {
    /// The input for a frame that begins with `head`, of the first of `types` that applies; `None`: no hash.
    #[inline]
    #[must_use]
    pub fn of(head: &'a [u8], types: HashTypes) -> Option<Self> {
        let head = &head[..head.len().min(HEADERS_MAX)];
        let Payload { ethertype, at } = ethernet::payload(head, Skip::TwoTags)?;
        match ethertype {
            IPV4 => {
                let ip = Ipv4::at(head, at)?;
                let transport = transport(ip.span.packet_or_rest(head), ip.upper);
                let (kind, ports) = choose(V4, transport, types)?;
                Some(Self {
                    kind,
                    source: ip.source,
                    destination: ip.destination,
                    ports,
                })
            }
            IPV6 => ipv6(&Ipv6::at(head, at)?, head, types),
            _ => None,
        }
    }

    /// The hash type.
    #[inline]
    #[must_use]
    pub fn kind(&self) -> HashType {
        self.kind
    }

    /// The input of the hash, in order; [`HashType::input_bytes`] in all.
    #[inline]
    #[must_use]
    pub fn parts(&self) -> [&'a [u8]; 3] {
        [self.source, self.destination, self.ports]
    }
}

/// The first type that is enabled and applies to the packet, and its ports.
#[inline]
fn choose<'a>(
    [tcp, udp, ip]: Kinds,
    transport: Transport<'a>,
    types: HashTypes,
) -> Option<(HashType, &'a [u8])> {
    match transport {
        Transport::Tcp(ports) if types.has(tcp) => Some((tcp, ports)),
        Transport::Udp(ports) if types.has(udp) => Some((udp, ports)),
        _ => types.has(ip).then_some((ip, &[])),
    }
}

/// The ports of TCP and UDP. A fragment has none.
#[inline]
fn transport(packet: &[u8], upper: Upper) -> Transport<'_> {
    let is_whole = matches!(upper.fragment, Fragment::None | Fragment::Atomic);
    match (upper.protocol, packet::bytes(packet, upper.at)) {
        (TCP, Some(ports)) if is_whole => Transport::Tcp(ports),
        (UDP, Some(ports)) if is_whole => Transport::Udp(ports),
        _ => Transport::Other,
    }
}

#[inline]
fn ipv6<'a>(ip: &Ipv6<'a>, head: &'a [u8], types: HashTypes) -> Option<Input<'a>> {
    let packet = ip.span.packet_or_rest(head);
    // The addresses in a routing header of type 2 (RFC 6275, 6.4) and in the destination options (6.3).
    let (mut routed_to, mut home_address, mut is_extended) = (None, None, false);
    let upper = ip.upper_with(packet, Follow::All, |kind, header| {
        is_extended = true;
        match kind {
            ROUTING => routed_to = routed_to.or(routed_home(header)),
            DESTINATION_OPTIONS => home_address = home_address.or(home_of(header)),
            _ => (),
        }
    });
    let transport = upper.map_or(Transport::Other, |upper| transport(packet, upper));
    let (source, destination) = (ip.source, ip.destination);
    let extended = match is_extended || upper.is_none() {
        true => choose(V6_EX, transport, types),
        false => None,
    };
    let (kind, ports) = extended.or_else(|| choose(V6, transport, types))?;
    Some(Input {
        kind,
        source: home_address.filter(|_| extended.is_some()).unwrap_or(source),
        destination: routed_to.filter(|_| extended.is_some()).unwrap_or(destination),
        ports,
    })
}

/// The address in a routing header of type 2, which has exactly one, not yet visited.
fn routed_home(header: &[u8]) -> Option<&[u8; 16]> {
    let is_one = header.len() == 24 && header[2] == 2 && header[3] == 1;
    header[8..].first_chunk().filter(|_| is_one)
}

/// The home address among destination options.
fn home_of(header: &[u8]) -> Option<&[u8; 16]> {
    const PAD1: u8 = 0;
    const HOME_ADDRESS: u8 = 0xc9;
    let mut options = header.get(2..)?;
    while let [kind, rest @ ..] = options {
        if *kind == PAD1 {
            options = rest;
            continue;
        }
        let (len, rest) = rest.split_first()?;
        let (value, rest) = rest.split_at_checked(usize::from(*len))?;
        if let (HOME_ADDRESS, Ok(address)) = (*kind, value.try_into()) {
            return Some(address);
        }
        options = rest;
    }
    None
}
