//! A bridge with two ports, a tap and a tunnel to other hosts: reads which of the tap's addresses its forwarding database
//! and its neighbour table have.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use steer::with_sources;

use super::Link;
use super::bridge::{BridgeFdb, macs_at};
use super::neighbours::{Neighbour, fdb_entry, neighbour, neighbours_by};
use super::tunnel::is_own_or_broadcast;

/// Indexes of a bridge and of two of its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BridgePorts {
    /// The bridge.
    pub bridge: u32,
    /// The tunnel to other hosts.
    pub tunnel: u32,
    /// The tap.
    pub tap: u32,
}

/// A MAC address that lacks something.
#[derive(Debug)]
pub struct Missing {
    /// The address.
    pub mac: [u8; 6],
    /// The bridge has no entry for it at the tap.
    pub is_lost: bool,
    /// Its IP addresses for which the bridge lacks our neighbour; of a lost address also those that another program has
    /// set.
    pub ips: Vec<IpAddr>,
}

impl BridgePorts {
    /// Where a network with this uplink can advertise addresses, and whether its tap is a port there.
    ///
    /// # Errors
    /// Why it cannot, with the remedy.
    pub fn of(bridges: &BridgeFdb, uplink: &Link, tap: &str) -> Result<(bool, Self), String> {
        let bridge = bridges.advertising_bridge(uplink)?;
        let device = Link::find_by_name(tap).map_err(with_sources)?;
        let device = device.ok_or_else(|| format!("{tap} is gone"))?;
        let ports = Self {
            bridge,
            tunnel: uplink.index,
            tap: device.index,
        };
        Ok((device.master == Some(bridge), ports))
    }

    /// Checks that the bridge has a MAC address at no other port by configuration.
    ///
    /// # Errors
    /// In words, with the remedy.
    pub fn check_mac(self, mac: [u8; 6]) -> Result<(), String> {
        let entry = fdb_entry(self.bridge, mac).map_err(|error| error.to_string())?;
        let is_other = |port: u32| ![self.tap, self.tunnel].contains(&port);
        let Some(other) = entry.filter(|its| its.is_configured && is_other(its.port)) else {
            return Ok(());
        };
        let port = Link::by_index(other.port).map_or_else(String::new, |port| port.name);
        Err(format!(
            "it is a configured address at port {port} of the bridge: `bridge fdb show dev {port}`"
        ))
    }

    /// Checks that an IP address can be a neighbour that is set by the program of this number: it is not the host's, and
    /// no other program has set it for good.
    ///
    /// # Errors
    /// In words, with the remedy.
    pub fn check_ip(self, ip: IpAddr, protocol: u8) -> Result<(), String> {
        let failed = |error: io::Error| error.to_string();
        if is_own_or_broadcast(self.bridge, ip).map_err(failed)? {
            return Err(
                "it is the bridge's own address, or a broadcast address: give the guest another".to_owned(),
            );
        }
        let there = neighbour(self.bridge, ip).map_err(failed)?;
        match there.is_some_and(|there| there.is_permanent && there.protocol != protocol) {
            true => Err(format!(
                "it is a permanent neighbour that another program has set: `ip neighbour show {ip}`"
            )),
            false => Ok(()),
        }
    }

    /// What the tables lack of MAC addresses and their IP addresses.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn missing(
        self,
        addresses: &BTreeMap<[u8; 6], BTreeSet<IpAddr>>,
        protocol: u8,
    ) -> io::Result<Vec<Missing>> {
        let there = macs_at(self.tap, self.bridge)?;
        let neighbours = neighbours_by(protocol, self.bridge)?;
        let mut missing = Vec::new();
        for (&mac, ips) in addresses {
            let is_lost = !there.contains(&mac);
            let is_set = |ip: IpAddr| neighbours.contains_key(&(self.bridge, ip));
            let mut lacks = Vec::new();
            for &ip in ips.iter().filter(|&&ip| !is_set(ip)) {
                if is_lost || neighbour(self.bridge, ip)?.is_none() {
                    lacks.push(ip);
                }
            }
            if is_lost || !lacks.is_empty() {
                missing.push(Missing {
                    mac,
                    is_lost,
                    ips: lacks,
                });
            }
        }
        Ok(missing)
    }

    /// The addresses of `macs` that the tables have, with their IP addresses.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn present(
        self,
        macs: impl Iterator<Item = [u8; 6]>,
        protocol: u8,
    ) -> io::Result<BTreeMap<[u8; 6], BTreeSet<IpAddr>>> {
        let there = macs_at(self.tap, self.bridge)?;
        let neighbours = neighbours_by(protocol, self.bridge)?;
        let ips_of = |mac| {
            let its = neighbours.iter().filter(move |&(_, of)| *of == mac);
            its.map(|(&(_, ip), _)| ip).collect()
        };
        let macs = macs.filter(|mac| there.contains(mac));
        Ok(macs.map(|mac| (mac, ips_of(mac))).collect())
    }
}

/// Neighbours that programs of this number have set, whose MAC address is at none of the taps with these names; none, if
/// they cannot be listed.
pub fn left_neighbours(protocol: u8, taps: impl Iterator<Item = String>) -> Vec<Neighbour> {
    left(protocol, taps).unwrap_or_else(|error| {
        tracing::warn!("cannot look for neighbours that another steward left: {error}");
        Vec::new()
    })
}

fn left(protocol: u8, taps: impl Iterator<Item = String>) -> io::Result<Vec<Neighbour>> {
    let all = neighbours_by(protocol, 0)?;
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let mut kept = BTreeSet::new();
    for link in taps.filter_map(|name| Link::by_name(&name).ok()) {
        if let Some(bridge) = link.master {
            kept.extend(macs_at(link.index, bridge)?);
        }
    }
    let left = all.into_iter().filter(|(_, mac)| !kept.contains(mac));
    let neighbour = |((index, ip), mac)| Neighbour {
        index,
        ip,
        mac,
        protocol,
        is_permanent: true,
    };
    Ok(left.map(neighbour).collect())
}
