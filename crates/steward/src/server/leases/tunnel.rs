//! Tunnels whose frames the program of a network decapsulates: see [`Request::Tunnel`](steward_protocol::Request::Tunnel).
//!
//! The device may change, or what the policy allows: then the program gets the tunnel as it is now, or one that no frame
//! is of, and the lessee requests it again. Frames that the program does not take go to the device, if there is one.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;

use steer::{Station, Tunnel, mac_text, network_number};

use crate::server::connections::connection::{Connection, Reply};
use crate::server::leases::lease::LeaseRef;
use crate::server::{Answered, Server, no_lease};
use host::links::routes::{TableChanges, device_named, device_numbered};
use host::links::tunnel::Device;
use host::links::{ipsec, reading_sockets};
use program::peer::Credentials;
use steward_protocol::{Answer, Reason, Refusal, StationChange, VtepChange};

impl Server {
    /// Sets the tunnel of a network, and hands over sockets to read the device's tables by.
    pub(crate) fn tunnel(&mut self, number: u64, share: u32, device: &str) -> Answered {
        let network = network_number(self.held_network(number)?.wanted.start_queue, share);
        let (Connection { peer, .. }, held, interface) = self.lessee(number)?;
        interface.program()?;
        let tunnel = self.check_tunnel(LeaseRef { number, peer, held }, device_named(device))?;
        self.lessee_mut(number)?.1.set_tunnel(network, tunnel)?;
        let failed = |error| Reason::Kernel.because(format!("no socket for rtnetlink: {error}"));
        let sockets = reading_sockets().map_err(failed)?;
        TableChanges::prepare(sockets[1].as_fd(), tunnel.device).map_err(failed)?;
        Ok(Reply::with(Answer::Done, sockets.into()))
    }

    /// Changes the hosts from which a network takes packets of its tunnel.
    pub(crate) fn change_vteps(&mut self, number: u64, share: u32, changes: &[VtepChange]) -> Answered {
        let network = network_number(self.held_network(number)?.wanted.start_queue, share);
        self.lessee_mut(number)?.1.change_vteps(network, changes)?;
        Ok(Answer::Done.into())
    }

    /// Has the network take packets of its tunnel from those hosts only.
    pub(crate) fn drop_unknown(&mut self, number: u64, share: u32) -> Answered {
        let network = network_number(self.held_network(number)?.wanted.start_queue, share);
        self.lessee_mut(number)?.1.drop_unknown(network)?;
        Ok(Answer::Done.into())
    }

    /// The tunnel of a device, if the policy allows the user of a lease its frames, and the program can decapsulate them.
    fn check_tunnel(&self, lease: LeaseRef<'_>, device: Result<Device, String>) -> Result<Tunnel, Refusal> {
        let unusable = |why| Reason::Nic.because(format!("the program cannot decapsulate its frames: {why}"));
        let device = device.map_err(unusable)?;
        ipsec::check().map_err(unusable)?;
        self.policy.check_network_on(lease.peer, &device.name)?;
        let below = self.interfaces.get(&lease.held.interface).ok_or_else(no_lease)?;
        let tunnel = device.tunnel_on(below.link.index).map_err(unusable)?;
        // Every rule allows packets without a tag.
        if tunnel.vlan != 0 {
            let allowed = self.policy.check_vlan(lease.held.rule, tunnel.vlan);
            allowed.map_err(|why| Reason::NotAllowed.because(format!("{}: {why}", below.name())))?;
        }
        Ok(tunnel)
    }

    /// Checks whether a network of a lease may have stations in a tunnel: only those of the user's network on the tunnel
    /// device, which were checked as its frames are.
    pub(crate) fn check_tunnel_stations(
        &self,
        number: u64,
        network: u32,
        changes: &[StationChange],
    ) -> Result<(), Refusal> {
        let (connection, _, interface) = self.lessee(number)?;
        let Some(tunnel) = interface.tunnel(network) else {
            return Ok(());
        };
        let there = self.stations_on(tunnel.device, &connection.peer);
        let mut set = changes.iter().filter(|change| change.port.is_some());
        match set.find(|change| !there.contains(&change.station)) {
            None => Ok(()),
            Some(StationChange { station, .. }) => Reason::NotAllowed.refuse(format!(
                "{} is no address of this user's network on the tunnel device: set it there before",
                mac_text(station.mac)
            )),
        }
    }

    /// Stations of a user's networks on the interface of this index.
    fn stations_on(&self, index: u32, peer: &Credentials) -> BTreeSet<Station> {
        let theirs = self.all_leases().filter(|lease| lease.peer.uid == peer.uid);
        let stations = theirs.flat_map(|LeaseRef { held, .. }| {
            let interface = self.interfaces.get(&held.interface);
            let interface = interface.filter(|its| its.link.index == index).into_iter();
            interface.flat_map(|its| its.stations(held.wanted.start_queue))
        });
        stations.collect()
    }

    /// Networks in tunnels, each with its lease, its number and its tunnel.
    fn tunnels(&self) -> impl Iterator<Item = (LeaseRef<'_>, u32, Tunnel)> {
        self.all_leases().flat_map(|lease| {
            let interface = self.interfaces.get(&lease.held.interface).into_iter();
            let tunnels = interface.flat_map(move |its| its.tunnels_at(lease.held.wanted.start_queue));
            tunnels.map(move |(network, tunnel)| (lease, network, tunnel))
        })
    }

    /// Takes stations from networks in tunnels that those on the tunnel devices do not have any more.
    pub(crate) fn judge_tunnel_stations(&mut self) {
        let networks = self.tunnels().map(|(lease, network, tunnel)| {
            let there = self.stations_on(tunnel.device, lease.peer);
            (lease.number, lease.held.interface, network, there)
        });
        for (number, at, network, there) in networks.collect::<Vec<_>>() {
            // The lessee knows why.
            let reason = |station| (!there.contains(&station)).then(String::new);
            let interface = self.interfaces.get_mut(&at);
            if interface.is_some_and(|its| its.take_stations(network, reason)) {
                self.have_asked_again(number);
            }
        }
    }

    /// Checks the tunnels of networks again, and notifies lessees of changes.
    pub(crate) fn look_at_tunnels(&mut self) {
        let changed = self.tunnels().filter_map(|(lease, network, tunnel)| {
            let now = self.check_tunnel(lease, device_numbered(tunnel.device));
            let now = now.unwrap_or_else(|_| Tunnel::none(tunnel.device));
            (!now.is_same(tunnel)).then_some((lease.number, lease.held.interface, network, now))
        });
        for (number, at, network, tunnel) in changed.collect::<Vec<_>>() {
            let interface = self.interfaces.get_mut(&at);
            if let Some(Err(refusal)) = interface.map(|its| its.set_tunnel(network, tunnel)) {
                tracing::warn!(network, "its changed tunnel cannot be used: {refusal}");
            }
            self.have_asked_again(number);
        }
    }
}
