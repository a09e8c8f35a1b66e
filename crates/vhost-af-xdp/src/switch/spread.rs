//! How a network is spread over the workers.

use std::collections::{BTreeMap, BTreeSet};

use super::fdb::PortNumber;

/// Where ports and queues of a network's uplink are, among the workers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spread {
    /// By port: its worker.
    pub(crate) ports: BTreeMap<PortNumber, usize>,
    /// Workers that have queues of the uplink, and the one that has the host's end.
    pub(crate) exits: [BTreeSet<usize>; 2],
}

impl Spread {
    /// By which workers' uplink and host frames of a worker go out that has none itself.
    pub(super) fn ways_out(&self, of: usize) -> [Option<usize>; 2] {
        let way = |have: &BTreeSet<usize>| match have.contains(&of) {
            true => None,
            false => have.first().copied(),
        };
        [way(&self.exits[0]), way(&self.exits[1])]
    }
}
