//! Events that wake the threads which check interfaces; and when a port retries to set up its queues.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use host::links::Link;
use program::backoff::{Backoff, RETRY, Retry};
use rustix::event::{EventfdFlags, eventfd};

/// Longest pause before a port whose queues could not be set up tries again: the kernel does not report when another
/// process releases a queue.
const LONGEST_RETRY: Duration = Duration::from_secs(5);

/// When a port retries: after a pause, or when the number of reports about its interface, or the link, has changed.
pub(crate) struct PortRetry(pub(crate) Retry<(u32, Link)>);

impl Default for PortRetry {
    fn default() -> Self {
        Self(Retry::new(Backoff::new(RETRY, LONGEST_RETRY)))
    }
}

/// An event that one thread sets, and another waits for.
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    pub(crate) fn tell(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Resets the event.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Event {
    /// Readable when it was set.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What wakes the thread that watches a network's uplink, besides its lease.
pub(crate) struct Wakers {
    /// The interface may have changed, or queues could not be set up: the uplink is checked again.
    pub(crate) retry: Event,
    /// How often interfaces changed. Nothing is published through it.
    changes: AtomicU32,
}

impl Wakers {
    /// Without any changes yet.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            retry: Event::new()?,
            changes: AtomicU32::new(0),
        })
    }

    /// Makes the network check its uplink soon.
    pub(crate) fn retry(&self) {
        self.retry.tell();
    }

    /// Some interface changed.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Relaxed);
        self.retry();
    }

    /// How often interfaces changed; it wraps.
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Relaxed)
    }
}
