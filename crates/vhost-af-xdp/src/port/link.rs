//! A port's interface: how it is followed, and the thread that watches it.
//!
//! Another MTU is followed pair by pair ([`Session::follow_mtu`]): each look sets up one queue anew that does not do
//! for it, and another look follows at once. What a queue was opened for is kept with the queue, so there is no other
//! note of how far that is. Between two looks comes whatever else is to be done: a guest that resets its device, the
//! end of the daemon, an interface that is gone; and each look goes by the MTU that is there then.
//!
//! [`Session::follow_mtu`]: super::session::Session::follow_mtu
//!
//! That thread tells the port's thread when to look at the interface, and again while queues could not be set up. It
//! also asks what the XDP program counted, for `status`, which asks nobody itself: a steward may take its time, or be
//! stopped.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use steer::with_sources;
use steward::backoff::RETRY;
use steward::links::Link;

use super::mailbox::Task;
use super::reasons::Impaired;
use super::{Port, PortState};
use crate::config::PortQueues;
use crate::nic::interface::Interface;

/// How long a steward is asked for what the program counted.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);

/// When an interface is looked at again, at the latest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    /// Queues are being set up anew one by one.
    AtOnce,
    /// Something could not be set up, and is tried again then.
    At(Instant),
    /// When something is told of it.
    Told,
}

impl Port {
    /// Asks for what the program counted and how it is attached; the receiver's end tells that it is known.
    pub(crate) fn ask_for_sample(&self) -> Option<Receiver<()>> {
        self.config.wanted()?;
        Some(self.wakers.ask_for_sample())
    }

    /// Watches the interface on a thread of its own; what rtnetlink tells comes by [`Port::look_again`].
    pub(crate) fn watch_link(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let port = Arc::clone(self);
        let body = move || {
            loop {
                let Some(again) = port.ask(Task::Link, |port, state| port.look(state)) else {
                    return;
                };
                let watched = port.watched();
                let longest = match again {
                    Again::AtOnce => Some(Duration::ZERO),
                    Again::At(due) => Some(due.saturating_duration_since(Instant::now())),
                    // What a steward tells while another thread waits for its answer, that thread reads.
                    Again::Told => watched.as_ref().map(|_| RETRY),
                };
                port.await_change(watched.as_deref(), longest);
            }
        };
        std::thread::Builder::new().name("link".to_owned()).spawn(body)
    }

    /// The uplink of its network changed: lanes go by what it is now, without a pause, and the VMM is told.
    pub(crate) fn network_changed(self: &Arc<Self>) {
        self.post(Task::Link, |port, state| {
            let Some(far) = port.far_sides(None).into_iter().next() else {
                return;
            };
            if let Some(session) = &state.session {
                session.set_frame_limit(far.frame_limit(), &port.workers);
            }
            // Those that do not fit, and those that did not.
            port.start_lanes(state);
            if let Some(session) = &state.session {
                session.config_changed();
            }
        });
    }

    /// Waits until it is time to look, and serves those who want samples meanwhile.
    fn await_change(&self, watched: Option<&Interface>, longest: Option<Duration>) {
        let deadline = longest.map(|longest| Instant::now() + longest);
        let lease = watched.and_then(|interface| interface.steering.watch());
        loop {
            let mut fds = vec![
                PollFd::new(&self.wakers.sample, PollFlags::IN),
                PollFd::new(&self.wakers.retry, PollFlags::IN),
            ];
            fds.extend(lease.map(|lease| PollFd::from_borrowed_fd(lease, PollFlags::IN)));
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let ready = poll(&mut fds, left.as_ref());
            let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let (sample, look) = (is_ready(&fds[0]), fds[1..].iter().any(is_ready));
            drop(fds);
            if sample {
                self.wakers.sample.clear();
                self.take_sample();
            }
            if look || ready == Ok(0) {
                self.wakers.retry.clear();
                return;
            }
        }
    }

    /// Asks about the program, if somebody wants to know.
    fn take_sample(&self) {
        let asked = self.wakers.take_asked();
        if let (Some(_), Some(wanted), Some(interface)) = (&asked, self.config.wanted(), self.interface()) {
            let deadline = Instant::now() + SAMPLE_TIMEOUT;
            interface
                .steering
                .sample(&interface.link, wanted.range(), deadline);
        }
    }

    /// The interface, if there is more to watch of it than rtnetlink tells.
    fn watched(&self) -> Option<Arc<Interface>> {
        self.interface()
            .filter(|interface| interface.steering.watch().is_some())
    }

    /// The interface as it was shown last.
    fn interface(&self) -> Option<Arc<Interface>> {
        self.window.shown()?.interface.as_ref()?.itself.upgrade()
    }

    /// Looks at the interface again: it may be gone, back, down, or have another MTU.
    fn look(&self, state: &mut PortState) -> Again {
        let Some(PortQueues { name, .. }) = self.config.nic.queues() else {
            return Again::Told;
        };
        let before = state.link_config(&self.joined);
        let mut follows = false;
        match state
            .interface
            .clone()
            .map(|interface| (interface.look(), interface))
        {
            Some((Ok(link), interface)) => follows = self.adapt(state, &interface, &link),
            Some((Err(lost), interface)) => {
                let reason = with_sources(&lost);
                tracing::warn!(interface = name, port = %self.config.name, "{reason}");
                if let Some(session) = &mut state.session {
                    session.stop_all(&self.workers);
                }
                state.interface = None;
                state.impaired = Some(Impaired::Interface(reason));
                interface.close_queues();
                drop(interface);
                self.try_to_take_up(state, name);
                if state.interface.is_none() {
                    self.go_on_without(state);
                }
            }
            None => self.try_to_take_up(state, name),
        }
        if state.link_config(&self.joined) != before
            && let Some(session) = &state.session
        {
            session.config_changed();
        }
        match (follows, &state.impaired) {
            (true, _) => Again::AtOnce,
            // Nobody tells when a leased interface is back.
            (false, Some(_)) => {
                let now = Instant::now();
                // A look that finds no interface is not counted as an attempt, so this time may have passed.
                let due = state.retry.0.due().filter(|&due| due > now);
                Again::At(due.unwrap_or(now + RETRY))
            }
            (false, None) => Again::Told,
        }
    }

    /// The interface was gone; goes on if one of its name is there again. To look whether one is costs nothing.
    fn try_to_take_up(&self, state: &mut PortState, name: &str) {
        let (seen, now) = ((self.wakers.changes(), Link::default()), Instant::now());
        if state.retry.0.is_due(seen, false, now) {
            let is_there = self.take_up(state, name);
            if is_there {
                state.retry.0.note(state.impaired.is_none(), now);
            }
        }
    }

    /// Whether there was an interface to try it with.
    fn take_up(&self, state: &mut PortState, name: &str) -> bool {
        match self.open_interface() {
            Ok(interface) => {
                tracing::info!(interface = name, port = %self.config.name, "interface is back");
                if let Some(Ok(link)) = interface.as_ref().map(|interface| interface.look()) {
                    state.link_down = !link.up;
                }
                state.interface = interface;
                self.restart_lanes(state);
            }
            Err(error) => {
                let is_absent = error.is_absent();
                // Why it is not there is known already, and better.
                if !(is_absent && state.impaired.is_some()) {
                    state.impaired = Some(Impaired::Interface(with_sources(&error)));
                }
                return !is_absent;
            }
        }
        true
    }

    /// The interface is gone; a guest of a network reaches the other ports still.
    fn go_on_without(&self, state: &mut PortState) {
        let far = self.far_sides(None);
        if let Some(session) = &mut state.session
            && session.start_all(&self.context(&far)).is_err()
        {
            session.hang_up();
        }
    }

    /// The interface is there; takes note of what changed on it. True if a queue was set up anew for another MTU: there
    /// may be more.
    fn adapt(&self, state: &mut PortState, interface: &Interface, link: &Link) -> bool {
        if interface.steering.is_away() {
            return false;
        }
        let far = self.far_sides(state.interface.as_ref());
        // Memory that was registered while the steward was away.
        let mut shortage = None;
        if let Some(session) = &mut state.session {
            if session.go_direct_all(&self.context(&far)).is_err() {
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
            tracing::info!(interface = link.name, port = %self.config.name, "interface is {now}");
        }
        if link.mtu != interface.mtu() {
            tracing::info!(interface = link.name, mtu = link.mtu, "MTU changed");
        }
        interface.take_note(link);
        if interface.is_by_tap() && !self.follow_tap(state, interface) {
            return false;
        }
        // In direct placement the guest's own buffers wait in the socket of an interface that is
        // down; only closing it gives them back.
        let direct = self.config.placement.has_guest_ram();
        interface.settle_hints(&mut self.teller(state));
        if (went_down && direct) || self.check_mtu(state).is_err() {
            self.restart_lanes(state);
            return false;
        }
        let follows = self.follow_mtu(state);
        let (seen, now) = ((interface.steering.changes(), link.clone()), Instant::now());
        if !follows && state.impaired.is_some() && state.retry.0.is_due(seen, false, now) {
            self.start_lanes(state);
            state.retry.0.note(state.impaired.is_none(), now);
        }
        follows
    }

    /// Lets lanes go on with the tap that there is now; false: the interface is given up, as another mode may be had.
    fn follow_tap(&self, state: &mut PortState, interface: &Interface) -> bool {
        match interface.open_tap() {
            Ok(true) => self.restart_lanes(state),
            Ok(false) => {}
            Err(error) => {
                // The tap that lanes have is gone then.
                if let (true, Some(session)) = (error.is_refusal(), &mut state.session) {
                    session.stop_all(&self.workers);
                }
                self.impair(state, with_sources(&error));
                if interface.is_mode_chosen && error.is_lasting_refusal() {
                    interface.close_queues();
                    state.interface = None;
                    return false;
                }
            }
        }
        true
    }

    /// Lets lanes go on with the interface's MTU as it is now; whether a queue was set up anew for that.
    fn follow_mtu(&self, state: &mut PortState) -> bool {
        let far = self.far_sides(state.interface.as_ref());
        let Some(session) = &mut state.session else {
            return false;
        };
        let followed = session.follow_mtu(&self.context(&far));
        let failed = followed.as_ref().err().map(|error| with_sources(error));
        if let Some(reason) = session.take_shortage().or(failed) {
            self.impair(state, reason);
        }
        followed.unwrap_or(true)
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
            let started = session.start_all(&self.context(&far));
            reason = session
                .take_shortage()
                .or_else(|| started.err().map(|error| with_sources(&error)));
        }
        match reason {
            Some(reason) => self.impair(state, reason),
            None => state.impaired = None,
        }
    }
}
