//! A guest joined with a NIC queue; each frame is copied once (`--memory=copy`).
//!
//! Chunks of the queue's UMEM circulate: free pool → (filled from the guest) → TX ring → completion → pool, and pool →
//! fill ring → RX ring → (copied to the guest) → fill ring.
//!
//! A guest that uses fewer pairs than its port has would lose the frames of the other queues, because the NIC spreads
//! frames over all its queues. So frames for a disabled pair go to the lane's [`RxTarget`]: the first pair, which is
//! always enabled (VirtIO 1.3, 5.1.6.5.5).
//!
//! In tap mode the queue receives nothing: frames arrive at a tap ([`super::from_tap`]). Both implement [`Receive`].

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::{Fault, QueuePair};

use super::from_guest::{Budget, Sink};
use super::from_tap::FromTap;
use super::lane::{Blame, Lane, LaneGuest, RxTarget, Siblings, Stopped, Work, enable_kicks};
use super::limits::SEGMENTS;
use super::receiver::{Receive, Receiver};
use super::to_nic::{NicSink, Transmit};
use crate::nic::endpoint::NicQueue;
use crate::nic::hints::XdpMetadata;
use crate::nic::lent::Lent;
use crate::nic::queue::Nic;

/// See the module's head.
pub(crate) struct CopyLane<N, R = Receiver> {
    guest: LaneGuest,
    queue: NicQueue<N>,
    transmit: Transmit,
    receiver: R,
    /// The guest's next frame waits until sent frames are completed.
    waits_for_room: bool,
}

impl<N: Nic> CopyLane<N> {
    /// Joins a guest with a queue.
    pub(crate) fn new(pair: QueuePair, queue: NicQueue<N>, counters: Arc<PairCounters>) -> Self {
        let mut queue = queue;
        let receiver = Receiver::new(&pair, &mut queue, &counters);
        Self::with(pair, queue, receiver, counters)
    }
}

impl<N: Nic> CopyLane<N, FromTap> {
    /// Joins them in tap mode.
    pub(crate) fn by_tap(
        pair: QueuePair,
        queue: NicQueue<N>,
        from_tap: FromTap,
        counters: Arc<PairCounters>,
    ) -> Self {
        let mut queue = queue;
        queue.begin();
        Self::with(pair, queue, from_tap, counters)
    }
}

impl<N: Nic, R: Receive> CopyLane<N, R> {
    fn with(pair: QueuePair, queue: NicQueue<N>, receiver: R, counters: Arc<PairCounters>) -> Self {
        Self {
            guest: LaneGuest::new(pair, counters),
            queue,
            transmit: Transmit::default(),
            receiver,
            waits_for_room: false,
        }
    }

    fn from_guest(&mut self) -> Result<usize, Fault> {
        self.queue.reclaim(SEGMENTS * 2, &self.guest.counters);
        self.queue.update_link_state(&self.guest.counters);
        let left = self.guest.sender.begin();
        let mut sink = NicSink::new(&mut self.queue, &mut self.transmit, &self.guest.counters);
        if left > 0 && sink.has_rest() {
            let mut budget = Budget::new(left);
            let sent = sink.send_rest(&mut budget);
            self.guest.sender.charge(&budget);
            if sent > 0 || sink.has_rest() {
                return Ok(sent);
            }
        }
        if left == 0 || !self.guest.pair.from_guest.enabled {
            sink.kick_unsent();
            return Ok(0);
        }
        let room = sink.room();
        if room == 0 {
            self.guest.counters.from_guest_waits.add(1);
            sink.kick();
            return Ok(0);
        }
        let burst = self
            .guest
            .sender
            .burst(&mut self.guest.pair, &mut sink, room, &self.guest.counters)?;
        self.waits_for_room = burst.full;
        if burst.any {
            // Chains are published before their frames are sent: if the daemon dies in between, the frames are lost. In
            // the other order its successor would send them again.
            self.guest.pair.from_guest.publish(&self.guest.counters);
            sink.flush();
        } else {
            sink.kick_unsent();
            self.transmit.pause();
        }
        Ok(burst.done)
    }

    fn to_guest(&mut self) -> Result<usize, Fault> {
        self.receiver.deliver(&mut self.queue, &mut self.guest.limited())
    }

    /// Delivers frames for this disabled pair to another one.
    #[cold]
    fn to_target(&mut self, target: &mut RxTarget<'_>) -> Result<usize, Fault> {
        let frames = self.receiver.deliver(&mut self.queue, target)?;
        self.guest.counters.spilled_frames.add(frames as u64);
        Ok(frames)
    }
}

impl<N: Lent, R: Receive + Send> Lane for CopyLane<N, R> {
    fn poll(&mut self, siblings: Siblings<'_>) -> Result<usize, Blame> {
        let sent = self.from_guest();
        let received = match (
            &sent,
            self.receiver.has_frames(&mut self.queue),
            siblings.into_target(),
        ) {
            (Err(_), ..) | (_, false, _) => Ok(0),
            _ if self.guest.pair.to_guest.enabled => self.to_guest().map_err(Blame::Own),
            (.., Some(mut target)) => self.to_target(&mut target).map_err(|fault| {
                switch_off(target.pair);
                Blame::Target(fault)
            }),
            (.., None) => Ok(0),
        };
        let moved = sent.map_err(Blame::Own).and_then(|sent| Ok(sent + received?));
        if let Err(Blame::Own(_)) = moved {
            switch_off(&mut self.guest.pair);
        }
        moved
    }

    fn enable_notifications(&mut self, siblings: Siblings<'_>) -> Work {
        let waiting = self.receiver.enable_notifications(&mut self.queue);
        let wants_room = self.waits_for_room || self.transmit.has_rest();
        let (held, has_chains) = enable_kicks(&self.guest.sender.throttle, &mut self.guest.pair);
        if has_chains {
            let full = self.queue.nic.room_to_nic() == 0 || self.queue.pool.is_empty();
            let is_out = self.queue.nic.unsent() > 0 || self.transmit.tap_is_full();
            let stuck = full || (wants_room && is_out);
            return match stuck {
                true => Work::after(self.queue.until_sent()).max(Work::SOON),
                false => Work::Now,
            };
        }
        if waiting {
            let to_guest = match siblings.into_target() {
                _ if self.guest.pair.to_guest.enabled => Some(&mut self.guest.pair.to_guest),
                Some(target) => Some(&mut target.pair.to_guest),
                None => None,
            };
            if let Some(work) = to_guest.and_then(|vring| self.receiver.when_frames_wait(vring)) {
                return work.max(held);
            }
        }
        self.transmit.pause();
        let work = match self.transmit.has_rest() {
            true => Work::after(self.queue.until_sent()).max(Work::SOON),
            false => Work::after(self.queue.until_copies_sent()),
        };
        work.max(held).or_polled(&self.guest.pair)
    }

    fn guest(&self) -> Option<&LaneGuest> {
        Some(&self.guest)
    }

    fn guest_mut(&mut self) -> Option<&mut LaneGuest> {
        Some(&mut self.guest)
    }

    fn rx_target(&mut self) -> Option<RxTarget<'_>> {
        Some(self.guest.limited())
    }

    fn set_metadata(&mut self, metadata: &XdpMetadata) {
        self.queue.set_metadata(metadata);
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        (self.guest.pair.frame_limit, self.queue.frame_limit) = (bytes, bytes);
        self.receiver.set_frame_limit(bytes);
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.queue.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.receiver.awaits_nic()
    }

    fn has_edges(&self) -> bool {
        self.queue.nic.has_edges()
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.receiver.tap()
    }

    fn note_event(&mut self) {
        self.receiver.note_event();
    }

    fn inject(&mut self, frame: &[u8], _siblings: Siblings<'_>) {
        NicSink::new(&mut self.queue, &mut self.transmit, &self.guest.counters).inject(frame);
    }

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        lane.guest.pair.leave_calls();
        NicSink::new(&mut lane.queue, &mut lane.transmit, &lane.guest.counters).send_before_stop();
        let guest = lane.guest.filtered();
        lane.receiver.finish(&mut lane.queue, guest);
        Stopped {
            pair: Some(lane.guest.pair.stopped()),
            queue: N::give_back(lane.queue, &lane.guest.counters),
        }
    }
}

/// After a guest's fault: no lane uses its queues any more.
#[cold]
fn switch_off(pair: &mut QueuePair) {
    (pair.from_guest.enabled, pair.to_guest.enabled) = (false, false);
}

#[cfg(test)]
#[path = "stop_tests.rs"]
mod stop_tests;
