//! The published state of a network, which can be read while the state is locked.
//!
//! The state is locked during requests to a steward, which may not answer for a while. Each holder of the lock
//! publishes a copy at its end; status, the ports and other networks read that.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard, Weak};

use super::{MTU, Network, NetworkLink, Running, ShownNetwork, State};
use common::lock::Locked;

/// See the module's head.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) shown: ShownNetwork,
    /// A thread watches the uplink.
    pub(super) watched: bool,
}

/// The locked state; publishes it when dropped.
pub(super) struct StateGuard<'a> {
    network: &'a Network,
    state: MutexGuard<'a, State>,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        *self.network.seen() = Seen::of(&self.state);
    }
}

impl Seen {
    fn of(state: &State) -> Self {
        let link = state.link.unwrap_or(NetworkLink {
            up: state.uplink.is_none(),
            mtu: MTU,
        });
        let lane = |running: &Option<Running>| match running {
            Some(running) => Arc::downgrade(&running.facts),
            None => Weak::new(),
        };
        let mut learned: Vec<_> = state.learning.keys().map(|(key, port)| (port, key)).collect();
        learned.sort_unstable_by_key(|(port, key)| (port.0, key.bits()));
        let mut counters = state.counters.clone();
        let mut lanes: Vec<_> = state.running.iter().map(lane).collect();
        // If the interface is gone, the tap's counters stay: it may come back in tap mode.
        let has_tap = state
            .interface
            .as_ref()
            .is_none_or(|interface| interface.is_by_tap());
        for of_tap in state.tap_counters.iter().filter(|_| has_tap) {
            counters.push(Arc::clone(of_tap));
            let facts = state.tap.as_ref().map(|tap| Arc::downgrade(&tap.facts));
            lanes.push(facts.unwrap_or_default());
        }
        let host = state.uplink.as_ref().filter(|uplink| uplink.host);
        let shown = ShownNetwork {
            uplink: state.uplink.clone(),
            counters,
            link,
            impaired: state.impaired.clone().or_else(|| state.named.refused.clone()),
            interface: state.interface.as_ref().map(Arc::downgrade),
            lanes,
            host: host.map(|_| state.host.shown()),
            advertised: state.advertised.count(),
            not_advertised: state.advertised.impaired.clone(),
            underlay: state.underlay.shown(state.uplink.as_ref()),
            learned,
            evicted: state.evicted,
        };
        let watched = state.watched;
        Self { shown, watched }
    }
}

impl Network {
    pub(super) fn state(&self) -> StateGuard<'_> {
        StateGuard {
            network: self,
            state: self.state.locked(),
        }
    }

    /// Locks the published state; no thread waits for anything while it holds this lock.
    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.locked()
    }

    /// A copy of the published state.
    pub(crate) fn shown(&self) -> ShownNetwork {
        self.seen().shown.clone()
    }

    /// The uplink's link state and MTU, for guests.
    pub(crate) fn link(&self) -> NetworkLink {
        self.seen().shown.link
    }
}
