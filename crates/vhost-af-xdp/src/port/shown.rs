//! What is seen of a port from outside, without its lock.
//!
//! Who holds a port's lock may wait: for a queue that is still busy, for the steward, for a VMM's memory to be entered.
//! `status` must not wait with it. So each holder, before it lets go ([`Held`]), leaves in the port's [`Window`] what it
//! made of the state, and since when it holds the lock; a look through the window takes no lock but the window's own,
//! under which nothing waits.
//!
//! What a look finds may be as old as the holder is. It keeps nothing alive for longer than the look: a lane's socket
//! and an interface's lease are weakly referred to, since their end is what frees a queue for its next holder.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use steer::Mode;
use steward::protocol::Steered;

use super::lanes::{LaneFacts, NULL_MTU};
use crate::nic::interface::Interface;
use crate::port::{Closed, PortState};

/// A lock that is held for longer is worth to be told.
const LONG: Duration = Duration::from_secs(1);

/// What a holder of the lock left to be seen.
#[derive(Clone)]
pub(crate) struct Shown {
    pub(crate) session: Option<ShownSession>,
    pub(crate) interface: Option<ShownInterface>,
    /// MTU told to the guest, bytes.
    pub(crate) mtu: u32,
    pub(crate) impaired: Option<String>,
    pub(crate) link_down: bool,
    pub(crate) declined: Option<String>,
    pub(crate) last_closed: Option<Closed>,
    pub(crate) sessions: u64,
}

/// A session, as far as it is shown.
#[derive(Clone)]
pub(crate) struct ShownSession {
    pub(crate) features: u64,
    pub(crate) peer: Option<i32>,
    /// By pair; what is gone is stopped.
    pub(crate) lanes: Vec<Weak<LaneFacts>>,
}

/// An interface, as far as it is shown.
#[derive(Clone)]
pub(crate) struct ShownInterface {
    /// As it is now.
    pub(crate) name: String,
    pub(crate) mode: Mode,
    pub(crate) steered: (Steered, String),
    /// For what is counted there.
    pub(crate) itself: Weak<Interface>,
}

impl Shown {
    fn of(state: &PortState) -> Self {
        let interface = state.interface.as_ref();
        Self {
            session: state.session.as_ref().map(|session| ShownSession {
                features: session.features,
                peer: session.peer(),
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
                mode: interface.mode(),
                steered: interface.steered(),
                itself: Arc::downgrade(interface),
            }),
            mtu: interface.map_or(NULL_MTU, |interface| interface.mtu()),
            impaired: state.impaired.clone(),
            link_down: state.link_down,
            declined: state.declined.clone(),
            last_closed: state.last_closed.clone(),
            sessions: state.sessions,
        }
    }
}

/// See the module's head.
#[derive(Default)]
pub(crate) struct Window(Mutex<Behind>);

#[derive(Default)]
struct Behind {
    shown: Option<Arc<Shown>>,
    /// For what the port's lock is held now, and since when.
    busy: Option<(&'static str, Instant)>,
    /// What was said to a VMM that came while another was there.
    turned_away: Option<String>,
}

impl Window {
    /// What was shown last, and for what, and how long, the port's lock is held, if that is long. Nothing before the
    /// port's start is done.
    pub(crate) fn look(&self) -> (Option<Arc<Shown>>, Option<String>) {
        let behind = self.behind();
        let busy = behind.busy.map(|(what, since)| (what, since.elapsed()));
        let long = busy.filter(|&(_, held)| held >= LONG);
        let words = long.map(|(what, held)| format!("{what}, for {} s", held.as_secs()));
        (behind.shown.clone(), words)
    }

    /// What was said last to a VMM that came while the present one was there.
    pub(crate) fn turned_away(&self) -> Option<String> {
        self.behind().turned_away.clone()
    }

    /// A VMM was turned away, or the one is there that this would be of.
    pub(crate) fn note_turned_away(&self, reason: Option<String>) {
        self.behind().turned_away = reason;
    }

    fn behind(&self) -> MutexGuard<'_, Behind> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lock of a port's state, held. Shows the state when it goes.
pub(crate) struct Held<'a> {
    state: MutexGuard<'a, PortState>,
    window: &'a Window,
}

impl<'a> Held<'a> {
    /// Waits for the lock.
    pub(crate) fn new(state: &'a Mutex<PortState>, window: &'a Window, what: &'static str) -> Self {
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        window.behind().busy = Some((what, Instant::now()));
        Self { state, window }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Made before the window is taken: asking the lease for its facts may wait.
        let shown = Arc::new(Shown::of(&self.state));
        let mut behind = self.window.behind();
        (behind.shown, behind.busy) = (Some(shown), None);
    }
}

impl Deref for Held<'_> {
    type Target = PortState;

    fn deref(&self) -> &PortState {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut PortState {
        &mut self.state
    }
}
