//! ICMPv6 with neighbour discovery (RFC 4861): announcements of addresses, and messages of routers.

use packet::ethernet::Mac;
use packet::icmp::*;
use packet::ip::{Fragment, Upper};

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

/// Whether a message of that kind may be sent. `packet`: the known bytes of its packet, and where that ends;
/// `unspecified`: its source is ::.
pub(super) fn check(
    (guard, mac): (&SourceGuard, Mac),
    (packet, end): (&[u8], usize),
    (upper, kind): (Upper, u8),
    unspecified: bool,
) -> Result<usize, Refusal> {
    let at = upper.at;
    let options = match (kind, options_at(kind)) {
        (ROUTER_ADVERTISEMENT | REDIRECT | ROUTER_RENUMBERING, _) if !guard.router => {
            return Err(Refusal::Router);
        }
        (INVERSE_SOLICITATION | INVERSE_ADVERTISEMENT, _) => return Err(Refusal::Neighbour),
        (_, None) => return Ok(at + 1),
        (_, Some(options)) => at + options,
    };
    if upper.fragment != Fragment::None {
        return Err(Refusal::Neighbour);
    }
    let options = packet.get(options..).filter(|_| packet.len() == end);
    let mut options = Options::new(options.ok_or(Refusal::Headers)?);
    // Duplicate address detection makes other hosts that want to use the address give it up.
    if kind == NEIGHBOUR_ADVERTISEMENT || (kind == NEIGHBOUR_SOLICITATION && unspecified) {
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
