//! ARP source validation (RFC 826).

use super::{Packet, Refusal, SourceGuard, word};
use crate::switch::ethernet::Mac;

/// Bytes of a message between Ethernet and IPv4.
const BYTES: usize = 28;
/// Hardware, protocol and the lengths of their addresses: Ethernet, IPv4, 6, 4.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// Whether it announces the port's own addresses only. A request for one of them without a sender address is a probe
/// (RFC 5227), which a host sends before it uses the address; a probe for others' addresses would make their owners
/// believe that they are taken.
pub(super) fn check(guard: &SourceGuard, mac: Mac, packet: Packet<'_>) -> Result<usize, Refusal> {
    let Ok(message) = packet.bytes::<BYTES>(packet.at) else {
        return Err(Refusal::Arp);
    };
    let v4 = |at| [0, 1, 2, 3].map(|byte: usize| message[at + byte]);
    let (sender, target) = (v4(14), v4(24));
    let is_probe = |operation| operation == REQUEST && sender == [0; 4] && guard.addresses.has_v4(target);
    let may = message[..6] == ETHERNET_IPV4
        && message[8..14] == mac
        && word(message, 6).is_some_and(|operation| match operation {
            REQUEST | REPLY => guard.addresses.has_v4(sender) || is_probe(operation),
            _ => false,
        });
    if may {
        Ok(packet.at + BYTES)
    } else {
        Err(Refusal::Arp)
    }
}
