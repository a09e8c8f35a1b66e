//! A port: one guest's network device, for as long as the daemon runs, or until it is removed.
//!
//! The port outlives connections ([`Session`]) and interfaces: counters continue, and an interface that vanishes and
//! comes back is used again. A [ticket lock](ticket_lock) protects its state; `status` reads the [`Published`]
//! snapshot. The holder may wait for the kernel and for the steward: only threads of this port wait for it.
//!
//! A port has no thread of its own. During a session, the session thread ([`vhost_user`](crate::vhost_user)) reads the
//! VMM's connection and checks the interface; one thread checks the interfaces of all other ports ([watch]).

pub(crate) mod announce;
pub(crate) mod attachment;
mod declined;
mod events;
pub(crate) mod features;
pub(crate) mod lanes;
mod link;
mod live;
mod losses;
pub(crate) mod memory;
pub(crate) mod reasons;
pub(crate) mod registration;
pub(crate) mod session;
mod sessions;
pub(crate) mod snapshot;
mod ticket_lock;
pub(crate) mod watch;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use device::counters::PairCounters;
use xsk::NumaNode;

use crate::config::{InterfaceQueues, NicConfig, PortConfig, QueueOptions};
use crate::network::NetworkEnd;
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::interface_queue::InterfaceQueue;
use crate::nic::interfaces::Interfaces;
use crate::nic::wakers::PortRetry;
use crate::port::attachment::{Attachment, Member, NULL_MTU, PatchPort};
use crate::port::lanes::LaneError;
use crate::port::live::Live;
use crate::port::losses::Losses;
use crate::port::reasons::{Closed, Impaired};
use crate::port::session::{FaultCell, PortContext, Session};
use crate::port::snapshot::{PortSnapshot, Published, SessionSnapshot};
use crate::port::ticket_lock::{Task, Ticket, TicketLock};
use crate::port::watch::{Looks, Watch};
use crate::supervision::alarm::Alarm;
use crate::thread;
use common::lock::Locked;
use dataplane::fdb::FdbKey;
use dataplane::worker::workers::Workers;
use program::log_limit::{LeftOut, LogLimit};

/// How long a starting daemon waits for a busy queue. The kernel releases the queue of a killed process under the lock
/// of all network configuration (`xp_release_deferred`, net/xdp/xsk_buff_pool.c), for which it may have to wait: more
/// than 5 s if other processes make and remove interfaces all the time. Only the process that starts the daemon waits
/// for it.
const START_TIMEOUT: Duration = Duration::from_secs(15);

/// Protected by the ticket lock; see the module's head.
#[derive(Default)]
pub(crate) struct PortState {
    pub(crate) session: Option<Session>,
    pub(crate) interface: Option<Arc<Interface>>,
    /// Why the port's queues are not set up although they should be.
    pub(crate) impaired: Option<Impaired>,
    pub(crate) last_closed: Option<Closed>,
    pub(crate) sessions: u64,
    pub(crate) link_down: bool,
    /// When the set-up of the interface and its queues is retried.
    pub(super) retry: PortRetry,
    /// The likely reason why VMMs disconnect after they have read the offered features.
    pub(crate) declined: Option<Impaired>,
    /// Sessions in a row that ended after the VMM read the offered features.
    pub(super) declines: u32,
    /// When the session began.
    pub(super) began: Option<Instant>,
    /// The daemon ends, or the port was removed; nothing is set up any more.
    over: bool,
    /// The last refusal that the VMM got.
    refusal: Option<String>,
    fault: FaultCell,
    /// A VMM made its call eventfd block: no VMM is accepted any more.
    barred: bool,
}

/// The state behind those parts of the config space that may change.
#[derive(Default, PartialEq, Eq)]
struct LinkConfig {
    /// The interface is there, and its link is up.
    up: bool,
    /// MTU of the interface, bytes.
    mtu: Option<u32>,
}

impl PortState {
    fn link_config(&self, attached: &AttachedTo) -> LinkConfig {
        if let AttachedTo::Network(end) = attached {
            let link = end.network.link();
            return LinkConfig {
                up: link.up,
                mtu: Some(link.mtu),
            };
        }
        let interface = self.interface.as_ref();
        LinkConfig {
            up: interface.is_some() && !self.link_down,
            mtu: interface.map(|interface| interface.mtu()),
        }
    }

    /// A snapshot to publish.
    fn snapshot(&self, attached: &AttachedTo) -> PortSnapshot {
        let interface = self.interface.as_ref();
        let down = interface.filter(|_| self.link_down);
        let down = down.map(|interface| Impaired::LinkDown(interface.name()));
        let declined = self.declined.clone();
        PortSnapshot {
            session: self.session.as_ref().map(|session| SessionSnapshot {
                features: session.features,
                peer: session.peer,
                lanes: session
                    .lanes
                    .iter()
                    .map(|lane| match lane {
                        Some(lane) => Arc::downgrade(&lane.facts),
                        None => Weak::new(),
                    })
                    .collect(),
            }),
            interface: interface.map(Arc::downgrade).unwrap_or_default(),
            mtu: self.link_config(attached).mtu.unwrap_or(NULL_MTU),
            impaired: self.impaired.clone().or(down).or(declined),
            last_closed: self.last_closed.clone(),
            sessions: self.sessions,
        }
    }
}

/// What a port is connected with inside this process.
#[derive(Clone)]
pub(crate) enum AttachedTo {
    Nothing,
    /// A cable, and which of its ends this is.
    Patch(PatchPort),
    Network(NetworkEnd),
}

impl AttachedTo {
    /// Learned addresses of a port of a network, in order.
    fn learned(&self) -> Vec<FdbKey> {
        match self {
            Self::Network(end) => end.learned(),
            Self::Nothing | Self::Patch(_) => Vec::new(),
        }
    }

    /// Its end of a cable.
    pub(crate) fn patch(&self) -> Option<&PatchPort> {
        match self {
            Self::Patch(end) => Some(end),
            Self::Nothing | Self::Network(_) => None,
        }
    }
}

pub(crate) struct Port {
    pub(crate) config: PortConfig,
    pub(crate) counters: Vec<Arc<PairCounters>>,
    interfaces: Arc<Interfaces>,
    /// What it is connected with inside this process.
    pub(crate) attached: AttachedTo,
    workers: Arc<Workers>,
    /// Its name in the log and `status`.
    name: Arc<str>,
    state: TicketLock<PortState>,
    live: Mutex<Live>,
    /// Which kinds of lost frames were logged.
    losses: Mutex<Losses>,
    /// Limits log lines that VMMs can cause.
    lines: Mutex<LogLimit>,
    /// See [`PortContext::lines`].
    direct_lines: Mutex<LogLimit>,
    /// The published state.
    pub(crate) published: Published,
    /// The VMM's process, 0 without one. Shown to others only: nothing is published through it.
    pub(super) vmm_pid: AtomicI32,
    /// When its interface is checked.
    pub(crate) looks: Looks,
    /// It has a session.
    pub(super) in_session: AtomicBool,
    /// A thread serves a connection, of a VMM or another peer.
    served: AtomicBool,
    /// The port was removed: its state does not change any more.
    ended: AtomicBool,
    /// Raised when the port is removed while the daemon runs.
    pub(crate) removed: Alarm,
}

impl Port {
    /// Opens every queue, with the memory that it will need: a missing or busy queue, or too low a limit of memory, is
    /// reported at the start and not when the guest boots.
    /// Errors: what will not work later either, naming the remedy.
    pub(crate) fn open_queues(&self) -> Result<(), LaneError> {
        let deadline = Instant::now() + START_TIMEOUT;
        for attachment in self.attachments(self.opened().as_ref()) {
            attachment.open_until(deadline)?;
        }
        Ok(())
    }

    /// The NUMA node of each queue pair's NIC, where there are several.
    pub(crate) fn nodes(&self) -> Vec<Option<NumaNode>> {
        let attachment = self.attachments(self.opened().as_ref());
        attachment.iter().map(Attachment::node).collect()
    }

    /// Closes queues that will be opened again with guest memory. Called when all ports have opened theirs, so that a
    /// limit of the process or the user that is too low for all ports shows at the start.
    pub(crate) fn close_queues(&self) {
        if self.config.options.placement.has_guest_ram()
            && let Some(interface) = self.opened()
        {
            interface.close_queues();
        }
    }

    fn opened(&self) -> Option<Arc<Interface>> {
        self.state
            .lock(self.state.take_ticket(), |state| state.interface.clone())
    }

    /// Publishes the port.
    pub(crate) fn start(self: &Arc<Self>) {
        self.ask(Task::Change, |_, _| ());
    }

    /// Opens the interface. `attached`: what the port is connected with inside this process.
    /// Errors: what will not work later either, naming the remedy.
    pub(crate) fn open(
        config: PortConfig,
        interfaces: Arc<Interfaces>,
        workers: Arc<Workers>,
        attached: AttachedTo,
        watch: &Arc<Watch>,
    ) -> Result<Arc<Self>, LaneError> {
        let mut port = Self {
            name: Arc::clone(&config.name),
            counters: (0..config.queues).map(|_| Arc::default()).collect(),
            live: Mutex::new(Live::new(&config)),
            config,
            interfaces,
            attached,
            workers,
            state: TicketLock::new(PortState::default()),
            losses: Mutex::default(),
            lines: Mutex::default(),
            direct_lines: Mutex::default(),
            published: Published::default(),
            vmm_pid: AtomicI32::new(0),
            looks: Looks::new(watch).map_err(LaneError::Duplicate)?,
            in_session: AtomicBool::new(false),
            served: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            removed: Alarm::new().map_err(LaneError::Duplicate)?,
        };
        port.state = TicketLock::new(PortState {
            interface: port.open_interface()?,
            ..PortState::default()
        });
        Ok(Arc::new(port))
    }

    /// Publishes a snapshot of the state, and records events for its changes.
    fn show(&self, state: &PortState) {
        let snapshot = state.snapshot(&self.attached);
        if let AttachedTo::Network(end) = &self.attached {
            let session = state.session.as_ref();
            end.set_connected(session.is_some_and(|session| session.lanes.iter().any(Option::is_some)));
        }
        events::note(&self.name, self.published.snapshot().as_deref(), &snapshot);
        self.published.publish(snapshot);
    }

    fn open_interface(&self) -> Result<Option<Arc<Interface>>, InterfaceError> {
        let Some(wanted) = self.config.wanted() else {
            return Ok(None);
        };
        let hints = self.hints();
        let options = self.config.options;
        let interface = self.interfaces.open(&wanted, QueueOptions { hints, ..options })?;
        interface.warn_of_losses();
        if self.config.options.placement.has_guest_ram() {
            interface.check_direct(interface.frame_limit())?;
        }
        Ok(Some(interface))
    }

    fn attachments(&self, interface: Option<&Arc<Interface>>) -> Vec<Attachment> {
        let pairs = u32::from(self.config.queues);
        match &self.config.nic {
            NicConfig::Cable { .. } | NicConfig::Network { .. } => match &self.attached {
                AttachedTo::Patch(end) => {
                    vec![Attachment::Patch(end.clone()); usize::from(self.config.queues)]
                }
                AttachedTo::Network(end) => (0..pairs)
                    .map(|pair| self.in_network(end, interface, pair))
                    .collect(),
                AttachedTo::Nothing => Vec::new(),
            },
            NicConfig::Null { frame_bytes } => (0..pairs)
                .map(|_| Attachment::Null {
                    frame_bytes: *frame_bytes,
                })
                .collect(),
            NicConfig::Interface(queues) => interface
                .map(|interface| {
                    let first = queues.start_queue;
                    let attachment = |pair| Attachment::Queue(InterfaceQueue::new(interface, first + pair));
                    (0..pairs).map(attachment).collect()
                })
                .unwrap_or_default(),
        }
    }

    /// The attachment of a pair of a network's port: the network, and a queue of its own, if one is configured and its
    /// interface is there.
    fn in_network(&self, end: &NetworkEnd, interface: Option<&Arc<Interface>>, pair: u32) -> Attachment {
        match (self.config.nic.queues(), interface) {
            (Some(queues), Some(interface)) => Attachment::Member(Member {
                end: end.clone(),
                queue: InterfaceQueue::new(interface, queues.start_queue + pair),
                untags: self.config.nic.untags(),
                asked: self.config.asked,
            }),
            _ => Attachment::Network(end.clone()),
        }
    }

    /// Runs `act` with the state, under the lock; `None`: the port has ended.
    fn ask<R>(self: &Arc<Self>, task: Task, act: impl FnOnce(&Arc<Self>, &mut PortState) -> R) -> Option<R> {
        self.lock(self.state.take_ticket(), task, act)
    }

    fn lock<R>(
        self: &Arc<Self>,
        ticket: Ticket,
        task: Task,
        act: impl FnOnce(&Arc<Self>, &mut PortState) -> R,
    ) -> Option<R> {
        self.state.lock(ticket, |state| {
            if state.over {
                return None;
            }
            self.published.begin(task);
            let result = act(self, state);
            self.show(state);
            Some(result)
        })
    }

    /// Runs `act` with the state, under the lock: at once, if that needs no wait, otherwise on a thread for it.
    fn post(self: &Arc<Self>, task: Task, act: impl FnOnce(&Arc<Self>, &mut PortState) + Send + 'static) {
        let ticket = self.state.take_ticket();
        let at_once = self.state.is_next(&ticket) && !self.in_session.load(Relaxed);
        let port = Arc::clone(self);
        let body: Box<dyn FnOnce() + Send> = Box::new(move || {
            port.lock(ticket, task, act);
        });
        // The ticket must be used, even if no thread can be started.
        let body = Arc::new(Mutex::new(Some(body)));
        let run = |body: &Mutex<Option<Box<dyn FnOnce() + Send>>>| {
            let body = body.locked().take();
            if let Some(body) = body {
                body();
            }
        };
        let theirs = Arc::clone(&body);
        if at_once || thread::start("port", move || run(&theirs)).is_err() {
            run(&body);
        }
    }

    /// Queues cannot be set up; logged when the reason changes.
    fn impair(&self, state: &mut PortState, why: String) {
        let impaired = Some(Impaired::Queues(why));
        if state.impaired != impaired
            && let (Some(why), Some(left_out)) = (&impaired, self.log_allowed())
        {
            tracing::warn!(port = %self.config.name, "queues cannot be set up: {why}{left_out}");
        }
        state.impaired = impaired;
    }

    fn context<'a>(&'a self, attachment: &'a [Attachment]) -> PortContext<'a> {
        PortContext {
            placement: self.config.options.placement,
            workers: &self.workers,
            name: &self.name,
            lines: &self.direct_lines,
            counters: &self.counters,
            live: self.live(),
            attachment,
            opens: true,
        }
    }

    /// Whether frames of the interface's MTU fit the placement.
    fn check_mtu(&self, state: &PortState) -> Result<(), InterfaceError> {
        match &state.interface {
            Some(interface) if self.config.options.placement.has_guest_ram() => {
                interface.check_direct(interface.frame_limit())
            }
            _ => Ok(()),
        }
    }

    /// Stops all lanes, so that another back end can continue with the rings, and then calls `stopped`.
    pub(crate) fn shut_down(self: &Arc<Self>, stopped: impl FnOnce() + Send + 'static) {
        self.post(Task::End, move |port, state| {
            state.over = true;
            if let Some(session) = &mut state.session {
                session.forget_registrations();
                session.stop_all(&port.workers);
            }
            stopped();
        });
    }

    /// Ends the port, and closes its queues: its VMM is disconnected, and no other one is served.
    pub(crate) fn remove(self: &Arc<Self>) {
        // First: a VMM that reconnects must find no socket.
        self.removed.raise();
        self.post(Task::End, |port, state| {
            if let Some(session) = &mut state.session {
                session.forget_registrations();
                session.hang_up();
                // A fault of the guest does not matter any more.
                let _ = port.end(state, Closed::Removed);
            }
            if let Some(interface) = state.interface.take() {
                interface.close_queues();
            }
            state.over = true;
            port.ended.store(true, Release);
        });
    }

    /// Makes a check of the interface happen soon, because it may have changed.
    pub(crate) fn look_again(&self) {
        self.looks.note_change();
    }

    /// After [`remove`](Self::remove): whether no thread uses the port any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.ended.load(Acquire) && !self.served.load(Acquire)
    }

    /// Sets whether a thread serves a connection.
    pub(crate) fn note_served(&self, is_served: bool) {
        self.served.store(is_served, Release);
    }

    /// Whether a line that VMMs can cause may be logged now, with the number of lines left out before.
    fn log_allowed(&self) -> Option<LeftOut> {
        self.lines.locked().allow()
    }

    /// Its name in the log and `status`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The interface's queue of a pair, if it has one of its own.
    pub(crate) fn queue_of(&self, pair: usize) -> Option<u32> {
        let queues = self.config.nic.queues()?;
        Some(queues.start_queue + u32::try_from(pair).ok()?)
    }

    /// The guest's MAC address.
    pub(crate) fn mac(&self) -> [u8; 6] {
        mac_of(&self.config)
    }
}

/// The MAC address of the guest of a port.
pub(crate) fn mac_of(config: &PortConfig) -> [u8; 6] {
    config.mac.unwrap_or_else(|| stable_mac(config))
}

/// A locally administered address that is the same at every start, whatever the other options are: an FNV-1a hash of
/// the port's endpoint and attachment.
fn stable_mac(config: &PortConfig) -> [u8; 6] {
    let text = match &config.nic {
        NicConfig::Interface(InterfaceQueues {
            name, start_queue, ..
        }) => format!("{}|{name}|{start_queue}", config.endpoint),
        other => format!("{}|{other}", config.endpoint),
    };
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [_, _, _, a, b, c, d, e] = hash.to_be_bytes();
    // Bit 1 of the first byte: locally administered; bit 0 clear: unicast (IEEE 802).
    [0x02, a, b, c, d, e]
}
