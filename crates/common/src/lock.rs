//! Locks mutexes whose values are consistent at any time.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose value stays consistent if a thread panics, so that one thread's panic does not spread to others.
pub trait Locked<T> {
    /// Like [`Mutex::lock`], but ignores poisoning.
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T> Locked<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
