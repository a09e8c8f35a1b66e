//! Copies of a guest's frames for promiscuous ports.

use std::ops::Range;

use super::PortLane;
use super::classified::with_tag;
use super::copies::pass_copy;
use crate::backend::own_queue::OwnQueue;
use crate::fdb::Destination;
use crate::guest::from_guest::Budget;
use crate::lane::Siblings;

impl<O: OwnQueue> PortLane<O> {
    /// Passes copies of frames that are done to promiscuous ports. Multicast goes to all ports anyway, and denied
    /// frames go to none. Frames without a destination here are copied, too: a promiscuous port may be a bridge to it.
    #[cold]
    pub(super) fn mirror(&self, done: Range<usize>, siblings: &mut dyn Siblings, budget: &mut Budget) {
        for at in done {
            let entry = &self.chains[at];
            let to = match entry.to {
                Destination::Port(port) if port == self.number && !self.is_hairpin() => continue,
                Destination::Port(port) => Some(port),
                Destination::Unknown | Destination::Remote(_) | Destination::Host => None,
                Destination::Multicast | Destination::Isolated => continue,
            };
            let Some((_, frame)) = self.frame_at(at) else {
                continue;
            };
            let mut copies = 0;
            for (port, guest) in self.forwarding.listeners(entry.vlan, self.source(), to) {
                copies += 1;
                with_tag(entry, frame, self.forwarding.is_tagged(port), |frame| {
                    pass_copy(siblings, guest.at, frame, &self.uncounted, budget);
                });
            }
            budget.charge_copies(copies, frame.sending.len);
        }
    }
}
