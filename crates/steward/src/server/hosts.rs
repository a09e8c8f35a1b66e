//! The host as one more receiver of networks, and the wire where no XDP program is on the interface
//! (`steer::TapAccess`).
//!
//! A holder of a network asks for one ([`Request::Host`](crate::protocol::Request::Host), `Uplink`). Then there is a tap
//! device, with programs between it and the interface of the network. Its descriptor is the holder's alone, so that the
//! device goes with the holder, and stays without a steward; it goes with the lease of the network, too.
//!
//! What a steward left that died is found by what the device says in its alias, and by pins beside those of the
//! interface's program: the next one goes on with those of leases that go on, and removes all others.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use steer::{
    Hook, Mode, Program, Station, TapAccess, TapTo, detach_tap, pinned_taps, program_on, with_sources,
};

use super::connection::{Connection, Held, Reply};
use super::file::may_crash;
use super::interface::Interface;
use super::lease::LeaseRef;
use super::limits::DeviceChange;
use super::removals::Removals;
use super::state::Records;
use super::{Answered, Server, no_lease};
use crate::backoff::Retry;
use crate::links::bridge::BridgeFdb;
use crate::links::filters::{self, Filter};
use crate::links::tap::{NewTap, Purpose, Tap, addresses_on, all_taps};
use crate::links::{Link, LinkError};
use crate::protocol::{Answer, CHANGES_MAX, ENTRIES_MAX, HostEnd, Reason, Refusal, Wanted};

/// Between two looks at bridges' forwarding databases, which others can change as often as they like.
const FDB_PAUSE: Duration = Duration::from_millis(100);
/// A look is followed by a pause so many times as long.
const FDB_SHARE: u32 = 20;

/// A network: its interface's number, and its first queue.
pub(super) type NetworkAt = (u64, u32);
/// A network, and where its tap leads.
pub(super) type TapAt = (NetworkAt, TapTo);

/// What a tap of a network leads to.
#[derive(Debug)]
pub(super) struct Host {
    tap: Tap,
    to: TapTo,
    /// See [`HostEnd::cuts_udp`].
    cuts_udp: bool,
    joined: Option<Joined>,
    /// Addresses of the host.
    macs: Vec<[u8; 6]>,
    /// What the bridge reaches that the interface is part of.
    behind: BridgeFdb,
    /// Why they are not joined, as it was said.
    why: String,
    /// Pauses between attempts to join them; the state is both ends and the MTU.
    retry: Retry<(Between, u32)>,
}

#[derive(Debug)]
struct Joined {
    access: TapAccess,
    between: Between,
}

/// What was joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Between {
    /// The kernel's id of the program that knows the stations.
    program: u32,
    /// Indexes.
    uplink: u32,
    tap: u32,
}

/// Why a holder does not get the device.
enum NotGiven {
    /// It asks too often: what there is stays.
    Limit(Refusal),
    /// In words.
    Failed(String),
}

impl From<String> for NotGiven {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

fn network_at(held: &Held) -> NetworkAt {
    (held.interface, held.wanted.start_queue)
}

impl Host {
    fn new(tap: Tap, to: TapTo) -> Self {
        Self {
            tap,
            to,
            cuts_udp: false,
            joined: None,
            macs: Vec::new(),
            behind: BridgeFdb::default(),
            why: String::new(),
            retry: Retry::default(),
        }
    }

    /// The device, if it is there.
    /// Errors: in words.
    fn device(&self) -> Result<Option<Link>, String> {
        match Link::by_name(&self.tap.name) {
            Ok(link) => Ok(Some(link)),
            Err(LinkError::Unknown(_)) => Ok(None),
            Err(error) => Err(with_sources(&error)),
        }
    }

    /// Sees to it that there is a device whose descriptor the holder has, who has that of the one with this index: a
    /// new one's, if it is another. `may_make`: whether a device may be made now.
    fn give(
        &mut self,
        interface: &Interface,
        has: u32,
        removals: &mut Removals,
        may_make: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(Link, Option<OwnedFd>), NotGiven> {
        let name = &self.tap.name;
        let made = match self.device()? {
            Some(device) if device.index == has => None,
            there => {
                may_make().map_err(NotGiven::Limit)?;
                if there.is_some() {
                    removals.make_room(&self.tap)?;
                }
                let made = self.tap.make(interface.link.mtu);
                let NewTap { descriptor, cuts_udp } = made.map_err(|error| {
                    format!("cannot make the tap device {name} (by /dev/net/tun): {error}")
                })?;
                may_crash("made");
                self.cuts_udp = cuts_udp;
                // How often devices are made has a limit of its own.
                self.retry = Retry::default();
                Some(descriptor)
            }
        };
        // What it has is looked at when it changes.
        if made.is_some() || self.joined.is_none() {
            self.look_at_links(&interface.link);
        }
        match self.look(interface)? {
            Some(device) => Ok((device, made)),
            None => Err(NotGiven::Failed(format!("{} is gone again", self.tap.name))),
        }
    }

    /// Looks which addresses the host has, and which bridges the interface is part of.
    fn look_at_links(&mut self, uplink: &Link) {
        if self.to != TapTo::Host {
            return;
        }
        if let Ok(macs) = addresses_on(uplink) {
            self.macs = macs;
            self.macs.truncate(ENTRIES_MAX);
        }
        if let Err(error) = self.behind.look_at_links(uplink) {
            tracing::debug!(interface = uplink.name, "cannot ask for bridges: {error}");
        }
    }

    /// Sees to it that all is for the interface as it is now; `None`: the device is gone.
    /// Errors: in words.
    fn look(&mut self, interface: &Interface) -> Result<Option<Link>, String> {
        let program = interface.program().map_err(|refusal| refusal.text)?;
        let uplink = &interface.link;
        let Some(device) = self.device()? else {
            return Ok(None);
        };
        let between = Between {
            program: program.number(),
            uplink: uplink.index,
            tap: device.index,
        };
        let joined = self.joined.as_ref().map(|joined| joined.between);
        // An administrator may have set it down.
        if joined == Some(between) && device.mtu == uplink.mtu && !self.is_unfinished() {
            return Ok(Some(device));
        }
        let now = Instant::now();
        if !self.retry.is_due((between, uplink.mtu), false, now) {
            return Err(match self.why.is_empty() {
                true => "the interface or the tap changes too often: the steward tries again in a second"
                    .to_owned(),
                false => self.why.clone(),
            });
        }
        let done = self.join(interface, &device, between);
        self.retry.note(done.is_ok(), now);
        done.map(|()| Some(device))
    }

    /// Does what is missing between the device and the interface.
    /// Errors: in words.
    fn join(&mut self, interface: &Interface, device: &Link, between: Between) -> Result<(), String> {
        let (program, mtu) = (
            interface.program().map_err(|refusal| refusal.text)?,
            interface.link.mtu,
        );
        if device.mtu != mtu {
            let set = self.tap.set_mtu(mtu, device.mtu);
            set.map_err(|error| format!("cannot set the MTU of {}: {error}", self.tap.name))?;
        }
        if self.joined.as_ref().map(|joined| joined.between) != Some(between) {
            self.attach(interface, program, between)?;
        }
        // Not before: only the program may take the tap's frames.
        let up = self.tap.set_up(true);
        up.map_err(|error| format!("cannot set {} up: {error}", self.tap.name))
    }

    fn attach(&mut self, interface: &Interface, program: &Program, between: Between) -> Result<(), String> {
        // A filter of its own would be taken for the next one's.
        self.joined = None;
        let Between { uplink, tap, .. } = between;
        let access = TapAccess::attach(program, self.to, self.tap.first, (uplink, tap), Hook::Best);
        let mut access = access.map_err(|error| with_sources(&error))?;
        may_crash("joined");
        if let Some(pins) = interface.pins()
            && let Err(error) = access.pin(pins)
        {
            tracing::warn!(
                tap = self.tap.name,
                "what joins it will not outlive this process: {}: {error}",
                pins.display()
            );
        }
        self.joined = Some(Joined { access, between });
        Ok(())
    }

    /// Whether something is to be tried again.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.why.is_empty()
    }

    /// Takes all of it back but the device, which is then to be removed.
    fn end(self, interface: Option<&Interface>) -> Tap {
        // Nothing comes by it any more when the program is taken off.
        let _ = self.tap.set_up(false);
        let pins = interface.and_then(Interface::pins);
        let detached = match self.joined {
            Some(joined) => joined.access.detach(pins),
            None => {
                let uplink = interface.map_or(0, |interface| interface.link.index);
                detach_tap(pins, self.to, self.tap.first, uplink)
            }
        };
        may_crash("parted");
        if let Err(error) = detached {
            tracing::error!("cannot take {} back: {error}", self.tap.name);
        }
        // However that went, no device stays.
        self.tap
    }
}

impl Server {
    /// A network is to reach the host, or the wire by a tap.
    pub(super) fn tap(&mut self, number: u64, to: TapTo, has: u32) -> Answered {
        let held = self.held_network(number)?;
        let network = network_at(&held);
        let at = (network, to);
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        let mode = interface.program()?.mode();
        match to {
            TapTo::Host => self.policy.check_host(held.rule)?,
            TapTo::Uplink if mode == Mode::Tap => {}
            TapTo::Uplink => {
                let text = format!(
                    "frames of {} come by an XDP program in {mode} mode, not by a tap",
                    interface.name()
                );
                return Err(Refusal::new(Reason::Program, text));
            }
        }
        let purpose = Purpose::Joins(to);
        let tap = || Tap::new(purpose, interface.name(), interface.link.index, network.1);
        let host = self.hosts.entry(at).or_insert_with(|| Host::new(tap(), to));
        let (uid, changes) = (self.connections[&number].peer.uid, &mut self.device_changes);
        let may_make = || changes.take(DeviceChange::HostTap, interface.name(), uid, Instant::now());
        let given = host.give(interface, has, &mut self.removals, may_make);
        let link = interface.link.clone();
        self.look_at_stale_bridges(Instant::now());
        match given {
            Ok((device, descriptor)) => {
                let host = self.hosts.get(&at).ok_or_else(no_lease)?;
                if descriptor.is_some() && self.leases.may_say(uid) {
                    let (interface, tap) = (&link.name, &device.name);
                    let with = words(to);
                    tracing::info!(interface, tap, "joined with {with}");
                }
                Ok(Reply {
                    answer: Answer::Host(HostEnd {
                        interface: device.name,
                        index: device.index,
                        cuts_udp: host.cuts_udp,
                        macs: host.macs.clone(),
                        bridge: host.behind.bridge().to_owned(),
                        behind: count(host.behind.len()),
                        left_out: count(host.behind.left_out()),
                    }),
                    socket: descriptor,
                })
            }
            Err(NotGiven::Limit(refusal)) => Err(refusal),
            Err(NotGiven::Failed(why)) => {
                let text = format!("{} cannot be joined with a network: {why}", link.name);
                // It hears why. That something changed it must not hear: it would ask again at once.
                self.take_tap_back(at);
                Err(Refusal::new(Reason::Kernel, text))
            }
        }
    }

    /// Looks at all of them again; holders are told what changed.
    pub(super) fn look_at_hosts(&mut self) {
        for (&(at, to), host) in &mut self.hosts {
            let Some(interface) = self.interfaces.get(&at.0) else {
                continue;
            };
            let (macs, was_joined) = (host.macs.clone(), host.joined.is_some());
            let behind = host.behind.changes();
            // It is looked at again when the interface is back.
            let looked: Result<bool, String> = interface.program().map_or(Ok(true), |_| {
                host.look_at_links(&interface.link);
                let is_there = host.look(interface)?.is_some();
                if !is_there {
                    host.joined = None;
                }
                Ok(is_there)
            });
            let is_lost = was_joined && matches!(looked, Ok(false));
            let why = looked.err().unwrap_or_default();
            if !why.is_empty() && why != host.why {
                tracing::error!(
                    interface = interface.link.name,
                    "not joined with {}: {why}",
                    words(to)
                );
            }
            host.why = why;
            let (is_other, is_other_behind) = (is_lost || host.macs != macs, host.behind.changes() != behind);
            for holder in holders(&mut self.connections, at) {
                holder.dirty |= is_other;
                holder.other_behind |= is_other_behind;
            }
        }
    }

    /// Tells a holder of a network what is behind the bridge that its interface is part of.
    pub(super) fn behind(&self, number: u64, after: Station) -> Answered {
        let at = network_at(&self.held_network(number)?);
        let host = self.hosts.get(&(at, TapTo::Host)).ok_or_else(|| {
            let text = "this network does not reach the host: ask for that first";
            Refusal::new(Reason::Lease, text)
        })?;
        let stations = host.behind.after(after).take(CHANGES_MAX);
        Ok(Answer::Behind(stations.collect()).into())
    }

    /// Whether changes of bridges' forwarding databases are to be looked at now.
    pub(super) fn watches_bridges(&self, now: Instant) -> bool {
        let mut hosts = self.hosts.values();
        self.fdb_pause <= now && hosts.any(|host| !host.behind.bridge().is_empty())
    }

    /// Whether bridges' forwarding databases are to be read, whose bridges or ports are others than when they were.
    pub(super) fn has_stale_bridges(&self) -> bool {
        self.hosts.values().any(|host| host.behind.is_stale())
    }

    /// Reads bridges' forwarding databases if [some are stale](Self::has_stale_bridges), and the pause is over.
    pub(super) fn look_at_stale_bridges(&mut self, now: Instant) {
        if self.fdb_pause <= now && self.has_stale_bridges() {
            self.look_behind_bridges();
        }
    }

    /// Looks at bridges' forwarding databases again, and notifies holders of changes.
    pub(super) fn look_behind_bridges(&mut self) {
        let begun = Instant::now();
        for (&(at, _), host) in &mut self.hosts {
            match host.behind.look_at_fdb() {
                Ok(true) => {
                    holders(&mut self.connections, at).for_each(|holder| holder.other_behind = true);
                }
                Ok(false) => {}
                Err(error) => tracing::debug!("cannot ask what a bridge reaches: {error}"),
            }
        }
        let now = Instant::now();
        self.fdb_pause = now + FDB_PAUSE.max(now.duration_since(begun) * FDB_SHARE);
    }

    /// A network has all its taps no more, with its lease.
    pub(super) fn end_taps(&mut self, at: NetworkAt) {
        for to in [TapTo::Host, TapTo::Uplink] {
            self.end_tap((at, to));
        }
    }

    /// A tap of a network leads nowhere any more: with its lease, or because the policy says so.
    pub(super) fn end_tap(&mut self, at: TapAt) {
        if !self.take_tap_back(at) {
            return;
        }
        // Who has the network still asks, and hears why.
        holders(&mut self.connections, at.0).for_each(|holder| holder.dirty = true);
    }

    /// The same, and nobody is told; whether it led there, or was to.
    fn take_tap_back(&mut self, at: TapAt) -> bool {
        let host = self.hosts.remove(&at);
        let was_there = host.is_some();
        if let Some(host) = host {
            let tap = host.end(self.interfaces.get(&at.0.0));
            self.removals.begin(&tap);
        }
        was_there
    }

    /// Takes all of them back, for a process that ends and has no successor.
    pub(super) fn take_hosts_back(&mut self) {
        for at in self.hosts.keys().copied().collect::<Vec<_>>() {
            self.end_tap(at);
        }
    }

    /// Takes note of devices that another steward has left for leases that may go on.
    pub(super) fn adopt_hosts(&mut self, records: &Records) {
        for tap in all_taps() {
            let Purpose::Joins(to) = tap.purpose else { continue };
            let interfaces = self.interfaces.iter();
            let mut uplink = interfaces
                .filter(|(_, interface)| interface.name() == tap.uplink)
                .map(|(&at, _)| at);
            let is_network = |&at: &u64| {
                let mut leases = records.leases.iter().filter(|lease| lease.interface == at);
                let wants = |wanted: Wanted| wanted.network && wanted.start_queue == tap.first;
                leases.any(|lease| lease.wanted().is_some_and(wants))
            };
            if let Some(at) = uplink.find(is_network) {
                self.hosts.insert(((at, tap.first), to), Host::new(tap, to));
            }
        }
    }

    /// Removes those whose leases do not go on, and goes on with the others.
    pub(super) fn sweep_hosts(&mut self) {
        for at in self.hosts.keys().copied().collect::<Vec<_>>() {
            let goes_on = |lease: LeaseRef<'_>| lease.held.wanted.network && network_at(lease.held) == at.0;
            if !self.all_leases().any(goes_on) {
                self.end_tap(at);
            }
        }
        self.look_at_hosts();
        for (&at, interface) in &self.interfaces {
            let Some(pins) = interface.pins() else { continue };
            for to in [TapTo::Host, TapTo::Uplink] {
                for first in pinned_taps(pins, to) {
                    if !self.hosts.contains_key(&((at, first), to)) {
                        remove_left(Some(pins), (to, first), interface.link.index);
                    }
                }
            }
        }
        self.remove_stray_taps();
    }

    /// Removes devices that no steward has: of interfaces that are ours, or that have no program of a steward's.
    pub(super) fn remove_stray_taps(&mut self) {
        let taps = all_taps();
        for tap in taps.clone() {
            let is_known = match tap.purpose {
                Purpose::Joins(_) => self.hosts.values().any(|host| host.tap == tap),
                Purpose::Send => self.is_of_a_lease(&tap),
            };
            let is_ours = self
                .interfaces
                .values()
                .any(|interface| interface.name() == tap.uplink);
            let uplink = Link::by_name(&tap.uplink).map_or(0, |link| link.index);
            // Another steward may have it still.
            let is_in_use = || program_on(uplink).is_some() || has_uplink_tap(&taps, &tap.uplink, tap.first);
            if is_known || !(is_ours || uplink == 0 || !is_in_use()) {
                continue;
            }
            tracing::info!(tap = tap.name, "removed: another steward left it");
            if let Purpose::Joins(to) = tap.purpose {
                remove_left(None, (to, tap.first), uplink);
            }
            self.removals.begin(&tap);
        }
        self.remove_stray_filters(&taps);
    }

    /// Removes filters whose device went with its holder, who died with the steward: frames to stations would go
    /// nowhere.
    fn remove_stray_filters(&self, taps: &[Tap]) {
        let filters = filters::of_networks().unwrap_or_else(|error| {
            tracing::warn!("cannot look for filters that another steward left: {error}");
            Vec::new()
        });
        for Filter { uplink, to, first } in filters {
            let mut ours = self
                .interfaces
                .iter()
                .filter(|(_, interface)| interface.link.index == uplink);
            let is_left = match ours.next() {
                Some((&at, _)) => !self.hosts.contains_key(&((at, first), to)),
                None => {
                    let name = Link::by_index(uplink).map(|link| link.name).unwrap_or_default();
                    program_on(uplink).is_none() && !has_uplink_tap(taps, &name, first)
                }
            };
            if is_left {
                tracing::info!(uplink, first, "a filter is removed: another steward left it");
                remove_left(None, (to, first), uplink);
            }
        }
    }
}

/// Whether a network of this interface and first queue reaches the wire by a tap: then no XDP program shows that somebody
/// has it.
fn has_uplink_tap(taps: &[Tap], uplink: &str, first: u32) -> bool {
    let is_its = |tap: &Tap| tap.uplink == uplink && tap.first == first;
    taps.iter()
        .any(|tap| tap.purpose == Purpose::Joins(TapTo::Uplink) && is_its(tap))
}

/// Where a tap leads, in a sentence.
fn words(to: TapTo) -> &'static str {
    match to {
        TapTo::Host => "the host",
        TapTo::Uplink => "the wire",
    }
}

/// Connections that have the network.
fn holders(
    connections: &mut BTreeMap<u64, Connection>,
    at: NetworkAt,
) -> impl Iterator<Item = &mut Connection> {
    let has = move |other: &&mut Connection| other.held.as_ref().is_some_and(|held| network_at(held) == at);
    connections.values_mut().filter(has)
}

fn count(of: usize) -> u32 {
    of.try_into().unwrap_or(u32::MAX)
}

fn remove_left(pins: Option<&Path>, (to, first): (TapTo, u32), uplink: u32) {
    if let Err(error) = detach_tap(pins, to, first, uplink) {
        tracing::warn!("what joined {} with a network stays: {error}", words(to));
    }
}
