//! A turn of a lane: chains are taken from its guest, judged, and handed over in runs with the same destination.

use device::meter;
use device::pair::{Fault, QueuePair};
use virtqueue::Chains;

use super::judged::Judged;
use super::known::{Alike, Known};
use super::{Burst, From, NO_STATION, PortLane};
use crate::switch::from_guest::Turn;
use crate::switch::lane::Network;
use crate::switch::own_queue::OwnQueue;
use crate::switch::rate_limit::Cost;
use crate::switch::table::Destination;

impl<O: OwnQueue> PortLane<O> {
    /// Sends a turn of the guest's frames; what moved.
    /// Errors: what the guest did wrong.
    pub(super) fn send(&mut self, network: &mut dyn Network) -> Result<usize, Fault> {
        let left = self.sender.begin();
        self.waits = false;
        let begun = self.own.begin(&mut self.pair, &mut self.sender, &self.counters);
        let moved = begun + self.send_turn(left, network)?;
        Ok(moved + self.own.finish(&mut self.pair, moved, &self.counters))
    }

    fn send_turn(&mut self, left: usize, network: &mut dyn Network) -> Result<usize, Fault> {
        if left == 0 || !self.pair.from_guest.enabled || !self.send_rest(network) {
            return Ok(0);
        }
        let mut turn = self.sender.take(&mut self.pair)?;
        if self.sender.chains().is_empty() {
            self.transmit.pause();
            self.own.pause();
        }
        if self.is_trusted() {
            turn = turn.of_many();
        }
        let looked_up = self.judge_turn(&turn)?;
        let mut burst = Burst {
            network,
            turn,
            done: 0,
            fault: None,
        };
        while self.goes_on(burst.done, self.judged, &burst.turn) {
            self.pass_run(&mut burst);
        }
        let Burst {
            network,
            turn,
            done,
            fault,
        } = burst;
        self.settle(turn, done, looked_up);
        if done > 0 {
            // Before they are sent: should we die in between, they are lost; the other way round a successor would
            // send them once more.
            self.pair.from_guest.publish(&self.counters);
            if !self.transmit.is_empty() {
                match self.sink(network) {
                    Some(mut sink) => sink.hand_over(),
                    None => self.transmit.lose(&self.counters),
                }
            }
        }
        fault.map_or(Ok(done), Err)
    }

    /// Looks at the chains of the turn; what looking their flows up was work for, where there are filter rules.
    /// Errors: what the guest did wrong; nothing was done then.
    #[inline]
    fn judge_turn(&mut self, turn: &Turn) -> Result<Option<u64>, Fault> {
        if self.is_trusted() {
            self.judge_trusted(turn)?;
            return Ok(None);
        }
        let is_filtered = self.filter.as_ref().is_some_and(|it| it.from_guest.is_some());
        match (is_filtered, self.sender.throttle.is_on()) {
            (true, _) => Ok(Some(self.judge::<true, true>(turn)?)),
            (false, true) => self.judge::<true, false>(turn).map(|_| None),
            (false, false) => self.judge::<false, false>(turn).map(|_| None),
        }
    }

    /// Hands the next run of frames over.
    #[inline]
    fn pass_run(&mut self, burst: &mut Burst<'_>) {
        let (first, run) = (burst.done, self.run_from(burst.done));
        match self.chains[first].to {
            Destination::Port(port) => self.to_port(port, run, burst),
            Destination::Unknown => self.leave(run, burst, NO_STATION),
            Destination::Host => self.to_host(run, burst, NO_STATION),
            Destination::Group => self.to_group(burst),
            Destination::Nobody => self.lose(run, burst, |counters| &counters.from_guest_isolated),
        }
        if self.members.has_promiscuous() {
            self.mirror(first..burst.done, burst.network, &mut burst.turn);
        }
    }

    /// The first `done` chains of the turn are, and the others are the guest's again.
    #[inline]
    fn settle(&mut self, mut turn: Turn, done: usize, looked_up: Option<u64>) {
        if let Some(looked_up) = looked_up {
            turn.note_look_ups(looked_up);
            self.count_filtered(done);
        }
        self.sender.settle(&mut self.pair, &turn, done, &self.counters);
        match self.from {
            From::Guest | From::Tap => meter::took(done),
            From::Link => meter::took_linked(done),
        }
        if self.sender.throttle.is_on() {
            let throttle = &mut self.sender.throttle;
            let back = self.costs.drain(..).skip(done);
            back.for_each(|cost| throttle.give_back(cost));
        }
    }

    /// Looks at the chains of the turn; where there is a limit, as far as it allows, and where there are filter rules,
    /// by them. Code for that in the loop of those who have none would cost them. What looking flows up was work for.
    /// Errors: what the guest did wrong; nothing was done then.
    // A loop of its own for each: in one function they would have no registers left.
    #[inline(never)]
    fn judge<const LIMITED: bool, const FILTERED: bool>(&mut self, turn: &Turn) -> Result<u64, Fault> {
        self.judged = 0;
        self.costs.clear();
        let (pair, counters, table) = (&mut self.pair, &self.counters, &self.members.table);
        let mut filter = self
            .filter
            .as_mut()
            .and_then(|filter| filter.from_guest.as_mut()?.rules.as_mut());
        let reads_all = self.members.is_filtered;
        let mut looked_up = 0;
        let Some(port) = table.port(self.number) else {
            return Ok(looked_up);
        };
        let taken = &self.sender.chains;
        let mut work = turn.anew();
        let mut known = Known::default();
        let looks_at_each = LIMITED || FILTERED || reads_all || port.flows.is_some();
        while let Some(chain) = taken.chains.get(self.judged)
            && let Some(of_chain) = self.chains.get_mut(self.judged)
            && work.takes_more()
        {
            let buffers = taken.buffers(chain);
            of_chain.is_sent = pair.judge_into(chain, buffers, None, counters, &mut of_chain.sending)?;
            if FILTERED {
                (of_chain.verdict, of_chain.known) = (None, 0);
            }
            if of_chain.is_sent {
                of_chain.read_head(pair, buffers, (port, reads_all));
                work.tally.add(of_chain.sending.len);
                let found = match &mut filter {
                    Some(filter) if FILTERED => {
                        let found = known.find_filtered(table, port, (of_chain, filter), counters);
                        let took = filter.take_work();
                        work.note_look_ups(took);
                        looked_up += took;
                        found
                    }
                    _ => known.find(table, port, of_chain, counters),
                };
                of_chain.is_sent = found.is_some();
                if let (Some(flows), Some(())) = (&port.flows, found) {
                    flows.note(of_chain.flow(), self.pair_number);
                }
            }
            if LIMITED {
                let (frame, throttle) = (of_chain.frame(pair, buffers), &mut self.sender.throttle);
                if throttle.holds(|| Some(frame?.cost()), counters) {
                    break;
                }
                self.costs
                    .push(frame.map_or(Cost::default(), |_| throttle.last()));
            }
            work.note(buffers.len());
            self.judged += 1;
            let is_last = self.judged == taken.len();
            if !looks_at_each
                && !is_last
                && let Some(alike) = known.alike()
            {
                self.judged += judge_alike(pair, (taken, self.judged), &mut self.chains, alike, &mut work);
            }
        }
        Ok(looked_up)
    }

    /// Whether the next chain of a turn can be taken, of those before `end`.
    #[inline]
    pub(super) fn goes_on(&self, next: usize, end: usize, turn: &Turn) -> bool {
        next < end && turn.takes_more() && !self.waits && self.own.places() > 0
    }

    /// How many from one on go the same way.
    fn run_from(&self, first: usize) -> usize {
        let &Judged { to, source, .. } = &self.chains[first];
        let rest = self.chains[first..self.judged].iter();
        rest.take_while(|judged| judged.to == to && judged.source == source)
            .count()
    }
}

/// Judges chains from the one at `first` on, as long as frames are alike; how many.
#[inline(never)]
fn judge_alike(
    pair: &QueuePair,
    (taken, first): (&Chains, usize),
    chains: &mut [Judged],
    alike: Alike,
    work: &mut Turn,
) -> usize {
    let (most, most_bytes) = work.left();
    let (mut count, mut bytes) = (0, 0);
    let chains = taken.chains[first..].iter().zip(&mut chains[first..]);
    for (chain, of_chain) in chains.take(most) {
        let is_plain = bytes < most_bytes && of_chain.read_plain(pair, chain, taken.buffers(chain));
        if !is_plain || !alike.judge(of_chain) {
            break;
        }
        bytes += u64::from(of_chain.sending.len);
        count += 1;
    }
    work.note_plain(count, bytes);
    count
}
