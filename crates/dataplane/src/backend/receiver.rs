//! The receive path from a NIC queue with memory of the daemon: each frame is copied once.
//!
//! In tap mode frames arrive at a tap instead ([`crate::host::from_tap`]). Lanes use both through [`Receive`].

use std::os::fd::BorrowedFd;

use device::counters::PairCounters;
use device::pair::{Fault, Vring};

use crate::backend::arrivals::Arrivals;
use crate::guest::rx_queue::RxQueue;
use crate::lane::Work;
use crate::lane::limits::BATCH;
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::Nic;

/// Batches delivered when a lane is stopped: what a receive ring holds. A limit, because the NIC may refill the ring.
const LAST_BATCHES: usize = 32;

/// The receive path of a lane that has a NIC queue.
pub trait Receive: Send {
    /// Gives the NIC the guest's own buffers, so no other lane can deliver frames into them.
    const POSTS_BUFFERS: bool = false;
    /// Whether frames may wait.
    fn has_frames<N: Nic>(&mut self, queue: &mut NicQueue<N>) -> bool;
    /// Delivers a batch, as far as the guest has buffers; returns how many frames.
    /// Errors: the guest's fault.
    fn deliver<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> Result<usize, Fault>;
    /// The lane is about to sleep: what is left to do for frames that wait already. If none wait, the next frame has to
    /// wake the lane.
    fn enable_notifications<N: Nic>(&mut self, queue: &mut NicQueue<N>, to_guest: &mut Vring) -> Work;
    /// Sets the longest frame, bytes.
    fn set_frame_limit(&mut self, bytes: u32);
    /// See [`Lane::awaits_nic`](crate::lane::Lane::awaits_nic).
    fn awaits_nic(&self) -> bool;
    /// The tap at which frames arrive; `None`: they arrive at the queue.
    fn tap(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// The epoll set has reported that tap.
    fn note_event(&mut self) {}
    /// Posts to the NIC what the guest made available since [`Self::deliver`].
    /// Errors: the guest's fault.
    fn post_more<N: Nic>(&mut self, _queue: &mut NicQueue<N>, _guest: &mut RxQueue) -> Result<(), Fault> {
        Ok(())
    }
    /// The lane is stopped: delivers frames since the last poll, as far as the guest has buffers.
    fn finish<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue);
    /// The NIC accesses guest memory no more: returns the buffers that it had.
    fn give_up(self, _guest: &mut RxQueue)
    where
        Self: Sized,
    {
    }
}

/// See the module's head. The state between two batches.
pub struct Receiver {
    arrivals: Arrivals,
    awaits_nic: bool,
    /// Cost of filter rules beyond earlier batches, in frames: polls are skipped for it.
    deficit: usize,
}

impl Receiver {
    /// For a guest, and a queue, which is filled.
    pub(crate) fn new<N: Nic>(guest: &Vring, queue: &mut NicQueue<N>, counters: &PairCounters) -> Self {
        let arrivals = Arrivals::new(guest, queue, counters);
        queue.begin();
        Self {
            arrivals,
            awaits_nic: true,
            deficit: 0,
        }
    }

    /// The same, for a guest that gets the frames of its VLAN without their tag.
    pub(crate) fn untagging(self, untags: bool) -> Self {
        Self {
            arrivals: self.arrivals.untagging(untags),
            ..self
        }
    }
}

impl Receive for Receiver {
    #[inline]
    fn has_frames<N: Nic>(&mut self, queue: &mut NicQueue<N>) -> bool {
        has_frames(queue)
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.arrivals.set_frame_limit(bytes);
    }

    #[inline]
    fn deliver<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> Result<usize, Fault> {
        if self.deficit >= BATCH {
            self.deficit -= BATCH;
            return Ok(0);
        }
        let in_hand = queue.received.len();
        let (mut delivery, admission) = guest.begin(in_hand)?;
        let delivered = self.arrivals.deliver(queue, &mut delivery, admission);
        queue.give();
        let frames = delivered.map(|()| delivery.finish());
        self.deficit += guest.take_work();
        frames
    }

    fn enable_notifications<N: Nic>(&mut self, queue: &mut NicQueue<N>, to_guest: &mut Vring) -> Work {
        self.awaits_nic = !has_frames(queue);
        match self.awaits_nic {
            true => Work::None,
            false => when_frames_wait(to_guest, self.arrivals.short),
        }
    }

    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    /// Frames may have arrived since the last poll, if the control thread waited for a CPU before
    /// [`stop`](crate::lane::Lane::stop). A fault of the guest is ignored now.
    ///
    /// A guest that had a fault before gets nothing: its queues are disabled, and its VMM already reads the position
    /// from the ring.
    fn finish<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) {
        if guest.vring.enabled {
            for _ in 0..LAST_BATCHES {
                self.deficit = 0;
                if !has_frames(queue) || !matches!(self.deliver(queue, guest), Ok(1..)) {
                    break;
                }
            }
        }
        self.arrivals.leave(queue);
    }
}

/// Whether a frame waits, in the ring or already taken from it.
#[inline]
pub(crate) fn has_frames<N: Nic>(queue: &mut NicQueue<N>) -> bool {
    !queue.received.is_empty() || queue.nic.received() > 0
}

/// What is left to do for frames that wait: nothing until the guest has buffers, whose kick then wakes the lane. `short`:
/// it has some, and too few for the next frame.
pub(crate) fn when_frames_wait(to_guest: &mut Vring, short: bool) -> Work {
    // The guest has buffers, or has just posted some.
    let has_buffers = to_guest.enabled && to_guest.queue.enable_kicks();
    match (has_buffers, short) {
        (false, _) => Work::None,
        (true, true) => Work::SOON,
        (true, false) => Work::Now,
    }
}
