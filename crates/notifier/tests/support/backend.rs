//! A backend: a thread that has a queue's eventfd, as a vhost-user process has.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{Counters, Device};

/// Looks at the device when its eventfd says so, until it is stopped.
pub(crate) struct Backend {
    stop: EventFd,
    thread: JoinHandle<()>,
}

impl Backend {
    pub(crate) fn start<C: Counters + 'static>(device: &Arc<Device<C>>, kick: EventFd) -> Self {
        let stop = EventFd::new(EFD_NONBLOCK).unwrap();
        let epoll = Epoll::new().unwrap();
        for (event, data) in [(&kick, 0), (&stop, 1)] {
            let interest = EpollEvent::new(EventSet::IN, data);
            epoll
                .ctl(ControlOperation::Add, event.as_raw_fd(), interest)
                .unwrap();
        }
        let device = Arc::clone(device);
        let thread = thread::spawn(move || {
            let mut events = [EpollEvent::default(); 2];
            loop {
                let ready = epoll.wait(-1, &mut events).unwrap();
                if events[..ready].iter().any(|event| event.data() == 1) {
                    return;
                }
                if kick.read().is_ok() {
                    device.look();
                }
            }
        });
        Self { stop, thread }
    }

    /// Once this returns it does not touch the queue any more.
    pub(crate) fn stop(self) {
        self.stop.write(1).unwrap();
        self.thread.join().unwrap();
    }
}
