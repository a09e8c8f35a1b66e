//! The policy: which user may lease which queues. `model::policy` describes the keys of its file.
//!
//! Stations of a network are checked one by one, as they are added: address and VLAN must be among `macs` and
//! `vlans`, if the rule has them. Addresses of the interface, and of interfaces above it (VLANs, macvlans, its
//! bridge), are the host's, unless `macs` names them.
//!
//! The NIC gets rules for a lease only for an address that the policy's rule names, or for a VLAN that it names and
//! that is not 0. Otherwise a lessee could take the host's own frames by a lease for the host's address. With VLAN 0
//! the NIC would bring it all frames of the host, even if the rule names other VLANs, too.
//!
//! The first rule that allows the whole request counts, and the lease is charged to it. A request that no rule allows
//! is rejected. An unknown key is an error, so that a misspelt limit is not ignored.

mod build;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::LazyLock;

use model::config::Prefixes;
use steer::{Filter, HintSet, Station, mac_text, ranges_text};

use crate::hardware::Names;
use program::peer::Credentials;
use program::text_file::{self, Kind};
use steward_protocol::{Reason, Refusal, Wanted};

pub use program::text_file::FileError as PolicyError;

/// Words for errors about the policy file.
const FILE: Kind = Kind {
    what: "policy",
    reader: "steward",
    example: "`vhost-af-xdp-steward --help`",
    option: "--policy",
};
/// Maximum size of the file, bytes: enough for thousands of rules.
const LONGEST: u64 = 1 << 20;

/// Maximum number of a steward's connections, of all users; each takes one descriptor.
pub(crate) const CONNECTIONS_MAX: u32 = 900;

/// Maximum number of one user's connections, if the policy does not set it.
const CONNECTIONS: u32 = 64;

/// Maximum number of a rule's connections without a lease.
const ASKING: usize = 16;

/// A policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Maximum number of one user's connections.
    pub(crate) connections: u32,
    /// Grants leases even on kernels where sockets have to be handed over unbound.
    pub unbound: bool,
    pub(crate) rules: Vec<Rule>,
    /// Warnings about rules that may not do what their author expects, one line each, with file and line.
    pub warnings: Vec<String>,
    /// The keys of limits and rules with their values, and the defaults of others.
    pub shown: String,
}

/// One `[[allow]]`; by default it allows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    user: Option<u32>,
    group: Option<u32>,
    /// The interface.
    pub interface: String,
    /// Its queues.
    pub queues: BTreeSet<u32>,
    /// Its queues may be leased for AF_XDP sockets.
    af_xdp: bool,
    /// Most queues that may be leased at a time.
    pub at_most: u32,
    /// Locked memory, bytes; `None`: a default for each leased queue.
    pub memlock: Option<u64>,
    /// Addresses and VLANs that leases may have, and for which the NIC may get rules; empty: all, without rules.
    pub(crate) names: Names,
    /// Leases may be for networks.
    network: bool,
    /// These networks may reach the host.
    host: bool,
    /// These networks may advertise addresses of their guests to other hosts.
    advertise: bool,
    /// Of IP addresses only these.
    ips: Prefixes,
    /// Leased queues may be leased on to a netkit.
    netkit: bool,
    /// The hints that leases may have.
    pub(crate) hints: HintSet,
    /// How many frames sockets may take in one busy poll; `None`: no busy polling.
    pub(crate) busy_poll: Option<u16>,
    /// Flows for which queues may be leased for zero-copy receive; empty: no such leases.
    pub zcrx: Vec<SocketAddr>,
    /// The NIC may be set up for zero-copy receive: split headers from data, remove the queue from the main RSS table.
    pub zcrx_setup: bool,
}

/// The rule for a lease that is charged to no rule.
static NO_RULE: LazyLock<Rule> = LazyLock::new(Rule::default);

impl Policy {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// [`PolicyError`], naming the place.
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        Self::parse(path, &text_file::read(FILE, path, LONGEST)?)
    }

    /// The rule with this index; if there is none, a rule that allows nothing.
    #[must_use]
    pub fn rule(&self, index: usize) -> &Rule {
        self.rules.get(index).unwrap_or(&NO_RULE)
    }

    /// The rules that apply to this user, with their indexes.
    pub fn rules_for(&self, peer: &Credentials) -> impl Iterator<Item = (usize, &Rule)> {
        let rules = self.rules.iter().enumerate();
        rules.filter(|(_, rule)| rule.is_for(peer))
    }

    /// Whether any rule allows zero-copy receive.
    #[must_use]
    pub fn allows_zcrx(&self) -> bool {
        self.rules.iter().any(|rule| !rule.zcrx.is_empty())
    }

    /// Maximum number of connections under a rule: one for each queue that can be leased under it at a time, and some
    /// without a lease.
    pub(crate) fn places(&self, rule: usize) -> usize {
        let rule = self.rule(rule);
        rule.queues.len().min(rule.at_most as usize) + ASKING
    }

    /// Checks whether a network under a rule may reach the host.
    ///
    /// # Errors
    /// The remedy.
    pub fn check_host(&self, rule: usize) -> Result<(), Refusal> {
        if self.rule(rule).host {
            return Ok(());
        }
        Reason::NotAllowed.refuse(format!(
            "the policy does not let the network reach the host: take `host = false` out of rule {}, or say \
             `host = false` of the network",
            rule.saturating_add(1)
        ))
    }

    /// Checks whether a user may have networks on an interface.
    /// Errors: the remedy.
    pub(crate) fn check_network_on(&self, peer: &Credentials, interface: &str) -> Result<(), Refusal> {
        let mut rules = self.rules_for(peer);
        if rules.any(|(_, rule)| rule.network && rule.interface == interface) {
            return Ok(());
        }
        let uid = peer.uid;
        Reason::NotAllowed.refuse(format!(
            "the policy does not let networks of user {uid} have frames of {interface}: add a rule with `interface = \
             {interface:?}` and `network = true`"
        ))
    }

    /// Checks whether a network under a rule may advertise an IP address, or MAC addresses.
    /// Errors: the remedy.
    pub(crate) fn check_advertised(&self, rule: usize, ip: Option<IpAddr>) -> Result<(), Refusal> {
        let (number, rule) = (rule.saturating_add(1), self.rule(rule));
        let (what, key) = match ip {
            _ if !rule.advertise => ("addresses".to_owned(), "`advertise = true` to the keys"),
            Some(ip) if !rule.ips.0.iter().any(|prefix| prefix.contains(ip)) => {
                (format!("IP address {ip}"), "it, or a network with it, to `ips`")
            }
            _ => return Ok(()),
        };
        Reason::NotAllowed.refuse(format!(
            "the policy does not let networks advertise {what} to other hosts: add {key} of rule {number}"
        ))
    }

    /// Checks whether a network under a rule may have a station. `of_host`: the host's addresses on the interface.
    /// Errors: why not, and the remedy.
    pub(crate) fn check_station(
        &self,
        rule: usize,
        Station { mac, vlan }: Station,
        of_host: &BTreeSet<[u8; 6]>,
    ) -> Result<(), String> {
        let (names, text) = (&self.rule(rule).names, mac_text(mac));
        if of_host.contains(&mac) && !names.macs.contains(&mac) {
            return Err(format!(
                "{text} is the host's, the address of the interface or of one above it: give the guest another"
            ));
        }
        if !names.allow_mac(mac) {
            return Err(format!(
                "the policy does not allow MAC {text}: add it to `macs` of the rule, or give the guest one of these"
            ));
        }
        self.check_vlan(rule, vlan)
    }

    /// Checks whether a rule allows frames of a VLAN of its interface.
    /// Errors: why not.
    pub(crate) fn check_vlan(&self, rule: usize, vlan: u16) -> Result<(), String> {
        let names = &self.rule(rule).names;
        if names.allow_vlan(vlan) {
            return Ok(());
        }
        let vlans = listed(&names.vlans);
        Err(format!(
            "the policy does not allow VLAN {vlan}, it allows {vlans}: add it to `vlans` of the rule"
        ))
    }

    /// Checks whether the queue of a lease under a rule may be leased to a netkit.
    /// Errors: the remedy.
    pub(crate) fn check_netkit(&self, rule: usize) -> Result<(), Refusal> {
        if self.rule(rule).netkit {
            return Ok(());
        }
        Reason::NotAllowed.refuse(format!(
            "the policy does not let queues be leased to netkits: add `netkit = true` to rule {}, the first that \
             allows the lease",
            rule.saturating_add(1)
        ))
    }

    /// The error text if no rule lets a peer lease queues of an interface, with the remedy.
    fn no_rule_for(&self, peer: &Credentials, interface: &str) -> String {
        let uid = peer.uid;
        let rules = || self.rules.iter().filter(|rule| rule.is_for(peer));
        let interfaces: BTreeSet<&str> = rules().map(|rule| rule.interface.as_str()).collect();
        let allowed = match interfaces.is_empty() {
            true => String::new(),
            false => format!(" (only of {})", Vec::from_iter(interfaces).join(", ")),
        };
        // A user that systemd makes for a unit (DynamicUser=) has another number at its next start.
        let who = match rules().find_map(|rule| rule.group) {
            Some(group) => format!("group = {group}"),
            None => format!("user = {uid}"),
        };
        format!(
            "user {uid} may not lease queues of {interface}{allowed}: the policy has no rule for that: add one with \
             `{who}` and `interface = {interface:?}`, or start the daemon as a user that has one (--user)"
        )
    }

    /// Index of the first rule that allows the whole request; `leased` counts the queues leased under a rule.
    ///
    /// # Errors
    /// Why none does, and the remedy.
    pub fn find(
        &self,
        peer: &Credentials,
        wanted: &Wanted,
        leased: impl Fn(usize) -> u32,
    ) -> Result<usize, Refusal> {
        let (uid, interface) = (peer.uid, &wanted.interface);
        let mut refusal = Reason::NotAllowed.because(self.no_rule_for(peer, interface));
        let filter = &wanted.filter;
        for (index, rule) in self.rules.iter().enumerate() {
            if !rule.is_for(peer) || rule.interface != wanted.interface {
                continue;
            }
            if !rule.af_xdp {
                refusal.text = format!(
                    "user {uid} may lease queues of {interface} for zero-copy receive only: take `af-xdp = false` out \
                     of rule {} of the policy, or add a rule",
                    index + 1
                );
                continue;
            }
            let (leased, may) = (leased(index), listed(&rule.queues));
            if let Some(queue) = wanted.range().find(|queue| !rule.queues.contains(queue)) {
                refusal.text = format!(
                    "user {uid} may not lease queue {queue} of {interface}: the policy allows it {may}: ask for these \
                     (start-queue, queues), or widen `queues` of rule {}",
                    index + 1
                );
            } else if let Some(why) = rule.check(filter, wanted.network) {
                refusal.text = format!("user {uid} on {interface}: {why}");
            } else if leased.saturating_add(wanted.queues) > rule.at_most {
                refusal.text = format!(
                    "the policy allows {} queue(s) of {interface} at a time, {leased} are leased, {} more were asked \
                     for: raise `at-most` of rule {}",
                    rule.at_most,
                    wanted.queues,
                    index + 1
                );
            } else {
                return Ok(index);
            }
        }
        Err(refusal)
    }
}

impl Rule {
    fn is_for(&self, peer: &Credentials) -> bool {
        let in_group = |group| peer.gid == group || peer.groups.contains(&group);
        self.user.is_none_or(|user| user == peer.uid) && self.group.is_none_or(in_group)
    }

    /// Why the rule does not allow these addresses and VLANs, or a network; `None`: it does.
    fn check(&self, filter: &Filter, network: bool) -> Option<String> {
        if network {
            let missing = "the policy does not allow leases of networks: add `network = true` to the rule";
            return (!self.network).then(|| missing.to_owned());
        }
        let names = &self.names;
        let macs: Vec<String> = names.macs.iter().map(|&mac| mac_text(mac)).collect();
        let (macs, vlans) = (macs.join(", "), listed(&names.vlans));
        if let Some(&mac) = filter.macs.iter().find(|mac| !names.allow_mac(**mac)) {
            let mac = mac_text(mac);
            return Some(format!(
                "the policy does not allow MAC {mac}, it allows {macs}: ask for one of these (mac)"
            ));
        }
        if filter.macs.is_empty() && !names.macs.is_empty() {
            return Some(format!(
                "the policy allows frames of certain addresses only: ask for one of {macs} (mac)"
            ));
        }
        if let Some(vlan) = filter.vlans.iter().find(|vlan| !names.allow_vlan(**vlan)) {
            return Some(format!(
                "the policy does not allow VLAN {vlan}, it allows {vlans}: ask for some of these (vlan)"
            ));
        }
        if filter.vlans.is_empty() && !names.vlans.is_empty() {
            return Some(format!(
                "the policy allows frames of certain VLANs only: ask for one of {vlans} (vlan)"
            ));
        }
        None
    }
}

/// Flows as a list.
#[must_use]
pub fn flows_text(flows: &[SocketAddr]) -> String {
    let flows: Vec<String> = flows.iter().map(SocketAddr::to_string).collect();
    flows.join(", ")
}

/// A set of numbers as `0-3,6`.
#[must_use]
pub fn listed(numbers: &BTreeSet<u32>) -> String {
    ranges_text(numbers.iter().copied())
}

#[cfg(test)]
mod tests;
