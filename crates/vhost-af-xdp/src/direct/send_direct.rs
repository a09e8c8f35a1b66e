//! A lane with `--memory=send-direct`: frames are sent from guest RAM, and received into the daemon's memory.
//!
//! The queue's UMEM is guest RAM with chunks of the daemon behind it. From the guest it works as [`super::DirectLane`]:
//! frames and the payload of GSO packets are sent directly from guest memory. To the guest it works as
//! [`CopyLane`](crate::switch::copy_lane::CopyLane): the NIC receives into the daemon's chunks only, and each frame is
//! copied once, verified, and merged with its neighbours. So neither the kernel nor a NIC ever writes to guest RAM, in
//! zero-copy either: it never contains a frame for another guest, and nothing depends on the guest's receive buffers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::{Fault, QueuePair};
use virtqueue::Chains;

use super::{DirectEnd, DirectMemory};
use crate::nic::interface_queue::Coupled;
use crate::nic::queue::Nic;
use crate::switch::from_guest::Sender;
use crate::switch::lane::{Blame, Lane, RxTarget, Siblings, Stopped, Work, enable_kicks};
use crate::switch::policy::Policy;
use crate::switch::rate_limit::{PortLimits, RateLimit};
use crate::switch::receiver::{Receive, Receiver, has_frames};

pub(crate) struct SendDirectLane<N> {
    pair: QueuePair,
    end: DirectEnd<N>,
    counters: Arc<PairCounters>,
    sender: Sender,
    receiver: Receiver,
    buffers: Chains,
    /// What its guest may get.
    limit: Option<Arc<RateLimit>>,
}

impl<N: Nic> SendDirectLane<N> {
    /// Connects a guest with a NIC queue whose UMEM is the guest's memory.
    pub(crate) fn new(
        pair: QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        counters: Arc<PairCounters>,
    ) -> Self {
        let mut pair = pair;
        let mut end = DirectEnd::new(&mut pair, queue, memory, &counters);
        let receiver = Receiver::new(&pair, &mut end.queue, &counters);
        Self {
            pair,
            end,
            counters,
            sender: Sender::default(),
            receiver,
            buffers: Chains::default(),
            limit: None,
        }
    }

    fn to_guest(&mut self) -> Result<usize, Fault> {
        if !self.pair.to_guest.enabled || !has_frames(&mut self.end.queue) {
            return Ok(0);
        }
        let guest = RxTarget::new(&mut self.pair, &mut self.buffers, &self.counters);
        let guest = guest.filtered(self.sender.policy.to_guest());
        let mut guest = guest.limited(self.limit.as_ref());
        self.receiver.deliver(&mut self.end.queue, &mut guest)
    }
}

impl<N: Nic> Lane for SendDirectLane<N> {
    fn poll(&mut self, _siblings: Siblings<'_>) -> Result<usize, Blame> {
        let sent = self
            .end
            .from_guest(&mut self.pair, &mut self.sender, &self.counters);
        let moved = sent.and_then(|sent| Ok(sent + self.to_guest()?));
        if moved.is_err() {
            // Its queues are not used any more.
            (self.pair.from_guest.enabled, self.pair.to_guest.enabled) = (false, false);
        }
        moved.map_err(Blame::Own)
    }

    fn enable_notifications(&mut self, _siblings: Siblings<'_>) -> Work {
        let waiting = self.receiver.enable_notifications(&mut self.end.queue);
        let (held, has_chains) = enable_kicks(&self.sender.throttle, &mut self.pair);
        if has_chains {
            return self.end.when_chains_wait();
        }
        if waiting && let Some(work) = self.receiver.when_frames_wait(&mut self.pair.to_guest) {
            return work.max(held);
        }
        self.end.when_sent().max(held).or_polled(&self.pair)
    }

    fn carried(&self) -> u64 {
        self.counters.carried()
    }

    fn pair(&self) -> Option<&QueuePair> {
        Some(&self.pair)
    }

    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        Some(&mut self.pair)
    }

    fn policy(&mut self) -> Option<&mut Policy> {
        Some(&mut self.sender.policy)
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.pair.frame_limit = bytes;
        self.receiver.set_frame_limit(bytes);
    }

    fn set_limits(&mut self, limits: &PortLimits) {
        self.sender.throttle.set(limits.from_guest.as_ref());
        self.limit.clone_from(&limits.to_guest);
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.end.queue.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.receiver.awaits_nic()
    }

    fn inject(&mut self, frame: &[u8], _siblings: Siblings<'_>) {
        self.end.inject(frame);
    }

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        lane.pair.leave_calls();
        let half_sent = lane.end.send_at_last(&mut lane.pair);
        let guest = RxTarget::new(&mut lane.pair, &mut lane.buffers, &lane.counters);
        let guest = guest.filtered(lane.sender.policy.to_guest());
        lane.receiver.finish(&mut lane.end.queue, guest);
        lane.end.queue.discard(&lane.counters);
        lane.end.close(&mut lane.pair, half_sent);
        Stopped {
            pair: Some(lane.pair.stopped()),
            queue: None,
        }
    }
}
