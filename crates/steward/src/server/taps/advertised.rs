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
//! number ([`PROTOCOL`]), by which the next steward finds those that a killed one left ([`remove_left_neighbours`]). It
//! continues with the addresses that it finds at a tap that it takes over.
//!
//! Others change these tables, too. The kernel drops neighbours of a bridge that is set down. When two hosts announce an
//! address at about the same time, zebra may move this host's entry to the tunnel although it was set last (FRR issues
//! 21472 and 21473). So missing entries are set again ([`Advertised::renew`]): an address that the bridge has at another
//! port, at most [`CLAIMS`] times in a row.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_bindings::rt_neigh::{self, Ndmsg};
use steer::mac_text;

use crate::netlink::acknowledged;
use crate::server::taps::tap::{Tap, all_taps};
use host::links::Link;
use host::links::bridge::macs_at;
use host::links::neighbours::{fdb_entry, neighbour, neighbours_by};
use host::links::tunnel::is_own_or_broadcast;
use program::log_limit::LogLimit;

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

type Mac = [u8; 6];

/// See the module's head.
#[derive(Debug, Default)]
pub(in crate::server) struct Advertised {
    /// MAC addresses, and the IP addresses of each.
    addresses: BTreeMap<Mac, BTreeSet<IpAddr>>,
    /// Where; `None`: nothing was advertised yet.
    pub(super) at: Option<Place>,
    /// How often each address was set again although another port has it, and when last.
    claims: BTreeMap<Mac, (u32, Instant)>,
    lines: LogLimit,
}

/// Indexes of a bridge and of two of its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) bridge: u32,
    pub(super) tunnel: u32,
    pub(super) tap: u32,
}

impl Advertised {
    /// Makes the tap a port of the bridge, if it is none yet.
    pub(super) fn begin(&mut self, tap: &Tap, at: Place) -> io::Result<()> {
        if self.at != Some(at) {
            self.end();
            *self = Self::default();
            tap.join_bridge(at.bridge)?;
            self.at = Some(at);
        }
        Ok(())
    }

    /// Continues with what an earlier steward has advertised. `macs`: those of the network.
    pub(super) fn take_over(
        &mut self,
        tap: &Tap,
        at: Place,
        macs: impl Iterator<Item = Mac>,
    ) -> io::Result<()> {
        tap.set_port_flags()?;
        let there = macs_at(at.tap, at.bridge)?;
        let neighbours = neighbours_by(PROTOCOL, at.bridge)?;
        for mac in macs.filter(|mac| there.contains(mac)) {
            let its = neighbours.iter().filter(|&(_, of)| *of == mac);
            self.addresses.insert(mac, its.map(|(&(_, ip), _)| ip).collect());
        }
        self.at = Some(at);
        Ok(())
    }

    /// The IP addresses, and `None` for each MAC address.
    pub(in crate::server) fn ips(&self) -> impl Iterator<Item = Option<IpAddr>> {
        let each = self.addresses.values();
        each.flat_map(|ips| ips.iter().copied().map(Some).chain([None]))
    }

    /// Advertises a MAC address, and an IP address of it.
    /// Errors: in words, with the remedy.
    pub(super) fn add(&mut self, mac: Mac, ip: Option<IpAddr>) -> Result<(), String> {
        let Some(at) = self.at else { return Ok(()) };
        let has_mac = self.addresses.contains_key(&mac);
        if self
            .addresses
            .get(&mac)
            .is_some_and(|ips| ip.is_none_or(|ip| ips.contains(&ip)))
        {
            return Ok(());
        }
        if self.ips().count() >= MOST {
            return Err(format!(
                "{MOST} addresses are advertised, the most for a network: use several"
            ));
        }
        let failed = |error: io::Error| {
            let text = ip.map_or_else(|| mac_text(mac), |ip| ip.to_string());
            format!("cannot advertise {text}: {error}")
        };
        if !has_mac {
            let entry = fdb_entry(at.bridge, mac).map_err(failed)?;
            let other = entry.filter(|its| its.is_configured && ![at.tap, at.tunnel].contains(&its.port));
            if let Some(other) = other {
                let port = Link::by_index(other.port).map_or_else(String::new, |port| port.name);
                return Err(format!(
                    "{} is a configured address at port {port} of the bridge: `bridge fdb show dev {port}`",
                    mac_text(mac)
                ));
            }
            set(at, mac, None).map_err(failed)?;
            self.addresses.insert(mac, BTreeSet::new());
        }
        let Some(ip) = ip else { return Ok(()) };
        if is_own_or_broadcast(at.bridge, ip).map_err(failed)? {
            return Err(format!(
                "{ip} is the bridge's own address, or a broadcast address: give the guest another"
            ));
        }
        let there = neighbour(at.bridge, ip).map_err(failed)?;
        if there.is_some_and(|there| there.is_permanent && there.protocol != PROTOCOL) {
            return Err(format!(
                "{ip} is a permanent neighbour that another program has set: `ip neighbour show {ip}`"
            ));
        }
        set(at, mac, Some(ip)).map_err(failed)?;
        self.addresses.entry(mac).or_default().insert(ip);
        Ok(())
    }

    /// Withdraws a MAC address with its IP addresses, or one of these.
    pub(super) fn withdraw(&mut self, mac: Mac, ip: Option<IpAddr>) {
        let Some(at) = self.at else { return };
        if let Some(ip) = ip {
            if self.addresses.get_mut(&mac).is_some_and(|ips| ips.remove(&ip)) {
                self.release(at, mac, ip);
            }
        } else if let Some(ips) = self.addresses.remove(&mac) {
            self.claims.remove(&mac);
            let mut request = rt_neigh::Request::new().op_delneigh_do(&entry(None, at));
            request.encode().push_lladdr(&mac);
            // It is not there if another host has the address now.
            let _ = acknowledged(&request);
            ips.into_iter().for_each(|ip| self.release(at, mac, ip));
        }
    }

    /// Withdraws all MAC addresses but these.
    pub(in crate::server) fn keep_only(&mut self, macs: &BTreeSet<Mac>) {
        let others = self.addresses.keys().filter(|mac| !macs.contains(*mac));
        let others: Vec<_> = others.copied().collect();
        others.into_iter().for_each(|mac| self.withdraw(mac, None));
    }

    /// Removes a neighbour, or gives it to another guest with the IP address.
    fn release(&self, at: Place, mac: Mac, ip: IpAddr) {
        let mut others = self.addresses.iter().filter(|(_, ips)| ips.contains(&ip));
        match others.next() {
            Some((&other, _)) => _ = set(at, other, Some(ip)),
            None => remove_neighbour(at.bridge, mac, ip),
        }
    }

    /// Withdraws all IP addresses; MAC addresses end with the tap.
    pub(super) fn end(&self) {
        let Some(at) = self.at else { return };
        for (&mac, ips) in &self.addresses {
            ips.iter().for_each(|&ip| remove_neighbour(at.bridge, mac, ip));
        }
    }

    /// Sets again what is missing in the kernel's tables.
    pub(super) fn renew(&mut self, now: Instant) -> io::Result<()> {
        let Some(at) = self.at.filter(|_| !self.addresses.is_empty()) else {
            return Ok(());
        };
        let there = macs_at(at.tap, at.bridge)?;
        let neighbours = neighbours_by(PROTOCOL, at.bridge)?;
        let addresses = std::mem::take(&mut self.addresses);
        for (&mac, ips) in &addresses {
            let is_lost = !there.contains(&mac);
            if is_lost && !self.may_claim(at, mac, now)? {
                continue;
            }
            if !is_lost
                && self
                    .claims
                    .get(&mac)
                    .is_some_and(|(_, last)| now - *last > SETTLED)
            {
                self.claims.remove(&mac);
            }
            let mut missing: Vec<_> = is_lost.then_some(None).into_iter().collect();
            for &ip in ips
                .iter()
                .filter(|&&ip| !neighbours.contains_key(&(at.bridge, ip)))
            {
                // Another host may have it now.
                if is_lost || neighbour(at.bridge, ip)?.is_none() {
                    missing.push(Some(ip));
                }
            }
            for ip in missing {
                if let Err(error) = set(at, mac, ip) {
                    tracing::debug!("cannot advertise {} {ip:?} again: {error}", mac_text(mac));
                }
            }
        }
        self.addresses = addresses;
        Ok(())
    }

    /// Whether an address that is not at the tap is set again; counts that if the bridge has it at another port.
    fn may_claim(&mut self, at: Place, mac: Mac, now: Instant) -> io::Result<bool> {
        let is_elsewhere = fdb_entry(at.bridge, mac)?.is_some();
        let (count, last) = self.claims.entry(mac).or_insert((0, now));
        match is_elsewhere {
            true => *count = count.saturating_add(1),
            false => *count = (*count).min(CLAIMS),
        }
        if *count > CLAIMS {
            if *count == CLAIMS + 1
                && let Some(left_out) = self.lines.allow()
            {
                tracing::warn!(
                    mac = mac_text(mac),
                    "a guest of this host loses its frames to another host, which advertises its address, too: two guests \
                     have this address, or a migration has not ended{left_out}"
                );
            }
            return Ok(false);
        }
        *last = now;
        Ok(true)
    }
}

/// Removes neighbours of stewards whose MAC address is at no tap of theirs any more.
pub(super) fn remove_left_neighbours() -> io::Result<()> {
    let all = neighbours_by(PROTOCOL, 0)?;
    let mut kept = BTreeSet::new();
    for tap in all_taps().iter().filter(|_| !all.is_empty()) {
        if let Ok(link) = Link::by_name(&tap.name)
            && let Some(bridge) = link.master
        {
            kept.extend(macs_at(link.index, bridge)?);
        }
    }
    let left = all.into_iter().filter(|(_, mac)| !kept.contains(mac));
    left.for_each(|((bridge, ip), mac)| remove_neighbour(bridge, mac, ip));
    Ok(())
}

/// Adds an entry of the forwarding database, or a neighbour.
fn set(at: Place, mac: Mac, ip: Option<IpAddr>) -> io::Result<()> {
    let request = rt_neigh::Request::new().set_change();
    let mut request = request.op_newneigh_do(&entry(ip, at));
    let attributes = request.encode().push_lladdr(&mac);
    match ip {
        Some(ip) => drop(attributes.push_dst(ip).push_protocol(PROTOCOL)),
        None => drop(attributes),
    }
    acknowledged(&request)
}

/// Removes a neighbour, unless another program or guest has it now.
fn remove_neighbour(bridge: u32, mac: Mac, ip: IpAddr) {
    let is_ours = |its: Option<_>| {
        its.is_some_and(|its: host::links::neighbours::Neighbour| {
            its.is_permanent && its.protocol == PROTOCOL && its.mac == mac
        })
    };
    if neighbour(bridge, ip).is_ok_and(is_ours) {
        let at = Place {
            bridge,
            tunnel: 0,
            tap: 0,
        };
        let mut request = rt_neigh::Request::new().op_delneigh_do(&entry(Some(ip), at));
        request.encode().push_dst(ip);
        let _ = acknowledged(&request);
    }
}

/// The header of a neighbour, or of an entry of the forwarding database.
fn entry(ip: Option<IpAddr>, at: Place) -> Ndmsg {
    let (family, index, state, flags) = match ip {
        None => (libc::AF_BRIDGE, at.tap, STATIC, OF_BRIDGE),
        Some(IpAddr::V4(_)) => (libc::AF_INET, at.bridge, PERMANENT, 0),
        Some(IpAddr::V6(_)) => (libc::AF_INET6, at.bridge, PERMANENT, 0),
    };
    Ndmsg {
        ndm_family: family as u8,
        ndm_ifindex: index.cast_signed(),
        ndm_state: state,
        ndm_flags: flags,
        ..Ndmsg::default()
    }
}
