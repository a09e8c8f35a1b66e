//! A receiver: the connections of one thread, whose bytes it returns as events.
//!
//! # Theory of operation
//!
//! [`Receiver::wait`] returns the buffers of dropped pieces to the kernel, starts queued sends, sleeps until a request
//! completes, and reads the completions into `done`. [`Receiver::next_event`] turns them into events, one at a time.
//!
//! A multishot receive ends when the completion queue is full (ENOSPC), when there is no buffer (ENOBUFS, with zcrx
//! ENOMEM), or for a reason of the kernel's own. The receiver arms it again: at once, since the completions are read by
//! then, or, for lack of buffers, when some have come back (`starved`). If a receive ends for lack of buffers again and
//! again while readers hold none, the area is too small: that ends the connection.
//!
//! A connection's slot is freed when the caller has closed it and none of its requests is under way; so a completion is
//! never taken for one of a later connection. A cancellation may not find its request, while the kernel is between two
//! steps of it: it is repeated as long as the request is under way.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{Config, Fallback, Memory, Mode, Request};
use crate::connection::{Connection, ConnectionId, Listener, ListenerId, Receiving, Slots};
use crate::error::OpenError;
use crate::event::Event;
use crate::instance::{self, Imported, Instance, Prepared, Share};
use crate::lease::Leased;
use crate::outbox::Payload;
use crate::piece::Bell;
use crate::ring::{Completion, Ring};
use crate::supply::{NoBuffer, Supply};

/// Accept requests of a listener that are under way, and so the most connections accepted in one
/// [`wait`](Receiver::wait): a flood of connections neither takes all descriptors of the process nor delays those that
/// exist.
const ACCEPTS: u32 = 8;
/// How often in a row a receive may end for lack of buffers while readers hold none. That takes at least this many
/// times [`RETRY`].
pub(crate) const MOST_BARREN: u32 = 1000;
/// Pause before such a receive is armed again.
const RETRY: Duration = Duration::from_millis(1);

/// What a receiver has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Pieces received.
    pub pieces: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Receives that ended because no buffer was left.
    pub ran_out: u64,
    /// Receives that ended for another reason and were armed again; mostly because the completion queue was full.
    pub rearmed: u64,
    /// System calls that made the kernel take buffers from the refill ring.
    pub flushes: u64,
    /// Pieces whose buffers were returned to the kernel.
    pub returned: u64,
    /// Number of copies by the kernel into the area of zcrx, and their bytes, for all receivers of the queue together;
    /// copies from the heads of packets are not counted. `None` before Linux 7.2, and with ordinary receives, which
    /// copy all.
    pub kernel_copies: Option<(u64, u64)>,
}

/// Receives from many connections, in one thread: the thread that opens it must be the one that uses it, which
/// the kernel enforces.
pub struct Receiver {
    pub(crate) connections: Slots<Connection>,
    pub(crate) listeners: Slots<Listener>,
    pub(crate) supply: Supply,
    pub(crate) done: VecDeque<Completion>,
    pub(crate) events: VecDeque<Event>,
    /// Slots of connections that wait for buffers.
    pub(crate) starved: VecDeque<u32>,
    /// When those are armed again although no buffer was returned.
    retry: Option<Instant>,
    /// Slots of connections that have something to send.
    pub(crate) to_send: Vec<u32>,
    pub(crate) statistics: Statistics,
    pub(crate) bell: Arc<Bell>,
    pub(crate) ring: Ring,
    config: Config,
    fallbacks: Vec<Fallback>,
    of_one_thread: PhantomData<*const ()>,
}

impl Receiver {
    /// Opens a receiver: with zcrx, or, unless that is forced, with ordinary receives. Unless these were requested,
    /// [`fallbacks`](Self::fallbacks) then has the reason.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(config: &Config) -> Result<Self, OpenError> {
        let ring = Ring::new(config, false)?;
        let mut fallbacks = Vec::new();
        let tried = "zcrx";
        if let Some(reason) = not_asked(config) {
            let fallback = Fallback {
                tried,
                errno: 0,
                reason,
            };
            match config.request {
                Request::ForceZcrx => return Err(OpenError::Zcrx(fallback)),
                Request::Auto => fallbacks.push(fallback),
                Request::ForceCopy => {}
            }
        } else {
            match instance::register(ring.as_fd(), config) {
                Ok((shared, id)) => {
                    return Self::new(ring, Supply::zcrx(shared, id), config, fallbacks);
                }
                Err(OpenError::Zcrx(fallback)) if config.request == Request::Auto => fallbacks.push(fallback),
                Err(error) => return Err(error),
            }
        }
        let supply = Supply::copy(ring.as_fd(), config)?;
        Self::new(ring, supply, config, fallbacks)
    }

    /// Opens a receiver on the queue of another thread's receiver. With zcrx they share the buffers; a connection
    /// belongs to the receiver that it is added to.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn join(share: &Share) -> Result<Self, OpenError> {
        let ring = Ring::new(&share.config, false)?;
        let supply = match share.import(ring.as_fd())? {
            Some((shared, id)) => Supply::zcrx(shared, id),
            None => Supply::copy(ring.as_fd(), &share.config)?,
        };
        Self::new(ring, supply, &share.config, share.fallbacks.clone())
    }

    /// Opens a receiver on an instance that another process registered. Needs CAP_NET_ADMIN; without it, see
    /// [`start`](Self::start). Only one process at a time may receive from an instance; its other threads
    /// [`join`](Self::join) this receiver.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn import(instance: &Instance, config: &Config) -> Result<Self, OpenError> {
        let ring = Ring::new(config, false)?;
        let imported = instance.import_into(ring.as_fd())?;
        let supply = Supply::zcrx(instance.take_up(imported)?, imported.id);
        Self::new(ring, supply, config, Vec::new())
    }

    /// Opens a receiver on an instance that a privileged process has imported into this process's ring (`prepared`).
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::ImportedElsewhere`] if that was another ring or another instance.
    pub fn start(
        prepared: Prepared,
        instance: &Instance,
        imported: Imported,
        config: &Config,
    ) -> Result<Self, OpenError> {
        instance.check(imported, prepared.as_fd())?;
        let supply = Supply::zcrx(instance.take_up(imported)?, imported.id);
        Self::enabled(prepared, supply, config)
    }

    /// Opens a receiver on a leased queue, which the ring knows by `number` (`zcrx_id`). Call it in the thread that
    /// will receive; each thread has a ring of its own, and all rings belong to the same lease.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn start_leased(
        prepared: Prepared,
        leased: &Leased,
        number: u32,
        config: &Config,
    ) -> Result<Self, OpenError> {
        Self::enabled(prepared, Supply::zcrx(leased.0.clone(), number), config)
    }

    fn enabled(prepared: Prepared, supply: Supply, config: &Config) -> Result<Self, OpenError> {
        let what = "enabling the io_uring";
        let ring = prepared.ring;
        ring.enable()
            .map_err(|source| OpenError::Setup { what, source })?;
        Self::new(ring, supply, config, Vec::new())
    }

    fn new(ring: Ring, supply: Supply, config: &Config, fallbacks: Vec<Fallback>) -> Result<Self, OpenError> {
        let what = "making the eventfd that wakes the receiver";
        let failed = |source| OpenError::Setup { what, source };
        let bell = Arc::new(Bell::new().map_err(failed)?);
        supply.pool().add_bell(&bell);
        let mut ring = ring;
        ring.watch(bell.as_fd()).map_err(failed)?;
        Ok(Self {
            connections: Slots::default(),
            listeners: Slots::default(),
            supply,
            done: VecDeque::with_capacity(config.completions as usize),
            events: VecDeque::new(),
            starved: VecDeque::new(),
            retry: None,
            to_send: Vec::new(),
            statistics: Statistics::default(),
            bell,
            ring,
            config: config.clone(),
            fallbacks,
            of_one_thread: PhantomData,
        })
    }

    /// The mode in use.
    pub fn mode(&self) -> Mode {
        self.supply.mode()
    }

    /// Better modes that are not used, and why.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// What was done so far.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            kernel_copies: self.supply.instance().and_then(|(it, _)| it.refill().copies()),
            ..self.statistics
        }
    }

    /// How many buffers there are.
    pub fn buffers(&self) -> u32 {
        self.supply.pool().area.buffers()
    }

    /// Number of connections, including those that are being closed.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// A handle by which other threads receive from the same queue ([`join`](Self::join)).
    ///
    /// # Errors
    /// [`OpenError::Export`] before Linux 7.0.
    pub fn share(&self) -> Result<Share, OpenError> {
        let instance = match self.supply.instance() {
            Some((shared, id)) => Some((shared.clone(), instance::export(self.ring.as_fd(), id)?)),
            None => None,
        };
        let mut config = self.config.clone();
        if let (None, Memory::Given(memory)) = (&instance, &config.memory) {
            // Only this receiver may use the given memory.
            let bytes = memory.len().saturating_sub(memory.private_from());
            config.memory = Memory::Own { bytes };
        }
        Ok(Share {
            config,
            instance,
            fallbacks: self.fallbacks.clone(),
        })
    }

    /// A handle that makes [`wait`](Self::wait) return, from any thread.
    pub fn waker(&self) -> Waker {
        Waker(self.bell.clone())
    }

    /// Accepts connections, eight at most in a [`wait`](Self::wait); each is an event, and becomes one of this receiver
    /// when it is [added](Self::add).
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn listen(&mut self, listener: impl Into<OwnedFd>) -> io::Result<ListenerId> {
        let id = ListenerId(self.listeners.add(Listener::new(listener.into())));
        self.listen_again(id)?;
        Ok(id)
    }

    /// Accepts again after [`Event::AcceptFailed`].
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn listen_again(&mut self, listener: ListenerId) -> io::Result<()> {
        if let Some(it) = self.listeners.get_mut(listener.0).filter(|it| !it.stopping) {
            it.failed = false;
            while it.accepts < ACCEPTS {
                self.ring.accept(it.socket.as_fd(), listener.0.slot)?;
                it.accepts += 1;
            }
        }
        Ok(())
    }

    /// Stops accepting. [`Event::Stopped`] reports when that is done, and returns the socket. Connections that are
    /// accepted until then are still events, and existing connections continue.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn stop_listening(&mut self, listener: ListenerId) -> io::Result<()> {
        if let Some(it) = self.listeners.get_mut(listener.0).filter(|it| !it.stopping) {
            it.stopping = true;
            self.cancel_accepts(listener.0.slot)?;
        }
        Ok(())
    }

    /// Continues to stop a listener: cancels its accept requests, or returns the socket when none is under way.
    pub(crate) fn cancel_accepts(&mut self, slot: u32) -> io::Result<()> {
        let Some((place, it)) = self.listeners.at(slot).filter(|(_, it)| it.stopping) else {
            return Ok(());
        };
        if it.accepts > 0 && !it.cancels {
            self.ring.cancel_accepts(slot)?;
            it.cancels = true;
        }
        if it.accepts == 0
            && !it.cancels
            && let Some(Listener { socket, .. }) = self.listeners.remove(slot)
        {
            let listener = ListenerId(place);
            self.events.push_back(Event::Stopped { listener, socket });
        }
        Ok(())
    }

    /// Receives from a connected socket from now on. With zcrx it must be TCP.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn add(&mut self, socket: impl Into<OwnedFd>) -> io::Result<ConnectionId> {
        let place = self.connections.add(Connection::new(socket.into()));
        if let Err(error) = self.arm(place.slot) {
            self.connections.remove(place.slot);
            return Err(error);
        }
        Ok(ConnectionId(place))
    }

    /// Queues bytes for a peer; they are sent in order, with the next [`wait`](Self::wait). False, and nothing
    /// queued, if the connection is gone or being closed.
    pub fn send(&mut self, to: ConnectionId, payload: impl Into<Payload>) -> bool {
        let Some(connection) = self.connections.get_mut(to.0).filter(|it| !it.closing) else {
            return false;
        };
        connection.outbox.push(payload.into());
        self.list_to_send(to.0.slot);
        true
    }

    /// Number of payloads queued for a peer that the kernel has not taken completely. Pieces among them keep their
    /// buffers: [`pause`](Self::pause) or [`abort`](Self::abort) a connection whose peer does not read what it is sent.
    pub fn queued(&self, to: ConnectionId) -> usize {
        self.connections.get(to.0).map_or(0, |it| it.outbox.len())
    }

    /// Stops receiving, so that flow control slows the peer down. Pieces that the kernel has already filled are still
    /// returned.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn pause(&mut self, connection: ConnectionId) -> io::Result<()> {
        let Some(it) = self.connections.get_mut(connection.0) else {
            return Ok(());
        };
        it.paused = true;
        match it.receiving {
            Receiving::Armed(_) => self.ring.cancel_receive(connection.0.slot),
            _ => Ok(()),
        }
    }

    /// Receives again.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn resume(&mut self, connection: ConnectionId) -> io::Result<()> {
        let Some(it) = self.connections.get_mut(connection.0) else {
            return Ok(());
        };
        it.paused = false;
        match it.receiving {
            Receiving::Idle => self.arm(connection.0.slot),
            _ => Ok(()),
        }
    }

    /// Stops receiving, sends what is queued, and closes. [`Event::Closed`] reports when that is done.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn close(&mut self, connection: ConnectionId) -> io::Result<()> {
        self.end(connection, false)
    }

    /// Closes without sending what is queued.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn abort(&mut self, connection: ConnectionId) -> io::Result<()> {
        self.end(connection, true)
    }

    fn end(&mut self, connection: ConnectionId, at_once: bool) -> io::Result<()> {
        let Some(it) = self.connections.get_mut(connection.0) else {
            return Ok(());
        };
        (it.closing, it.aborted) = (true, it.aborted || at_once);
        let sends = it.outbox.is_under_way();
        if at_once {
            it.outbox.clear();
        }
        match it.receiving {
            Receiving::Armed(_) => self.ring.cancel_receive(connection.0.slot)?,
            Receiving::Starved => {
                it.receiving = Receiving::Over;
                self.starved.retain(|&slot| slot != connection.0.slot);
            }
            Receiving::Idle | Receiving::Over => {}
        }
        if at_once && sends {
            self.ring.cancel_send(connection.0.slot)?;
        }
        self.free_if_over(connection.0.slot);
        Ok(())
    }

    /// Submits requests to the kernel, and waits until one completes, a [`Waker`] is used, or `limit` has passed. Does
    /// not sleep while events are left.
    ///
    /// # Errors
    /// If the io_uring fails as a whole.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let idle = self.done.is_empty() && self.events.is_empty();
        let most = self.prepare()?;
        let limit = match (idle, most) {
            (false, _) => Some(Duration::ZERO),
            (true, Some(most)) => Some(limit.map_or(most, |limit| limit.min(most))),
            (true, None) => limit,
        };
        self.ring.wait(limit)?;
        let done = &mut self.done;
        self.ring.completed(|completion| done.push_back(completion));
        Ok(())
    }

    /// Before sleeping: starts sends, returns buffers, and arms connections that waited for buffers. Returns the
    /// longest time to sleep; `None`: no limit.
    fn prepare(&mut self) -> io::Result<Option<Duration>> {
        while let Some(slot) = self.to_send.pop() {
            if let Some((_, connection)) = self.connections.at(slot) {
                connection.listed = false;
                let socket = connection.socket.as_fd();
                connection.outbox.start(&mut self.ring, socket, slot)?;
            }
        }
        self.restock(false);
        if self.starved.is_empty() {
            return Ok(None);
        }
        self.restock(true);
        if self.supply.pool().out() == 0 {
            // The kernel has all buffers, perhaps for data of other connections: nothing reports when one is free.
            let due = *self.retry.get_or_insert_with(|| Instant::now() + RETRY);
            let left = due.saturating_duration_since(Instant::now());
            if left > Duration::ZERO {
                return Ok(Some(left));
            }
            self.retry = None;
            self.arm_starved(true)?;
            return Ok(None);
        }
        self.arm_starved(false)?;
        if !self.starved.is_empty() && !self.supply.pool().starve() {
            self.restock(true);
        }
        // Again, since a reader may have returned buffers before `starve`; one that does so later rings the bell.
        self.arm_starved(false)?;
        Ok(None)
    }

    /// Arms connections that wait for buffers: all, or only those for which buffers were returned since their receive.
    fn arm_starved(&mut self, all: bool) -> io::Result<()> {
        let taken = self.supply.pool().taken();
        for _ in 0..self.starved.len() {
            let Some(slot) = self.starved.pop_front() else {
                break;
            };
            match self.connections.at(slot) {
                Some((_, it)) if !all && it.armed_at == taken => self.starved.push_back(slot),
                _ => self.arm(slot)?,
            }
        }
        Ok(())
    }

    /// Returns the buffers of dropped pieces to the kernel; makes it take them if there are many, or `now`.
    fn restock(&mut self, now: bool) -> u64 {
        let pieces = self.supply.restock();
        self.statistics.returned += pieces;
        let flushed = self.supply.flush(self.ring.as_fd(), now);
        self.statistics.flushes += u64::from(flushed);
        pieces + u64::from(flushed)
    }

    /// Arms a receive, unless the connection is paused, closing or over.
    pub(crate) fn arm(&mut self, slot: u32) -> io::Result<()> {
        let Some((_, connection)) = self.connections.at(slot) else {
            return Ok(());
        };
        if connection.paused || connection.closing || connection.receiving == Receiving::Over {
            if connection.receiving != Receiving::Over {
                connection.receiving = Receiving::Idle;
            }
            return Ok(());
        }
        connection.armed_at = self.supply.pool().taken();
        let armed = self.supply.arm(&mut self.ring, connection.socket.as_fd(), slot)?;
        match armed {
            Ok(buffer) => connection.receiving = Receiving::Armed(buffer),
            Err(NoBuffer) => {
                connection.receiving = Receiving::Starved;
                self.starved.push_back(slot);
            }
        }
        Ok(())
    }

    pub(crate) fn list_to_send(&mut self, slot: u32) {
        if let Some((_, connection)) = self.connections.at(slot)
            && !connection.listed
            && !connection.outbox.is_under_way()
            && !connection.outbox.is_empty()
        {
            connection.listed = true;
            self.to_send.push(slot);
        }
    }

    /// Closes the socket when nothing is under way any more.
    pub(crate) fn free_if_over(&mut self, slot: u32) {
        if let Some((place, it)) = self.connections.at(slot)
            && it.is_over()
        {
            self.connections.remove(slot);
            let connection = ConnectionId(place);
            self.events.push_back(Event::Closed { connection });
        }
    }
}

/// Why the configuration excludes zcrx; `None`: it does not.
fn not_asked(config: &Config) -> Option<String> {
    if config.request == Request::ForceCopy {
        return Some("copy was requested".to_owned());
    }
    let bytes = config.block_bytes?;
    Some(format!(
        "blocks of {bytes} bytes were requested, and a NIC puts payload where its headers end: only a copy fills blocks"
    ))
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Requests refer to memory of connections and of the pool, which are dropped next.
        self.ring.cancel_all();
        self.give_up_completed();
    }
}

/// Makes a receiver's [`wait`](Receiver::wait) return.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Bell>);

impl Waker {
    /// Wakes it, now or when it waits next.
    pub fn wake(&self) {
        self.0.ring();
    }
}
