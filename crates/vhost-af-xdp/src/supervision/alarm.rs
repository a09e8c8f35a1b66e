//! An event that is raised once, for all threads that wait for it together with other descriptors.
//!
//! One signals the end of a session. A worker that finds a fault must not shut down the connection itself: the kernel
//! then visits all waiters at the VMM's end, with interrupts off, and a VMM may have a million of them (epoll; 200 ms
//! were measured). So the worker writes to an eventfd, which the session thread polls together with the connection.
//!
//! One signals the end of a port, which then accepts no VMM any more.
//!
//! One signals the end of the daemon: then no thread waits for a steward's answer any more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use program::descriptors;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::retry_on_intr;

/// See the module's head. There is one for each session, one for each port, and one for the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Alarm(Arc<OwnedFd>);

impl Alarm {
    /// An alarm that is not raised.
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Raises it, with one system call that does not wait: a signal handler may do it, too.
    pub(crate) fn raise(&self) {
        // Never full: that takes 2^64 writes.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// A descriptor that is readable once the alarm is raised.
    pub(crate) fn event(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    /// Waits until one of these is readable or closed by its peer; returns which are. `now`: does not wait.
    /// Errors: the alarm was raised.
    pub(crate) fn await_any(&self, others: &[BorrowedFd<'_>], now: bool) -> io::Result<Vec<bool>> {
        let mut all = vec![PollFd::new(&*self.0, PollFlags::IN)];
        all.extend(
            others
                .iter()
                .map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let timeout = now.then(Timespec::default);
        retry_on_intr(|| poll(&mut all, timeout.as_ref()))?;
        let mut ready = all.iter().map(|fd| !fd.revents().is_empty());
        match ready.next() {
            Some(true) => Err(io::Error::other("the session was ended")),
            _ => Ok(ready.collect()),
        }
    }

    /// Waits until the connection is readable or closed by its peer.
    /// Errors: the alarm was raised.
    pub(crate) fn await_message(&self, connection: &impl AsFd) -> io::Result<()> {
        self.await_any(&[connection.as_fd()], false).map(drop)
    }

    /// Whether the alarm was raised; it stays raised.
    pub(crate) fn is_raised(&self) -> bool {
        descriptors::await_readable(&self.0, Some(Instant::now())).unwrap_or(false)
    }
}
