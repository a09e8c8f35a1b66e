//! What wakes the thread that watches an interface for a port or a network, beside the interface.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// An event that is told by one thread, and waited for by another.
pub(crate) struct Event(OwnedFd);

impl Event {
    fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    fn tell(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// It is seen.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Event {
    /// Readable when it was told.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(crate) struct Wakers {
    /// The interface may have changed, or queues could not be set up: it is looked at again.
    pub(crate) retry: Event,
    /// Somebody wants to know what the program counted.
    pub(crate) sample: Event,
    /// Dropped when it is known.
    asked: Mutex<Option<Sender<()>>>,
}

impl Wakers {
    /// Nobody wants anything.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            retry: Event::new()?,
            sample: Event::new()?,
            asked: Mutex::default(),
        })
    }

    /// The port is to look again soon.
    pub(crate) fn retry(&self) {
        self.retry.tell();
    }

    /// Asks for a sample; the receiver's end tells that there is one. Who had asked before is not kept waiting.
    pub(crate) fn ask_for_sample(&self) -> Receiver<()> {
        let (asked, known) = mpsc::channel();
        *self.asked() = Some(asked);
        self.sample.tell();
        known
    }

    /// What is to be dropped when the sample is there, if somebody wants one.
    pub(crate) fn take_asked(&self) -> Option<Sender<()>> {
        self.asked().take()
    }

    fn asked(&self) -> MutexGuard<'_, Option<Sender<()>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
