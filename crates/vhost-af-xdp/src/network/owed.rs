//! Stations of which the uplink may know another thing than holds: a steward that is away is told when it is back, and
//! of changes that were refused half way the first half is taken back.

use steer::with_sources;
use steward::protocol::StationChange;

use super::{Network, State, change, note_of, station_of, table};
use crate::nic::error::InterfaceError;
use crate::switch::table::{Destination, Station};

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
            self.owe(state, changes.iter().map(station_of));
        }
        done
    }

    /// Has the uplink know whose these stations are by now; a steward that is away, when it is back.
    pub(super) fn owe(&self, state: &mut State, stations: impl Iterator<Item = Station>) {
        state.owed.extend(stations);
        self.pay(state);
    }

    /// Tells the uplink what it has not been told.
    pub(super) fn pay(&self, state: &mut State) {
        if state.owed.is_empty() {
            return;
        }
        if let Some(interface) = &state.interface {
            let table = table(state);
            let whose = |&station: &Station| match table.find(station) {
                Destination::Port(port) => change(station, note_of(&state.ports, port)),
                _ => change(station, None),
            };
            let changes: Vec<_> = state.owed.iter().map(whose).collect();
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
        state.owed.clear();
    }
}
