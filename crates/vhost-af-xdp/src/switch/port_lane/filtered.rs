//! What filter rules said of a turn's frames.

use super::PortLane;
use crate::switch::own_queue::OwnQueue;

impl<O: OwnQueue> PortLane<O> {
    /// Counts what they said of the first `done` chains. Those that were put back come again, and are judged again.
    #[cold]
    pub(super) fn count_filtered(&self, done: usize) {
        let Some(filter) = self.filter.as_ref().and_then(|filter| filter.from_guest.as_ref()) else {
            return;
        };
        for verdict in self.chains[..done].iter().filter_map(|judged| judged.verdict) {
            filter.count(verdict);
            self.counters.from_guest_filter.add((!verdict.allows).into());
        }
    }
}
