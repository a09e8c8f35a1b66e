//! Frames that came by a link from another worker, or from the host: where they go here.

use device::pair::Fault;

use super::{From, PortLane};
use crate::switch::ethernet::{self, Head};
use crate::switch::from_guest::Turn;
use crate::switch::own_queue::OwnQueue;
use crate::switch::table::{Destination, Station, TablePort};
use crate::switch::vlans::Vlans;

impl<O: OwnQueue> PortLane<O> {
    /// Looks at the chains of the turn. Whether they may be sent was decided where they came from.
    /// Errors: never of a guest: both ends are ours.
    #[cold]
    pub(super) fn judge_trusted(&mut self, turn: &Turn) -> Result<(), Fault> {
        self.judged = 0;
        let all = TablePort {
            vlans: Vlans::All,
            ..TablePort::default()
        };
        let table = &self.members.table;
        let mut work = turn.anew();
        for (chain, of_chain) in self.sender.chains().chains.iter().zip(&mut self.chains) {
            if !work.takes_more() {
                break;
            }
            let buffers = self.sender.chains().buffers(chain);
            of_chain.is_sent =
                self.pair
                    .judge_into(chain, buffers, None, &self.counters, &mut of_chain.sending)?;
            if of_chain.is_sent {
                of_chain.read_head(&self.pair, buffers, (&all, self.members.is_filtered));
                work.tally.add(of_chain.sending.len);
                let bytes = of_chain.head.first_chunk().copied().unwrap_or_default();
                let Head { to, from, tags } = ethernet::head(&bytes);
                let vlan = tags.vlan();
                if vlan != 0 && !of_chain.may_be_retagged(tags) {
                    self.counters.from_guest_offload_malformed.add(1);
                    of_chain.is_sent = false;
                }
                of_chain.source = match table.find(Station::new(vlan, from)) {
                    // Of one without a guest here it came by the LAN, and does not go there again.
                    Destination::Port(port) if self.from == From::Link && !self.members.is_absent(port) => {
                        Some(port)
                    }
                    _ => None,
                };
                let to = Station::new(vlan, to);
                let source = of_chain.source.and_then(|port| table.port(port));
                of_chain.to = match source {
                    Some(source) => table.find_for(source, to),
                    // The host has no way out here.
                    None if self.from == From::Host => table.find(to),
                    // What came by an uplink goes out by none.
                    None => Some(table.find(to))
                        .filter(|found| !matches!(found, Destination::Unknown | Destination::Host))
                        .unwrap_or(Destination::Nobody),
                };
                (of_chain.vlan, of_chain.is_tagged) = (vlan, vlan != 0);
            }
            work.note(buffers.len());
            self.judged += 1;
        }
        Ok(())
    }
}
