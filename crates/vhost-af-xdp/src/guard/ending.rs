//! The end of the daemon, for whoever waits for a steward's answer then.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// One a process, for all who wait.
#[derive(Debug, Clone)]
pub(crate) struct Ending(Arc<OwnedFd>);

impl Ending {
    /// Not yet.
    ///
    /// # Errors
    /// No descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// The daemon ends: nothing is waited for any more.
    pub(crate) fn begin(&self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Readable once it has begun.
    pub(crate) fn event(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }
}
