//! The host as one more receiver of a network: a tap device that the steward connects with the uplink's interface, and
//! whose descriptor it passes to the daemon. A lane of its own serves it ([`dataplane::host::tap_lane`]). The network
//! works without it; the daemon logs once why the host is not reached, and retries with growing pauses.
//!
//! If the uplink is a port of a bridge, stations behind the bridge's other ports are reached through the host: the
//! steward reads the bridge's forwarding database, and reports its changes (`host::links::bridge`).

use std::sync::{Arc, Weak};
use std::time::Instant;

use device::counters::PairCounters;
use model::state::{BridgeStatus, HostStatus, LaneStatus};
use packet::ethernet::Mac;
use program::backoff::Retry;
use steer::{TapTo, mac_text, with_sources};
use steward_client::Lease;
use steward_protocol::HostEnd;

use super::seen::{ShownLane, ShownLanes};
use super::{Network, State};
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::lane_facts::LaneFacts;
use dataplane::fdb::BridgeFdb;
use dataplane::nic::tap::Tap;
use dataplane::worker::workers::LaneAt;

/// The connection to the host.
#[derive(Default)]
pub(super) struct Host {
    end: Option<End>,
    counters: Arc<PairCounters>,
    /// The host's addresses, while it is reached.
    pub(super) macs: Vec<Mac>,
    /// Addresses that are reached through the host.
    pub(super) behind: Arc<BridgeFdb>,
    bridge: Option<BridgeStatus>,
    impaired: Option<String>,
    retry: Retry<u32>,
}

/// The tap device, which a worker serves.
struct End {
    name: String,
    index: u32,
    at: LaneAt,
    facts: Arc<LaneFacts>,
}

impl Host {
    /// Whether the host is reached.
    pub(super) fn is_reached(&self) -> bool {
        self.end.is_some() && self.impaired.is_none()
    }

    /// The bridge that the uplink is a port of, if the host is reached.
    pub(super) fn bridge(&self) -> Option<&BridgeStatus> {
        self.bridge.as_ref().filter(|_| self.end.is_some())
    }

    /// Its state, without what is read from its lane.
    pub(super) fn status(&self) -> HostStatus {
        HostStatus {
            interface: self.end.as_ref().map(|end| end.name.clone()),
            macs: self.macs.iter().map(|&mac| mac_text(mac)).collect(),
            bridge: self.bridge.clone(),
            impaired: self.impaired.clone(),
            queue: LaneStatus::default(),
        }
    }

    /// The lane of the tap device.
    pub(super) fn lanes(&self) -> ShownLanes {
        let facts = self.end.as_ref().map(|end| Arc::downgrade(&end.facts));
        ShownLanes {
            interface: Weak::new(),
            lanes: vec![ShownLane {
                queue: None,
                counters: Arc::clone(&self.counters),
                facts: facts.unwrap_or_default(),
            }],
        }
    }
}

impl Network {
    /// Connects to the host if it is not connected yet or any more, and updates its addresses.
    pub(super) fn look_at_host(&self, state: &mut State, uplink: &Interface) {
        let is_wanted = state.uplink.as_ref().is_some_and(|uplink| uplink.host);
        if !is_wanted || uplink.steering.is_away() {
            return;
        }
        let is_reached = state.host.is_reached();
        let changes = uplink.steering.changes_of_host();
        if !state.host.retry.is_due(changes, is_reached, Instant::now()) {
            return;
        }
        let reached = self.reach_host(state, uplink);
        self.note_host(state, reached);
    }

    /// Requests the connection to the host from the steward, and applies what has changed.
    fn reach_host(&self, state: &mut State, uplink: &Interface) -> Result<(), InterfaceError> {
        let has = state.host.end.as_ref().map_or(0, |end| end.index);
        let asked = uplink
            .steering
            .ask(|lease| lease.host(has).map(Some))
            .inspect_err(|error| {
                // The tap is not connected with the host any more.
                if !error.is_away() {
                    self.lose_host(state);
                }
            });
        let Some((end, tap)) = asked? else {
            return Ok(());
        };
        if let Some(tap) = tap {
            self.stop_host(state);
            let counters = Arc::clone(&state.host.counters);
            let tap = (end.interface.as_str(), Tap::new(tap), end.cuts_udp);
            state.host.end = Some(End {
                name: end.interface.clone(),
                index: end.index,
                at: self.serve_tap(tap, TapTo::Host, None, counters)?,
                facts: Arc::new(LaneFacts::tap()),
            });
        }
        let behind = match end.behind {
            0 => BridgeFdb::default(),
            _ => BridgeFdb::new(&uplink.steering.ask(Lease::behind)?),
        };
        self.note_bridge(state, &end, behind.count());
        if state.host.macs != end.macs || *state.host.behind != behind {
            (state.host.macs, state.host.behind) = (end.macs, Arc::new(behind));
            self.set_fdb(state);
        }
        Ok(())
    }

    /// Stores the bridge that the uplink is part of; logs a change.
    fn note_bridge(&self, state: &mut State, end: &HostEnd, behind: usize) {
        let bridge = (!end.bridge.is_empty()).then(|| BridgeStatus {
            name: end.bridge.clone(),
            behind,
            left_out: end.left_out,
        });
        let before = std::mem::replace(&mut state.host.bridge, bridge);
        if before.is_none_or(|before| before.name != end.bridge) && !end.bridge.is_empty() {
            tracing::info!(
                network = self.name,
                bridge = end.bridge,
                "the uplink is a port of a bridge: stations behind its other ports are reached through the host"
            );
        }
    }

    /// Stores the result; logs a change.
    fn note_host(&self, state: &mut State, reached: Result<(), InterfaceError>) {
        let host = &mut state.host;
        host.retry.record(reached.is_ok(), Instant::now());
        let texts = ["guests do not reach the host", ""];
        self.store_reason(&mut host.impaired, reached.err().map(with_sources), texts);
    }

    /// Closes the device, which removes it.
    fn stop_host(&self, state: &mut State) {
        if let Some(end) = state.host.end.take() {
            drop(self.workers.remove(end.at));
            state.advertised.forget();
        }
    }

    /// Disconnects from the host: frames for it go to the uplink.
    pub(super) fn lose_host(&self, state: &mut State) {
        self.stop_host(state);
        state.host.bridge = None;
        if !state.host.macs.is_empty() {
            state.host.macs.clear();
            state.host.behind = Arc::default();
            self.set_fdb(state);
        }
    }
}
