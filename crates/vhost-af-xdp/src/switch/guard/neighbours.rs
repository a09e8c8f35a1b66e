//! ICMPv6 with neighbour discovery (RFC 4861): announcements of addresses, and messages of routers.

use super::{Packet, Refusal, SourceGuard};
use crate::switch::ethernet::Mac;

const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
/// RFC 2894.
const ROUTER_RENUMBERING: u8 = 138;
/// RFC 3122: addresses of frame relay.
const INVERSE: [u8; 2] = [141, 142];
/// Reports of multicast listeners (RFC 2710, RFC 3810).
const LISTENERS: [u8; 3] = [131, 132, 143];

/// Messages allowed with source ::, the unspecified address: duplicate address detection, router solicitations, and
/// reports of multicast listeners.
pub(super) const ALLOWED_FROM_UNSPECIFIED: [u8; 5] = [
    ROUTER_SOLICITATION,
    SOLICITATION,
    LISTENERS[0],
    LISTENERS[1],
    LISTENERS[2],
];

/// Options that are an Ethernet address: the sender's, and the target's.
const LINK_LAYER: [u8; 2] = [1, 2];

/// The parsed headers of a message.
pub(super) struct Message {
    pub(super) kind: u8,
    /// Where it begins.
    pub(super) at: usize,
    /// It is one of fragments, or calls itself so.
    pub(super) fragment: bool,
    /// Its sender has no address.
    pub(super) unspecified: bool,
}

pub(super) fn check(
    guard: &SourceGuard,
    mac: Mac,
    packet: Packet<'_>,
    message: &Message,
) -> Result<usize, Refusal> {
    let &Message { kind, at, .. } = message;
    let options = match kind {
        ROUTER_ADVERTISEMENT | REDIRECT | ROUTER_RENUMBERING if guard.router => return Ok(at + 1),
        ROUTER_ADVERTISEMENT | REDIRECT | ROUTER_RENUMBERING => return Err(Refusal::Router),
        ROUTER_SOLICITATION => at + 8,
        SOLICITATION | ADVERTISEMENT => at + 24,
        kind if INVERSE.contains(&kind) => return Err(Refusal::Neighbour),
        _ => return Ok(at + 1),
    };
    if message.fragment {
        return Err(Refusal::Neighbour);
    }
    let known = packet
        .known
        .get(options..)
        .filter(|_| packet.known.len() == packet.len);
    let known = known.ok_or(Refusal::Headers)?;
    // Duplicate address detection for an address makes other hosts that want to use it give it up.
    if kind == ADVERTISEMENT || (kind == SOLICITATION && message.unspecified) {
        let target = *packet.bytes::<16>(at + 8)?;
        if !guard.is_own(mac, target) {
            return Err(Refusal::Neighbour);
        }
    }
    match options_are_own(known, mac) {
        true => Ok(packet.len),
        false => Err(Refusal::Neighbour),
    }
}

/// Whether all addresses among the options are that one.
fn options_are_own(options: &[u8], mac: Mac) -> bool {
    let mut rest = options;
    while let [kind, eights, ..] = *rest {
        let Some((option, later)) = rest.split_at_checked(usize::from(eights) * 8) else {
            return false;
        };
        let is_others = LINK_LAYER.contains(&kind) && option.get(2..8) != Some(&mac);
        if option.is_empty() || is_others {
            return false;
        }
        rest = later;
    }
    rest.is_empty()
}
