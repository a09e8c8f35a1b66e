//! How a port's frames leave its lane: through the uplink, through the port's own queue, by a cable, or to the host.

use device::counters::{Counter, PairCounters};
use device::pair::{Fault, QueuePair};
use packet::HEADERS_MAX;
use virtqueue::{ChainId, Chains};

use super::checks::{Check, Checks, IsClassified};
use super::classified::{Classified, with_tag};
use super::{Burst, From, PortLane, Route};
use crate::backend::own_queue::OwnQueue;
use crate::backend::to_nic::NicSink;
use crate::fdb::forwarding::LaneRef;
use crate::guest::from_guest::{Budget, Put, Sink};
use crate::guest::guest_frame::GuestFrame;
use crate::guest::passing::{Passed, Passing, with_head};
use crate::host::to_tap::TapPut;
use crate::lane::{RxTarget, Siblings, SlotAt};
use crate::nic::xdp::XdpNic;

/// Chains of a batch with the same destination: a queue of a NIC.
struct Frames<'a> {
    pair: &'a mut QueuePair,
    classified: &'a mut [Classified],
    chains: &'a Chains,
    counters: &'a PairCounters,
    /// The index behind the last of them.
    end: usize,
}

impl Frames<'_> {
    /// The common case of [`Frames::put`]: copies the next frames, as long as they need nothing but a copy. A separate
    /// function, so that the loop has all registers.
    #[inline(never)]
    fn copy_whole(
        &mut self,
        sink: &mut NicSink<'_, XdpNic>,
        give_back: &mut impl FnMut(&mut QueuePair, ChainId),
        (budget, done): (&mut Budget, &mut usize),
    ) {
        let (most, most_bytes) = budget.left();
        let next = *done..self.end.min(done.saturating_add(most));
        let mut bytes = 0;
        let frames = self.classified[next.clone()]
            .iter()
            .zip(&self.chains.chains[next]);
        let frames = frames.map_while(|(entry, chain)| {
            let whole = entry.whole(true, self.pair, self.chains.buffers(chain))?;
            let has_left = bytes < most_bytes;
            bytes += u64::from(entry.sending.len);
            has_left.then_some(whole)
        });
        let (count, bytes) = sink.copy_classified(&self.pair.memory, frames);
        for chain in &self.chains.chains[*done..*done + count] {
            give_back(self.pair, chain.id);
            budget.charge_descriptors(chain.readable.into());
        }
        budget.tally.add_all(count as u64, bytes);
        *done += count;
    }

    /// Puts the frames from `done` on into the sink, as far as it has room; true if the next one waits for room. Chains
    /// that the sink does not keep are returned to the guest.
    /// Errors: the guest's fault.
    #[inline]
    fn put(
        self,
        sink: &mut impl Sink,
        mut check: impl Check,
        mut give_back: impl FnMut(&mut QueuePair, ChainId),
        (budget, done): (&mut Budget, &mut usize),
    ) -> Result<bool, Fault> {
        let mut waits = false;
        while *done < self.end && budget.has_left() && !waits {
            if !sink.has_room() {
                self.counters.from_guest_waits.add(1);
                return Ok(true);
            }
            let chain = self.chains.chains[*done];
            let buffers = self.chains.buffers(&chain);
            let entry = &mut self.classified[*done];
            let unsendable = sink.unsendable(self.counters);
            if !check.check(self.pair, (&chain, buffers), entry, (budget, unsendable))? {
                return Ok(false);
            }
            let frame = entry.frame(self.pair, buffers);
            let lost = frame.and(unsendable);
            if let Some(counter) = lost {
                counter.add(1);
            }
            let put = match frame.filter(|_| lost.is_none()) {
                Some(frame) => {
                    let put = |frame: GuestFrame<'_>| sink.put(chain.id, Some(frame), budget);
                    with_tag(entry, frame, true, put)
                }
                None => sink.put(chain.id, None, budget),
            };
            match put {
                Put::NoRoom => return Ok(true),
                Put::Done => give_back(self.pair, chain.id),
                Put::Taken => {}
            }
            waits = sink.has_rest();
            budget.charge_descriptors(buffers.len());
            *done += 1;
        }
        Ok(waits)
    }
}

impl<O: OwnQueue> PortLane<O> {
    /// Sends for the guest, and delivers what its own queue received.
    pub(super) fn poll_own(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let sent = self.send(siblings);
        let moved = sent.and_then(|sent| Ok(sent + self.receive(siblings)?));
        if moved.is_err() {
            // Its queues are not used any more.
            (self.pair.from_guest.enabled, self.pair.to_guest.enabled) = (false, false);
        }
        moved
    }

    fn receive(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        if !self.own.has_frames() {
            return Ok(0);
        }
        if self.pair.to_guest.enabled {
            return self.receive_own();
        }
        if !O::SHARES_BUFFERS {
            return Ok(0);
        }
        let Some(first) = self.first_pair(siblings) else {
            return Ok(0);
        };
        let Some(mut guest) = siblings.guest(first) else {
            return Ok(0);
        };
        match self.own.receive(&mut guest) {
            Ok(frames) => {
                self.counters.spilled_frames.add(frames as u64);
                Ok(frames)
            }
            Err(fault) => {
                siblings.blame(first, fault);
                Ok(0)
            }
        }
    }

    /// The lane of the port's first pair, which receives the frames of this pair while this pair is disabled.
    pub(super) fn first_pair(&self, siblings: &dyn Siblings) -> Option<SlotAt> {
        match self.route {
            Route::Fdb => self.forwarding.lanes(self.number).first().map(|first| first.at),
            Route::OwnQueue | Route::Cable => siblings.target(),
        }
    }

    /// Delivers what its own queue received to its own guest.
    fn receive_own(&mut self) -> Result<usize, Fault> {
        let filter = self.filter.as_mut().and_then(|filter| filter.to_guest.as_mut());
        let guest = RxTarget::new(&mut self.pair, &mut self.buffers, &self.counters);
        let mut guest = guest.limited(self.limit.as_ref()).filtered(filter);
        self.own.receive(&mut guest)
    }

    /// Continues GSO packets that are being segmented for a NIC; returns whether further frames can be sent then.
    #[inline]
    pub(super) fn send_rest(&mut self, siblings: &mut dyn Siblings) -> bool {
        if !self.has_rest() {
            return true;
        }
        if self.transmit.has_rest() {
            let mut budget = self.sender.budget();
            match self.sink(siblings) {
                Some(mut sink) => {
                    sink.send_rest(&mut budget);
                    sink.note_wait(sink.has_rest());
                }
                None => self.transmit.lose(&self.counters),
            }
            self.sender.charge(&budget);
        }
        self.waits = self.has_rest();
        !self.waits && self.sender.left() > 0
    }

    /// Part of a GSO packet waits to be sent.
    #[inline]
    pub(super) fn has_rest(&self) -> bool {
        self.own.has_rest() || self.transmit.has_rest()
    }

    /// Sends a run of frames to the uplink, of this worker or of another one; frames without room wait. `nobody`: the
    /// counter of frames for which there is no uplink.
    pub(super) fn leave(&mut self, run: usize, burst: &mut Burst<'_>, nobody: fn(&PairCounters) -> &Counter) {
        if self.put_to_nic(run, burst).is_some() || self.wait_for_uplink() {
            return;
        }
        let [link, _] = self.forwarding.ways_out;
        self.leave_by(link, run, burst, nobody);
    }

    /// Makes frames wait for the uplink, if its last queue is being set up again; returns whether they do. Frames of
    /// links and taps do not wait: they would delay frames to other ports.
    #[cold]
    pub(super) fn wait_for_uplink(&mut self) -> bool {
        let is_ours = self.from == From::Guest && !O::IS_THERE;
        self.waits = is_ours && !self.forwarding.has_uplink() && self.forwarding.fdb.awaits_uplink();
        if self.waits {
            self.counters.from_guest_waits.add(1);
        }
        self.waits
    }

    /// Passes a run of frames to the host, by this worker's tap or another one's.
    pub(super) fn to_host(
        &mut self,
        run: usize,
        burst: &mut Burst<'_>,
        nobody: fn(&PairCounters) -> &Counter,
    ) {
        match self.forwarding.host {
            Some(host) => self.to_tap(host, run, burst, nobody),
            None => {
                let [_, link] = self.forwarding.ways_out;
                self.leave_by(link, run, burst, nobody);
            }
        }
    }

    /// Passes a run of frames to the lane of a tap.
    fn to_tap(
        &mut self,
        tap: LaneRef,
        run: usize,
        burst: &mut Burst<'_>,
        nobody: fn(&PairCounters) -> &Counter,
    ) {
        let end = burst.done + run;
        self.write_to_tap(tap, end, burst);
        // If the budget allows more, the next frame is one that cannot be written directly from guest memory.
        if self.goes_on(burst.done, end, &burst.budget) {
            self.leave_by(Some(tap), 1, burst, nobody);
        }
    }

    /// Writes the next frames directly from guest memory, up to one that cannot be written so. Writes none while
    /// segments of the same sender's last GSO packet wait for the tap.
    fn write_to_tap(&mut self, tap: LaneRef, end: usize, burst: &mut Burst<'_>) {
        let pending = burst.siblings.guest(tap.at).and_then(|guest| guest.pending);
        if pending.is_some_and(|pending| pending.is_of(&self.counters)) {
            return;
        }
        let Some(tap) = burst.siblings.tap(tap.at) else {
            return;
        };
        while self.goes_on(burst.done, end, &burst.budget) {
            let (entry, chain) = (&self.chains[burst.done], self.sender.chains.chains[burst.done]);
            let buffers = self.sender.chains.buffers(&chain);
            if let Some(frame) = entry.frame(&self.pair, buffers) {
                match with_tag(entry, frame, true, |frame| tap.put(frame, &self.counters)) {
                    TapPut::Done => burst.budget.tally.add(frame.sending.len),
                    TapPut::Queue => return,
                }
            }
            self.own.give_back(&mut self.pair, chain.id);
            burst.budget.charge_descriptors(buffers.len());
            burst.done += 1;
        }
    }

    /// Drops and counts a run of frames.
    pub(super) fn lose(&mut self, run: usize, burst: &mut Burst<'_>, counter: fn(&PairCounters) -> &Counter) {
        let end = burst.done + run;
        while burst.done < end && self.own.places() > 0 {
            let is_frame = self.chains[burst.done].is_sent;
            counter(&self.counters).add(is_frame.into());
            self.next(burst);
        }
    }

    /// Returns the chains of a run of frames that have no destination here, without counting them as lost.
    pub(super) fn skip(&mut self, run: usize, burst: &mut Burst<'_>) {
        let end = burst.done + run;
        while burst.done < end && self.own.places() > 0 {
            self.next(burst);
        }
    }

    /// Passes a run of frames to a tap's or a link's lane; without one, drops them.
    fn leave_by(
        &mut self,
        way: Option<LaneRef>,
        run: usize,
        burst: &mut Burst<'_>,
        nobody: fn(&PairCounters) -> &Counter,
    ) {
        match way {
            Some(way) => match self.pass_to(way.at, true, run, burst) {
                Ok(true) => {}
                Ok(false) => self.lose(run, burst, nobody),
                Err(fault) => burst.siblings.blame(way.at, fault),
            },
            None if self.from == From::Link => self.skip(run, burst),
            None => self.lose(run, burst, nobody),
        }
    }

    /// Puts the next frames into the port's own queue, or else into the uplink's, as far as there is room. `None`:
    /// there is no queue, and nothing is done.
    pub(super) fn put_to_nic(&mut self, run: usize, burst: &mut Burst<'_>) -> Option<()> {
        let place = self.forwarding.uplink(self.flow());
        let Self {
            own,
            pair,
            chains,
            sender,
            counters,
            transmit,
            ..
        } = self;
        let mut frames = Frames {
            pair,
            classified: chains,
            chains: &sender.chains,
            counters,
            end: burst.done + run.min(own.places()),
        };
        let charged = (&mut burst.budget, &mut burst.done);
        if O::IS_THERE {
            // The sink itself records the chains that it returns later.
            let at_once = |pair: &mut QueuePair, chain| pair.from_guest.queue.push_used(chain, 0);
            let waits = frames.put(&mut own.sink(counters)?, IsClassified, at_once, charged);
            self.waits = waits.unwrap_or(true);
            return Some(());
        }
        let (budget, done) = charged;
        let queue = burst.siblings.uplink(place?)?;
        let mut sink = NicSink::new(queue, transmit, counters);
        let mut give_back = |pair: &mut QueuePair, chain| own.give_back(pair, chain);
        frames.copy_whole(&mut sink, &mut give_back, (budget, done));
        // Only checks return errors, and these frames were checked before.
        self.waits = frames
            .put(&mut sink, IsClassified, give_back, (budget, done))
            .unwrap_or(true);
        sink.note_wait(self.waits);
        Some(())
    }

    /// Puts the chains from `done` on, checked one by one, into the lane's own queue, as far as there is room.
    /// Errors: the guest's fault.
    pub(super) fn put_to_own_queue(&mut self, burst: &mut Burst<'_>) -> Result<(), Fault> {
        let Self {
            own,
            pair,
            chains,
            sender,
            counters,
            filter,
            guard,
            costs,
            ..
        } = self;
        let Some(mut sink) = own.sink(counters) else {
            return Ok(());
        };
        let frames = Frames {
            pair,
            classified: chains,
            chains: &sender.chains,
            counters,
            end: sender.chains.len(),
        };
        let checks = Checks {
            guard: guard.as_deref(),
            acl: filter.as_mut().and_then(|filter| filter.from_guest.as_mut()),
            throttle: &mut sender.throttle,
            costs,
            counters,
        };
        let at_once = |pair: &mut QueuePair, chain| pair.from_guest.queue.push_used(chain, 0);
        self.waits = frames.put(&mut sink, checks, at_once, (&mut burst.budget, &mut burst.done))?;
        Ok(())
    }

    /// Passes all frames to the guest at the other end of the cable; frames for which it has no buffers wait.
    pub(super) fn to_other_end(&mut self, burst: &mut Burst<'_>) {
        let target = burst.siblings.target();
        if let Err(fault) = self.pass_by_cable(target, burst)
            && let Some(target) = target
        {
            burst.siblings.blame(target, fault);
        }
    }

    /// Errors: the fault of the guest at the other end.
    fn pass_by_cable(&mut self, target: Option<SlotAt>, burst: &mut Burst<'_>) -> Result<(), Fault> {
        let all = self.sender.chains.len();
        let mut passing = match target.and_then(|target| burst.siblings.guest(target)) {
            Some(guest) => Passing::begin(guest, all)?,
            None => None,
        };
        if let Some(passing) = passing.as_mut().filter(|_| self.is_open()) {
            let plain = self.classify_plain();
            self.pass_whole(passing, false, plain, (&mut burst.budget, &mut burst.done));
        }
        let Self {
            pair,
            chains,
            sender,
            counters,
            filter,
            guard,
            costs,
            ..
        } = self;
        let taken = &sender.chains;
        let mut checks = Checks {
            guard: guard.as_deref(),
            acl: filter.as_mut().and_then(|filter| filter.from_guest.as_mut()),
            throttle: &mut sender.throttle,
            costs,
            counters,
        };
        while burst.done < all && burst.budget.has_left() {
            let chain = taken.chains[burst.done];
            let buffers = taken.buffers(&chain);
            let entry = &mut chains[burst.done];
            let unsendable = passing.is_none().then_some(&counters.from_guest_no_peer);
            match checks.check(pair, (&chain, buffers), entry, (&mut burst.budget, unsendable)) {
                Ok(true) => {}
                Ok(false) => break,
                Err(fault) => {
                    burst.fault = Some(fault);
                    break;
                }
            }
            if let (Some(frame), Some(passing)) = (entry.frame(pair, buffers), &mut passing) {
                let mut head = [0; HEADERS_MAX];
                let frame = match passing.is_filtered() {
                    true => with_head(frame, &mut head),
                    false => frame,
                };
                let passed = passing.pass(frame, counters)?;
                burst.budget.charge_look_ups(passing.take_work());
                if passed == Passed::Later {
                    self.waits = true;
                    counters.from_guest_waits.add(1);
                    break;
                }
                passed.charge(&mut burst.budget, frame.sending.len);
            }
            pair.from_guest.queue.push_used(chain.id, 0);
            burst.budget.charge_descriptors(buffers.len());
            burst.done += 1;
        }
        if let Some(passing) = passing {
            passing.finish();
        }
        Ok(())
    }

    /// The uplink's queue that the lane sends by, if there is one.
    pub(super) fn sink<'n>(&'n mut self, siblings: &'n mut dyn Siblings) -> Option<NicSink<'n, XdpNic>> {
        let queue = siblings.uplink(self.forwarding.uplink(self.flow())?)?;
        Some(NicSink::new(queue, &mut self.transmit, &self.counters))
    }
}
