//! A port: one guest's network device, for as long as the daemon runs, or until it is removed.
//!
//! The port outlives connections ([`Session`]) and interfaces: counters go on, and an interface
//! that vanishes and comes back is picked up again. A thread of its own has its state, and does with it what comes by
//! the [mailbox]; `status` looks through a [`Window`]. That thread may wait for the kernel and for the steward:
//! all that waits for it is this port's.

pub(crate) mod announce;
mod declined;
mod events;
pub(crate) mod far;
pub(crate) mod features;
pub(crate) mod lanes;
mod limits;
mod link;
mod losses;
mod mailbox;
pub(crate) mod memory;
pub(crate) mod reasons;
pub(crate) mod session;
mod sessions;
pub(crate) mod shown;

use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::drivers;
use device::counters::PairCounters;
use xsk::NumaNode;

use crate::config::{HintsConfig, NicConfig, PortConfig, PortQueues, PortRules};
use crate::guard::alarm::Alarm;
use crate::network::NetworkEnd;
use crate::nic::error::InterfaceError;
use crate::nic::interface::{Interface, QueueOptions};
use crate::nic::interface_queue::InterfaceQueue;
use crate::nic::interfaces::Interfaces;
use crate::nic::wakers::{PortRetry, Wakers};
use crate::port::far::{CableEnd, FarSide, Member, NULL_MTU};
use crate::port::lanes::LaneError;
use crate::port::losses::Losses;
use crate::port::mailbox::{Mailbox, Message, Task};
use crate::port::reasons::{Closed, Impaired};
use crate::port::session::{FaultCell, PortContext, Session};
use crate::port::shown::{Shown, ShownInterface, ShownSession, Window};
use crate::switch::filter::{Filter, PortFilter};
use crate::switch::guard::Guard;
use crate::switch::rate_limit::PortLimits;
use crate::switch::table::Station;
use crate::switch::workers::Workers;
use steward::log_limit::LogLimit;

/// How long a daemon that starts waits for a queue that is taken. The kernel gives up that of one that was killed under
/// the lock of all network configuration (`xp_release_deferred`, net/xdp/xsk_buff_pool.c), for which it may have to
/// wait: more than 5 s where other work makes and removes interfaces all the while. Nobody waits for the daemon
/// meanwhile but who starts it.
const START_TIMEOUT: Duration = Duration::from_secs(15);

/// What the port's thread has; see the module's head.
#[derive(Default)]
pub(crate) struct PortState {
    pub(crate) session: Option<Session>,
    pub(crate) interface: Option<Arc<Interface>>,
    /// Why the port's queues are not set up although they should be.
    pub(crate) impaired: Option<Impaired>,
    pub(crate) last_closed: Option<Closed>,
    pub(crate) sessions: u64,
    pub(crate) link_down: bool,
    /// When what its interface lacks is tried again.
    pub(super) retry: PortRetry,
    /// VMMs are told what is offered, and leave.
    pub(crate) declined: Option<Impaired>,
    /// Sessions in a row that ended where the VMM was told what is offered.
    pub(super) declines: u32,
    /// When the session began.
    pub(super) began: Option<Instant>,
    /// What VMMs can make the port say.
    pub(super) lines: LogLimit,
    /// The daemon ends; nothing is set up any more.
    over: bool,
    /// What the VMM was told last when it was refused.
    refusal: Option<String>,
    fault: FaultCell,
    /// A VMM made its call eventfd block: none is taken any more.
    barred: bool,
}

/// What of the config space may change.
#[derive(Default, PartialEq, Eq)]
struct LinkConfig {
    /// The interface is there, and its link is up.
    up: bool,
    /// The interface's, bytes.
    mtu: Option<u32>,
}

impl PortState {
    fn link_config(&self, joined: &Joined) -> LinkConfig {
        if let Joined::Network(end) = joined {
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

    /// What others see of it.
    fn shown(&self) -> Shown {
        let interface = self.interface.as_ref();
        let down = interface.filter(|_| self.link_down);
        let down = down.map(|interface| Impaired::LinkDown(interface.name()));
        let declined = self.declined.clone();
        Shown {
            session: self.session.as_ref().map(|session| ShownSession {
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
            interface: interface.map(|interface| ShownInterface {
                name: interface.name(),
                driver: drivers::said_of(&interface.link.driver),
                node: interface.link.node,
                steering: interface.steering.report(),
                attached: interface.steering.attached(),
                itself: Arc::downgrade(interface),
            }),
            mtu: interface.map_or(NULL_MTU, |interface| interface.mtu()),
            impaired: self.impaired.clone().or(down).or(declined),
            last_closed: self.last_closed.clone(),
            sessions: self.sessions,
        }
    }
}

/// What a port is joined with within this process.
#[derive(Clone)]
pub(crate) enum Joined {
    Nothing,
    /// A cable, and which of its ends this is.
    Cable(CableEnd),
    Network(NetworkEnd),
}

impl Joined {
    /// Addresses that a port of a network has beside its own, in order.
    fn learned(&self) -> Vec<Station> {
        match self {
            Self::Network(end) => end.learned(),
            Self::Nothing | Self::Cable(_) => Vec::new(),
        }
    }

    /// Its end of a cable.
    pub(crate) fn cable(&self) -> Option<&CableEnd> {
        match self {
            Self::Cable(end) => Some(end),
            Self::Nothing | Self::Network(_) => None,
        }
    }
}

pub(crate) struct Port {
    pub(crate) config: PortConfig,
    pub(crate) counters: Vec<Arc<PairCounters>>,
    interfaces: Arc<Interfaces>,
    /// What it is joined with within this process.
    joined: Joined,
    workers: Arc<Workers>,
    /// As the log and `status` have it.
    name: Arc<str>,
    mailbox: Mailbox<PortState>,
    /// How much its guest may send and get.
    limits: Mutex<PortLimits>,
    /// What the guest may send, where no network says it.
    guard: Mutex<Option<Guard>>,
    /// Which frames it may send and gets: as it was said, and compiled.
    filter: Mutex<(Filter, PortFilter)>,
    /// What the NIC is to tell of its frames.
    hints: Mutex<HintsConfig>,
    /// What is said of that, and of what it gets.
    rules: Mutex<PortRules>,
    /// Which kinds of lost frames were logged.
    losses: Mutex<Losses>,
    /// See [`PortContext::lines`].
    direct_lines: Mutex<LogLimit>,
    /// What is seen of the state from outside.
    pub(crate) window: Window,
    /// The VMM's process, 0 without one. Shown to others only: nothing is published through it.
    pub(super) vmm_pid: AtomicI32,
    wakers: Wakers,
    /// Raised when the port is to go while the daemon stays.
    pub(crate) removed: Alarm,
}

/// A port whose thread does not run yet.
pub(crate) struct Opened {
    port: Arc<Port>,
    state: PortState,
    mailbox: Receiver<Message<PortState>>,
}

/// A port with the thread that has its state.
pub(crate) struct Started {
    pub(crate) port: Arc<Port>,
    pub(crate) thread: JoinHandle<()>,
}

impl Opened {
    /// Opens every queue, with the memory that it will need: a queue that is missing or taken, or a limit of memory
    /// that is too low, is said at the start and not when the guest boots.
    /// Errors: what will not work later either, naming the remedy.
    pub(crate) fn open_queues(&self) -> Result<(), LaneError> {
        let deadline = Instant::now() + START_TIMEOUT;
        for far in self.port.far_sides(self.state.interface.as_ref()) {
            far.open_until(deadline)?;
        }
        Ok(())
    }

    /// The NUMA node of each queue pair's NIC, where there are several.
    pub(crate) fn nodes(&self) -> Vec<Option<NumaNode>> {
        let far = self.port.far_sides(self.state.interface.as_ref());
        far.iter().map(FarSide::node).collect()
    }

    /// Closes queues that guest memory will be coupled with. Limits are of the process and of the user, so this is done
    /// once all ports have opened theirs.
    pub(crate) fn close_queues(&self) {
        if self.port.config.placement.has_guest_ram()
            && let Some(interface) = &self.state.interface
        {
            interface.close_queues();
        }
    }

    /// As the log and `status` have it.
    pub(crate) fn name(&self) -> &str {
        &self.port.name
    }

    /// Starts its thread.
    pub(crate) fn start(self) -> io::Result<Started> {
        let port = Arc::clone(&self.port);
        let body = move || self.work();
        let thread = std::thread::Builder::new().name("port".to_owned()).spawn(body)?;
        Ok(Started { port, thread })
    }

    /// The port's thread, until it ends.
    fn work(mut self) {
        let window = &self.port.window;
        self.port.show(&self.state);
        while let Ok(message) = self.mailbox.recv() {
            window.begin(message.task);
            let answer = (message.act)(&mut self.state);
            self.port.show(&self.state);
            answer();
            if self.state.over {
                return;
            }
        }
    }
}

impl Port {
    /// Opens the interface. `joined`: what the port is joined with within this process.
    /// Errors: what will not work later either, naming the remedy.
    pub(crate) fn open(
        config: PortConfig,
        interfaces: Arc<Interfaces>,
        workers: Arc<Workers>,
        joined: Joined,
    ) -> Result<Opened, LaneError> {
        let (mailbox, messages) = Mailbox::new();
        let port = Self {
            name: Arc::clone(&config.name),
            counters: (0..config.queues).map(|_| Arc::default()).collect(),
            limits: Mutex::new(PortLimits::new(config.rates)),
            guard: Mutex::new(config.guard()),
            filter: Mutex::new((config.filter.clone(), PortFilter::new(&config.filter))),
            hints: Mutex::new(QueueOptions::hints_of(&config)),
            rules: Mutex::new(PortRules::of(&config)),
            config,
            interfaces,
            joined,
            workers,
            mailbox,
            losses: Mutex::default(),
            direct_lines: Mutex::default(),
            window: Window::default(),
            vmm_pid: AtomicI32::new(0),
            wakers: Wakers::new().map_err(LaneError::Duplicate)?,
            removed: Alarm::new().map_err(LaneError::Duplicate)?,
        };
        let state = PortState {
            interface: port.open_interface()?,
            ..PortState::default()
        };
        Ok(Opened {
            port: Arc::new(port),
            state,
            mailbox: messages,
        })
    }

    /// Leaves what is to be seen of the state, and notes what is different from before.
    fn show(&self, state: &PortState) {
        let shown = state.shown();
        events::note(&self.name, self.window.shown().as_deref(), &shown);
        self.window.show(shown);
    }

    fn open_interface(&self) -> Result<Option<Arc<Interface>>, InterfaceError> {
        let (Some(wanted), Some(options)) = (self.config.wanted(), QueueOptions::of(&self.config)) else {
            return Ok(None);
        };
        let hints = self.hints();
        let interface = self.interfaces.open(&wanted, QueueOptions { hints, ..options })?;
        if self.config.placement.has_guest_ram() {
            interface.check_direct(interface.frame_limit())?;
        }
        Ok(Some(interface))
    }

    fn far_sides(&self, interface: Option<&Arc<Interface>>) -> Vec<FarSide> {
        let pairs = u32::from(self.config.queues);
        match &self.config.nic {
            NicConfig::Cable { .. } | NicConfig::Network { .. } => match &self.joined {
                Joined::Cable(end) => vec![FarSide::Cable(end.clone()); usize::from(self.config.queues)],
                Joined::Network(end) => (0..pairs)
                    .map(|pair| self.in_network(end, interface, pair))
                    .collect(),
                Joined::Nothing => Vec::new(),
            },
            NicConfig::Null { frame_bytes } => (0..pairs)
                .map(|_| FarSide::Null {
                    frame_bytes: *frame_bytes,
                })
                .collect(),
            NicConfig::Interface(queues) => interface
                .map(|interface| {
                    let first = queues.start_queue;
                    let far = |pair| FarSide::Queue(InterfaceQueue::new(interface, first + pair));
                    (0..pairs).map(far).collect()
                })
                .unwrap_or_default(),
        }
    }

    /// The far side of a pair of a port of a network. While the interface of its own queue is gone there is the network
    /// alone.
    fn in_network(&self, end: &NetworkEnd, interface: Option<&Arc<Interface>>, pair: u32) -> FarSide {
        match (self.config.nic.queues(), interface) {
            (Some(queues), Some(interface)) => FarSide::Member(Member {
                end: end.clone(),
                queue: InterfaceQueue::new(interface, queues.start_queue + pair),
                untags: self.config.nic.untags(),
                asked: self.config.asked,
            }),
            _ => FarSide::Network(end.clone()),
        }
    }

    /// Lets the port's thread do that, and waits for what comes of it; `None`: the port has ended.
    fn ask<R: Send + 'static>(
        self: &Arc<Self>,
        task: Task,
        act: impl FnOnce(&Arc<Self>, &mut PortState) -> R + Send + 'static,
    ) -> Option<R> {
        let port = Arc::clone(self);
        self.mailbox.ask(task, move |state| act(&port, state))
    }

    /// Lets the port's thread do that, some time.
    fn post(self: &Arc<Self>, task: Task, act: impl FnOnce(&Arc<Self>, &mut PortState) + Send + 'static) {
        let port = Arc::clone(self);
        self.mailbox.post(task, move |state| act(&port, state));
    }

    /// Queues cannot be set up; said when the reason is another than before.
    fn impair(&self, state: &mut PortState, why: String) {
        let impaired = Some(Impaired::Queues(why));
        if state.impaired != impaired
            && let (Some(why), Some(left_out)) = (&impaired, state.lines.allow())
        {
            tracing::warn!(port = %self.config.name, "queues cannot be set up: {why}{left_out}");
        }
        state.impaired = impaired;
    }

    fn context<'a>(&'a self, far: &'a [FarSide]) -> PortContext<'a> {
        PortContext {
            placement: self.config.placement,
            workers: &self.workers,
            name: &self.name,
            lines: &self.direct_lines,
            counters: &self.counters,
            limits: self.limits(),
            guard: self.guard(),
            filter: self.filter(),
            far,
            opens: true,
        }
    }

    /// Whether frames of the interface's MTU fit the placement.
    fn check_mtu(&self, state: &PortState) -> Result<(), InterfaceError> {
        match &state.interface {
            Some(interface) if self.config.placement.has_guest_ram() => {
                interface.check_direct(interface.frame_limit())
            }
            _ => Ok(()),
        }
    }

    /// Stops everything, leaving rings that another backend can go on with, and calls `stopped` then.
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

    /// Ends the port, and gives its queues back: its VMM is disconnected, and nobody else is served. Its threads end
    /// soon.
    pub(crate) fn remove(self: &Arc<Self>) {
        // First: who is disconnected and comes back finds nobody.
        self.removed.raise();
        self.post(Task::End, |port, state| {
            if let Some(session) = &mut state.session {
                session.forget_registrations();
                session.hang_up();
                // A fault of the guest's is no matter any more.
                let _ = port.end(state, Closed::Removed);
            }
            if let Some(interface) = state.interface.take() {
                interface.close_queues();
            }
            state.over = true;
            // The thread that watches the interface sees that this one has ended.
            port.wakers.retry();
        });
    }

    /// The interface may have changed.
    pub(crate) fn look_again(&self) {
        self.wakers.note_change();
    }

    /// As the log and `status` have it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The interface's queue of a pair, if it has one of its own.
    pub(crate) fn queue_of(&self, pair: usize) -> Option<u32> {
        let queues = self.config.nic.queues()?;
        Some(queues.start_queue + u32::try_from(pair).ok()?)
    }

    /// MAC address told to the guest.
    pub(crate) fn mac(&self) -> [u8; 6] {
        mac_of(&self.config)
    }
}

/// MAC address told to the guest of a port.
pub(crate) fn mac_of(config: &PortConfig) -> [u8; 6] {
    config.mac.unwrap_or_else(|| stable_mac(config))
}

/// A locally administered address that is the same at every start, whatever the other options are: FNV-1a of where the
/// port is.
fn stable_mac(config: &PortConfig) -> [u8; 6] {
    let text = match &config.nic {
        NicConfig::Interface(PortQueues {
            name, start_queue, ..
        }) => format!("{}|{name}|{start_queue}", config.endpoint),
        other => format!("{}|{other}", config.endpoint),
    };
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [_, _, _, a, b, c, d, e] = hash.to_be_bytes();
    // Bit 1 of the first byte: locally administered; bit 0 clear: one station (IEEE 802).
    [0x02, a, b, c, d, e]
}
