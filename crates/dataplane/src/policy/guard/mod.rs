//! IP source guard: rejects spoofed IPv4, IPv6, ARP and ND (`ips` of a port).
//!
//! A [`SourceGuard`] checks the first bytes of a frame, behind the Ethernet header, whose source address was checked
//! before ([`crate::port_lane`]). It is pure: bytes in, a verdict out. It reads a copy that the guest cannot change,
//! and returns how many bytes the verdict depends on: a checksum that is completed later must not be stored in these
//! bytes, because that would change them afterwards.
//!
//! | frame | is sent if |
//! |---|---|
//! | ARP | Ethernet and IPv4, a request or a reply, both sender addresses are the port's; or a probe for its address |
//! | IPv4 | its source is the port's; or it is a DHCP request from 0.0.0.0 |
//! | IPv6 | its source is the port's, or the link-local address of its MAC; or a host without an address sends it |
//! | neighbour discovery | as IPv6, and what it announces, target and link-layer address, is the port's, too |
//! | router advertisement, redirect (ICMPv6, ICMP) | the port is a router |
//! | to a DHCP client, or from a server's port | the port is a DHCP server |
//! | other protocols | never |
//!
//! Frames with unusable headers are rejected: those that do not fit in [`packet::HEADERS_MAX`], that contradict
//! themselves, and first fragments without the headers that have to follow (RFC 7112, RFC 7113). Of later fragments
//! only the source is checked: the rest was checked in the first one. Neighbour discovery is never fragmented
//! (RFC 6980). Packets inside of tunnels are not checked.

mod addresses;
mod arp;
mod ipv4;
mod ipv6;
mod neighbours;
mod own;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use device::counters::{Counter, PairCounters};
use device::pair::Sending;
use packet::ethernet::{self, ADDRESS_BYTES, Mac, TAG_BYTES, Tags};
use packet::ethertype::{ARP, IPV4, IPV6};
use packet::word;

pub(crate) use self::addresses::Addresses;
pub use self::own::Guard;

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceGuard {
    /// The port's addresses.
    pub(crate) addresses: Addresses,
    /// It may send router advertisements and redirects.
    pub(crate) router: bool,
    /// It may send messages of a DHCP server.
    pub(crate) dhcp_server: bool,
}

impl SourceGuard {
    /// The guard for a port's options; `None`: only the Ethernet header is checked.
    pub fn of(guard: &model::config::Guard) -> Option<Self> {
        let ips = guard.ips.as_ref()?;
        Some(Self {
            addresses: Addresses::new(&ips.0),
            router: guard.router,
            dhcp_server: guard.dhcp_server,
        })
    }

    /// The single addresses among those of the port.
    pub fn hosts(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.hosts()
    }
}

/// Why a frame is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// An Ethernet address that is not the port's.
    SourceAddress,
    /// A VLAN that is not one of the port's.
    Vlan,
    /// A checksum would be stored inside the checked bytes.
    Checksum,
    /// Neither IPv4, IPv6 nor ARP.
    Protocol,
    /// ARP with addresses that are not the port's.
    Arp,
    /// Source address that is not the port's.
    Source,
    /// Neighbour discovery for others.
    Neighbour,
    /// A router's message.
    Router,
    /// A DHCP server's message.
    DhcpServer,
    /// Malformed or too long headers.
    Headers,
}

impl Refusal {
    /// The counter of such frames.
    pub(crate) fn counter(self, counters: &PairCounters) -> &Counter {
        match self {
            Self::SourceAddress => &counters.from_guest_source_address,
            Self::Vlan => &counters.from_guest_vlan,
            Self::Checksum => &counters.from_guest_checksum_in_headers,
            Self::Protocol => &counters.from_guest_protocol,
            Self::Arp => &counters.from_guest_arp,
            Self::Source => &counters.from_guest_ip_source,
            Self::Neighbour => &counters.from_guest_neighbour,
            Self::Router => &counters.from_guest_router,
            Self::DhcpServer => &counters.from_guest_dhcp_server,
            Self::Headers => &counters.from_guest_headers,
        }
    }
}

/// Whether the guest with that address may send what follows a frame's Ethernet header. `head`: the frame's first
/// bytes, as for [`SourceGuard::check`].
/// Errors: why not.
#[inline]
pub(crate) fn check_content(
    source_guard: Option<&SourceGuard>,
    mac: Mac,
    (head, tags): (&[u8], Tags),
    sending: &Sending,
) -> Result<(), Refusal> {
    let classified = match source_guard {
        None => ethernet::LOOK_BYTES,
        Some(source_guard) => source_guard.check(mac, head, sending.len, tags)?,
    };
    // Stored there, the checksum would change the checked bytes.
    match sending.request.csum {
        Some(at) if at.field() < classified => Err(Refusal::Checksum),
        _ => Ok(()),
    }
}

impl SourceGuard {
    /// Whether the guest with that address may send a frame; if so, how many of its first bytes the decision depends
    /// on.
    /// `head`: its first bytes, [`SHORT_HEAD`](packet::SHORT_HEAD) of them, or [`HEADERS_MAX`](packet::HEADERS_MAX) if
    /// [`packet::ip::is_long`]; `len`: its length.
    /// Errors: why not.
    #[inline]
    pub(crate) fn check(&self, mac: Mac, head: &[u8], len: u32, tags: Tags) -> Result<usize, Refusal> {
        let at = ADDRESS_BYTES + if tags == Tags::None { 0 } else { TAG_BYTES };
        let known = (head, len as usize);
        match word(head, at) {
            Some(IPV4) => ipv4::check(self, known, at + 2),
            Some(IPV6) => ipv6::check(self, mac, known, at + 2),
            Some(ARP) => arp::check(self, mac, head, at + 2),
            _ => Err(Refusal::Protocol),
        }
    }
}

/// Bytes of a packet.
#[inline]
fn bytes<const N: usize>(packet: &[u8], at: usize) -> Result<&[u8; N], Refusal> {
    packet::bytes(packet, at).ok_or(Refusal::Headers)
}

/// Whether UDP with these ports is from a server's port, or to a client's: clients accept either.
#[inline]
fn is_of_server(ports: [u8; 4], server: u16, client: u16) -> bool {
    let [a, b, c, d] = ports;
    u16::from_be_bytes([a, b]) == server || u16::from_be_bytes([c, d]) == client
}
