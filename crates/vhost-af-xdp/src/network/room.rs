//! Room for addresses: the uplink's lease has a fixed number of them. Configured ones always have room, and learned
//! ones get the rest ([`super::learning`]). Evicted ones are counted, logged with a limit, and recorded as events.

use steer::mac_text;
use steward_protocol::STATIONS_MAX;

use super::learning::{self, Evicted};
use super::{Network, State, keys};
use crate::journal::{JOURNAL, Subject};
use crate::nic::error::InterfaceError;
use dataplane::fdb::{Fdb, FdbPort, PortNumber};
use model::events::What;

impl State {
    /// How many keys of the new or changed port `number` the network does not have yet. A change does not subtract the
    /// port's old keys, because the steward keeps them until it has the new ones.
    fn new_keys(&self, port: &FdbPort, number: PortNumber) -> usize {
        let before = self.ports.get(usize::from(number.0)).and_then(Option::as_ref);
        let before = before.filter(|before| before.mac == port.mac);
        let has = |vlan| before.is_some_and(|before| before.vlans.all().contains(vlan));
        port.vlans.all().iter().filter(|&vlan| !has(vlan)).count()
    }

    /// The number of learned keys that there is room for; `more`: number of configured keys that are about to be added.
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
    /// Sends the uplink the keys of a new or changed port; evicts learned ones if there is no room.
    /// Errors: the steward does not accept them. Then the evicted ones are learned again.
    pub(super) fn set_keys_of(
        &self,
        state: &mut State,
        port: &FdbPort,
        number: PortNumber,
    ) -> Result<(), InterfaceError> {
        let room = state.room(state.new_keys(port, number));
        let evicted = state.learning.make_room(room, &state.ports);
        self.sync_keys(state, evicted.iter().map(|&(key, _)| key));
        let set = self.set_stations(state, &keys(port, Some(number)));
        match set {
            Ok(()) => self.note_evicted(state, &evicted),
            Err(_) => learning::record_again(&evicted, &state.ports),
        }
        set
    }

    /// Divides the room among the ports that learn.
    pub(super) fn share_room(&self, state: &mut State, fdb: &Fdb) {
        let room = state.room(0);
        let evicted = state.learning.share(room, &state.ports, fdb);
        self.sync_keys(state, evicted.iter().map(|&(key, _)| key));
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
            "learned {}{others} evicted: a network with an uplink has room for {STATIONS_MAX} addresses; frames to an \
             evicted one go to the host until it is learned again",
            mac_text(first.mac())
        );
        if let Some(left_out) = state.eviction_lines.allow() {
            tracing::warn!(network = self.name, "{text}{left_out}");
        }
        JOURNAL.record(Subject::Network(&self.name), What::AddressEvicted, Some(text));
        self.set_fdb(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dataplane::fdb::vlans::Vlans;

    #[test]
    fn keys_that_a_port_has_already_need_no_room() {
        let mac = [2, 0, 0, 0, 0, 1];
        let port = |mac, vlans: [u16; 2]| FdbPort {
            mac,
            vlans: Vlans::Trunk(vlans.into()),
            ..FdbPort::default()
        };
        let state = State {
            ports: vec![Some(port(mac, [5, 6]))],
            ..State::default()
        };
        let new = |mac, vlans, number| state.new_keys(&port(mac, vlans), PortNumber(number));
        assert_eq!(new(mac, [5, 6], 0), 0);
        assert_eq!(new(mac, [6, 7], 0), 1);
        assert_eq!(new([2, 0, 0, 0, 0, 2], [5, 6], 0), 2);
        assert_eq!(new(mac, [7, 8], 1), 2, "a new port");
    }
}
