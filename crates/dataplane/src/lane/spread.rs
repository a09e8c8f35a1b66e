//! How a network is spread over the workers: its lanes, and the parts of each that lanes of other workers use.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use device::call::CallBlocked;
use device::pair::Fault;

use crate::guest::rx_queue::RxQueue;
use crate::host::to_tap::ToTap;
use crate::lane::role::Role;
use crate::lane::shared::{Shared, Waits};
use crate::lane::{Lane, LaneId};
use crate::nic::endpoint::NicQueue;
use crate::nic::xdp::XdpNic;

/// The worker of a lane, for lanes of other workers. It acts on a message within a round.
pub(crate) trait LaneWorker: Send + Sync {
    /// Wakes a lane: frames wait there that only its own worker delivers.
    fn wake(&self, lane: LaneId);
    /// Reports the fault of a lane's guest.
    fn blame(&self, lane: LaneId, fault: Fault);
}

/// A change of a network's lanes, for all workers but the lane's own.
#[derive(Clone)]
pub(crate) enum LanesChange {
    Add(SharedLane),
    Remove(LaneId),
    /// A lane's guest begins or ceases to receive, as the value says, or has other rules or another limit.
    Refresh(LaneId, bool),
}

/// A lane of a network, for lanes of other workers.
#[derive(Clone)]
pub(crate) struct SharedLane {
    pub(crate) id: LaneId,
    pub(crate) role: Role,
    own_worker: Arc<dyn LaneWorker>,
    /// Its guest receives: frames to a pair that does not are lost.
    pub(crate) receives: bool,
    /// See [`LaneRef::changes`](crate::fdb::forwarding::LaneRef::changes).
    pub(crate) changes: u32,
    pub(crate) rx: Option<Shared<RxQueue>>,
    /// See [`RxQueue::waits`].
    rx_waits: Waits,
    /// A call to its guest has blocked a thread.
    call_blocked: CallBlocked,
    pub(crate) uplink: Option<Shared<NicQueue<XdpNic>>>,
    pub(crate) tap: Option<Shared<ToTap>>,
}

impl SharedLane {
    /// The shared parts of a lane of that worker.
    pub(crate) fn of(lane: &dyn Lane, (id, role): (LaneId, &Role), own_worker: Arc<dyn LaneWorker>) -> Self {
        let rx = lane.rx().cloned();
        let of_guest = rx.as_ref().and_then(Shared::lock);
        let of_guest = of_guest.map(|rx| (rx.waits.clone(), Arc::clone(rx.vring.call.blocked())));
        let (rx_waits, call_blocked) = of_guest.unwrap_or_default();
        Self {
            id,
            role: role.clone(),
            own_worker,
            receives: lane.receives(),
            changes: 0,
            rx,
            rx_waits,
            call_blocked,
            uplink: lane.uplink().cloned(),
            tap: lane.tap().cloned(),
        }
    }

    /// Frames were delivered to it: wakes the lane if some wait that only its own worker delivers, and reports a guest
    /// whose call has blocked a thread.
    pub(crate) fn leave(&self) {
        if self.rx_waits.is_news() {
            self.own_worker.wake(self.id);
        }
        if self.call_blocked.load(Relaxed) {
            self.blame(Fault::CallBlocks);
        }
    }

    /// Reports a fault of its guest, to which nothing is delivered any more. The caller must not hold the lock of `rx`.
    pub(crate) fn blame(&self, fault: Fault) {
        if let Some(mut rx) = self.rx.as_ref().and_then(Shared::lock) {
            rx.vring.enabled = false;
        }
        self.own_worker.blame(self.id, fault);
    }
}
