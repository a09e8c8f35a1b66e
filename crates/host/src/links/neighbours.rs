//! Single entries of forwarding databases and neighbour tables, and neighbours by the program that set them.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use netlink_bindings::rt_neigh::{self, IterableNeighbourAttrs, Ndmsg};
use netlink_socket2::NetlinkSocket;

use super::dump;

/// `NUD_PERMANENT` (include/uapi/linux/neighbour.h).
const NUD_PERMANENT: u16 = 0x80;
/// With `NUD_NOARP`: a configured entry, not a learned one.
pub(super) const CONFIGURED: u16 = 0x40 | NUD_PERMANENT;
/// `NTF_MASTER` (include/uapi/linux/neighbour.h): entries of the bridge, not those of the device itself.
const NTF_MASTER: u8 = 0x04;

/// An entry of a bridge's forwarding database.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Index of the bridge.
    pub bridge: u32,
    /// Index of the port.
    pub port: u32,
    /// 0: none.
    pub vlan: u16,
    /// The address.
    pub mac: [u8; 6],
    /// It was not learned.
    pub is_configured: bool,
}

/// A neighbour of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// Index of the interface.
    pub index: u32,
    /// Its IP address.
    pub ip: IpAddr,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Number of the program that set it (`NDA_PROTOCOL`); 0: unknown.
    pub protocol: u8,
    /// It was set for good.
    pub is_permanent: bool,
}

impl Neighbour {
    fn of(header: &Ndmsg, attributes: &IterableNeighbourAttrs<'_>) -> Option<Self> {
        Some(Self {
            index: u32::try_from(header.ndm_ifindex).ok()?,
            ip: attributes.get_dst().ok()?,
            mac: attributes.get_lladdr().ok()?.try_into().ok()?,
            protocol: attributes.get_protocol().unwrap_or(0),
            is_permanent: header.ndm_state & NUD_PERMANENT != 0,
        })
    }
}

/// The entry of a bridge without VLAN filtering for an address.
///
/// # Errors
/// An error of the kernel.
pub fn fdb_entry(bridge: u32, mac: [u8; 6]) -> io::Result<Option<Entry>> {
    let header = Ndmsg {
        ndm_family: libc::AF_BRIDGE as u8,
        ndm_flags: NTF_MASTER,
        ..Ndmsg::default()
    };
    let mut request = rt_neigh::Request::new().op_getneigh_do(&header);
    request.encode().push_lladdr(&mac).push_master(bridge);
    let entry = |header: &Ndmsg, _: &IterableNeighbourAttrs<'_>| Entry {
        bridge,
        port: u32::try_from(header.ndm_ifindex).unwrap_or_default(),
        vlan: 0,
        mac,
        is_configured: header.ndm_state & CONFIGURED != 0,
    };
    one(&request, entry)
}

/// The neighbour of an interface with an IP address.
///
/// # Errors
/// An error of the kernel.
pub fn neighbour(index: u32, ip: IpAddr) -> io::Result<Option<Neighbour>> {
    let family = if ip.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let header = Ndmsg {
        ndm_family: family as u8,
        ndm_ifindex: index.cast_signed(),
        ..Ndmsg::default()
    };
    let mut request = rt_neigh::Request::new().op_getneigh_do(&header);
    request.encode().push_dst(ip);
    one(&request, Neighbour::of).map(Option::flatten)
}

/// The answer to a request for one entry; none, if there is none.
fn one<T>(
    request: &rt_neigh::OpGetneighDo<'_>,
    read: impl FnOnce(&Ndmsg, &IterableNeighbourAttrs<'_>) -> T,
) -> io::Result<Option<T>> {
    let mut socket = NetlinkSocket::new();
    match socket.request(request)?.recv_one().map_err(io::Error::from) {
        Ok((header, attributes)) => Ok(Some(read(&header, &attributes))),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Permanent neighbours that this program has set, by interface and IP address, with their MAC addresses. `index`: of
/// one interface only, if not 0.
///
/// # Errors
/// An error of the kernel.
pub fn neighbours_by(protocol: u8, index: u32) -> io::Result<BTreeMap<(u32, IpAddr), [u8; 6]>> {
    let mut request = rt_neigh::Request::new().op_getneigh_dump(&Ndmsg::default());
    if index != 0 {
        request.encode().push_ifindex(index);
    }
    let mut found = BTreeMap::new();
    dump(&request, |(header, attributes)| {
        if let Some(its) = Neighbour::of(&header, &attributes)
            && its.is_permanent
            && its.protocol == protocol
            && [its.index, 0].contains(&index)
        {
            found.insert((its.index, its.ip), its.mac);
        }
    })?;
    Ok(found)
}
