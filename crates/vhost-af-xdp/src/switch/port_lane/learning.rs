//! Whether a guest may send from an address that is not its port's.

use device::counters::{Counter, PairCounters};

use super::PortLane;
use crate::switch::ethernet::{self, Head};
use crate::switch::learned::Learned;
use crate::switch::members::Guest;
use crate::switch::own_queue::OwnQueue;
use crate::switch::table::{Destination, Station, Table, TablePort};

/// Where a frame is counted that may not be sent.
pub(super) type Refusal = fn(&PairCounters) -> &Counter;

/// Where a source is to be noted that is not the port's by configuration: its port learns, and it is nobody else's.
/// Errors: where the frame is counted that it does not send.
#[cold]
pub(super) fn may_learn<'a>(
    table: &Table,
    port: &'a TablePort,
    source: Station,
) -> Result<&'a Learned, Refusal> {
    let learned = port.learned.as_deref().filter(|_| table.is_free(source));
    learned.ok_or(|counters| &counters.from_guest_source_address)
}

/// Notes the source of a frame that may be sent; one that is refused for another reason takes no address from anybody.
/// Errors: where the frame is counted that it does not send.
#[cold]
pub(super) fn note(learned: &Learned, source: Station) -> Result<(), Refusal> {
    match learned.note(source) {
        true => Ok(()),
        false => Err(|counters| &counters.from_guest_not_learned),
    }
}

impl<O: OwnQueue> PortLane<O> {
    /// How many of a run of frames for a port may go by that lane of it. To another worker, where an isolated port
    /// listens, only those of which it is known there that it must not hear them.
    #[inline]
    pub(super) fn crossing(&self, to: Guest, first: usize, run: usize) -> usize {
        match to.is_link && self.is_told_by_source() && self.members.is_heard_by_isolated(to) {
            true => (first..first + run)
                .take_while(|&at| self.is_known_elsewhere(at))
                .count(),
            false => run,
        }
    }

    /// Whether it depends on a frame's source what others know of its port: it is isolated, and learns.
    #[inline]
    fn is_told_by_source(&self) -> bool {
        let port = self.members.table.port(self.number);
        port.is_some_and(|port| port.isolated && port.learned.is_some())
    }

    /// Whether other workers may have copies of a frame of an isolated port. They tell whose it is by its source, and one
    /// that is not in the table yet, or is another port's there, is nobody's who is isolated.
    pub(super) fn is_known_elsewhere(&self, at: usize) -> bool {
        if !self.is_told_by_source() {
            return true;
        }
        let table = &self.members.table;
        let judged = &self.chains[at];
        judged.head.first_chunk().is_some_and(|bytes| {
            let Head { from, .. } = ethernet::head(bytes);
            table.find(Station::new(judged.vlan, from)) == Destination::Port(self.number)
        })
    }
}
