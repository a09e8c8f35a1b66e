//! Parts of lanes that lanes of other workers use, too: receive queues of guests, NIC queues of uplinks, taps.
//!
//! Each has a lock, which its own lane takes as well. A lane holds it while it moves a run of frames. It holds two only
//! if the first is that of an uplink's queue and the second that of a guest's receive queue.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use common::lock::Locked;

/// How often a thread that must not wait tries to get a lock.
const TRIES: usize = 100;

/// See the module's head. Without a value once its lane has stopped.
pub struct Shared<T>(Arc<Mutex<Option<T>>>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(Some(value))))
    }

    /// Waits for the lock; `None`: its lane has stopped.
    #[inline]
    pub(crate) fn lock(&self) -> Option<Held<'_, T>> {
        Held::of(self.0.locked())
    }

    /// The same, but waits no longer than some microseconds.
    /// Errors: another thread has the lock.
    pub(crate) fn lock_soon(&self) -> Result<Option<Held<'_, T>>, Busy> {
        for _ in 0..TRIES {
            match self.0.try_lock() {
                Ok(value) => return Ok(Held::of(value)),
                Err(TryLockError::Poisoned(value)) => return Ok(Held::of(PoisonError::into_inner(value))),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        Err(Busy)
    }

    /// Takes the value out: its lane stops.
    pub(crate) fn take(&self) -> Option<T> {
        self.0.locked().take()
    }
}

/// Another thread has the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy;

/// A locked value.
pub struct Held<'a, T>(MutexGuard<'a, Option<T>>);

impl<'a, T> Held<'a, T> {
    #[inline]
    fn of(value: MutexGuard<'a, Option<T>>) -> Option<Self> {
        value.is_some().then(|| Self(value))
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.0
            .as_ref()
            .unwrap_or_else(|| unreachable!("checked when it was locked"))
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.0
            .as_mut()
            .unwrap_or_else(|| unreachable!("checked when it was locked"))
    }
}
