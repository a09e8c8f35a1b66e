//! Where frames of a port go.

use device::counters::PairCounters;

use super::judged::Judged;
use super::learning;
use crate::switch::ethernet::{self, Head, Tags};
use crate::switch::guard::check_content;
use crate::switch::table::{Destination, Station, Table, TablePort};

/// What was found for the last frame: the next one most often is alike.
#[derive(Default)]
pub(super) struct Known {
    /// A source that is the port's.
    source: Option<Station>,
    destination: Option<(Station, Destination)>,
}

impl Known {
    /// Finds out where a frame of a port's goes; `None`: it may not be sent, which is counted.
    #[inline]
    pub(super) fn find(
        &mut self,
        table: &Table,
        port: &TablePort,
        chain: &mut Judged,
        counters: &PairCounters,
    ) -> Option<()> {
        let bytes = chain.head.first_chunk()?;
        let Head { to, from, tags } = ethernet::head(bytes);
        if ethernet::is_link_control(bytes, tags) {
            counters.from_guest_link_control.add(1);
            return None;
        }
        let Some(vlan) = port.vlans.of_guests(tags) else {
            counters.from_guest_vlan.add(1);
            return None;
        };
        if vlan != 0 && !chain.may_be_retagged(tags) {
            counters.from_guest_offload_malformed.add(1);
            return None;
        }
        let source = Station::new(vlan, from);
        let mut learned = None;
        if self.source != Some(source) && from != port.mac {
            match learning::may_learn(table, port, source) {
                Ok(its) => learned = Some(its),
                Err(counter) => {
                    counter(counters).add(1);
                    return None;
                }
            }
        }
        let head = &chain.head[..chain.known.into()];
        if let Err(refusal) = check_content(port.lock.as_deref(), from, (head, tags), &chain.sending) {
            refusal.counter(counters).add(1);
            return None;
        }
        if let Some(learned) = learned
            && let Err(counter) = learning::note(learned, source)
        {
            counter(counters).add(1);
            return None;
        }
        self.source = Some(source);
        let destination = Station::new(vlan, to);
        chain.to = match self.destination {
            Some((known, found)) if known == destination => found,
            _ => table.find_for(port, destination),
        };
        self.destination = Some((destination, chain.to));
        // A tag that says a priority only stays where there is no VLAN, and is that VLAN's where there is one.
        if tags == Tags::One(0) && vlan != 0 {
            ethernet::set_vlan(&mut chain.head, vlan);
        }
        (chain.vlan, chain.is_tagged) = (vlan, vlan != 0 && tags != Tags::None);
        Some(())
    }
}
