//! The thread that moves frames from the network to the guest. With `--notify poll` it moves all frames.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Result;
use notifier::notifiers::Left;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::net::Net;
use crate::thread::Thread;

/// Starts it. `polls`: it never sleeps.
///
/// # Errors
/// There is no such CPU, or no thread or descriptor is left.
pub fn start(net: &Arc<Net>, polls: bool, cpu: Option<usize>) -> Result<Thread<()>> {
    let (net, epoll) = (Arc::clone(net), Epoll::new()?);
    if let Some(sink) = net.lock().port.sink.readable() {
        // The sink wakes it once for new frames: those that wait for buffers of the guest do not keep it awake.
        let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
        epoll.ctl(
            ControlOperation::Add,
            sink.as_raw_fd(),
            EpollEvent::new(events, 0),
        )?;
    }
    Thread::start("worker", cpu, move |stop| {
        let mut left = Left::Nothing;
        while !stop.load(Ordering::Relaxed) {
            if polls {
                net.lock_after_others().poll();
            } else {
                if left == Left::Nothing {
                    // After a signal, too, it serves the queues once more.
                    let _ = epoll.wait(-1, &mut [EpollEvent::default()]);
                }
                left = net.lock_after_others().serve();
            }
        }
    })
}
