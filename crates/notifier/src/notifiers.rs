//! The queues of one device, and the thread that serves those that are assigned.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::process::Pid;
use vmm_sys_util::eventfd::EventFd;

use crate::address::{Bus, NotifyAddress};
use crate::bus::Ioeventfds;
use crate::queue::{Queue, Step, Wiring};
pub use crate::serve::{BindError, By, Left, Serve};
use crate::service::{Service, Shared};
use crate::slot::{Slot, lock};
use crate::state::{Event, Outcome, Refusal, State, next};

/// The VMM's configuration of a queue.
pub struct QueueSetup {
    /// Where the driver notifies it.
    pub address: NotifyAddress,
    /// Whether it is notified by an eventfd or by exits.
    pub by: By,
    /// The device's code that serves it.
    pub serve: Box<dyn Serve>,
}

/// Work for the VMM after an event, and facts for its user.
#[derive(Debug, Default)]
pub struct Report {
    /// Queues that a backend has and must give back: the VMM stops it, then sends [`Event::BackendStop`] for each,
    /// before it resumes the guest. Until then each report names them. Two vCPUs that write at the same time may both
    /// get them: the VMM needs a lock for its backends, and reads [`Notifiers::state`] under it.
    pub stop_backends: Vec<u16>,
    /// Queues that are notified by exits from now on, because no eventfd could be bound. Tried again at each event. On
    /// a bus with little room a guest that resets queues one after the other may cause this again and again: limit the
    /// rate of its log lines.
    pub unbound: Vec<Arc<BindError>>,
}

impl Report {
    fn add(&mut self, queue: u16, step: Step) {
        if step.stop_backend {
            self.stop_backends.push(queue);
        }
        self.unbound.extend(step.unbound);
    }
}

/// The status of one queue.
#[derive(Clone, Debug)]
pub struct QueueStatus {
    /// Index of the queue.
    pub queue: u16,
    /// The owner of the queue.
    pub state: State,
    /// How it is notified now.
    pub by: By,
    /// How the VMM wants it to be notified.
    pub chosen: By,
    /// Why it has no eventfd.
    pub unbound: Option<Arc<BindError>>,
    /// Notifications that came by an exit, including those to a queue that was not ready.
    pub from_exits: u64,
    /// Notifications that came by the eventfd while no backend had the queue.
    pub from_eventfd: u64,
    /// A look, or the bus, has panicked: the state of the queue is unknown, so no thread looks any more. The VMM sets
    /// `DEVICE_NEEDS_RESET` (VirtIO 1.3, 2.1), and makes other notifiers.
    pub broken: bool,
}

/// The notifiers' part of a VM's image. The VMM chooses its encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The saved conditions of each queue.
    pub queues: Vec<SavedQueue>,
}

/// The [`Conditions`](crate::state::Conditions) of a queue that the guest's driver has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedQueue {
    /// The driver has set `DRIVER_OK`.
    pub driver_ok: bool,
    /// The device may access memory.
    pub bus_master: bool,
    /// The driver has set the queue up.
    pub enabled: bool,
}

/// Errors of [`Notifiers`].
#[derive(Debug, thiserror::Error)]
pub enum NotifierError {
    /// Eventfds, the epoll or the thread.
    #[error("{what} cannot be made: raise the limit of open files or of threads")]
    Resources {
        /// The failed object.
        what: &'static str,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// VirtIO counts queues with 16 bits.
    #[error("{0} queues are too many: a device has at most 65535")]
    TooManyQueues(usize),
    /// One write would notify two queues.
    #[error(
        "queues {first} and {second} are notified by one write, to {address}: use a datamatch or a multiplier"
    )]
    OneAddress {
        /// Index of one queue.
        first: u16,
        /// Index of the other.
        second: u16,
        /// The address.
        address: NotifyAddress,
    },
    /// No such queue.
    #[error("there is no queue {queue}: the device has {queues}")]
    NoQueue {
        /// The requested index.
        queue: u16,
        /// Number of queues.
        queues: usize,
    },
    /// An event that the table refuses. Nothing has changed.
    #[error("queue {queue}: {event:?} is refused")]
    Refused {
        /// Index of the queue.
        queue: u16,
        /// The event.
        event: Event,
        /// Why, and what to do first.
        #[source]
        refusal: Refusal,
    },
    /// The saved state is of a PCI device, this one is not.
    #[error(
        "the saved state has a queue whose device may not access memory, and this device has no bus master bit: \
         restore a state of virtio-pci into virtio-pci"
    )]
    SavedBusMaster,
    /// The saved state is of a device with another number of queues.
    #[error(
        "the saved state has {saved} queues and the device {queues}: restore it with as many as it was saved with"
    )]
    SavedQueues {
        /// Number of queues that were saved.
        saved: usize,
        /// Number of queues of the device.
        queues: usize,
    },
}

/// The notifiers of a device. Shared by reference between the VMM's threads.
pub struct Notifiers<B: Ioeventfds> {
    bus: B,
    shared: Arc<Shared>,
    service: Option<Service>,
    thread_id: Pid,
    /// There is no bus master bit: a device of virtio-mmio.
    always_master: bool,
    /// One event at a time, so that all queues see events in one order.
    order: Mutex<()>,
}

impl<B: Ioeventfds> Notifiers<B> {
    /// Spawns the thread that serves assigned queues. At first the VM is stopped (until [`Event::VmRun`]),
    /// `DRIVER_OK` is not set, and no queue is enabled. `bus_master`: `false` for PCI, whose driver sets the bit later;
    /// `true` for virtio-mmio.
    ///
    /// # Errors
    /// [`NotifierError::TooManyQueues`], [`NotifierError::OneAddress`], [`NotifierError::Resources`].
    pub fn new(bus: B, queues: Vec<QueueSetup>, bus_master: bool) -> Result<Self, NotifierError> {
        check_addresses(&queues)?;
        let mut slots = Vec::with_capacity(queues.len());
        for QueueSetup { address, by, serve } in queues {
            let queue = Queue::new(by, bus_master, serve).map_err(resources("a queue's eventfd"))?;
            slots.push(Slot::new(address, queue));
        }
        let shared = Arc::new(Shared::new(slots).map_err(resources("the thread's epoll"))?);
        let service = Service::new(Arc::clone(&shared)).map_err(resources("the thread of the notifiers"))?;
        let thread_id = service.thread_id;
        Ok(Self {
            bus,
            shared,
            service: Some(service),
            thread_id,
            always_master: bus_master,
            order: Mutex::new(()),
        })
    }

    /// Applies an event of the whole device to all queues: [`Event::DriverOk`], [`Event::Reset`], [`Event::BusMasterOn`],
    /// [`Event::BusMasterOff`], [`Event::VmRun`] or [`Event::VmStop`]. When it returns, each has its new owner, except for
    /// those in the report, which a backend must give back first.
    ///
    /// # Errors
    /// [`NotifierError::Refused`], only for other events; queues before the named one have changed then.
    ///
    /// # Panics
    /// If [`Serve::look`] panics. The event was not applied to the queues after that one; it may be repeated.
    pub fn event(&self, event: Event) -> Result<Report, NotifierError> {
        let _order = self.one_at_a_time();
        let mut report = Report::default();
        for (queue, slot) in self.slots() {
            report.add(queue, self.apply(queue, slot, event)?);
        }
        Ok(report)
    }

    /// Applies an event of one queue: [`Event::QueueEnable`], [`Event::QueueReset`], [`Event::BackendStart`] or
    /// [`Event::BackendStop`].
    ///
    /// # Errors
    /// [`NotifierError::NoQueue`]; [`NotifierError::Refused`] for events of the VMM's, and nothing has changed then.
    ///
    /// # Panics
    /// If [`Serve::look`] panics.
    pub fn queue_event(&self, queue: u16, event: Event) -> Result<Report, NotifierError> {
        let slot = self.slot(queue)?;
        let _order = self.one_at_a_time();
        let mut report = Report::default();
        report.add(queue, self.apply(queue, slot, event)?);
        Ok(report)
    }

    /// Handles a write with which a vCPU exited. Returns the queue if the write is a notification. The calling thread
    /// looks at a queue that is deassigned and ready. For an assigned or off-limits queue it notifies the owner by the
    /// eventfd (the exit was under way when the ioeventfd was bound, or none could be bound).
    ///
    /// # Panics
    /// If [`Serve::look`] panics.
    pub fn exit(&self, bus: Bus, address: u64, data: &[u8]) -> Option<u16> {
        let (queue, slot) = self
            .slots()
            .find(|(_, slot)| slot.address.is_hit(bus, address, data))?;
        if slot.look(Queue::serve_exit) {
            self.shared.look_again();
        }
        Some(queue)
    }

    /// A duplicate of a queue's eventfd: a backend's kick descriptor. Call this before each
    /// [`Event::BackendStart`]: after a backend gave the queue back, the queue has another eventfd.
    ///
    /// # Errors
    /// [`NotifierError::NoQueue`], [`NotifierError::Resources`].
    pub fn eventfd(&self, queue: u16) -> Result<EventFd, NotifierError> {
        let slot = self.slot(queue)?;
        slot.enter()
            .eventfd()
            .map_err(resources("a duplicate of an eventfd"))
    }

    /// The owner of a queue; `None` if there is no such queue.
    pub fn state(&self, queue: u16) -> Option<State> {
        Some(self.slot(queue).ok()?.enter().state)
    }

    /// Status of all queues.
    pub fn status(&self) -> Vec<QueueStatus> {
        self.slots()
            .map(|(index, slot)| status(index, &slot.enter()))
            .collect()
    }

    /// The state to be saved in the VM's image.
    ///
    /// # Errors
    /// [`NotifierError::Refused`]: the VM runs, or a backend has a queue.
    pub fn save(&self) -> Result<Saved, NotifierError> {
        let _order = self.one_at_a_time();
        self.allowed(Event::Save)?;
        let queues = self.slots().map(|(_, slot)| saved(&slot.enter())).collect();
        Ok(Saved { queues })
    }

    /// Restores a saved state. Ready queues are looked at when the VM runs again.
    ///
    /// # Errors
    /// [`NotifierError::Refused`]: the VM runs, or a backend has a queue; [`NotifierError::SavedQueues`];
    /// [`NotifierError::SavedBusMaster`].
    pub fn restore(&self, saved: &Saved) -> Result<(), NotifierError> {
        let _order = self.one_at_a_time();
        let counts = (saved.queues.len(), self.shared.slots.len());
        if counts.0 != counts.1 {
            return Err(NotifierError::SavedQueues {
                saved: counts.0,
                queues: counts.1,
            });
        }
        if self.always_master && saved.queues.iter().any(|queue| !queue.bus_master) {
            return Err(NotifierError::SavedBusMaster);
        }
        self.allowed(Event::Restore)?;
        for ((_, slot), saved) in self.slots().zip(&saved.queues) {
            let conditions = &mut slot.enter().conditions;
            conditions.driver_ok = saved.driver_ok;
            conditions.bus_master = saved.bus_master;
            conditions.enabled = saved.enabled;
        }
        Ok(())
    }

    /// The kernel's id of the thread that serves assigned queues, by which the caller can choose its CPUs.
    pub fn thread_id(&self) -> Pid {
        self.thread_id
    }

    fn apply(&self, queue: u16, slot: &Slot, event: Event) -> Result<Step, NotifierError> {
        let mut locked = slot.enter();
        let step = locked.apply(event, &self.wiring(queue, slot));
        if locked.has_more() {
            self.shared.look_again();
        }
        step.map_err(|refusal| NotifierError::Refused {
            queue,
            event,
            refusal,
        })
    }

    fn allowed(&self, event: Event) -> Result<(), NotifierError> {
        for (queue, slot) in self.slots() {
            let locked = slot.enter();
            if let Outcome::Refused(refusal) = next(locked.state, locked.conditions, event) {
                return Err(NotifierError::Refused {
                    queue,
                    event,
                    refusal,
                });
            }
        }
        Ok(())
    }

    fn wiring<'a>(&'a self, index: u16, slot: &'a Slot) -> Wiring<'a, B> {
        Wiring {
            bus: &self.bus,
            epoll: &self.shared.epoll,
            address: &slot.address,
            index,
        }
    }

    fn slots(&self) -> impl Iterator<Item = (u16, &Slot)> {
        self.shared
            .slots
            .iter()
            .zip(0..)
            .map(|(slot, index)| (index, slot))
    }

    fn slot(&self, queue: u16) -> Result<&Slot, NotifierError> {
        let queues = self.shared.slots.len();
        self.shared
            .slots
            .get(usize::from(queue))
            .ok_or(NotifierError::NoQueue { queue, queues })
    }

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        lock(&self.order)
    }
}

impl<B: Ioeventfds> Drop for Notifiers<B> {
    /// The thread ends, and no address stays bound. The VMM must have stopped the backends before.
    fn drop(&mut self) {
        self.service = None;
        for (index, slot) in self.slots() {
            slot.enter().release(&self.wiring(index, slot));
        }
    }
}

fn check_addresses(queues: &[QueueSetup]) -> Result<(), NotifierError> {
    if queues.len() > usize::from(u16::MAX) {
        return Err(NotifierError::TooManyQueues(queues.len()));
    }
    for (one, second) in queues.iter().zip(0..) {
        for (first, other) in (0..second).zip(queues) {
            if one.address.overlaps(&other.address) {
                return Err(NotifierError::OneAddress {
                    first,
                    second,
                    address: one.address,
                });
            }
        }
    }
    Ok(())
}

fn status(index: u16, queue: &Queue) -> QueueStatus {
    QueueStatus {
        queue: index,
        state: queue.state,
        by: By::of(queue.bound),
        chosen: By::of(queue.conditions.by_eventfd),
        unbound: queue.unbound.clone(),
        from_exits: queue.from_exits,
        from_eventfd: queue.from_eventfd,
        broken: queue.broken,
    }
}

fn saved(queue: &Queue) -> SavedQueue {
    let conditions = queue.conditions;
    SavedQueue {
        driver_ok: conditions.driver_ok,
        bus_master: conditions.bus_master,
        enabled: conditions.enabled,
    }
}

fn resources(what: &'static str) -> impl Fn(io::Error) -> NotifierError {
    move |source| NotifierError::Resources { what, source }
}
