//! Calls: the interrupts of a guest, each a write to an eventfd that its VMM gave.
//!
//! The VMM has the same open file, and with it its flags: it can clear O_NONBLOCK whenever it likes and fill the counter up, and then
//! whoever writes waits until the VMM reads. So nobody writes unless somebody else ends that wait:
//!
//!  - a worker is interrupted by the watchdog (control/nudge.rs). It sees that by EINTR, and calls no more in that session, of which
//!    it may have more lanes: a session holds up a worker once.
//!  - a lane that has left its worker writes nothing ([`Call::leave`]). What it owes its guest is written by whoever stopped it, by
//!    means of its own.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::io::Errno;

use super::counters::LaneCounters;

/// A session's note that a call made somebody wait. Set once; nothing is published through it.
pub(crate) type Blocks = Arc<AtomicBool>;

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    /// It is written, by the worker.
    Written,
    /// It is left to somebody else.
    Left,
    /// That was done, and somebody else has to write it.
    Due,
}

/// A vring's call eventfd.
pub(crate) struct Call {
    /// `None`: the driver polls.
    event: Option<OwnedFd>,
    course: Course,
    blocks: Blocks,
}

impl Call {
    /// Of a session with that note.
    pub(crate) fn new(event: Option<OwnedFd>, blocks: Blocks) -> Self {
        Self {
            event,
            course: Course::Written,
            blocks,
        }
    }

    /// The VMM gave another one.
    pub(crate) fn replace(&mut self, event: Option<OwnedFd>) {
        self.event = event;
    }

    /// Interrupts the guest.
    #[inline]
    pub(crate) fn make(&mut self, counters: &LaneCounters) {
        let Some(event) = &self.event else { return };
        if self.course != Course::Written {
            self.course = Course::Due;
        } else if !self.blocks.load(Relaxed)
            // A full counter (EAGAIN) means that the driver has a call pending already. EINTR: the wait was ended. A write that need
            // not wait is never interrupted (eventfd_write, fs/eventfd.c).
            && rustix::io::write(event, &1u64.to_ne_bytes()) == Err(Errno::INTR)
        {
            self.blocks.store(true, Relaxed);
        }
        counters.calls.add(1);
    }

    /// Whether a call of this session made somebody wait.
    #[inline]
    pub(crate) fn blocks(&self) -> bool {
        self.blocks.load(Relaxed)
    }

    /// Nothing is written any more.
    pub(crate) fn leave(&mut self) {
        if self.course == Course::Written {
            self.course = Course::Left;
        }
    }

    /// What is still to be written to, if a call is due.
    pub(crate) fn take_due(&mut self) -> Option<OwnedFd> {
        let due = std::mem::replace(&mut self.course, Course::Left) == Course::Due;
        self.event.take_if(|_| due)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn lane_that_left_its_worker_writes_nothing_and_owes_what_it_called() {
        let ours = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let count = || {
            let mut bytes = [0; 8];
            rustix::io::read(ours.as_fd(), &mut bytes).map(|_| u64::from_ne_bytes(bytes))
        };
        let counters = LaneCounters::default();
        let theirs = ours.try_clone().expect("a descriptor");
        let mut call = Call::new(Some(theirs), Blocks::default());
        call.make(&counters);
        assert_eq!(count(), Ok(1));
        call.leave();
        assert!(call.take_due().is_none());
        call.make(&counters);
        call.leave();
        assert_eq!(count(), Err(Errno::AGAIN));
        assert!(call.take_due().is_some() && call.take_due().is_none());
    }
}
