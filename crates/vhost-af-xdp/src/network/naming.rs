//! Addresses that the uplink's steward stops or starts to allow: its policy has changed, or the host got the address.
//! The steward removes addresses that it does not allow any more, and reports a change. Then the network requests all
//! addresses again. It logs rejected ones, and retries with growing pauses.

use std::time::Instant;

use program::backoff::Retry;
use steer::{mac_text, with_sources};
use steward_protocol::StationChange;

use super::{Network, State, change, keys, mark_of};
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use dataplane::fdb::PortNumber;

/// Most rejected addresses in a log line.
const SAID: usize = 3;

/// The result of the last request for all addresses.
#[derive(Default)]
pub(super) struct Named {
    retry: Retry<u32>,
    /// The steward did not answer the last request.
    unfinished: bool,
    /// The rejected addresses, and why; `None`: there are none.
    pub(super) refused: Option<String>,
}

impl Named {
    /// Starts from scratch with another interface: all addresses are requested when it is opened.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Ports changed, so other addresses may be rejected now: makes a request due.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.retry.hurry(now);
    }
}

impl Network {
    /// Requests all addresses again if the lease of the uplink has changed, or if some were rejected.
    pub(super) fn check_addresses(&self, state: &mut State, uplink: &Interface) {
        let (changes, now) = (uplink.steering.changes(), Instant::now());
        let is_whole = state.named.refused.is_none() && !state.named.unfinished;
        if uplink.steering.is_away() || !state.named.retry.is_due(changes, is_whole, now) {
            return;
        }
        let named = self.request_addresses(state, uplink);
        state.named.unfinished = named.is_err();
        let is_whole = named.as_ref().is_ok_and(Vec::is_empty);
        state.named.retry.record(is_whole, now);
        if let Ok(refused) = named {
            self.note_refused(state, &refused);
        }
    }

    /// Requests all addresses; returns the rejected configured ones, and why. Removes rejected learned ones.
    /// Errors: the steward did not answer.
    fn request_addresses(
        &self,
        state: &mut State,
        uplink: &Interface,
    ) -> Result<Vec<String>, InterfaceError> {
        let why_not = |changes: &[StationChange]| match uplink.steering.set_stations(changes) {
            Ok(()) => Ok(None),
            Err(refusal) if refusal.is_refusal() => Ok(Some(with_sources(&refusal))),
            Err(error) => Err(error),
        };
        let mut refused = Vec::new();
        let ports = (0..).map(PortNumber).zip(&state.ports);
        let all = ports.filter_map(|(number, port)| Some(keys(port.as_ref()?, Some(number))));
        for of_port in all {
            if why_not(&of_port)?.is_none() {
                continue;
            }
            for key in of_port {
                if let Some(why) = why_not(&[key])? {
                    let steer::Station { vlan, mac } = key.station;
                    let vlan = (vlan != 0).then(|| format!(" in VLAN {vlan}"));
                    let (mac, vlan) = (mac_text(mac), vlan.unwrap_or_default());
                    refused.push(format!("no frames for {mac}{vlan} arrive: {why}"));
                }
            }
        }
        let learned: Vec<_> = state.learning.keys().collect();
        let mut is_lost = false;
        for (key, port) in learned {
            if why_not(&[change(key, mark_of(&state.ports, port))])?.is_some() {
                state.learning.lose(key);
                is_lost = true;
            }
        }
        if is_lost {
            self.set_fdb(state);
        }
        Ok(refused)
    }

    /// Stores the rejected addresses; logs a change.
    fn note_refused(&self, state: &mut State, refused: &[String]) {
        let more = refused.len().saturating_sub(SAID);
        let mut why = refused[..refused.len() - more].join("; ");
        if more > 0 {
            why += &format!("; and {more} more");
        }
        let why = (!why.is_empty()).then_some(why);
        let texts = ["guests are cut off", "no guest is cut off any more"];
        if self.store_reason(&mut state.named.refused, why, texts) {
            self.record_impaired(state.named.refused.clone());
        }
    }
}
