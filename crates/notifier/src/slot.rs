//! A queue behind its lock, and the order of waiting threads.
//!
//! The lock is held during a look. So a queue has one owner at a time: a transition waits for the look that is under
//! way, and the next look sees the new state.
//!
//! A guest that notifies without pause must not keep transitions waiting, so looks give way. Three locks do that, and
//! who waits sleeps, however long a look lasts. They are taken in this order:
//!
//! ```text
//! look:        looks ──▶ next ──▶ queue      `looks` and `queue` are held until the look is done
//! transition:            next ──▶ queue      `queue` is held until the transition is done
//! ```
//!
//! `next` is let go when the queue is had. Of those that look one at most is behind `looks`, so a transition waits for
//! one look, and maybe for one that was before it at `next`.
//!
//! A panic under the lock leaves the device, or the queue's own state, unknown. The queue is broken from then on: it is
//! not looked at any more, while transitions go on, as do the device's other queues. The panic itself is that of the
//! thread that looked.

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

    /// For looks: after the transitions that wait. Whether the thread has to look again.
    pub(crate) fn look(&self, act: impl FnOnce(&mut Queue)) -> bool {
        let _looks = lock(&self.looks);
        let mut queue = self.enter();
        act(&mut queue);
        queue.has_more()
    }

    /// For transitions, and to see what holds: before those that look.
    pub(crate) fn enter(&self) -> MutexGuard<'_, Queue> {
        let _next = lock(&self.next);
        self.queue.lock().unwrap_or_else(|poisoned| {
            let mut queue = poisoned.into_inner();
            queue.broken = true;
            queue
        })
    }
}

/// Nothing is behind these locks that a panic could spoil.
pub(crate) fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "slot_tests.rs"]
mod tests;
