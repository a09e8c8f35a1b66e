//! A batch of a lane: takes chains from its guest, classifies them, and passes on runs with the same destination.

use device::meter;
use device::pair::{Fault, Vring};
use virtqueue::Chains;

use super::classified::Classified;
use super::known::{Alike, Known};
use super::{Batch, From, NO_FDB_ENTRY, PortLane, Route};
use crate::backend::own_queue::OwnQueue;
use crate::fdb::Destination;
use crate::guest::from_guest::{Budget, Sender, Tally};
use crate::lane::Siblings;
use crate::policy::rate_limit::Cost;

impl<O: OwnQueue> PortLane<O> {
    /// Sends a batch of the guest's frames; returns how many moved.
    /// Errors: the guest's fault.
    pub(super) fn send(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let left = self.sender.begin();
        (self.waits, self.is_locked_out) = (false, false);
        let begun = self
            .own
            .begin(&mut self.from_guest, &mut self.sender, &self.counters);
        let moved = begun + self.send_batch(left, siblings)?;
        Ok(moved
            + self
                .own
                .finish((&mut self.from_guest, &self.to_guest), &self.counters, moved)?)
    }

    fn send_batch(&mut self, left: usize, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        if left == 0 || !self.from_guest.enabled || !self.send_rest(siblings) {
            return Ok(0);
        }
        let room = match self.route {
            Route::Fdb => usize::MAX,
            Route::OwnQueue | Route::Cable => self.own.room(),
        };
        if room == 0 {
            self.waits = true;
            self.counters.from_guest_waits.add(1);
            return Ok(0);
        }
        self.sender.take(&mut self.from_guest, room)?;
        if self.sender.chains.is_empty() {
            self.transmit.pause();
            self.own.pause();
            return Ok(0);
        }
        let mut batch = Batch {
            siblings,
            budget: self.sender.budget(),
            done: 0,
            fault: None,
        };
        match self.route {
            Route::Fdb => self.send_by_address(&mut batch)?,
            Route::OwnQueue | Route::Cable => self.send_to_one(&mut batch),
        }
        self.settle(&batch.budget, batch.done);
        batch.fault.map_or(Ok(batch.done), Err)
    }

    /// Sends a batch by the addresses of its frames.
    /// Errors: the guest's fault.
    #[inline]
    fn send_by_address(&mut self, batch: &mut Batch<'_>) -> Result<(), Fault> {
        if self.from == From::Tap {
            batch.budget = batch.budget.for_many();
        }
        let looked_up = self.classify_batch(&batch.budget)?;
        while self.goes_on(batch.done, self.classified, &batch.budget) {
            self.pass_run(batch);
        }
        if let Some(looked_up) = looked_up {
            batch.budget.charge_look_ups(looked_up);
            self.count_filtered(batch.done);
        }
        self.give_back_costs(batch.done);
        Ok(())
    }

    /// Sends a batch to the one destination of a guest outside of networks.
    #[inline]
    fn send_to_one(&mut self, batch: &mut Batch<'_>) {
        if O::IS_THERE && self.is_open() {
            let chains = &self.sender.chains;
            batch.done = self
                .own
                .put_plain(&mut self.from_guest, chains, &mut batch.budget, &self.counters);
            self.charge_plain(&batch.budget);
        }
        if batch.done < self.sender.chains.len() {
            self.send_checked(batch);
        }
    }

    /// Sends the rest of a batch of [`Self::send_to_one`], and checks each frame just before it is passed on.
    #[inline(never)]
    fn send_checked(&mut self, batch: &mut Batch<'_>) {
        self.put_checked(batch);
        if self.filter.is_some() {
            self.count_filtered(batch.done);
        }
        self.give_back_costs(batch.done);
    }

    /// Classifies the chains of the batch; returns the cost of look-ups, if there are filter rules.
    /// Errors: the guest's fault; then no frame is passed on.
    #[inline]
    fn classify_batch(&mut self, budget: &Budget) -> Result<Option<u64>, Fault> {
        if self.from == From::Tap {
            self.classify_of_tap(budget)?;
            return Ok(None);
        }
        match (self.filter.is_some(), self.sender.throttle.is_on()) {
            (true, _) => {
                let looked_up = self.classify::<true, true>(budget)?;
                self.find_remotes();
                Ok(Some(looked_up))
            }
            (false, true) => self.classify::<true, false>(budget).map(|_| None),
            (false, false) => self.classify::<false, false>(budget).map(|_| None),
        }
    }

    /// Whether no frame of the batch of a guest outside of networks has to be checked: there is no source guard, there are
    /// no filter rules, and the rate limit holds the batch, if there is one.
    #[inline]
    pub(super) fn is_open(&mut self) -> bool {
        let Sender { chains, throttle, .. } = &mut self.sender;
        let most = || Cost::most(chains.len(), self.from_guest.guest.frame_limit);
        self.guard.is_none() && self.filter.is_none() && throttle.has(most)
    }

    /// Takes from the rate limit what the frames of a batch cost that were not checked.
    #[inline]
    pub(super) fn charge_plain(&mut self, budget: &Budget) {
        let Tally { frames, bytes, .. } = budget.tally;
        self.sender.throttle.charge(Cost::of(frames, bytes));
    }

    /// Classifies chains of a guest outside of networks, from the first on, as long as their frames need nothing but a
    /// copy; returns how many.
    #[inline]
    pub(super) fn classify_plain(&mut self) -> usize {
        let taken = &self.sender.chains;
        let chains = taken.iter().zip(&mut self.chains);
        let plain = chains.map_while(|(chain, entry)| {
            entry.sending = self.from_guest.plain(chain, taken.buffers(chain))?;
            (entry.is_sent, entry.known) = (true, 0);
            Some(())
        });
        plain.count()
    }

    /// Passes the next run of frames to its destination.
    #[inline]
    fn pass_run(&mut self, batch: &mut Batch<'_>) {
        let (first, run) = (batch.done, self.run_from(batch.done));
        match self.chains[first].to {
            Destination::Port(port) => self.to_port(port, run, batch),
            Destination::Remote(vtep) => self.to_remote(vtep, run, batch),
            Destination::Unknown => self.leave(run, batch, NO_FDB_ENTRY),
            Destination::Host => self.to_host(run, batch),
            Destination::Multicast => self.to_multicast(batch),
            Destination::Isolated => self.lose(run, batch, |counters| &counters.from_guest_isolated),
        }
        if self.forwarding.has_promiscuous() {
            self.mirror(first..batch.done, batch.siblings, &mut batch.budget);
        }
    }

    /// Ends the batch, of which the first `done` chains are done: the others go back into the guest's queue. Chains are
    /// published before their frames are sent: if the daemon dies in between, the frames are lost. In the other order
    /// its successor would send them again.
    #[inline(always)]
    fn settle(&mut self, budget: &Budget, done: usize) {
        self.sender
            .settle(&mut self.from_guest, budget, done, &self.counters);
        meter::count_taken(done);
        if done > 0 {
            self.from_guest.publish(&self.counters);
        }
    }

    /// Returns to the rate limit the costs of chains that are not done.
    #[inline]
    fn give_back_costs(&mut self, done: usize) {
        if self.sender.throttle.is_on() {
            let returned = self.costs.get(done..).unwrap_or_default();
            self.sender.throttle.give_back(returned);
            self.costs.clear();
        }
    }

    /// Classifies the chains of the batch; up to the limit, if there is one (`LIMITED`), and by filter rules, if there
    /// are some (`FILTERED`). Two flags, so that lanes without either do not pay for their code. Returns the cost of
    /// look-ups.
    /// Errors: the guest's fault; then no frame is passed on.
    // Not inlined, so that each has its own loop: in one function they would have no registers left.
    #[inline(never)]
    fn classify<const LIMITED: bool, const FILTERED: bool>(&mut self, budget: &Budget) -> Result<u64, Fault> {
        self.classified = 0;
        self.costs.clear();
        let (vring, counters, fdb) = (&mut self.from_guest, &self.counters, &self.forwarding.fdb);
        let mut filter = self.filter.as_mut().and_then(|filter| filter.rules.as_mut());
        let mut looked_up = 0;
        let Some(port) = fdb.port(self.number) else {
            return Ok(looked_up);
        };
        let taken = &self.sender.chains;
        let mut work = budget.fresh();
        let mut known = Known::default();
        let looks_at_each = FILTERED || port.flows.is_some();
        while let Some(chain) = taken.chains.get(self.classified)
            && let Some(of_chain) = self.chains.get_mut(self.classified)
            && work.has_left()
        {
            let buffers = taken.buffers(chain);
            of_chain.is_sent = vring.check_into(chain, buffers, None, counters, &mut of_chain.sending)?;
            if FILTERED {
                (of_chain.verdict, of_chain.known) = (None, 0);
            }
            if of_chain.is_sent {
                of_chain.read_head(vring, buffers, FILTERED || port.source_guard.is_some());
                work.tally.add(of_chain.sending.len);
                let found = match &mut filter {
                    Some(filter) if FILTERED => {
                        let found = known.find_filtered(fdb, port, (of_chain, filter), counters);
                        let took = filter.take_work();
                        work.charge_look_ups(took);
                        looked_up += took;
                        found
                    }
                    _ => known.find(fdb, port, of_chain, counters),
                };
                of_chain.is_sent = found.is_some();
                if let (Some(flows), Some(())) = (&port.flows, found) {
                    flows.note(of_chain.flow(), self.pair_number);
                }
            }
            if LIMITED {
                let (frame, throttle) = (of_chain.frame(vring, buffers), &mut self.sender.throttle);
                if throttle.holds(|| Some(frame?.cost()), counters) {
                    break;
                }
                self.costs
                    .push(frame.map_or(Cost::default(), |_| throttle.last()));
            }
            work.charge_descriptors(buffers.len());
            self.classified += 1;
            let left = taken.len() - self.classified;
            if !looks_at_each
                && left > 0
                && let Some(alike) = known.alike()
                && (!LIMITED
                    || self
                        .sender
                        .throttle
                        .has(|| Cost::most(left, vring.guest.frame_limit)))
            {
                let chains = &mut self.chains[self.classified..];
                let cost = classify_alike(vring, (taken, self.classified), chains, alike, &mut work);
                if LIMITED {
                    self.sender.throttle.charge(cost);
                    let alike = chains.iter().take(cost.frames as usize);
                    self.costs
                        .extend(alike.map(|entry| Cost::frame(entry.sending.len)));
                }
                self.classified += cost.frames as usize;
            }
        }
        Ok(looked_up)
    }

    /// Whether another chain of the batch, before `end`, can be passed on.
    #[inline]
    pub(super) fn goes_on(&self, next: usize, end: usize, budget: &Budget) -> bool {
        next < end && budget.has_left() && !self.waits && self.own.places() > 0
    }

    /// How many chains, from `first` on, have the same destination.
    fn run_from(&self, first: usize) -> usize {
        let to = self.chains[first].to;
        let rest = self.chains[first..self.classified].iter();
        rest.take_while(|entry| entry.to == to).count()
    }
}

/// Classifies chains from `first` on as long as their frames match `alike`; returns what those cost.
#[inline(never)]
fn classify_alike(
    vring: &Vring,
    (taken, first): (&Chains, usize),
    chains: &mut [Classified],
    alike: Alike,
    work: &mut Budget,
) -> Cost {
    let (most, most_bytes) = work.left();
    let (mut count, mut bytes) = (0, 0);
    let chains = taken.chains[first..].iter().zip(chains);
    for (chain, of_chain) in chains.take(most) {
        let is_plain = bytes < most_bytes && of_chain.read_plain(vring, chain, taken.buffers(chain));
        if !is_plain || !alike.apply(of_chain) {
            break;
        }
        bytes += u64::from(of_chain.sending.len);
        count += 1;
    }
    work.charge_plain(count, bytes);
    Cost::of(count as u64, bytes)
}
