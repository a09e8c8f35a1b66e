//! Addresses at the other ports of a bridge of which an interface, or one above it, is a port.
//!
//! # Theory of operation
//! [`BridgeFdb`] reads which bridges an interface is part of ([`BridgeFdb::look_at_links`], on each change of an
//! interface), and what these have in their forwarding databases (FDB, [`BridgeFdb::look_at_fdb`], when [`FdbChanges`]
//! is readable). Addresses at other ports than the interface's own are *behind* the bridge, in the VLANs as frames on
//! the interface have them.
//!
//! A bridge forgets an address that has been silent for five minutes, and sends frames for it to all of its ports. So
//! an address that it has forgotten stays behind it, until it is seen at the interface's port, or the port where it was
//! is gone.
//!
//! A host that sends from many addresses fills a bridge's database. The number of addresses that are kept is limited
//! ([`BEHIND_MAX`]), with an equal share for each port of the bridge. Within a port configured addresses come before
//! learned ones, and these before forgotten ones. The number of entries that are read is limited, too, for each port
//! ([`PORT_READ_MAX`]), so that a flood at one of them hides no address of another one. The kernel lists the newest
//! entries first, so a configured one may be behind learned ones that are not read: what is not read of a port stays as
//! it was, learned addresses as forgotten ones.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_bindings::rt_link::{self, Ifinfomsg};
use netlink_bindings::rt_neigh::{IterableNeighbourAttrs, Ndmsg, OpGetneighDump};
use netlink_bindings::traits::{NetlinkRequest, Protocol};
use netlink_socket2::NetlinkSocket;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, bind, recv};
use steer::Station;

use super::all::{Links, Seen, read_links};
use super::neighbours::{CONFIGURED, Entry, fdb_entry};
use super::{Link, dump, netlink_socket};
use program::log_limit::LogLimit;

/// Most stations behind a bridge that are kept.
pub const BEHIND_MAX: usize = 1024;
pub use steer::ANY_VLAN;
/// Most entries that are read of one bridge port. For each message the kernel goes through the list from its head again
/// (`br_fdb_dump`), so the time grows with the square of their number.
const PORT_READ_MAX: usize = 1 << 14;
/// `NLM_F_DUMP` and `RTM_GETNEIGH` (include/uapi/linux/netlink.h and rtnetlink.h).
const DUMP: u16 = 0x300;
const RTM_GETNEIGH: u16 = 30;
/// `IFLA_MASTER` (include/uapi/linux/if_link.h).
const IFLA_MASTER: u16 = 10;
/// `RTEXT_FILTER_BRVLAN` (include/uapi/linux/rtnetlink.h): VLANs of bridge ports are shown.
const WITH_VLANS: u32 = 1 << 1;
/// `IFLA_BRIDGE_VLAN_INFO`: a `struct bridge_vlan_info` of flags and VLAN (include/uapi/linux/if_bridge.h).
const VLAN_INFO: u16 = 2;
/// `BRIDGE_VLAN_INFO_PVID`.
const IS_PVID: u16 = 1 << 1;
/// Bytes of a netlink message before the family and the index in its body, and before its type.
const FAMILY_AT: usize = 16;
const INDEX_AT: usize = 20;
const TYPE_AT: usize = 4;
/// `RTM_DELNEIGH` (include/uapi/linux/rtnetlink.h).
const RTM_DELNEIGH: u16 = 29;

/// The interface, or one above it, is a port of a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Membership {
    /// Index of the bridge.
    bridge: u32,
    /// Its name.
    bridge_name: String,
    /// Index of the port.
    port: u32,
    /// Frames of the bridge have this tag on the interface.
    tag: Option<u16>,
    /// With VLAN filtering: the VLAN (PVID) of untagged frames at the port; 0: there is none.
    pvid: Option<u16>,
    /// The bridge learns addresses at the port.
    learns: bool,
    /// The bridge takes part in the spanning tree protocol.
    has_stp: bool,
}

impl Membership {
    /// VLANs that frames on the interface are of which the bridge takes for frames of that one.
    fn vlans(&self, vlan: u16) -> Vec<u16> {
        match (self.pvid, self.tag) {
            (None, tag) => vec![tag.unwrap_or(ANY_VLAN)],
            (Some(pvid), Some(tag)) if vlan == pvid => vec![tag],
            // A second tag would be behind the first.
            (Some(_), Some(_)) => Vec::new(),
            (Some(pvid), None) if vlan == pvid => vec![0, vlan],
            (Some(_), None) => vec![vlan],
        }
    }
}

/// Entries of forwarding databases.
#[derive(Debug, Default)]
struct Read {
    entries: Vec<Entry>,
    /// Ports with more than [`PORT_READ_MAX`] entries.
    cut: BTreeSet<u32>,
}

/// Why a bridge has an address; smaller values come first where there is not room for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Known {
    Configured,
    Learned,
    Forgotten,
}

/// Stations behind bridges; the module documentation describes it.
#[derive(Debug, Default)]
pub struct BridgeFdb {
    memberships: Vec<Membership>,
    /// Ports of bridges, and the bridge of each.
    ports: BTreeMap<u32, u32>,
    /// With the port where it is.
    stations: BTreeMap<Station, (u32, Known)>,
    /// Number of stations that did not fit.
    left_out: usize,
    /// Counts changes; it wraps.
    changes: u32,
    /// The bridges or their ports changed since the forwarding databases were read.
    is_stale: bool,
    /// A database was not read to its end.
    is_cut: bool,
    cuts: LogLimit,
}

impl BridgeFdb {
    /// Name of the bridge that the interface is a port of, the first one if it is part of several; empty: of none.
    pub fn bridge(&self) -> &str {
        self.memberships.first().map_or("", |first| &first.bridge_name)
    }

    /// Index of the bridge by which a network with this uplink can advertise addresses.
    ///
    /// # Errors
    /// Why it cannot, with the remedy.
    pub fn advertising_bridge(&self, uplink: &Link) -> Result<u32, String> {
        let (name, bridge) = (&uplink.name, self.bridge());
        match self.memberships.first() {
            _ if !uplink.is_tunnel() => Err(format!("{name} is no tunnel (vxlan, geneve)")),
            Some(membership) if membership.port != uplink.index => {
                Err(format!("{name} is no port of bridge {bridge} itself"))
            }
            None => Err(format!(
                "{name} is no port of a bridge: `ip link set {name} master BRIDGE`"
            )),
            Some(Membership { pvid: Some(_), .. }) => Err(format!(
                "bridge {bridge} filters VLANs: use one bridge for each VNI, without VLAN filtering (`ip link set {bridge} \
                 type bridge vlan_filtering 0`)"
            )),
            Some(Membership { has_stp: true, .. }) => Err(format!(
                "bridge {bridge} takes part in the spanning tree protocol, which would block the network's tap for 30 s: \
                 `ip link set {bridge} type bridge stp_state 0`"
            )),
            Some(Membership { learns: true, .. }) => Err(format!(
                "bridge {bridge} learns addresses at {name}, so any host could take a guest's: `bridge link set dev {name} \
                 learning off`"
            )),
            Some(membership) => Ok(membership.bridge),
        }
    }

    /// Counts changes; it wraps.
    pub fn changes(&self) -> u32 {
        self.changes
    }

    /// Stations that follow this one, in order.
    pub fn after(&self, station: Station) -> impl Iterator<Item = Station> {
        let after = (Bound::Excluded(station), Bound::Unbounded);
        self.stations.range(after).map(|(&station, _)| station)
    }

    /// Number of stations.
    #[must_use]
    pub fn count(&self) -> usize {
        self.stations.len()
    }

    /// Number of stations that did not fit.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Whether the forwarding databases have to be read because bridges or their ports changed.
    pub fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// Reads which bridges there are. Their forwarding databases are not read here ([`Self::is_stale`]). `own`: name of a
    /// port whose addresses are not behind the bridge.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn look_at_links(&mut self, link: &Link, own: &str) -> io::Result<()> {
        let links = read_links()?;
        let mut memberships = memberships_of(&links, link.index);
        if memberships.iter().any(|membership| membership.pvid.is_some()) {
            let pvids = read_pvids()?;
            for membership in &mut memberships {
                let pvid = pvids.get(&membership.port).copied();
                membership.pvid = membership.pvid.map(|none| pvid.unwrap_or(none));
            }
        }
        if memberships != self.memberships {
            self.stations.clear();
            self.changes = self.changes.wrapping_add(1);
            self.is_stale = true;
        }
        let bridges: BTreeSet<u32> = memberships.iter().map(|of| of.bridge).collect();
        let bridge_of = |seen: &Seen| seen.master.filter(|master| bridges.contains(master));
        let ports = links
            .iter()
            .filter(|(_, seen)| seen.name != own)
            .filter_map(|(&index, seen)| Some((index, bridge_of(seen)?)));
        let ports = ports.collect();
        self.is_stale |= ports != self.ports;
        (self.ports, self.memberships) = (ports, memberships);
        Ok(())
    }

    /// Reads the stations behind the bridges. Returns whether something changed.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn look_at_fdb(&mut self) -> io::Result<bool> {
        self.is_stale = false;
        let bridges: BTreeSet<u32> = self.memberships.iter().map(|of| of.bridge).collect();
        // Some addresses are the bridge's own, at no port.
        let own = bridges.iter().map(|&bridge| (bridge, bridge));
        let ports = self.ports.iter().map(|(&port, &bridge)| (port, bridge));
        let mut read = Read::default();
        // An uplink port without learning may have 100,000 entries, set by a routing daemon.
        let is_unread = |port| self.memberships.iter().any(|of| of.port == port && !of.learns);
        for (port, bridge) in ports.chain(own).filter(|&(port, _)| !is_unread(port)) {
            read_port(port, bridge, &mut read)?;
        }
        self.read_unread_ports(&mut read)?;
        let is_cut = !read.cut.is_empty();
        if is_cut
            && !self.is_cut
            && let Some(left_out) = self.cuts.allow()
        {
            let bridge = self.bridge();
            tracing::warn!(
                bridge,
                "a port of the bridge has more than {PORT_READ_MAX} addresses: guests of networks do not reach those \
                 that are not read; limit what the bridge learns (`ip link set {bridge} type bridge fdb_max_learned \
                 NUMBER`), or find the host that sends from so many (`bridge fdb show br {bridge}`){left_out}"
            );
        }
        self.is_cut = is_cut;
        Ok(self.take(&read))
    }

    /// Looks stations that vanished from other ports up at the ports that were not read.
    fn read_unread_ports(&self, read: &mut Read) -> io::Result<()> {
        let there: BTreeSet<_> = read.entries.iter().map(|entry| entry.mac).collect();
        let missing = self
            .stations
            .keys()
            .filter(|station| !there.contains(&station.mac));
        for station in missing {
            for of in self.memberships.iter().filter(|of| !of.learns) {
                let entry = fdb_entry(of.bridge, station.mac)?.filter(|entry| entry.port == of.port);
                read.entries.extend(entry);
            }
        }
        Ok(())
    }

    /// Replaces the stations by those of the entries that were read; returns whether something changed.
    fn take(&mut self, read: &Read) -> bool {
        let (mut here, mut behind) = (BTreeSet::new(), BTreeMap::new());
        for entry in &read.entries {
            let mut of = self.memberships.iter().filter(|of| of.bridge == entry.bridge);
            let Some(of) = of.next() else { continue };
            let mac = entry.mac;
            let stations = of.vlans(entry.vlan).into_iter().map(|vlan| Station { vlan, mac });
            if self.memberships.iter().any(|of| of.port == entry.port) {
                here.extend(stations);
                continue;
            }
            let known = match entry.is_configured {
                true => Known::Configured,
                false => Known::Learned,
            };
            for station in stations {
                let at = behind.entry(station).or_insert((entry.port, known));
                *at = (*at).min((entry.port, known));
            }
        }
        for (&station, &(port, known)) in &self.stations {
            let known = match known {
                Known::Configured if !read.cut.contains(&port) => continue,
                Known::Configured => known,
                Known::Learned | Known::Forgotten => Known::Forgotten,
            };
            if !here.contains(&station) && self.ports.contains_key(&port) {
                behind.entry(station).or_insert((port, known));
            }
        }
        let all = behind.len();
        let kept = shared_out(behind, BEHIND_MAX);
        let left_out = all - kept.len();
        let changed = left_out != self.left_out || !kept.keys().eq(self.stations.keys());
        (self.stations, self.left_out) = (kept, left_out);
        self.changes = self.changes.wrapping_add(changed.into());
        changed
    }
}

/// At most `most` of these stations, with an equal share for each port.
fn shared_out(all: BTreeMap<Station, (u32, Known)>, most: usize) -> BTreeMap<Station, (u32, Known)> {
    if all.len() <= most {
        return all;
    }
    let mut ranked: Vec<_> = all.into_iter().map(|(station, at)| (at, station)).collect();
    ranked.sort_unstable();
    let (mut port, mut rank) = (None, 0);
    let mut ranked: Vec<_> = ranked
        .into_iter()
        .map(|(at, station)| {
            rank = if port == Some(at.0) { rank + 1 } else { 0 };
            port = Some(at.0);
            (rank, at, station)
        })
        .collect();
    ranked.sort_unstable();
    let kept = ranked.into_iter().take(most);
    kept.map(|(_, at, station)| (station, at)).collect()
}

/// Bridges that an interface is part of, by itself, by a bond or team, or by a VLAN of these.
fn memberships_of(links: &Links, index: u32) -> Vec<Membership> {
    let mut found = Vec::new();
    let (mut above, mut next) = (vec![(index, None)], 0);
    while let Some(&(at, tag)) = above.get(next) {
        next += 1;
        let mut higher = Vec::new();
        let master = links.get(&at).and_then(|seen| seen.master);
        if let Some((master, seen)) = master.and_then(|master| Some((master, links.get(&master)?))) {
            match seen.kind == "bridge" {
                true => found.push(Membership {
                    bridge: master,
                    bridge_name: seen.name.clone(),
                    port: at,
                    tag,
                    pvid: seen.filters_vlans.then_some(0),
                    learns: links.get(&at).is_some_and(|port| port.is_learned_at),
                    has_stp: seen.has_stp,
                }),
                false => higher.push((master, tag)),
            }
        }
        for (&on, seen) in links.iter().filter(|(_, seen)| seen.below == Some(at)) {
            if tag.is_none() && seen.vlan.is_some() {
                higher.push((on, seen.vlan));
            }
        }
        higher.retain(|one| !above.contains(one));
        above.extend(higher);
    }
    found
}

/// Name of the bridge that the interface of an index is a port of, by itself, by a bond or team, or by a VLAN of these.
///
/// # Errors
/// An error of the kernel.
pub fn bridge_of(index: u32) -> io::Result<Option<String>> {
    let memberships = memberships_of(&read_links()?, index);
    Ok(memberships.into_iter().next().map(|first| first.bridge_name))
}

/// Of bridge ports: the VLAN of frames without a tag.
fn read_pvids() -> io::Result<BTreeMap<u32, u16>> {
    let header = Ifinfomsg {
        ifi_family: libc::AF_BRIDGE as u8,
        ..Ifinfomsg::default()
    };
    let mut request = rt_link::Request::new().op_getlink_dump(&header);
    request.encode().push_ext_mask(WITH_VLANS);
    let mut pvids = BTreeMap::new();
    dump(&request, |(header, attributes)| {
        let index = u32::try_from(header.ifi_index).unwrap_or_default();
        let pvid = attributes
            .get_af_spec()
            .ok()
            .and_then(|spec| pvid_in(spec.get_buf()));
        pvids.extend(pvid.map(|pvid| (index, pvid)));
    })?;
    Ok(pvids)
}

/// In attributes (struct nlattr: length and type, 2 bytes each, then the value, padded to 4 bytes).
fn pvid_in(mut attributes: &[u8]) -> Option<u16> {
    let word = |bytes: &[u8], at: usize| Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    loop {
        let (len, kind) = (usize::from(word(attributes, 0)?), word(attributes, 2)?);
        let value = attributes.get(4..len)?;
        if kind == VLAN_INFO && word(value, 0)? & IS_PVID != 0 {
            return word(value, 2);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

/// Asks for the entries of one port of a bridge: a `struct ifinfomsg` with an attribute, the form that the kernel takes
/// from sockets without `NETLINK_GET_STRICT_CHK` (`valid_fdb_dump_legacy` in net/core/rtnetlink.c).
pub(super) struct FdbDump(Vec<u8>);

impl FdbDump {
    fn of(port: u32, bridge: u32) -> Self {
        let Self(mut payload) = Self::of_device(port);
        for word in [8, IFLA_MASTER] {
            payload.extend(word.to_ne_bytes());
        }
        payload.extend(bridge.to_ne_bytes());
        Self(payload)
    }

    /// Also the device's own entries.
    pub(super) fn of_device(index: u32) -> Self {
        let header = Ifinfomsg {
            ifi_family: libc::AF_BRIDGE as u8,
            ifi_index: index.cast_signed(),
            ..Ifinfomsg::default()
        };
        Self(header.as_slice().to_vec())
    }
}

impl NetlinkRequest for FdbDump {
    type ReplyType<'a> = (Ndmsg, IterableNeighbourAttrs<'a>);

    fn protocol(&self) -> Protocol {
        Protocol::Raw {
            protonum: libc::NETLINK_ROUTE as u16,
            request_type: RTM_GETNEIGH,
        }
    }

    fn flags(&self) -> u16 {
        DUMP
    }

    fn payload(&self) -> &[u8] {
        &self.0
    }

    fn decode_reply(reply: &[u8]) -> Self::ReplyType<'_> {
        OpGetneighDump::decode_request(reply)
    }
}

/// Adds what a bridge knows at this port. One that is gone has nothing.
fn read_port(port: u32, bridge: u32, read: &mut Read) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    let mut replies = socket.request(&FdbDump::of(port, bridge))?;
    let mut count = 0;
    while let Some(reply) = replies.recv() {
        let (header, attributes) = match reply.map_err(io::Error::from) {
            Ok(reply) => reply,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
            Err(error) => return Err(error),
        };
        count += 1;
        if count > PORT_READ_MAX {
            read.cut.insert(port);
            break;
        }
        // The device's own list comes along.
        let is_of_bridge = attributes.get_master().is_ok_and(|master| master == bridge);
        let mac = attributes.get_lladdr().ok().and_then(|mac| mac.try_into().ok());
        if let Some(mac) = mac.filter(|mac: &[u8; 6]| is_of_bridge && mac[0] & 1 == 0) {
            read.entries.push(Entry {
                bridge,
                port: u32::try_from(header.ndm_ifindex).unwrap_or_default(),
                vlan: attributes.get_vlan().unwrap_or(0),
                mac,
                is_configured: header.ndm_state & CONFIGURED != 0,
            });
        }
    }
    Ok(())
}

/// Addresses in a bridge's forwarding database at one of its ports.
///
/// # Errors
/// An error of the kernel.
pub fn macs_at(port: u32, bridge: u32) -> io::Result<BTreeSet<[u8; 6]>> {
    let mut read = Read::default();
    read_port(port, bridge, &mut read)?;
    Ok(read.entries.into_iter().map(|entry| entry.mac).collect())
}

/// Notifications that some bridge's forwarding database changed, or that a neighbour was removed.
#[derive(Debug)]
pub struct FdbChanges(OwnedFd);

impl FdbChanges {
    /// Subscribes in the network namespace of the calling thread.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn subscribe() -> io::Result<Self> {
        let socket = netlink_socket(None)?;
        // Those of new neighbours, which come along, are left out by `drain`.
        bind(
            &socket,
            &SocketAddrNetlink::new(0, libc::RTMGRP_NEIGH.cast_unsigned()),
        )?;
        Ok(Self(socket))
    }

    /// Reads and discards pending messages, without waiting; whether a database changed, or a neighbour was removed at
    /// an interface of interest, by its index. Lost messages (ENOBUFS) count.
    pub fn drain(&self, is_of_interest: impl Fn(u32) -> bool) -> bool {
        let (mut message, mut changed) = ([0u8; 4096], false);
        loop {
            match recv(&self.0, &mut message[..], RecvFlags::empty()) {
                Ok((bytes, _)) => {
                    let family = message[..bytes].get(FAMILY_AT).copied();
                    let kind = message[..bytes]
                        .get(TYPE_AT..)
                        .and_then(|kind| kind.first_chunk());
                    changed |= family == Some(libc::AF_BRIDGE as u8);
                    let index = message[..bytes]
                        .get(INDEX_AT..)
                        .and_then(|index| index.first_chunk());
                    changed |= kind.is_some_and(|kind| u16::from_ne_bytes(*kind) == RTM_DELNEIGH)
                        && index.is_some_and(|index| is_of_interest(u32::from_ne_bytes(*index)));
                }
                Err(Errno::NOBUFS) => changed = true,
                Err(_) => return changed,
            }
        }
    }
}

impl AsFd for FdbChanges {
    /// Readable when there is a change.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
#[path = "bridge_tests.rs"]
mod tests;
