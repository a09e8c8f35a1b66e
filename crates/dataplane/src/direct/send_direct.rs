//! A queue with `--memory=send-direct`: frames are sent from guest RAM, and received into the daemon's memory.
//!
//! The queue's UMEM is guest RAM with chunks of the daemon behind it. It sends as [`super::DirectQueue`] does: frames
//! and the payload of GSO packets directly from guest memory. It receives as
//! [`CopyQueue`](crate::backend::own_queue::CopyQueue) does: the NIC writes to the daemon's chunks only, and
//! each frame is copied once, verified, and perhaps merged with others. So neither the kernel nor a NIC ever writes to
//! guest RAM, not even in zero-copy: no frame for another guest gets there, and any receive buffer is good enough.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::{Fault, QueuePair, Vring};
use virtqueue::{ChainId, Chains};

use super::{DirectEnd, DirectMemory};
use crate::backend::own_queue::OwnQueue;
use crate::backend::receiver::{Receive, Receiver, has_frames};
use crate::guest::from_guest::{Budget, Sender, Sink};
use crate::guest::rx_queue::RxQueue;
use crate::lane::Work;
use crate::lane::shared::Shared;
use crate::nic::coupled::Coupled;
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::Nic;
use crate::nic::xdp::XdpNic;

/// See the module's head.
pub struct SendDirectQueue<N> {
    end: DirectEnd<N>,
    receiver: Receiver,
}

impl<N: Nic> SendDirectQueue<N> {
    /// Connects a guest with a NIC queue whose UMEM is the guest's memory. `untags`: the guest gets the frames of its
    /// VLAN without their tag.
    pub fn new(
        pair: &mut QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        (untags, counters): (bool, &Arc<PairCounters>),
    ) -> Self {
        let mut end = DirectEnd::new(&mut pair.from_guest, queue, memory, counters);
        let receiver = Receiver::new(&pair.to_guest, &mut end.queue, counters).untagging(untags);
        Self { end, receiver }
    }
}

impl<N: Nic> OwnQueue for SendDirectQueue<N> {
    const IS_THERE: bool = true;
    type Sink<'a>
        = &'a mut DirectEnd<N>
    where
        Self: 'a;

    fn begin(&mut self, vring: &mut Vring, sender: &mut Sender, _counters: &PairCounters) -> usize {
        self.end.begin_poll(vring, sender)
    }

    fn room(&mut self) -> usize {
        self.end.room()
    }

    #[inline]
    fn put_plain(
        &mut self,
        vring: &mut Vring,
        chains: &Chains,
        budget: &mut Budget,
        counters: &PairCounters,
    ) -> usize {
        self.end.put_plain(vring, chains, budget, counters)
    }

    fn sink<'a>(&'a mut self, _counters: &'a PairCounters) -> Option<&'a mut DirectEnd<N>> {
        Some(&mut self.end)
    }

    fn has_rest(&self) -> bool {
        self.end.has_rest()
    }

    fn places(&self) -> usize {
        self.end.sending.room()
    }

    fn give_back(&mut self, _vring: &mut Vring, chain: ChainId) {
        self.end.give_back(chain);
    }

    fn finish(
        &mut self,
        (from_guest, _): (&mut Vring, &Shared<RxQueue>),
        _counters: &PairCounters,
        moved: usize,
    ) -> Result<usize, Fault> {
        self.end.hand_over();
        Ok(self.end.stop_batch(from_guest, moved))
    }

    fn receive(&mut self, guest: &mut RxQueue) -> Result<usize, Fault> {
        self.receiver.deliver(&mut self.end.queue, guest)
    }

    fn has_frames(&mut self) -> bool {
        has_frames(&mut self.end.queue)
    }

    fn enable_notifications(&mut self, to_guest: &mut Vring) -> Work {
        let received = self.receiver.enable_notifications(&mut self.end.queue, to_guest);
        self.end.when_sent().max(received)
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.receiver.set_frame_limit(bytes);
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.end.queue.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.receiver.awaits_nic()
    }

    fn inject(&mut self, frame: &[u8], _counters: &PairCounters) {
        self.end.inject(frame);
    }

    fn stop(mut self, from_guest: &mut Vring, guest: &mut RxQueue) -> Option<NicQueue<XdpNic>> {
        let half_sent = self.end.send_before_stop(from_guest);
        self.receiver.finish(&mut self.end.queue, guest);
        self.end.queue.discard(&guest.counters);
        self.end.close(from_guest, half_sent);
        None
    }
}
