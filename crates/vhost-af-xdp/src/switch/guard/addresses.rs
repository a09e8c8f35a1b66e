//! The addresses of a port.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Addresses that begin alike: one, or a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IpPrefix {
    address: IpAddr,
    bits: u32,
}

impl FromStr for IpPrefix {
    type Err = String;

    /// An address, or one with the number of bits that count, of stations.
    fn from_str(text: &str) -> Result<Self, String> {
        let prefix = Self::of_any(text)?;
        let all = if prefix.address.is_ipv4() { 32 } else { 128 };
        if prefix.address.is_multicast() || (prefix.bits == all && prefix.address.is_unspecified()) {
            return Err(format!("{text} is the address of no station"));
        }
        Ok(prefix)
    }
}

impl IpPrefix {
    /// The same, groups and the unspecified address included.
    /// Errors: one line.
    pub(crate) fn of_any(text: &str) -> Result<Self, String> {
        let (address, bits) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        let wrong =
            || format!("{text:?} is not an IP address or network, such as 192.0.2.10 or 2001:db8:1::/64");
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let all = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            None => all,
            Some(bits) => {
                let is_number = bits.bytes().all(|digit| digit.is_ascii_digit());
                let number = bits.parse().ok().filter(|&bits| is_number && bits <= all);
                number.ok_or_else(wrong)?
            }
        };
        let prefix = Self { address, bits };
        let network = prefix.network();
        if network != address {
            return Err(format!(
                "{text} is neither one address nor a network: give {address}, or {network}/{bits}"
            ));
        }
        Ok(prefix)
    }
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bits } = self;
        match (address, bits) {
            (IpAddr::V4(_), 32) | (IpAddr::V6(_), 128) => write!(f, "{address}"),
            _ => write!(f, "{address}/{bits}"),
        }
    }
}

impl IpPrefix {
    /// Its first address.
    pub(crate) fn first(&self) -> IpAddr {
        self.address
    }

    /// Its first address and its last, as numbers.
    pub(crate) fn range(&self) -> (u128, u128) {
        match self.address {
            IpAddr::V4(address) => {
                let first = address.to_bits();
                (first.into(), (first | !mask_v4(self.bits)).into())
            }
            IpAddr::V6(address) => {
                let first = address.to_bits();
                (first, first | !mask_v6(self.bits))
            }
        }
    }

    /// The address with those bits only that count.
    fn network(&self) -> IpAddr {
        match self.address {
            IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & mask_v4(self.bits)).into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & mask_v6(self.bits)).into(),
        }
    }
}

/// The first bits of an address of 32.
fn mask_v4(bits: u32) -> u32 {
    u32::MAX.checked_shl(32 - bits).unwrap_or(0)
}

/// The same of one of 128.
fn mask_v6(bits: u32) -> u128 {
    u128::MAX.checked_shl(128 - bits).unwrap_or(0)
}

/// Those of a port: networks with the bits that count, by version.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    v4: Vec<(u32, u32)>,
    v6: Vec<(u128, u128)>,
}

impl Addresses {
    /// All that begin like one of these.
    pub(crate) fn new(prefixes: &[IpPrefix]) -> Self {
        let mut addresses = Self::default();
        for prefix in prefixes {
            match prefix.address {
                IpAddr::V4(address) => addresses.v4.push((address.to_bits(), mask_v4(prefix.bits))),
                IpAddr::V6(address) => addresses.v6.push((address.to_bits(), mask_v6(prefix.bits))),
            }
        }
        addresses
    }

    #[inline]
    pub(super) fn has_v4(&self, address: [u8; 4]) -> bool {
        let address = u32::from_be_bytes(address);
        // None of a network that is everything: nobody is 0.0.0.0, and nobody sends as a group.
        let is_station = address != 0 && address < 0xe000_0000;
        is_station && self.v4.iter().any(|(network, mask)| address & mask == *network)
    }

    #[inline]
    pub(super) fn has_v6(&self, address: [u8; 16]) -> bool {
        let is_station = address != [0; 16] && address[0] != 0xff;
        let address = u128::from_be_bytes(address);
        is_station && self.v6.iter().any(|(network, mask)| address & mask == *network)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_read_as_it_is_written() {
        for text in [
            "192.0.2.10",
            "192.0.2.0/24",
            "0.0.0.0/0",
            "2001:db8::10",
            "2001:db8:1::/64",
            "::/0",
        ] {
            let prefix: IpPrefix = text.parse().expect("valid");
            assert_eq!(prefix.to_string(), text);
        }
        assert_eq!(
            "192.0.2.10/32".parse::<IpPrefix>().map(|p| p.to_string()),
            Ok("192.0.2.10".to_owned())
        );
    }

    #[test]
    fn what_is_no_station_is_refused_with_what_is() {
        for text in [
            "",
            "192.0.2",
            "192.0.2.1/33",
            "192.0.2.1/+1",
            "2001:db8::/129",
            "::1/",
            "vm1",
        ] {
            assert!(text.parse::<IpPrefix>().is_err(), "{text}");
        }
        let said = "192.0.2.10/24".parse::<IpPrefix>().expect_err("not a network");
        assert!(said.contains("192.0.2.10, or 192.0.2.0/24"), "{said}");
        for text in ["224.0.0.1", "ff02::1", "0.0.0.0", "::"] {
            let said = text.parse::<IpPrefix>().expect_err("no station");
            assert!(said.contains("no station"), "{said}");
        }
    }

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
        assert!(all.has_v4([1, 2, 3, 4]) && !all.has_v4([0; 4]) && !all.has_v4([255; 4]));
        assert!(all.has_v6(v6("fe80::1")) && !all.has_v6(v6("::")) && !all.has_v6(v6("ff02::1")));
    }
}
