//! Networks of an interface: leases whose queues serve many stations.
//!
//! The program's maps of a network, including the ring, are pinned and outlive this process. This module keeps their
//! content for a program that is attached again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use steer::{MulticastLimit, MulticastRing, Program, Station, Tunnel, queues_of, with_sources};

use super::Interface;
use host::links::Link;
use host::links::above::addresses_above;
use host::nic::tags::strips_tags;
use host::unserved_queues::UnservedQueues;
use steward_protocol::{Reason, Refusal, STATIONS_MAX, StationChange, VTEPS_MAX, VtepChange};

#[derive(Debug)]
pub(crate) struct Network {
    queues: Range<u32>,
    stations: BTreeMap<Station, u32>,
    /// `None`: it shares the queues of another one.
    ring: Option<MulticastRing>,
    /// The tunnel that its frames are in, if one was requested.
    tunnel: Option<Tunnel>,
    /// The hosts from which it takes packets of the tunnel.
    vteps: BTreeSet<IpAddr>,
    /// The NIC or the kernel takes tags off before the program sees frames.
    pub(super) strips_tags: bool,
    /// It has stations in VLANs, or is about to get some.
    has_vlans: bool,
    unserved: UnservedQueues,
}

/// Prefix of the names of pinned rings; the first queue follows.
const RING: &str = "ring-";

fn ring_path(pins: &Path, first: u32) -> PathBuf {
    pins.join(format!("{RING}{first}"))
}

impl Network {
    pub(super) fn look(&mut self, link: &Link) {
        self.has_vlans = self.stations.keys().any(|station| station.vlan != 0);
        self.strips_tags = strips_tags(&link.name);
        self.unserved = UnservedQueues::network(link, &self.queues);
    }

    /// Whether tags are stripped that distinguish its stations, or packets of its tunnel from those of other VLANs.
    pub(super) fn lacks_tags(&self) -> bool {
        self.strips_tags && (self.has_vlans || self.tunnel.is_some())
    }

    /// The note for its lessee; may be empty.
    pub(super) fn note(&self, interface: &str) -> String {
        match self.tunnel {
            // In other queues they go to the tunnel device.
            Some(_) => String::new(),
            None => self.unserved.note(interface, &self.queues, true),
        }
    }

    /// The kernel tells tunnels of Geneve apart by the sender, too: that of another one is not the lessee's.
    fn check_vteps(&self, changes: &[VtepChange]) -> Result<(), Refusal> {
        match self.tunnel.and_then(|tunnel| tunnel.remote) {
            Some(vtep) if changes != [VtepChange { vtep, is_added: true }] => {
                Reason::NotAllowed.refuse(format!("the tunnel is Geneve's: its VTEP is {vtep}"))
            }
            _ => Ok(()),
        }
    }

    /// Installs the network in a program, before any queue of the lease is active in it.
    pub(super) fn install(&self, number: u32, program: &Program) -> Result<(), String> {
        let set = self.ring.as_ref().map_or(Ok(()), |ring| {
            program.set_network(self.queues.clone(), MulticastLimit::default(), ring)
        });
        let drops_unknown = self.tunnel.is_some_and(|tunnel| tunnel.drops_unknown);
        set.and_then(|()| match self.tunnel.map(Tunnel::leaving_unknown) {
            Some(tunnel) => program.set_tunnel(self.queues.clone(), number, tunnel),
            None => Ok(()),
        })
        .map_err(with_sources)?;
        // Without room for one, its packets go to the kernel.
        let mut vteps = self.vteps.iter();
        let has_all = vteps.try_for_each(|&vtep| program.change_vtep(number, (vtep, true)));
        if drops_unknown && has_all.is_ok() {
            let dropped = program.drop_unknown(self.queues.clone(), number);
            dropped.map_err(with_sources)?;
        }
        let mut stations = self.stations.iter();
        let set = stations.try_for_each(|(&station, &port)| program.set_station(number, station, port));
        set.map_err(with_sources)
    }

    /// Pins the ring next to the program.
    pub(super) fn pin(&mut self, pins: &Path) -> io::Result<()> {
        let path = ring_path(pins, self.queues.start);
        self.ring.as_mut().map_or(Ok(()), |ring| ring.pin(&path))
    }
}

fn no_tunnel() -> Refusal {
    Reason::Lease.because("the network has no tunnel: ask for that first")
}

fn with_tunnel(networks: &mut BTreeMap<u32, Network>, number: u32) -> Result<&mut Network, Refusal> {
    let network = networks.get_mut(&number);
    network.filter(|its| its.tunnel.is_some()).ok_or_else(no_tunnel)
}

pub(super) fn by_kernel(error: anyhow::Error) -> Refusal {
    Reason::Kernel.because(with_sources(error))
}

impl Interface {
    /// Makes reserved queues those of a network.
    /// Errors: in words.
    pub(super) fn open_network(&mut self, queues: Range<u32>, mut ring: MulticastRing) -> Result<(), String> {
        if let Some(pins) = self.pins.as_ref().filter(|pins| pins.is_dir()) {
            let path = ring_path(pins, queues.start);
            ring.pin(&path)
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        self.put_network(queues.start, queues, Some(ring))
    }

    /// Takes over a network of a previous steward; if its program is lost, it starts with no stations.
    pub(super) fn adopt_network(&mut self, queues: Range<u32>) -> Result<(), String> {
        let (Some(program), Some(pins)) = (&self.program, &self.pins) else {
            let ring = MulticastRing::new().map_err(|error| format!("no ring for a network: {error}"))?;
            return self.open_network(queues, ring);
        };
        let first = queues.start;
        let ring = MulticastRing::open_pinned(&ring_path(pins, first)).map_err(|error| error.to_string())?;
        let mut sharing = program.tunnels(first).into_keys().filter(|&its| its != first);
        // The predecessor may not have finished this.
        self.put_network(first, queues.clone(), Some(ring))?;
        sharing.try_for_each(|number| self.put_network(number, queues.clone(), None))
    }

    /// Adds a network, with what the program has of it.
    fn put_network(
        &mut self,
        number: u32,
        queues: Range<u32>,
        ring: Option<MulticastRing>,
    ) -> Result<(), String> {
        let program = self.program.as_ref();
        let stations = program.map_or_else(Vec::new, |program| program.stations(number));
        let tunnels = program.map_or_else(BTreeMap::new, |program| program.tunnels(queues.start));
        let network = Network {
            unserved: UnservedQueues::network(&self.link, &queues),
            queues,
            has_vlans: stations.iter().any(|(station, _)| station.vlan != 0),
            stations: stations.into_iter().collect(),
            ring,
            tunnel: tunnels.get(&number).copied(),
            vteps: program.map_or_else(BTreeSet::new, |program| program.vteps(number)),
            strips_tags: strips_tags(&self.link.name),
        };
        if let Some(program) = program {
            network.install(number, program)?;
        }
        self.networks.insert(number, network);
        self.look_at_host();
        Ok(())
    }

    /// Removes a network from the program and unpins its ring.
    pub(super) fn end_network(&self, queues: Range<u32>, program: &Program) -> anyhow::Result<()> {
        program.end_network(queues.clone())?;
        if let Some(pins) = &self.pins {
            let _ = fs::remove_file(ring_path(pins, queues.start));
        }
        Ok(())
    }

    /// Ends networks without a lease, which a dead steward has left.
    pub(super) fn sweep_networks(&mut self) {
        let Some(program) = &self.program else {
            return;
        };
        for queue in program.networks() {
            if self.lessees.contains_key(&queue) {
                continue;
            }
            if let Err(error) = self.end_network(queue..queue + 1, program) {
                tracing::warn!(interface = self.link.name, "{}", with_sources(error));
            }
        }
        let entries = self.pins.as_ref().and_then(|pins| fs::read_dir(pins).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name();
            let first = name
                .to_str()
                .and_then(|name| name.strip_prefix(RING)?.parse().ok());
            if first.is_some_and(|first: u32| !self.networks.contains_key(&first)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Reads the host's addresses on the interface.
    pub(crate) fn look_at_host(&mut self) {
        let is_asked = !self.networks.is_empty() || self.is_by_tap();
        if !is_asked || self.link.index == 0 {
            return;
        }
        match addresses_above(&self.link) {
            Ok(of_host) => {
                self.other_of_host |= self.of_host != of_host;
                self.of_host = of_host;
            }
            // Keep the known addresses.
            Err(error) => {
                if let Some(left_out) = self.lines.allow() {
                    tracing::warn!(
                        interface = self.link.name,
                        "cannot ask which addresses the host has on it: {error}{left_out}"
                    );
                }
            }
        }
    }

    /// The ring of the network of this first queue.
    pub(crate) fn ring(&self, first: u32) -> Option<&MulticastRing> {
        self.networks.get(&first)?.ring.as_ref()
    }

    /// The numbers of the network of this first queue, and of those that share its queues.
    pub(crate) fn networks_at(&self, first: u32) -> Vec<u32> {
        let numbers = self.networks.keys().copied();
        numbers.filter(|&number| queues_of(number) == first).collect()
    }

    /// The same of those in tunnels, with their tunnels.
    pub(crate) fn tunnels_at(&self, first: u32) -> Vec<(u32, Tunnel)> {
        let its = |number| Some((number, self.tunnel(number)?));
        let numbers = self.networks_at(first).into_iter();
        numbers.filter_map(its).collect()
    }

    /// Stations of the network of this number.
    pub(crate) fn stations(&self, number: u32) -> impl Iterator<Item = Station> {
        let networks = self.networks.get(&number).into_iter();
        networks.flat_map(|network| network.stations.keys().copied())
    }

    /// The tunnel of the network of this number.
    pub(crate) fn tunnel(&self, number: u32) -> Option<Tunnel> {
        self.networks.get(&number)?.tunnel
    }

    /// Has the program decapsulate the frames in a tunnel to the network of this number, and take no others. A number that
    /// shares the queues of another network may be new.
    pub(crate) fn set_tunnel(&mut self, number: u32, tunnel: Tunnel) -> Result<(), Refusal> {
        let (name, first) = (&self.link.name, queues_of(number));
        let is_it = |&(&other, its): &(&u32, &Network)| {
            let has_it = |its: Tunnel| match queues_of(other) == first {
                // Queues have one tunnel of a VNI and a port, also while there is no route to its host.
                true => (its.vni, its.port) == (tunnel.vni, tunnel.port),
                false => its.is_same(tunnel),
            };
            tunnel.port != 0 && other != number && its.tunnel.is_some_and(has_it)
        };
        // One that shared queues and has left has no stations.
        let has_left =
            |&(&other, its): &(&u32, &Network)| queues_of(other) != other && its.stations.is_empty();
        let (left, others): (Vec<_>, Vec<_>) = self.networks.iter().filter(is_it).partition(has_left);
        if !others.is_empty() {
            let Tunnel { vni, port, .. } = tunnel;
            return Reason::Taken.refuse(format!(
                "another network of {name} has VNI {vni} on UDP port {port}: leave out the underlay of one of them"
            ));
        }
        if self.is_by_tap() {
            return Reason::Program.refuse(format!(
                "frames of {name} come by a tap, and only an XDP program decapsulates them: lease it with another mode"
            ));
        }
        let queues = match self.networks.get(&first) {
            Some(network) if number == first || network.tunnel.is_some() => network.queues.clone(),
            _ => return Err(no_tunnel()),
        };
        for other in left.into_iter().map(|(&other, _)| other).collect::<Vec<_>>() {
            self.networks.remove(&other);
            let program = self.program.as_ref();
            let ended = program.map_or(Ok(()), |program| program.end_tunnel(other));
            ended.map_err(by_kernel)?;
        }
        if !self.networks.contains_key(&number) {
            let put = self.put_network(number, queues, None);
            put.map_err(|why| Reason::Kernel.because(why))?;
        }
        if let Some((network, program)) = self.networks.get_mut(&number).zip(self.program.as_ref()) {
            let set = program.set_tunnel(network.queues.clone(), number, tunnel);
            set.map_err(by_kernel)?;
            if network.tunnel.is_none() {
                network.stations.clear();
            }
            (network.tunnel, network.vteps) = (Some(tunnel), BTreeSet::new());
        }
        self.decide_hints();
        self.accept_stations(number);
        let strips_tags = self.networks.get(&number).is_some_and(|its| its.strips_tags);
        if tunnel.vlan != 0 && strips_tags && !self.restores_tags(first) {
            // The program does not see the tag of its packets, and leaves them to the kernel.
            return Reason::NoInterface.refuse(host::nic::tags::blind(&self.link.name));
        }
        Ok(())
    }

    /// Has the program drop packets for the tunnel of a network from hosts that it takes none from.
    pub(crate) fn drop_unknown(&mut self, number: u32) -> Result<(), Refusal> {
        let network = with_tunnel(&mut self.networks, number)?;
        if let Some(program) = &self.program {
            let dropped = program.drop_unknown(network.queues.clone(), number);
            dropped.map_err(by_kernel)?;
        }
        network.tunnel = network.tunnel.map(Tunnel::dropping_unknown);
        Ok(())
    }

    /// Changes the hosts from which the network of this number takes packets of its tunnel; what the kernel refuses leaves
    /// those before it changed.
    pub(crate) fn change_vteps(&mut self, number: u32, changes: &[VtepChange]) -> Result<(), Refusal> {
        let network = with_tunnel(&mut self.networks, number)?;
        network.check_vteps(changes)?;
        let added = changes.iter().filter(|change| change.is_added).count();
        if network.vteps.len() + added > VTEPS_MAX {
            return Reason::Limit.refuse(format!("more than {VTEPS_MAX} VTEPs of one network"));
        }
        for &VtepChange { vtep, is_added } in changes {
            if let Some(program) = &self.program {
                program.change_vtep(number, (vtep, is_added)).map_err(by_kernel)?;
            }
            match is_added {
                true => network.vteps.insert(vtep),
                false => network.vteps.remove(&vtep),
            };
        }
        Ok(())
    }

    /// Changes stations of the network of this number. None if one of them cannot be; what the kernel then refuses
    /// leaves those before it changed.
    pub(crate) fn change_stations(&mut self, first: u32, changes: &[StationChange]) -> Result<(), Refusal> {
        self.see_tags(first, changes);
        self.check_changes(first, changes)?;
        let Some(network) = self.networks.get_mut(&first) else {
            return Ok(());
        };
        let changed = changes.iter().try_for_each(|&StationChange { station, port }| {
            // A program that is attached later gets all stations then.
            if let Some(program) = &self.program {
                match port {
                    Some(port) => program.set_station(first, station, port),
                    None => program.remove_station(first, station),
                }?;
            }
            match port {
                Some(port) => network.stations.insert(station, port),
                None => network.stations.remove(&station),
            };
            anyhow::Ok(())
        });
        self.accept_stations(first);
        changed.map_err(by_kernel)
    }

    /// Takes stations from the network of this number for which there is a reason, which is logged unless it is empty.
    /// Returns whether there were some.
    pub(crate) fn take_stations(&mut self, number: u32, reason: impl Fn(Station) -> Option<String>) -> bool {
        let stations = self.stations(number);
        let lost: Vec<_> = stations
            .filter_map(|station| Some((station, reason(station)?)))
            .collect();
        let Some((_, why)) = lost.first() else {
            return false;
        };
        let interface = self.link.name.clone();
        if !why.is_empty() {
            let (stations, text) = (lost.len(), "not allowed by the policy, or the host's");
            tracing::warn!(interface, stations, first = why, "taken from a network: {text}");
        }
        let change = |&(station, _): &_| StationChange { station, port: None };
        let changes: Vec<_> = lost.iter().map(change).collect();
        if let Err(refusal) = self.change_stations(number, &changes) {
            tracing::error!(interface, "they stay: {refusal}");
        }
        true
    }

    /// Has the program read tags from the driver, if requested, before there are stations in VLANs.
    fn see_tags(&mut self, first: u32, changes: &[StationChange]) {
        let mut set = changes.iter().filter(|change| change.port.is_some());
        if let Some(network) = self.networks.get_mut(&first)
            && set.any(|change| change.station.vlan != 0)
        {
            network.has_vlans = true;
            network.strips_tags = strips_tags(&self.link.name);
            self.decide_hints();
        }
    }

    fn check_changes(&self, first: u32, changes: &[StationChange]) -> Result<(), Refusal> {
        let name = &self.link.name;
        let Some(network) = self.networks.get(&first) else {
            return Reason::Lease.refuse(format!("{name} has no network with this first queue"));
        };
        let set = || changes.iter().filter(|change| change.port.is_some());
        let new = set().filter(|change| !network.stations.contains_key(&change.station));
        if network.stations.len() + new.count() > STATIONS_MAX {
            return Reason::Limit.refuse(format!("more than {STATIONS_MAX} stations of one network"));
        }
        // Tags inside of a tunnel stay.
        let blind = network.strips_tags && !self.restores_tags(first) && network.tunnel.is_none();
        for StationChange { station, .. } in set() {
            // Networks in tunnels may have the same stations.
            let is_plain = |network: &&Network| network.tunnel.is_none();
            let mut others = self.networks.values().filter(is_plain);
            let is_taken =
                |other: &Network| other.queues != network.queues && other.stations.contains_key(station);
            if is_plain(&network) && others.any(is_taken) {
                return Reason::Taken.refuse(format!(
                    "another lease of {name} has {} in VLAN {}: give the guest another address",
                    steer::mac_text(station.mac),
                    station.vlan
                ));
            }
            if station.vlan != 0 && blind {
                return Reason::NoInterface.refuse(host::nic::tags::blind(name));
            }
        }
        Ok(())
    }

    /// Lets the NIC accept frames to the stations of a network, or to a guest alone in tap mode. To one that is not the
    /// policy lets it ([`Entries::apply`](crate::server::leases::entries::Entries::apply)).
    pub(super) fn accept_stations(&mut self, first: u32) {
        let mut macs: Vec<[u8; 6]> = match (self.networks.get(&first), self.entries.get(&first)) {
            // Those of a tunnel are inside of frames to the host.
            (Some(network), _) if network.tunnel.is_some() => Vec::new(),
            (Some(network), _) => network.stations.keys().map(|station| station.mac).collect(),
            (None, Some(entries)) if self.is_by_tap() => entries.filter.macs.clone(),
            _ => return,
        };
        macs.sort_unstable();
        macs.dedup();
        if macs.is_empty() {
            self.ledger.refuse(first);
        } else if let Err(error) = self.ledger.accept(self.link.index, first, &macs) {
            tracing::warn!(
                interface = self.link.name,
                "the NIC may not accept frames to guests: {error}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lessee_chooses_no_vteps_of_a_tunnel_of_geneve() {
        let chosen = |remote| {
            let tunnel = Tunnel {
                remote,
                ..Tunnel::none(7)
            };
            let network = Network {
                queues: 0..1,
                stations: BTreeMap::new(),
                ring: None,
                tunnel: Some(tunnel),
                vteps: BTreeSet::new(),
                strips_tags: false,
                has_vlans: false,
                unserved: UnservedQueues::default(),
            };
            let change = |last, is_added| VtepChange {
                vtep: [10, 9, 0, last].into(),
                is_added,
            };
            [(2, true), (2, false), (3, true)]
                .map(|(last, is_added)| network.check_vteps(&[change(last, is_added)]).is_ok())
        };
        assert_eq!(chosen(None), [true; 3]);
        assert_eq!(chosen(Some([10, 9, 0, 2].into())), [true, false, false]);
    }
}
