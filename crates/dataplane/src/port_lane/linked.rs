//! Frames that arrived by a link from another worker, or by a tap: finds their destinations on this worker.

use device::pair::Fault;
use packet::ethernet::{self, Head};

use super::{From, PortLane};
use crate::backend::own_queue::OwnQueue;
use crate::fdb::forwarding::Forwarding;
use crate::fdb::{Destination, FdbKey, PortNumber};
use crate::guest::from_guest::Budget;
use crate::link::cross_worker_mark::{CrossWorkerMark, MarkedSender};

impl<O: OwnQueue> PortLane<O> {
    /// Classifies the chains of the batch. The worker that they come from has checked them.
    /// Errors: a fault of the queue, which is no guest's: the daemon has both ends.
    #[cold]
    pub(super) fn classify_trusted(&mut self, budget: &Budget) -> Result<(), Fault> {
        self.classified = 0;
        let mut work = budget.fresh();
        for (chain, of_chain) in self.sender.chains.chains.iter().zip(&mut self.chains) {
            if !work.has_left() {
                break;
            }
            let buffers = self.sender.chains.buffers(chain);
            of_chain.is_sent =
                self.pair
                    .check_into(chain, buffers, None, &self.counters, &mut of_chain.sending)?;
            if of_chain.is_sent {
                of_chain.read_head(&self.pair, buffers, (false, self.forwarding.is_filtered));
                work.tally.add(of_chain.sending.len);
                let bytes = of_chain.head.first_chunk().copied().unwrap_or_default();
                let head = ethernet::head(&bytes);
                let Head { from, tags, .. } = head;
                let vlan = tags.vlan();
                if vlan != 0 && !of_chain.may_be_retagged(tags) {
                    self.counters.drop_malformed(of_chain.not_retagged());
                    of_chain.is_sent = false;
                }
                let marks = self.marks.as_deref();
                let mark = marks.map_or(CrossWorkerMark::EMPTY, |marks| marks.read(buffers.first()));
                (of_chain.source, of_chain.to) = ends(&self.forwarding, self.from, mark, &head);
                of_chain.flow_hints = mark.flow;
                (of_chain.vlan, of_chain.is_tagged) = (vlan, vlan != 0);
                let is_multicast = of_chain.to == Destination::Multicast && self.from == From::Tap;
                if is_multicast && self.forwarding.has_guest(FdbKey::new(vlan, from)) {
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

/// Which port sent a frame, if one did, and the frame's destination: by its mark, or else by its addresses.
fn ends(
    forwarding: &Forwarding,
    from: From,
    mark: CrossWorkerMark,
    head: &Head,
) -> (Option<PortNumber>, Destination) {
    let fdb = &forwarding.fdb;
    let sender = mark.sender(fdb);
    let source = match sender {
        MarkedSender::Is(source) => source,
        // The port may have changed. If its address belongs to another port now, that one did not send the frame.
        MarkedSender::Other(number) => source_of(forwarding, from, head).filter(|&source| source == number),
        MarkedSender::Unset => source_of(forwarding, from, head),
    };
    let to = match (sender, mark.destination(fdb)) {
        // The sending worker has checked isolation, and neither port has changed since.
        (MarkedSender::Is(_), Some(to)) => to,
        // The sending port is not known: isolated ports must not receive it if that one is isolated.
        (MarkedSender::Other(_), _) if source.is_none() => Destination::Nobody,
        _ => {
            let to = FdbKey::new(head.tags.vlan(), head.to);
            match source.and_then(|source| fdb.port(source)) {
                Some(source) => fdb.find_for(source, to),
                None => fdb.find(to),
            }
        }
    };
    match to {
        // A frame that no port sent came from an uplink or the host, and goes to neither of them.
        Destination::Unknown | Destination::Host if source.is_none() && from == From::Link => {
            (source, Destination::Nobody)
        }
        to => (source, to),
    }
}

/// The port that sent a frame, by its source address.
fn source_of(forwarding: &Forwarding, from: From, head: &Head) -> Option<PortNumber> {
    match forwarding.fdb.find(FdbKey::new(head.tags.vlan(), head.from)) {
        // If that port has no guest on any worker, the frame came from the LAN, and does not go there again.
        Destination::Port(port) if from == From::Link && !forwarding.is_absent(port) => Some(port),
        _ => None,
    }
}
