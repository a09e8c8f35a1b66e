//! Mutexes of values that are whole at any time.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose value a panic cannot leave half changed: one thread's panic does not become that of others.
pub(crate) trait Locked<T> {
    /// As [`Mutex::lock`].
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T> Locked<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
