//! ICMPv6 with neighbour discovery (RFC 4861): announcements of addresses, and messages of routers.

use packet::ethernet::Mac;
use packet::icmp::*;

use super::{Refusal, SourceGuard, bytes};

/// Messages allowed with source ::, the unspecified address: duplicate address detection, router solicitations, and
/// reports of multicast listeners.
pub(super) const ALLOWED_FROM_UNSPECIFIED: [u8; 5] = [
    ROUTER_SOLICITATION,
    NEIGHBOUR_SOLICITATION,
    LISTENER_REPORT,
    LISTENER_DONE,
    LISTENER_REPORT_V2,
];

/// The parsed headers of a message.
pub(super) struct Message {
    pub(super) kind: u8,
    /// Where it begins.
    pub(super) at: usize,
    /// Where its packet ends.
    pub(super) end: usize,
    /// It has a fragment header, even if it is not fragmented.
    pub(super) fragment: bool,
    /// Its source is ::.
    pub(super) unspecified: bool,
}

pub(super) fn check(
    guard: &SourceGuard,
    mac: Mac,
    packet: &[u8],
    message: &Message,
) -> Result<usize, Refusal> {
    let &Message { kind, at, end, .. } = message;
    let options = match (kind, options_at(kind)) {
        (ROUTER_ADVERTISEMENT | REDIRECT | ROUTER_RENUMBERING, _) if !guard.router => {
            return Err(Refusal::Router);
        }
        (INVERSE_SOLICITATION | INVERSE_ADVERTISEMENT, _) => return Err(Refusal::Neighbour),
        (_, None) => return Ok(at + 1),
        (_, Some(options)) => at + options,
    };
    if message.fragment {
        return Err(Refusal::Neighbour);
    }
    let options = packet.get(options..).filter(|_| packet.len() == end);
    let mut options = Options::new(options.ok_or(Refusal::Headers)?);
    // Duplicate address detection makes other hosts that want to use the address give it up.
    if kind == NEIGHBOUR_ADVERTISEMENT || (kind == NEIGHBOUR_SOLICITATION && message.unspecified) {
        let target = *bytes(packet, at + TARGET_AT)?;
        if !guard.is_own(mac, target) {
            return Err(Refusal::Neighbour);
        }
    }
    // All MAC addresses among the options are the guest's.
    let is_allowed = |(kind, value): (u8, &[u8])| {
        !Options::MAC_KINDS.contains(&kind) || value.get(..mac.len()) == Some(&mac)
    };
    match options.all(|option| option.is_some_and(is_allowed)) {
        true => Ok(end),
        false => Err(Refusal::Neighbour),
    }
}
