//! From one worker to another: frames of a network's guests to destinations on other workers.
//!
//! Theory of operation. A link is a virtqueue in the daemon's memory ([`inner_queue`]), with the device on the sending
//! worker and the driver on the receiving one. A sleeping side is called, or kicked, with the re-check that makes a
//! lost call or kick impossible. Both sides' fences are those of [`virtqueue`].
//!
//! The receiving side puts the buffers, as they are, into a second virtqueue, whose device is a [`PortLane`]: it takes
//! frames like those of a guest, but the sending worker has already checked the source and found the destination. A
//! mark for each buffer carries both, and the NIC's report about the frame's flow ([`cross_worker_mark`]). So addresses
//! are looked up again only for frames whose ports have changed meanwhile. Frames go to ports of this worker, and to
//! the uplink or the host where the other worker has none. A frame to a port without a buffer is lost at once, so that
//! no guest delays frames to others.
//!
//! A link accepts all offloads: GSO packets pass whole.
//!
//! ```text
//!     worker A                                      worker B
//!     PortLane ── to_guest ══ calls ═══▶ driver ── driver ══▶ PortLane (From::Link)  ── ports of B, uplink
//!        │      ◀══ kicks ═ posts buffers again ◀── used ══        ▲
//!        └──────────────── marks, one per buffer ──────────────────┘
//! ```

pub(crate) mod cross_worker_mark;
pub(crate) mod inner_queue;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::Fault;
use device::pair::QueuePair;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::GuestAddr;
use virtqueue::driver::SplitDriver;

use crate::fdb::forwarding::Forwarding;
use crate::lane::{Lane, Siblings, Stopped, Work};
use crate::link::cross_worker_mark::CrossWorkerMarks;
use crate::link::inner_queue::{BUFFERS, InnerQueueError, Memory, Received, left_in};
use crate::port_lane::PortLane;

/// Both ends of a link.
pub(crate) struct Link {
    /// For the worker that sends frames.
    pub(crate) giving: PortLane,
    /// For the worker that receives them.
    pub(crate) taking: LinkLane,
}

impl Link {
    /// Creates a link with the counters of its two ends.
    /// Errors: [`InnerQueueError`].
    pub(crate) fn new([gives, takes]: [Arc<PairCounters>; 2]) -> Result<Self, InnerQueueError> {
        let memory = Memory::new(BUFFERS.into(), 4)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = || eventfd(0, flags).map_err(std::io::Error::from);
        let (posted, came) = (event()?, event()?);
        let (mut given, received) = memory.queue(Some(posted.try_clone()?), Some(came.try_clone()?))?;
        let (mut taken, sent) = memory.queue(Some(came), None)?;
        (given.enabled, taken.enabled) = (true, true);
        let giving = memory.pair(memory.queue(None, None)?.0, given, Offloads::all());
        let taking = memory.pair(taken, memory.queue(None, None)?.0, Offloads::all());
        let marks = Arc::new(CrossWorkerMarks::new(memory.bytes()));
        let taking = LinkLane {
            lane: PortLane::of_link(taking, Arc::clone(&takes), Arc::clone(&marks)),
            counters: takes,
            received: Received::new(received, &memory)?,
            sent,
            posted,
            parts_of: vec![Vec::new(); usize::from(BUFFERS)],
        };
        Ok(Self {
            giving: PortLane::to_link(giving, gives, marks),
            taking,
        })
    }
}

/// See the module's head. The receiving end.
pub(crate) struct LinkLane {
    lane: PortLane,
    counters: Arc<PairCounters>,
    /// Frames from the other worker.
    received: Received,
    /// The driver of the second queue, of which `lane` has the device's half.
    sent: SplitDriver,
    /// Wakes the other worker, if it waits for buffers.
    posted: OwnedFd,
    /// By chain of `sent`: its buffers.
    parts_of: Vec<Vec<GuestAddr>>,
}

impl LinkLane {
    /// Puts received frames into the second queue.
    fn take(&mut self) {
        let mut any = false;
        while let Some(frame) = self.received.next() {
            // There are as many descriptors as buffers.
            if let Some(chain) = self.sent.add(frame) {
                let parts = frame.iter().map(|part| part.addr);
                self.parts_of[usize::from(chain)].extend(parts);
            }
            any = true;
        }
        if any {
            // Without a kick: the lane reads the queue right after this.
            self.sent.publish();
        }
    }

    /// Posts buffers again for the other worker, with which `lane` is done.
    fn give_back(&mut self) {
        let mut any = false;
        while let Some(used) = self.sent.take_used() {
            let mut parts = std::mem::take(&mut self.parts_of[usize::from(used.head)]);
            parts.drain(..).for_each(|part| self.received.post(part));
            self.parts_of[usize::from(used.head)] = parts;
            any = true;
        }
        if any && self.received.driver.publish() {
            let _ = rustix::io::write(&self.posted, &1u64.to_ne_bytes());
        }
    }
}

impl Lane for LinkLane {
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        self.take();
        let moved = self.lane.poll(siblings);
        self.give_back();
        moved
    }

    fn enable_notifications(&mut self, siblings: &mut dyn Siblings) -> Work {
        match self.received.driver.enable_calls() {
            true => Work::Now,
            false => self.lane.enable_notifications(siblings),
        }
    }

    fn disable_notifications(&mut self) {
        self.received.driver.disable_calls();
        self.lane.disable_notifications();
    }

    fn pair(&self) -> Option<&QueuePair> {
        self.lane.pair()
    }

    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        self.lane.pair_mut()
    }

    fn set_forwarding(&mut self, forwarding: &Arc<Forwarding>) {
        self.lane.set_forwarding(forwarding);
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        self.take();
        let left = left_in(&mut self.sent, &mut self.parts_of);
        self.counters.from_guest_queue_stopped.add(left);
        Box::new(self.lane).stop()
    }
}
