//! IPv4 (RFC 791).

use model::config::ICMP;

use super::{Packet, Refusal, SourceGuard, UDP, is_of_server};

const HEADER_BYTES: usize = 20;
/// ICMP: redirect (RFC 792), and router advertisement (RFC 1256).
const OF_ROUTERS: [u8; 2] = [5, 9];
const DHCP_SERVER: u16 = 67;
const DHCP_CLIENT: u16 = 68;
/// Least payload of a first fragment: no sender sends less, and the rest must not arrive later.
const FIRST_BYTES: usize = 8;
/// Ports of a DHCP request.
const FROM_CLIENT: [u8; 4] = [0, DHCP_CLIENT as u8, 0, DHCP_SERVER as u8];

pub(super) fn check(guard: &SourceGuard, packet: Packet<'_>) -> Result<usize, Refusal> {
    let at = packet.at;
    let header = packet.bytes::<HEADER_BYTES>(at)?;
    let header_bytes = usize::from(header[0] & 0xf) * 4;
    if header[0] >> 4 != 4 || header_bytes < HEADER_BYTES {
        return Err(Refusal::Headers);
    }
    let field = |at| u16::from_be_bytes([header[at], header[at + 1]]);
    let packet = packet.until(at + usize::from(field(2)))?;
    let payload = at + header_bytes;
    if payload > packet.known.len() {
        return Err(Refusal::Headers);
    }
    let address = |at| [0, 1, 2, 3].map(|byte: usize| header[at + byte]);
    let (source, destination) = (address(12), address(16));
    let is_own = guard.addresses.has_v4(source);
    let (is_first, is_last) = (field(6) & 0x1fff == 0, field(6) & 0x2000 == 0);
    if !is_first {
        return is_own.then_some(payload).ok_or(Refusal::Source);
    }
    if !is_last && matches!(header[9], UDP | ICMP) {
        packet.bytes::<FIRST_BYTES>(payload)?;
    }
    match header[9] {
        UDP => {
            let ports = *packet.bytes::<4>(payload)?;
            let asks_for_address =
                source == [0; 4] && destination == [0xff; 4] && ports == FROM_CLIENT && is_last;
            if !is_own && !asks_for_address {
                return Err(Refusal::Source);
            }
            if is_of_server(ports, DHCP_SERVER, DHCP_CLIENT) && !guard.dhcp_server {
                return Err(Refusal::DhcpServer);
            }
            Ok(payload + ports.len())
        }
        _ if !is_own => Err(Refusal::Source),
        ICMP => {
            let [kind] = *packet.bytes(payload)?;
            if OF_ROUTERS.contains(&kind) && !guard.router {
                return Err(Refusal::Router);
            }
            Ok(payload + 1)
        }
        _ => Ok(payload),
    }
}
