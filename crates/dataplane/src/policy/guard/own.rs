//! The source guard of a guest outside of networks, where no FDB has it.

use device::pair::Sending;
use packet::HEADERS_MAX;
use packet::ethernet::{self, Head, Mac, Tags};

use super::{Refusal, SourceGuard, check_content};

/// The source addresses and VLANs that the guest may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The guest's MAC address.
    pub mac: Mac,
    /// Its VLANs; 0: frames without a VLAN; an empty list: any.
    pub vlans: Vec<u16>,
    /// Its IP addresses; `None`: any.
    pub source_guard: Option<SourceGuard>,
}

impl Guard {
    /// Checks a frame; `head`: its first bytes, of which `known` are the frame's, and the others are 0.
    /// Errors: why it may not be sent.
    #[inline]
    pub(crate) fn check(
        &self,
        head: &[u8; HEADERS_MAX],
        known: usize,
        sending: &Sending,
    ) -> Result<(), Refusal> {
        let Head { from, tags, .. } = ethernet::head(head.first_chunk().ok_or(Refusal::Headers)?);
        let vlan = match tags {
            Tags::None => Some(0),
            Tags::One(vlan) => Some(vlan),
            Tags::Service | Tags::Several(_) => None,
        };
        if !self.vlans.is_empty() && !vlan.is_some_and(|vlan| self.vlans.contains(&vlan)) {
            return Err(Refusal::Vlan);
        }
        if from != self.mac {
            return Err(Refusal::SourceAddress);
        }
        check_content(
            self.source_guard.as_ref(),
            self.mac,
            (&head[..known], tags),
            sending,
        )
    }
}
