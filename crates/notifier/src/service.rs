//! The thread that serves assigned queues.
//!
//! It waits for all eventfds at once (level-triggered). A round serves each queue that was notified once, in the order
//! in which epoll tells them, which rotates: a queue that is notified without pause does not keep others from their
//! turn. The state is looked at under the queue's lock, after the wait: what was notified to a queue that is not
//! assigned any more is its new owner's.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use rustix::process::Pid;
use rustix::thread::gettid;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::queue::Slot;

/// What the eventfd that ends the thread is known by: no queue has that index.
const STOP: u64 = u64::MAX;
/// Notifications taken in one round. epoll rotates, so more queues than that have their turn, too.
const EVENTS: usize = 64;

/// The queues, and what is waited for.
pub(crate) struct Shared {
    pub(crate) slots: Vec<Slot>,
    pub(crate) epoll: Epoll,
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
            // Fails only if nobody waits for it.
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
            // Fails if a look panicked, which its thread has said.
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
            if event.data() == STOP {
                return;
            }
            let slot = usize::try_from(event.data())
                .ok()
                .and_then(|index| shared.slots.get(index));
            if let Some(slot) = slot {
                slot.enter_giving_way().serve_eventfd();
            }
        }
    }
}
