//! A lane with `--memory=send-direct`: frames are sent from guest RAM, and received into the daemon's memory.
//!
//! The queue's UMEM is guest RAM with chunks of the daemon behind it. From the guest it works as [`super::DirectLane`]:
//! frames and the payload of GSO packets are sent directly from guest memory. To the guest it works as
//! [`CopyLane`](crate::switch::copy_lane::CopyLane): the NIC receives into the daemon's chunks only, and each frame is
//! copied once, verified, and perhaps merged with others. So neither the kernel nor a NIC ever writes to guest RAM, not
//! even in zero-copy: it never contains a frame for another guest, and nothing depends on the guest's receive buffers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::{Fault, QueuePair};

use super::{DirectEnd, DirectMemory};
use crate::nic::interface_queue::Coupled;
use crate::nic::queue::Nic;
use crate::switch::lane::{Blame, Lane, LaneGuest, Siblings, Stopped, Work, enable_kicks};
use crate::switch::receiver::{Receive, Receiver, has_frames};

pub(crate) struct SendDirectLane<N> {
    guest: LaneGuest,
    end: DirectEnd<N>,
    receiver: Receiver,
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
            guest: LaneGuest::new(pair, counters),
            end,
            receiver,
        }
    }

    fn to_guest(&mut self) -> Result<usize, Fault> {
        if !self.guest.pair.to_guest.enabled || !has_frames(&mut self.end.queue) {
            return Ok(0);
        }
        let queue = &mut self.end.queue;
        self.receiver.deliver(queue, &mut self.guest.limited())
    }
}

impl<N: Nic> Lane for SendDirectLane<N> {
    fn poll(&mut self, _siblings: Siblings<'_>) -> Result<usize, Blame> {
        let sent = self
            .end
            .from_guest(&mut self.guest.pair, &mut self.guest.sender, &self.guest.counters);
        let moved = sent.and_then(|sent| Ok(sent + self.to_guest()?));
        if moved.is_err() {
            // A fault of the guest: its queues are not used any more.
            (
                self.guest.pair.from_guest.enabled,
                self.guest.pair.to_guest.enabled,
            ) = (false, false);
        }
        moved.map_err(Blame::Own)
    }

    fn enable_notifications(&mut self, _siblings: Siblings<'_>) -> Work {
        let waiting = self.receiver.enable_notifications(&mut self.end.queue);
        let (held, has_chains) = enable_kicks(&self.guest.sender.throttle, &mut self.guest.pair);
        if has_chains {
            return self.end.when_chains_wait();
        }
        if waiting && let Some(work) = self.receiver.when_frames_wait(&mut self.guest.pair.to_guest) {
            return work.max(held);
        }
        self.end.when_sent().max(held).or_polled(&self.guest.pair)
    }

    fn guest(&self) -> Option<&LaneGuest> {
        Some(&self.guest)
    }

    fn guest_mut(&mut self) -> Option<&mut LaneGuest> {
        Some(&mut self.guest)
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.guest.pair.frame_limit = bytes;
        self.receiver.set_frame_limit(bytes);
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
        lane.guest.pair.leave_calls();
        let half_sent = lane.end.send_before_stop(&mut lane.guest.pair);
        let guest = lane.guest.filtered();
        lane.receiver.finish(&mut lane.end.queue, guest);
        lane.end.queue.discard(&lane.guest.counters);
        lane.end.close(&mut lane.guest.pair, half_sent);
        Stopped {
            pair: Some(lane.guest.pair.stopped()),
            queue: None,
        }
    }
}
