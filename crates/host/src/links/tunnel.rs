//! VXLAN devices: what packets of theirs look like, and whether the interface that sends them has a large enough MTU.

use std::ffi::{CStr, CString};
use std::io;
use std::net::IpAddr;

use netlink_bindings::rt_addr::{self, Ifaddrmsg};
use netlink_bindings::rt_link::{Ifinfomsg, IterableLinkAttrs};
use netlink_bindings::utils::find_attr;
use netlink_socket2::NetlinkSocket;
use steer::Tunnel;

use super::all::Seen;
use super::{Link, get_link, header_of};

/// `IFLA_INFO_DATA`, and in it `IFLA_VXLAN_*` (include/uapi/linux/if_link.h).
const INFO_DATA: u16 = 2;
const ID: u16 = 1;
const LOCAL: u16 = 4;
const TTL: u16 = 5;
const LEARNING: u16 = 7;
const PORT: u16 = 15;
const LOCAL6: u16 = 17;
const UDP_ZERO_CSUM6: [u16; 2] = [19, 20];
const COLLECT_METADATA: u16 = 25;
const GPE: u16 = 27;

/// A VXLAN device whose packets need not pass through it: another program can take frames out of packets that arrive
/// for it, and make packets as it would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vxlan {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub mtu: u32,
    /// Its index, and the tunnel, without its VLAN ([`Self::tunnel_on`]).
    pub tunnel: Tunnel,
    /// Time to live, or hop limit, of packets that are sent.
    pub ttl: u8,
}

impl Vxlan {
    /// Asks for a device by its name.
    ///
    /// # Errors
    /// There is none, or its packets have to pass through it: in words, with the remedy.
    pub fn by_name(name: &str) -> Result<Self, String> {
        let text = CString::new(name).map_err(|_| format!("{name:?} is no name of an interface"))?;
        Self::ask(&Ifinfomsg::default(), Some(&text)).map_err(|why| format!("{name} {why}"))
    }

    /// Asks for a device by its index.
    ///
    /// # Errors
    /// As [`Self::by_name`].
    pub fn by_index(index: u32) -> Result<Self, String> {
        Self::ask(&header_of(index), None).map_err(|why| format!("the interface with index {index} {why}"))
    }

    fn ask(header: &Ifinfomsg, name: Option<&CStr>) -> Result<Self, String> {
        let asked = get_link(header, name, Self::of);
        asked.unwrap_or_else(|error| Err(format!("cannot be found: {error}")))
    }

    /// Its tunnel, for packets that arrive at an interface: with a tag if a VLAN device (802.1Q) on that interface has the
    /// local address.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn tunnel_on(&self, interface: u32) -> Result<Tunnel, String> {
        let vlan = vlan_on(interface, self.tunnel.local);
        let vlan = vlan.map_err(|error| format!("cannot find its local address: {error}"))?;
        Ok(Tunnel { vlan, ..self.tunnel })
    }

    /// The device of an answer of rtnetlink.
    ///
    /// # Errors
    /// As [`Self::by_name`], without the name.
    pub fn of(header: &Ifinfomsg, attributes: &IterableLinkAttrs<'_>) -> Result<Self, String> {
        let name = attributes
            .get_ifname()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let info = attributes.get_linkinfo().ok();
        let info = info.filter(|info| info.get_kind().is_ok_and(|kind| kind == c"vxlan"));
        let data = info.and_then(|info| find_attr(info.get_buf(), INFO_DATA));
        let data = data.ok_or("is no vxlan device: name one")?;
        let is_set = |which| find_attr(data, which).is_some_and(|value| value == [1]);
        if is_set(COLLECT_METADATA) || find_attr(data, GPE).is_some() {
            return Err(
                "does not carry Ethernet frames of a single VNI: make it without `external` and `gpe`".into(),
            );
        }
        let set = format!("`ip link set dev {name} type vxlan");
        let local = local_address(attributes);
        let local = local.ok_or_else(|| format!("has no local address: {set} local ADDRESS`"))?;
        if is_set(LEARNING) {
            return Err(format!("learns addresses from packets: {set} nolearning`"));
        }
        if local.is_ipv6() && !UDP_ZERO_CSUM6.into_iter().all(is_set) {
            return Err("requires UDP checksums: make it again with `udp6zerocsumtx udp6zerocsumrx`, here and on the \
                        other hosts"
                .into());
        }
        if header.ifi_flags & libc::IFF_UP.cast_unsigned() == 0 {
            return Err(format!("is down: `ip link set {name} up`"));
        }
        let vni = find_attr(data, ID).and_then(|vni| vni.try_into().ok());
        let port = find_attr(data, PORT).and_then(|port| port.try_into().ok());
        let ttl = find_attr(data, TTL).and_then(|ttl| ttl.first().copied());
        Ok(Self {
            name,
            mtu: attributes.get_mtu().unwrap_or_default(),
            tunnel: Tunnel {
                device: header.ifi_index.cast_unsigned(),
                is_geneve: false,
                vni: vni.map(u32::from_ne_bytes).ok_or("has no VNI")?,
                port: port.map(u16::from_be_bytes).ok_or("has no UDP port")?,
                local,
                vlan: 0,
                drops_unknown: false,
            },
            // 0: the kernel uses net.ipv4.ip_default_ttl, 64 unless it was changed.
            ttl: ttl.filter(|&ttl| ttl != 0).unwrap_or(64),
        })
    }
}

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

/// The VLAN of the VLAN device on an interface that has an address; 0: none has it.
fn vlan_on(interface: u32, local: IpAddr) -> io::Result<u16> {
    let Some(index) = interface_of(local)? else {
        return Ok(0);
    };
    let seen = get_link(&header_of(index), None, |_, attributes| Seen::of(attributes))?;
    Ok(seen
        .vlan
        .filter(|_| seen.below == Some(interface))
        .unwrap_or_default())
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
