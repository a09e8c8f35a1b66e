//! The thread that watches a port's interface.
//!
//! It tells the port's thread when to look at the interface, and again while queues could not be set up. And it asks what
//! the XDP program counted, for `status`, which asks nobody itself: a steward may take its time, or be stopped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use steward::links::Changes;

use super::Port;
use super::mailbox::Task;
use crate::nic::interface::Interface;

/// Pause before a port whose queues could not be set up tries again: doubles up to the longest.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// How long a steward is asked for what the program counted.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);

/// What wakes that thread, beside the interface.
pub(super) struct Wakers {
    /// Queues could not be set up: they are tried again.
    retry: OwnedFd,
    /// Somebody wants to know what the program counted.
    sample: OwnedFd,
    /// Dropped when it is known.
    asked: Mutex<Option<Sender<()>>>,
}

impl Wakers {
    /// Nobody wants anything.
    ///
    /// # Errors
    /// No descriptor left.
    pub(super) fn new() -> io::Result<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self {
            retry: event()?,
            sample: event()?,
            asked: Mutex::default(),
        })
    }

    /// The port is to look again soon.
    pub(super) fn retry(&self) {
        let _ = rustix::io::write(&self.retry, &1u64.to_ne_bytes());
    }

    fn asked(&self) -> MutexGuard<'_, Option<Sender<()>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Port {
    /// Asks for what the program counted; the receiver's end tells that it is known. Who had asked before is not kept
    /// waiting.
    pub(crate) fn ask_for_sample(&self) -> Option<Receiver<()>> {
        self.config.wanted()?;
        let (asked, known) = mpsc::channel();
        *self.wakers.asked() = Some(asked);
        let _ = rustix::io::write(&self.wakers.sample, &1u64.to_ne_bytes());
        Some(known)
    }

    /// Watches the interface on a thread of its own. `changes`: what rtnetlink tells.
    ///
    /// # Errors
    /// No thread is left.
    pub(crate) fn watch_link(self: &Arc<Self>, mut changes: Changes) -> io::Result<()> {
        let port = Arc::clone(self);
        let body = move || {
            let mut pause = RETRY;
            loop {
                let Some(again) = port.ask(Task::Link, |port, state| port.look(state)) else {
                    return;
                };
                let watched = port.watched();
                let longest = match again {
                    true => Some(pause),
                    // What a steward tells while another thread waits for its answer, that thread reads.
                    false => watched.as_ref().map(|_| RETRY),
                };
                pause = match again {
                    true => (pause * 2).min(LONGEST_RETRY),
                    false => RETRY,
                };
                port.await_change(&changes, watched.as_deref(), longest);
                changes.drain();
            }
        };
        std::thread::Builder::new().name("link".to_owned()).spawn(body)?;
        Ok(())
    }

    /// Waits until it is time to look, and serves those who want samples meanwhile.
    fn await_change(&self, changes: &Changes, watched: Option<&Interface>, longest: Option<Duration>) {
        let deadline = longest.map(|longest| Instant::now() + longest);
        let lease = watched.and_then(Interface::watch);
        loop {
            let mut fds = vec![
                PollFd::new(&self.wakers.sample, PollFlags::IN),
                PollFd::new(&self.wakers.retry, PollFlags::IN),
                PollFd::new(changes, PollFlags::IN),
            ];
            fds.extend(lease.map(|lease| PollFd::from_borrowed_fd(lease, PollFlags::IN)));
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let ready = poll(&mut fds, left.as_ref());
            let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let (sample, look) = (is_ready(&fds[0]), fds[1..].iter().any(is_ready));
            drop(fds);
            if sample {
                clear(&self.wakers.sample);
                self.take_sample();
            }
            if look || ready == Ok(0) {
                clear(&self.wakers.retry);
                return;
            }
        }
    }

    /// Asks the steward what the program did with the queues' frames, if somebody wants to know.
    fn take_sample(&self) {
        let asked = self.wakers.asked().take();
        if let (Some(_), Some(wanted), Some(interface)) = (&asked, self.config.wanted(), self.interface()) {
            let deadline = Instant::now() + SAMPLE_TIMEOUT;
            wanted.range().for_each(|queue| interface.sample(queue, deadline));
        }
    }

    /// The interface, if there is more to watch of it than rtnetlink tells.
    fn watched(&self) -> Option<Arc<Interface>> {
        self.interface().filter(|interface| interface.watch().is_some())
    }

    /// The interface as it was shown last.
    fn interface(&self) -> Option<Arc<Interface>> {
        self.window.look().0?.interface.as_ref()?.itself.upgrade()
    }
}

fn clear(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}
