//! Ends leases step by step (see [`teardown`](crate::server::journal::teardown)), and cleans up after a steward that died.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::time::Instant;

use steer::{Filter, MAX_QUEUES, queues_of, with_sources};

use super::{Interface, Lessee};
use crate::hardware::{self};
use crate::server::journal::file::may_crash;
use crate::server::journal::teardown::{Step, Teardown};
use host::links::Link;
use host::nic::Ethtool;

/// A lease that is being taken back.
#[derive(Debug)]
pub(super) struct Leaving {
    queues: Range<u32>,
    teardown: Teardown,
}

impl Interface {
    /// Empties the queues without a lease, in which a dead steward may have left entries.
    pub(crate) fn sweep(&mut self) {
        let free = (0..MAX_QUEUES).filter(|queue| !self.lessees.contains_key(queue));
        let steps: BTreeSet<Step> = free.flat_map(Step::of_queue).collect();
        self.sweep_networks();
        for step in &steps {
            if let Err(why) = self.undo(step, false) {
                tracing::warn!(interface = self.link.name, "{step:?}: {why}");
            }
        }
        // NIC configuration for leases that do not exist any more.
        for first in &self.ledger.saved_queues() | &self.netkit_queues {
            if self.entries.contains_key(&first) {
                continue;
            }
            // Until it is undone the queue cannot be leased, unless another lease has it already.
            let free = !self.lessees.contains_key(&first);
            self.begin_leaving(first..first.saturating_add(free.into()), []);
            if free {
                self.lessees.insert(first, Lessee::Leaving);
            }
        }
        self.take_back();
    }

    /// Takes a lease back: its frames go to the host at once; all else is undone as soon as possible.
    pub(crate) fn release(&mut self, queues: Range<u32>) {
        for queue in queues.clone() {
            // A single store, which cannot fail.
            let _ = self.deactivate(queue);
            self.lessees.insert(queue, Lessee::Leaving);
        }
        self.entries.remove(&queues.start);
        self.forget_hints(queues.start);
        let network = self
            .networks
            .contains_key(&queues.start)
            .then_some(Step::Network {
                first: queues.start,
                end: queues.end,
            });
        self.networks
            .retain(|&number, _| queues_of(number) != queues.start);
        self.sockets.forget(&queues);
        may_crash("deactivated");
        self.own_maps.remove(&queues.start);
        let steps = queues.clone().flat_map(Step::of_queue).chain(network);
        self.begin_leaving(queues, steps);
        self.take_back();
    }

    /// Has these queues taken back: by these steps, and those for the NIC and the netkit of the lease.
    fn begin_leaving(&mut self, queues: Range<u32>, steps: impl IntoIterator<Item = Step>) {
        let first = queues.start;
        let nic = self.driver().ok().flatten();
        let parts = self.ledger.parts(nic.as_ref(), first).into_iter();
        let steps = parts.map(Step::Nic).chain(steps).chain(self.netkit_step(first));
        let teardown = Teardown::new(steps);
        self.leaving.push(Leaving { queues, teardown });
    }

    /// The interface's driver, by its current name; `None` when it is gone.
    fn driver(&self) -> io::Result<Option<Ethtool>> {
        match Link::find(self.link.index).map_err(io::Error::other)? {
            Some(link) => Ethtool::open(&link.name).map(Some),
            None => Ok(None),
        }
    }

    /// Continues taking leases back, as far as attempts are due: the end of one lease is no reason to repeat, for all
    /// others, calls that the driver has refused.
    pub(super) fn take_back(&mut self) {
        let now = Instant::now();
        for mut leaving in std::mem::take(&mut self.leaving) {
            if !leaving.teardown.is_due(now) {
                self.leaving.push(leaving);
                continue;
            }
            let is_new = leaving.teardown.is_new();
            match leaving.teardown.go_on(now, |step| self.undo(step, is_new)) {
                Ok(()) => {
                    may_crash("taken-back");
                    self.ledger.forget(leaving.queues.start);
                    self.netkit_queues.remove(&leaving.queues.start);
                    self.lessees.retain(|queue, _| !leaving.queues.contains(queue));
                }
                Err(stuck) => {
                    // Log the first failure, then less and less often.
                    if stuck.tries.is_power_of_two() && !stuck.is_usual() {
                        tracing::warn!(interface = self.link.name, "{stuck}");
                    }
                    self.leaving.push(leaving);
                }
            }
        }
    }

    /// Undoes one step. `is_new`: this is the first attempt for the lease.
    fn undo(&self, step: &Step, is_new: bool) -> Result<(), String> {
        let undone = match (step, &self.program) {
            (Step::Nic(part), _) => {
                // Rules of an interface that is gone are gone, or were moved away with it.
                let undo =
                    |nic: Option<Ethtool>| nic.map_or(Ok(()), |mut nic| hardware::undo(&mut nic, part));
                return self.driver().and_then(undo).map_err(|error| error.to_string());
            }
            (&Step::Netkit { queue }, _) => return self.remove_netkit(queue, is_new),
            // Without the program there is nothing to undo.
            (_, None) => return Ok(()),
            (&Step::Entries { queue }, Some(program)) => program.set_filter(queue, &Filter::default()),
            (&Step::Network { first, end }, Some(program)) => self.end_network(first..end, program),
            (&Step::Sockets { queue }, Some(program)) => program.disable_queue(queue),
        };
        undone.map_err(with_sources)
    }
}
