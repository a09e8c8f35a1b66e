//! Follows the forwarding database (FDB), routes and neighbours of the kernel's tunnel device, and builds the tables by
//! which workers encapsulate ([`Remotes`], [`Vteps`]).
//!
//! The FDB of a VXLAN device gives the VTEP (tunnel endpoint) of a MAC address; a Geneve device has one VTEP, which gets all
//! frames. Routes give the next hop of a VTEP, neighbours the MAC address of that. This only reads: the kernel resolves next
//! hops. Frames to a VTEP without a resolved next hop on the underlay go through the kernel; the first one makes it resolve
//! the next hop, and its notification arrives here. If a next hop is stale, one frame goes through the kernel, which confirms
//! it ([`Vtep::confirm`]).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use dataplane::fdb::remotes::{Remotes, Vtep, VtepNumber, Vteps};
use host::links::Link;
use host::links::routes::{Change, NextHop, Resolved, TableChanges, Tables, VxlanEntry};
use host::links::tunnel::Device;
use packet::ethernet::Mac;
use packet::tunnel::{Endpoints, Outer};
use steer::Tunnel;
use steward_protocol::{VTEPS_MAX, VtepChange};

/// Most addresses of other hosts; frames to further ones are left to the kernel.
const REMOTES_MAX: usize = 1 << 17;
/// Most VTEPs with addresses; as many others may get multicast frames ([`VTEPS_MAX`]).
const RESOLVED_MAX: usize = VTEPS_MAX / 2;
/// Most datagrams with changes that are read at once.
const DATAGRAMS: usize = 1024;
/// Pause between two reads of all tables, or all routes, which others can change as often as they like.
const PAUSE: Duration = Duration::from_millis(100);
/// The pause after a read is this many times as long as the read.
const PAUSE_FACTOR: u32 = 20;

/// Pause between two tables of VTEPs for workers: each is a message to all of them.
const PUBLISH_PAUSE: Duration = Duration::from_millis(5);
/// How long the kernel gets to confirm a stale next hop.
const CONFIRM_PAUSE: Duration = Duration::from_secs(10);

/// Numbers for `status`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RemoteCounts {
    /// Addresses whose VTEP is known.
    pub(super) addresses: usize,
    /// VTEPs.
    pub(super) vteps: usize,
    /// Those with a resolved next hop on the underlay.
    pub(super) resolved: usize,
    /// Insertions since the last full read for which there was no room.
    pub(super) left_out: usize,
}

/// The next hop of packets to a VTEP, and the interface by which they leave: the underlay's, or a VLAN device on that.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Hop {
    next: NextHop,
    /// VLAN of that interface; 0: packets have no tag.
    vlan: u16,
    /// MAC address of that interface.
    from: Mac,
}

/// A VTEP that has addresses, or that of a Geneve device.
struct VtepState {
    ip: IpAddr,
    /// How many; 0 for Geneve.
    addresses: usize,
    /// `None`: its route does not lead over the underlay.
    hop: Option<Hop>,
    /// MAC address of its next hop, and its outer headers; `None`: the next hop is not resolved.
    known: Option<(Mac, Arc<Vtep>)>,
}

/// See the module's head.
pub(super) struct Follower {
    tables: Tables,
    pub(super) changes: Arc<TableChanges>,
    device: Device,
    /// The Geneve device or its local address has changed: the tunnel has to be requested again.
    pub(super) is_outdated: bool,
    /// Index and MAC address of the underlay's interface.
    underlay: (u32, Mac),
    /// That interface (VLAN 0) and the VLAN devices on it, by index: VLAN and MAC address.
    interfaces: HashMap<u32, (u16, Mac)>,
    pub(super) remotes: Arc<Remotes>,
    /// The VTEPs by number, as workers use them.
    pub(super) published: Arc<Vteps>,
    /// The VTEP of each address.
    vtep_of: HashMap<Mac, VtepNumber>,
    vteps: BTreeMap<VtepNumber, VtepState>,
    numbers: HashMap<IpAddr, VtepNumber>,
    /// VTEPs that get multicast frames, and whether they are reached by the underlay.
    flooded: BTreeMap<IpAddr, bool>,
    /// The VTEPs whose packets the program takes, as last reported, and whether there may be others now.
    reported: BTreeSet<IpAddr>,
    is_unreported: bool,
    /// Those that are reached by another interface are among them: packets of others are dropped.
    takes_all_listed: bool,
    /// The number of the next new VTEP.
    next_number: u16,
    /// `published` has to be made again.
    is_unpublished: bool,
    /// All tables have to be read again, or all routes.
    needs_read: bool,
    needs_resolve: bool,
    /// When that may be done, and when `published` may be made again.
    not_before: Instant,
    publish_at: Instant,
    /// Some next hop was stale when it was read; when they are read again.
    has_stale: bool,
    confirm_at: Instant,
    pub(super) counts: RemoteCounts,
}

impl Follower {
    /// Reads all tables of a tunnel device by these sockets ([`steward_client::Lease::tunnel`]).
    ///
    /// # Errors
    /// In words.
    pub(super) fn begin(
        [requests, changes]: [OwnedFd; 2],
        device: &str,
        underlay: &Link,
        takes_all_listed: bool,
    ) -> Result<Self, String> {
        // Before the tables are read: no change is missed.
        let changes = TableChanges::subscribe(changes).map_err(|error| error.to_string())?;
        let (mut tables, now) = (Tables::new(requests), Instant::now());
        let device = tables.device_named(device)?;
        let remote = device.tunnel.remote;
        let mut follower = Self {
            device,
            is_outdated: false,
            tables,
            changes: Arc::new(changes),
            underlay: (underlay.index, underlay.mac),
            interfaces: HashMap::new(),
            remotes: Arc::new(Remotes::new(REMOTES_MAX)),
            published: Arc::default(),
            vtep_of: HashMap::new(),
            vteps: BTreeMap::new(),
            numbers: HashMap::new(),
            flooded: BTreeMap::new(),
            reported: BTreeSet::new(),
            is_unreported: true,
            // The kernel takes none from others than the remote of a Geneve device.
            takes_all_listed: takes_all_listed && remote.is_none(),
            next_number: 0,
            is_unpublished: false,
            needs_read: false,
            needs_resolve: false,
            not_before: now,
            publish_at: now,
            has_stale: false,
            confirm_at: now + CONFIRM_PAUSE,
            counts: RemoteCounts::default(),
        };
        follower.read().map_err(|error| error.to_string())?;
        if let Some(number) = remote.and_then(|remote| follower.number_of(remote)) {
            follower.remotes = Arc::new(Remotes::behind(number));
        }
        follower.publish(Instant::now());
        Ok(follower)
    }

    /// The device is one of Geneve.
    pub(super) fn is_geneve(&self) -> bool {
        self.device.tunnel.remote.is_some()
    }

    /// Name of the tunnel device, if packets for it from unknown hosts are dropped.
    pub(super) fn drops_for(&self) -> Option<&str> {
        self.takes_all_listed.then_some(&self.device.name)
    }

    /// Applies pending changes; returns whether [`Self::vteps`] is another one.
    pub(super) fn follow(&mut self) -> bool {
        let (index, interfaces) = (self.device.tunnel.device, &self.interfaces);
        let (mut entries, mut hops) = (Vec::new(), HashSet::new());
        let (mut needs_read, mut needs_resolve) = (self.needs_read, self.needs_resolve);
        let mut note = |change| match change {
            Change::Entry(of, entry) if of == index => entries.push(entry),
            Change::Neighbour(hop) if interfaces.contains_key(&hop.index) => drop(hops.insert(hop)),
            Change::Entry(..) | Change::Neighbour(_) => {}
            Change::Routes => needs_resolve = true,
            Change::Lost => needs_read = true,
        };
        // Others can make changes as often as they like.
        for _ in 0..DATAGRAMS {
            if !self.changes.read(&mut note) {
                break;
            }
        }
        (self.needs_read, self.needs_resolve) = (needs_read, needs_resolve);
        entries.into_iter().for_each(|entry| self.apply(entry));
        if !hops.is_empty() {
            self.resolve_hops(|_, hop| hops.contains(&hop));
        }
        let now = Instant::now();
        self.confirm_stale(now);
        self.reread_if_due(now);
        self.publish(now)
    }

    /// When [`Self::follow`] is due without a change.
    pub(super) fn due(&self) -> Option<Instant> {
        let read = (self.needs_read || self.needs_resolve).then_some(self.not_before);
        let publish = self.is_unpublished.then_some(self.publish_at);
        let confirm = self.has_stale.then_some(self.confirm_at);
        [read, publish, confirm].into_iter().flatten().min()
    }

    /// Makes [`Self::published`] again if it has to be and the last one is old enough; returns whether it was made.
    fn publish(&mut self, now: Instant) -> bool {
        if !self.is_unpublished || now < self.publish_at {
            return false;
        }
        self.is_unpublished = false;
        self.publish_at = now + PUBLISH_PAUSE;
        let last = self.vteps.keys().next_back();
        let mut vteps = vec![None; last.map_or(0, |last| usize::from(last.0) + 1)];
        for (number, vtep) in &self.vteps {
            vteps[usize::from(number.0)] = vtep.known.as_ref().map(|(_, vtep)| Arc::clone(vtep));
        }
        self.published = Arc::new(Vteps(vteps));
        let resolved = self.published.0.iter().flatten().count();
        (self.counts.vteps, self.counts.resolved) = (self.vteps.len(), resolved);
        true
    }

    /// Reads all tables, or all routes, again, if that is due.
    fn reread_if_due(&mut self, begun: Instant) {
        if !(self.needs_read || self.needs_resolve) || begun < self.not_before {
            return;
        }
        self.needs_resolve = false;
        match std::mem::take(&mut self.needs_read) {
            true => {
                if let Err(error) = self.read() {
                    tracing::debug!("cannot read the tables of {}: {error}", self.device.name);
                    self.needs_read = true;
                }
            }
            false => self.resolve_all(),
        }
        let now = Instant::now();
        self.not_before = now + PAUSE.max(now.duration_since(begun) * PAUSE_FACTOR);
    }

    /// Reads all entries, and all routes.
    fn read(&mut self) -> io::Result<()> {
        let (mut found, mut left_out) = (HashMap::new(), 0);
        self.flooded.clear();
        self.is_unreported = true;
        let (device, flooded) = (self.device.tunnel.device, &mut self.flooded);
        self.tables.fdb(device, |entry| match entry {
            VxlanEntry::Unicast(mac, Some(vtep)) if found.len() < REMOTES_MAX => {
                found.insert(mac, vtep);
            }
            VxlanEntry::Unicast(_, Some(_)) => left_out += 1,
            // Routes follow.
            VxlanEntry::Flood(vtep, _) if flooded.len() < RESOLVED_MAX => drop(flooded.insert(vtep, false)),
            VxlanEntry::Unicast(_, None) | VxlanEntry::Flood(..) => {}
        })?;
        self.counts.left_out = left_out;
        let gone = self.vtep_of.keys().filter(|mac| !found.contains_key(*mac));
        for mac in gone.copied().collect::<Vec<_>>() {
            self.set(mac, None);
        }
        self.resolve_all();
        // This resolves new VTEPs.
        for (mac, vtep) in found {
            self.set(mac, Some(vtep));
        }
        Ok(())
    }

    /// Changes since the last call of the VTEPs whose packets the program accepts.
    pub(super) fn take_vtep_changes(&mut self) -> Vec<VtepChange> {
        if !std::mem::take(&mut self.is_unreported) {
            return Vec::new();
        }
        if let Some(vtep) = self.device.tunnel.remote {
            // The steward accepts no other host of a Geneve tunnel. It refuses this one if the program's map is full.
            let is_added = true;
            return vec![VtepChange { vtep, is_added }];
        }
        // Packets from others are not expected here: the kernel judges them, unless they are dropped.
        let is_taken = |is_on_underlay| is_on_underlay || self.takes_all_listed;
        let vteps = self.vteps.values().filter(|vtep| is_taken(vtep.hop.is_some()));
        let flooded = self
            .flooded
            .iter()
            .filter(|(_, is_on_underlay)| is_taken(**is_on_underlay));
        let wanted: BTreeSet<_> = vteps
            .map(|vtep| vtep.ip)
            .chain(flooded.map(|(&ip, _)| ip))
            .collect();
        let change = |is_added| move |&vtep: &IpAddr| VtepChange { vtep, is_added };
        let removed = self.reported.difference(&wanted).map(change(false));
        let added = wanted.difference(&self.reported).map(change(true));
        let changes = removed.chain(added).collect();
        self.reported = wanted;
        changes
    }

    fn apply(&mut self, entry: VxlanEntry) {
        match entry {
            VxlanEntry::Unicast(mac, vtep) => self.set(mac, vtep),
            VxlanEntry::Flood(vtep, true) if self.flooded.len() < RESOLVED_MAX => {
                let is_on_underlay = self.next_hop(vtep).is_some();
                self.flooded.insert(vtep, is_on_underlay);
                self.is_unreported = true;
            }
            // If there are more than there is room for, the kernel takes the packets of the others.
            VxlanEntry::Flood(_, true) => {}
            VxlanEntry::Flood(vtep, false) => {
                self.flooded.remove(&vtep);
                self.is_unreported = true;
            }
        }
    }

    /// Sets the VTEP of an address; `None`: the kernel sends its frames, if they are sent at all.
    fn set(&mut self, mac: Mac, vtep: Option<IpAddr>) {
        let before = self.vtep_of.get(&mac).copied();
        let number = vtep.and_then(|ip| self.number_of(ip));
        if number.is_some() && number == before {
            return;
        }
        match number.filter(|&number| self.remotes.set(mac, number)) {
            Some(number) => {
                self.vtep_of.insert(mac, number);
                if let Some(vtep) = self.vteps.get_mut(&number) {
                    vtep.addresses += 1;
                }
            }
            None => {
                self.remotes.remove(mac);
                self.vtep_of.remove(&mac);
                match vtep {
                    Some(_) => self.counts.left_out += 1,
                    // Now there is room for one that was left out.
                    None => self.needs_read |= before.is_some() && self.counts.left_out > 0,
                }
            }
        }
        if let Some(vtep) = before.and_then(|before| self.vteps.get_mut(&before)) {
            vtep.addresses -= 1;
        }
        for number in before.into_iter().chain(number) {
            self.forget_unused(number);
        }
        self.counts.addresses = self.vtep_of.len();
    }

    fn forget_unused(&mut self, number: VtepNumber) {
        if let Entry::Occupied(vtep) = self.vteps.entry(number)
            && vtep.get().addresses == 0
        {
            self.numbers.remove(&vtep.remove().ip);
            (self.is_unpublished, self.is_unreported) = (true, true);
        }
    }

    /// The number of a VTEP, which may be a new one; `None`: there are too many. A free number is used again as late
    /// as possible: for a moment, workers may still know its last VTEP.
    fn number_of(&mut self, ip: IpAddr) -> Option<VtepNumber> {
        if let Some(&number) = self.numbers.get(&ip) {
            return Some(number);
        }
        if self.vteps.len() >= RESOLVED_MAX {
            return None;
        }
        while self.vteps.contains_key(&VtepNumber(self.next_number)) {
            self.next_number = self.next_number.wrapping_add(1);
        }
        let number = VtepNumber(self.next_number);
        self.next_number = self.next_number.wrapping_add(1);
        let vtep = VtepState {
            ip,
            addresses: 0,
            hop: None,
            known: None,
        };
        self.vteps.insert(number, vtep);
        self.numbers.insert(ip, number);
        (self.is_unpublished, self.is_unreported) = (true, true);
        self.route(number);
        self.resolve_hops(|of, _| of == number);
        Some(number)
    }

    /// Reads all interfaces, routes and next hops.
    fn resolve_all(&mut self) {
        // The steward reports changes of VXLAN devices. For Geneve the local address changes with a route.
        if self.is_geneve() {
            let now = self.tables.device_numbered(self.device.tunnel.device);
            if now.is_ok_and(|now| now != self.device) {
                self.is_outdated = true;
                // Until the tunnel is requested again, the kernel sends.
                self.device.tunnel.local = Ipv4Addr::UNSPECIFIED.into();
            }
        }
        let (index, mac) = self.underlay;
        let vlans = self.tables.vlans_on(index);
        self.interfaces = vlans.unwrap_or_else(|error| {
            tracing::debug!("cannot read the VLANs of the underlay: {error}");
            HashMap::new()
        });
        self.interfaces.insert(index, (0, mac));
        let numbers: Vec<_> = self.vteps.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.route(number));
        self.resolve_hops(|_, _| true);
        let flooded: Vec<_> = self.flooded.keys().copied().collect();
        for vtep in flooded {
            let is_on_underlay = self.next_hop(vtep).is_some();
            self.is_unreported |= self.flooded.insert(vtep, is_on_underlay) != Some(is_on_underlay);
        }
    }

    /// The next hop of a VTEP, if it is on the underlay.
    fn next_hop(&mut self, vtep: IpAddr) -> Option<Hop> {
        let local = self.device.tunnel.local;
        if local.is_unspecified() {
            return None;
        }
        let found = self.tables.next_hop(local, vtep);
        let found = found.unwrap_or_else(|error| {
            tracing::debug!("cannot read the route to {vtep}: {error}");
            None
        });
        let next = found?;
        let &(vlan, from) = self.interfaces.get(&next.index)?;
        Some(Hop { next, vlan, from })
    }

    /// Reads the route to a VTEP.
    fn route(&mut self, number: VtepNumber) {
        let Some(ip) = self.vteps.get(&number).map(|vtep| vtep.ip) else {
            return;
        };
        let hop = self.next_hop(ip);
        if let Some(vtep) = self.vteps.get_mut(&number)
            && vtep.hop != hop
        {
            self.is_unreported = true;
            self.is_unpublished |= vtep.known.take().is_some();
            vtep.hop = hop;
        }
    }

    /// Reads the MAC addresses of next hops, each once, for these VTEPs behind them.
    fn resolve_hops(&mut self, is_wanted: impl Fn(VtepNumber, NextHop) -> bool) {
        let mut read = HashMap::new();
        let ttl = self.device.ttl;
        let Tunnel {
            local,
            remote,
            port,
            vni,
            ..
        } = self.device.tunnel;
        let is_geneve = remote.is_some();
        for (&number, vtep) in &mut self.vteps {
            let Some(Hop { next, vlan, from }) = vtep.hop.filter(|hop| is_wanted(number, hop.next)) else {
                continue;
            };
            let tables = &mut self.tables;
            let resolved = *read.entry(next).or_insert_with(|| {
                tables.neighbour(next).unwrap_or_else(|error| {
                    tracing::debug!("cannot read the neighbour {}: {error}", next.ip);
                    None
                })
            });
            let before = vtep.known.as_ref().map(|&(mac, _)| mac);
            if before != resolved.map(|resolved| resolved.mac) {
                vtep.known = resolved.and_then(|Resolved { mac: to, .. }| {
                    let remote = vtep.ip;
                    let ends = Endpoints {
                        to,
                        from,
                        vlan,
                        local,
                        remote,
                        ttl,
                        is_geneve,
                        port,
                        vni,
                    };
                    let outer = Outer::new(&ends)?;
                    let confirm = AtomicBool::new(false);
                    Some((to, Arc::new(Vtep { outer, confirm })))
                });
                self.is_unpublished = true;
            }
            let is_stale = resolved.is_some_and(|resolved| resolved.is_stale);
            self.has_stale |= is_stale;
            if let Some((_, vtep)) = &vtep.known {
                vtep.confirm.store(is_stale, Relaxed);
            }
        }
    }

    /// Has stale next hops confirmed again if they are still stale: the frame that left by the kernel may have been lost
    /// there.
    fn confirm_stale(&mut self, now: Instant) {
        if self.has_stale && now >= self.confirm_at {
            (self.has_stale, self.confirm_at) = (false, now + CONFIRM_PAUSE);
            self.resolve_hops(|_, _| true);
        }
    }
}

#[cfg(test)]
#[path = "remotes_tests.rs"]
mod tests;
