//! The thread that moves frames when no kick of the guest's asks for it: those that come from the network, and what is
//! left over when somebody's share was used up. Or all of them: it polls, and the guest kicks nobody.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Pid;
use rustix::thread::gettid;

use crate::net::NetShared;
use crate::port::Port;

/// A thread that runs until this is dropped.
pub struct Worker {
    shared: Arc<NetShared>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    thread_id: Pid,
}

impl Worker {
    /// Moves the frames of that device. `polls`: without ever sleeping.
    ///
    /// # Errors
    /// No thread or no descriptor is left.
    pub fn start(shared: &Arc<NetShared>, polls: bool) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let readable = shared.port().with(|port| {
            port.sink()
                .readable()
                .map(|fd| fd.try_clone_to_owned())
                .transpose()
        })?;
        let (tell, told) = mpsc::channel();
        let thread = std::thread::Builder::new().name("worker".into()).spawn({
            let (shared, stop) = (Arc::clone(shared), Arc::clone(&stop));
            move || {
                // Who started it waits for this, unless it is gone.
                let _ = tell.send(gettid());
                match polls {
                    true => poll_until(&shared, &stop),
                    false => sleep_and_serve(&shared, readable.as_ref(), &stop),
                }
            }
        })?;
        let thread_id = told.recv().map_err(io::Error::other)?;
        Ok(Self {
            shared: Arc::clone(shared),
            stop,
            thread: Some(thread),
            thread_id,
        })
    }

    /// The kernel's id of the thread.
    #[must_use]
    pub fn thread_id(&self) -> Pid {
        self.thread_id
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Relaxed: the loads in `poll_until` and `sleep_and_serve` learn nothing else by it. It is written before the
        // eventfd of `wake_worker`, whose lock orders the two for a worker that sleeps; the join is what is waited for.
        self.stop.store(true, Ordering::Relaxed);
        self.shared.wake_worker();
        if let Some(thread) = self.thread.take() {
            // It panicked, and has said so.
            let _ = thread.join();
        }
    }
}

fn poll_until(shared: &NetShared, stop: &AtomicBool) {
    // With the store in `drop`.
    while !stop.load(Ordering::Relaxed) {
        let moved = match &mut *shared.port().lock_giving_way() {
            Some(port) => port.poll(),
            None => 0,
        };
        if moved == 0 {
            std::hint::spin_loop();
        }
    }
}

fn sleep_and_serve(shared: &NetShared, readable: Option<&OwnedFd>, stop: &AtomicBool) {
    // With the store in `drop`.
    while !stop.load(Ordering::Relaxed) {
        // Otherwise it is others' to go on, a backend's or the guest's: each tells us.
        let watches = shared
            .port()
            .lock_giving_way()
            .as_ref()
            .is_some_and(Port::takes_from_sink);
        let again = shared.again();
        let sink = readable.filter(|_| watches);
        let mut fds = [again, sink.unwrap_or(again)].map(|fd| PollFd::new(fd, PollFlags::IN));
        // Interrupted by a signal: looks at everything again.
        let _ = poll(&mut fds[..1 + usize::from(sink.is_some())], None);
        // Nothing to read: it was the other one.
        let _ = rustix::io::read(shared.again(), &mut [0; 8]);
        shared.serve_port();
    }
}
