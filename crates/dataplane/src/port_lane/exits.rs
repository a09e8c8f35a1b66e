//! How a port's frames leave its lane: through the uplink, through the port's own queue, by a cable, or to the host.

use device::counters::{Counter, PairCounters};
use device::pair::{Fault, Vring};
use virtqueue::{ChainId, Chains};

use super::checks::Checks;
use super::classified::{Classified, with_tag};
use super::{Batch, CounterOf, From, NO_FDB_ENTRY, PortLane, Route};
use crate::backend::own_queue::OwnQueue;
use crate::backend::to_nic::{NicSink, Transmit};
use crate::fdb::forwarding::LaneRef;
use crate::guest::from_guest::{Budget, Put, Sink};
use crate::guest::guest_frame::GuestFrame;
use crate::guest::passing::{Passed, Passing};
use crate::host::to_tap::TapPut;
use crate::lane::limits::SEGMENTS;
use crate::lane::{Lane, Siblings, SlotAt, Uplink, Work};
use crate::nic::queue::Nic;
use crate::nic::xdp::XdpNic;
use crate::policy::rate_limit::Cost;

/// Chains of a batch with the same destination: a queue of a NIC.
pub(super) struct Frames<'a> {
    pub(super) vring: &'a mut Vring,
    pub(super) classified: &'a mut [Classified],
    pub(super) chains: &'a Chains,
    pub(super) counters: &'a PairCounters,
    /// The index behind the last of them.
    pub(super) end: usize,
}

impl Frames<'_> {
    /// The common case of [`Frames::put`]: copies the next frames, as long as they need nothing but a copy. `outer`: see
    /// [`NicSink::copy_classified`]. A separate function, so that the loop has all registers.
    #[inline(never)]
    pub(super) fn copy_whole<H: AsRef<[u8]>>(
        &mut self,
        sink: &mut NicSink<'_, XdpNic>,
        outer: impl FnMut(&[u8], u32) -> H,
        (budget, done): (&mut Budget, &mut usize),
    ) {
        let (most, most_bytes) = budget.left();
        let next = *done..self.end.min(done.saturating_add(most));
        let frames = self.classified[next.clone()]
            .iter()
            .zip(&self.chains.chains[next]);
        let frames =
            frames.map_while(|(entry, chain)| entry.whole(true, self.vring, self.chains.buffers(chain)));
        let memory = &self.vring.guest.memory;
        let (count, bytes) = sink.copy_classified(memory, frames, most_bytes, outer);
        let copied = *done..*done + count;
        self.vring
            .queue
            .push_all_used(&self.chains.chains[copied.clone()]);
        budget.charge_descriptors(self.chains.count_buffers(copied));
        budget.tally.add_all(count as u64, bytes);
        *done += count;
    }

    /// Puts the frames from `done` on into the sink, as far as it has room; true if the next one waits for room. Chains
    /// that the sink does not keep are returned to the guest.
    /// Errors: the guest's fault.
    // Inlined, so that it tests once for each batch whether there are checks.
    #[inline(always)]
    pub(super) fn put(
        self,
        sink: &mut impl Sink,
        mut checks: Option<Checks<'_>>,
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
            if let Some(checks) = &mut checks
                && !checks.check(self.vring, (&chain, buffers), entry, (budget, unsendable))?
            {
                return Ok(false);
            }
            let frame = entry.frame(self.vring, buffers);
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
                Put::Done => self.vring.queue.push_used(chain.id, 0),
                Put::Taken => {}
            }
            waits = sink.has_rest();
            budget.charge_descriptors(buffers.len());
            *done += 1;
        }
        Ok(waits)
    }
}

/// The other end of a cable as a sink.
struct CableEnd<'a, 'b> {
    /// `None`: there is no guest.
    passing: &'a mut Option<Passing<'b>>,
    counters: &'a PairCounters,
    /// The fault of the guest there.
    fault: &'a mut Option<Fault>,
}

impl Sink for CableEnd<'_, '_> {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        let is_empty = self.passing.is_none();
        is_empty.then_some(&counters.from_guest_no_peer)
    }

    #[inline]
    fn put(&mut self, _chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put {
        let (Some(frame), Some(passing)) = (frame, self.passing.as_mut()) else {
            return Put::Done;
        };
        let passed = match passing.pass(frame, self.counters) {
            Ok(passed) => passed,
            Err(fault) => {
                *self.fault = Some(fault);
                return Put::NoRoom;
            }
        };
        budget.charge_look_ups(passing.take_work());
        if passed == Passed::Later {
            self.counters.from_guest_waits.add(1);
            return Put::NoRoom;
        }
        passed.charge(budget, frame.sending.len);
        Put::Done
    }

    #[inline]
    fn has_rest(&self) -> bool {
        false
    }
}

impl<O: OwnQueue> PortLane<O> {
    /// Sends for the guest, and delivers what its own queue received.
    pub(super) fn poll_own(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let sent = self.send(siblings);
        let moved = sent.and_then(|sent| Ok(sent + self.receive(siblings)?));
        if moved.is_err() {
            // Its queues are not used any more.
            self.change_vrings(&mut |_, vring| vring.enabled = false);
        }
        moved
    }

    fn receive(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        if !self.own.has_frames() {
            return Ok(0);
        }
        match self.to_guest.lock() {
            Some(mut guest) if guest.vring.enabled => return self.own.receive(&mut guest),
            _ => {}
        }
        if !O::SHARES_BUFFERS {
            return Ok(0);
        }
        let Some(first) = self.first_pair(siblings) else {
            return Ok(0);
        };
        let spilled = siblings.deliver_to(first, |guest| self.own.receive(guest));
        let frames = spilled.unwrap_or(0);
        self.counters.spilled_frames.add(frames as u64);
        Ok(frames)
    }

    /// The lane of the port's first pair, which receives the frames of this pair while this pair is disabled.
    pub(super) fn first_pair(&self, siblings: &dyn Siblings) -> Option<SlotAt> {
        match self.route {
            Route::Fdb => self.forwarding.lanes(self.number).first().map(|first| first.at),
            Route::OwnQueue | Route::Cable => siblings.target(),
        }
    }

    /// Continues GSO packets that are being segmented for a NIC; returns whether further frames can be sent then.
    #[inline]
    pub(super) fn send_rest(&mut self, siblings: &mut dyn Siblings) -> bool {
        if !self.has_rest() {
            return true;
        }
        let flow = self.flow();
        let uplink = (self.forwarding.uplink(flow), &mut self.transmit);
        let underlay = (self.forwarding.underlay(flow), &mut self.underlay.transmit);
        // At most one of them has a rest: frames behind it wait.
        for (place, transmit) in [uplink, underlay] {
            if !transmit.has_rest() {
                continue;
            }
            let mut budget = self.sender.budget();
            let queue = place.map_or(Uplink::None, |at| siblings.uplink(at));
            let sent = send_by(queue, (&mut *transmit, &self.counters), |sink| {
                sink.send_rest(&mut budget);
                sink.note_wait(sink.has_rest());
            });
            if sent == Sent::NoQueue {
                transmit.lose(&self.counters);
            }
            self.is_locked_out = sent == Sent::Busy;
            self.sender.charge(&budget);
        }
        self.waits = self.has_rest();
        !self.waits && self.sender.left() > 0
    }

    /// Kicks the kernel again if it has not taken all that is in a queue of another worker: that worker may sleep, and
    /// knows only of frames that it had seen there. Returns when to do so again.
    pub(super) fn kick_untaken(&mut self, siblings: &mut dyn Siblings) -> Work {
        let flow = self.flow();
        let mut kick = |place: Option<SlotAt>, transmit: &mut Transmit| {
            if !std::mem::take(&mut transmit.is_untaken) {
                return Work::None;
            }
            let (mut until_sent, queue) = (None, place.map_or(Uplink::None, |at| siblings.uplink(at)));
            let sent = send_by(queue, (transmit, &self.counters), |sink| {
                until_sent = sink.until_sent();
            });
            if sent == Sent::Busy {
                transmit.is_untaken = true;
                return Work::LOCKED;
            }
            Work::after(until_sent.filter(|_| transmit.is_untaken))
        };
        let uplink = kick(self.forwarding.uplink(flow), &mut self.transmit);
        uplink.max(kick(self.forwarding.underlay(flow), &mut self.underlay.transmit))
    }

    /// Part of a GSO packet waits to be sent.
    #[inline]
    pub(super) fn has_rest(&self) -> bool {
        self.own.has_rest() || self.transmit.has_rest() || self.underlay.transmit.has_rest()
    }

    /// Sends a run of frames to the uplink; frames without room wait. `unsent`: the counter of frames for which
    /// there is no uplink.
    pub(super) fn leave(&mut self, run: usize, batch: &mut Batch<'_>, unsent: CounterOf) {
        if self.put_to_nic(run, batch).is_none() && !self.wait_for_uplink() {
            self.lose(run, batch, unsent);
        }
    }

    /// Makes frames wait for the uplink, if its last queue is being set up again; returns whether they do. Frames of
    /// taps do not wait: they would delay frames to other ports.
    #[cold]
    pub(super) fn wait_for_uplink(&mut self) -> bool {
        let is_ours = self.from == From::Guest && !O::IS_THERE;
        self.waits = is_ours && self.forwarding.uplinks.is_empty() && self.forwarding.fdb.awaits_uplink();
        if self.waits {
            self.counters.from_guest_waits.add(1);
        }
        self.waits
    }

    /// Passes a run of frames to the host.
    pub(super) fn to_host(&mut self, run: usize, batch: &mut Batch<'_>) {
        let Some(LaneRef { at, .. }) = self.forwarding.host else {
            return self.lose(run, batch, NO_FDB_ENTRY);
        };
        let end = batch.done + run;
        self.write_to_tap(at, end, batch);
        // If the budget allows more, the next frame is one that cannot be written directly from guest memory.
        if self.goes_on(batch.done, end, &batch.budget) {
            match self.pass_to(at, true, 1, batch) {
                Ok(true) => {}
                Ok(false) => self.lose(1, batch, NO_FDB_ENTRY),
                Err(fault) => batch.siblings.blame(at, fault),
            }
        }
    }

    /// Writes the next frames directly from guest memory, up to one that cannot be written so. Writes none while
    /// segments of the same sender's last GSO packet wait for the tap.
    fn write_to_tap(&mut self, at: SlotAt, end: usize, batch: &mut Batch<'_>) {
        let guest = batch.siblings.guest(at);
        if guest.is_some_and(|guest| guest.pending.is_of(&self.counters)) {
            return;
        }
        let Some(mut tap) = batch.siblings.tap(at) else {
            return;
        };
        while self.goes_on(batch.done, end, &batch.budget) {
            if let Some((entry, frame)) = self.frame_at(batch.done) {
                match with_tag(entry, frame, true, |frame| tap.put(frame, &self.counters)) {
                    TapPut::Done => batch.budget.tally.add(frame.sending.len),
                    TapPut::Queue => break,
                }
            }
            self.next(&mut batch.budget, &mut batch.done);
        }
        let [frames, bytes] = std::mem::take(&mut tap.given);
        drop(tap);
        if frames > 0
            && let Some(guest) = batch.siblings.guest(at)
        {
            guest.counters.to_guest_frames.add(frames);
            guest.counters.to_guest_bytes.add(bytes);
        }
    }

    /// Drops and counts a run of frames.
    pub(super) fn lose(&mut self, run: usize, batch: &mut Batch<'_>, counter: CounterOf) {
        let end = batch.done + run;
        while batch.done < end && self.own.places() > 0 {
            let is_frame = self.chains[batch.done].is_sent;
            counter(&self.counters).add(is_frame.into());
            self.next(&mut batch.budget, &mut batch.done);
        }
    }

    /// Puts the next frames into the port's own queue, or else into the uplink's, as far as there is room. `None`:
    /// there is no queue, and nothing is done.
    pub(super) fn put_to_nic(&mut self, run: usize, batch: &mut Batch<'_>) -> Option<()> {
        let place = self.forwarding.uplink(self.flow());
        let Self {
            own,
            from_guest: vring,
            chains,
            sender,
            counters,
            transmit,
            ..
        } = self;
        let mut frames = Frames {
            vring,
            classified: chains,
            chains: &sender.chains,
            counters,
            end: batch.done + run.min(own.places()),
        };
        let charged = (&mut batch.budget, &mut batch.done);
        if O::IS_THERE {
            let waits = frames.put(&mut own.sink(counters)?, None, charged);
            self.waits = waits.unwrap_or(true);
            return Some(());
        }
        let (budget, done) = charged;
        let mut waits = false;
        let sent = send_by(batch.siblings.uplink(place?), (transmit, counters), |sink| {
            frames.copy_whole(sink, |_, _| [0; 0], (budget, done));
            // Only checks return errors, and these frames were checked before.
            waits = frames.put(sink, None, (budget, done)).unwrap_or(true);
            sink.note_wait(waits);
        });
        self.is_locked_out = sent == Sent::Busy;
        self.waits = waits || self.is_locked_out;
        (sent != Sent::NoQueue).then_some(())
    }

    /// Puts the chains from `done` on, each checked just before, into the lane's own queue, as far as there is room, or
    /// passes them by a cable.
    pub(super) fn put_checked(&mut self, batch: &mut Batch<'_>) {
        match O::IS_THERE {
            true => {
                let Batch {
                    budget, done, fault, ..
                } = batch;
                self.put_into(|own, counters| own.sink(counters), (budget, done), fault);
            }
            false => {
                let target = batch.siblings.target();
                if let Err(fault) = self.pass_by_cable(target, batch)
                    && let Some(target) = target
                {
                    batch.siblings.blame(target, fault);
                }
            }
        }
    }

    /// Passes all frames to the guest at the other end of the cable; frames for which it has no buffers wait.
    /// Errors: the fault of the guest at the other end.
    fn pass_by_cable(&mut self, target: Option<SlotAt>, batch: &mut Batch<'_>) -> Result<(), Fault> {
        let Batch {
            siblings,
            budget,
            done,
            fault,
        } = batch;
        let mut guest = target.and_then(|target| siblings.guest(target));
        let mut passing = match &mut guest {
            Some(guest) => Some(Passing::begin(guest, self.sender.chains.len())?),
            None => None,
        };
        if let Some(passing) = passing.as_mut().filter(|_| self.is_open()) {
            let plain = self.classify_plain();
            self.pass_whole(passing, false, plain, (budget, done));
            self.charge_plain(budget);
            let passed = &self.sender.chains.chains[..*done];
            self.own.give_back(&mut self.from_guest, passed);
        }
        let mut of_other = None;
        self.put_into(
            |_, counters| {
                Some(CableEnd {
                    passing: &mut passing,
                    counters,
                    fault: &mut of_other,
                })
            },
            (budget, done),
            fault,
        );
        if let Some(fault) = of_other {
            self.waits = false;
            return Err(fault);
        }
        if let Some(passing) = passing {
            passing.finish();
        }
        Ok(())
    }

    /// Puts the chains from `done` on, each checked just before, into a sink; `fault`: where to store that of the guest.
    fn put_into<'a, S: Sink>(
        &'a mut self,
        sink: impl FnOnce(&'a mut O, &'a PairCounters) -> Option<S>,
        charged: (&mut Budget, &mut usize),
        fault: &mut Option<Fault>,
    ) {
        let Self {
            own,
            from_guest: vring,
            chains,
            sender,
            counters,
            filter,
            guard,
            costs,
            waits,
            ..
        } = self;
        let Some(mut sink) = sink(own, counters) else {
            return;
        };
        // Those that are done were charged.
        costs.clear();
        costs.resize(*charged.1, Cost::default());
        let frames = Frames {
            vring,
            classified: chains,
            chains: &sender.chains,
            counters,
            end: sender.chains.len(),
        };
        let checks = Checks {
            guard: guard.as_deref(),
            acl: filter.as_deref_mut(),
            throttle: &mut sender.throttle,
            costs,
            counters,
        };
        match frames.put(&mut sink, Some(checks), charged) {
            Ok(frame_waits) => *waits = frame_waits,
            Err(of_guest) => *fault = Some(of_guest),
        }
    }

    /// Acts on the uplink's queue that the lane uses, and hands over the frames that are put there.
    pub(super) fn with_uplink(
        &mut self,
        siblings: &mut dyn Siblings,
        act: impl FnOnce(&mut NicSink<'_, XdpNic>),
    ) -> Sent {
        match self.forwarding.uplink(self.flow()) {
            Some(place) => send_by(siblings.uplink(place), (&mut self.transmit, &self.counters), act),
            None => Sent::NoQueue,
        }
    }
}

/// Result of an attempt to use an uplink's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// There is none.
    NoQueue,
    /// Another worker has locked it.
    Busy,
    /// It was used.
    Done,
}

/// Acts on an uplink's queue, and puts its frames into the TX ring while the queue is still locked, because other lanes
/// use the same room. Kicks the kernel if the queue's own lane, on another worker, would do so too late.
#[inline]
pub(super) fn send_by(
    uplink: Uplink<'_>,
    (transmit, counters): (&mut Transmit, &PairCounters),
    act: impl FnOnce(&mut NicSink<'_, XdpNic>),
) -> Sent {
    let (mut queue, is_remote) = match uplink {
        Uplink::None => return Sent::NoQueue,
        Uplink::Busy => return Sent::Busy,
        Uplink::Queue { queue, is_remote } => (queue, is_remote),
    };
    if is_remote {
        queue.reclaim(SEGMENTS * 2, counters);
    }
    let mut sink = NicSink::new(&mut queue, transmit, counters);
    act(&mut sink);
    sink.hand_over();
    if is_remote {
        queue.kick_queued(SEGMENTS * 2, counters);
    }
    transmit.is_untaken = is_remote && queue.nic.has_untaken();
    Sent::Done
}
