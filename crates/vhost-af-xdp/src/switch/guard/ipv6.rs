//! IPv6 (RFC 8200): the header, and the chain of those that extend it.

use model::config::ICMP_V6;

use super::neighbours::{self, Message, OF_THE_UNNAMED};
use super::{Lock, Packet, Refusal, UDP, is_of_server};
use crate::switch::ethernet::Mac;

const HEADER_BYTES: usize = 40;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
pub(crate) const FRAGMENT_BYTES: usize = 8;
pub(crate) const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
pub(crate) const MOBILITY: u8 = 135;
pub(crate) const HOST_IDENTITY: u8 = 139;
pub(crate) const SHIM: u8 = 140;
const DHCP_SERVER: u16 = 547;
const DHCP_CLIENT: u16 = 546;

/// What the headers lead to.
pub(crate) struct Upper {
    /// Its number; `None`: it is in a fragment before.
    pub(crate) protocol: Option<u8>,
    /// Where it begins.
    pub(crate) at: usize,
    /// It is one of fragments, or calls itself so.
    pub(crate) fragment: bool,
}

pub(super) fn check(lock: &Lock, mac: Mac, packet: Packet<'_>) -> Result<usize, Refusal> {
    let header = packet.bytes::<HEADER_BYTES>(packet.at)?;
    if header[0] >> 4 != 6 {
        return Err(Refusal::Headers);
    }
    let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let packet = packet.until(packet.at + HEADER_BYTES + payload)?;
    let source = *header[8..].first_chunk().ok_or(Refusal::Headers)?;
    let upper = Upper::behind((header[6], packet.at + HEADER_BYTES), packet.known, &[]);
    let upper = upper.ok_or(Refusal::Headers)?;
    if !lock.is_own(mac, source) && source != [0; 16] {
        return Err(Refusal::Source);
    }
    let is_unnamed = source == [0; 16];
    match upper.protocol {
        Some(ICMP_V6) => {
            let [kind] = *packet.bytes(upper.at)?;
            if is_unnamed && !OF_THE_UNNAMED.contains(&kind) {
                return Err(Refusal::Source);
            }
            let message = Message {
                kind,
                at: upper.at,
                fragment: upper.fragment,
                unnamed: is_unnamed,
            };
            neighbours::check(lock, mac, packet, &message)
        }
        _ if is_unnamed => Err(Refusal::Source),
        Some(UDP) => {
            let ports = *packet.bytes::<4>(upper.at)?;
            if is_of_server(ports, DHCP_SERVER, DHCP_CLIENT) && !lock.dhcp_server {
                return Err(Refusal::DhcpServer);
            }
            Ok(upper.at + ports.len())
        }
        Some(_) | None => Ok(upper.at),
    }
}

impl Lock {
    /// Whether an address is the port's: the link-local one that is made of its MAC (RFC 4291, appendix A), too.
    #[inline]
    pub(super) fn is_own(&self, mac: Mac, address: [u8; 16]) -> bool {
        let [a, b, c, d, e, f] = mac;
        address == [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
            || self.addresses.has_v6(address)
    }
}

impl Upper {
    /// Follows the headers, of which the first has that number and begins there; `None`: they do not end in the bytes
    /// that are known, or there is a second fragment header: a packet has one at most (RFC 8200, section 4), and what is in
    /// the next one belongs to the chain that the first fragment has to have whole (RFC 7112). Of a later fragment the
    /// header that says so is the last. Unknown numbers are protocols, those for experiments (253, 254) too: receivers
    /// go on behind them no more than behind others. `ends`: numbers of headers that are not
    /// followed, as if they were of protocols.
    pub(crate) fn behind((first, begin): (u8, usize), known: &[u8], ends: &[u8]) -> Option<Self> {
        let (mut next, mut at, mut fragment) = (first, begin, false);
        // Each has eight bytes at least, so that those that are known bound them.
        loop {
            let bytes = match next {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | MOBILITY | HOST_IDENTITY | SHIM
                    if !ends.contains(&next) =>
                {
                    (usize::from(*known.get(at + 1)?) + 1) * 8
                }
                AUTHENTICATION if !ends.contains(&next) => (usize::from(*known.get(at + 1)?) + 2) * 4,
                FRAGMENT if fragment => return None,
                FRAGMENT => {
                    let [_, _, high, low, ..] = *known.get(at..)?.first_chunk::<FRAGMENT_BYTES>()?;
                    fragment = true;
                    if u16::from_be_bytes([high, low]) & !7 != 0 {
                        return Some(Self {
                            protocol: None,
                            at: at + FRAGMENT_BYTES,
                            fragment,
                        });
                    }
                    FRAGMENT_BYTES
                }
                protocol => {
                    return Some(Self {
                        protocol: Some(protocol),
                        at,
                        fragment,
                    });
                }
            };
            next = *known.get(at)?;
            at += bytes;
            if at > known.len() {
                return None;
            }
        }
    }
}
