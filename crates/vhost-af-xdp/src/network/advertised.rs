//! Addresses of connected guests that the network advertises to other hosts, if its uplink is a tunnel (VXLAN, Geneve)
//! that is a port of a bridge. The steward enters them in the bridge's tables, from where a routing daemon such as FRR
//! announces them.
//!
//! A guest's addresses are advertised while a lane serves it: from when its driver is ready until the VMM stops it, for
//! instance because it has migrated. Then the host that it has migrated to advertises them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use program::backoff::Retry;
use steer::{Station, with_sources};
use steward_protocol::AddressChange;

use super::{Network, State};
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;

/// A MAC address, or an IP address of it.
type Address = (Station, Option<IpAddr>);

/// See the module's head.
#[derive(Default)]
pub(super) struct Advertised {
    /// The steward has these.
    sent: BTreeSet<Address>,
    /// Why some are not advertised.
    pub(super) impaired: Option<String>,
    retry: Retry<BTreeSet<Address>>,
}

impl Advertised {
    /// Number of advertised MAC addresses.
    pub(super) fn count(&self) -> usize {
        self.sent.iter().filter(|(_, ip)| ip.is_none()).count()
    }

    /// The tap is gone to which the addresses belonged.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Network {
    /// Sends the steward the changes since the last call. Rejected addresses are retried with growing pauses.
    pub(super) fn advertise(&self, state: &mut State, uplink: &Interface) {
        if !state.host.is_port_of_bridge() || !uplink.link.is_tunnel() || uplink.steering.is_away() {
            return;
        }
        let (wanted, now) = (wanted(state), Instant::now());
        let its = &mut state.host.advertised;
        if !its.retry.is_due(wanted.clone(), its.sent == wanted, now) {
            return;
        }
        let added = wanted.difference(&its.sent).map(|&address| (address, true));
        let removed = its.sent.difference(&wanted).map(|&address| (address, false));
        let changes: Vec<_> = added.chain(removed).collect();
        let refused = match send(uplink, &changes) {
            Ok(()) => {
                its.sent.clone_from(&wanted);
                None
            }
            Err(_) if uplink.steering.is_away() => return,
            // One of them: all others are sent.
            Err(_) => {
                let mut refused = None;
                for &change in &changes {
                    match (send(uplink, &[change]), change) {
                        (Ok(()), (address, true)) => _ = its.sent.insert(address),
                        (_, (address, false)) => _ = its.sent.remove(&address),
                        (Err(error), _) => refused = Some(with_sources(&error)),
                    }
                }
                refused
            }
        };
        its.retry.record(refused.is_none(), now);
        if let (Some(why), true) = (&refused, refused != its.impaired) {
            tracing::warn!(
                network = self.name,
                "addresses of guests are not advertised to other hosts: {why}"
            );
        }
        its.impaired = refused;
    }
}

fn send(uplink: &Interface, changes: &[(Address, bool)]) -> Result<(), InterfaceError> {
    let change = |&((station, ip), is_added): &_| AddressChange {
        station,
        ip,
        is_added,
    };
    let changes: Vec<_> = changes.iter().map(change).collect();
    uplink.steering.advertise(&changes)
}

/// The addresses of guests that are connected. The bridge has one entry for an address in all VLANs.
fn wanted(state: &State) -> BTreeSet<Address> {
    let is_connected = |at: usize| {
        let guest = state.held.get(at).and_then(std::sync::Weak::upgrade);
        guest.is_some_and(|guest| guest.load(Relaxed))
    };
    let mut wanted = BTreeSet::new();
    for (_, port) in state.ports.iter().enumerate().filter(|&(at, _)| is_connected(at)) {
        let Some((port, &vlan)) = port
            .as_ref()
            .and_then(|port| Some((port, port.vlans.all().first()?)))
        else {
            continue;
        };
        let station = Station { vlan, mac: port.mac };
        let ips = port.source_guard.iter().flat_map(|guard| guard.hosts());
        wanted.extend(ips.map(|ip| (station, Some(ip))));
        wanted.insert((station, None));
    }
    let learned = state.learning.keys();
    let learned = learned.filter(|(_, port)| is_connected(port.0.into()));
    wanted.extend(learned.map(|(key, _)| {
        let (vlan, mac) = (key.vlan(), key.mac());
        (Station { vlan, mac }, None)
    }));
    wanted
}
