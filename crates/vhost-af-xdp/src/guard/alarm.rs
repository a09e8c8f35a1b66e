//! An event that is raised once, for all who wait for it beside something else.
//!
//! The end of a session: a worker that finds a fault must not end the connection itself. The kernel goes through all
//! who wait for the VMM's end of it, with interrupts off, and a VMM may have a million of them (epoll; 200 ms were
//! seen). So it writes to an eventfd of ours, for which the port's own thread waits beside the connection.
//!
//! The end of a port: nobody is accepted any more.
//!
//! The end of the daemon: nobody waits for a steward's answer any more.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// See the module's head. One a session, one a port, and one for the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Alarm(Arc<OwnedFd>);

impl Alarm {
    /// One that nobody has raised.
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Raises it. One system call, which does not wait: a signal handler may do it, too.
    pub(crate) fn raise(&self) {
        // Never full: nobody writes as often as that.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Readable once it was raised.
    pub(crate) fn event(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    /// Waits until the connection or the other descriptor has something to be read; which of them have. `now`: only
    /// looks.
    /// Errors: it was raised.
    pub(crate) fn await_either(
        &self,
        connection: &impl AsFd,
        other: &impl AsFd,
        now: bool,
    ) -> io::Result<[bool; 2]> {
        let mut three = [
            PollFd::new(connection, PollFlags::IN),
            PollFd::new(other, PollFlags::IN),
            PollFd::new(&*self.0, PollFlags::IN),
        ];
        let timeout = now.then(Timespec::default);
        loop {
            match poll(&mut three, timeout.as_ref()) {
                Ok(_) if !three[2].revents().is_empty() => {
                    return Err(io::Error::other("the session was ended"));
                }
                Ok(_) => return Ok([0, 1].map(|at| !three[at].revents().is_empty())),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits until the connection has something to be read, or its end; of a listener: until somebody connects.
    /// Errors: it was raised.
    pub(crate) fn await_message(&self, connection: &impl AsFd) -> io::Result<()> {
        self.await_either(connection, connection, false).map(|_| ())
    }

    /// Whether somebody did; it stays so.
    pub(crate) fn is_raised(&self) -> bool {
        let now = Timespec::default();
        poll(&mut [PollFd::new(&*self.0, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}
