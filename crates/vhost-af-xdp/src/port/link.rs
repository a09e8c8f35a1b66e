//! How a port follows changes of its interface.
//!
//! A new MTU is applied pair by pair ([`Session::follow_mtu`]): each check sets up one unsuitable queue again, and the
//! next check follows at once. Each queue has the configuration that it was opened with, so there is no other
//! record of the progress. Other work runs between two checks, such as the reset of a device or the end of the daemon;
//! and each check uses the MTU at that time.
//!
//! [`Session::follow_mtu`]: super::session::Session::follow_mtu
//!
//! The session thread makes the checks, and without a session the thread that checks all ports ([`super::watch`]).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use host::links::Link;
use program::backoff::RETRY;
use steer::with_sources;

use super::reasons::Impaired;
use super::ticket_lock::Task;
use super::{Port, PortState};
use crate::config::InterfaceQueues;
use crate::nic::interface::Interface;

/// A port whose lock is held is checked again after this time.
const BUSY: Duration = Duration::from_millis(20);

/// When an interface is checked again, at the latest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    /// Queues are being set up again one by one.
    AtOnce,
    /// Something could not be set up, and is retried then.
    At(Instant),
    /// At the next report about it.
    Told,
}

impl Port {
    /// Requests the program's counters and attachment, for `status`; waits until `deadline` at most.
    pub(crate) fn sample(&self, deadline: Instant) {
        let snapshot = self.published.snapshot();
        let interface = snapshot.and_then(|snapshot| snapshot.interface.upgrade());
        if let (Some(wanted), Some(interface)) = (self.config.wanted(), interface) {
            interface
                .steering
                .sample(&interface.link, wanted.range(), deadline);
        }
    }

    /// Checks the interface, on the port's session thread.
    pub(crate) fn look_now(self: &Arc<Self>) {
        self.looks.take();
        let again = self.ask(Task::Link, |port, state| port.look_and_watch(state));
        self.looks.note(again.flatten());
    }

    /// Checks the interface on the thread that checks all ports, without waiting for the lock: a port with a session is
    /// checked by the session thread, and a port whose lock is held is checked later.
    pub(crate) fn look_if_due(self: &Arc<Self>) {
        if !self.looks.is_due() {
            return;
        }
        if self.in_session.load(Relaxed) {
            return self.looks.hand_over();
        }
        self.looks.forget();
        let Some(first) = self.state.try_ticket() else {
            return self.looks.note(Some(Instant::now() + BUSY));
        };
        let looked = self.lock(first, Task::Link, |port, state| match state.session {
            Some(_) => Err(()),
            None => Ok(port.look_and_watch(state)),
        });
        match looked {
            Some(Ok(again)) => self.looks.note(again),
            Some(Err(())) => self.looks.hand_over(),
            None => {}
        }
    }

    /// Checks the interface, and watches its lease; returns when the next check is due at the latest.
    fn look_and_watch(&self, state: &mut PortState) -> Option<Instant> {
        let again = self.look(state);
        let lease = state.interface.as_ref();
        let lease = lease.and_then(|interface| interface.steering.watch());
        if let Some(lease) = lease {
            self.looks.watch_lease(lease);
        }
        let now = Instant::now();
        match again {
            Again::AtOnce => Some(now),
            Again::At(due) => Some(due),
            // A thread that waits for an answer of the steward may have read the report; then epoll has no event.
            Again::Told => lease.map(|_| now + RETRY),
        }
    }

    /// The uplink of its network changed: applies its state to the lanes, without a pause, and informs the VMM.
    pub(crate) fn network_changed(self: &Arc<Self>) {
        self.post(Task::Link, |port, state| {
            let Some(attachment) = port.attachments(None).into_iter().next() else {
                return;
            };
            if let Some(session) = &state.session {
                session.set_frame_limit(attachment.frame_limit(), &port.workers);
            }
            // Lanes that could not be started may start now.
            port.start_lanes(state);
            if let Some(session) = &state.session {
                session.config_changed();
            }
        });
    }

    /// Checks the interface: it may be gone, back, down, or have another MTU.
    fn look(&self, state: &mut PortState) -> Again {
        let Some(InterfaceQueues { name, .. }) = self.config.nic.queues() else {
            return Again::Told;
        };
        let before = state.link_config(&self.attached);
        let mut follows = false;
        match state
            .interface
            .clone()
            .map(|interface| (interface.look(), interface))
        {
            Some((Ok(link), interface)) => follows = self.adapt(state, &interface, &link),
            Some((Err(lost), interface)) => {
                let reason = with_sources(lost);
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
        if state.link_config(&self.attached) != before
            && let Some(session) = &state.session
        {
            session.config_changed();
        }
        match (follows, &state.impaired) {
            (true, _) => Again::AtOnce,
            // No event reports that a leased interface is back.
            (false, Some(_)) => {
                let now = Instant::now();
                // A check that finds no interface is not counted as an attempt, so this time may have passed.
                let due = state.retry.0.due().filter(|&due| due > now);
                Again::At(due.unwrap_or(now + RETRY))
            }
            (false, None) => Again::Told,
        }
    }

    /// If a retry is due, opens the interface that was gone. An attempt that finds none is not counted.
    fn try_to_take_up(&self, state: &mut PortState, name: &str) {
        let (seen, now) = ((self.looks.changes(), Link::default()), Instant::now());
        if state.retry.0.is_due(seen, false, now) {
            let is_there = self.take_up(state, name);
            if is_there {
                state.retry.0.record(state.impaired.is_none(), now);
            }
        }
    }

    /// Opens the interface, and restarts the lanes with it; false: there is none.
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
                // The present reason is the more specific one.
                if !(is_absent && state.impaired.is_some()) {
                    state.impaired = Some(Impaired::Interface(with_sources(&error)));
                }
                return !is_absent;
            }
        }
        true
    }

    /// Starts lanes without the interface, which is gone: a guest of a network still reaches the other ports.
    fn go_on_without(&self, state: &mut PortState) {
        let attachment = self.attachments(None);
        if let Some(session) = &mut state.session
            && session.start_all(&self.context(&attachment)).is_err()
        {
            session.hang_up();
        }
    }

    /// Applies changes of the present interface. True if a queue was set up again for another MTU: there may be more.
    fn adapt(&self, state: &mut PortState, interface: &Interface, link: &Link) -> bool {
        if interface.steering.is_away() {
            return false;
        }
        let attachment = self.attachments(state.interface.as_ref());
        // Memory may have been registered while the steward was away.
        let mut shortage = None;
        if let Some(session) = &mut state.session {
            if session.go_direct_all(&self.context(&attachment)).is_err() {
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
        // down; they are returned only when it is closed.
        let direct = self.config.options.placement.has_guest_ram();
        interface.settle_hints(&mut self.teller(state));
        if (went_down && direct) || self.check_mtu(state).is_err() {
            self.restart_lanes(state);
            return false;
        }
        let follows = self.follow_mtu(state);
        let (seen, now) = ((interface.steering.changes(), link.clone()), Instant::now());
        if !follows && state.impaired.is_some() && state.retry.0.is_due(seen, false, now) {
            self.start_lanes(state);
            state.retry.0.record(state.impaired.is_none(), now);
        }
        follows
    }

    /// Restarts the lanes if there is another tap; false: the interface was closed, as another mode may be available.
    fn follow_tap(&self, state: &mut PortState, interface: &Interface) -> bool {
        match interface.open_tap() {
            Ok(true) => self.restart_lanes(state),
            Ok(false) => {}
            Err(error) => {
                // After a refusal the lanes' tap does not exist any more.
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

    /// Applies the interface's MTU to lanes; returns whether a queue was set up again for that.
    fn follow_mtu(&self, state: &mut PortState) -> bool {
        let attachment = self.attachments(state.interface.as_ref());
        let Some(session) = &mut state.session else {
            return false;
        };
        let followed = session.follow_mtu(&self.context(&attachment));
        let failed = followed.as_ref().err().map(|error| with_sources(&**error));
        if let Some(reason) = session.take_shortage().or(failed) {
            self.impair(state, reason);
        }
        followed.unwrap_or(true)
    }

    /// Stops the port's lanes, and starts them with the interface as it is now.
    fn restart_lanes(&self, state: &mut PortState) {
        if let Some(session) = &mut state.session {
            session.stop_all(&self.workers);
        }
        self.start_lanes(state);
    }

    /// Starts lanes that should run and do not.
    fn start_lanes(&self, state: &mut PortState) {
        let attachment = self.attachments(state.interface.as_ref());
        let mut reason = self.check_mtu(state).err().map(with_sources);
        if let (None, Some(session)) = (&reason, &mut state.session) {
            let started = session.start_all(&self.context(&attachment));
            reason = session
                .take_shortage()
                .or_else(|| started.err().map(with_sources));
        }
        match reason {
            Some(reason) => self.impair(state, reason),
            None => state.impaired = None,
        }
    }
}
