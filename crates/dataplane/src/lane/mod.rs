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
pub mod shared;
pub(crate) mod spread;

use std::cmp::Reverse;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use device::pair::{Direction, Fault, Vring};

use crate::fdb::forwarding::Forwarding;
use crate::guest::rx_queue::RxQueue;
use crate::host::to_tap::ToTap;
pub use crate::lane::lane_id::{LaneId, SlotAt};
use crate::lane::shared::{Shared, SharedGuard};
use crate::nic::endpoint::NicQueue;
use crate::nic::hints::XdpMetadata;
use crate::nic::xdp::XdpNic;
use crate::policy::filter::LaneFilter;
use crate::policy::guard::Guard;
use crate::policy::rate_limit::{PortLimits, Throttle};

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
    /// Another worker has a lock, for some microseconds.
    pub(crate) const LOCKED: Self = Self::Later(Reverse(Duration::from_micros(50)));

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
pub(crate) fn enable_kicks(throttle: &Throttle, vring: &mut Vring) -> (Work, bool) {
    let held = Work::after(throttle.held());
    let has_chains = held == Work::None && vring.enabled && vring.queue.enable_kicks();
    (held, has_chains)
}

/// The other lanes that a lane reaches: in a network by the indices in the state that [`Lane::set_forwarding`] sets.
pub trait Siblings {
    /// The lane of the one guest that takes the caller's frames, outside of networks ([`crate::lane::role`]).
    fn target(&self) -> Option<SlotAt>;
    /// The receive queue of a lane's guest, locked; `None`: the lane is no longer in the rounds, or is the caller's, or
    /// the guest of another worker's lane does not receive. Blame the guest only after the lock is released.
    fn guest(&mut self, at: SlotAt) -> Option<SharedGuard<'_, RxQueue>>;
    /// The NIC queue of the uplink that a lane has, locked.
    fn uplink(&mut self, at: SlotAt) -> Uplink<'_>;
    /// The writer of a tap, locked, if the lane is a tap's.
    fn tap(&mut self, at: SlotAt) -> Option<SharedGuard<'_, ToTap>>;
    /// Reports the fault of a guest that frames were delivered to: its lane leaves the rounds.
    fn blame(&mut self, at: SlotAt, fault: Fault);
}

impl dyn Siblings + '_ {
    /// Delivers to the guest of a lane, and reports its fault once its receive queue is unlocked. `None`: there is no
    /// such guest, or it had a fault.
    #[inline]
    pub(crate) fn deliver_to<R>(
        &mut self,
        at: SlotAt,
        deliver: impl FnOnce(&mut RxQueue) -> Result<R, Fault>,
    ) -> Option<R> {
        let delivered = deliver(&mut *self.guest(at)?);
        delivered.map_err(|fault| self.blame(at, fault)).ok()
    }
}

/// Result of [`Siblings::uplink`].
pub enum Uplink<'a> {
    /// The lane has no such queue, or is no longer in the rounds.
    None,
    /// Another worker has locked it.
    Busy,
    /// The queue is available.
    Queue {
        /// The queue, locked.
        queue: SharedGuard<'a, NicQueue<XdpNic>>,
        /// Its lane is on another worker, so the caller has to kick the kernel.
        is_remote: bool,
    },
}

/// What a stopped lane leaves behind.
#[derive(Default)]
pub struct Stopped {
    /// The state of its guest's queue pair.
    pub pair: Option<device::pair::Stopped>,
    /// The NIC queue that was lent to it, bound and filled.
    pub queue: Option<NicQueue<XdpNic>>,
}

/// See the module's head. Lanes of guests are [`crate::port_lane`]; the others belong to networks, and are in
/// [`crate::uplink`] and [`crate::host::tap_lane`].
pub trait Lane: Send {
    /// Moves a batch in each direction; returns how many frames moved. Faults of other guests are reported to
    /// `siblings`.
    /// Errors: a fault of the lane's own guest. The lane must not be polled again, nor be a target.
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault>;
    /// Asks for kicks where the lane waits for a guest, and checks the rings again after that.
    fn enable_notifications(&mut self, siblings: &mut dyn Siblings) -> Work;
    /// Bytes carried so far in both directions, also by other lanes, from counters of the guest or of the lane, so they
    /// may restart at 0: for [`crate::worker::moderation`] and the count of futile kicks. 0 for lanes without these.
    fn carried(&self) -> u64 {
        0
    }
    /// Whether its guest receives.
    fn receives(&self) -> bool {
        false
    }
    /// Whether a call eventfd of its VMM blocked the thread that wrote to it.
    fn call_blocks(&self) -> bool {
        false
    }
    /// Shows the kick eventfds of its guest.
    fn kicks(&self, _show: &mut dyn FnMut(BorrowedFd<'_>)) {}
    /// Calls `change` for each vring of its guest.
    fn change_vrings(&mut self, _change: &mut dyn FnMut(Direction, &mut Vring)) {}
    /// The receive queue of its guest, for other lanes that deliver into it; `None`: they must not.
    fn rx(&self) -> Option<&Shared<RxQueue>> {
        None
    }
    /// Its NIC queue, for other lanes of its network that send through it; `None`: they must not.
    fn uplink(&self) -> Option<&Shared<NicQueue<XdpNic>>> {
        None
    }
    /// The writer of other lanes' frames to a tap; `None`: the lane has no tap.
    fn tap(&self) -> Option<&Shared<ToTap>> {
        None
    }
    /// Sets the forwarding state of the lane's network.
    fn set_forwarding(&mut self, _forwarding: &Arc<Forwarding>) {}
    /// Sets the forwarding states of other networks that receive frames by this queue, with their numbers.
    fn set_sharing(&mut self, _networks: Vec<(u16, Arc<Forwarding>)>) {}
    /// Sets the longest frame, bytes. A lane whose guest receives into its own memory applies it to sent frames; it
    /// still chooses receive buffers by the previous limit.
    fn set_frame_limit(&mut self, bytes: u32) {
        self.change_vrings(&mut |_, vring| vring.guest.frame_limit = bytes);
    }
    /// Sets the rate limits of what its guest sends and gets.
    fn set_limits(&mut self, _limits: &PortLimits) {}
    /// Sets the filter rules of the guest, where that is possible. Returns the previous ones, so that another thread
    /// frees their memory.
    fn set_filter(&mut self, filter: LaneFilter) -> LaneFilter {
        filter
    }
    /// Sets which metadata precedes frames of its NIC queue.
    fn set_metadata(&mut self, _metadata: &XdpMetadata) {}
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
        self.change_vrings(&mut |_, vring| vring.queue.disable_kicks());
    }
}
