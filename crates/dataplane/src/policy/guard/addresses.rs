//! The IP addresses that a port may use.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use model::config::IpPrefix;

/// The addresses of a port: network and mask of each prefix, by IP version.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    v4: Vec<(u32, u32)>,
    v6: Vec<(u128, u128)>,
}

impl Addresses {
    /// All addresses with one of these prefixes.
    pub(crate) fn new(prefixes: &[IpPrefix]) -> Self {
        let mut addresses = Self::default();
        for prefix in prefixes {
            let (first, last) = prefix.range();
            let mask = !(first ^ last);
            match prefix.first() {
                // The lower half of an IPv4 address's number is the address.
                IpAddr::V4(address) => addresses.v4.push((address.to_bits(), mask as u32)),
                IpAddr::V6(_) => addresses.v6.push((first, mask)),
            }
        }
        addresses
    }

    /// Those that are not networks.
    pub(super) fn hosts(&self) -> impl Iterator<Item = IpAddr> {
        let v4 = self.v4.iter().filter(|(_, mask)| *mask == u32::MAX);
        let v6 = self.v6.iter().filter(|(_, mask)| *mask == u128::MAX);
        let v4 = v4.map(|&(address, _)| Ipv4Addr::from_bits(address).into());
        v4.chain(v6.map(|&(address, _)| Ipv6Addr::from_bits(address).into()))
    }

    #[inline]
    pub(super) fn has_v4(&self, address: [u8; 4]) -> bool {
        let address = u32::from_be_bytes(address);
        // Even if the network is 0.0.0.0/0: 0.0.0.0 and multicast are no source addresses.
        let is_unicast = address != 0 && address < 0xe000_0000;
        is_unicast && self.v4.iter().any(|(network, mask)| address & mask == *network)
    }

    #[inline]
    pub(super) fn has_v6(&self, address: [u8; 16]) -> bool {
        let is_unicast = address != [0; 16] && address[0] != 0xff;
        let address = u128::from_be_bytes(address);
        is_unicast && self.v6.iter().any(|(network, mask)| address & mask == *network)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_has_its_addresses_and_no_group() {
        let of = |texts: &[&str]| {
            let prefixes: Vec<_> = texts.iter().map(|text| text.parse().expect("valid")).collect();
            Addresses::new(&prefixes)
        };
        let some = of(&["192.0.2.10", "198.51.100.0/24", "2001:db8:1::/64"]);
        assert!(some.has_v4([192, 0, 2, 10]) && some.has_v4([198, 51, 100, 255]));
        assert!(!some.has_v4([192, 0, 2, 11]) && !some.has_v4([198, 51, 101, 0]));
        let v6 = |text: &str| text.parse::<Ipv6Addr>().expect("valid").octets();
        assert!(some.has_v6(v6("2001:db8:1::1")) && !some.has_v6(v6("2001:db8:2::1")));
        let all = of(&["0.0.0.0/0", "::/0"]);
        assert!(all.has_v4([1, 2, 3, 4]) && !all.has_v4([0; 4]) && !all.has_v4([224, 0, 0, 0]));
        assert!(all.has_v6(v6("fe80::1")) && !all.has_v6(v6("::")) && !all.has_v6(v6("ff02::1")));
    }
}
