//! Addresses of guests that a network advertises to other hosts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Malformed;
use super::wire::{Body, Codec as _, Flag, List, Wire};
use steer::Station;

/// Most changes of advertised addresses in one message.
pub const ADVERTISED_CHANGES_MAX: usize = 32;

/// A change of the addresses that a network advertises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressChange {
    /// A station of the network.
    pub station: Station,
    /// An IP address of the station, advertised with its MAC address; `None`: the MAC address alone.
    pub ip: Option<IpAddr>,
    /// It is advertised from now on, or not any more. The IP addresses of a removed MAC address are removed, too.
    pub is_added: bool,
}

/// Changes of one message.
pub(super) const ADDRESSES: List = List::new(ADVERTISED_CHANGES_MAX, 28, "addresses").filled();

const NO_IP: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

impl Wire for AddressChange {
    fn write(&self, to: &mut Vec<u8>) {
        self.station.vlan.write(to);
        self.station.mac.write(to);
        self.ip.unwrap_or(NO_IP).write(to);
        Flag.write(&self.is_added, to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let station = Station {
            vlan: from.next()?,
            mac: from.next()?,
        };
        let ip = from.next()?;
        let change = Self {
            station,
            ip: (ip != NO_IP).then_some(ip),
            is_added: Flag.read(from)?,
        };
        let is_one_host = change.ip.is_none_or(|ip| {
            let is_broadcast = ip == IpAddr::V4(Ipv4Addr::BROADCAST);
            !(ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || is_broadcast)
        });
        match station.is_possible() && station.mac != [0; 6] && is_one_host {
            true => Ok(change),
            false => Err(Malformed::List(ADDRESSES.name)),
        }
    }
}
