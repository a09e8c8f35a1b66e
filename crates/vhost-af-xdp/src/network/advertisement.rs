//! Addresses of connected guests that the network advertises to other hosts, if its uplink is a tunnel (VXLAN, Geneve)
//! that is a port of a bridge. The steward enters them in the bridge's tables, from where a routing daemon such as FRR
//! announces them.
//!
//! A guest's addresses are advertised while a lane serves it: from when its driver is ready until the VMM stops it, for
//! instance because it has migrated. Then the host that it has migrated to advertises them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use packet::ethernet::Mac;
use program::backoff::Backoff;
use steer::{Station, with_sources};
use steward_protocol::{AddressChange, StationChange};

use super::learning::Learning;
use super::{Network, State};
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use dataplane::fdb::FdbPort;

/// A MAC address, or an IP address of it.
type Address = (Mac, Option<IpAddr>);

/// Pauses between attempts to advertise rejected addresses.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// Once so many changes were rejected, others are not tried.
const REFUSALS_MAX: usize = 32;

/// See the module's head.
pub(super) struct Advertisement {
    /// The steward has these.
    sent: BTreeSet<Address>,
    /// Changes of the lease when they were sent: the steward may have lost some since.
    lease: (u32, u32),
    /// All that were wanted at the last attempt.
    wanted: BTreeSet<Address>,
    /// Why some are not advertised.
    pub(super) impaired: Option<String>,
    retry: Backoff,
}

impl Default for Advertisement {
    fn default() -> Self {
        let [shortest, longest] = PAUSES;
        Self {
            sent: BTreeSet::new(),
            lease: (0, 0),
            wanted: BTreeSet::new(),
            impaired: None,
            retry: Backoff::new(shortest, longest),
        }
    }
}

impl Advertisement {
    /// Number of advertised MAC addresses.
    pub(super) fn count(&self) -> usize {
        self.sent.iter().filter(|(_, ip)| ip.is_none()).count()
    }

    /// The tap is gone to which the addresses belonged.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// The steward has withdrawn the addresses of removed stations.
    pub(super) fn forget_removed(&mut self, changes: &[StationChange]) {
        let removed = changes.iter().filter(|change| change.port.is_none());
        let removed: BTreeSet<_> = removed.map(|change| change.station.mac).collect();
        self.sent.retain(|(mac, _)| !removed.contains(mac));
    }

    /// The steward has withdrawn addresses that are not learned any more.
    pub(super) fn forget_unlearned(&mut self, learning: &Learning, ports: &[Option<FdbPort>]) {
        let learned = learning.keys().map(|(key, _)| key.mac());
        let macs = ports.iter().flatten().map(|port| port.mac).chain(learned);
        let macs: BTreeSet<_> = macs.collect();
        self.sent.retain(|(mac, _)| macs.contains(mac));
    }
}

impl Network {
    /// Sends the steward the changes since the last call. Rejected addresses are retried with growing pauses.
    pub(super) fn advertise(&self, state: &mut State, uplink: &Interface) {
        if !uplink.link.is_tunnel() || uplink.steering.is_away() {
            return;
        }
        if state.host.bridge().is_none() {
            let has_host = state.uplink.as_ref().is_some_and(|uplink| uplink.host);
            let name = uplink.name();
            if has_host && !state.host.is_reached() {
                // The reason is that of the host.
                return;
            }
            self.note_advertised(
                state,
                match has_host {
                    true => Some(format!(
                        "{name} is no port of a bridge: `ip link set {name} master BRIDGE; bridge link set dev {name} \
                         learning off`"
                    )),
                    false => Some("the network has `host = false`: leave that out".to_owned()),
                },
            );
            return;
        }
        let (addresses, now) = (addresses(state), Instant::now());
        let wanted: BTreeSet<_> = addresses.keys().copied().collect();
        let lease = (uplink.steering.changes(), uplink.steering.returns());
        let its = &mut state.advertised;
        let is_other = wanted != its.wanted || lease != its.lease;
        if !is_other && (its.sent == wanted || !its.retry.is_due(now)) {
            return;
        }
        let removed = its.sent.difference(&wanted).map(|&address| (address, false));
        let is_missing = |address: &&Address| lease != its.lease || !its.sent.contains(*address);
        let added = wanted.iter().filter(is_missing).map(|&address| (address, true));
        let changes: Vec<_> = removed.chain(added).collect();
        // If an answer is lost, the steward may have the new ones.
        its.sent.extend(&wanted);
        (its.wanted, its.lease) = (wanted, lease);
        let send = |changes: &[(Address, bool)]| {
            let change = |&((mac, ip), is_added): &(Address, bool)| {
                let vlan = addresses.get(&(mac, ip)).copied().unwrap_or(0);
                let station = Station { vlan, mac };
                AddressChange {
                    station,
                    ip,
                    is_added,
                }
            };
            let changes: Vec<_> = changes.iter().map(change).collect();
            uplink.steering.ask(|lease| lease.advertise(&changes))
        };
        let mut refusals = Refusals::default();
        send_each(&changes, &send, &mut refusals);
        if uplink.steering.is_away() {
            // All are sent when it is back.
            return;
        }
        let Refusals { refused, why } = refusals;
        let removed = |(address, is_added): &(Address, bool)| (!is_added).then_some(*address);
        for address in changes.iter().filter_map(removed) {
            its.sent.remove(&address);
        }
        for (address, is_added) in &refused {
            match is_added {
                true => its.sent.remove(address),
                false => its.sent.insert(*address),
            };
        }
        match refused.is_empty() {
            true => its.retry.succeeded(now),
            false => drop(its.retry.failed(now)),
        }
        self.note_advertised(state, why);
    }

    /// Stores why addresses are not advertised; logs a change.
    fn note_advertised(&self, state: &mut State, why: Option<String>) {
        let texts = [
            "addresses of guests are not advertised to other hosts",
            "addresses of guests are advertised to other hosts",
        ];
        self.store_reason(&mut state.advertised.impaired, why, texts);
    }
}

/// Changes that failed, and why the last one did.
#[derive(Default)]
struct Refusals {
    refused: Vec<(Address, bool)>,
    why: Option<String>,
}

/// Sends changes; if the steward rejects one, it sends all others, unless [`REFUSALS_MAX`] were rejected.
fn send_each(
    changes: &[(Address, bool)],
    send: &impl Fn(&[(Address, bool)]) -> Result<(), InterfaceError>,
    refusals: &mut Refusals,
) {
    if changes.is_empty() || refusals.refused.len() >= REFUSALS_MAX {
        refusals.refused.extend(changes);
        return;
    }
    let Err(error) = send(changes) else { return };
    if changes.len() == 1 || error.is_away() {
        refusals.why = Some(with_sources(&error));
        refusals.refused.extend(changes);
        return;
    }
    let (first, second) = changes.split_at(changes.len() / 2);
    send_each(first, send, refusals);
    send_each(second, send, refusals);
}

/// The addresses of guests that are connected, each with the VLAN of a station that has it: the bridge has one entry for
/// an address in all VLANs.
fn addresses(state: &State) -> BTreeMap<Address, u16> {
    let is_connected = |at: usize| {
        let guest = state.held.get(at).and_then(Weak::upgrade);
        guest.is_some_and(|guest| guest.load(Relaxed))
    };
    let mut addresses = BTreeMap::new();
    for (_, port) in state.ports.iter().enumerate().filter(|&(at, _)| is_connected(at)) {
        let Some((port, &vlan)) = port
            .as_ref()
            .and_then(|port| Some((port, port.vlans.all().first()?)))
        else {
            continue;
        };
        let ips = port.source_guard.iter().flat_map(|guard| guard.hosts());
        let ips = ips.filter(|ip| !is_link_local(*ip)).map(Some);
        addresses.extend(ips.chain([None]).map(|ip| ((port.mac, ip), vlan)));
    }
    let learned = state.learning.keys();
    let learned = learned.filter(|(_, port)| is_connected(port.0.into()));
    addresses.extend(learned.map(|(key, _)| ((key.mac(), None), key.vlan())));
    addresses
}

/// Other hosts have no use for such an address.
fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}
