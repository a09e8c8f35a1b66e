//! A port's sessions: their start, VMMs' requests, their end.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use device::config_space::ConfigSpace;
use device::pair::Fault;
use program::peer;
use steer::with_sources;

use super::attachment::NULL_MTU;
use super::reasons::{Closed, Ended, Impaired};
use super::session::{FaultCell, PortContext, Reached, Session, VmmConnection, WrongMtu};
use super::ticket_lock::Task;
use super::{LinkConfig, Port, PortState};
use crate::config::NicConfig;
use crate::supervision::interrupt;
use common::lock::Locked;

/// Smallest MTU that IPv4 works with, and that VirtIO allows (1.3, 5.1.4.1).
const SMALLEST_MTU: u64 = 68;

/// The error of a request without a session.
const CLOSED: &str = "the connection is closed already";

/// What the end of a session leaves to do.
pub(super) struct SessionEnd {
    ended: Ended,
    /// Error eventfds to write to: they report the guest's fault to the VMM.
    errors: Vec<OwnedFd>,
}

impl Port {
    /// Starts the session of a VMM that connected; returns whether it is accepted. Once a VMM has made its call eventfd
    /// block, the port accepts none any more.
    pub(crate) fn begin_session(self: &Arc<Self>, connection: VmmConnection) -> bool {
        let begun = self.ask(Task::Connect, |port, state| {
            if !state.barred {
                port.begin(state, connection);
            }
            !state.barred
        });
        begun == Some(true)
    }

    fn begin(self: &Arc<Self>, state: &mut PortState, connection: VmmConnection) {
        let port = Arc::downgrade(self);
        let registered = move |pair| {
            if let Some(port) = port.upgrade() {
                let _ = port.ask(Task::Request, move |port, state| port.go_direct(state, pair));
            }
        };
        state.fault = FaultCell::default();
        state.refusal = None;
        state.sessions += 1;
        state.began = Some(Instant::now());
        if state.declined.is_none()
            && let Some(left_out) = self.log_allowed()
        {
            tracing::info!(port = %self.config.name, "a VMM connected{left_out}");
        }
        self.vmm_pid
            .store(peer::process(connection.stream.as_fd()).unwrap_or(0), Relaxed);
        self.published.set_turned_away(None);
        self.losses.locked().begin(&self.counters);
        state.session = Some(Session::new(
            connection,
            &self.config,
            Arc::clone(&state.fault),
            Arc::new(registered),
        ));
        self.in_session.store(true, Relaxed);
    }

    /// Logs the kinds of lost frames that were not logged in this session yet.
    pub(crate) fn log_losses(&self) {
        self.losses.locked().log(&self.config.name, &self.counters);
    }

    /// The memory of a pair was registered: its direct lane replaces the one that copies.
    fn go_direct(&self, state: &mut PortState, pair: usize) {
        let done = self.act(state, |session, context| session.go_direct(pair, context));
        if done.is_err()
            && let Some(session) = &state.session
        {
            session.hang_up();
        }
    }

    /// Ends the session, because of a guest's fault or a refused request if there was one, otherwise for the reason
    /// `seen`.
    pub(crate) fn end_session(self: &Arc<Self>, seen: Closed) -> Ended {
        let ended = self.ask(Task::Disconnect, move |port, state| port.end(state, seen));
        // A port that has ended reports nothing.
        let SessionEnd { ended, errors } = ended.unwrap_or(SessionEnd {
            ended: Ended::Wrong,
            errors: Vec::new(),
        });
        // Neither under the lock nor on a worker: each write may block, whatever flags the descriptor has.
        for error in errors {
            let _ = interrupt::write(&error, &self.workers.watcher);
        }
        // Without a session the thread that checks all ports also checks this one.
        self.looks.retry();
        ended
    }

    pub(super) fn end(&self, state: &mut PortState, seen: Closed) -> SessionEnd {
        let (mut lost_memory, mut reached, mut errors) = (false, Reached::default(), Vec::new());
        if let Some(mut session) = state.session.take() {
            session.stop_all(&self.workers);
            (lost_memory, reached) = (session.lost_memory(), session.reached);
            errors = session.device.take_errors();
        }
        self.in_session.store(false, Relaxed);
        self.log_losses();
        self.vmm_pid.store(0, Relaxed);
        let fault = state.fault.locked().take();
        if fault.is_none() {
            errors.clear();
        }
        state.barred |= matches!(fault, Some(Fault::CallBlocks));
        let closed = match (fault, state.refusal.take()) {
            // A worker read zeros afterwards, so a fault that it found in them is not the cause.
            _ if lost_memory => Closed::MemoryTruncated,
            (Some(fault), _) => Closed::Guest(fault),
            (None, Some(refusal)) => Closed::Refused(refusal),
            (None, None) => seen,
        };
        let wrong = !matches!(closed, Closed::Disconnected | Closed::Removed);
        // The log already says why such VMMs connect and leave.
        let is_known = !wrong && state.declined.is_some();
        match (!is_known).then(|| self.log_allowed()).flatten() {
            Some(left_out) if wrong => {
                let reason = closed.name();
                tracing::warn!(port = %self.config.name, reason, "port closed: {closed}{left_out}");
            }
            Some(left_out) => tracing::info!(port = %self.config.name, "{closed}{left_out}"),
            None => {}
        }
        state.last_closed = Some(closed);
        self.note_declined(state, reached, wrong);
        let ended = match (wrong, reached.ran) {
            (true, _) => Ended::Wrong,
            (false, false) if state.declined.is_some() => Ended::Declined,
            (false, false) => Ended::Idle,
            (false, true) => Ended::Served,
        };
        SessionEnd { ended, errors }
    }

    /// Runs `act` on the session with what it needs of the port.
    /// Errors: what `act` returns; kept for the closing message; or there is no session.
    pub(crate) fn with_session<R: Send + 'static>(
        self: &Arc<Self>,
        act: impl FnOnce(&mut Session, &PortContext<'_>) -> anyhow::Result<R> + Send + 'static,
    ) -> anyhow::Result<R> {
        let done = self.ask(Task::Request, move |port, state| port.act(state, act));
        done.unwrap_or_else(|| bail!(CLOSED))
    }

    fn act<R>(
        &self,
        state: &mut PortState,
        act: impl FnOnce(&mut Session, &PortContext<'_>) -> anyhow::Result<R>,
    ) -> anyhow::Result<R> {
        // Queues that cannot be opened while the steward is away are opened when it is back; see `look`.
        let away = state
            .interface
            .as_ref()
            .is_some_and(|interface| interface.steering.is_away());
        // Nor are queues opened that the interface's MTU does not allow; see `restart_lanes`.
        let unfit = self.check_mtu(state).err();
        let attachment = self.attachments(state.interface.as_ref());
        let context = PortContext {
            opens: !away && unfit.is_none(),
            ..self.context(&attachment)
        };
        let session = state.session.as_mut().context(CLOSED)?;
        let result = act(session, &context).and_then(|done| session.settle(&context).map(|()| done));
        if session.lacks_lanes() {
            let unfit = unfit.map(|error| Impaired::Queues(with_sources(&error)));
            if let Some(why) = away.then_some(Impaired::StewardAway).or(unfit) {
                state.impaired.get_or_insert(why);
            }
        }
        if let Some(shortage) = session.take_shortage() {
            self.impair(state, shortage);
            self.looks.retry();
        }
        if let Err(error) = &result {
            state.refusal = Some(with_sources(&**error));
        }
        result
    }

    /// The device's config space.
    pub(crate) fn config_space(self: &Arc<Self>) -> ConfigSpace {
        let link = self.ask(Task::Request, |port, state| {
            let link = state.link_config(&port.attached);
            let up = link.up || matches!(port.config.nic, NicConfig::Null { .. } | NicConfig::Cable { .. });
            LinkConfig { up, ..link }
        });
        let link = link.unwrap_or_default();
        ConfigSpace {
            mac: self.mac(),
            link_up: link.up,
            max_pairs: self.config.queues,
            mtu: u16::try_from(link.mtu.unwrap_or(NULL_MTU)).unwrap_or(u16::MAX),
            // The VMM sets the announce bit itself; RSS and hash reports are not offered.
            announce: false,
            hashing: None,
        }
    }

    /// VHOST_USER_NET_SET_MTU: checks the guest's MTU, in bytes.
    pub(crate) fn check_guest_mtu(self: &Arc<Self>, mtu: u64) -> anyhow::Result<()> {
        let limit = self.config_space().mtu;
        ensure!(
            (SMALLEST_MTU..=limit.into()).contains(&mtu),
            WrongMtu { mtu, limit }
        );
        Ok(())
    }
}
