//! Frames of a guest to addresses of its own port, and multicast: the guest receives them if the port has `hairpin`.
//!
//! A frame is copied once, and the same rules apply as for a frame to another guest. But a guest does not wait for
//! itself: a frame without a buffer is lost at once.

use std::ops::Range;

use device::pair::Fault;

use super::classified::{Classified, with_tag};
use super::copies::pass_copy;
use super::{Batch, PortLane};
use crate::backend::own_queue::OwnQueue;
use crate::guest::from_guest::Budget;
use crate::guest::passing::{Passed, Passing};
use crate::lane::Lane;

impl<O: OwnQueue> PortLane<O> {
    /// Whether the guest receives its own frames.
    pub(super) fn is_hairpin(&self) -> bool {
        let port = self.forwarding.fdb.port(self.number);
        port.is_some_and(|port| port.options.hairpin)
    }

    /// Passes a run of frames to the guest that sends them.
    #[cold]
    pub(super) fn to_itself(&mut self, run: usize, batch: &mut Batch<'_>) {
        if !self.is_hairpin() {
            return self.lose(run, batch, |counters| &counters.from_guest_to_itself);
        }
        if !self.receives() {
            return self.to_first_pair(run, batch);
        }
        let first = batch.done;
        // No more than can be returned afterwards.
        let frames = first..first + run.min(self.own.places());
        match self.pass_back(frames, &mut batch.budget) {
            Ok(done) => batch.done += done,
            Err(fault) => self.stop_batch(fault, batch),
        }
        let done = &self.sender.chains.chains[first..batch.done];
        self.own.give_back(&mut self.from_guest, done);
    }

    /// Returns a multicast frame to its sender.
    #[cold]
    pub(super) fn copy_to_itself(&mut self, index: usize, batch: &mut Batch<'_>) {
        batch.budget.charge_copies(1, self.chains[index].sending.len);
        if !self.receives() {
            return self.copy_to_first_pair(index, batch);
        }
        let mut of_copy = batch.budget.fresh();
        if let Err(fault) = self.pass_back(index..index + 1, &mut of_copy) {
            self.stop_batch(fault, batch);
        }
        batch.budget.charge_besides(&of_copy);
    }

    /// Ends the batch after a fault of the guest's receive queue.
    fn stop_batch(&mut self, fault: Fault, batch: &mut Batch<'_>) {
        batch.fault = Some(fault);
        self.waits = true;
    }

    /// Passes frames to the pair that sends them, up to a GSO packet that has to be segmented and as long as the budget
    /// allows it; returns how many are done.
    /// Errors: the guest's fault.
    fn pass_back(&mut self, frames: Range<usize>, budget: &mut Budget) -> Result<usize, Fault> {
        let (mut done, mut is_segmented) = (0, false);
        let is_tagged = self.forwarding.is_tagged(self.number);
        let Some(mut guest) = self.to_guest.lock() else {
            return Ok(0);
        };
        let mut passing = Passing::begin(&mut guest, frames.len())?;
        for at in frames {
            if is_segmented || !budget.has_left() {
                break;
            }
            if let Some((entry, frame)) = self.frame_at(at) {
                let passed = with_tag(entry, frame, is_tagged, |frame| {
                    passing.pass(frame, &self.counters)
                })?;
                is_segmented = matches!(passed, Passed::Segmented(_));
                if passed == Passed::Later {
                    passing.lose();
                }
                passed.charge(budget, frame.sending.len);
            }
            budget.charge_descriptors(self.sender.chains.chains[at].readable.into());
            done += 1;
        }
        budget.charge_look_ups(passing.take_work());
        passing.finish();
        if is_segmented {
            // Segments that were left over: the next frame would be lost if it found them pending.
            guest.deliver_pending()?;
        }
        Ok(done)
    }

    /// Passes a run of frames to the first pair of the port that receives, because the sending pair does not.
    fn to_first_pair(&mut self, run: usize, batch: &mut Batch<'_>) {
        if self.forwarding.lanes(self.number).is_empty() {
            return self.lose(run, batch, |counters| &counters.from_guest_no_peer);
        }
        let end = batch.done + run;
        while self.goes_on(batch.done, end, &batch.budget) {
            let Classified { is_sent, sending, .. } = &self.chains[batch.done];
            if *is_sent {
                batch.budget.tally.add(sending.len);
            }
            self.copy_to_first_pair(batch.done, batch);
            self.next(&mut batch.budget, &mut batch.done);
        }
    }

    fn copy_to_first_pair(&mut self, index: usize, batch: &mut Batch<'_>) {
        let first = self.forwarding.lanes(self.number).first();
        let (Some(first), Some((entry, frame))) = (first, self.frame_at(index)) else {
            return;
        };
        let is_tagged = self.forwarding.is_tagged(self.number);
        with_tag(entry, frame, is_tagged, |frame| {
            pass_copy(batch.siblings, first.at, frame, &self.counters, &mut batch.budget);
        });
    }
}
