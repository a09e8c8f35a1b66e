//! A NIC queue that a queue pair has for itself: the frames that it receives are for the pair's guest. Outside of
//! networks all frames of the pair leave through it.
//!
//! In a network it takes the guest's frames to the LAN. The pair's lane ([`crate::port_lane`]) classifies each
//! frame, and passes frames to other ports and to the host on like those of any port. Frames for the guest from queues
//! of the uplink, from the host, and from other ports reach it through that lane, too.
//!
//! Three kinds: none, which costs nothing; a queue whose frames are copied ([`CopyQueue`]); a queue that sends from the
//! guest's memory ([`DirectQueue`](crate::direct::DirectQueue)).
//!
//! What a queue received is delivered by an implementation of [`Receive`]: [`Receiver`] copies frames; with
//! [`DirectReceiver`](crate::direct::DirectReceiver) the NIC writes them to guest memory; in tap mode a queue receives
//! nothing, and frames arrive at a tap ([`FromTap`]).

use device::counters::PairCounters;
use device::pair::{Fault, Vring};
use virtqueue::{Chain, Chains};

use crate::backend::receiver::{Receive, Receiver};
use crate::backend::to_nic::{NicSink, Transmit};
use crate::guest::from_guest::{Budget, Sender, Sink};
use crate::guest::rx_queue::RxQueue;
use crate::host::from_tap::FromTap;
use crate::lane::Work;
use crate::lane::limits::SEGMENTS;
use crate::lane::shared::Shared;
use crate::nic::endpoint::NicQueue;
use crate::nic::lent::Lent;
use crate::nic::queue::Nic;
use crate::nic::xdp::XdpNic;

/// See the module's head. The default methods are those of [`NoQueue`].
pub trait OwnQueue: Send + Sized {
    /// Whether there is one.
    const IS_THERE: bool;
    /// Other lanes can deliver frames into the guest's receive buffers, too.
    const SHARES_BUFFERS: bool = !Self::Receiver::POSTS_BUFFERS;
    /// The NIC.
    type Nic: Nic;
    /// What receives from it.
    type Receiver: Receive;

    /// Begins a poll: returns completed chains to the guest, and continues a GSO packet. Returns how much moved.
    #[inline]
    fn begin(&mut self, _vring: &mut Vring, _sender: &mut Sender, _counters: &PairCounters) -> usize {
        0
    }
    /// How many chains [`Self::sink`] takes now; 0: a chain has to wait until frames are sent.
    #[inline]
    fn room(&mut self) -> usize {
        usize::MAX
    }
    /// Sends frames of these chains, from the first on, as long as they need no work but a copy or a descriptor
    /// ([`Vring::plain`]); returns how many.
    #[inline]
    fn put_plain(
        &mut self,
        _vring: &mut Vring,
        _chains: &Chains,
        _budget: &mut Budget,
        _counters: &PairCounters,
    ) -> usize {
        0
    }
    /// What frames to the LAN are put into; `None`: a queue of the uplink takes them.
    #[inline]
    fn sink<'a>(&'a mut self, _counters: &'a PairCounters) -> Option<impl Sink + 'a> {
        None::<NicSink<'a, Self::Nic>>
    }
    /// Part of a GSO packet is left, which no other frame may overtake.
    #[inline]
    fn has_rest(&self) -> bool {
        false
    }
    /// How many chains [`Self::give_back`] takes now.
    #[inline]
    fn places(&self) -> usize {
        usize::MAX
    }
    /// Returns to the guest, in order, chains that were not sent through this queue.
    #[inline(always)]
    fn give_back(&mut self, vring: &mut Vring, chains: &[Chain]) {
        vring.queue.push_all_used(chains);
    }
    /// Ends a poll in which `moved` frames moved: sends the queued frames. Returns how many more have moved.
    /// Errors: the guest's fault.
    #[inline]
    fn finish(
        &mut self,
        _vrings: (&mut Vring, &Shared<RxQueue>),
        _counters: &PairCounters,
        _moved: usize,
    ) -> Result<usize, Fault> {
        Ok(0)
    }
    /// The queue, and what receives from it; `None`: there is none.
    #[inline]
    fn parts(&self) -> Option<(&NicQueue<Self::Nic>, &Self::Receiver)> {
        None
    }
    /// The same, to be changed.
    #[inline]
    fn parts_mut(&mut self) -> Option<(&mut NicQueue<Self::Nic>, &mut Self::Receiver)> {
        None
    }
    /// The lane is about to sleep: what is left to do.
    #[inline]
    fn enable_notifications(&mut self, _to_guest: &mut Vring) -> Work {
        Work::None
    }
    /// The guest has nothing to send.
    fn pause(&mut self) {}
    /// Sends a frame of the daemon, if there is room now.
    fn inject(&mut self, _frame: &[u8], _counters: &PairCounters) {}
    /// The lane is stopped: takes back what the kernel holds. Returns the queue, if it outlives the lane.
    fn stop(self, _from_guest: &mut Vring, _guest: &mut RxQueue) -> Option<NicQueue<XdpNic>> {
        None
    }

    /// Delivers received frames, as far as the guest has buffers; returns how many.
    /// Errors: the guest's fault.
    #[inline]
    fn receive(&mut self, guest: &mut RxQueue) -> Result<usize, Fault> {
        let parts = self.parts_mut();
        parts.map_or(Ok(0), |(queue, receiver)| receiver.deliver(queue, guest))
    }

    /// Whether received frames wait, or [`Self::receive`] has other work.
    #[inline]
    fn has_frames(&mut self) -> bool {
        let parts = self.parts_mut();
        parts.is_some_and(|(queue, receiver)| receiver.has_frames(queue))
    }

    /// Sets the longest frame, bytes.
    fn set_frame_limit(&mut self, bytes: u32) {
        if let Some((queue, receiver)) = self.parts_mut() {
            queue.frame_limit = bytes;
            receiver.set_frame_limit(bytes);
        }
    }
}

/// No queue: frames use the queues of the uplink.
#[derive(Debug, Default)]
pub struct NoQueue;

impl OwnQueue for NoQueue {
    const IS_THERE: bool = false;
    type Nic = XdpNic;
    type Receiver = Receiver;
}

/// A queue with memory of the daemon; each frame is copied once.
///
/// Chunks of its UMEM circulate: free pool → (filled from the guest) → TX ring → completion → pool, and pool → fill ring
/// → RX ring → (copied to the guest) → fill ring.
pub struct CopyQueue<N, R = Receiver> {
    queue: NicQueue<N>,
    transmit: Transmit,
    receiver: R,
}

impl<N: Lent> CopyQueue<N> {
    /// A queue for that guest. `untags`: the guest gets the frames of its VLAN without their tag.
    pub fn new(guest: &Vring, mut queue: NicQueue<N>, untags: bool, counters: &PairCounters) -> Self {
        let receiver = Receiver::new(guest, &mut queue, counters).untagging(untags);
        Self {
            queue,
            transmit: Transmit::default(),
            receiver,
        }
    }
}

impl<N: Lent> CopyQueue<N, FromTap> {
    /// A queue that only sends, in tap mode.
    pub fn by_tap(mut queue: NicQueue<N>, from_tap: FromTap) -> Self {
        queue.begin();
        Self {
            queue,
            transmit: Transmit::default(),
            receiver: from_tap,
        }
    }
}

impl<N: Lent, R: Receive> OwnQueue for CopyQueue<N, R> {
    const IS_THERE: bool = true;
    type Nic = N;
    type Receiver = R;

    fn begin(&mut self, _vring: &mut Vring, sender: &mut Sender, counters: &PairCounters) -> usize {
        self.queue.reclaim(SEGMENTS * 2, counters);
        self.queue.update_link_state(counters);
        if sender.left() == 0 || !self.transmit.has_rest() {
            return 0;
        }
        let mut budget = sender.budget();
        let sent = NicSink::new(&mut self.queue, &mut self.transmit, counters).send_rest(&mut budget);
        sender.charge(&budget);
        sent
    }

    fn room(&mut self) -> usize {
        self.queue.nic.room_to_nic().min(self.queue.pool.len())
    }

    #[inline]
    fn put_plain(
        &mut self,
        vring: &mut Vring,
        chains: &Chains,
        budget: &mut Budget,
        counters: &PairCounters,
    ) -> usize {
        let done =
            NicSink::new(&mut self.queue, &mut self.transmit, counters).put_plain(vring, chains, budget);
        vring.queue.push_all_used(&chains.chains[..done]);
        done
    }

    fn sink<'a>(&'a mut self, counters: &'a PairCounters) -> Option<impl Sink + 'a> {
        Some(NicSink::new(&mut self.queue, &mut self.transmit, counters))
    }

    fn has_rest(&self) -> bool {
        self.transmit.has_rest()
    }

    fn finish(
        &mut self,
        _vrings: (&mut Vring, &Shared<RxQueue>),
        counters: &PairCounters,
        _moved: usize,
    ) -> Result<usize, Fault> {
        if !self.transmit.is_empty() || self.queue.nic.unsent() > 0 {
            self.queue.send(&mut self.transmit.outgoing);
            self.queue.kick(counters);
        }
        Ok(0)
    }

    fn parts(&self) -> Option<(&NicQueue<N>, &R)> {
        Some((&self.queue, &self.receiver))
    }

    #[inline]
    fn parts_mut(&mut self) -> Option<(&mut NicQueue<N>, &mut R)> {
        Some((&mut self.queue, &mut self.receiver))
    }

    fn enable_notifications(&mut self, to_guest: &mut Vring) -> Work {
        let received = self.receiver.enable_notifications(&mut self.queue, to_guest);
        let sent = match self.transmit.has_rest() || self.transmit.tap_is_full() {
            true => Work::after(self.queue.until_sent()).max(Work::SOON),
            false => Work::after(self.queue.until_copies_sent()),
        };
        sent.max(received)
    }

    fn pause(&mut self) {
        self.transmit.pause();
    }

    fn inject(&mut self, frame: &[u8], counters: &PairCounters) {
        NicSink::new(&mut self.queue, &mut self.transmit, counters).inject(frame);
    }

    fn stop(mut self, _from_guest: &mut Vring, guest: &mut RxQueue) -> Option<NicQueue<XdpNic>> {
        NicSink::new(&mut self.queue, &mut self.transmit, &guest.counters).send_before_stop();
        self.receiver.finish(&mut self.queue, guest);
        N::give_back(self.queue, &guest.counters)
    }
}

#[cfg(test)]
mod tests {
    use device::offloads::Offloads;
    use virtqueue::{Journal, QueueFeatures};

    use super::*;
    use crate::nic::endpoint::Chunks;
    use crate::nic::null::{NullConfig, NullNic};
    use crate::nic::queue::Sends;
    use crate::tests::test_guest::Memory;

    #[test]
    fn frame_limit_that_grows_is_that_of_segments_too() {
        let memory = Memory::new(1 << 20, 0);
        let vring = || memory.vring(64, QueueFeatures::default(), Journal::None).0;
        let guest = memory.side(vring(), vring(), Offloads::all());
        let chunks = Chunks::new(1 << 20, 2048, 64).expect("memory");
        let config = NullConfig {
            frame_bytes: 0,
            header_bytes: 0,
            at_once: usize::MAX,
        };
        let nic = NullNic::new(chunks.umem.clone(), config, 64);
        let queue = NicQueue::new(nic, chunks, Sends::PLAIN);
        let mut own = CopyQueue::new(&guest.to_guest, queue, false, &PairCounters::default());
        own.set_frame_limit(9018);
        assert_eq!(own.queue.frame_limit, 9018);
    }
}
