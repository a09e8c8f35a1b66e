//! Hosts from which a network takes packets of its tunnel.

use std::net::{IpAddr, Ipv6Addr};

use super::Malformed;
use super::wire::{Body, Codec as _, Flag, List, Wire};

/// Most changes of hosts in one message.
pub const VTEP_CHANGES_MAX: usize = 32;

/// A change of the hosts (VTEPs) from which a network takes packets of its tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VtepChange {
    /// The host.
    pub vtep: IpAddr,
    /// Its packets are taken from now on, or not any more.
    pub is_added: bool,
}

/// Changes of one message.
pub(super) const VTEPS: List = List::new(VTEP_CHANGES_MAX, 20, "hosts of a tunnel").filled();

impl Wire for VtepChange {
    fn write(&self, to: &mut Vec<u8>) {
        self.vtep.write(to);
        Flag.write(&self.is_added, to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            vtep: from.next()?,
            is_added: Flag.read(from)?,
        })
    }
}

/// An IPv4 address is mapped to IPv6 (RFC 4291, 2.5.5.2).
impl Wire for IpAddr {
    fn write(&self, to: &mut Vec<u8>) {
        let ip = match self {
            Self::V4(ip) => ip.to_ipv6_mapped(),
            Self::V6(ip) => *ip,
        };
        ip.octets().write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        Ok(Ipv6Addr::from(from.next::<[u8; 16]>()?).to_canonical())
    }
}
