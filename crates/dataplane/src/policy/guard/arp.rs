//! ARP source validation (RFC 826).

use packet::arp::{self, Arp, REPLY, REQUEST};
use packet::ethernet::Mac;

use super::{Refusal, SourceGuard};

/// Whether a message announces the port's own addresses only. A request for one of them without a sender address is a
/// probe (RFC 5227), which a host sends before it uses the address. A probe for another port's address would make its
/// owner believe that the address is taken.
pub(super) fn check(guard: &SourceGuard, mac: Mac, head: &[u8], at: usize) -> Result<usize, Refusal> {
    let message = Arp::at(head, at).ok_or(Refusal::Arp)?;
    let is_own = guard.addresses.has_v4(*message.sender);
    let is_probe = || *message.sender == [0; 4] && guard.addresses.has_v4(*message.target);
    let may = *message.sender_mac == mac
        && match message.operation {
            REQUEST => is_own || is_probe(),
            REPLY => is_own,
            _ => false,
        };
    may.then_some(at + arp::BYTES).ok_or(Refusal::Arp)
}
