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
        // The steward knows the remote of a Geneve device.
        if !std::mem::take(&mut self.is_unreported) || self.is_geneve() {
            return Vec::new();
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
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::process::Stdio;
    use std::thread;

    use host::links::netlink_socket;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use testkit::netns::NetNs;

    use super::*;

    const STATION: Mac = [2, 0, 0, 0, 3, 1];
    const HOP: Mac = [2, 0, 0, 0, 0, 2];

    fn run(ns: &NetNs, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        ns.run(words[0], &words[1..]);
    }

    /// A host with a vxlan device, and an entry for a station behind a VTEP whose next hop is not resolved.
    fn host() -> (NetNs, Follower) {
        let ns = NetNs::new("follower");
        for line in [
            "ip link add u0 type veth peer name far",
            "ip link set far up",
            "ip link set u0 up",
            "ip address add 10.9.0.1/24 dev u0",
            "ip link add vx100 type vxlan id 100 dstport 4789 nolearning local 10.9.0.1",
            "ip link set vx100 up",
            "bridge fdb add 02:00:00:00:03:01 dev vx100 dst 10.9.0.2",
        ] {
            run(&ns, line);
        }
        let follower = begin(&ns);
        (ns, follower)
    }

    fn begin(ns: &NetNs) -> Follower {
        ns.enter(|| {
            let sockets = [(); 2].map(|()| netlink_socket(None).expect("a socket"));
            let vxlan = Link::by_name("vx100").expect("it is there").index;
            TableChanges::prepare(sockets[1].as_fd(), vxlan).expect("prepared");
            let underlay = Link::by_name("u0").expect("it is there");
            Follower::begin(sockets, "vx100", &underlay, false).expect("it follows")
        })
    }

    /// Waits for a change of the tables, or until one is due to be applied; false: neither is the case now.
    fn wait(follower: &Follower, longest: Duration) -> bool {
        let due = follower.due();
        let until_due = due.map(|due| due.saturating_duration_since(Instant::now()));
        let longest = Timespec::try_from(until_due.unwrap_or(longest)).expect("short");
        let changed = poll(
            &mut [PollFd::new(&*follower.changes, PollFlags::IN)],
            Some(&longest),
        );
        changed == Ok(1) || due.is_some()
    }

    /// Applies all changes until now, without the pauses before all tables are read again.
    fn settle(follower: &mut Follower) {
        loop {
            follower.follow();
            follower.not_before = Instant::now();
            if !wait(follower, Duration::ZERO) {
                break;
            }
        }
    }

    /// VTEPs of [`command`], all behind one next hop.
    const VTEPS: u32 = 1000;

    fn add_next_hop(ns: &NetNs) {
        run(ns, "ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0");
        run(ns, "ip route add 10.10.0.0/16 via 10.9.0.2");
    }

    fn numbered(number: u32) -> Mac {
        let [_, high, middle, low] = number.to_be_bytes();
        [2, 0, 1, high, middle, low]
    }

    fn vtep_of(number: u32) -> IpAddr {
        let number = number % VTEPS;
        [10, 10, (number / 250) as u8, (number % 250) as u8].into()
    }

    /// A command of bridge(8) about an entry.
    fn command(act: &str, number: u32, vtep: IpAddr) -> String {
        format!(
            "fdb {act} {} dev vx100 dst {vtep}",
            steer::mac_text(numbered(number))
        )
    }

    fn batch(ns: &NetNs, act: &str, numbers: std::ops::Range<u32>) {
        ns.batch(
            "bridge",
            numbers.map(|number| command(act, number, vtep_of(number))),
        );
    }

    /// Where frames to an address are sent.
    fn sent_to(follower: &Follower, number: u32) -> Option<IpAddr> {
        let number = follower.remotes.find(numbered(number))?;
        Some(ends(follower.published.0.get(usize::from(number.0))?.as_ref()?).1)
    }

    #[test]
    fn no_entry_is_lost_when_notifications_are_and_more_than_fit_are_counted() {
        testkit::require!(Root);
        let (ns, mut follower) = host();
        add_next_hop(&ns);
        settle(&mut follower);
        let assert_has = |follower: &Follower, numbers: std::ops::Range<u32>| {
            for number in numbers {
                assert_eq!(sent_to(follower, number), Some(vtep_of(number)), "{number}");
            }
        };
        // More at once than there is room for notifications of.
        batch(&ns, "add", 0..100_000);
        settle(&mut follower);
        assert_has(&follower, 0..100_000);
        let counted = |follower: &Follower| {
            let counts = follower.counts;
            [counts.addresses, counts.vteps, counts.resolved, counts.left_out]
        };
        // And the first one.
        assert_eq!(counted(&follower), [100_001, 1001, 1001, 0]);
        batch(&ns, "add", 100_000..135_000);
        settle(&mut follower);
        let [addresses, _, _, left_out] = counted(&follower);
        assert_eq!((addresses, left_out), (REMOTES_MAX, 135_001 - REMOTES_MAX));
        // Those that were left out get the room of others.
        batch(&ns, "del", 0..10_000);
        settle(&mut follower);
        assert_eq!(counted(&follower), [125_001, 1001, 1001, 0]);
        assert_has(&follower, 10_000..135_000);
        assert!((0..10_000).all(|number| sent_to(&follower, number).is_none()));
    }

    /// Prints how long changes take (docs/overlay.md, "Scale"), from when the kernel reports them.
    #[test]
    #[ignore = "measures"]
    fn time_until_changes_are_in_force() {
        testkit::require!(Root);
        let (ns, follower) = host();
        drop(follower);
        add_next_hop(&ns);
        batch(&ns, "add", 0..100_000);
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").expect("readable");
            let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
            (pages.expect("a number") * 4096) >> 20
        };
        let (before, begun) = (resident(), Instant::now());
        let mut follower = begin(&ns);
        println!("read in {:?}, {} MiB more", begun.elapsed(), resident() - before);
        settle(&mut follower);
        let (remotes, numbers) = (Arc::clone(&follower.remotes), follower.numbers.clone());
        let reported = ns.enter(|| {
            let socket = netlink_socket(None).expect("a socket");
            TableChanges::prepare(socket.as_fd(), follower.device.tunnel.device).expect("prepared");
            TableChanges::subscribe(socket).expect("subscribed")
        });
        let is_done = AtomicBool::new(false);
        let mut times: Vec<Duration> = thread::scope(|scope| {
            let followed = scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    wait(&follower, Duration::from_millis(100));
                    follower.follow();
                }
                rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)
            });
            let mut bridge = ns.command("bridge");
            let bridge = bridge.args(["-batch", "-"]).stdin(Stdio::piped());
            let mut bridge = bridge.spawn().expect("it runs");
            let mut to = bridge.stdin.take().expect("piped");
            let begun = Instant::now();
            let times = (0..5000u32).map(|change| {
                let due = begun + Duration::from_millis(change.into());
                thread::sleep(due.saturating_duration_since(Instant::now()));
                let (number, vtep) = (change * 7919 % 100_000, vtep_of(change * 31 + 1));
                let line = command("replace", number, vtep) + "\n";
                to.write_all(line.as_bytes()).expect("it runs");
                let _ = poll(&mut [PollFd::new(&reported, PollFlags::IN)], None);
                let at = Instant::now();
                while reported.read(&mut |_| ()) {}
                while remotes.find(numbered(number)) != numbers.get(&vtep).copied() {
                    thread::sleep(Duration::from_micros(10));
                }
                at.elapsed()
            });
            let times = times.collect();
            println!("5,000 changes in {:?}", begun.elapsed());
            is_done.store(true, Relaxed);
            drop(to);
            bridge.wait().expect("it ends");
            println!(
                "CPU time of the follower: {:?}",
                followed.join().expect("no panic")
            );
            times
        });
        times.sort_unstable();
        println!(
            "median {:?}, 99 % {:?}, longest {:?}",
            times[2500], times[4950], times[4999]
        );
    }

    /// Applies pending changes, and waits until they are published; returns whether there are other VTEPs.
    fn follow(follower: &mut Follower) -> bool {
        let mut is_other = follower.follow();
        while follower.is_unpublished {
            std::thread::sleep(PUBLISH_PAUSE);
            is_other |= follower.follow();
        }
        is_other
    }

    /// The VTEP that frames to the station go to.
    fn vtep(follower: &Follower) -> Option<Arc<Vtep>> {
        let number = follower.remotes.find(STATION)?;
        follower.published.0.get(usize::from(number.0))?.clone()
    }

    /// Destination addresses of the frame and the packet to it.
    fn ends(vtep: &Vtep) -> (Mac, IpAddr) {
        let headers = vtep.outer.headers(&[0; 14], 14, 0, 0);
        let bytes: &[u8] = headers.as_ref();
        let field = |at: usize| *bytes[at..].first_chunk::<4>().expect("it is whole");
        (
            *bytes.first_chunk().expect("it is whole"),
            IpAddr::from(field(30)),
        )
    }

    #[test]
    fn address_is_at_its_vtep_once_the_next_hop_is_resolved() {
        testkit::require!(Root);
        let (ns, mut follower) = host();
        assert!(vtep(&follower).is_none());
        let neighbour = "ip neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0 nud";
        run(&ns, &format!("{neighbour} reachable"));
        assert!(follow(&mut follower), "there is another VTEP");
        let before = vtep(&follower).expect("resolved");
        assert_eq!(ends(&before), (HOP, [10, 9, 0, 2].into()));
        assert!(!before.confirm.load(Relaxed));
        run(&ns, &format!("{neighbour} stale"));
        assert!(!follow(&mut follower), "the address is the same");
        assert!(before.confirm.load(Relaxed));
        run(&ns, "ip neighbour del 10.9.0.2 dev u0");
        assert!(follow(&mut follower) && vtep(&follower).is_none());
    }

    #[test]
    fn address_follows_its_entry_to_another_vtep() {
        testkit::require!(Root);
        let (ns, mut follower) = host();
        for last in [2, 3] {
            run(
                &ns,
                &format!("ip neighbour add 10.9.0.{last} lladdr 02:00:00:00:00:0{last} dev u0"),
            );
        }
        follow(&mut follower);
        let to = |follower: &Follower| vtep(follower).map(|vtep| ends(&vtep).1);
        assert_eq!(to(&follower), Some([10, 9, 0, 2].into()));
        let first = follower.remotes.find(STATION);
        run(&ns, "bridge fdb replace 02:00:00:00:03:01 dev vx100 dst 10.9.0.3");
        assert!(follow(&mut follower));
        assert_eq!(to(&follower), Some([10, 9, 0, 3].into()));
        assert_ne!(
            follower.remotes.find(STATION),
            first,
            "workers may know the first one's VTEP"
        );
        assert_eq!(follower.vteps.len(), 1);
        run(&ns, "bridge fdb del 02:00:00:00:03:01 dev vx100 dst 10.9.0.3");
        assert!(follow(&mut follower));
        assert_eq!((follower.remotes.find(STATION), follower.vteps.len()), (None, 0));
    }

    #[test]
    fn packets_to_a_vtep_behind_a_vlan_of_the_underlay_have_its_tag() {
        testkit::require!(Root);
        let (ns, mut follower) = host();
        for line in [
            "ip link add u1 type veth peer name far1",
            "ip link set u1 up",
            "ip link set far1 up",
            "ip address add 10.8.0.1/24 dev u1",
            "ip neighbour add 10.8.0.2 lladdr 02:00:00:00:00:02 dev u1",
            "ip route add 10.9.0.2 via 10.8.0.2",
        ] {
            run(&ns, line);
        }
        settle(&mut follower);
        assert!(vtep(&follower).is_none() && follower.take_vtep_changes().is_empty());
        // As if it were a VLAN device: not all kernels have any.
        let from = [2, 0, 0, 0, 0, 1];
        follower.interfaces.insert(ns.index_of("u1"), (5, from));
        let number = follower.remotes.find(STATION).expect("listed");
        follower.route(number);
        follower.resolve_hops(|_, _| true);
        follow(&mut follower);
        let headers = vtep(&follower)
            .expect("resolved")
            .outer
            .headers(&[0; 14], 14, 0, 0);
        let wanted = [&HOP[..], &from, &[0x81, 0, 0, 5, 8, 0, 0x45]].concat();
        assert!(headers.as_ref().starts_with(&wanted), "{headers:?}");
        assert_eq!(follower.take_vtep_changes().len(), 1, "its packets are expected");
        // The next look at interfaces finds that it is none.
        run(&ns, "ip link set u1 alias none");
        settle(&mut follower);
        assert!(vtep(&follower).is_none());
    }

    #[test]
    fn vtep_is_left_to_the_kernel_without_a_route_on_the_underlay() {
        testkit::require!(Root);
        let (ns, mut follower) = host();
        run(&ns, "ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0");
        run(&ns, "ip neighbour add 10.9.0.254 lladdr 02:00:00:00:00:fe dev u0");
        let settle = |follower: &mut Follower| {
            settle(follower);
            vtep(follower).map(|vtep| ends(&vtep).0)
        };
        assert_eq!(settle(&mut follower), Some(HOP));
        run(&ns, "ip route add 10.9.0.2 via 10.9.0.254");
        assert_eq!(settle(&mut follower), Some([2, 0, 0, 0, 0, 0xfe]));
        run(&ns, "ip route replace 10.9.0.2 dev lo");
        assert_eq!(settle(&mut follower), None);
    }
}
