//! The data path: the queue pairs of the network device, and the sink, in one hand.
//!
//! # Who has it
//! A [`Port`] lies in a [`PortSlot`]. Whoever moves frames locks the slot for as long as it takes: a vCPU thread in an
//! exit, the notifiers' thread, or the worker. A backend takes the port out of the slot, and the others find nothing
//! there. So two can never serve the same queue: the type does not let them.
//!
//! A driver's fault ends the port until the device is reset.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, LockResult, Mutex, MutexGuard, OnceLock, PoisonError};

use device::counters::{PairCounters, ReceiveCounters};
use device::deliver::Incoming;
use device::hash::Report;
use device::net_device::NetDevice;
use device::pair::{Bases, Fault, QueuePair, Sending};
use device::receive::Receive;
use notifier::notifiers::Left;
use rustix::event::{EventfdFlags, eventfd};
use steer::with_sources;
use virtqueue::Chains;

use crate::mmio::NeedsReset;

use crate::sink::{BATCH, FromGuest, Sink, SinkCounts, SinkError, ToGuest};

/// Batches that one call moves at most: others want to have their turn.
const MOST_BATCHES: usize = 64;

/// Why a port moves nothing any more.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The guest's fault: until it resets the device.
    #[error("the guest's driver broke a rule, and the device needs a reset")]
    Guest(#[from] Fault),
    /// The host's: for good.
    #[error("frames have nowhere to go")]
    Sink(#[from] SinkError),
    /// Ours, or a sink's: for good.
    #[error("a thread panicked while it moved frames, and has said why: this is a bug")]
    Panicked,
}

/// See the module's head.
pub struct Port {
    /// By their number; `None`: not set up, or of a device that is not started.
    pairs: Vec<Option<QueuePair>>,
    receive: Receive,
    chains: Chains,
    to_guest: ToGuest,
    /// The pair for whose buffers they wait.
    waits_for: Option<usize>,
    sink: Box<dyn Sink>,
    counters: PairCounters,
    receive_counters: ReceiveCounters,
    /// Frames for the guest that came before its driver, or for the one before.
    discarded: u64,
    /// Frames for a pair that is not set up, or is off. Of the guest's unwanted ones crate `device` has counters.
    no_pair: u64,
    needs_reset: Arc<NeedsReset>,
    /// Somebody polls: kicks stay off.
    polled: bool,
    error: Option<PortError>,
    /// Why the sink takes nothing any more, in words: it is told without the port in hand.
    failure: Arc<OnceLock<String>>,
}

impl Port {
    /// Without queue pairs yet. `polled`: somebody calls [`Port::poll`] again and again.
    #[must_use]
    pub fn new(sink: Box<dyn Sink>, device: &NetDevice, needs_reset: Arc<NeedsReset>, polled: bool) -> Self {
        Self {
            pairs: (0..device.pairs()).map(|_| None).collect(),
            receive: device.receive(None),
            chains: Chains::default(),
            to_guest: ToGuest::default(),
            waits_for: None,
            sink,
            counters: PairCounters::default(),
            receive_counters: ReceiveCounters::default(),
            discarded: 0,
            no_pair: 0,
            needs_reset,
            polled,
            error: None,
            failure: Arc::default(),
        }
    }

    /// A pair works from now on.
    pub fn set_pair(&mut self, pair: usize, mut queues: QueuePair) {
        if self.polled {
            queues.from_guest.queue.disable_kicks();
            queues.to_guest.queue.disable_kicks();
        }
        if let Some(place) = self.pairs.get_mut(pair) {
            *place = Some(queues);
        }
    }

    /// A pair works no more; where its queues stand.
    pub fn take_pair(&mut self, pair: usize) -> Option<Bases> {
        let queues = self.pairs.get_mut(pair)?.take()?;
        if self.waits_for == Some(pair) {
            // Its kick would not come, and others' frames would wait with its own.
            self.waits_for = None;
        }
        Some(queues.bases())
    }

    /// The device was reset: a fault of its driver's is forgotten, but not the host's. Frames that wait for the guest
    /// are not for the next driver.
    pub fn reset(&mut self) {
        self.pairs.fill_with(|| None);
        self.discard();
        if matches!(self.error, Some(PortError::Guest(_))) {
            self.error = None;
        }
    }

    /// A driver begins: frames that came before are not for it.
    pub fn discard(&mut self) {
        let waiting = self.to_guest.frames().count();
        self.to_guest.pass(waiting);
        self.waits_for = None;
        self.discarded += (waiting + self.sink.discard()) as u64;
    }

    /// Works by what the driver said by the control queue.
    pub fn follow(&mut self, device: &NetDevice) {
        self.receive = device.receive(None);
        let offloads = device.negotiated().offloads;
        for (index, pair) in (0..).zip(&mut self.pairs) {
            let Some(pair) = pair else { continue };
            let is_on = |vring: u32| device.vring(vring).is_ok_and(|vring| vring.enabled);
            pair.to_guest.enabled = is_on(2 * index);
            pair.from_guest.enabled = is_on(2 * index + 1);
            pair.offloads = offloads;
        }
    }

    /// Serves after a kick, until there is nothing left and kicks are on, or until its share is used up or somebody polls:
    /// then kicks are off, and it is to be called again.
    pub fn serve(&mut self) -> Left {
        if self.polled {
            self.poll();
            return Left::Something;
        }
        self.switch_kicks_off();
        for _ in 0..MOST_BATCHES {
            if self.poll() > 0 {
                continue;
            }
            if !self.switch_kicks_on() {
                let is_done = self.is_over() || !self.sink.is_pending();
                return if is_done { Left::Nothing } else { Left::Something };
            }
            self.switch_kicks_off();
        }
        if self.is_over() {
            Left::Nothing
        } else {
            Left::Something
        }
    }

    /// Moves a batch each way; how many frames moved.
    pub fn poll(&mut self) -> usize {
        if self.is_over() {
            return 0;
        }
        match self.try_poll() {
            Ok(moved) => moved,
            Err(error) => {
                self.end(error);
                0
            }
        }
    }

    fn end(&mut self, error: PortError) {
        if !matches!(error, PortError::Guest(_)) {
            // It is over with the first one.
            let _ = self.failure.set(with_sources(&error));
        }
        self.error = Some(error);
        self.needs_reset.set();
    }

    fn try_poll(&mut self) -> Result<usize, PortError> {
        let mut moved = 0;
        if self.sink.is_pending() {
            self.sink.flush()?;
        }
        for at in 0..self.pairs.len() {
            moved += self.from_guest(at)?;
        }
        if self.has_pairs() {
            self.to_guest.clear_if_empty();
            self.sink.take(&mut self.to_guest)?;
            moved += self.deliver()?;
        }
        Ok(moved)
    }

    /// A batch of one pair's frames goes to the sink.
    fn from_guest(&mut self, at: usize) -> Result<usize, PortError> {
        let room = self.sink.room().min(BATCH);
        let Some(pair) = &mut self.pairs[at] else {
            return Ok(0);
        };
        if !pair.from_guest.enabled {
            return Ok(0);
        }
        if room == 0 {
            self.sink.flush()?;
            return Ok(0);
        }
        let count = pair
            .from_guest
            .queue
            .pop(&mut self.chains, room)
            .map_err(Fault::from)?;
        if count == 0 {
            return Ok(0);
        }
        let memory = Arc::clone(&pair.memory);
        let mut sending = Sending::default();
        let mut result = Ok(());
        for chain in &self.chains {
            let buffers = self.chains.buffers(chain);
            match pair.check_into(chain, buffers, None, &self.counters, &mut sending) {
                Ok(true) => self
                    .sink
                    .put(&FromGuest::new(&memory, buffers, sending.start, sending.len)),
                Ok(false) => (),
                Err(fault) => {
                    result = Err(fault.into());
                    break;
                }
            }
            // Copied, or dropped and counted: the guest may have its buffer again.
            pair.from_guest.queue.push_used(chain.id, 0);
        }
        self.sink.flush()?;
        pair.from_guest.publish(&self.counters);
        result.map(|()| count)
    }

    /// Frames that wait go to the pairs that they are for; those of one pair that follow each other, at a time.
    fn deliver(&mut self) -> Result<usize, PortError> {
        let mut done = 0;
        self.waits_for = None;
        // Of the frame at which the last run ended: each is placed once.
        let mut ahead = None;
        while !self.to_guest.is_empty() {
            let mut incoming = [Incoming::plain(&[], Report::NONE); BATCH];
            let (mut count, mut unwanted, mut to) = (0, 0, None);
            for frame in self.to_guest.frames() {
                let place = ahead
                    .take()
                    .unwrap_or_else(|| place(frame, &self.receive, &self.pairs, &self.receive_counters));
                match place {
                    Ok((pair, report)) if to.is_none_or(|to| to == pair) => {
                        to = Some(pair);
                        incoming[count] = Incoming::plain(frame, report);
                        count += 1;
                    }
                    Err(why) if count == 0 => {
                        unwanted += 1;
                        self.no_pair += u64::from(why == Unwanted::NoPair);
                    }
                    other => {
                        ahead = Some(other);
                        break;
                    }
                }
            }
            let given = match to.and_then(|to| self.pairs[to].as_mut()) {
                Some(pair) => pair.deliver(&incoming[..count], &mut self.chains, &self.counters)?,
                None => 0,
            };
            self.to_guest.pass(unwanted + given);
            done += unwanted + given;
            if given < count {
                // When it is placed again the driver may have said otherwise.
                self.waits_for = to;
                break;
            }
        }
        Ok(done)
    }

    fn switch_kicks_off(&mut self) {
        for pair in self.pairs.iter_mut().flatten() {
            pair.from_guest.queue.disable_kicks();
            pair.to_guest.queue.disable_kicks();
        }
    }

    /// Of queues that something waits for; whether there is something already.
    fn switch_kicks_on(&mut self) -> bool {
        let waits_for = self.waits_for;
        let mut more = false;
        for (at, pair) in self.pairs.iter_mut().enumerate() {
            let Some(pair) = pair else { continue };
            // Of one that is off nothing is taken: who switches it on has it looked at.
            if pair.from_guest.enabled {
                more |= pair.from_guest.queue.enable_kicks();
            }
            if waits_for == Some(at) {
                more |= pair.to_guest.queue.enable_kicks();
            }
        }
        more && !self.is_over()
    }

    fn is_over(&self) -> bool {
        self.error.is_some()
    }

    /// Why it moves nothing any more.
    #[must_use]
    pub fn error(&self) -> Option<&PortError> {
        self.error.as_ref()
    }

    /// Whether frames of the sink's can go on to the guest. Not while it has no driver, while its driver has broken a
    /// rule, or while frames wait for its buffers: then its kick is what goes on with them.
    #[must_use]
    pub fn takes_from_sink(&self) -> bool {
        self.has_pairs() && self.waits_for.is_none() && !self.is_over()
    }

    fn has_pairs(&self) -> bool {
        self.pairs.iter().any(Option::is_some)
    }

    /// What the sink has counted.
    #[must_use]
    pub fn counts(&self) -> SinkCounts {
        self.sink.counts()
    }

    /// Frames for the guest that came before its driver, or for the one before: they were dropped.
    #[must_use]
    pub fn discarded(&self) -> u64 {
        self.discarded
    }

    /// Frames that were dropped because the pair that they are for is not set up, or off.
    #[must_use]
    pub fn no_pair(&self) -> u64 {
        self.no_pair
    }

    /// Interrupts that were made for queue pairs: call eventfds written.
    #[must_use]
    pub fn interrupts(&self) -> u64 {
        self.counters.calls.get()
    }

    /// Its sink.
    #[must_use]
    pub fn sink(&self) -> &dyn Sink {
        &*self.sink
    }
}

/// Why a frame for the guest is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unwanted {
    /// By what the driver said of addresses and VLANs; that has been counted.
    Filtered,
    /// A pair that is not there, or off, takes no frame (VirtIO 1.3, 5.1.6.5.7.2).
    NoPair,
}

/// The pair that a frame goes to, and what is told of its hash.
fn place(
    frame: &[u8],
    receive: &Receive,
    pairs: &[Option<QueuePair>],
    counters: &ReceiveCounters,
) -> Result<(usize, Report), Unwanted> {
    let place = receive.place(frame, None, counters).ok_or(Unwanted::Filtered)?;
    // Automatic steering is ours to choose: the first pair.
    let pair = usize::from(place.pair.unwrap_or(0));
    let known = pairs.get(pair).and_then(Option::as_ref);
    match known.is_some_and(|pair| pair.to_guest.enabled) {
        true => Ok((pair, place.report)),
        false => Err(Unwanted::NoPair),
    }
}

/// Where the port lies when no backend has it.
///
/// # Who waits for a backend
/// Who needs the port and finds it with a backend is counted, wakes that, and sleeps. The backend puts the port back,
/// and takes it again when nobody is counted any more. Both the count and the port change under the one lock.
pub struct PortSlot {
    port: Mutex<Option<Port>>,
    /// The port was put back.
    is_back: Condvar,
    /// Nobody waits for it any more.
    is_free: Condvar,
    /// Threads that wait for the lock: who takes it again and again gives way to them.
    waiting: AtomicU32,
    /// Threads that want a backend to give the port back.
    wanting: AtomicU32,
    /// Wakes the backend for them.
    wanted: OwnedFd,
    failure: Arc<OnceLock<String>>,
}

impl PortSlot {
    /// With that port.
    ///
    /// # Errors
    /// No descriptor is left for an eventfd.
    pub fn new(port: Port) -> std::io::Result<Self> {
        Ok(Self {
            failure: Arc::clone(&port.failure),
            port: Mutex::new(Some(port)),
            is_back: Condvar::new(),
            is_free: Condvar::new(),
            waiting: AtomicU32::new(0),
            wanting: AtomicU32::new(0),
            wanted: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// The port, if no backend has it; others wait meanwhile.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn lock(&self) -> MutexGuard<'_, Option<Port>> {
        self.wait_for_lock().expect("nobody panicked with the port")
    }

    fn wait_for_lock(&self) -> LockResult<MutexGuard<'_, Option<Port>>> {
        // Relaxed, here and in `lock_giving_way`: it orders nothing, the mutex does. Read late, it costs one turn.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let locked = self.port.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        locked
    }

    /// The same for who takes it again and again, as a guest kicks or frames come: others would hardly get their turn.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn lock_giving_way(&self) -> MutexGuard<'_, Option<Port>> {
        // A hint: who is not seen here waits once more.
        while self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        self.port.lock().expect("nobody panicked with the port")
    }

    /// A backend takes it; `None`: another has it.
    pub fn take(&self) -> Option<Port> {
        self.lock().take()
    }

    /// A backend gives it back; in no known state, if the backend panics: it moves nothing any more then.
    pub fn put_back(&self, mut port: Port) {
        if std::thread::panicking() {
            port.end(PortError::Panicked);
        }
        // Who panics must not do so once more. If another one has, who comes for the port learns of it.
        let mut guard = self.wait_for_lock().unwrap_or_else(PoisonError::into_inner);
        *guard = Some(port);
        drop(guard);
        self.is_back.notify_all();
    }

    /// Whether a backend is to [lend](Self::lend) the port.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        // Relaxed. With the addition in `with`: who adds then writes the eventfd, and a backend that sleeps reads that
        // before it comes here; the lock of the eventfd orders the two. Without that it would sleep on, and the other
        // with it. One that works comes here again after its share.
        self.wanting.load(Ordering::Relaxed) > 0
    }

    /// Readable when somebody wants the port of a backend: it then asks [`is_wanted`](Self::is_wanted).
    #[must_use]
    pub fn wanted(&self) -> &OwnedFd {
        &self.wanted
    }

    /// A backend gives the port back for as long as somebody wants it, and has it again when this returns.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn lend(&self, port: Port) -> Port {
        let mut guard = self.lock();
        *guard = Some(port);
        self.is_back.notify_all();
        loop {
            // Under the lock under which it changes. Nobody comes to it while the port is there, so it comes to zero.
            if self.wanting.load(Ordering::Relaxed) == 0
                && let Some(port) = guard.take()
            {
                return port;
            }
            guard = self.is_free.wait(guard).expect("nobody panicked with the port");
        }
    }

    /// Why frames have nowhere to go, for good, whoever has the port; `None`: they have.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Waits until the port is there, and does that with it.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn with<T>(&self, work: impl FnOnce(&mut Port) -> T) -> T {
        let mut guard = self.lock();
        if guard.is_none() {
            self.wanting.fetch_add(1, Ordering::Relaxed);
            // A full counter wakes it, too.
            let _ = rustix::io::write(&self.wanted, &1_u64.to_ne_bytes());
            let back = self.is_back.wait_while(guard, |port| port.is_none());
            guard = back.expect("nobody panicked with the port");
            if self.wanting.fetch_sub(1, Ordering::Relaxed) == 1 {
                self.is_free.notify_all();
            }
        }
        work(guard.as_mut().expect("it was waited for"))
    }
}
