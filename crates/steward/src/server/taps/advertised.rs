//! Addresses of guests that a network advertises to other hosts by its uplink: a tunnel (VXLAN, Geneve) that is a port
//! of a bridge.
//!
//! # Theory of operation
//!
//! The kernel's tables are the interface to a routing daemon such as FRR with EVPN (RFC 7432, RFC 8365). It announces
//! the addresses that the bridge's forwarding database has at ports other than the tunnel, and enters the addresses that
//! other hosts announce at the tunnel. So the network's tap to the host becomes a port of the bridge, and each advertised
//! MAC address a static entry at this port. Each IP address becomes a permanent neighbour of the bridge.
//!
//! Entries of the forwarding database end with the tap, and so with the lessee. Neighbours do not: they have a protocol
//! number ([`PROTOCOL`]), by which the next steward finds those that a killed one left. It also continues with the
//! addresses that it finds at a tap that it takes over.
//!
//! When two hosts announce an address at about the same time, zebra may move this host's entry to the tunnel although it
//! was set last (FRR issues 21472 and 21473). The steward sets it again, at most [`CLAIMS`] times in a row, and as soon as
//! no other host announces it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_bindings::rt_neigh::{self, Ndmsg};
use steer::{Station, mac_text};

use crate::netlink::acknowledged;
use crate::server::taps::tap::{Tap, all_taps};
use host::links::Link;
use host::links::bridge::{is_neighbour, macs_at, neighbours_of};
use steward_protocol::AddressChange;

/// How often an address that another host takes is set again.
const CLAIMS: u32 = 3;
/// An address that has stayed for this long is set again as often as a new one.
const SETTLED: Duration = Duration::from_secs(60);
/// Most addresses of a network.
const MOST: usize = 4096;
/// `NDA_PROTOCOL` of our neighbours: a number that rtnetlink.h and FRR do not use.
const PROTOCOL: u8 = 118;
/// `NUD_NOARP` and `NUD_PERMANENT` (include/uapi/linux/neighbour.h).
const STATIC: u16 = 0x40;
const PERMANENT: u16 = 0x80;
/// `NTF_MASTER` (include/uapi/linux/neighbour.h): the entry is the bridge's, not the device's own.
const OF_BRIDGE: u8 = 0x04;

/// See the module's head.
#[derive(Debug, Default)]
pub(in crate::server) struct Advertised {
    /// Each MAC address, and each IP address of it.
    addresses: BTreeSet<(Station, Option<IpAddr>)>,
    /// Indexes of the bridge and of the tap at it; `None`: nothing was advertised yet.
    at: Option<(u32, u32)>,
    /// How often each address was set again, and when last.
    claims: BTreeMap<[u8; 6], (u32, Instant)>,
}

impl Advertised {
    /// Makes the tap a port of the bridge, if it is none yet. `stations`: all of the network.
    pub(super) fn begin(
        &mut self,
        (tap, device): (&Tap, &Link),
        bridge: u32,
        stations: impl Iterator<Item = Station>,
    ) -> io::Result<()> {
        if self.at == Some((bridge, device.index)) {
            return Ok(());
        }
        if device.master != Some(bridge) {
            tap.join_bridge(bridge)?;
        }
        self.at = Some((bridge, device.index));
        let (there, neighbours) = (macs_at(device.index, bridge)?, neighbours_of(bridge, PROTOCOL)?);
        let mut others = BTreeSet::new();
        for other in all_taps() {
            if let Ok(link) = Link::by_name(&other.name) {
                others.extend(macs_at(link.index, bridge)?);
            }
        }
        for station in stations.filter(|station| there.contains(&station.mac)) {
            let ips = neighbours.iter().filter(|(_, mac)| *mac == station.mac);
            let ips = ips.map(|&(ip, _)| (station, Some(ip)));
            self.addresses.extend(ips.chain([(station, None)]));
        }
        let left = neighbours.into_iter().filter(|(_, mac)| !others.contains(mac));
        left.for_each(|(ip, _)| remove_neighbour(ip, bridge));
        Ok(())
    }

    /// The IP addresses, and `None` for each MAC address.
    pub(in crate::server) fn ips(&self) -> impl Iterator<Item = Option<IpAddr>> {
        self.addresses.iter().map(|(_, ip)| *ip)
    }

    /// Whether the addresses are at another bridge, or would be.
    pub(super) fn is_elsewhere(&self, bridge: Option<u32>) -> bool {
        self.at.is_some_and(|(at, _)| Some(at) != bridge)
    }

    /// Applies changes in order, up to one that fails.
    /// Errors: in words.
    pub(super) fn change(&mut self, changes: &[AddressChange]) -> Result<(), String> {
        for &AddressChange {
            station,
            ip,
            is_added,
        } in changes
        {
            let address = (station, ip);
            if !is_added {
                self.withdraw(address);
                continue;
            }
            if self.addresses.len() >= MOST && !self.addresses.contains(&address) {
                return Err(format!(
                    "{MOST} addresses are advertised, which is the maximum for a network"
                ));
            }
            self.set(address).map_err(|error| {
                let text = ip.map_or_else(|| mac_text(station.mac), |ip| ip.to_string());
                format!("cannot advertise {text}: {error}")
            })?;
            self.addresses.insert(address);
        }
        Ok(())
    }

    /// Withdraws a station, with its IP addresses.
    pub(in crate::server) fn withdraw_station(&mut self, station: Station) {
        let its = self.addresses.iter().filter(|(of, _)| *of == station);
        let its: Vec<_> = its.copied().collect();
        its.into_iter().for_each(|address| self.withdraw(address));
    }

    /// Withdraws all IP addresses; MAC addresses end with the tap.
    pub(super) fn end(&self) {
        let Some((bridge, _)) = self.at else { return };
        self.ips().flatten().for_each(|ip| remove_neighbour(ip, bridge));
    }

    /// Sets addresses again that are not at the tap any more. `tunnel`: index of the uplink.
    pub(super) fn claim_again(&mut self, tunnel: u32, now: Instant) -> io::Result<()> {
        let Some((bridge, tap)) = self.at.filter(|_| !self.addresses.is_empty()) else {
            return Ok(());
        };
        let there = macs_at(tap, bridge)?;
        let macs: BTreeSet<_> = self.addresses.iter().map(|(station, _)| station.mac).collect();
        let lost: Vec<_> = macs.difference(&there).copied().collect();
        if lost.is_empty() {
            return Ok(());
        }
        let elsewhere = macs_at(tunnel, bridge)?;
        for mac in lost {
            let (count, last) = self.claims.entry(mac).or_insert((0, now));
            if now.duration_since(*last) > SETTLED {
                *count = 0;
            }
            if elsewhere.contains(&mac) {
                *count = count.saturating_add(1);
                if *count == CLAIMS + 1 {
                    let mac = mac_text(mac);
                    tracing::warn!(
                        mac,
                        "the address of a guest of this host is advertised by another host, too"
                    );
                }
                if *count > CLAIMS {
                    continue;
                }
            }
            *last = now;
            let its = self.addresses.iter().filter(|(station, _)| station.mac == mac);
            its.copied().try_for_each(|address| self.set(address))?;
        }
        Ok(())
    }

    fn set(&self, (station, ip): (Station, Option<IpAddr>)) -> io::Result<()> {
        let Some(at) = self.at else {
            return Ok(());
        };
        let request = rt_neigh::Request::new().set_change();
        let mut request = request.op_newneigh_do(&entry(ip, at));
        let attributes = request.encode().push_lladdr(&station.mac);
        match ip {
            Some(ip) => drop(attributes.push_dst(ip).push_protocol(PROTOCOL)),
            None => drop(attributes),
        }
        acknowledged(&request)
    }

    fn withdraw(&mut self, address: (Station, Option<IpAddr>)) {
        let (station, ip) = address;
        let (true, Some(at)) = (self.addresses.remove(&address), self.at) else {
            return;
        };
        // The bridge has one entry for all VLANs.
        let is_kept = |(other, its): &(Station, Option<IpAddr>)| other.mac == station.mac && *its == ip;
        if self.addresses.iter().any(is_kept) {
            return;
        }
        match ip {
            Some(ip) => remove_neighbour(ip, at.0),
            None => {
                self.claims.remove(&station.mac);
                let mut request = rt_neigh::Request::new().op_delneigh_do(&entry(None, at));
                request.encode().push_lladdr(&station.mac);
                // It is not there if another host has the address now.
                let _ = acknowledged(&request);
            }
        }
    }
}

/// Removes a neighbour, unless another program has replaced it.
fn remove_neighbour(ip: IpAddr, bridge: u32) {
    if is_neighbour(bridge, ip, PROTOCOL) {
        let mut request = rt_neigh::Request::new().op_delneigh_do(&entry(Some(ip), (bridge, 0)));
        request.encode().push_dst(ip);
        let _ = acknowledged(&request);
    }
}

/// The header of a neighbour, or of an entry of the forwarding database; of the indexes of bridge and tap.
fn entry(ip: Option<IpAddr>, (bridge, tap): (u32, u32)) -> Ndmsg {
    let (family, index, state, flags) = match ip {
        None => (libc::AF_BRIDGE, tap, STATIC, OF_BRIDGE),
        Some(IpAddr::V4(_)) => (libc::AF_INET, bridge, PERMANENT, 0),
        Some(IpAddr::V6(_)) => (libc::AF_INET6, bridge, PERMANENT, 0),
    };
    Ndmsg {
        ndm_family: family as u8,
        ndm_ifindex: index.cast_signed(),
        ndm_state: state,
        ndm_flags: flags,
        ..Ndmsg::default()
    }
}
