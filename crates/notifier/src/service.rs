//! The thread that serves assigned queues.
//!
//! It waits for all eventfds at once (level-triggered). A round serves each queue that was notified once, in the order
//! in which epoll reports them, which rotates: a queue that is notified without pause does not starve others. The state
//! is checked under the queue's lock, after the wait: a notification of a queue that is not assigned any more belongs
//! to its new owner.
//!
//! If a look of any thread leaves chains, this thread serves them, too: an eventfd of the device reports it, and the
//! thread looks once a round at each such queue.
//!
//! A look that panics is caught here, and ends only looks at its queue. The hook for panics has reported it.

use std::io;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use rustix::process::Pid;
use rustix::thread::gettid;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::queue::Queue;
use crate::slot::Slot;

/// epoll data of the eventfd that ends the thread: no queue has that index.
const STOP: u64 = u64::MAX;
/// epoll data of the eventfd that reports unfinished looks.
const MORE: u64 = u64::MAX - 1;
/// Notifications taken in one round. epoll rotates, so with more queues each gets its turn, too.
const EVENTS: usize = 64;

/// The queues, and what is waited for.
pub(crate) struct Shared {
    pub(crate) slots: Vec<Slot>,
    pub(crate) epoll: Epoll,
    more: EventFd,
}

impl Shared {
    pub(crate) fn new(slots: Vec<Slot>) -> io::Result<Self> {
        let (epoll, more) = (Epoll::new()?, EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
        let interest = EpollEvent::new(EventSet::IN, MORE);
        epoll.ctl(ControlOperation::Add, more.as_raw_fd(), interest)?;
        Ok(Self { slots, epoll, more })
    }

    /// The thread looks again at queues whose last look has left something.
    pub(crate) fn look_again(&self) {
        // Fails only if the counter is at its maximum: the thread wakes anyway.
        let _ = self.more.write(1);
    }

    /// Serves a queue on the thread.
    fn serve(&self, slot: &Slot, turn: impl FnOnce(&mut Queue)) {
        // Unwinding is safe: the queue's lock marks the queue as broken, and nothing else here changes.
        if let Ok(true) = catch_unwind(AssertUnwindSafe(|| slot.look(turn))) {
            self.look_again();
        }
    }
}

/// The thread. It ends, and is joined, at drop.
pub(crate) struct Service {
    pub(crate) thread_id: Pid,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Spawns the thread.
    pub(crate) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let stop = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        shared.epoll.ctl(
            ControlOperation::Add,
            stop.as_raw_fd(),
            EpollEvent::new(EventSet::IN, STOP),
        )?;
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new().name("notify".to_owned()).spawn(move || {
            // Fails only if no thread waits for it.
            let _ = tell.send(gettid());
            serve(&shared);
        })?;
        let thread_id = told.recv().map_err(io::Error::other)?;
        Ok(Self {
            thread_id,
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Cannot fail: it is written once.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // Fails if the thread panicked, which was reported.
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared) {
    let mut events = vec![EpollEvent::default(); EVENTS];
    loop {
        let ready = match shared.epoll.wait(-1, &mut events) {
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => panic!("epoll_wait on our own epoll: {error}"),
        };
        for event in events.iter().take(ready) {
            match event.data() {
                STOP => return,
                MORE => {
                    // Reset before the looks, which may set it again. Fails only if there is nothing to read.
                    let _ = shared.more.read();
                    for slot in &shared.slots {
                        shared.serve(slot, Queue::serve_more);
                    }
                }
                index => {
                    let slot = usize::try_from(index)
                        .ok()
                        .and_then(|index| shared.slots.get(index));
                    if let Some(slot) = slot {
                        shared.serve(slot, Queue::serve_eventfd);
                    }
                }
            }
        }
    }
}
