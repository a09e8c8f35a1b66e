//! Frames from a tap: finds their destinations.

use device::pair::Fault;
use packet::ethernet::{self, Head};

use super::PortLane;
use crate::backend::own_queue::OwnQueue;
use crate::fdb::{Destination, FdbKey};
use crate::guest::from_guest::Budget;

impl<O: OwnQueue> PortLane<O> {
    /// Classifies the chains of the batch: frames of the host or from the wire, whose sources are not checked.
    /// Errors: a fault of the queue, which is no guest's: the daemon has both ends.
    #[cold]
    pub(super) fn classify_of_tap(&mut self, budget: &Budget) -> Result<(), Fault> {
        self.classified = 0;
        let mut work = budget.fresh();
        for (chain, of_chain) in self.sender.chains.chains.iter().zip(&mut self.chains) {
            if !work.has_left() {
                break;
            }
            let buffers = self.sender.chains.buffers(chain);
            of_chain.is_sent =
                self.from_guest
                    .check_into(chain, buffers, None, &self.counters, &mut of_chain.sending)?;
            if of_chain.is_sent {
                of_chain.read_head(&self.from_guest, buffers, false);
                work.tally.add(of_chain.sending.len);
                let bytes = of_chain.head.first_chunk().copied().unwrap_or_default();
                let head = ethernet::head(&bytes);
                let Head { to, from, tags } = head;
                let vlan = tags.vlan();
                if vlan != 0 && !of_chain.may_be_retagged(tags) {
                    self.counters.drop_malformed(of_chain.not_retagged());
                    of_chain.is_sent = false;
                }
                of_chain.to = self.forwarding.fdb.find(FdbKey::new(vlan, to));
                (of_chain.vlan, of_chain.is_tagged) = (vlan, vlan != 0);
                if of_chain.to == Destination::Multicast && self.forwarding.has_guest(FdbKey::new(vlan, from))
                {
                    self.counters.returned_frames.add(1);
                    of_chain.is_sent = false;
                }
            }
            work.charge_descriptors(buffers.len());
            self.classified += 1;
        }
        Ok(())
    }
}
