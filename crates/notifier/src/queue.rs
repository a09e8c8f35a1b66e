//! One queue: its state, its eventfd, and who looks at it.
//!
//! All of it is under one lock, which is held during a look. So a queue has one owner at a time: a transition waits for
//! the look that is under way, and whoever comes after it sees the new state.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::address::NotifyAddress;
use crate::bus::Ioeventfds;
use crate::notifiers::{BindError, By, Serve};
use crate::state::{Conditions, Event, Outcome, Refusal, State, looks, next};

/// What a queue is bound and watched with.
pub(crate) struct Wiring<'a, B> {
    pub(crate) bus: &'a B,
    pub(crate) epoll: &'a Epoll,
    pub(crate) address: &'a NotifyAddress,
    pub(crate) index: u16,
}

/// A queue behind its lock.
pub(crate) struct Slot {
    pub(crate) address: NotifyAddress,
    /// How many wait for the lock with a transition.
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
}

impl Slot {
    pub(crate) fn new(address: NotifyAddress, queue: Queue) -> Self {
        Self {
            address,
            waiting: AtomicUsize::new(0),
            queue: Mutex::new(queue),
        }
    }

    /// For transitions: before those that give way.
    pub(crate) fn enter(&self) -> MutexGuard<'_, Queue> {
        // Relaxed, here and below: the count is advice about who goes first. What the queue is made of is published
        // by the lock alone; without the count a guest that kicks without pause could hold transitions up.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let queue = self.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        queue
    }

    /// For looks: after the transitions that wait.
    pub(crate) fn enter_giving_way(&self) -> MutexGuard<'_, Queue> {
        while self.waiting.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        self.lock()
    }

    /// At the end of the notifiers: nothing is bound. Also of a queue whose look has panicked.
    pub(crate) fn release<B: Ioeventfds>(&self, wiring: &Wiring<'_, B>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.release(wiring);
    }

    /// A look that panicked has left its device in no known state: whoever comes next panics, too.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("a look at the queue has panicked")
    }
}

/// A queue.
pub(crate) struct Queue {
    pub(crate) state: State,
    pub(crate) conditions: Conditions,
    pub(crate) by: By,
    /// An ioeventfd is bound to the address.
    pub(crate) bound: bool,
    /// Why the queue has none, though it is to have one.
    pub(crate) unbound: Option<Arc<BindError>>,
    /// Notifications that came by an exit.
    pub(crate) from_exits: u64,
    /// Notifications that came by the eventfd, and that a backend did not take.
    pub(crate) from_eventfd: u64,
    event: EventFd,
    /// Our own writes to the eventfd that nobody has taken off it yet.
    own_writes: u64,
    serve: Box<dyn Serve>,
}

/// What a transition came to.
#[derive(Default)]
pub(crate) struct Step {
    /// The VMM has to stop the backend.
    pub(crate) stop_backend: bool,
    /// The queue could not be bound. Told once, until it can.
    pub(crate) unbound: Option<Arc<BindError>>,
}

impl Queue {
    pub(crate) fn new(by: By, bus_master: bool, serve: Box<dyn Serve>) -> io::Result<Self> {
        let conditions = Conditions {
            bus_master,
            by_eventfd: by == By::Eventfd,
            ..Conditions::default()
        };
        Ok(Self {
            state: State::Deassigned,
            conditions,
            by,
            bound: false,
            unbound: None,
            from_exits: 0,
            from_eventfd: 0,
            event: new_event()?,
            own_writes: 0,
            serve,
        })
    }

    /// A transition by the table.
    pub(crate) fn apply<B: Ioeventfds>(
        &mut self,
        event: Event,
        wiring: &Wiring<'_, B>,
    ) -> Result<Step, Refusal> {
        let before = self.conditions;
        let outcome = next(self.state, before, event);
        if let Outcome::Refused(refusal) = outcome {
            return Err(refusal);
        }
        self.conditions = before.after(self.state, event);
        let Outcome::To(to) = outcome else {
            return Ok(Step {
                stop_backend: true,
                unbound: None,
            });
        };
        let failed = self.go(to, wiring).err();
        if self.state == State::Deassigned && looks(before, self.conditions) {
            self.serve.look();
        }
        Ok(Step {
            stop_backend: false,
            unbound: failed.and_then(|error| self.note(error, wiring)),
        })
    }

    /// Goes to a state; where it cannot be bound, to [`State::Deassigned`], or unbound to [`State::OffLimits`].
    fn go<B: Ioeventfds>(&mut self, to: State, wiring: &Wiring<'_, B>) -> io::Result<()> {
        if to == self.state && to != State::Deassigned {
            return Ok(());
        }
        let from = self.state;
        if from == State::Assigned {
            self.unwatch(wiring);
        }
        match to {
            State::Deassigned => {
                self.release(wiring);
                self.renew_after(from)
            }
            State::Assigned => {
                self.release(wiring);
                let bound = self.renew_after(from).and_then(|()| self.bind(wiring));
                if let Err(error) = bound.and_then(|()| self.watch(wiring)) {
                    self.release(wiring);
                    return Err(error);
                }
                self.state = State::Assigned;
                self.signal();
                Ok(())
            }
            State::OffLimits => {
                let bound = if self.conditions.by_eventfd {
                    self.bind(wiring)
                } else {
                    Ok(())
                };
                self.state = State::OffLimits;
                self.signal();
                bound
            }
        }
    }

    /// Leaves the queue to exits. What was notified until now is seen by the look that follows.
    fn release<B: Ioeventfds>(&mut self, wiring: &Wiring<'_, B>) {
        if self.bound {
            // Fails only if it is not bound (`kvm_deassign_ioeventfd_idx` in virt/kvm/eventfd.c).
            let _ = wiring.bus.deassign(wiring.address, &self.event);
            self.bound = false;
        }
        self.state = State::Deassigned;
        self.drain();
    }

    /// A backend keeps its duplicate of the eventfd, and could take notifications off it: it is not used again.
    fn renew_after(&mut self, from: State) -> io::Result<()> {
        if from == State::OffLimits {
            self.event = new_event()?;
        }
        Ok(())
    }

    fn bind<B: Ioeventfds>(&mut self, wiring: &Wiring<'_, B>) -> io::Result<()> {
        if !self.bound {
            wiring.bus.assign(wiring.address, &self.event)?;
            self.bound = true;
        }
        self.unbound = None;
        Ok(())
    }

    fn watch<B>(&self, wiring: &Wiring<'_, B>) -> io::Result<()> {
        let interest = EpollEvent::new(EventSet::IN, wiring.index.into());
        wiring
            .epoll
            .ctl(ControlOperation::Add, self.event.as_raw_fd(), interest)
    }

    fn unwatch<B>(&self, wiring: &Wiring<'_, B>) {
        // Fails only if it is not watched.
        let _ = wiring.epoll.ctl(
            ControlOperation::Delete,
            self.event.as_raw_fd(),
            EpollEvent::default(),
        );
    }

    /// A notification came by the eventfd, or is said to: the thread has no lock while it waits.
    pub(crate) fn serve_eventfd(&mut self) {
        if self.state == State::Assigned && self.drain() {
            self.serve.look();
        }
    }

    /// A notification came by an exit.
    pub(crate) fn serve_exit(&mut self) {
        self.from_exits = self.from_exits.saturating_add(1);
        match self.state {
            State::Deassigned if self.conditions.ready() => self.serve.look(),
            // The look when the queue gets ready finds it.
            State::Deassigned => {}
            State::Assigned | State::OffLimits => self.signal(),
        }
    }

    /// The owner looks once more.
    fn signal(&mut self) {
        // Fails only with EAGAIN: the count is at its end, so the owner looks anyhow.
        if self.event.write(1).is_ok() {
            self.own_writes = self.own_writes.saturating_add(1);
        }
    }

    /// Takes off what the eventfd counts; whether that was anything.
    fn drain(&mut self) -> bool {
        let counted = self.event.read().unwrap_or(0);
        let foreign = counted.saturating_sub(self.own_writes);
        self.own_writes = 0;
        self.from_eventfd = self.from_eventfd.saturating_add(foreign);
        counted > 0
    }

    fn note<B>(&mut self, error: io::Error, wiring: &Wiring<'_, B>) -> Option<Arc<BindError>> {
        let is_new = self.unbound.is_none();
        let error = Arc::new(BindError {
            queue: wiring.index,
            address: *wiring.address,
            source: error,
        });
        self.unbound = Some(Arc::clone(&error));
        is_new.then_some(error)
    }

    pub(crate) fn eventfd(&self) -> io::Result<EventFd> {
        self.event.try_clone()
    }
}

/// Nonblocking, so that neither an empty one nor one at its end holds anybody up.
fn new_event() -> io::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
