//! VXLAN devices whose MTU is too large for the interface that sends their packets.

use std::io;
use std::net::IpAddr;

use netlink_bindings::rt_addr::{self, Ifaddrmsg};
use netlink_bindings::rt_link::IterableLinkAttrs;
use netlink_bindings::utils::find_attr;
use netlink_socket2::NetlinkSocket;

use super::{Link, get_link, header_of};

/// `IFLA_INFO_DATA`, and in it `IFLA_VXLAN_LOCAL` and `IFLA_VXLAN_LOCAL6` (include/uapi/linux/if_link.h).
const INFO_DATA: u16 = 2;
const LOCAL: u16 = 4;
const LOCAL6: u16 = 17;

/// Bytes that VXLAN adds to a packet: headers of Ethernet, VXLAN, UDP and IP (RFC 7348, section 5).
fn added(local: IpAddr) -> u32 {
    14 + 8 + 8 + if local.is_ipv4() { 20 } else { 40 }
}

/// A note about packets of a VXLAN device that are longer than the interface with its local address sends, with the
/// remedy; empty: there are none, or the device has no local address.
///
/// # Errors
/// The kernel's.
pub(super) fn too_long(vxlan: &Link) -> io::Result<String> {
    let local = get_link(&header_of(vxlan.index), None, |_, attributes| {
        local_address(attributes)
    })?;
    let Some(local) = local else {
        return Ok(String::new());
    };
    let below = interface_of(local)?.and_then(Link::by_index);
    Ok(below.map_or_else(String::new, |below| note(vxlan, local, &below)))
}

fn note(vxlan: &Link, local: IpAddr, below: &Link) -> String {
    let most = below.mtu.saturating_sub(added(local));
    if vxlan.mtu <= most {
        return String::new();
    }
    format!(
        "packets of {name} with its MTU of {} are longer than {} sends (MTU {}), and are fragmented or lost: `ip link set \
         {name} mtu {most}`, or a larger MTU of {1}",
        vxlan.mtu,
        below.name,
        below.mtu,
        name = vxlan.name,
    )
}

fn local_address(attributes: &IterableLinkAttrs<'_>) -> Option<IpAddr> {
    let info = attributes.get_linkinfo().ok()?;
    let data = find_attr(info.get_buf(), INFO_DATA)?;
    let v4 = find_attr(data, LOCAL).and_then(|v4| <[u8; 4]>::try_from(v4).ok());
    let v6 = find_attr(data, LOCAL6).and_then(|v6| <[u8; 16]>::try_from(v6).ok());
    v4.map(IpAddr::from).or(v6.map(IpAddr::from))
}

/// Whether an IP address is an interface's own, or the broadcast address of a network there.
///
/// # Errors
/// The kernel's.
pub(super) fn is_own_or_broadcast(index: u32, address: IpAddr) -> io::Result<bool> {
    let mut is_either = false;
    addresses(|header, its, broadcast| {
        is_either |= header.ifa_index == index && (its == address || broadcast == Some(address));
    })?;
    Ok(is_either)
}

/// Index of the interface that has an address.
fn interface_of(address: IpAddr) -> io::Result<Option<u32>> {
    let mut found = None;
    addresses(|header, its, _| {
        if its == address {
            found = Some(header.ifa_index);
        }
    })?;
    Ok(found)
}

/// Calls `look` for each address of an interface, with the broadcast address of its network.
fn addresses(mut look: impl FnMut(&Ifaddrmsg, IpAddr, Option<IpAddr>)) -> io::Result<()> {
    let request = rt_addr::Request::new().op_getaddr_dump(&Ifaddrmsg::default());
    let mut socket = NetlinkSocket::new();
    let mut replies = socket.request(&request)?;
    while let Some(reply) = replies.recv() {
        let (header, attributes) = reply.map_err(io::Error::from)?;
        // IPv6 has no local address besides.
        let Ok(its) = attributes.get_local().or_else(|_| attributes.get_address()) else {
            continue;
        };
        // Whether it is configured (`IFA_BROADCAST`) or not.
        let broadcast = match its {
            IpAddr::V4(v4) if header.ifa_prefixlen < 31 => {
                let host_bits = u32::MAX >> header.ifa_prefixlen;
                Some(IpAddr::from((v4.to_bits() | host_bits).to_be_bytes()))
            }
            _ => None,
        };
        look(&header, its, broadcast);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_packet_fits_the_interface_below() {
        let link = |name: &str, mtu| Link {
            name: name.to_owned(),
            mtu,
            ..Link::default()
        };
        let (v4, v6) = ([10, 9, 0, 1].into(), [0; 16].into());
        for (mtu, local, fits) in [
            (1450, v4, true),
            (1451, v4, false),
            (1430, v6, true),
            (1431, v6, false),
        ] {
            let note = note(&link("vx100", mtu), local, &link("eth0", 1500));
            assert_eq!(note.is_empty(), fits, "{mtu} {local}: {note}");
        }
        let note = note(&link("vx100", 1500), v4, &link("eth0", 1500));
        assert!(
            note.contains("`ip link set vx100 mtu 1450`") && note.ends_with("MTU of eth0"),
            "{note}"
        );
    }
}
