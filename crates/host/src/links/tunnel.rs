//! Devices of tunnels (VXLAN, Geneve): what packets of theirs look like, and whether the interface that sends them has a
//! large enough MTU.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use netlink_bindings::rt_addr::{self, Ifaddrmsg};
use netlink_bindings::rt_link::{Ifinfomsg, IterableLinkAttrs};
use netlink_bindings::utils::find_attr;
use steer::Tunnel;

use super::all::Seen;
use super::{Link, dump, get_link, header_of};

/// `IFLA_INFO_DATA` (include/uapi/linux/if_link.h).
const INFO_DATA: u16 = 2;
/// `IFLA_VXLAN_LEARNING`
const LEARNING: u16 = 7;

/// Attributes of a kind of tunnel device.
struct Kind {
    id: u16,
    /// Of IPv4 and IPv6: the local address of VXLAN, the remote one of Geneve.
    addresses: [u16; 2],
    ttl: u16,
    port: u16,
    zero_checksums: [u16; 2],
    /// If one of these is present without a value, or 1, the device carries several VNIs, or not Ethernet.
    unusable: [u16; 2],
}

/// `IFLA_VXLAN_*`; `unusable`: `COLLECT_METADATA`, `GPE`.
const VXLAN: Kind = Kind {
    id: 1,
    addresses: [4, 17],
    ttl: 5,
    port: 15,
    zero_checksums: [19, 20],
    unusable: [25, 27],
};
/// `IFLA_GENEVE_*`; `unusable`: `COLLECT_METADATA`, `INNER_PROTO_INHERIT`.
const GENEVE: Kind = Kind {
    id: 1,
    addresses: [2, 7],
    ttl: 3,
    port: 5,
    zero_checksums: [9, 10],
    unusable: [6, 14],
};

/// A device of VXLAN or Geneve whose packets need not pass through it: another program can take frames out of packets that
/// arrive for it, and make packets as it would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its index, and the tunnel, without its VLAN ([`Self::tunnel_on`]).
    pub tunnel: Tunnel,
    /// Time to live, or hop limit, of packets that are sent.
    pub ttl: u8,
}

impl Device {
    /// Its tunnel, for packets that arrive at an interface: with a tag if a VLAN device (802.1Q) on that interface has the
    /// local address. Without a local address no frame is of it, but it keeps its VNI.
    ///
    /// # Errors
    /// The kernel's, in words.
    pub fn tunnel_on(&self, interface: u32) -> Result<Tunnel, String> {
        if self.tunnel.local.is_unspecified() {
            return Ok(self.tunnel);
        }
        let vlan = vlan_on(interface, self.tunnel.local);
        let vlan = vlan.map_err(|error| format!("cannot find its local address: {error}"))?;
        Ok(Tunnel { vlan, ..self.tunnel })
    }

    /// The device in an answer of rtnetlink. One of Geneve has no local address: the caller sets that of the route to the
    /// remote one.
    ///
    /// # Errors
    /// Its packets have to pass through it: in words, without its name, with the remedy.
    pub(super) fn of(header: &Ifinfomsg, attributes: &IterableLinkAttrs<'_>) -> Result<Self, String> {
        let name = attributes
            .get_ifname()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let info = attributes.get_linkinfo().ok();
        let data = info
            .as_ref()
            .and_then(|info| find_attr(info.get_buf(), INFO_DATA));
        let kind = info.as_ref().and_then(|info| info.get_kind().ok());
        let (data, is_geneve, kind) = match (data, kind.map(CStr::to_bytes)) {
            (Some(data), Some(b"vxlan")) => (data, false, VXLAN),
            (Some(data), Some(b"geneve")) => (data, true, GENEVE),
            _ => return Err("is no device of VXLAN or Geneve: name one".into()),
        };
        let is_set = |which| find_attr(data, which).is_some_and(|value| [&[][..], &[1]].contains(&value));
        if kind.unusable.into_iter().any(is_set) {
            return Err(
                "does not carry Ethernet frames of a single VNI: make it without `external`, `gpe` and \
                        `innerprotoinherit`"
                    .into(),
            );
        }
        let set = format!("`ip link set dev {name} type vxlan");
        let address = address(data, kind.addresses).filter(|address| !address.is_unspecified());
        let address = address.ok_or_else(|| match is_geneve {
            true => "has no remote address: make it again with `remote ADDRESS`".to_owned(),
            false => format!("has no local address: {set} local ADDRESS`"),
        })?;
        if !is_geneve && is_set(LEARNING) {
            return Err(format!("learns addresses from packets: {set} nolearning`"));
        }
        if address.is_ipv6() && !kind.zero_checksums.into_iter().all(is_set) {
            return Err("requires UDP checksums: make it again with `udp6zerocsumtx udp6zerocsumrx`, here and on the \
                        other hosts"
                .into());
        }
        if header.ifi_flags & libc::IFF_UP.cast_unsigned() == 0 {
            return Err(format!("is down: `ip link set {name} up`"));
        }
        let vni = find_attr(data, kind.id).and_then(|vni| vni.try_into().ok());
        let port = find_attr(data, kind.port).and_then(|port| port.try_into().ok());
        let ttl = find_attr(data, kind.ttl).and_then(|ttl| ttl.first().copied());
        Ok(Self {
            name,
            tunnel: Tunnel {
                device: header.ifi_index.cast_unsigned(),
                remote: is_geneve.then_some(address),
                vni: vni.map(u32::from_ne_bytes).ok_or("has no VNI")?,
                port: port.map(u16::from_be_bytes).ok_or("has no UDP port")?,
                local: match is_geneve {
                    true => Ipv4Addr::UNSPECIFIED.into(),
                    false => address,
                },
                vlan: 0,
                drops_unknown: false,
            },
            // 0: the kernel uses net.ipv4.ip_default_ttl, 64 unless it was changed.
            ttl: ttl.filter(|&ttl| ttl != 0).unwrap_or(64),
        })
    }
}

/// The address in one of these attributes, of IPv4 and IPv6.
fn address(data: &[u8], [v4, v6]: [u16; 2]) -> Option<IpAddr> {
    let v4 = find_attr(data, v4).and_then(|v4| <[u8; 4]>::try_from(v4).ok());
    let v6 = find_attr(data, v6).and_then(|v6| <[u8; 16]>::try_from(v6).ok());
    v4.map(IpAddr::from).or(v6.map(IpAddr::from))
}

/// Bytes that a tunnel adds to a packet: headers of Ethernet, VXLAN or Geneve, UDP and IP (RFC 7348, section 5).
fn added(local: IpAddr) -> u32 {
    14 + 8 + 8 + if local.is_ipv4() { 20 } else { 40 }
}

/// A note about packets of a tunnel device that are longer than the interface with its local address sends, with the
/// remedy; empty: there are none, or the device has no local address. `of_route`: that of a device of Geneve.
///
/// # Errors
/// An error of the kernel.
pub(super) fn too_long(tunnel: &Link, of_route: Option<IpAddr>) -> io::Result<String> {
    let local = get_link(&header_of(tunnel.index), None, |_, attributes| {
        local_address(attributes)
    })?;
    let Some(local) = local.or(of_route) else {
        return Ok(String::new());
    };
    let below = interface_of(local)?.and_then(Link::by_index);
    Ok(below.map_or_else(String::new, |below| note(tunnel, local, &below)))
}

fn note(tunnel: &Link, local: IpAddr, below: &Link) -> String {
    let most = below.mtu.saturating_sub(added(local));
    if tunnel.mtu <= most {
        return String::new();
    }
    format!(
        "packets of {name} with its MTU of {} are longer than {} sends (MTU {}), and are fragmented or lost: `ip link set \
         {name} mtu {most}`, or a larger MTU of {1}",
        tunnel.mtu,
        below.name,
        below.mtu,
        name = tunnel.name,
    )
}

fn local_address(attributes: &IterableLinkAttrs<'_>) -> Option<IpAddr> {
    let info = attributes.get_linkinfo().ok()?;
    address(find_attr(info.get_buf(), INFO_DATA)?, VXLAN.addresses)
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
/// An error of the kernel.
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
    dump(&request, |(header, attributes)| {
        // IPv6 has no local address besides.
        let Ok(its) = attributes.get_local().or_else(|_| attributes.get_address()) else {
            return;
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
    })
}

#[cfg(test)]
mod tests {
    use netlink_bindings::rt_link::OpGetlinkDo;
    use netlink_bindings::traits::NetlinkRequest as _;

    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = (4 + value.len()) as u16;
        let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// What is read of a Geneve device that is up, with these attributes of its own, as `geneve_fill_info` writes them.
    fn geneve(own: &[(u16, &[u8])]) -> Result<Device, String> {
        let own = own.iter().flat_map(|&(kind, value)| attribute(kind, value));
        let data = attribute(INFO_DATA, &own.collect::<Vec<_>>());
        let info = [attribute(1, b"geneve\0"), data].concat();
        let header = [[0; 4], 7u32.to_ne_bytes(), 1u32.to_ne_bytes(), [0; 4]].concat();
        let reply = [header, attribute(3, b"gnv7\0"), attribute(18, &info)].concat();
        let (header, attributes) = OpGetlinkDo::decode_reply(&reply);
        Device::of(&header, &attributes)
    }

    #[test]
    fn geneve_device_has_one_remote_and_carries_ethernet() {
        let (id, v4, ttl, port) = (7u32.to_ne_bytes(), [10, 9, 0, 2], [9], 6081u16.to_be_bytes());
        let plain: [(u16, &[u8]); 4] = [(1, &id), (2, &v4), (3, &ttl), (5, &port)];
        let with = |more: &[(u16, &[u8])]| geneve(&[&plain[..], more].concat());
        let device = with(&[(10, &[0])]).expect("a plain one");
        let Tunnel {
            remote, vni, port, ..
        } = device.tunnel;
        assert_eq!((device.tunnel.device, vni, port), (7, 7, 6081));
        assert_eq!((remote, device.ttl), (Some(v4.into()), 9));
        // Until there is a route to the remote.
        assert_eq!(device.tunnel_on(1), Ok(device.tunnel));
        assert!(device.tunnel.local.is_unspecified());
        let refusal = |device: Result<Device, String>| device.expect_err("refused");
        for flag in [6, 14] {
            assert!(refusal(with(&[(flag, &[])])).contains("single VNI"), "{flag}");
        }
        assert!(refusal(geneve(&[(1, &id), (2, &[0; 4])])).contains("no remote address"));
        let v6 = [1; 16];
        let over_v6 = |checksums: u8| {
            let (remote, none) = ((7u16, &v6[..]), [checksums]);
            geneve(&[plain[0], remote, plain[3], (9, &[1]), (10, &none)])
        };
        assert!(refusal(over_v6(0)).contains("udp6zerocsumtx"));
        assert_eq!(
            over_v6(1).map(|device| (device.tunnel.remote, device.ttl)),
            Ok((Some(v6.into()), 64))
        );
    }

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
