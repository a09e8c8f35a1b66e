//! Keys that may have another port at the uplink's steward than in the FDB. They are sent again: when a steward that
//! was away is back, and after a request that the steward rejected half-way, to undo its first half.

use steer::with_sources;
use steward_protocol::StationChange;

use super::{Network, State, change, fdb, key_of, mark_of};
use crate::nic::error::InterfaceError;
use dataplane::fdb::{Destination, FdbKey};

impl Network {
    /// Sends the uplink changes that the FDB gets next.
    /// Errors: the steward rejects them, or is away; then it gets the present ports of their keys again.
    pub(super) fn set_stations(
        &self,
        state: &mut State,
        changes: &[StationChange],
    ) -> Result<(), InterfaceError> {
        let Some(interface) = &state.interface else {
            return Ok(());
        };
        let done = interface.steering.set_stations(changes);
        state.advertised.forget_removed(changes);
        if done.is_err() {
            self.sync_keys(state, changes.iter().map(key_of));
        }
        done
    }

    /// Sends the uplink the present ports of these keys; if the steward is away, when it is back.
    pub(super) fn sync_keys(&self, state: &mut State, keys: impl Iterator<Item = FdbKey>) {
        state.unsent.extend(keys);
        self.sync_unsent(state);
        if state.underlay.interface.is_some() {
            // Its stations follow.
            self.look_again();
        }
    }

    /// Sends the uplink the keys in `unsent`.
    pub(super) fn sync_unsent(&self, state: &mut State) {
        if state.unsent.is_empty() {
            return;
        }
        if let Some(interface) = &state.interface {
            let fdb = fdb(state);
            let whose = |&key: &FdbKey| match fdb.find(key) {
                Destination::Port(port) => change(key, mark_of(&state.ports, port)),
                _ => change(key, None),
            };
            let changes: Vec<_> = state.unsent.iter().map(whose).collect();
            state.advertised.forget_removed(&changes);
            match interface.steering.set_stations(&changes) {
                Ok(()) => {}
                Err(error) if error.is_away() => return,
                Err(error) => tracing::warn!(
                    network = self.name,
                    "the uplink's steward may still have an earlier port of an address: {}",
                    with_sources(&error)
                ),
            }
        }
        state.unsent.clear();
    }
}
