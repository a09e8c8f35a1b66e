//! The host as one more receiver of networks (`steer::HostAccess`).
//!
//! A holder of a network asks for it ([`Request::Host`](crate::protocol::Request::Host)). Then there is a veth pair, with
//! programs between its one end and the interface of the network. The other end is an interface like any: its queue is
//! leased, by whoever has the network, under the same rule of the policy. Both go with the lease of the network.
//!
//! What a steward left that died is found by what the pair says in its alias, and by pins beside those of the interface's
//! program: the next one goes on with those of leases that go on, and removes all others.

use std::path::Path;

use steer::{HostAccess, HostHook, detach_host, pinned_hosts, program_on, with_sources};

use super::connection::Held;
use super::file::may_crash;
use super::interface::Interface;
use super::lease::LeaseRef;
use super::state::Records;
use super::{Answered, Server, no_lease};
use crate::links::pair::{Pair, addresses_on};
use crate::links::{Link, LinkError};
use crate::peer::Credentials;
use crate::protocol::{Answer, ENTRIES_MAX, HostEnd, Reason, Refusal, Wanted};

/// A network: its interface's number, and its first queue.
pub(super) type NetworkAt = (u64, u32);

/// The host of a network.
#[derive(Debug)]
pub(super) struct Host {
    pair: Pair,
    joined: Option<Joined>,
    /// Addresses of the host.
    macs: Vec<[u8; 6]>,
    /// Why they are not joined, as it was said.
    why: String,
}

#[derive(Debug)]
struct Joined {
    access: HostAccess,
    between: Between,
}

/// What was joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Between {
    /// The kernel's id of the program that knows the stations.
    program: u32,
    /// Indexes.
    uplink: u32,
    host_end: u32,
}

fn network_at(held: &Held) -> NetworkAt {
    (held.interface, held.wanted.start_queue)
}

impl Host {
    fn new(pair: Pair) -> Self {
        Self {
            pair,
            joined: None,
            macs: Vec::new(),
            why: String::new(),
        }
    }

    /// Makes what is missing, and sees to it that all is for the interface as it is now.
    /// Errors: in words.
    fn look(&mut self, interface: &Interface) -> Result<(), String> {
        let program = interface.program().map_err(|refusal| refusal.text)?;
        let uplink = &interface.link;
        let found = || Link::by_name(&self.pair.host_end);
        let host_end = match found() {
            Err(LinkError::Unknown(_)) => {
                let made = self.pair.make(uplink.mtu);
                made.map_err(|error| format!("cannot make a veth pair: {error}"))?;
                may_crash("paired");
                tracing::info!(
                    interface = uplink.name,
                    pair = self.pair.host_end,
                    "joined with the host"
                );
                found()
            }
            found => found,
        };
        let host_end = host_end.map_err(|error| with_sources(&error))?;
        if host_end.mtu != uplink.mtu {
            let set = self.pair.set_mtu(uplink.mtu);
            set.map_err(|error| format!("cannot set the MTU of {}: {error}", self.pair.host_end))?;
        }
        if let Ok(macs) = addresses_on(uplink) {
            self.macs = macs;
            self.macs.truncate(ENTRIES_MAX);
        }
        let between = Between {
            program: program.id(),
            uplink: uplink.index,
            host_end: host_end.index,
        };
        if self
            .joined
            .as_ref()
            .is_some_and(|joined| joined.between == between)
        {
            return Ok(());
        }
        // A filter of its own would be taken for the next one's.
        self.joined = None;
        let Between { uplink, host_end, .. } = between;
        let access = HostAccess::attach(program, self.pair.first, uplink, host_end, HostHook::Best);
        let mut access = access.map_err(|error| with_sources(&error))?;
        may_crash("joined");
        if let Some(pins) = interface.pins()
            && let Err(error) = access.pin(pins)
        {
            tracing::warn!(
                pair = self.pair.host_end,
                "the host will not outlive this process: {}: {error}",
                pins.display()
            );
        }
        self.joined = Some(Joined { access, between });
        Ok(())
    }

    /// Takes all of it back.
    fn end(self, interface: Option<&Interface>) {
        let pins = interface.and_then(Interface::pins);
        let detached = match self.joined {
            Some(joined) => joined.access.detach(pins),
            None => {
                let uplink = interface.map_or(0, |interface| interface.link.index);
                detach_host(pins, self.pair.first, uplink)
            }
        };
        may_crash("parted");
        if let Err(error) = detached.and_then(|()| self.pair.remove()) {
            tracing::error!("cannot take {} back: {error}", self.pair.host_end);
        }
    }
}

impl Server {
    /// A network is to reach the host.
    pub(super) fn host(&mut self, number: u64) -> Answered {
        let held = self.held_network(number)?;
        self.policy.check_host(held.rule)?;
        let at = network_at(&held);
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        interface.program()?;
        let pair = || Pair::new(interface.name(), interface.link.index, at.1);
        let host = self.hosts.entry(at).or_insert_with(|| Host::new(pair()));
        if let Err(why) = host.look(interface) {
            let text = format!("{} cannot be joined with a network: {why}", interface.link.name);
            self.end_host(at);
            return Err(Refusal::new(Reason::Kernel, text));
        }
        Ok(Answer::Host(HostEnd {
            interface: host.pair.inner_end.clone(),
            macs: host.macs.clone(),
        })
        .into())
    }

    /// The network whose host is at that interface.
    fn network_of(&self, interface: &str) -> Option<NetworkAt> {
        let mut hosts = self.hosts.iter();
        hosts
            .find(|(_, host)| host.pair.inner_end == interface)
            .map(|(&at, _)| at)
    }

    /// Whether a lease is one of a host's: it counts for no rule but its network's.
    pub(super) fn is_of_host(&self, wanted: &Wanted) -> bool {
        self.network_of(&wanted.interface).is_some()
    }

    /// The rule that allows all that is wanted.
    pub(super) fn rule_for(&self, peer: &Credentials, wanted: &Wanted) -> Result<usize, Refusal> {
        let Some(at) = self.network_of(&wanted.interface) else {
            return self.policy.find(peer, wanted, |rule| self.leased(rule));
        };
        let is_network = |lease: &LeaseRef<'_>| lease.held.wanted.network && network_at(lease.held) == at;
        let mut networks = self.all_leases().filter(is_network);
        match networks.find(|lease| lease.peer.uid == peer.uid) {
            Some(lease) if !wanted.network => {
                let rule = lease.held.rule;
                self.policy.check_host(rule).map(|()| rule)
            }
            _ => {
                let text = format!(
                    "{} joins the host with a network, and only who has that may have it",
                    wanted.interface
                );
                Err(Refusal::new(Reason::NotAllowed, text))
            }
        }
    }

    /// Looks at all of them again; holders are told what changed.
    pub(super) fn look_at_hosts(&mut self) {
        for (at, host) in &mut self.hosts {
            let Some(interface) = self.interfaces.get(&at.0) else {
                continue;
            };
            let macs = host.macs.clone();
            // It is looked at again when the interface is back.
            let looked = interface.program().map_or(Ok(()), |_| host.look(interface));
            let why = looked.err().unwrap_or_default();
            if !why.is_empty() && why != host.why {
                tracing::error!(interface = interface.link.name, "not joined with the host: {why}");
            }
            host.why = why;
            if host.macs != macs {
                let held = self.connections.values_mut();
                held.filter(|other| other.held.as_ref().is_some_and(|held| network_at(held) == *at))
                    .for_each(|holder| holder.dirty = true);
            }
        }
    }

    /// The host of a network is not reached any more: with its lease, or because the policy says so.
    pub(super) fn end_host(&mut self, at: NetworkAt) {
        let Some(inner_end) = self.take_host_back(at) else {
            return;
        };
        let is_theirs = |lease: &LeaseRef<'_>| lease.held.wanted.interface == inner_end;
        let theirs = self.all_leases().filter(is_theirs);
        for number in theirs.map(|lease| lease.number).collect::<Vec<_>>() {
            match self.orphans.contains_key(&number) {
                true => self.end_orphan(number),
                false => {
                    let text = "the network that it joined with the host has it no more";
                    self.revoke(number, Refusal::new(Reason::Lease, text));
                }
            }
        }
    }

    fn take_host_back(&mut self, at: NetworkAt) -> Option<String> {
        let host = self.hosts.remove(&at)?;
        let inner_end = host.pair.inner_end.clone();
        host.end(self.interfaces.get(&at.0));
        Some(inner_end)
    }

    /// Takes all of them back, for a process that ends and has no successor.
    pub(super) fn take_hosts_back(&mut self) {
        for at in self.hosts.keys().copied().collect::<Vec<_>>() {
            self.take_host_back(at);
        }
    }

    /// Takes note of pairs that another steward has left for leases that may go on.
    pub(super) fn adopt_hosts(&mut self, records: &Records) {
        for pair in all_pairs() {
            let interfaces = self.interfaces.iter();
            let mut uplink = interfaces
                .filter(|(_, interface)| interface.name() == pair.uplink)
                .map(|(&at, _)| at);
            let is_network = |&at: &u64| {
                let mut leases = records.leases.iter().filter(|lease| lease.interface == at);
                let wants = |wanted: Wanted| wanted.network && wanted.start_queue == pair.first;
                leases.any(|lease| lease.wanted().is_some_and(wants))
            };
            if let Some(at) = uplink.find(is_network) {
                self.hosts.insert((at, pair.first), Host::new(pair));
            }
        }
    }

    /// Removes those whose leases do not go on, and goes on with the others.
    pub(super) fn sweep_hosts(&mut self) {
        for at in self.hosts.keys().copied().collect::<Vec<_>>() {
            let goes_on = |lease: LeaseRef<'_>| lease.held.wanted.network && network_at(lease.held) == at;
            if !self.all_leases().any(goes_on) {
                self.end_host(at);
            }
        }
        self.look_at_hosts();
        for (&at, interface) in &self.interfaces {
            let Some(pins) = interface.pins() else { continue };
            for first in pinned_hosts(pins) {
                if !self.hosts.contains_key(&(at, first)) {
                    remove_left(Some(pins), first, interface.link.index);
                }
            }
        }
        self.remove_stray_pairs();
    }

    /// Removes pairs that no steward has: of interfaces that are ours, or that have no program of a steward's.
    pub(super) fn remove_stray_pairs(&self) {
        for pair in all_pairs() {
            let is_known = self.hosts.values().any(|host| host.pair == pair);
            let is_ours = self
                .interfaces
                .values()
                .any(|interface| interface.name() == pair.uplink);
            let uplink = Link::by_name(&pair.uplink).map_or(0, |link| link.index);
            if is_known || !(is_ours || uplink == 0 || program_on(uplink).is_none()) {
                continue;
            }
            tracing::info!(pair = pair.host_end, "removed: another steward left it");
            remove_left(None, pair.first, uplink);
            if let Err(error) = pair.remove() {
                tracing::warn!("cannot remove {}: {error}", pair.host_end);
            }
        }
    }
}

fn remove_left(pins: Option<&Path>, first: u32, uplink: u32) {
    if let Err(error) = detach_host(pins, first, uplink) {
        tracing::warn!("what joined the host with a network stays: {error}");
    }
}

fn all_pairs() -> Vec<Pair> {
    Pair::all().unwrap_or_else(|error| {
        tracing::warn!("cannot look for what another steward left: {error}");
        Vec::new()
    })
}
