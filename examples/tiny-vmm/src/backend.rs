//! A backend: a thread that has the network device's queues for itself, kicks included, as a backend of vhost or
//! vhost-user would. The VMM's own threads find nothing to serve meanwhile.
//!
//! A guest that resets the device, or one of those queues, ends it: [`BackendSlot`](crate::backend_slot::BackendSlot).

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use notifier::notifiers::{Left, NotifierError, QueueEvent};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::backend_slot::{QUEUES, Running};
use crate::board::DeviceNotifiers;
use crate::net::NetShared;
use crate::port::Port;

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
    /// It panicked, and has said why. The queues are given back, but no frames move any more.
    #[error("the backend's thread panicked: this is a bug")]
    Panicked,
}

/// A backend that has the first pair's queues until it is stopped, or the guest takes them away.
pub struct Backend {
    notifiers: Arc<DeviceNotifiers>,
    net: Arc<NetShared>,
    number: u64,
}

impl Backend {
    /// Takes the queues over, while the guest runs.
    ///
    /// # Errors
    /// [`BackendError`]; then nothing has changed.
    pub fn start(net: &Arc<NetShared>, notifiers: &Arc<DeviceNotifiers>) -> Result<Self, BackendError> {
        let mut place = net.backend().lock();
        if place.running.is_some() {
            return Err(BackendError::Taken);
        }
        let wake = EventFd::new(libc::EFD_NONBLOCK)?;
        // Of this start: the next one has others.
        let [to_guest, from_guest] = QUEUES.map(|queue| notifiers.eventfd(queue));
        let events = [to_guest?, from_guest?, wake.try_clone()?];
        let epoll = watch(&events, net)?;
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
        // The queues first: who looks at one waits for the port with the queue locked, and would have us wait for that.
        // A guest that resets now waits for `place`, then finds the backend there, and stops it.
        let Some(port) = net.port().take() else {
            stop_queues(notifiers, &QUEUES)?;
            return Err(BackendError::Taken);
        };
        // The thread waits for it.
        let _ = give.send(port);
        place.started += 1;
        let number = place.started;
        place.running = Some(Running {
            number,
            stop,
            wake,
            thread,
        });
        drop(place);
        Ok(Self {
            notifiers: Arc::clone(notifiers),
            net: Arc::clone(net),
            number,
        })
    }

    /// Gives the queues back. Nothing is to be done if the guest has taken them away.
    ///
    /// # Errors
    /// [`BackendError::Panicked`], [`BackendError::Notifiers`].
    pub fn stop(self) -> Result<(), BackendError> {
        self.give_back()
    }

    fn give_back(&self) -> Result<(), BackendError> {
        let mut place = self.net.backend().lock();
        // Another one that was started since keeps what it has.
        match place.running.take_if(|running| running.number == self.number) {
            Some(running) => {
                let ended = running.end();
                // What the sink has is the worker's to look at again.
                self.net.wake_worker();
                stop_queues(&self.notifiers, &QUEUES)?;
                ended.map_err(|_| BackendError::Panicked)
            }
            None => Ok(()),
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // Nothing can be done about it.
        let _ = self.give_back();
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
        notifiers.queue_event(queue, QueueEvent::BackendStop)?;
    }
    Ok(())
}

/// Kicks, its end, and who wants the port.
fn watch(events: &[EventFd; 3], net: &NetShared) -> std::io::Result<Epoll> {
    let epoll = Epoll::new()?;
    let events = events.iter().map(EventFd::as_raw_fd);
    for event in events.chain([net.port().wanted().as_raw_fd()]) {
        let readable = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, event, readable)?;
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

/// The port in a backend's hands. It goes back also if the backend panics: others wait for it.
struct Held<'a> {
    net: &'a NetShared,
    /// `None` while it is lent.
    port: Option<Port>,
}

impl Held<'_> {
    fn serve(&mut self) -> Left {
        self.port.as_mut().map_or(Left::Nothing, Port::serve)
    }

    fn lend(&mut self) {
        self.port = self.port.take().map(|port| self.net.port().lend(port));
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(port) = self.port.take() {
            self.net.port().put_back(port);
        }
    }
}

fn serve(net: &NetShared, port: Port, epoll: &Epoll, events: &[EventFd; 3], stop: &AtomicBool) {
    let mut held = Held {
        net,
        port: Some(port),
    };
    held.port.iter().for_each(|port| watch_sink(epoll, port));
    // What was kicked for before the queues were ours: the notifiers have written to the eventfds for that.
    let mut left = Left::Nothing;
    // Acquire: with the release in `Running::end`. What goes before that is done when the port is put back.
    while !stop.load(Ordering::Acquire) {
        if net.port().is_wanted() {
            // Reset, or what the driver said by the control queue. Others had it, and may have left something.
            held.lend();
        } else if left == Left::Nothing && !sleep(net, epoll, events) {
            // Nobody called: there is nothing to look for.
            continue;
        }
        left = held.serve();
    }
}

/// Until somebody calls: whether somebody did.
fn sleep(net: &NetShared, epoll: &Epoll, events: &[EventFd; 3]) -> bool {
    let mut ready = [EpollEvent::default(); 5];
    // Interrupted: nobody did.
    let count = epoll.wait(-1, &mut ready).unwrap_or(0);
    // Nothing to read: it was another one.
    for event in events {
        let _ = event.read();
    }
    let _ = rustix::io::read(net.port().wanted(), &mut [0; 8]);
    count > 0
}
