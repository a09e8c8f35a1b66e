//! Ticket lock: the threads that change a port run one after the other, in the order in which they took a ticket.
//!
//! These are the thread that reads the VMM's connection, the one that checks interfaces, those that registered memory,
//! and those that serve the operator. While a thread holds the lock it may wait for the kernel, the steward or the VMM.
//! Only threads with later tickets of the same port wait for it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};

use common::lock::Locked;
use derive_more::Display;

/// Why a thread takes the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub(crate) enum Task {
    /// A VMM connected.
    #[display("a VMM that connected")]
    Connect,
    /// The VMM sent a request, or an earlier one continues: memory is registered.
    #[display("a request of its VMM")]
    Request,
    /// The connection ended.
    #[display("the end of its session")]
    Disconnect,
    /// The interface may have changed.
    #[display("a check of its interface")]
    Link,
    /// The operator changes the configuration.
    #[display("a change of its configuration")]
    Change,
    /// The daemon or the port ends.
    #[display("its end")]
    End,
}

/// Must be used: later tickets wait for it.
pub(super) struct Ticket(u64);

/// See the module's head.
pub(super) struct TicketLock<S> {
    state: Mutex<S>,
    /// The next ticket. Nothing is published through it.
    next: AtomicU64,
    /// The ticket that holds the lock, or may take it next.
    serving: Mutex<u64>,
    changed: Condvar,
}

impl<S> TicketLock<S> {
    pub(super) fn new(state: S) -> Self {
        Self {
            state: Mutex::new(state),
            next: AtomicU64::new(0),
            serving: Mutex::new(0),
            changed: Condvar::new(),
        }
    }

    pub(super) fn take_ticket(&self) -> Ticket {
        Ticket(self.next.fetch_add(1, Relaxed))
    }

    /// A ticket, if no other one is in use.
    pub(super) fn try_ticket(&self) -> Option<Ticket> {
        let serving = *self.serving.locked();
        let taken = self.next.compare_exchange(serving, serving + 1, Relaxed, Relaxed);
        taken.ok().map(Ticket)
    }

    /// Whether no earlier ticket is in use.
    pub(super) fn is_next(&self, ticket: &Ticket) -> bool {
        *self.serving.locked() == ticket.0
    }

    /// Waits for the earlier tickets, and runs `act` with the state.
    #[expect(clippy::needless_pass_by_value, reason = "it is used up")]
    pub(super) fn lock<R>(&self, ticket: Ticket, act: impl FnOnce(&mut S) -> R) -> R {
        let not_yet = |serving: &mut u64| *serving != ticket.0;
        drop(self.changed.wait_while(self.serving.locked(), not_yet));
        let result = act(&mut self.state.locked());
        *self.serving.locked() += 1;
        self.changed.notify_all();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_run_in_the_order_of_their_tickets() {
        let state = &TicketLock::new(Vec::new());
        let [first, second, third] = [(); 3].map(|()| state.take_ticket());
        assert!(state.is_next(&first) && !state.is_next(&second) && state.try_ticket().is_none());
        std::thread::scope(|scope| {
            for (ticket, what) in [(third, 3), (second, 2)] {
                scope.spawn(move || state.lock(ticket, |done| done.push(what)));
            }
            state.lock(first, |done| done.push(1));
        });
        let free = state.try_ticket().expect("no thread has a ticket");
        assert_eq!(state.lock(free, std::mem::take), [1, 2, 3]);
    }
}
