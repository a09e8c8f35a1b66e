//! Keys that the uplink may have in another state: a steward that is away gets them when it is back, and after a change
//! that was rejected half way the first half is taken back.

use steer::with_sources;
use steward::protocol::StationChange;

use super::{Network, State, change, fdb, key_of, mark_of};
use crate::nic::error::InterfaceError;
use crate::switch::fdb::{Destination, FdbKey};

impl Network {
    /// Sends the uplink changes that are about to be made.
    /// Errors: it does not; what it knew before holds.
    pub(super) fn set_stations(
        &self,
        state: &mut State,
        changes: &[StationChange],
    ) -> Result<(), InterfaceError> {
        let Some(interface) = &state.interface else {
            return Ok(());
        };
        let done = interface.steering.set_stations(changes);
        if done.is_err() {
            self.sync_keys(state, changes.iter().map(key_of));
        }
        done
    }

    /// Sends the uplink the present ports of these keys; to a steward that is away, when it is back.
    pub(super) fn sync_keys(&self, state: &mut State, keys: impl Iterator<Item = FdbKey>) {
        state.unsent.extend(keys);
        self.sync_unsent(state);
    }

    /// Sends the uplink what it has not got yet.
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
            match interface.steering.set_stations(&changes) {
                Ok(()) => {}
                Err(error) if error.is_away() => return,
                Err(error) => tracing::warn!(
                    network = self.name,
                    "an address stays with the uplink: {}",
                    with_sources(&error)
                ),
            }
        }
        state.unsent.clear();
    }
}
