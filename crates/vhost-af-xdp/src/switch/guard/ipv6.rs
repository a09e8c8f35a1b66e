//! IPv6 (RFC 8200).

use acl::ipv6::Upper;
use model::config::ICMP_V6;

use super::neighbours::{self, ALLOWED_FROM_UNSPECIFIED, Message};
use super::{Packet, Refusal, SourceGuard, UDP, is_of_server};
use crate::switch::ethernet::Mac;

const HEADER_BYTES: usize = 40;
const DHCP_SERVER: u16 = 547;
const DHCP_CLIENT: u16 = 546;

pub(super) fn check(guard: &SourceGuard, mac: Mac, packet: Packet<'_>) -> Result<usize, Refusal> {
    let header = packet.bytes::<HEADER_BYTES>(packet.at)?;
    if header[0] >> 4 != 6 {
        return Err(Refusal::Headers);
    }
    let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let packet = packet.until(packet.at + HEADER_BYTES + payload)?;
    let source = *header[8..].first_chunk().ok_or(Refusal::Headers)?;
    let upper = Upper::behind((header[6], packet.at + HEADER_BYTES), packet.known, &[]);
    let upper = upper.ok_or(Refusal::Headers)?;
    if !guard.is_own(mac, source) && source != [0; 16] {
        return Err(Refusal::Source);
    }
    let is_unnamed = source == [0; 16];
    match upper.protocol {
        Some(ICMP_V6) => {
            let [kind] = *packet.bytes(upper.at)?;
            if is_unnamed && !ALLOWED_FROM_UNSPECIFIED.contains(&kind) {
                return Err(Refusal::Source);
            }
            let message = Message {
                kind,
                at: upper.at,
                fragment: upper.fragment,
                unspecified: is_unnamed,
            };
            neighbours::check(guard, mac, packet, &message)
        }
        _ if is_unnamed => Err(Refusal::Source),
        Some(UDP) => {
            let ports = *packet.bytes::<4>(upper.at)?;
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
