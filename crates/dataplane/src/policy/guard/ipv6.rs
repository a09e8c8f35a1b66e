//! IPv6 (RFC 8200).

use packet::ethernet::Mac;
use packet::ip::{Follow, Fragment, Ipv6};
use packet::protocol::{ICMP_V6, UDP};

use super::neighbours::{self, ALLOWED_FROM_UNSPECIFIED};
use super::{Refusal, SourceGuard, bytes, is_of_server};

const DHCP_SERVER: u16 = 547;
const DHCP_CLIENT: u16 = 546;

/// `head`, `len`: as of [`SourceGuard::check`]; `at`: where the packet begins.
pub(super) fn check(
    guard: &SourceGuard,
    mac: Mac,
    (head, len): (&[u8], usize),
    at: usize,
) -> Result<usize, Refusal> {
    let ip = Ipv6::at(head, at).ok_or(Refusal::Headers)?;
    let packet = ip.span.packet(head, len).ok_or(Refusal::Headers)?;
    let upper = ip.upper(packet, Follow::All).ok_or(Refusal::Headers)?;
    let source = *ip.source;
    let unspecified = source == [0; 16];
    if !guard.is_own(mac, source) && !unspecified {
        return Err(Refusal::Source);
    }
    let protocol = Some(upper.protocol).filter(|_| upper.fragment != Fragment::Later);
    match protocol {
        Some(ICMP_V6) => {
            let [kind] = *bytes(packet, upper.at)?;
            if unspecified && !ALLOWED_FROM_UNSPECIFIED.contains(&kind) {
                return Err(Refusal::Source);
            }
            neighbours::check((guard, mac), (packet, ip.span.end), (upper, kind), unspecified)
        }
        _ if unspecified => Err(Refusal::Source),
        Some(UDP) => {
            let ports = *bytes(packet, upper.at)?;
            if is_of_server(ports, DHCP_SERVER, DHCP_CLIENT) && !guard.dhcp_server {
                return Err(Refusal::DhcpServer);
            }
            Ok(upper.at + ports.len())
        }
        Some(_) | None => Ok(upper.at),
    }
}

impl SourceGuard {
    /// Whether an address is the port's: the link-local one that is made of its MAC (RFC 4291, appendix A), too.
    #[inline]
    pub(super) fn is_own(&self, mac: Mac, address: [u8; 16]) -> bool {
        let [a, b, c, d, e, f] = mac;
        address == [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
            || self.addresses.has_v6(address)
    }
}
