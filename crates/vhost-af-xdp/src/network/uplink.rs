//! The lifecycle of a network's uplink: opened, watched, set up again, closed.
//!
//! A new MTU is applied queue by queue, as for a port ([`crate::port`], `link.rs`): each check of the uplink sets up
//! one queue again that does not suit the MTU, while the others carry frames, and the next check follows at once.
//! Guests get a larger MTU when all queues suit it.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use common::binding::L2_BYTES;
use device::counters::PairCounters;
use host::links::Link;
use program::backoff::{RETRY, Retry};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use steer::{TapTo, with_sources};

use super::{Network, NetworkLink, Running, RunningTap, State, keys};
use crate::journal::{JOURNAL, Subject};
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::interface_queue::{Fit, InterfaceQueue};
use crate::nic::lane_facts::LaneFacts;
use crate::nic::mode::Fallback;
use crate::thread;
use dataplane::backend::arrivals::Origin;
use dataplane::fdb::PortNumber;
use dataplane::lane::new_lane::NewLane;
use dataplane::lane::role::Role;
use dataplane::lane::{Lane, Siblings};
use dataplane::uplink::multicast_lane::MulticastLane;
use dataplane::uplink::uplink_lane::UplinkLane;
use model::events::What;

/// How long to wait until all threads have released an interface that is returned.
const GIVING_BACK: Duration = Duration::from_secs(2);
/// How long the network retries to open a queue that another socket uses. While the uplink's last queue is set up
/// again, guests' frames for the uplink wait that long at most, and so do frames for other guests behind them.
const OPENING: Duration = RETRY.saturating_mul(5);
/// Interval of checks whether all threads have released the interface.
const LOOK: Duration = Duration::from_millis(1);

/// Result of a check of the uplink.
struct Looked {
    /// The interfaces of the uplink and the underlay, as far as they are open.
    watched: Vec<Weak<Interface>>,
    /// A queue was set up again for another MTU: there may be more.
    follows: bool,
}

impl Network {
    /// Watches the uplink, if there is one, on a thread of its own, unless one watches it already. The thread calls
    /// `changed` when the uplink's link state or MTU has changed.
    pub(crate) fn watch(self: &Arc<Self>, changed: impl Fn() + Send + 'static) -> io::Result<()> {
        if self.seen().watched {
            return Ok(());
        }
        {
            let mut state = self.state();
            if state.uplink.is_none() || std::mem::replace(&mut state.watched, true) {
                return Ok(());
            }
        }
        let network = Arc::clone(self);
        let body = move || {
            let mut known = network.link();
            loop {
                let Some(Looked { watched, follows }) = network.look() else {
                    if network.is_left() {
                        break;
                    }
                    continue;
                };
                let link = network.link();
                let before = std::mem::replace(&mut known, link);
                if before.up != link.up {
                    let (what, now) = match link.up {
                        true => (What::LinkUp, "up"),
                        false => (What::LinkDown, "down"),
                    };
                    tracing::info!(network = %network.name, "uplink is {now}");
                    JOURNAL.record(Subject::Network(&network.name), what, None);
                }
                if before != link {
                    changed();
                }
                let longest = if follows { Duration::ZERO } else { RETRY };
                network.await_change(&watched, longest);
            }
        };
        thread::start("uplink", body).map(drop)
    }

    /// Requests the program's counters, for `status`; waits until `deadline` at most.
    pub(crate) fn sample(&self, deadline: Instant) {
        let shown = self.shown();
        for lanes in [&shown.uplink, &shown.underlay] {
            if let Some(interface) = lanes.interface.upgrade() {
                let queues = lanes.lanes.iter().filter_map(|lane| lane.queue);
                interface.steering.sample(&interface.link, queues, deadline);
            }
        }
    }

    /// Waits until the next check of the uplink is due, and applies changes of the underlay's tables meanwhile.
    fn await_change(&self, watched: &[Weak<Interface>], longest: Duration) {
        let end = Instant::now() + longest;
        loop {
            let (tables, due) = self.follow_tables();
            // Strong references only while this waits: `give_back` waits for the last one with the state locked.
            let watched: Vec<_> = watched.iter().filter_map(Weak::upgrade).collect();
            let leases = watched.iter().filter_map(|interface| interface.steering.watch());
            let mut fds = vec![PollFd::new(&self.wakers.retry, PollFlags::IN)];
            fds.extend(leases.map(|lease| PollFd::from_borrowed_fd(lease, PollFlags::IN)));
            let others = fds.len();
            fds.extend(tables.iter().map(|tables| PollFd::new(&**tables, PollFlags::IN)));
            let wait = due
                .unwrap_or(end)
                .min(end)
                .saturating_duration_since(Instant::now());
            let _ = poll(&mut fds, Timespec::try_from(wait).ok().as_ref());
            let is_changed = fds[..others].iter().any(|fd| !fd.revents().is_empty());
            if is_changed || Instant::now() >= end {
                break;
            }
        }
        self.wakers.retry.clear();
    }

    /// Makes its thread check the uplink soon.
    pub(crate) fn look_again(&self) {
        self.wakers.note_change();
    }

    /// Stops the uplink for good, and releases its queues.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        state.over = true;
        self.give_back(&mut state);
        self.workers.set_fdb(&self.owner, None);
    }

    /// Checks the interface: it may be gone, back, down, or have another MTU. `None`: no further check is needed.
    fn look(&self) -> Option<Looked> {
        let mut state = self.state();
        let mut follows = false;
        if state.is_over() {
            return None;
        }
        match state
            .interface
            .clone()
            .map(|interface| (interface.look(), interface))
        {
            Some((Ok(link), interface)) if !interface.steering.is_away() => {
                follows = self.adapt(&mut state, &interface, &link);
                self.check_addresses(&mut state, &interface);
                self.sync_unsent(&mut state);
                self.look_at_host(&mut state, &interface);
                self.look_at_underlay(&mut state, &interface);
                self.advertise(&mut state, &interface);
            }
            Some((Ok(_), _)) => {}
            Some((Err(lost), interface)) => {
                drop(interface);
                self.close_interface(&mut state);
                self.note(&mut state, Err(with_sources(lost)));
                self.reopen_uplink(&mut state);
            }
            None => self.reopen_uplink(&mut state),
        }
        let interface = state.interface.clone();
        let underlay = state.underlay.open_interface();
        drop(state);
        self.settle_hints();
        Some(Looked {
            watched: interface.iter().chain(&underlay).map(Arc::downgrade).collect(),
            follows,
        })
    }

    /// Applies changes of the interface, and starts queues that do not run. True if one was set up again for another
    /// MTU: there may be more.
    fn adapt(&self, state: &mut State, interface: &Arc<Interface>, link: &Link) -> bool {
        if link.mtu != interface.mtu() {
            tracing::info!(network = self.name, mtu = link.mtu, "MTU changed");
            state.retry.hurry(Instant::now());
        }
        interface.take_note(link);
        let follows = self.follow_mtu(state, interface);
        let mut told = link_of(interface, link.up);
        if let Some(before) = state.link.filter(|_| follows) {
            told.mtu = told.mtu.min(before.mtu);
        }
        state.link = Some(told);
        let (changes, now) = (interface.steering.changes(), Instant::now());
        // Also while its lane runs: the steward may have made another tap.
        let is_by_tap = interface.is_by_tap();
        let has_tap = !is_by_tap || state.tap.is_some();
        let all_run = has_tap && state.running.iter().all(Option::is_some);
        let is_whole = all_run && !(is_by_tap && state.impaired.is_some());
        if !follows && state.retry.is_due(changes, is_whole, now) && (is_by_tap || !all_run) {
            let started = self.start_lanes(state, interface);
            state.retry.record(started.is_ok(), now);
            let is_refused = started.as_ref().is_err_and(InterfaceError::is_lasting_refusal);
            self.note(state, started);
            if is_refused && is_by_tap && interface.is_mode_chosen {
                // Another mode may be possible.
                self.close_interface(state);
            }
        }
        follows
    }

    /// Applies the interface's MTU to the queues. Those that suit it get the new frame limit while they run. One of the
    /// others is set up again; returns whether there was one.
    fn follow_mtu(&self, state: &mut State, interface: &Arc<Interface>) -> bool {
        let bytes = interface.frame_limit();
        let mut unfit = None;
        for (at, running) in state.running.iter().enumerate() {
            let Some(Running { queue, at: lane, .. }) = running else {
                continue;
            };
            match queue.fit() {
                Fit::Same => {}
                Fit::Limit => {
                    let change = move |lane: &mut dyn Lane, _: &mut dyn Siblings| lane.set_frame_limit(bytes);
                    self.workers.change(*lane, change);
                    if let Err(error) = queue.follow_limit() {
                        tracing::debug!(network = self.name, "frame limit: {}", with_sources(&error));
                    }
                }
                Fit::Replace => unfit = unfit.or(Some(at)),
            }
        }
        let Some(at) = unfit else { return false };
        if let Some(running) = state.running[at].take() {
            if state.running.iter().all(Option::is_none) {
                self.await_uplink(state, Some(Instant::now() + OPENING));
            }
            self.stop_queue(running);
        }
        let started = self.start_queue(state, interface, at);
        self.await_uplink(state, None);
        if let Err(error) = started {
            // It is retried when the other queues are done, and only that attempt is recorded.
            self.note(state, Err(with_sources(&error)));
        }
        true
    }

    /// Until that time, guests' frames for an uplink without a queue wait; `None`: they do not.
    fn await_uplink(&self, state: &mut State, until: Option<Instant>) {
        if std::mem::replace(&mut state.uplink_until, until) != until {
            self.set_fdb(state);
        }
    }

    /// Returns the interface. When this returns others can open its queues, unless it took longer than [`GIVING_BACK`].
    pub(super) fn give_back(&self, state: &mut State) {
        let interfaces = [&state.interface, &state.underlay.interface];
        let interfaces = interfaces.map(|interface| interface.as_ref().map(Arc::downgrade));
        self.close_interface(state);
        // The watching thread and readers of the status may keep it for a moment; the lease ends with the last of them.
        self.wakers.retry();
        let deadline = Instant::now() + GIVING_BACK;
        while interfaces
            .iter()
            .flatten()
            .any(|interface| interface.strong_count() > 0)
        {
            if Instant::now() >= deadline {
                tracing::warn!(
                    network = self.name,
                    "the uplink's queues are still in use, and may stay leased for a while"
                );
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Drops the interface: stops its lanes, and the host's, and closes its queues.
    pub(super) fn close_interface(&self, state: &mut State) {
        self.lose_host(state);
        self.close_underlay(state);
        self.stop_lanes(state);
        state.retry = Retry::default();
        state.named.forget();
        state.link = None;
        if let Some(interface) = state.interface.take() {
            interface.close_queues();
        }
    }

    /// Whether the watcher may end, because there is no uplink.
    fn is_left(&self) -> bool {
        let mut state = self.state();
        state.watched = !state.is_over();
        !state.watched
    }

    fn reopen_uplink(&self, state: &mut State) {
        let now = Instant::now();
        if !state.opening.is_due(self.wakers.changes(), false, now) {
            return;
        }
        let taken_up = self.open_uplink(state);
        // No pause after a missing interface: checking for it costs nothing, and no event reports that it is back.
        if taken_up.as_ref().is_err_and(InterfaceError::is_absent) {
            // The reason in `impaired` is the more specific one.
            if state.impaired.is_some() {
                return;
            }
        } else {
            state.opening.record(taken_up.is_ok(), now);
        }
        if taken_up.is_ok() && state.interface.is_some() {
            tracing::info!(network = self.name, "uplink is back");
        }
        self.note(state, taken_up.map_err(with_sources));
    }

    /// Opens the uplink's interface, and starts its queues.
    pub(super) fn open_uplink(&self, state: &mut State) -> Result<(), InterfaceError> {
        let Some(uplink) = &state.uplink else {
            return Ok(());
        };
        let interface = self.interfaces.open(&uplink.wanted(), uplink.options)?;
        interface.warn_of_losses();
        let is_up = interface.look().is_ok_and(|link| link.up);
        state.link = Some(link_of(&interface, is_up));
        let ports = (0..).map(PortNumber).zip(&state.ports);
        let known = ports.filter_map(|(number, port)| Some(keys(port.as_ref()?, Some(number))));
        interface
            .steering
            .set_stations(&known.flatten().collect::<Vec<_>>())?;
        state.unsent.clear();
        state.learning.forget(&self.news);
        let started = self.start_lanes(state, &interface);
        state.interface = Some(Arc::clone(&interface));
        started?;
        self.look_at_host(state, &interface);
        Ok(())
    }

    /// Starts the queues that do not run yet.
    fn start_lanes(&self, state: &mut State, interface: &Arc<Interface>) -> Result<(), InterfaceError> {
        if state.uplink.is_none() {
            return Ok(());
        }
        if !interface.is_by_tap()
            && state.multicast.is_none()
            && let Some(groups) = interface.steering.ask(|lease| lease.groups().map(Some))?
        {
            let counters = Arc::clone(&self.group_counters);
            let lane = NewLane {
                lane: Box::new(MulticastLane::new(
                    groups,
                    interface.link.partial_checksums,
                    counters,
                )),
                role: Role::Multicast {
                    network: Arc::clone(&self.owner),
                },
                node: interface.link.node,
                on_fault: Box::new(|_| ()),
            };
            state.multicast = Some(self.workers.add(lane, &self.owner));
        }
        (0..state.running.len()).try_for_each(|at| self.start_queue(state, interface, at))?;
        // The tap last: a guest can answer as soon as it gets a frame, and the answer needs the queues.
        match interface.is_by_tap() {
            true => self.start_tap(state, interface),
            false => Ok(()),
        }
    }

    /// Starts lanes for the uplink's tap, if the tap has changed.
    fn start_tap(&self, state: &mut State, interface: &Interface) -> Result<(), InterfaceError> {
        interface.open_tap()?;
        let open = interface.tap_again()?;
        if state.tap.as_ref().is_some_and(|tap| tap.index == open.index) {
            return Ok(());
        }
        self.stop_tap(state);
        let counters = &mut state.tap_counters;
        counters.resize_with(counters.len().max(open.queues.len()), Arc::default);
        let mut lanes = Vec::new();
        let served = open
            .queues
            .into_iter()
            .zip(counters)
            .try_for_each(|(tap, counters)| {
                let tap = (open.name.as_str(), tap, open.segments_udp);
                lanes.push(self.serve_tap(tap, TapTo::Uplink, interface.link.node, Arc::clone(counters))?);
                Ok(())
            });
        state.tap = Some(RunningTap {
            index: open.index,
            lanes,
            facts: Arc::new(LaneFacts::tap()),
        });
        if served.is_err() {
            self.stop_tap(state);
        }
        served
    }

    /// Starts the uplink's queue at an index, if it does not run yet.
    fn start_queue(
        &self,
        state: &mut State,
        interface: &Arc<Interface>,
        at: usize,
    ) -> Result<(), InterfaceError> {
        let State {
            uplink: Some(uplink),
            counters,
            running,
            ..
        } = state
        else {
            return Ok(());
        };
        let mut queues = (uplink.at.start_queue..).zip(&*counters).zip(running);
        if let Some(((number, counters), running)) = queues.nth(at)
            && running.is_none()
        {
            let role = Role::Uplink {
                network: Arc::clone(&self.owner),
                queue: number,
            };
            *running = Some(self.run_queue(interface, number, counters, role)?);
        }
        Ok(())
    }

    /// Opens a queue, and starts its lane.
    pub(super) fn run_queue(
        &self,
        interface: &Arc<Interface>,
        number: u32,
        counters: &Arc<PairCounters>,
        role: Role,
    ) -> Result<Running, InterfaceError> {
        let origin = Origin {
            frame_limit: interface.frame_limit(),
            partial_checksums: interface.link.partial_checksums,
        };
        let queue = InterfaceQueue::new(interface, number);
        queue.open_until(Instant::now() + OPENING)?;
        let nic = queue.lend(counters)?;
        // Any guest may request checksums.
        let mut facts = LaneFacts::new(&nic.umem, nic.umem.len(), nic.backing.clone(), true);
        facts
            .fallbacks
            .extend(nic.no_tap_because.clone().map(Fallback::DaemonSegments));
        if let Err(error) = facts.describe(interface, None, &nic.nic, nic.sends) {
            queue.give_back(nic, counters);
            return Err(InterfaceError::Duplicate(error));
        }
        let lane = NewLane {
            lane: Box::new(UplinkLane::new(nic, origin, Arc::clone(counters))),
            role,
            node: interface.link.node,
            // The lane has no guest that could cause a fault.
            on_fault: Box::new(|_| ()),
        };
        Ok(Running {
            queue,
            at: self.workers.add(lane, &self.owner),
            counters: Arc::clone(counters),
            facts: Arc::new(facts),
        })
    }

    fn stop_lanes(&self, state: &mut State) {
        self.stop_tap(state);
        if let Some(at) = state.multicast.take() {
            drop(self.workers.remove(at));
        }
        for running in state.running.iter_mut().filter_map(Option::take) {
            self.stop_queue(running);
        }
    }

    pub(super) fn stop_queue(&self, running: Running) {
        let Running {
            queue,
            at,
            counters,
            facts,
        } = running;
        drop(facts);
        if let Some(nic) = self.workers.remove(at).and_then(|lane| lane.stop().queue) {
            queue.give_back(nic, &counters);
        }
    }

    fn stop_tap(&self, state: &mut State) {
        for at in state.tap.take().into_iter().flat_map(|tap| tap.lanes) {
            drop(self.workers.remove(at).map(Lane::stop));
        }
    }

    /// Stores the result of the set-up; logs a change.
    pub(super) fn note(&self, state: &mut State, done: Result<(), impl ToString>) {
        let why = done.err().map(|error| error.to_string());
        if self.store_reason(&mut state.impaired, why, ["no uplink", ""]) {
            self.record_impaired(state.impaired.clone());
        }
    }

    /// Stores why something does not work, or `None`. Logs a change: `lost` and the reason, or `back` if it is not empty.
    /// Returns whether the reason has changed.
    pub(super) fn store_reason(
        &self,
        reason: &mut Option<String>,
        why: Option<String>,
        [lost, back]: [&str; 2],
    ) -> bool {
        if *reason == why {
            return false;
        }
        match &why {
            Some(why) => tracing::warn!(network = self.name, "{lost}: {why}"),
            None if back.is_empty() => {}
            None => tracing::info!(network = self.name, "{back}"),
        }
        *reason = why;
        true
    }

    /// Records that the network is impaired, or is not any more.
    pub(super) fn record_impaired(&self, why: Option<String>) {
        let what = match why {
            Some(_) => What::Impaired,
            None => What::Recovered,
        };
        JOURNAL.record(Subject::Network(&self.name), what, why);
    }
}

fn link_of(interface: &Interface, up: bool) -> NetworkLink {
    NetworkLink {
        up,
        mtu: interface.frame_limit().saturating_sub(L2_BYTES),
    }
}
