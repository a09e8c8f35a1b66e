//! Stations of which the uplink may know another thing than holds: a steward that is away is told when it is back, and
//! of changes that were refused half way the first half is taken back.

use steer::with_sources;
use steward::protocol::StationChange;

use super::{Network, State, change, fdb, key_of, mark_of};
use crate::nic::error::InterfaceError;
use crate::switch::fdb::{Destination, FdbKey};

impl Network {
    /// Has the uplink know of stations what is about to hold.
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

    /// Has the uplink know whose these stations are by now; a steward that is away, when it is back.
    pub(super) fn sync_keys(&self, state: &mut State, keys: impl Iterator<Item = FdbKey>) {
        state.unsent.extend(keys);
        self.sync_unsent(state);
    }

    /// Tells the uplink what it has not been told.
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
