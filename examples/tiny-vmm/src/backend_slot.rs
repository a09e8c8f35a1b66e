//! Which backend a device has, so that who takes its queues away stops it first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use vmm_sys_util::eventfd::EventFd;

/// Queues that a backend takes: those of the first pair.
pub(crate) const QUEUES: [u16; 2] = [0, 1];

/// Where the backend is that a device has, so that a guest that takes queues away stops it.
///
/// It is locked from the first queue that a backend takes until its thread has the port, and from the end of that
/// thread until the last queue is given back. So a guest that takes a queue away finds the backend as a whole, or none.
/// Who has it may wait for notifiers and for the port; who has one of these never waits for it.
#[derive(Default)]
pub struct BackendSlot(Mutex<Place>);

/// What is in a [`BackendSlot`].
#[derive(Default)]
pub(crate) struct Place {
    /// How many were started.
    pub(crate) started: u64,
    pub(crate) running: Option<Running>,
}

impl BackendSlot {
    /// What is in it, for as long as a backend starts or stops.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Place> {
        self.0.lock().expect("nobody panicked with the backend")
    }

    /// Stops the backend, if it has that queue; all queues that it had. It touches none of them any more when this
    /// returns, and the caller says `BackendStop` of each. Until then no other one can take them.
    #[must_use]
    pub fn end(&self, queue: u16) -> &'static [u16] {
        if !QUEUES.contains(&queue) {
            return &[];
        }
        match self.lock().running.take() {
            Some(running) => {
                // If it panicked, the port has an error.
                let _ = running.end();
                &QUEUES
            }
            None => &[],
        }
    }
}

/// A backend's thread.
pub(crate) struct Running {
    pub(crate) number: u64,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) wake: EventFd,
    pub(crate) thread: JoinHandle<()>,
}

impl Running {
    /// It has put the port back when this returns. An error: it panicked.
    pub(crate) fn end(self) -> thread::Result<()> {
        // Release: with the acquire in the backend's loop.
        self.stop.store(true, Ordering::Release);
        // A full counter wakes it, too.
        let _ = self.wake.write(1);
        self.thread.join()
    }
}
