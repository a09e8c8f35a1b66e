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
//! 21472 and 21473). So missing entries are set again ([`BridgeEntries::renew`]): an address that the bridge has at
//! another port, at most [`CLAIMS`] times in a row. After that the lessee gets a note ([`BridgeEntries::lost_note`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_bindings::rt_neigh::{self, Ndmsg};
use steer::{Station, mac_text};

use crate::netlink::acknowledged;
use crate::server::taps::tap::{Tap, all_taps};
use host::links::bridge_ports::{BridgePorts, Missing, left_neighbours};
use host::links::neighbours::{Neighbour, fdb_entry, neighbour};
use program::log_limit::LogLimit;

/// How often in a row an address is taken back that the bridge has moved to another port.
const CLAIMS: u32 = 3;
/// After this long at the tap, the count of [`CLAIMS`] starts again.
const SETTLED: Duration = Duration::from_secs(60);
/// Most MAC and IP addresses, together, that a network advertises.
const ADDRESSES_MAX: usize = 4096;
/// `NDA_PROTOCOL` of our neighbours: a number that rtnetlink.h and FRR do not use.
const PROTOCOL: u8 = 118;

type Mac = [u8; 6];

/// See the module's head.
#[derive(Debug, Default)]
pub(in crate::server) struct BridgeEntries {
    /// MAC addresses, and the IP addresses of each.
    addresses: BTreeMap<Mac, BTreeSet<IpAddr>>,
    /// Where; `None`: nothing was advertised yet.
    pub(in crate::server) at: Option<BridgePorts>,
    /// How often each address was set again although another port has it, and when last.
    claims: BTreeMap<Mac, (u32, Instant)>,
    /// Addresses that another host has, and that are not set again.
    lost: BTreeSet<Mac>,
    lines: LogLimit,
}

impl BridgeEntries {
    /// Makes the tap a port of the bridge, if it is none yet.
    pub(super) fn begin(&mut self, tap: &Tap, at: BridgePorts) -> io::Result<()> {
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
        at: BridgePorts,
        macs: impl Iterator<Item = Mac>,
    ) -> io::Result<()> {
        tap.set_port_flags()?;
        self.addresses = at.present(macs, PROTOCOL)?;
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
        let known = self.addresses.get(&mac);
        if known.is_some_and(|ips| ip.is_none_or(|ip| ips.contains(&ip))) {
            return Ok(());
        }
        if self.ips().count() >= ADDRESSES_MAX {
            return Err(format!("a network advertises at most {ADDRESSES_MAX} addresses"));
        }
        let failed = |why: String| {
            let text = ip.map_or_else(|| mac_text(mac), |ip| ip.to_string());
            format!("cannot advertise {text}: {why}")
        };
        let set = |ip| set(at, mac, ip).map_err(|error| error.to_string());
        if known.is_none() {
            at.check_mac(mac).and_then(|()| set(None)).map_err(failed)?;
            self.addresses.insert(mac, BTreeSet::new());
        }
        if let Some(ip) = ip {
            let is_free = at.check_ip(ip, PROTOCOL);
            is_free.and_then(|()| set(Some(ip))).map_err(failed)?;
            self.addresses.entry(mac).or_default().insert(ip);
        }
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
            self.lost.remove(&mac);
            let mut request = rt_neigh::Request::new().op_delneigh_do(&entry(None, at.tap));
            request.encode().push_lladdr(&mac);
            // It is not there if another host has the address now.
            let _ = acknowledged(&request);
            ips.into_iter().for_each(|ip| self.release(at, mac, ip));
        }
    }

    /// Withdraws all MAC addresses but those of these stations.
    pub(in crate::server) fn keep_only(&mut self, stations: impl Iterator<Item = Station>) {
        if self.addresses.is_empty() {
            return;
        }
        let kept: BTreeSet<_> = stations.map(|station| station.mac).collect();
        let others = self.addresses.keys().filter(|mac| !kept.contains(*mac));
        let others: Vec<_> = others.copied().collect();
        others.into_iter().for_each(|mac| self.withdraw(mac, None));
    }

    /// Which addresses another host has, for the lessee; empty: none.
    pub(in crate::server) fn lost_note(&self) -> String {
        self.lost.first().map_or_else(String::new, |&mac| {
            format!(
                "another host has {} advertised address(es) of guests, for instance {}, and gets the frames to them: two \
                 guests have such an address, or a migration has not ended",
                self.lost.len(),
                mac_text(mac)
            )
        })
    }

    /// Removes the neighbour of an IP address. If another advertised guest has the same IP address, the neighbour gets
    /// that guest's MAC address.
    fn release(&self, at: BridgePorts, mac: Mac, ip: IpAddr) {
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
        let missing = at.missing(&self.addresses, PROTOCOL)?;
        self.lost.clear();
        let is_lost = |mac| missing.iter().any(|its| its.is_lost && its.mac == mac);
        self.claims
            .retain(|&mac, (_, last)| is_lost(mac) || now.duration_since(*last) < SETTLED);
        for Missing { mac, is_lost, ips } in missing {
            if is_lost && !self.may_set_again(at, mac, now)? {
                self.lost.insert(mac);
                continue;
            }
            let mac_too = is_lost.then_some(None).into_iter();
            for ip in mac_too.chain(ips.into_iter().map(Some)) {
                // One that fails is tried again at the next change.
                if ip.is_none_or(|ip| at.check_ip(ip, PROTOCOL).is_ok()) {
                    let _ = set(at, mac, ip);
                }
            }
        }
        Ok(())
    }

    /// Whether an address that is not at the tap is set again; counts that if the bridge has it at another port.
    fn may_set_again(&mut self, at: BridgePorts, mac: Mac, now: Instant) -> io::Result<bool> {
        let is_elsewhere = fdb_entry(at.bridge, mac)?.is_some_and(|entry| entry.port != at.tap);
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
pub(super) fn remove_left_neighbours() {
    let taps = all_taps().into_iter().map(|tap| tap.name);
    for Neighbour { index, mac, ip, .. } in left_neighbours(PROTOCOL, taps) {
        remove_neighbour(index, mac, ip);
    }
}

/// Adds an entry of the forwarding database, or a neighbour.
fn set(at: BridgePorts, mac: Mac, ip: Option<IpAddr>) -> io::Result<()> {
    let request = rt_neigh::Request::new().set_change();
    let index = if ip.is_some() { at.bridge } else { at.tap };
    let mut request = request.op_newneigh_do(&entry(ip, index));
    let attributes = request.encode().push_lladdr(&mac);
    match ip {
        Some(ip) => drop(attributes.push_dst(ip).push_protocol(PROTOCOL)),
        None => drop(attributes),
    }
    acknowledged(&request)
}

/// Removes a neighbour, unless another program or guest has it now.
fn remove_neighbour(bridge: u32, mac: Mac, ip: IpAddr) {
    let is_ours = |its: Neighbour| its.is_permanent && its.protocol == PROTOCOL && its.mac == mac;
    if neighbour(bridge, ip).is_ok_and(|its| its.is_some_and(is_ours)) {
        let mut request = rt_neigh::Request::new().op_delneigh_do(&entry(Some(ip), bridge));
        request.encode().push_dst(ip);
        let _ = acknowledged(&request);
    }
}

/// The header of a neighbour of an interface, or of an entry of the forwarding database at a port, by its index.
fn entry(ip: Option<IpAddr>, index: u32) -> Ndmsg {
    let (family, state, flags) = match ip {
        // The bridge's entry, not the device's own.
        None => (libc::AF_BRIDGE, libc::NUD_NOARP, libc::NTF_MASTER),
        Some(IpAddr::V4(_)) => (libc::AF_INET, libc::NUD_PERMANENT, 0),
        Some(IpAddr::V6(_)) => (libc::AF_INET6, libc::NUD_PERMANENT, 0),
    };
    Ndmsg {
        ndm_family: family as u8,
        ndm_ifindex: index.cast_signed(),
        ndm_state: state,
        ndm_flags: flags,
        ..Ndmsg::default()
    }
}
