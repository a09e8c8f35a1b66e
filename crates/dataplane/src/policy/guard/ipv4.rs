//! IPv4 (RFC 791).

use packet::icmp::{V4_REDIRECT, V4_ROUTER_ADVERTISEMENT};
use packet::ip::{Fragment, Ipv4};
use packet::protocol::{ICMP, UDP};

use super::{Refusal, SourceGuard, bytes, is_of_server};

const DHCP_SERVER: u16 = 67;
const DHCP_CLIENT: u16 = 68;
/// Least payload of a first fragment: no sender sends less, and later fragments must not bring the checked bytes.
const FIRST_BYTES: usize = 8;
/// Ports of a DHCP request.
const FROM_CLIENT: [u8; 4] = [0, DHCP_CLIENT as u8, 0, DHCP_SERVER as u8];

/// `head`, `len`: as of [`SourceGuard::check`]; `at`: where the packet begins.
pub(super) fn check(guard: &SourceGuard, (head, len): (&[u8], usize), at: usize) -> Result<usize, Refusal> {
    let ip = Ipv4::at(head, at).ok_or(Refusal::Headers)?;
    let packet = ip.span.packet(head, len).ok_or(Refusal::Headers)?;
    let (upper, source) = (ip.upper, *ip.source);
    let payload = upper.at;
    let is_own = guard.addresses.has_v4(source);
    match (upper.fragment, upper.protocol) {
        (Fragment::Later, _) => return is_own.then_some(payload).ok_or(Refusal::Source),
        (Fragment::First, UDP | ICMP) => _ = bytes::<FIRST_BYTES>(packet, payload)?,
        _ => (),
    }
    match upper.protocol {
        UDP => {
            let ports = *bytes(packet, payload)?;
            let asks_for_address = source == [0; 4]
                && *ip.destination == [0xff; 4]
                && ports == FROM_CLIENT
                && upper.fragment == Fragment::None;
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
            let [kind] = *bytes(packet, payload)?;
            if matches!(kind, V4_REDIRECT | V4_ROUTER_ADVERTISEMENT) && !guard.router {
                return Err(Refusal::Router);
            }
            Ok(payload + 1)
        }
        _ => Ok(payload),
    }
}
