//! The source guard of a guest outside of networks, where no FDB has it.

use device::counters::PairCounters;
use packet::HEADERS_MAX;
use packet::ethernet::{self, Head, Mac, Tags};

use super::{Refusal, SHORT_LOOK_BYTES, SourceGuard, check_content};
use crate::switch::guest_frame::GuestFrame;

/// The source addresses and VLANs that the guest may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Guard {
    pub(crate) mac: Mac,
    /// Its VLANs; 0: frames without a VLAN; an empty list: any.
    pub(crate) vlans: Vec<u16>,
    /// Its IP addresses; `None`: any.
    pub(crate) source_guard: Option<SourceGuard>,
}

/// A guard, with room for the checked bytes.
#[derive(Debug)]
pub(crate) struct Guarded {
    guard: Guard,
    head: [u8; HEADERS_MAX],
}

impl Guarded {
    pub(crate) fn new(guard: Guard) -> Self {
        Self {
            guard,
            head: [0; HEADERS_MAX],
        }
    }

    /// Checks a frame. Returns it with its checked first bytes in place of those in guest memory; `None`: it may not be
    /// sent, which is counted.
    #[inline(never)]
    pub(crate) fn check<'a>(
        &'a mut self,
        frame: GuestFrame<'a>,
        counters: &PairCounters,
    ) -> Option<GuestFrame<'a>> {
        let Self { guard, head } = self;
        let most = if guard.source_guard.is_some() {
            HEADERS_MAX
        } else {
            SHORT_LOOK_BYTES
        };
        let known = most.min(frame.sending.len as usize);
        // Bytes beyond the end of a short frame are 0.
        head[..ethernet::LOOK_BYTES].fill(0);
        frame.read_start(&mut head[..known]);
        if let Err(refusal) = guard.check(head, known, &frame) {
            refusal.counter(counters).add(1);
            return None;
        }
        Some(frame.headed(&head[..known]))
    }
}

impl Guard {
    fn check(&self, head: &[u8; HEADERS_MAX], known: usize, frame: &GuestFrame<'_>) -> Result<(), Refusal> {
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
            frame.sending,
        )
    }
}
