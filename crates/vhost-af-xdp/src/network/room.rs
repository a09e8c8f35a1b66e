//! Room for addresses: the uplink's lease has a fixed number of stations. Those by configuration always have room, and
//! learned ones what is left ([`super::learning`]). Evicted ones are counted, logged within limits, and events.

use steer::mac_text;
use steward::protocol::STATIONS_MAX;

use super::learning::Evicted;
use super::{Network, State};
use crate::port::journal::{JOURNAL, Of, What};
use crate::switch::table::{Table, TablePort};

impl State {
    /// Learned stations that there is room for; `more`: stations by configuration that are to come.
    fn room(&self, more: usize) -> usize {
        if self.uplink.is_none() {
            return usize::MAX;
        }
        let ports = self.ports.iter().flatten();
        let configured: usize = ports.map(|port| port.vlans.all().len()).sum();
        STATIONS_MAX.saturating_sub(configured + more)
    }
}

impl Network {
    /// Makes room for the stations of a port that is to come, or is to have others.
    pub(super) fn make_room_for(&self, state: &mut State, port: &TablePort) {
        let room = state.room(port.vlans.all().len());
        let evicted = state.learning.make_room(room, &state.ports);
        self.note_evicted(state, &evicted);
    }

    /// Divides the room among the ports that learn.
    pub(super) fn share_room(&self, state: &mut State, table: &Table) {
        let room = state.room(0);
        let evicted = state.learning.share(room, &state.ports, table);
        self.note_evicted(state, &evicted);
    }

    fn note_evicted(&self, state: &mut State, evicted: &[Evicted]) {
        let Some((first, _)) = evicted.first() else {
            return;
        };
        state.evicted += evicted.len() as u64;
        let others = match evicted.len() - 1 {
            0 => String::new(),
            others => format!(" and {others} more"),
        };
        let text = format!(
            "learned {}{others} evicted: {STATIONS_MAX} addresses are the most of a network with an uplink; frames to \
             an evicted one go to the host until it is learned again",
            mac_text(first.mac())
        );
        if let Some(left_out) = state.eviction_lines.allow() {
            tracing::warn!(network = self.name, "{text}{left_out}");
        }
        JOURNAL.tell(Of::Network(&self.name), What::AddressEvicted, Some(text));
        self.owe(state, evicted.iter().map(|&(station, _)| station));
        self.tell_table(state);
    }
}
