//! The published state of a network, which can be read while the state is locked.
//!
//! The state is locked during requests to a steward, which may not answer for a while. Each holder of the lock
//! publishes a copy at its end; status, the ports and other networks read that.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard, Weak};

use device::counters::PairCounters;
use model::state::NetworkStatus;

use super::{MTU, Network, NetworkLink, Running, State};
use crate::nic::interface::Interface;
use crate::nic::lane_facts::LaneFacts;
use common::lock::Locked;
use dataplane::fdb::{FdbKey, PortNumber};

/// The published state of a network.
#[derive(Clone, Default)]
pub(crate) struct ShownNetwork {
    /// Without name, ports, and what is read from interfaces and lanes.
    pub(crate) status: NetworkStatus,
    /// Lanes of the uplink's queues, then, in tap mode, of the tap's.
    pub(crate) uplink: ShownLanes,
    pub(crate) underlay: ShownLanes,
    /// The lane of the tap to the host.
    pub(crate) host: ShownLanes,
    /// Learned addresses of ports, in order.
    pub(super) learned: Vec<(PortNumber, FdbKey)>,
}

/// Lanes of an interface.
#[derive(Clone, Default)]
pub(crate) struct ShownLanes {
    pub(crate) interface: Weak<Interface>,
    pub(crate) lanes: Vec<ShownLane>,
}

/// A lane. Its counters outlive it: the queue's next lane continues them.
#[derive(Clone)]
pub(crate) struct ShownLane {
    /// A tap has no queue number.
    pub(crate) queue: Option<u32>,
    pub(crate) counters: Arc<PairCounters>,
    pub(crate) facts: Weak<LaneFacts>,
}

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

impl ShownLanes {
    /// The lanes of queues of an interface, from `first` on.
    pub(super) fn of(
        interface: Option<&Arc<Interface>>,
        first: u32,
        counters: &[Arc<PairCounters>],
        running: &[Option<Running>],
    ) -> Self {
        let facts = |running: &Running| Arc::downgrade(&running.facts);
        let lanes = (first..).zip(counters).zip(running);
        Self {
            interface: interface.map(Arc::downgrade).unwrap_or_default(),
            lanes: lanes
                .map(|((queue, counters), running)| ShownLane {
                    queue: Some(queue),
                    counters: Arc::clone(counters),
                    facts: running.as_ref().map(facts).unwrap_or_default(),
                })
                .collect(),
        }
    }
}

impl Seen {
    fn of(state: &State) -> Self {
        let link = state.link.unwrap_or(NetworkLink {
            up: state.uplink.is_none(),
            mtu: MTU,
        });
        let mut learned: Vec<_> = state.learning.keys().map(|(key, port)| (port, key)).collect();
        learned.sort_unstable_by_key(|(port, key)| (port.0, key.bits()));
        let config = state.uplink.as_ref();
        let (interface, first) = (
            state.interface.as_ref(),
            config.map_or(0, |config| config.at.start_queue),
        );
        let mut uplink = ShownLanes::of(interface, first, &state.counters, &state.running);
        // If the interface is gone, the tap's counters stay: it may come back in tap mode.
        if interface.is_none_or(|interface| interface.is_by_tap()) {
            let facts = state.tap.as_ref().map(|tap| Arc::downgrade(&tap.facts));
            let facts = facts.unwrap_or_default();
            uplink
                .lanes
                .extend(state.tap_counters.iter().map(|counters| ShownLane {
                    queue: None,
                    counters: Arc::clone(counters),
                    facts: Weak::clone(&facts),
                }));
        }
        let underlay = config.and_then(|config| config.underlay.as_ref());
        let host = config.is_some_and(|config| config.host);
        let shown = ShownNetwork {
            status: NetworkStatus {
                uplink: config.map(|config| config.at.name.clone()),
                up: link.up,
                mtu: link.mtu,
                impaired: state.impaired.clone().or_else(|| state.named.refused.clone()),
                learned_evicted: state.evicted,
                advertised: state.advertised.count(),
                not_advertised: state.advertised.impaired.clone(),
                underlay: underlay.map(|config| state.underlay.status(config)),
                host: host.then(|| state.host.status()),
                ..NetworkStatus::default()
            },
            uplink,
            underlay: underlay.map_or_else(ShownLanes::default, |config| state.underlay.lanes(config)),
            host: state.host.lanes(),
            learned,
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
        let NetworkStatus { up, mtu, .. } = self.seen().shown.status;
        NetworkLink { up, mtu }
    }
}
