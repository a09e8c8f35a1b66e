//! Pairs of veth that a steward makes between the host and a network (see `server::hosts`).
//!
//! The host end says in its alias (`ip link show`) what it is for, by which a successor of the steward finds it.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::io;

use netlink_bindings::rt_link::{self, Ifinfomsg, IterableLinkAttrs, PushLinkAttrs};
use netlink_bindings::traits::{NetlinkRequest, Pusher};
use netlink_bindings::utils::{finalize_nested_header, push_header, push_nested_header};
use netlink_socket2::NetlinkSocket;
use rustix::io::Errno;

use super::Link;
use crate::hardware::Ethtool;

/// What follows says whose the pair is.
const ALIAS: &str = "vhost-af-xdp: the host on ";
/// `IFLA_INFO_DATA` and `IFLA_AF_SPEC`, include/uapi/linux/if_link.h.
const INFO_DATA: u16 = 2;
const AF_SPEC: u16 = 26;
/// `VETH_INFO_PEER`, include/uapi/linux/veth.h.
const INFO_PEER: u16 = 1;
/// Of `IFLA_AF_SPEC`: `AF_INET6`, in it `IFLA_INET6_ADDR_GEN_MODE`: `IN6_ADDR_GEN_MODE_NONE`.
const OF_INET6: u16 = libc::AF_INET6.cast_unsigned() as u16;
const ADDR_GEN_MODE: u16 = 8;
const NO_ADDRESS: u8 = 1;

/// A pair, by the names of its ends, and what it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    /// The end that the host's programs are on.
    pub(crate) host_end: String,
    /// The end that is leased.
    pub(crate) inner_end: String,
    /// Name of the interface whose host it joins, as it was leased first.
    pub(crate) uplink: String,
    /// The network's first queue.
    pub(crate) first: u32,
}

impl Pair {
    /// For the network of that first queue of an interface. The ends have names by its index, which no other has.
    pub(crate) fn new(uplink: &str, ifindex: u32, first: u32) -> Self {
        Self {
            host_end: format!("vaxh{ifindex}-{first}"),
            inner_end: format!("vaxg{ifindex}-{first}"),
            uplink: uplink.to_owned(),
            first,
        }
    }

    /// All that there are in this network namespace.
    pub(crate) fn all() -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for_each(|_, attributes| {
            let alias = attributes
                .get_ifalias()
                .ok()
                .and_then(|alias| alias.to_str().ok());
            let name = attributes.get_ifname().ok().and_then(|name| name.to_str().ok());
            if let (Some(alias), Some(name)) = (alias, name) {
                found.extend(Self::of(alias, name));
            }
        })?;
        Ok(found)
    }

    /// By the alias and the name of its host end.
    fn of(alias: &str, host_end: &str) -> Option<Self> {
        let (uplink, first) = alias.strip_prefix(ALIAS)?.split_once(", queue ")?;
        Some(Self {
            inner_end: format!("vaxg{}", host_end.strip_prefix("vaxh")?),
            host_end: host_end.to_owned(),
            uplink: uplink.to_owned(),
            first: first.parse().ok()?,
        })
    }

    fn alias(&self) -> String {
        format!("{ALIAS}{}, queue {}", self.uplink, self.first)
    }

    /// Makes it, with an MTU in bytes: no end has an address, or looks for neighbours, and the host end leaves nothing to
    /// the inner one that XDP there would see unfinished.
    pub(crate) fn make(&self, mtu: u32) -> io::Result<()> {
        match self.create(mtu) {
            // Of a steward that died before it wrote the alias.
            Err(error) if error.raw_os_error() == Some(Errno::EXIST.raw_os_error()) => {
                self.remove()?;
                self.create(mtu)?;
            }
            created => created?,
        }
        let furnished = || {
            for end in [&self.inner_end, &self.host_end] {
                let mut request = rt_link::Request::new().op_setlink_do(&Ifinfomsg::default());
                without_address(request.encode().push_ifname(&text(end)?))
                    .push_ifalias(&text(&self.alias())?);
                acknowledged(&request)?;
            }
            Ethtool::open(&self.host_end)?.leave_nothing()?;
            for end in [&self.inner_end, &self.host_end] {
                let mut request = rt_link::Request::new().op_setlink_do(&header(libc::IFF_UP));
                request.encode().push_ifname(&text(end)?);
                acknowledged(&request)?;
            }
            Ok(())
        };
        furnished().inspect_err(|_| _ = self.remove())
    }

    fn create(&self, mtu: u32) -> io::Result<()> {
        let (host_end, inner_end) = (text(&self.host_end)?, text(&self.inner_end)?);
        let request = rt_link::Request::new().set_create().set_excl();
        let mut request = request.op_newlink_do(&header(libc::IFF_NOARP));
        let attributes = request.encode().push_ifname(&host_end).push_mtu(mtu);
        let mut info = attributes.nested_linkinfo().push_kind(c"veth");
        let buffer = info.as_vec_mut();
        let data = push_nested_header(buffer, INFO_DATA);
        let peer = push_nested_header(buffer, INFO_PEER);
        buffer.extend(header(libc::IFF_NOARP).as_slice());
        PushLinkAttrs::new(&mut *buffer)
            .push_ifname(&inner_end)
            .push_mtu(mtu);
        finalize_nested_header(buffer, peer);
        finalize_nested_header(buffer, data);
        drop(info);
        acknowledged(&request)
    }

    /// Gives both ends another MTU.
    pub(crate) fn set_mtu(&self, mtu: u32) -> io::Result<()> {
        for end in [&self.inner_end, &self.host_end] {
            let mut request = rt_link::Request::new().op_setlink_do(&Ifinfomsg::default());
            request.encode().push_ifname(&text(end)?).push_mtu(mtu);
            acknowledged(&request)?;
        }
        Ok(())
    }

    /// Removes it, if it is there.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let mut request = rt_link::Request::new().op_dellink_do(&Ifinfomsg::default());
        request.encode().push_ifname(&text(&self.host_end)?);
        match acknowledged(&request) {
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(()),
            removed => removed,
        }
    }
}

/// Addresses that the host has on an interface: its own, those of interfaces above it (VLANs, macvlans), and that of the
/// bridge or bond that it is part of.
pub(crate) fn addresses_on(link: &Link) -> io::Result<Vec<[u8; 6]>> {
    let (mut all, mut others, mut master) = (vec![link.mac], Vec::new(), None);
    for_each(|header, attributes| {
        let index = u32::try_from(header.ifi_index).unwrap_or_default();
        if index == link.index {
            master = attributes.get_master().ok();
        }
        let Some(mac) = attributes.get_address().ok().and_then(|mac| mac.try_into().ok()) else {
            return;
        };
        // What is in another network namespace is not the host's.
        let below = attributes
            .get_link()
            .ok()
            .filter(|_| attributes.get_link_netnsid().is_err());
        match below == Some(link.index) {
            true => all.push(mac),
            false => others.push((index, mac)),
        }
    })?;
    let masters = others.into_iter().filter(|&(index, _)| Some(index) == master);
    all.extend(masters.map(|(_, mac)| mac));
    let mut seen = BTreeSet::new();
    all.retain(|&mac| mac[0] & 1 == 0 && mac != [0; 6] && seen.insert(mac));
    Ok(all)
}

/// A header with these flags set.
fn header(flags: libc::c_int) -> Ifinfomsg {
    Ifinfomsg {
        ifi_flags: flags.cast_unsigned(),
        ifi_change: flags.cast_unsigned(),
        ..Ifinfomsg::default()
    }
}

/// IPv6 gives the interface none, and sends nothing by it.
fn without_address<B: Pusher>(mut attributes: PushLinkAttrs<B>) -> PushLinkAttrs<B> {
    let buffer = attributes.as_vec_mut();
    let families = push_nested_header(buffer, AF_SPEC);
    let inet6 = push_nested_header(buffer, OF_INET6);
    push_header(buffer, ADDR_GEN_MODE, 1);
    buffer.push(NO_ADDRESS);
    finalize_nested_header(buffer, inet6);
    finalize_nested_header(buffer, families);
    attributes
}

fn acknowledged(request: &impl NetlinkRequest) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    socket.request(request)?.recv_ack().map_err(io::Error::from)
}

pub(super) fn for_each(mut look: impl FnMut(&Ifinfomsg, &IterableLinkAttrs<'_>)) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    let mut replies = socket.request(&rt_link::Request::new().op_getlink_dump(&Ifinfomsg::default()))?;
    while let Some(reply) = replies.recv() {
        let (header, attributes) = reply.map_err(io::Error::from)?;
        look(&header, &attributes);
    }
    Ok(())
}

fn text(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pair_is_known_by_alias_and_name() {
        let pair = Pair::new("eth0", 7, 2);
        assert_eq!(Pair::of(&pair.alias(), &pair.host_end), Some(pair.clone()));
        assert_eq!(Pair::of("", &pair.host_end), None);
        assert_eq!(Pair::of(&pair.alias(), &pair.inner_end), None, "the other end");
        // IFNAMSIZ, with its end.
        let longest = Pair::new("eth0", 9_999_999, 127);
        assert!(longest.host_end.len() < 16);
    }
}
