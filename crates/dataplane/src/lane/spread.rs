//! How a network is spread over the workers.

use std::collections::{BTreeMap, BTreeSet};

use crate::fdb::PortNumber;

/// Which workers have a network's ports, the queues of its uplink, and its tap to the host.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spread {
    /// By port: its worker.
    pub(crate) ports: BTreeMap<PortNumber, usize>,
    /// Workers that have queues of the uplink, and the one that has the host's end.
    pub(crate) exits: [BTreeSet<usize>; 2],
}

impl Spread {
    /// The workers through whose uplink and tap frames of the worker `of` leave, where it has none itself.
    pub(crate) fn ways_out(&self, of: usize) -> [Option<usize>; 2] {
        let way = |have: &BTreeSet<usize>| match have.contains(&of) {
            true => None,
            false => have.first().copied(),
        };
        [way(&self.exits[0]), way(&self.exits[1])]
    }
}
