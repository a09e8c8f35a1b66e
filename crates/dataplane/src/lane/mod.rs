//! A lane: joins a guest's queue pair with a NIC queue, another guest, or a network. Lanes of uplinks have no guest.
//!
//! A worker *polls* lanes: each poll moves a batch of frames in each direction, publishes both, and returns how many
//! frames moved. When no frame moves for the spin time, the worker enables notifications (asks for kicks) and sleeps.
//!
//! Transitions (only the worker makes them):
//!
//! ```text
//!     polling ──enable_notifications() = None──▶ asleep ──wake──▶ disable_notifications() ─▶ polling
//!     polling ──enable_notifications() = Now───▶ polling   (work arrived meanwhile: no kick follows)
//!     polling ──poll() = Err──▶ faulted                    (not polled until control removes it)
//!     any ──removed by control──▶ stop()                   (consumed; the vring bases remain, and pending calls)
//! ```

pub(crate) mod lane_id;
pub(crate) mod limits;
pub mod new_lane;
pub mod role;
pub(crate) mod spread;

use std::cmp::Reverse;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use device::counters::PairCounters;
use virtqueue::Chains;

use crate::fdb::forwarding::Forwarding;
use crate::guest::pending::Pending;
use crate::host::to_tap::ToTap;
pub use crate::lane::lane_id::{LaneId, SlotAt};
use crate::link::cross_worker_mark::CrossWorkerMarks;
use crate::nic::endpoint::NicQueue;
use crate::nic::hints::XdpMetadata;
use crate::nic::xdp::XdpNic;
use crate::policy::filter::{Acl, Facts, LaneFilter};
use crate::policy::guard::Guard;
use crate::policy::rate_limit::{Policer, PortLimits, RateLimit, Throttle};

use device::pair::{Fault, QueuePair};

/// What a lane still has to do when its worker is about to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Nothing: a kick or a frame wakes the worker.
    None,
    /// Nothing until this time has passed; then the lane must be polled.
    Later(Reverse<Duration>),
    /// Work is there: do not sleep.
    Now,
}

impl Work {
    /// Something waits for an unknown time, and no file descriptor reports it: poll again within a millisecond.
    pub(crate) const SOON: Self = Self::Later(Reverse(Duration::from_millis(1)));

    /// For a lane without work until `wait` has passed; `None`: until a kick or a frame wakes it.
    pub(crate) fn after(wait: Option<Duration>) -> Self {
        match wait {
            None => Self::None,
            Some(Duration::ZERO) => Self::Now,
            Some(wait) => Self::Later(Reverse(wait)),
        }
    }
}

/// Asks a guest for kicks, unless it is throttled: then a kick would change nothing. Returns when the throttle ends,
/// and whether chains wait already.
pub(crate) fn enable_kicks(throttle: &Throttle, pair: &mut QueuePair) -> (Work, bool) {
    let held = Work::after(throttle.held());
    let has_chains = held == Work::None && pair.from_guest.enabled && pair.from_guest.queue.enable_kicks();
    (held, has_chains)
}

/// A guest as a receiver of frames: that of the delivering lane, or of another lane of the same worker.
pub struct RxTarget<'a> {
    pub(crate) pair: &'a mut QueuePair,
    /// Room for its buffers.
    pub(crate) buffers: &'a mut Chains,
    pub(crate) counters: &'a PairCounters,
    /// Frames of other guests that wait for its buffers; `None`: it takes no such frames.
    pub(crate) pending: Option<&'a mut Pending>,
    /// Rate limit of what it gets.
    pub(crate) policer: Policer<'a>,
    /// Which frames it may get; `None`: all.
    pub(crate) filter: Option<&'a mut Acl>,
    /// If it is a link to another worker: where the marks of its frames are stored.
    pub(crate) marks: Option<&'a CrossWorkerMarks>,
}

impl<'a> RxTarget<'a> {
    /// A guest that takes no frames of other guests.
    pub(crate) fn new(pair: &'a mut QueuePair, buffers: &'a mut Chains, counters: &'a PairCounters) -> Self {
        Self {
            pair,
            buffers,
            counters,
            pending: None,
            policer: Policer::default(),
            filter: None,
            marks: None,
        }
    }

    /// Whether the filter rules admit a frame that is not retried; counts a denied one. `head`: its first bytes, all of
    /// the frame or as many as the rules read.
    #[inline]
    pub(crate) fn allows(&mut self, head: &[u8], facts: Facts) -> bool {
        match &mut self.filter {
            Some(filter) => filter.allows(head, facts, self.counters),
            None => true,
        }
    }

    /// Like [`Self::allows`], without charging the work to a budget: such frames are few.
    pub(crate) fn allows_once(&mut self, frame: &[u8]) -> bool {
        let admits = self.allows(frame, Facts::of_len(frame.len()));
        let _ = self.take_work();
        admits
    }

    /// Takes the cost of the look-ups since the last call, in frames of a budget.
    #[inline]
    pub(crate) fn take_work(&mut self) -> usize {
        let work = self.filter.as_mut().map_or(0, |filter| filter.take_work());
        usize::try_from(work).unwrap_or(usize::MAX)
    }

    /// Sets the filter rules of what it gets, if there are any.
    pub(crate) fn filtered(self, filter: Option<&'a mut Acl>) -> Self {
        Self { filter, ..self }
    }

    /// Sets the rate limit of what it gets, if there is one.
    pub(crate) fn limited(self, limit: Option<&'a Arc<RateLimit>>) -> Self {
        Self {
            policer: Policer::new(limit),
            ..self
        }
    }
}

/// The other lanes of a worker: in a network by the indices in the state that [`Lane::set_forwarding`] sets.
pub trait Siblings {
    /// The lane of the one guest that takes the caller's frames, outside of networks ([`crate::lane::role`]).
    fn target(&self) -> Option<SlotAt>;
    /// The guest of a lane; `None`: the lane is no longer in the rounds, or is the caller's.
    fn guest(&mut self, at: SlotAt) -> Option<RxTarget<'_>>;
    /// The NIC queue of a lane, if it is one of the network's uplink.
    fn uplink(&mut self, at: SlotAt) -> Option<&mut NicQueue<XdpNic>>;
    /// The writer of a tap, if the lane is a tap's.
    fn tap(&mut self, at: SlotAt) -> Option<&mut ToTap>;
    /// Reports the fault of a guest that frames were delivered to: its lane leaves the rounds.
    fn blame(&mut self, at: SlotAt, fault: Fault);
}

/// What a stopped lane leaves behind.
pub struct Stopped {
    /// The state of its guest's queue pair.
    pub pair: Option<device::pair::Stopped>,
    /// The NIC queue that was lent to it, bound and filled.
    pub queue: Option<NicQueue<XdpNic>>,
}

/// See the module's head. Lanes of guests are [`crate::port_lane`]; the others belong to networks, and are in
/// [`crate::uplink`], [`crate::host::tap_lane`] and [`crate::link`].
pub trait Lane: Send {
    /// Moves a batch in each direction; returns how many frames moved. Errors: a fault of the lane's own guest. The lane
    /// must not be polled again, nor be a target. Faults of other guests are reported to `siblings`.
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault>;
    /// Asks for kicks where the lane waits for a guest, and checks the rings again after that.
    fn enable_notifications(&mut self, siblings: &mut dyn Siblings) -> Work;
    /// Bytes carried so far in both directions, from counters of the guest or of the lane, so they may restart at 0.
    /// Always 0 for lanes that take no part in [`crate::worker::moderation`], such as receiving ends of links.
    fn carried(&self) -> u64 {
        0
    }
    /// The guest's half.
    fn pair(&self) -> Option<&QueuePair> {
        None
    }
    /// The guest's half, to be changed.
    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        None
    }
    /// The guest as a receiver of frames of other lanes; `None`: it takes none.
    fn rx_target(&mut self) -> Option<RxTarget<'_>> {
        None
    }
    /// Its NIC queue, for frames of other lanes of its network; `None`: it takes none.
    fn uplink(&mut self) -> Option<&mut NicQueue<XdpNic>> {
        None
    }
    /// The writer of other lanes' frames to a tap; `None`: the lane has no tap.
    fn tap(&mut self) -> Option<&mut ToTap> {
        None
    }
    /// Sets the forwarding state of the lane's network.
    fn set_forwarding(&mut self, _forwarding: &Arc<Forwarding>) {}
    /// Sets the longest frame. A lane whose guest receives into its own memory applies it to sent frames; it still
    /// chooses receive buffers by the previous limit.
    fn set_frame_limit(&mut self, bytes: u32) {
        if let Some(pair) = self.pair_mut() {
            pair.frame_limit = bytes;
        }
    }
    /// Sets the rate limits of what its guest sends and gets.
    fn set_limits(&mut self, _limits: &PortLimits) {}
    /// Sets the filter rules of the guest, where that is possible; `None`: all frames pass. Returns the previous ones,
    /// so that another thread frees their memory.
    fn set_filter(&mut self, filter: Option<Box<LaneFilter>>) -> Option<Box<LaneFilter>> {
        filter
    }
    /// Sets which metadata precedes frames of its NIC queue.
    fn set_metadata(&mut self, _metadata: &XdpMetadata) {}
    /// Whether filter rules read the headers of frames to its guest.
    fn is_filtered(&self) -> bool {
        false
    }
    /// Sets which source addresses its guest may use, for a lane outside of networks; `None`: any.
    fn set_guard(&mut self, _guard: Option<&Guard>) {}
    /// The NIC's descriptor, readable when frames arrive; `None`: there is none.
    fn nic(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Whether arriving frames must wake the lane, as [`Self::enable_notifications`] decided: not while some already
    /// wait for the guest's buffers. A second decision would lose a frame that arrived after `enable_notifications`.
    fn awaits_nic(&self) -> bool {
        false
    }
    /// Whether [`Self::nic`] can be in the epoll set instead of being polled: [`Self::enable_notifications`] has found
    /// no waiting frame there, and polling it has no other effect in the kernel.
    fn has_edges(&self) -> bool {
        false
    }
    /// A descriptor for the worker's epoll set, edge-triggered: when it becomes readable the worker wakes and calls
    /// [`Self::note_event`]. [`Self::enable_notifications`] makes sure that nothing waits there.
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// The epoll set has reported [`Self::event_fd`].
    fn note_event(&mut self) {}
    /// Sends an announcement of the daemon if there is room now: networks may lose such frames.
    fn inject(&mut self, _frame: &[u8], _network: &mut dyn Siblings) {}
    /// Takes back what the kernel holds, and publishes what is done. Runs on a control thread, so it does not call the
    /// guest.
    fn stop(self: Box<Self>) -> Stopped;

    /// Asks the driver for no kicks while the lane is polled.
    fn disable_notifications(&mut self) {
        if let Some(pair) = self.pair_mut() {
            pair.from_guest.queue.disable_kicks();
            pair.to_guest.queue.disable_kicks();
        }
    }
}
