//! Tunnels whose frames the program of a network decapsulates: see [`Request::Tunnel`](steward_protocol::Request::Tunnel).
//!
//! The device may change, or what the policy allows: then the program gets the tunnel as it is now, or one that no frame
//! is of, and the lessee requests it again. Frames that the program does not take go to the device, if there is one.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use steer::{Station, Tunnel, mac_text};

use crate::server::connections::connection::Reply;
use crate::server::interface::Interface;
use crate::server::leases::lease::LeaseRef;
use crate::server::taps::network_tap::network_at;
use crate::server::{Answered, Server};
use host::links::tunnel::Vxlan;
use host::links::{ipsec, netlink_socket};
use program::peer::Credentials;
use steward_protocol::{Answer, Reason, Refusal, StationChange, VtepChange};

impl Server {
    /// Sets the tunnel of a network, and hands over sockets to read the device's tables by.
    pub(crate) fn tunnel(&mut self, number: u64, device: &str) -> Answered {
        let first = self.held_network(number)?.wanted.start_queue;
        let (connection, _, interface) = self.lessee(number)?;
        interface.program()?;
        let tunnel = self.check_tunnel(&connection.peer, Vxlan::by_name(device))?;
        self.lessee_mut(number)?.1.set_tunnel(first, tunnel)?;
        let failed = |error| Reason::Kernel.because(format!("no socket for rtnetlink: {error}"));
        Ok(Reply::with(Answer::Done, reading_sockets().map_err(failed)?))
    }

    /// Changes the hosts from which a network takes packets of its tunnel.
    pub(crate) fn change_vteps(&mut self, number: u64, changes: &[VtepChange]) -> Answered {
        let first = self.held_network(number)?.wanted.start_queue;
        let (_, interface) = self.lessee_mut(number)?;
        interface.change_vteps(first, changes)?;
        Ok(Answer::Done.into())
    }

    /// Has the network take packets of its tunnel from those hosts only.
    pub(crate) fn drop_unknown(&mut self, number: u64) -> Answered {
        let first = self.held_network(number)?.wanted.start_queue;
        self.lessee_mut(number)?.1.drop_unknown(first)?;
        Ok(Answer::Done.into())
    }

    /// The tunnel of a device, if a user may have its frames.
    fn check_tunnel(&self, peer: &Credentials, device: Result<Vxlan, String>) -> Result<Tunnel, Refusal> {
        let unusable = |why| Reason::Nic.because(format!("the program cannot decapsulate its frames: {why}"));
        let device = device.map_err(unusable)?;
        ipsec::check().map_err(unusable)?;
        self.policy.check_network_on(peer, &device.name)?;
        Ok(device.tunnel)
    }

    /// Checks whether the network of a lease may have stations in a tunnel: only those of the user's network on the vxlan
    /// device, which were checked as its frames are.
    pub(crate) fn check_tunnel_stations(
        &self,
        number: u64,
        changes: &[StationChange],
    ) -> Result<(), Refusal> {
        let (connection, held, interface) = self.lessee(number)?;
        let Some(tunnel) = interface.tunnel(held.wanted.start_queue) else {
            return Ok(());
        };
        let there = self.stations_on(tunnel.device, &connection.peer);
        let mut set = changes.iter().filter(|change| change.port.is_some());
        match set.find(|change| !there.contains(&change.station)) {
            None => Ok(()),
            Some(StationChange { station, .. }) => Reason::NotAllowed.refuse(format!(
                "{} is no address of this user's network on the vxlan device: set it there before",
                mac_text(station.mac)
            )),
        }
    }

    /// Stations of a user's networks on the interface of this index.
    fn stations_on(&self, index: u32, peer: &Credentials) -> BTreeSet<Station> {
        let theirs = self.all_leases().filter(|lease| lease.peer.uid == peer.uid);
        let networks = theirs.filter_map(|lease| {
            let (at, first) = network_at(lease.held);
            Some((self.interfaces.get(&at)?, first))
        });
        let networks = networks.filter(|(interface, _)| interface.link.index == index);
        networks
            .flat_map(|(interface, first)| interface.stations(first))
            .collect()
    }

    /// Leases of networks in tunnels, each with its interface and its tunnel.
    fn tunnels(&self) -> impl Iterator<Item = (LeaseRef<'_>, &Interface, Tunnel)> {
        self.all_leases().filter_map(|lease| {
            let interface = self.interfaces.get(&lease.held.interface)?;
            let tunnel = interface.tunnel(lease.held.wanted.start_queue)?;
            Some((lease, interface, tunnel))
        })
    }

    /// Takes stations from networks in tunnels that those on the vxlan devices do not have any more.
    pub(crate) fn judge_tunnel_stations(&mut self) {
        let mut lost = Vec::new();
        for (lease, interface, tunnel) in self.tunnels() {
            let (at, first) = network_at(lease.held);
            let there = self.stations_on(tunnel.device, lease.peer);
            let gone = interface
                .stations(first)
                .filter(|station| !there.contains(station));
            let gone: Vec<_> = gone
                .map(|station| StationChange { station, port: None })
                .collect();
            if !gone.is_empty() {
                lost.push((lease.number, at, first, gone));
            }
        }
        for (number, at, first, gone) in lost {
            if let Some(Err(refusal)) = self
                .interfaces
                .get_mut(&at)
                .map(|its| its.change_stations(first, &gone))
            {
                tracing::error!(first, "stations of a network in a tunnel stay: {refusal}");
            }
            self.have_asked_again(number);
        }
    }

    /// Checks the tunnels of networks again, and notifies lessees of changes.
    pub(crate) fn look_at_tunnels(&mut self) {
        let mut changed = Vec::new();
        for (lease, _, tunnel) in self.tunnels() {
            let (at, first) = network_at(lease.held);
            let now = self.check_tunnel(lease.peer, Vxlan::by_index(tunnel.device));
            let now = now.unwrap_or_else(|_| Tunnel::none(tunnel.device));
            if !now.is_same(tunnel) {
                changed.push((lease.number, at, first, now));
            }
        }
        for (number, at, first, tunnel) in changed {
            let interface = self.interfaces.get_mut(&at);
            match interface.map(|its| its.set_tunnel(first, tunnel)) {
                Some(Err(refusal)) => {
                    tracing::warn!(first, "the tunnel of a network stays: {refusal}");
                }
                _ => self.have_asked_again(number),
            }
        }
    }
}

/// Two sockets of rtnetlink that cannot change anything, whoever writes to them: the kernel asks for the capability of who
/// opened a socket, too (`netlink_ns_capable`, net/netlink/af_netlink.c). So a thread without capabilities opens them.
fn reading_sockets() -> io::Result<Vec<OwnedFd>> {
    let open = || {
        let own = capabilities(None)?;
        let effective = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective, ..own })?;
        (0..2).map(|_| netlink_socket(None)).collect()
    };
    let opened = std::thread::scope(|scope| scope.spawn(open).join());
    opened.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}
