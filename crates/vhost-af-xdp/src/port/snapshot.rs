//! The published state of a port, which can be read without its lock.
//!
//! A thread may hold the lock for long: a queue is still busy, the steward does not answer, a VMM's memory is being
//! mapped. `status` must not wait for it. So each holder publishes its task and the time when it starts, and a snapshot
//! of the state when it ends ([`Published`]). A reader only takes the lock of the snapshot, and no thread waits while
//! it holds that.
//!
//! A snapshot may be as old as the start of the present holder. It keeps nothing open: a lane's socket and an
//! interface's lease are weak references, because their end is what frees a queue for its next user.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::reasons::{Busy, Closed, Impaired, TurnedAway};
use super::ticket_lock::Task;
use crate::nic::interface::Interface;
use crate::nic::lane_facts::LaneFacts;
use common::lock::Locked;

/// `status` shows a task that takes longer.
const LONG: Duration = Duration::from_secs(1);

/// The state at the end of the last holder of the lock.
#[derive(Clone, Default)]
pub(crate) struct PortSnapshot {
    pub(crate) session: Option<SessionSnapshot>,
    pub(crate) interface: Weak<Interface>,
    /// The guest's MTU, bytes.
    pub(crate) mtu: u32,
    pub(crate) impaired: Option<Impaired>,
    pub(crate) last_closed: Option<Closed>,
    pub(crate) sessions: u64,
}

/// The parts of a session that `status` shows.
#[derive(Clone)]
pub(crate) struct SessionSnapshot {
    pub(crate) features: u64,
    pub(crate) peer: Option<i32>,
    /// The lane of each pair; one that cannot be upgraded was stopped.
    pub(crate) lanes: Vec<Weak<LaneFacts>>,
}

#[derive(Default)]
pub(crate) struct Published(Mutex<State>);

#[derive(Default)]
struct State {
    snapshot: Option<Arc<PortSnapshot>>,
    /// The present holder's task, and its start.
    busy: Option<(Task, Instant)>,
    /// The last VMM that was refused while the present one was connected.
    turned_away: Option<TurnedAway>,
}

impl Published {
    /// The last snapshot; `None` before the port was started.
    pub(crate) fn snapshot(&self) -> Option<Arc<PortSnapshot>> {
        self.0.locked().snapshot.clone()
    }

    /// The holder's task, if it takes long.
    pub(crate) fn busy(&self) -> Option<Busy> {
        let (task, since) = self.0.locked().busy?;
        let taken = since.elapsed();
        (taken >= LONG).then_some(Busy { task, taken })
    }

    /// Records that a thread has taken the lock for a task.
    pub(super) fn begin(&self, task: Task) {
        self.0.locked().busy = Some((task, Instant::now()));
    }

    /// Publishes the snapshot of a thread that releases the lock next.
    pub(super) fn publish(&self, snapshot: PortSnapshot) {
        let snapshot = Arc::new(snapshot);
        let mut state = self.0.locked();
        (state.snapshot, state.busy) = (Some(snapshot), None);
    }

    /// The last VMM that was refused while the present one was connected.
    pub(crate) fn turned_away(&self) -> Option<TurnedAway> {
        self.0.locked().turned_away
    }

    /// Sets the last VMM that was refused; `None`: a new session begins.
    pub(crate) fn set_turned_away(&self, reason: Option<TurnedAway>) {
        self.0.locked().turned_away = reason;
    }
}
