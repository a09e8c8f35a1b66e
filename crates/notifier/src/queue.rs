//! One queue: its state, its eventfd, and its owner. All of it is under the lock of a [`Slot`](crate::slot::Slot).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::address::NotifyAddress;
use crate::bus::Ioeventfds;
use crate::serve::{BindError, By, Left, Serve};
use crate::state::{Conditions, Event, Outcome, Refusal, State, looks, next};

/// What a queue is bound and watched with.
pub(crate) struct Wiring<'a, B> {
    pub(crate) bus: &'a B,
    pub(crate) epoll: &'a Epoll,
    pub(crate) address: &'a NotifyAddress,
    pub(crate) index: u16,
}

/// A queue.
pub(crate) struct Queue {
    pub(crate) state: State,
    pub(crate) conditions: Conditions,
    /// An ioeventfd is bound to the address.
    pub(crate) bound: bool,
    /// Why the queue has no eventfd.
    pub(crate) unbound: Option<Arc<BindError>>,
    /// Notifications that came by an exit.
    pub(crate) from_exits: u64,
    /// Notifications that came by the eventfd while no backend had the queue.
    pub(crate) from_eventfd: u64,
    /// A look, or the bus, has panicked: the queue is not served any more.
    pub(crate) broken: bool,
    event: EventFd,
    /// A backend may have a duplicate of `event`, from the last time that it owned the queue.
    stale: bool,
    /// The last look left something. A new owner of the queue looks anyway.
    more: bool,
    /// This process's own writes to the eventfd that were not read yet.
    own_writes: u64,
    serve: Box<dyn Serve>,
}

/// The result of a transition.
#[derive(Default)]
pub(crate) struct Step {
    /// The VMM has to stop the backend.
    pub(crate) stop_backend: bool,
    /// The queue could not be bound; reported once, until a bind succeeds.
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
            bound: false,
            unbound: None,
            from_exits: 0,
            from_eventfd: 0,
            broken: false,
            stale: false,
            more: false,
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
        let unbound = failed.and_then(|error| self.note(error, wiring));
        if self.state == State::Deassigned && looks(before, self.conditions) {
            self.look();
        }
        Ok(Step {
            stop_backend: false,
            unbound,
        })
    }

    /// Changes the state; if the eventfd cannot be bound, to [`State::Deassigned`] or an unbound [`State::OffLimits`].
    fn go<B: Ioeventfds>(&mut self, to: State, wiring: &Wiring<'_, B>) -> io::Result<()> {
        let to_bind = to == State::OffLimits && self.conditions.by_eventfd && !self.bound;
        if to == self.state && to != State::Deassigned && !to_bind {
            return Ok(());
        }
        if self.state == State::Assigned {
            self.unwatch(wiring);
        }
        match to {
            State::Deassigned => {
                self.release(wiring);
                Ok(())
            }
            State::Assigned => {
                self.release(wiring);
                if let Err(error) = self.bind(wiring).and_then(|()| self.watch(wiring)) {
                    self.release(wiring);
                    return Err(error);
                }
                self.unbound = None;
                self.state = State::Assigned;
                self.signal();
                Ok(())
            }
            State::OffLimits => {
                let bound = if to_bind { self.bind(wiring) } else { self.renew() };
                if bound.is_ok() {
                    self.unbound = None;
                }
                self.state = State::OffLimits;
                self.signal();
                bound
            }
        }
    }

    /// Returns the queue to exits. The look that follows sees all earlier notifications.
    pub(crate) fn release<B: Ioeventfds>(&mut self, wiring: &Wiring<'_, B>) {
        if self.bound {
            // Fails only if it is not bound (`kvm_deassign_ioeventfd_idx` in virt/kvm/eventfd.c).
            let _ = wiring.bus.deassign(wiring.address, &self.event);
            self.bound = false;
        }
        // A backend may have made it blocking, and it is not used again: no thread reads it.
        self.stale |= self.state == State::OffLimits;
        self.state = State::Deassigned;
        if !self.stale {
            self.drain();
        }
    }

    /// Replaces a stale eventfd: a former backend keeps its duplicate, and could consume notifications of the next
    /// owner. It is created when it is needed, so that a failure is retried.
    fn renew(&mut self) -> io::Result<()> {
        if self.stale {
            self.event = new_event()?;
            (self.stale, self.own_writes) = (false, 0);
            if self.state == State::OffLimits {
                self.signal();
            }
        }
        Ok(())
    }

    fn bind<B: Ioeventfds>(&mut self, wiring: &Wiring<'_, B>) -> io::Result<()> {
        if !self.bound {
            self.renew()?;
            wiring.bus.assign(wiring.address, &self.event)?;
            self.bound = true;
        }
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

    /// epoll reported the eventfd; the state may have changed since, as the thread waits without a lock.
    pub(crate) fn serve_eventfd(&mut self) {
        if self.state == State::Assigned && self.drain() {
            self.look();
        }
    }

    /// Serves what the last look left, on the thread.
    pub(crate) fn serve_more(&mut self) {
        if std::mem::take(&mut self.more) && self.state != State::OffLimits && self.conditions.ready() {
            self.look();
        }
    }

    /// A notification came by an exit.
    pub(crate) fn serve_exit(&mut self) {
        self.from_exits = self.from_exits.saturating_add(1);
        match self.state {
            State::Deassigned if self.conditions.ready() => self.look(),
            // The queue is looked at when it becomes ready.
            State::Deassigned => {}
            State::Assigned | State::OffLimits => self.signal(),
        }
    }

    fn look(&mut self) {
        if !self.broken {
            self.more = self.serve.look() == Left::Something;
        }
    }

    /// The thread has to look again.
    pub(crate) fn has_more(&self) -> bool {
        self.more
    }

    /// Makes the owner look once more.
    fn signal(&mut self) {
        // Fails only with EAGAIN: the counter is at its maximum, so the owner looks anyway.
        if self.event.write(1).is_ok() {
            self.own_writes = self.own_writes.saturating_add(1);
        }
    }

    /// Reads and resets the counter of the eventfd; true if it was not 0.
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

    pub(crate) fn eventfd(&mut self) -> io::Result<EventFd> {
        self.renew()?;
        self.event.try_clone()
    }
}

/// Nonblocking, so that neither a read at 0 nor a write at the maximum blocks.
fn new_event() -> io::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
