//! A receiver: connections whose bytes come as events, of one thread.
//!
//! # Theory of operation
//!
//! [`Receiver::wait`] hands the kernel what readers gave back and what is to be sent, sleeps until something is
//! completed, and reads the completions into `done`. [`Receiver::next_event`] makes events of them, one at a time.
//!
//! A multishot receive ends when the completion queue is full (ENOSPC), when it has no buffer (ENOBUFS, with zcrx
//! ENOMEM), or when the kernel likes; it is armed again: at once, since the completions are read by then, or, without
//! buffers, when some are back (`starved`). A receive that ends without buffers while nobody holds any, again and
//! again, shows an area that is too small: that ends the connection.
//!
//! A connection's slot is freed when the caller has closed it and no request of it is under way; so a completion never
//! meets a later connection. A cancellation may find nothing, as the request is between two steps of the kernel's: it is
//! made again while the request is under way.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::{Config, Fallback, Memory, Mode, Request};
use crate::connection::{ConnectionId, Connections, ListenerId, Listeners, Receiving};
use crate::error::OpenError;
use crate::event::Event;
use crate::instance::{self, Imported, Instance, Prepared, Refusal, Share};
use crate::lease::Leased;
use crate::outbox::Payload;
use crate::piece::Bell;
use crate::ring::{Completion, Ring};
use crate::supply::{NoBuffer, Supply};

/// Requests to accept that a listener has under way: so many connections a [`wait`](Receiver::wait), however many come.
/// Whoever connects in crowds neither takes all descriptors of the process nor holds up those who have a connection.
const ACCEPTS: u32 = 8;
/// How often a receive may end without buffers while nobody holds any: at least so many times [`RETRY`].
pub(crate) const MOST_BARREN: u32 = 1000;
/// When a receive is armed again that ended without buffers while nobody holds any.
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
    /// Times that the kernel was told to take buffers from the refill ring.
    pub flushes: u64,
    /// Pieces that were given back.
    pub returned: u64,
    /// Times that the kernel copied into the area of zcrx, of all receivers of the queue together, and how many bytes;
    /// without what it copies from the heads of packets. `None` before Linux 7.2, and with ordinary receives, which
    /// copy all.
    pub kernel_copies: Option<(u64, u64)>,
}

/// Receives from many connections, in one thread: the thread that opens it must be the one that uses it, since the
/// kernel holds it to that.
pub struct Receiver {
    pub(crate) connections: Connections,
    pub(crate) listeners: Listeners,
    pub(crate) supply: Supply,
    pub(crate) done: VecDeque<Completion>,
    pub(crate) events: VecDeque<Event>,
    /// Slots of connections that wait for buffers.
    pub(crate) starved: VecDeque<u32>,
    /// When they are armed again though no buffer came back.
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
    /// Opens one: zcrx, or, unless that is forced, ordinary receives, with the reason in
    /// [`fallbacks`](Self::fallbacks).
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
                Err(Refusal::Kernel(fallback)) if config.request == Request::Auto => fallbacks.push(fallback),
                Err(refusal) => return Err(refusal.into()),
            }
        }
        let supply = Supply::copy(ring.as_fd(), config)?;
        Self::new(ring, supply, config, fallbacks)
    }

    /// Receives by the queue of another thread's receiver, too. Buffers are common; a connection belongs to the
    /// receiver that it is added to.
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

    /// Receives by an instance that somebody else registered. Takes CAP_NET_ADMIN; without it, see
    /// [`start`](Self::start). One process at a time may receive by an instance; its threads share the receiver's.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn import(instance: &Instance, config: &Config) -> Result<Self, OpenError> {
        let ring = Ring::new(config, false)?;
        let imported = instance.import_into(ring.as_fd())?;
        let supply = Supply::zcrx(instance.take_up(imported)?, imported.id);
        Self::new(ring, supply, config, Vec::new())
    }

    /// Receives by an instance that somebody else has made known to a ring of ours.
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

    /// Receives by a lease, whose queue the ring knows by that number (`zcrx_id`). Call it in the thread that is to
    /// receive; each thread has a ring of its own, and all are of the same lease.
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
        let what = "making what wakes the receiver";
        let failed = |source| OpenError::Setup { what, source };
        let bell = Arc::new(Bell::new().map_err(failed)?);
        supply.pool().add_bell(&bell);
        let mut ring = ring;
        ring.watch(bell.as_fd()).map_err(failed)?;
        Ok(Self {
            connections: Connections::default(),
            listeners: Listeners::default(),
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

    /// The way of receiving in use.
    pub fn mode(&self) -> Mode {
        self.supply.mode()
    }

    /// What is better and was refused, with why.
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

    /// How many connections there are, with those that are being closed.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// For other threads to receive by the same queue.
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
            // That is this receiver's alone.
            let bytes = memory.len().saturating_sub(memory.private_from());
            config.memory = Memory::Own { bytes };
        }
        Ok(Share {
            config,
            instance,
            fallbacks: self.fallbacks.clone(),
        })
    }

    /// What makes [`wait`](Self::wait) return, from any thread.
    pub fn waker(&self) -> Waker {
        Waker(self.bell.clone())
    }

    /// Accepts connections, eight at most in a [`wait`](Self::wait); each is an event, and becomes one of this receiver
    /// when it is [added](Self::add).
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn listen(&mut self, listener: impl Into<OwnedFd>) -> io::Result<ListenerId> {
        let id = self.listeners.add(listener.into());
        self.listen_again(id)?;
        Ok(id)
    }

    /// Accepts again after [`Event::AcceptFailed`].
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn listen_again(&mut self, listener: ListenerId) -> io::Result<()> {
        if let Some(it) = self.listeners.get(listener).filter(|it| !it.stopping) {
            it.failed = false;
            while it.accepts < ACCEPTS {
                self.ring.accept(it.socket.as_fd(), listener.slot)?;
                it.accepts += 1;
            }
        }
        Ok(())
    }

    /// Accepts no more from then on; [`Event::Stopped`] says when that is so, and gives the socket back. Connections
    /// that come until then are events yet, and those that were accepted go on.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn stop_listening(&mut self, listener: ListenerId) -> io::Result<()> {
        if let Some(it) = self.listeners.get(listener).filter(|it| !it.stopping) {
            it.stopping = true;
            self.cancel_accepts(listener.slot)?;
        }
        Ok(())
    }

    /// Goes on with stopping a listener: cancels what is under way, or gives the socket back.
    pub(crate) fn cancel_accepts(&mut self, slot: u32) -> io::Result<()> {
        if let Some((_, it)) = self.listeners.at(slot)
            && it.stopping
            && it.accepts > 0
            && !it.cancels
        {
            self.ring.cancel_accepts(slot)?;
            it.cancels = true;
        }
        if let Some((listener, socket)) = self.listeners.take_stopped(slot) {
            self.events.push_back(Event::Stopped { listener, socket });
        }
        Ok(())
    }

    /// Receives from a connected socket from now on. With zcrx it must be TCP.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn add(&mut self, socket: impl Into<OwnedFd>) -> io::Result<ConnectionId> {
        let id = self.connections.add(socket.into());
        if let Err(error) = self.arm(id.slot) {
            self.connections.remove(id.slot);
            return Err(error);
        }
        Ok(id)
    }

    /// Queues bytes for a peer; they are sent in order, with the next [`wait`](Self::wait). False, and nothing
    /// queued, if the connection is gone or being closed.
    pub fn send(&mut self, to: ConnectionId, payload: impl Into<Payload>) -> bool {
        let Some(connection) = self.connections.get(to).filter(|it| !it.closing) else {
            return false;
        };
        connection.outbox.push(payload.into());
        self.list_to_send(to.slot);
        true
    }

    /// How many payloads are queued for a peer that are not all with the kernel yet. Pieces among them keep their
    /// buffers: of who does not read what it is sent, no more should be received ([`pause`](Self::pause)), or it should
    /// be given up ([`abort`](Self::abort)).
    pub fn queued(&self, to: ConnectionId) -> usize {
        self.connections.queued(to)
    }

    /// Leaves what comes next with the kernel, so that the peer is slowed down. Pieces that are on their way still
    /// come.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn pause(&mut self, connection: ConnectionId) -> io::Result<()> {
        let Some(it) = self.connections.get(connection) else {
            return Ok(());
        };
        it.paused = true;
        match it.receiving {
            Receiving::Armed(_) => self.ring.cancel_receive(connection.slot),
            _ => Ok(()),
        }
    }

    /// Receives again.
    ///
    /// # Errors
    /// If the kernel takes no requests.
    pub fn resume(&mut self, connection: ConnectionId) -> io::Result<()> {
        let Some(it) = self.connections.get(connection) else {
            return Ok(());
        };
        it.paused = false;
        match it.receiving {
            Receiving::Idle => self.arm(connection.slot),
            _ => Ok(()),
        }
    }

    /// Receives no more, sends what is queued, and closes. [`Event::Closed`] says when.
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
        let Some(it) = self.connections.get(connection) else {
            return Ok(());
        };
        (it.closing, it.aborted) = (true, it.aborted || at_once);
        let sends = it.outbox.is_under_way();
        if at_once {
            it.outbox.clear();
        }
        match it.receiving {
            Receiving::Armed(_) => self.ring.cancel_receive(connection.slot)?,
            Receiving::Starved => {
                it.receiving = Receiving::Over;
                self.starved.retain(|&slot| slot != connection.slot);
            }
            Receiving::Idle | Receiving::Over => {}
        }
        if at_once && sends {
            self.ring.cancel_send(connection.slot)?;
        }
        self.free_if_over(connection.slot);
        Ok(())
    }

    /// Hands the kernel what is to be done, and waits until something is completed, somebody [wakes](Waker) us, or the
    /// time is over. Does not sleep while events are left.
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

    /// Before sleeping: buffers, sends, and who waits for buffers. How long to sleep at most.
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
            // All buffers are with the kernel, perhaps on their way to other connections: they come without a sign.
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
        // Again, since somebody may have given buffers back before we said that we starve; who does so later rings.
        self.arm_starved(false)?;
        Ok(None)
    }

    /// Arms the connections that wait for buffers: all, or those since whose last receive some came back.
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

    /// Gives the kernel what came back; tells it to take them if much is there, or `now`.
    fn restock(&mut self, now: bool) -> u64 {
        let pieces = self.supply.restock();
        self.statistics.returned += pieces;
        let flushed = self.supply.flush(self.ring.as_fd(), now);
        self.statistics.flushes += u64::from(flushed);
        pieces + u64::from(flushed)
    }

    /// Arms a receive, unless the connection wants none.
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
        if let Some((connection, it)) = self.connections.at(slot)
            && it.is_over()
        {
            self.connections.remove(slot);
            self.events.push_back(Event::Closed { connection });
        }
    }
}

/// Why zcrx is not even asked for.
fn not_asked(config: &Config) -> Option<String> {
    if config.request == Request::ForceCopy {
        return Some("copy was asked for".to_owned());
    }
    let bytes = config.block_bytes?;
    Some(format!(
        "blocks of {bytes} bytes were asked for, and a NIC puts payload where its headers end: only a copy fills blocks"
    ))
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Requests name memory of connections and of the pool, which are dropped next.
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
