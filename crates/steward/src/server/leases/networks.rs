//! Requests of lessees of networks, and checks of addresses for these and for guests in tap mode.

use std::os::fd::AsFd;

use steer::{TapTo, mac_text, network_number};

use crate::server::connections::connection::{Held, Reply, lessees};
use crate::server::interface::Interface;
use crate::server::leases::lease::LeaseRef;
use crate::server::taps::network_tap::{may_have_taps, network_at};
use crate::server::{Answered, Server, no_lease};
use steward_protocol::{Answer, Reason, Refusal, StationChange};

impl Server {
    /// Changes a network's stations: checks all of them first.
    pub(crate) fn change_stations(&mut self, number: u64, share: u32, changes: &[StationChange]) -> Answered {
        let held = self.held_network(number)?;
        let network = network_number(held.wanted.start_queue, share);
        self.check_tunnel_stations(number, network, changes)?;
        let interface = self.interfaces.get_mut(&held.interface).ok_or_else(no_lease)?;
        for change in changes.iter().filter(|change| change.port.is_some()) {
            self.policy
                .check_station(held.rule, change.station, &interface.of_host)
                .map_err(|why| Reason::NotAllowed.because(format!("{}: {why}", interface.link.name)))?;
        }
        let changed = interface.change_stations(network, changes);
        self.withdraw_addresses(&held);
        changed.map(|()| Answer::Done.into())
    }

    /// Hands the ring of a network to its lessee.
    pub(crate) fn groups(&mut self, number: u64) -> Answered {
        let held = self.held_network(number)?;
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        let ring = interface.ring(held.wanted.start_queue).ok_or_else(no_lease)?;
        let ring = ring.as_fd().try_clone_to_owned().map_err(|error| {
            Reason::Kernel.because(format!("the ring of the network cannot be handed over: {error}"))
        })?;
        Ok(Reply::with(Answer::Done, vec![ring]))
    }

    /// Whether the lessee of a lease in tap mode may have a tap. A guest without a network receives frames to its
    /// addresses from all queues: so the policy checks these addresses like a network's stations, and no other lease
    /// that has a tap may have them in the same VLAN. It would also receive what guests of a network send to the host:
    /// so the interface has no network with a tap. A lease that has a tap keeps it when another one comes.
    pub(crate) fn check_tap_mode(
        &self,
        number: u64,
        held: &Held,
        interface: &Interface,
    ) -> Result<(), Refusal> {
        let refused = |why: String| Reason::NotAllowed.refuse(format!("{}: {why}", interface.link.name));
        let filter = &held.wanted.filter;
        let others = self.all_leases().filter(|other| other.number != number);
        for LeaseRef { held: other, .. } in others.filter(|other| self.has_tap(other.held)) {
            if other.interface != held.interface {
                continue;
            }
            if other.wanted.network != held.wanted.network {
                return refused(
                    "a network and a guest without one exclude each other in tap mode: make the guest a port of the \
                     network"
                        .to_owned(),
                );
            }
            if let Some(mac) = filter.shared_mac(&other.wanted.filter) {
                return refused(format!(
                    "MAC {} is that of another lease's guest: give this one another, or each VLANs of its own",
                    mac_text(mac)
                ));
            }
        }
        filter
            .stations()
            .try_for_each(|station| self.policy.check_station(held.rule, station, &interface.of_host))
            .or_else(refused)
    }

    fn has_tap(&self, held: &Held) -> bool {
        let at = network_at(held);
        TapTo::ALL
            .iter()
            .any(|&to| self.network_taps.contains_key(&(at, to)))
    }

    pub(crate) fn held_lease(&self, number: u64) -> Result<Held, Refusal> {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        connection.held.clone().ok_or_else(no_lease)
    }

    pub(crate) fn held_network(&self, number: u64) -> Result<Held, Refusal> {
        let held = self.held_lease(number)?;
        match held.wanted.network {
            true => Ok(held),
            false => {
                Reason::Lease.refuse("this lease is not one of a network: that is asked for with the lease")
            }
        }
    }

    /// Called when a lease is charged to another or changed rule: its network, or its guest in tap mode, loses
    /// addresses that are not allowed any more.
    pub(crate) fn judge_taps(&mut self, number: u64, held: &Held) {
        if !held.wanted.network {
            return self.judge_guest_tap(number, held);
        }
        let at = (network_at(held), TapTo::Host);
        let policy = &self.policy;
        let mut allows = |ip| policy.check_advertised(held.rule, ip).is_ok();
        let ips = self.network_taps.get(&at).map(|tap| tap.advertised.ips());
        let may_advertise = ips.is_none_or(|mut ips| ips.all(&mut allows));
        if policy.check_host(held.rule).is_err() || !may_advertise {
            self.end_network_tap(at);
        }
        self.judge_stations(held);
    }

    /// Called when the host's addresses on an interface change: networks and guests in tap mode lose these addresses.
    pub(crate) fn judge_addresses_on(&mut self, interface: u64) {
        let leases = self
            .all_leases()
            .filter(|lease| lease.held.interface == interface);
        let leases: Vec<_> = leases.map(|lease| (lease.number, lease.held.clone())).collect();
        for (number, held) in &leases {
            match held.wanted.network {
                true => self.judge_stations(held),
                false => {
                    self.judge_guest_tap(*number, held);
                    // It may now have an address that was refused.
                    if !self.has_tap(held) {
                        self.have_asked_again(*number);
                    }
                }
            }
        }
    }

    /// A guest without a network loses its tap if it may not have its addresses any more.
    fn judge_guest_tap(&mut self, number: u64, held: &Held) {
        let at = (network_at(held), TapTo::Uplink);
        let Some(interface) = self.interfaces.get(&held.interface) else {
            return;
        };
        if self.network_taps.contains_key(&at)
            && let Err(refusal) = self.check_tap_mode(number, held, interface)
        {
            let first = held.wanted.start_queue;
            tracing::warn!(first, "a guest's tap is taken back: {refusal}");
            self.end_network_tap(at);
        }
    }

    fn judge_stations(&mut self, held: &Held) {
        let Some(interface) = self.interfaces.get_mut(&held.interface) else {
            return;
        };
        let of_host = interface.of_host.clone();
        let judged = |station| self.policy.check_station(held.rule, station, &of_host).err();
        let mut networks = interface.networks_at(held.wanted.start_queue);
        networks.retain(|&network| interface.take_stations(network, judged));
        if networks.is_empty() {
            return;
        }
        self.withdraw_addresses(held);
        let theirs = lessees(&mut self.connections, |other| {
            network_at(other) == network_at(held)
        });
        theirs.for_each(|lessee| lessee.dirty = true);
    }

    /// Withdraws addresses that are not a station's any more.
    fn withdraw_addresses(&mut self, held: &Held) {
        let tap = self.network_taps.get_mut(&(network_at(held), TapTo::Host));
        if let Some((tap, interface)) = tap.zip(self.interfaces.get(&held.interface)) {
            tap.advertised
                .keep_only(interface.stations(held.wanted.start_queue));
        }
    }

    /// Has a lessee request its stations (of a network) and taps again, as the checks may now have other
    /// results.
    pub(crate) fn have_asked_again(&mut self, number: u64) {
        if let Some(connection) = self.connections.get_mut(&number) {
            let held = connection.held.as_ref();
            connection.dirty |= held.is_some_and(|held| may_have_taps(&held.wanted));
        }
    }
}
