//! Parts of lanes that lanes of all workers use: receive queues of guests, NIC queues of uplinks, writers of taps.
//!
//! Each part has a lock, which its own lane takes, too. A lane holds the lock while it moves a run of frames. It holds
//! two locks only if it took that of an uplink's queue first and then that of a guest's receive queue. So no two lanes
//! wait for each other.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use common::lock::Locked;

/// How often [`Shared::lock_soon`] tries to lock: some microseconds.
const TRIES: usize = 100;
/// How often it gives way to other threads before it gives up, where that matters more.
const YIELDS: usize = 32;

/// A part of a lane, behind a lock. It is empty once the lane has stopped.
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

    /// Waits for the lock, which the holder releases after a run of frames; `None`: the lane has stopped.
    #[inline]
    pub(crate) fn lock(&self) -> Option<SharedGuard<'_, T>> {
        SharedGuard::of(self.0.locked())
    }

    /// Like [`Self::lock`], but waits no longer than some microseconds.
    /// Errors: another thread has the lock.
    pub(crate) fn lock_soon(&self) -> Result<Option<SharedGuard<'_, T>>, Busy> {
        for _ in 0..TRIES {
            match self.0.try_lock() {
                Ok(value) => return Ok(SharedGuard::of(value)),
                Err(TryLockError::Poisoned(value)) => {
                    return Ok(SharedGuard::of(PoisonError::into_inner(value)));
                }
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        Err(Busy)
    }

    /// Takes the value out, when the lane stops.
    pub(crate) fn take(&self) -> Option<T> {
        self.0.locked().take()
    }
}

/// Another thread has the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy;

/// Repeats an attempt while another thread has the lock, so that one that has lost its CPU goes on. Does not wait for a
/// worker that hangs.
/// Errors: it still has the lock.
pub(crate) fn patiently<R>(mut attempt: impl FnMut() -> Result<R, Busy>) -> Result<R, Busy> {
    for _ in 0..YIELDS {
        if let Ok(done) = attempt() {
            return Ok(done);
        }
        std::thread::yield_now();
    }
    Err(Busy)
}

/// Whether a lane has work that only its own worker does: a hint, which is set with the lock and read without it.
#[derive(Clone, Default)]
pub(crate) struct Waits(Arc<AtomicU8>);

impl Waits {
    const NOTHING: u8 = 0;
    /// There is work, and the lane's worker may not know.
    const NEW: u8 = 1;
    const KNOWN: u8 = 2;

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Relaxed) != Self::NOTHING
    }

    /// There is work.
    #[inline]
    pub(crate) fn set(&self) {
        // Without the lock others only turn NEW into KNOWN.
        if !self.is_set() {
            self.0.store(Self::NEW, Relaxed);
        }
    }

    /// The lane's worker has looked: whether there still is work.
    #[inline]
    pub(crate) fn looked(&self, is_left: bool) {
        let state = if is_left { Self::KNOWN } else { Self::NOTHING };
        self.0.store(state, Relaxed);
    }

    /// Whether the lane's worker has to be told. True only once, so that a guest without buffers costs no message for
    /// each burst.
    #[inline]
    pub(crate) fn is_news(&self) -> bool {
        let told = || self.0.compare_exchange(Self::NEW, Self::KNOWN, Relaxed, Relaxed);
        self.0.load(Relaxed) == Self::NEW && told().is_ok()
    }
}

/// A part of a lane, while it is locked.
pub struct SharedGuard<'a, T>(MutexGuard<'a, Option<T>>);

impl<'a, T> SharedGuard<'a, T> {
    #[inline]
    fn of(value: MutexGuard<'a, Option<T>>) -> Option<Self> {
        value.is_some().then(|| Self(value))
    }
}

impl<T> Deref for SharedGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.0
            .as_ref()
            .unwrap_or_else(|| unreachable!("checked when it was locked"))
    }
}

impl<T> DerefMut for SharedGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.0
            .as_mut()
            .unwrap_or_else(|| unreachable!("checked when it was locked"))
    }
}
