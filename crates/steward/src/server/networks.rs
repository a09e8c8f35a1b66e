//! Requests of those whose lease is one of a network.

use std::os::fd::AsFd;

use steer::{Station, TapTo, mac_text};

use super::connection::{Held, Reply};
use super::interface::Interface;
use super::{Answered, Server, no_lease};
use crate::protocol::{Answer, Reason, Refusal, StationChange};

impl Server {
    /// A network's stations change: all are judged, then changed.
    pub(super) fn change_stations(&mut self, number: u64, changes: &[StationChange]) -> Answered {
        let held = self.held_network(number)?;
        let interface = self.interfaces.get_mut(&held.interface).ok_or_else(no_lease)?;
        for change in changes.iter().filter(|change| change.port.is_some()) {
            self.policy
                .check_station(held.rule, change.station, &interface.of_host)
                .map_err(|why| Refusal::new(Reason::NotAllowed, format!("{}: {why}", interface.link.name)))?;
        }
        interface.change_stations(held.wanted.start_queue, changes)?;
        Ok(Answer::Done.into())
    }

    /// A holder gets the ring of its network.
    pub(super) fn groups(&mut self, number: u64) -> Answered {
        let held = self.held_network(number)?;
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        let ring = interface.ring(held.wanted.start_queue).ok_or_else(no_lease)?;
        let ring = ring.as_fd().try_clone_to_owned().map_err(|error| {
            let text = format!("the ring of the network cannot be handed over: {error}");
            Refusal::new(Reason::Kernel, text)
        })?;
        Ok(Reply {
            answer: Answer::Done,
            files: vec![ring],
        })
    }

    /// Whether the holder of a lease in tap mode may have a tap to the wire. A guest without a network receives frames to
    /// its addresses from all queues: so the policy checks these addresses like a network's stations, and no other lease
    /// may have them. It would also receive what guests of a network send to the host: so the interface has no network.
    pub(super) fn check_uplink_tap(
        &self,
        number: u64,
        held: &Held,
        interface: &Interface,
    ) -> Result<(), Refusal> {
        let refused = |why: String| {
            let text = format!("{}: {why}", interface.link.name);
            Err(Refusal::new(Reason::NotAllowed, text))
        };
        let others = self.connections.iter().filter(|&(&other, _)| other != number);
        let others = others.filter_map(|(_, other)| other.held.as_ref());
        let others = others.filter(|other| other.interface == held.interface);
        let (macs, vlans) = (&held.wanted.filter.macs, &held.wanted.filter.vlans);
        for other in others {
            if other.wanted.network != held.wanted.network {
                return refused(
                    "a network and a guest without one exclude each other in tap mode: make the guest a port of the \
                     network"
                        .to_owned(),
                );
            }
            if let Some(&mac) = macs.iter().find(|mac| other.wanted.filter.macs.contains(mac)) {
                return refused(format!(
                    "MAC {} is that of another lease's guest: give this one another",
                    mac_text(mac)
                ));
            }
        }
        let vlans = match vlans.is_empty() {
            true => &[0][..],
            false => &vlans[..],
        };
        let stations = macs
            .iter()
            .flat_map(|&mac| vlans.iter().map(move |&vlan| Station { mac, vlan }));
        for station in stations {
            let judged = self.policy.check_station(held.rule, station, &interface.of_host);
            judged.or_else(refused)?;
        }
        Ok(())
    }

    pub(super) fn held_lease(&self, number: u64) -> Result<Held, Refusal> {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        connection.held.clone().ok_or_else(no_lease)
    }

    pub(super) fn held_network(&self, number: u64) -> Result<Held, Refusal> {
        let held = self.held_lease(number)?;
        match held.wanted.network {
            true => Ok(held),
            false => Err(Refusal::new(
                Reason::Lease,
                "this lease is not one of a network: that is asked for with the lease",
            )),
        }
    }

    /// A lease is charged to another rule, or to one that says something else now: what its network may not have any
    /// more it loses.
    pub(super) fn judge_network(&mut self, held: &Held) {
        if self.policy.check_host(held.rule).is_err() {
            self.end_network_tap(((held.interface, held.wanted.start_queue), TapTo::Host));
        }
        self.judge_stations(held);
    }

    /// The host has other addresses on an interface: what it has now no network may have.
    pub(super) fn judge_stations_on(&mut self, interface: u64) {
        let held = self.all_leases().map(|lease| lease.held);
        let networks = held.filter(|held| held.interface == interface && held.wanted.network);
        let networks: Vec<Held> = networks.cloned().collect();
        networks.iter().for_each(|held| self.judge_stations(held));
    }

    fn judge_stations(&mut self, held: &Held) {
        let Some(interface) = self.interfaces.get_mut(&held.interface) else {
            return;
        };
        let first = held.wanted.start_queue;
        let judged = |station| self.policy.check_station(held.rule, station, &interface.of_host);
        let refused = interface.stations(first);
        let refused: Vec<_> = refused
            .filter_map(|station| Some((station, judged(station).err()?)))
            .collect();
        let Some((_, why)) = refused.first() else {
            return;
        };
        let name = interface.link.name.clone();
        tracing::warn!(
            interface = name,
            stations = refused.len(),
            first = why,
            "taken from a network: not allowed by the policy, or the host's"
        );
        let taken = |&(station, _): &_| StationChange { station, port: None };
        let changes: Vec<_> = refused.iter().map(taken).collect();
        if let Err(refusal) = interface.change_stations(first, &changes) {
            tracing::error!(interface = name, "they stay: {refusal}");
        }
        let at = (held.interface, first);
        let mut others = self.connections.values_mut();
        let holder = others.find(|other| {
            let held = other.held.as_ref().filter(|held| held.wanted.network);
            held.is_some_and(|held| (held.interface, held.wanted.start_queue) == at)
        });
        if let Some(holder) = holder {
            holder.dirty = true;
        }
    }

    /// Has the holder of a lease name its stations again, if it is one of a network: they are judged otherwise than
    /// when it named them.
    pub(super) fn ask_for_stations(&mut self, number: u64) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.dirty |= connection.held.as_ref().is_some_and(|held| held.wanted.network);
        }
    }
}
