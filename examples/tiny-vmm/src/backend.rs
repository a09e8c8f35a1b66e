//! A backend: a thread that has the network device's queues for itself, kicks included, as a backend of vhost or
//! vhost-user would. The VMM's own threads find nothing to serve meanwhile.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use notifier::notifiers::{NotifierError, QueueEvent};
use notifier::state::Refusal;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::board::DeviceNotifiers;
use crate::net::NetShared;
use crate::port::{Left, Port};

/// Queues that it takes: those of the first pair.
const QUEUES: [u16; 2] = [0, 1];
/// How long it sleeps at most, milliseconds: then it looks whether somebody wants the port.
const SLEEP_MS: i32 = 20;

/// Why a backend cannot start or stop.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The notifiers say no.
    #[error(transparent)]
    Notifiers(#[from] NotifierError),
    /// Another backend has the port.
    #[error("another backend has the network device's queues: stop it first")]
    Taken,
    /// A thread or an epoll.
    #[error("cannot make a backend's thread")]
    Thread(#[from] std::io::Error),
}

/// A backend that has the first pair's queues until it is stopped.
pub struct Backend {
    notifiers: Arc<DeviceNotifiers>,
    net: Arc<NetShared>,
    stop: Arc<AtomicBool>,
    wake: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Takes the queues over, while the guest runs.
    ///
    /// # Errors
    /// [`BackendError`]; then nothing has changed.
    pub fn start(net: &Arc<NetShared>, notifiers: &Arc<DeviceNotifiers>) -> Result<Self, BackendError> {
        let wake = EventFd::new(libc::EFD_NONBLOCK)?;
        // Of this start: the next one has others.
        let [to_guest, from_guest] = QUEUES.map(|queue| notifiers.eventfd(queue));
        let events = [to_guest?, from_guest?, wake.try_clone()?];
        let epoll = watch(&events)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (give, given) = mpsc::channel();
        let builder = std::thread::Builder::new().name("backend".into());
        let thread = builder.spawn({
            let (net, stop) = (Arc::clone(net), Arc::clone(&stop));
            move || {
                // Nothing is given: it was not to be.
                if let Ok(port) = given.recv() {
                    serve(&net, port, &epoll, &events, &stop);
                }
            }
        })?;
        start_queues(notifiers)?;
        // A backend is the only one that takes it, and there is none: the notifiers say so.
        let Some(port) = net.port().take() else {
            stop_queues(notifiers, &QUEUES)?;
            return Err(BackendError::Taken);
        };
        // The thread waits for it.
        let _ = give.send(port);
        Ok(Self {
            notifiers: Arc::clone(notifiers),
            net: Arc::clone(net),
            stop,
            wake,
            thread: Some(thread),
        })
    }

    /// Gives the queues back.
    ///
    /// # Errors
    /// [`BackendError::Notifiers`].
    pub fn stop(mut self) -> Result<(), BackendError> {
        self.join();
        stop_queues(&self.notifiers, &QUEUES)
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A full counter wakes it, too.
        let _ = self.wake.write(1);
        if let Some(thread) = self.thread.take() {
            // It panicked, and has said so.
            let _ = thread.join();
        }
        // What the sink has is the worker's to look at again.
        self.net.wake_worker();
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.join();
            // Reset meanwhile, or nothing to be done about it.
            let _ = stop_queues(&self.notifiers, &QUEUES);
        }
    }
}

/// All of them, or none.
fn start_queues(notifiers: &DeviceNotifiers) -> Result<(), BackendError> {
    for (at, &queue) in QUEUES.iter().enumerate() {
        if let Err(error) = notifiers.queue_event(queue, QueueEvent::BackendStart) {
            stop_queues(notifiers, &QUEUES[..at])?;
            return Err(error.into());
        }
    }
    Ok(())
}

fn stop_queues(notifiers: &DeviceNotifiers, queues: &[u16]) -> Result<(), BackendError> {
    for &queue in queues {
        match notifiers.queue_event(queue, QueueEvent::BackendStop) {
            // The guest has reset the device meanwhile, and the queues were taken away.
            Ok(_)
            | Err(NotifierError::Refused {
                refusal: Refusal::NoBackend,
                ..
            }) => (),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn watch(events: &[EventFd; 3]) -> std::io::Result<Epoll> {
    let epoll = Epoll::new()?;
    for event in events {
        let readable = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, event.as_raw_fd(), readable)?;
    }
    Ok(epoll)
}

/// The sink tells of each frame once: those that wait for buffers of the guest's do not keep us awake.
fn watch_sink(epoll: &Epoll, port: &Port) {
    if let Some(sink) = port.sink().readable() {
        let readable = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        // Without it frames for the guest come with its kicks alone.
        let _ = epoll.ctl(ControlOperation::Add, sink.as_raw_fd(), readable);
    }
}

fn serve(net: &NetShared, mut port: Port, epoll: &Epoll, events: &[EventFd; 3], stop: &AtomicBool) {
    watch_sink(epoll, &port);
    // What was kicked for before the queues were ours: the notifiers have written to the eventfds for that.
    let mut left = Left::Nothing;
    while !stop.load(Ordering::Acquire) {
        if net.port().is_wanted() {
            // Others had it, and may have left something.
            port = lend(net, port);
        } else if left == Left::Nothing && !sleep(epoll, events) {
            // Nobody called: there is nothing to look for.
            continue;
        }
        left = port.serve();
    }
    net.port().put_back(port);
}

/// Until somebody calls, or for a while: whether somebody did.
fn sleep(epoll: &Epoll, events: &[EventFd; 3]) -> bool {
    let mut ready = [EpollEvent::default(); 4];
    // Interrupted: nobody did.
    let count = epoll.wait(SLEEP_MS, &mut ready).unwrap_or(0);
    for event in events {
        // Nothing to read: it was another one.
        let _ = event.read();
    }
    count > 0
}

/// Somebody of the VMM's has to change something: reset, or what the driver said by the control queue.
fn lend(net: &NetShared, port: Port) -> Port {
    net.port().put_back(port);
    loop {
        // Who waits for it comes first.
        std::thread::yield_now();
        if let Some(port) = net.port().take() {
            return port;
        }
    }
}
