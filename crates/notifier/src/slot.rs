//! A queue behind its lock, and the order of waiting threads.
//!
//! The lock is held during a look. So a queue has one owner at a time: a transition waits for the look that is under
//! way, and the next look sees the new state.
//!
//! A guest that notifies without pause must not delay transitions, so looks give way to them. Three locks do that, and
//! waiting threads sleep, however long a look lasts. They are taken in this order:
//!
//! ```text
//! look:        looks ──▶ next ──▶ queue      `looks` and `queue` are held until the look is done
//! transition:            next ──▶ queue      `queue` is held until the transition is done
//! ```
//!
//! `next` is released when `queue` is locked. At most one look holds `looks`, so a transition waits for one look, and
//! maybe for one that locked `next` before it.
//!
//! A panic under the lock leaves the device, or the queue's own state, unknown. The queue is broken from then on: it is
//! not served any more, but its transitions and the device's other queues continue. The thread that looked panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::address::NotifyAddress;
use crate::queue::Queue;

/// A queue behind its lock.
pub(crate) struct Slot {
    pub(crate) address: NotifyAddress,
    looks: Mutex<()>,
    next: Mutex<()>,
    queue: Mutex<Queue>,
}

impl Slot {
    pub(crate) fn new(address: NotifyAddress, queue: Queue) -> Self {
        Self {
            address,
            looks: Mutex::new(()),
            next: Mutex::new(()),
            queue: Mutex::new(queue),
        }
    }

    /// Locks for a look, after waiting transitions. Returns whether the thread has to look again.
    pub(crate) fn look(&self, act: impl FnOnce(&mut Queue)) -> bool {
        let _looks = lock(&self.looks);
        let mut queue = self.enter();
        act(&mut queue);
        queue.has_more()
    }

    /// Locks for a transition, or to read the state: before waiting looks.
    pub(crate) fn enter(&self) -> MutexGuard<'_, Queue> {
        let _next = lock(&self.next);
        self.queue.lock().unwrap_or_else(|poisoned| {
            let mut queue = poisoned.into_inner();
            queue.broken = true;
            queue
        })
    }
}

/// These locks protect no data that a panic could leave inconsistent.
pub(crate) fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "slot_tests.rs"]
mod tests;
