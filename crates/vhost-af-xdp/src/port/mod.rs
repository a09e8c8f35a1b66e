//! A port: one guest's network device, for as long as the daemon runs.
//!
//! The port outlives connections ([`Session`]) and interfaces: counters go on, and an interface
//! that vanishes and comes back is picked up again. A thread of its own has its state, and does with it what comes by
//! the [mailbox]; `status` looks through a [`Window`]. That thread may wait for the kernel and for the steward:
//! all that waits for it is this port's.

pub(crate) mod far;
pub(crate) mod lane_facts;
pub(crate) mod lanes;
mod link;
mod mailbox;
pub(crate) mod session;
pub(crate) mod shown;
pub(crate) mod visit;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use super::config::{NicConfig, Placement, PortConfig};
use super::seldom::Seldom;
use crate::guard::nudge;
use crate::guard::sigbus;
use crate::nic::error::InterfaceError;
use crate::nic::interface::{Interface, QueueOptions};
use crate::nic::interface_queue::InterfaceQueue;
use crate::nic::interfaces::Interfaces;
use crate::nic::steering::AWAY;
use crate::port::far::{CableEnd, FarSide, NULL_MTU};
use crate::port::lanes::LaneError;
use crate::port::link::Wakers;
use crate::port::mailbox::{Message, Task};
use crate::port::session::{Course, FaultCell, Ground, Session, SessionError};
use crate::port::shown::Window;
use crate::port::visit::Ended;
use crate::switch::worker::Workers;
use crate::vhost_user::alarm::Alarm;
use crate::vhost_user::peer;
use device::config_space::ConfigSpace;
use device::counters::PairCounters;
use device::pair::Fault;
use steward::client::LeaseError;
use steward::links::{Link, LinkError};
use steward::protocol::Reason;

/// Smallest MTU that IPv4 works with, and that VirtIO allows (1.3, 5.1.4.1).
const SMALLEST_MTU: u64 = 68;

/// How a session ended, or why one was refused.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct Closed {
    /// Stable name: `disconnected`, `refused`, `protocol`, or a guest fault's.
    pub(crate) reason: &'static str,
    /// The sentence that was logged.
    pub(crate) detail: String,
    /// Seconds since 1970.
    pub(crate) at: u64,
}

/// What the port's thread has; see the module's head.
#[derive(Default)]
pub(crate) struct PortState {
    pub(crate) session: Option<Session>,
    pub(crate) interface: Option<Arc<Interface>>,
    /// Why the port's queues are not set up although they should be.
    pub(crate) impaired: Option<String>,
    pub(crate) last_closed: Option<Closed>,
    pub(crate) sessions: u64,
    pub(crate) link_down: bool,
    /// Why VMMs come and leave again, as far as that can be told.
    pub(crate) declined: Option<String>,
    /// Sessions in a row that ended where the VMM was told what is offered.
    pub(super) declines: u32,
    /// When the session began.
    pub(super) began: Option<Instant>,
    /// What VMMs can make the port say.
    pub(super) lines: Seldom,
    /// The daemon ends; nothing is set up any more.
    over: bool,
    /// MTU that the queues were set up for.
    mtu: Option<u32>,
    /// What the VMM was told last when it was refused.
    refusal: Option<String>,
    fault: FaultCell,
    /// A VMM made its call eventfd block: none is taken any more.
    barred: bool,
}

impl PortState {
    /// What of the config space may change: whether the link is up, and the MTU.
    fn config_space(&self) -> (bool, Option<u32>) {
        let interface = self.interface.as_ref();
        (
            interface.is_some() && !self.link_down,
            interface.map(|interface| interface.mtu()),
        )
    }
}

/// See the module's head.
pub(crate) struct Port {
    pub(crate) config: PortConfig,
    pub(crate) counters: Vec<Arc<PairCounters>>,
    interfaces: Arc<Interfaces>,
    /// The cable, and which of its ends this is.
    cable: Option<CableEnd>,
    workers: Arc<Workers>,
    /// As the log and `status` have it.
    name: Arc<str>,
    mailbox: Sender<Message>,
    /// See [`Ground::lines`].
    direct_lines: Mutex<Seldom>,
    /// What is seen of the state from outside.
    pub(crate) window: Window,
    /// The VMM's process, 0 without one; told to others, so nothing is published through it.
    pub(super) met: AtomicI32,
    wakers: Wakers,
}

/// A port whose thread does not run yet.
pub(crate) struct Opened {
    port: Arc<Port>,
    state: PortState,
    mailbox: Receiver<Message>,
}

impl Opened {
    /// Opens every queue, with the memory that it will need: a queue that is missing or taken, or a limit of memory
    /// that is too low, is said at the start and not when the guest boots.
    ///
    /// # Errors
    /// What will not work later either, naming the remedy.
    pub(crate) fn open_queues(&self) -> Result<(), LaneError> {
        for far in self.port.far_sides(self.state.interface.as_ref()) {
            far.queue().map_or(Ok(()), InterfaceQueue::open)?;
        }
        Ok(())
    }

    /// Closes queues that guest memory will be coupled with. Limits are of the process and of the user, so this is done
    /// once all ports have opened theirs.
    pub(crate) fn close_queues(&self) {
        if let (Placement::Direct, Some(interface)) = (self.port.config.placement, &self.state.interface) {
            interface.close_queues();
        }
    }

    /// As the log and `status` have it.
    pub(crate) fn name(&self) -> &str {
        &self.port.name
    }

    /// Starts its thread.
    ///
    /// # Errors
    /// No thread is left.
    pub(crate) fn start(self) -> io::Result<Arc<Port>> {
        let Self { port, state, mailbox } = self;
        let own = Arc::clone(&port);
        let body = move || mailbox::work(&own, state, &mailbox);
        std::thread::Builder::new().name("port".to_owned()).spawn(body)?;
        Ok(port)
    }
}

impl Port {
    /// Opens the interface. `cable`: the port's, and which end of it the port is.
    ///
    /// # Errors
    /// What will not work later either, naming the remedy.
    pub(crate) fn open(
        config: PortConfig,
        interfaces: Arc<Interfaces>,
        workers: Arc<Workers>,
        cable: Option<CableEnd>,
    ) -> Result<Opened, LaneError> {
        let (mailbox, messages) = mailbox::mailbox();
        let port = Self {
            name: config.endpoint.to_string().into(),
            counters: (0..config.queues).map(|_| Arc::default()).collect(),
            config,
            interfaces,
            cable,
            workers,
            mailbox,
            direct_lines: Mutex::default(),
            window: Window::default(),
            met: AtomicI32::new(0),
            wakers: Wakers::new().map_err(LaneError::Duplicate)?,
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

    fn open_interface(&self) -> Result<Option<Arc<Interface>>, InterfaceError> {
        let (Some(wanted), Some(options)) = (self.config.wanted(), QueueOptions::of(&self.config)) else {
            return Ok(None);
        };
        let interface = self.interfaces.open(&wanted, options)?;
        if self.config.placement == Placement::Direct {
            interface.check_direct(interface.frame_limit())?;
        }
        Ok(Some(interface))
    }

    fn far_sides(&self, interface: Option<&Arc<Interface>>) -> Vec<FarSide> {
        let pairs = u32::from(self.config.queues);
        match &self.config.nic {
            NicConfig::Cable { .. } => (0..pairs).map(|_| FarSide::Cable).collect(),
            NicConfig::Null { frame_bytes } => (0..pairs)
                .map(|_| FarSide::Null {
                    frame_bytes: *frame_bytes,
                })
                .collect(),
            NicConfig::Interface { start_queue, .. } => interface
                .map(|interface| {
                    let queue = |pair| FarSide::Queue(InterfaceQueue::new(interface, start_queue + pair));
                    (0..pairs).map(queue).collect()
                })
                .unwrap_or_default(),
        }
    }

    /// Runs `act` on the session with what it needs of the port.
    ///
    /// # Errors
    /// What `act` returns; kept for the closing message. [`SessionError::Closed`] without session.
    pub(crate) fn with_session<R: Send + 'static>(
        self: &Arc<Self>,
        act: impl FnOnce(&mut Session, &Ground<'_>) -> Result<R, SessionError> + Send + 'static,
    ) -> Result<R, SessionError> {
        let done = self.ask(Task::Request, move |port, state| port.act(state, act));
        done.unwrap_or(Err(SessionError::Closed))
    }

    fn act<R>(
        &self,
        state: &mut PortState,
        act: impl FnOnce(&mut Session, &Ground<'_>) -> Result<R, SessionError>,
    ) -> Result<R, SessionError> {
        // What cannot be opened while the steward is away is opened when it is back; see `look`.
        let away = state
            .interface
            .as_ref()
            .is_some_and(|interface| interface.is_away());
        // Nor what the interface's MTU does not let be opened; see `restart_lanes`.
        let unfit = self.check_mtu(state).err();
        let far = self.far_sides(state.interface.as_ref());
        let ground = Ground {
            opens: !away && unfit.is_none(),
            ..self.ground(&far)
        };
        let session = state.session.as_mut().ok_or(SessionError::Closed)?;
        let result = act(session, &ground);
        if session.lacks_lanes() {
            let unfit = unfit.map(|error| with_sources(&error));
            if let Some(why) = away.then(|| AWAY.to_owned()).or(unfit) {
                state.impaired.get_or_insert(why);
            }
        }
        if let Some(shortage) = session.take_shortage() {
            self.impair(state, shortage);
            self.wakers.retry();
        }
        if let Err(error) = &result {
            state.refusal = Some(with_sources(error));
        }
        result
    }

    /// Queues cannot be set up; said when the reason is another than before.
    fn impair(&self, state: &mut PortState, reason: String) {
        if state.impaired.as_ref() != Some(&reason)
            && let Some(left_out) = state.lines.may()
        {
            tracing::warn!(port = %self.config.endpoint, "queues cannot be set up: {reason}{left_out}");
        }
        state.impaired = Some(reason);
    }

    fn ground<'a>(&'a self, far: &'a [FarSide]) -> Ground<'a> {
        Ground {
            placement: self.config.placement,
            workers: &self.workers,
            name: &self.name,
            lines: &self.direct_lines,
            counters: &self.counters,
            far,
            opens: true,
            cable: self.cable.as_ref(),
        }
    }

    /// A VMM connected; whether it is taken. None is any more, once one made its call eventfd block.
    pub(crate) fn begin_session(self: &Arc<Self>, connection: UnixStream, alarm: Alarm) -> bool {
        let begun = self.ask(Task::Connect, |port, state| {
            if !state.barred {
                port.begin(state, connection, alarm);
            }
            !state.barred
        });
        begun == Some(true)
    }

    fn begin(self: &Arc<Self>, state: &mut PortState, connection: UnixStream, alarm: Alarm) {
        let port = Arc::downgrade(self);
        let registered = move |pair| {
            if let Some(port) = port.upgrade() {
                port.post(Task::Request, move |port, state| port.go_direct(state, pair));
            }
        };
        state.fault = FaultCell::default();
        state.refusal = None;
        state.sessions += 1;
        state.began = Some(Instant::now());
        if let Some(left_out) = state.lines.may() {
            tracing::info!(port = %self.config.endpoint, "a VMM connected{left_out}");
        }
        self.met
            .store(peer::process(connection.as_fd()).unwrap_or(0), Relaxed);
        self.window.note_turned_away(None);
        state.session = Some(Session::new(
            (connection, alarm),
            &self.config,
            Arc::clone(&state.fault),
            Arc::new(registered),
        ));
    }

    /// Memory of a pair is registered.
    fn go_direct(&self, state: &mut PortState, pair: usize) {
        let done = self.act(state, |session, ground| session.go_direct(pair, ground));
        if done.is_err()
            && let Some(session) = &state.session
        {
            session.hang_up();
        }
    }

    /// The connection is over, for the reason that a guest's fault, a refusal or `detail` tell.
    pub(crate) fn end_session(self: &Arc<Self>, disconnected: bool, detail: String) -> Ended {
        let ended = self.ask(Task::Disconnect, move |port, state| {
            port.end(state, disconnected, detail)
        });
        // A port that has ended has no more to say.
        let (ended, errors) = ended.unwrap_or((Ended::Wrong, Vec::new()));
        // Neither by the port's thread nor by a worker: each may take a while, whatever flag we set.
        for error in errors {
            let _ = nudge::write(&error, &self.workers.watcher);
        }
        ended
    }

    /// The second: error eventfds by which the VMM is to be told.
    fn end(&self, state: &mut PortState, disconnected: bool, detail: String) -> (Ended, Vec<OwnedFd>) {
        let (mut lost_memory, mut course, mut errors) = (false, Course::default(), Vec::new());
        if let Some(mut session) = state.session.take() {
            session.stop_all(&self.workers);
            (lost_memory, course) = (session.lost_memory(), session.course());
            errors = session.take_errors();
        }
        self.met.store(0, Relaxed);
        let fault = state.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        if fault.is_none() {
            errors.clear();
        }
        state.barred |= matches!(fault, Some(Fault::CallBlocks));
        let (reason, detail) = match (fault, state.refusal.take()) {
            // What a worker read afterwards were zeros, and whatever it said of them is not the cause.
            _ if lost_memory => ("memory-truncated", sigbus::TRUNCATED.to_owned()),
            (Some(fault), _) => (fault.name(), fault.to_string()),
            (None, Some(refusal)) => ("refused", refusal),
            (None, None) if disconnected => ("disconnected", "the VMM disconnected".to_owned()),
            (None, None) => ("protocol", detail),
        };
        let at = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |now| now.as_secs());
        let wrong = reason != "disconnected";
        match state.lines.may() {
            Some(left_out) if wrong => {
                tracing::warn!(port = %self.config.endpoint, reason, "port closed: {detail}{left_out}");
            }
            Some(left_out) => tracing::info!(port = %self.config.endpoint, "the VMM disconnected{left_out}"),
            None => {}
        }
        state.last_closed = Some(Closed { reason, detail, at });
        self.note_declined(state, course, wrong);
        let ended = match (wrong, course.ran) {
            (true, _) => Ended::Wrong,
            (false, false) => Ended::Idle,
            (false, true) => Ended::Served,
        };
        (ended, errors)
    }

    /// Looks at the interface again: it may be gone, back, down, or have another MTU. True if the
    /// port's queues could not be set up, so that it is worth to look again soon.
    fn look(&self, state: &mut PortState) -> bool {
        let NicConfig::Interface { name, .. } = &self.config.nic else {
            return false;
        };
        let told = state.config_space();
        match state
            .interface
            .clone()
            .map(|interface| (interface.look(), interface))
        {
            Some((Ok(link), interface)) => self.adapt(state, &interface, &link),
            Some((Err(lost), interface)) => {
                let reason = with_sources(&lost);
                tracing::warn!(interface = name, port = %self.config.endpoint, "{reason}");
                if let Some(session) = &mut state.session {
                    session.stop_all(&self.workers);
                }
                state.interface = None;
                state.impaired = Some(reason);
                interface.close_queues();
                drop(interface);
                self.take_up(state, name);
            }
            None => self.take_up(state, name),
        }
        if state.config_space() != told
            && let Some(session) = &state.session
        {
            session.config_changed();
        }
        // Nobody tells when a leased interface is back.
        state.impaired.is_some()
    }

    /// The interface was gone; goes on if one of its name is there again.
    fn take_up(&self, state: &mut PortState, name: &str) {
        match self.open_interface() {
            Ok(interface) => {
                tracing::info!(interface = name, port = %self.config.endpoint, "interface is back");
                if let Some(Ok(link)) = interface.as_ref().map(|interface| interface.look()) {
                    state.link_down = !link.up;
                    state.mtu = Some(link.mtu);
                }
                state.interface = interface;
                self.restart_lanes(state);
            }
            // Known already, and better.
            Err(InterfaceError::Lease(LeaseError::Refused(refusal)) | InterfaceError::Refused(refusal))
                if refusal.reason == Reason::NoInterface && state.impaired.is_some() => {}
            Err(InterfaceError::Link(LinkError::Unknown(_))) if state.impaired.is_some() => {}
            Err(error) => state.impaired = Some(with_sources(&error)),
        }
    }

    /// The interface is there; takes note of what changed on it.
    fn adapt(&self, state: &mut PortState, interface: &Interface, link: &Link) {
        if interface.is_away() {
            return;
        }
        let far = self.far_sides(state.interface.as_ref());
        // Memory that was registered while the steward was away.
        let mut shortage = None;
        if let Some(session) = &mut state.session {
            if session.go_direct_all(&self.ground(&far)).is_err() {
                session.hang_up();
            }
            shortage = session.take_shortage();
        }
        if let Some(shortage) = shortage {
            self.impair(state, shortage);
        }
        let went_down = !link.up && !state.link_down;
        if link.up == state.link_down {
            state.link_down = !link.up;
            let now = if link.up { "up" } else { "down" };
            tracing::info!(interface = link.name, port = %self.config.endpoint, "interface is {now}");
        }
        interface.take_note(link);
        let other_mtu = state
            .mtu
            .replace(link.mtu)
            .is_some_and(|before| before != link.mtu);
        if other_mtu {
            tracing::info!(
                interface = link.name,
                mtu = link.mtu,
                "MTU changed, queues are set up anew"
            );
        }
        // In direct placement the guest's own buffers wait in the socket of an interface that is
        // down; only closing it gives them back.
        let direct = self.config.placement == Placement::Direct;
        if other_mtu || (went_down && direct) {
            self.restart_lanes(state);
        } else if state.impaired.is_some() {
            self.start_lanes(state);
        }
    }

    /// Stops the port's lanes and starts them on what the interface is now.
    fn restart_lanes(&self, state: &mut PortState) {
        if let Some(session) = &mut state.session {
            session.stop_all(&self.workers);
        }
        self.start_lanes(state);
    }

    /// Starts lanes that do not run and should.
    fn start_lanes(&self, state: &mut PortState) {
        let far = self.far_sides(state.interface.as_ref());
        let mut reason = self.check_mtu(state).err().map(|error| with_sources(&error));
        if let (None, Some(session)) = (&reason, &mut state.session) {
            let started = session.start_all(&self.ground(&far));
            reason = session
                .take_shortage()
                .or_else(|| started.err().map(|error| with_sources(&error)));
        }
        match reason {
            Some(reason) => self.impair(state, reason),
            None => state.impaired = None,
        }
    }

    /// Whether frames of the interface's MTU fit the placement.
    fn check_mtu(&self, state: &PortState) -> Result<(), InterfaceError> {
        match &state.interface {
            Some(interface) if self.config.placement == Placement::Direct => {
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

    /// MAC address told to the guest.
    pub(crate) fn mac(&self) -> [u8; 6] {
        self.config.mac.unwrap_or_else(|| stable_mac(&self.config))
    }

    /// What a driver may read.
    pub(crate) fn config_space(self: &Arc<Self>) -> ConfigSpace {
        let told = self.ask(Task::Request, |port, state| {
            let (has_link, mtu) = state.config_space();
            let link_up = has_link || !matches!(port.config.nic, NicConfig::Interface { .. });
            (link_up, mtu.unwrap_or(NULL_MTU))
        });
        let (link_up, mtu) = told.unwrap_or((false, NULL_MTU));
        ConfigSpace {
            mac: self.mac(),
            link_up,
            max_pairs: self.config.queues,
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
        }
    }

    /// NET_SET_MTU: whether the guest may be told an MTU of so many bytes.
    ///
    /// # Errors
    /// [`SessionError::Mtu`].
    pub(crate) fn check_guest_mtu(self: &Arc<Self>, mtu: u64) -> Result<(), SessionError> {
        let limit = self.config_space().mtu;
        if (SMALLEST_MTU..=limit.into()).contains(&mtu) {
            return Ok(());
        }
        Err(SessionError::Mtu { mtu, limit })
    }
}

/// An error and what caused it, in one line.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// A locally administered address that is the same at every start, whatever the other options are: FNV-1a of where the port is.
fn stable_mac(config: &PortConfig) -> [u8; 6] {
    let text = match &config.nic {
        NicConfig::Interface {
            name, start_queue, ..
        } => format!("{}|{name}|{start_queue}", config.endpoint),
        other => format!("{}|{other}", config.endpoint),
    };
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [_, _, _, a, b, c, d, e] = hash.to_be_bytes();
    // Bit 1 of the first byte: locally administered; bit 0 clear: one station (IEEE 802).
    [0x02, a, b, c, d, e]
}
