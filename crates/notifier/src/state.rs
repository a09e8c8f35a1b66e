//! The state table: how each event changes a queue.
//!
//! [`next`] is the whole table, a pure function. [`Conditions`] are updated in every state, also while a backend owns
//! the queue, so that they are current when the backend stops.

/// The owner of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The vCPU that exits with a notification. No ioeventfd is bound.
    Deassigned,
    /// The thread of [`Notifiers`](crate::notifiers::Notifiers). An ioeventfd is bound.
    Assigned,
    /// A backend (vhost, vhost-user) that has the eventfd. No other thread accesses the queue.
    OffLimits,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Deassigned, Self::Assigned, Self::OffLimits];
}

/// What happens to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Guest: the driver set `DRIVER_OK` (VirtIO 1.3, 2.1).
    DriverOk,
    /// Guest: it wrote 0 to the device's status, set `FAILED`, or cleared `DRIVER_OK`. Queues are disabled, too
    /// (VirtIO 1.3, 2.4).
    Reset,
    /// Guest: the PCI device may read and write memory.
    BusMasterOn,
    /// Guest: the PCI device may no longer read and write memory.
    BusMasterOff,
    /// Guest: the queue is set up (`queue_enable`, `QueueReady`).
    QueueEnable,
    /// Guest: this queue alone is reset or disabled (`queue_reset`: VirtIO 1.3, 2.6.1; `QueueReady` 0).
    QueueReset,
    /// VMM: vCPUs are about to run.
    VmRun,
    /// VMM: vCPUs have stopped.
    VmStop,
    /// VMM: the queue's conditions are saved.
    Save,
    /// VMM: saved conditions are restored.
    Restore,
    /// VMM: a backend is about to take over the queue.
    BackendStart,
    /// VMM: the backend does not touch the queue any more.
    BackendStop,
}

impl Event {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::DriverOk,
        Self::Reset,
        Self::BusMasterOn,
        Self::BusMasterOff,
        Self::QueueEnable,
        Self::QueueReset,
        Self::VmRun,
        Self::VmStop,
        Self::Save,
        Self::Restore,
        Self::BackendStart,
        Self::BackendStop,
    ];
}

/// Conditions of a queue, in addition to its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Conditions {
    /// The driver has set `DRIVER_OK`.
    pub driver_ok: bool,
    /// The device may access memory. Always true except over PCI.
    pub bus_master: bool,
    /// The driver has set the queue up.
    pub enabled: bool,
    /// vCPUs run.
    pub running: bool,
    /// The VMM chose an eventfd for it ([`By::Eventfd`](crate::notifiers::By)).
    pub by_eventfd: bool,
    /// A backend has the queue and must stop first: the queue was not ready at some time since its start.
    pub stop_due: bool,
}

impl Conditions {
    /// The queue's rings may be accessed, not considering whether the VM runs.
    #[must_use]
    pub fn rings_open(self) -> bool {
        self.driver_ok && self.bus_master && self.enabled
    }

    /// Notifications of the queue are served.
    #[must_use]
    pub fn ready(self) -> bool {
        self.rings_open() && self.running
    }

    /// Conditions after an event that is not refused. [`Event::Restore`] keeps them: the caller sets the saved ones.
    #[must_use]
    pub fn after(mut self, state: State, event: Event) -> Self {
        match event {
            Event::DriverOk => self.driver_ok = true,
            Event::Reset => (self.driver_ok, self.enabled) = (false, false),
            Event::BusMasterOn => self.bus_master = true,
            Event::BusMasterOff => self.bus_master = false,
            Event::QueueEnable => self.enabled = true,
            Event::QueueReset => self.enabled = false,
            Event::VmRun => self.running = true,
            Event::VmStop => self.running = false,
            Event::Save | Event::Restore | Event::BackendStart | Event::BackendStop => {}
        }
        // Kept until the backend stops: it does not use rings that were set up meanwhile.
        let owned = state == State::OffLimits && event != Event::BackendStop;
        self.stop_due = owned && (self.stop_due || !self.ready());
        self
    }
}

/// How an event changes a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The next state, maybe the same.
    To(State),
    /// The condition is stored, and the queue stays off-limits: the VMM stops the backend, then reports
    /// [`Event::BackendStop`]; the conditions then decide about the next state.
    StopBackend,
    /// Nothing changes.
    Refused(Refusal),
}

/// Why an event of the VMM's is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// [`Event::BackendStop`] without a backend.
    #[error("no backend has the queue: start one before it is stopped")]
    NoBackend,
    /// [`Event::BackendStart`], [`Event::Save`] or [`Event::Restore`] while a backend has it.
    #[error("a backend has the queue: stop it first")]
    BackendOwns,
    /// [`Event::Save`] or [`Event::Restore`] of a VM that runs.
    #[error("the VM runs: stop its vCPUs first")]
    Running,
    /// [`Event::BackendStart`] of a queue that is not ready.
    #[error(
        "the queue is not ready (DRIVER_OK {driver_ok}, bus master {bus_master}, enabled {enabled}, VM runs \
         {running}): start the backend when all four hold"
    )]
    NotReady {
        /// [`Conditions::driver_ok`].
        driver_ok: bool,
        /// [`Conditions::bus_master`].
        bus_master: bool,
        /// [`Conditions::enabled`].
        enabled: bool,
        /// [`Conditions::running`].
        running: bool,
    },
}

/// The table. `conditions` are those before the event; [`Conditions::after`] returns those after it.
#[must_use]
pub fn next(state: State, conditions: Conditions, event: Event) -> Outcome {
    let after = conditions.after(state, event);
    match (event, state) {
        (Event::Save | Event::Restore, _) if conditions.running => Outcome::Refused(Refusal::Running),
        (Event::Save | Event::Restore | Event::BackendStart, State::OffLimits) => {
            Outcome::Refused(Refusal::BackendOwns)
        }
        (Event::BackendStart, _) if !conditions.ready() => Outcome::Refused(not_ready(conditions)),
        (Event::BackendStart, _) => Outcome::To(State::OffLimits),
        (Event::BackendStop, State::Deassigned | State::Assigned) => Outcome::Refused(Refusal::NoBackend),
        (Event::BackendStop, State::OffLimits) | (_, State::Deassigned | State::Assigned) => {
            Outcome::To(ours(after))
        }
        (_, State::OffLimits) if after.stop_due => Outcome::StopBackend,
        (_, State::OffLimits) => Outcome::To(State::OffLimits),
    }
}

/// The state of a queue that no backend has.
fn ours(conditions: Conditions) -> State {
    if conditions.ready() && conditions.by_eventfd {
        State::Assigned
    } else {
        State::Deassigned
    }
}

/// Whether the calling thread looks at a queue that an event has left [`State::Deassigned`]. Closed rings are never
/// accessed. A queue of a VM that just stopped gets a last look; one of a VM that was stopped before gets none until
/// [`Event::VmRun`].
#[must_use]
pub fn looks(before: Conditions, after: Conditions) -> bool {
    after.rings_open() && (after.running || before.running)
}

fn not_ready(conditions: Conditions) -> Refusal {
    let Conditions {
        driver_ok,
        bus_master,
        enabled,
        running,
        ..
    } = conditions;
    Refusal::NotReady {
        driver_ok,
        bus_master,
        enabled,
        running,
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
