//! The tunnel of a network: the program decapsulates frames to the network's stations (`bpf/steer_tunnel.h`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use libbpf_rs::{MapHandle, MapType};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::layout::{MAX_STATIONS, Station, queues_of};
use crate::map;
use crate::shape::Shape;

/// Maximum number of tunnels of all networks of an interface; `STEER_MAX_TUNNELS`.
const MAX_TUNNELS: u32 = 1024;
/// Maximum number of hosts from which networks of an interface take packets; `STEER_MAX_VTEPS`.
pub(crate) const MAX_VTEPS: u32 = 65_536;
/// `STEER_GENEVE`
const GENEVE: u8 = 0x80;

/// A tunnel of VXLAN (RFC 7348) or Geneve (RFC 8926).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// Index of the tunnel device. The program does not use it.
    pub device: u32,
    /// The only host of a tunnel of Geneve; `None`: it is one of VXLAN, whose hosts change.
    pub remote: Option<IpAddr>,
    /// Virtual Network Identifier, 24 bits.
    pub vni: u32,
    /// UDP port to which its packets are sent.
    pub port: u16,
    /// The host's address; unspecified: no frame is of this tunnel at the moment.
    pub local: IpAddr,
    /// The VLAN (802.1Q) in the only tag of its packets; 0: they have no tag, or one with a priority only.
    pub vlan: u16,
    /// Packets for the tunnel from hosts that the network takes none from are dropped, and not left to the kernel.
    pub drops_unknown: bool,
}

impl Tunnel {
    /// The tunnel of a device that is gone, or cannot be used: no frame is of it.
    #[must_use]
    pub fn none(device: u32) -> Self {
        Self {
            device,
            remote: None,
            vni: 0,
            port: 0,
            local: Ipv4Addr::UNSPECIFIED.into(),
            vlan: 0,
            drops_unknown: false,
        }
    }

    /// The same one, which drops packets of unknown hosts. One of Geneve does not: they may be for another device with its
    /// VNI, and the kernel takes none from a host that has no device. One that no frame is of does not, either.
    #[must_use]
    pub fn dropping_unknown(self) -> Self {
        let drops_unknown = self.remote.is_none() && !self.local.is_unspecified();
        Self {
            drops_unknown,
            ..self
        }
    }

    /// The same one, which leaves packets of unknown hosts to the kernel.
    #[must_use]
    pub fn leaving_unknown(self) -> Self {
        let drops_unknown = false;
        Self {
            drops_unknown,
            ..self
        }
    }

    /// Whether the same packets are for another one.
    #[must_use]
    pub fn is_same(self, other: Self) -> bool {
        self.leaving_unknown() == other.leaving_unknown()
    }
}

/// `struct steer_tunnel_key`
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Key {
    /// Its last byte is 0.
    vni: [u8; 4],
    port: [u8; 2],
    queues: u16,
}

/// `struct steer_tunnel`
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Value {
    local: [u8; 16],
    network: u32,
    /// Of IP: 4 or 6, with [`GENEVE`] for Geneve; 0: no frame is of the tunnel.
    version: u8,
    drops_unknown: u8,
    vlan: u16,
    device: u32,
}

/// The entry of a network's tunnel.
fn entry(network: u32, tunnel: Tunnel) -> (Key, Value) {
    let (local, version) = bytes_of(tunnel.local);
    let is_none = tunnel.local.is_unspecified();
    // Tunnels that no frame is of have different keys, which are no other tunnel's.
    let (vni, port) = match is_none {
        true => (network >> 8, 0),
        false => (tunnel.vni, tunnel.port),
    };
    let key = Key {
        vni: (vni << 8).to_be_bytes(),
        port: port.to_be_bytes(),
        // One of `MAX_QUEUES`.
        #[allow(clippy::cast_possible_truncation)]
        queues: queues_of(network) as u16,
    };
    let value = Value {
        local,
        network,
        version: match (is_none, tunnel.remote.is_some()) {
            (true, _) => 0,
            (false, true) => version | GENEVE,
            (false, false) => version,
        },
        drops_unknown: tunnel.drops_unknown.into(),
        vlan: tunnel.vlan,
        device: tunnel.device,
    };
    (key, value)
}

/// The tunnel of an entry. `host`: the only one of a tunnel of Geneve; without it no frame is of the tunnel.
fn tunnel(key: Key, value: Value, host: Option<IpAddr>) -> Tunnel {
    let is_geneve = value.version & GENEVE != 0;
    if value.version == 0 || (is_geneve && host.is_none()) {
        return Tunnel::none(value.device);
    }
    Tunnel {
        device: value.device,
        remote: host.filter(|_| is_geneve),
        vni: u32::from_be_bytes(key.vni) >> 8,
        port: u16::from_be_bytes(key.port),
        local: address(value.local, value.version & !GENEVE),
        vlan: value.vlan,
        drops_unknown: value.drops_unknown != 0,
    }
}

/// An address as in a header, then zeros, and the version of IP.
fn bytes_of(address: IpAddr) -> ([u8; 16], u8) {
    match address {
        IpAddr::V4(v4) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&v4.octets());
            (bytes, 4)
        }
        IpAddr::V6(v6) => (v6.octets(), 6),
    }
}

fn address(bytes: [u8; 16], version: u8) -> IpAddr {
    let [a, b, c, d, ..] = bytes;
    match version {
        6 => Ipv6Addr::from(bytes).into(),
        _ => Ipv4Addr::from([a, b, c, d]).into(),
    }
}

/// `struct steer_vtep`
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Vtep {
    address: [u8; 16],
    network: u32,
    version: u8,
    zero: [u8; 3],
}

/// A station of a network in a tunnel; `struct steer_tunnel_station`
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Inner {
    station: Station,
    network: u32,
}

/// The tunnels of networks, the hosts from which networks take packets, and the stations of these
/// networks.
#[derive(Debug)]
pub(crate) struct Tunnels {
    pub(crate) tunnels: MapHandle,
    pub(crate) vteps: MapHandle,
    pub(crate) inner: MapHandle,
}

impl Tunnels {
    /// `tunnels` was a map of those of VXLAN only.
    pub(crate) const TUNNELS: Shape = Shape {
        name: "vnis",
        kind: MapType::Hash,
        key_bytes: size_of::<Key>() as u32,
        value_bytes: size_of::<Value>() as u32,
        entries: MAX_TUNNELS,
    };
    pub(crate) const VTEPS: Shape = Shape {
        name: "vteps",
        kind: MapType::Hash,
        key_bytes: size_of::<Vtep>() as u32,
        value_bytes: 1,
        entries: MAX_VTEPS,
    };
    pub(crate) const INNER: Shape = Shape {
        name: "inner",
        kind: MapType::Hash,
        key_bytes: size_of::<Inner>() as u32,
        value_bytes: 4,
        entries: MAX_STATIONS,
    };

    /// Sets the tunnel of a network that has none, with its host if it is one of Geneve. Without room for the host its
    /// packets go to the kernel.
    pub(crate) fn set(&self, network: u32, tunnel: Tunnel) -> libbpf_rs::Result<()> {
        if let Some(remote) = tunnel.remote {
            let _ = self.change_vtep(network, (remote, true));
        }
        let (key, value) = entry(network, tunnel);
        map::set(&self.tunnels, &key, &value)
    }

    fn entries(&self) -> impl Iterator<Item = (Key, Value)> {
        map::keys::<Key>(&self.tunnels)
            .filter_map(|key| Some((key, map::get(&self.tunnels, &key).ok().flatten()?)))
    }

    /// The tunnels of the networks of these first queues, by network.
    pub(crate) fn of_queues(&self, first: u32) -> BTreeMap<u32, Tunnel> {
        let of_queues = |(_, value): &(Key, Value)| queues_of(value.network) == first;
        let its: Vec<_> = self.entries().filter(of_queues).collect();
        // Hosts are read once, however many tunnels there are.
        let is_geneve = its.iter().any(|(_, value)| value.version & GENEVE != 0);
        let hosts = is_geneve
            .then(|| map::keys::<Vtep>(&self.vteps))
            .into_iter()
            .flatten();
        let hosts: HashMap<_, _> = hosts
            .map(|key| (key.network, address(key.address, key.version)))
            .collect();
        let tunnels = its.into_iter().map(|(key, value)| {
            let host = hosts.get(&value.network).copied();
            (value.network, tunnel(key, value, host))
        });
        tunnels.collect()
    }

    /// Takes packets from a host, or does not any more.
    pub(crate) fn change_vtep(
        &self,
        network: u32,
        (vtep, is_there): (IpAddr, bool),
    ) -> libbpf_rs::Result<()> {
        let (address, version) = bytes_of(vtep);
        let key = Vtep {
            address,
            network,
            version,
            zero: [0; 3],
        };
        match is_there {
            true => map::set(&self.vteps, &key, &1u8),
            false => map::remove(&self.vteps, &key).map(drop),
        }
    }

    /// The hosts of a network.
    pub(crate) fn vteps(&self, network: u32) -> BTreeSet<IpAddr> {
        let its = map::keys::<Vtep>(&self.vteps).filter(|key| key.network == network);
        its.map(|key| address(key.address, key.version)).collect()
    }

    /// Sets the port of a station of a network; `None`: it has none any more.
    pub(crate) fn set_station(
        &self,
        network: u32,
        station: Station,
        port: Option<u32>,
    ) -> libbpf_rs::Result<()> {
        let key = Inner { station, network };
        match port {
            Some(port) => map::set(&self.inner, &key, &port),
            None => map::remove(&self.inner, &key).map(drop),
        }
    }

    /// All stations with port and network.
    pub(crate) fn all_stations(&self) -> impl Iterator<Item = (Station, u32, u32)> {
        map::keys::<Inner>(&self.inner).filter_map(|key| {
            let port = map::get(&self.inner, &key).ok().flatten()?;
            Some((key.station, port, key.network))
        })
    }

    /// The networks that have something here.
    pub(crate) fn networks(&self) -> impl Iterator<Item = u32> {
        let tunnels = self.entries().map(|(_, value)| value.network);
        let vteps = map::keys::<Vtep>(&self.vteps).map(|key| key.network);
        tunnels.chain(vteps)
    }

    /// Removes the tunnel of a network, and its hosts.
    pub(crate) fn remove(&self, network: u32) -> libbpf_rs::Result<()> {
        let old: Vec<_> = self
            .entries()
            .filter(|(_, value)| value.network == network)
            .collect();
        old.iter()
            .try_for_each(|(key, _)| map::remove(&self.tunnels, key).map(drop))?;
        // Collected before: a removed key is where the kernel would go on from.
        let all: Vec<_> = map::keys::<Vtep>(&self.vteps).collect();
        let mut its = all.iter().filter(|key| key.network == network);
        its.try_for_each(|key| map::remove(&self.vteps, key).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunnel_is_laid_out_as_steer_h_says() {
        let remote = [192, 0, 2, 2].into();
        let tunnel = |local: &str| Tunnel {
            device: 7,
            remote: (local.len() > 10).then_some(remote),
            vni: 0x02_0304,
            port: 4789,
            local: local.parse().expect("an address"),
            vlan: 0x0605,
            drops_unknown: local.len() > 9,
        };
        let (key, value) = entry(0x0305, tunnel("192.0.2.1"));
        let bytes = value.as_bytes();
        assert_eq!(bytes[..5], [192, 0, 2, 1, 0]);
        assert_eq!(bytes[16..], [[5, 3, 0, 0], [4, 0, 5, 6], [7, 0, 0, 0]].concat());
        assert_eq!(entry(5, tunnel("2001:db8::1")).1.as_bytes()[20..22], [0x86, 1]);
        assert_eq!(entry(5, tunnel("2001:db8::")).1.version, 6);
        assert_eq!(
            key.as_bytes(),
            [&[2, 3, 4, 0, 0x12, 0xb5], &5u16.to_ne_bytes()[..]].concat()
        );
        for local in ["192.0.2.1", "2001:db8::1", "192.0.2.111"] {
            let (key, value) = entry(0x0305, tunnel(local));
            assert_eq!(super::tunnel(key, value, Some(remote)), tunnel(local));
        }
        let none = Tunnel::none(7);
        let (key, value) = entry(5, none);
        assert_eq!(
            (value.version, super::tunnel(key, value, Some(remote))),
            (0, none)
        );
        assert_ne!(key, entry(0x0105, none).0);
        let without_route = Tunnel {
            vni: 5,
            port: 6081,
            ..none
        };
        assert_eq!(entry(5, without_route), (key, value));
    }
}
