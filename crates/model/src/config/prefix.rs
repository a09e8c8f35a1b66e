//! IP addresses and networks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::values::{Written, joined, written};

/// Most IP addresses of a port: each is compared for each frame.
const MOST_ADDRESSES: usize = 64;

written!(IpPrefix, Prefixes);

/// An IP address or network (CIDR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpPrefix {
    address: IpAddr,
    bits: u32,
}

impl Written for IpPrefix {
    const MEANT: &'static str =
        "an IP address or network in quotes, such as \"192.0.2.10\" or \"2001:db8:1::/64\"";

    /// An address, or a network in CIDR notation; multicast and unspecified addresses are accepted.
    fn read(text: &str) -> Result<Self, String> {
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

    fn text(&self) -> String {
        let Self { address, bits } = self;
        match (address, bits) {
            (IpAddr::V4(_), 32) | (IpAddr::V6(_), 128) => address.to_string(),
            _ => format!("{address}/{bits}"),
        }
    }
}

impl IpPrefix {
    /// Together they contain each address.
    pub const ALL: [Self; 2] = [
        Self {
            address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            bits: 0,
        },
        Self {
            address: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            bits: 0,
        },
    ];

    /// Parses an address or network that a guest can have.
    ///
    /// # Errors
    /// The text is no address or network, or a multicast or unspecified address.
    pub fn of_station(text: &str) -> Result<Self, String> {
        let prefix: Self = text.parse()?;
        let all = if prefix.address.is_ipv4() { 32 } else { 128 };
        if prefix.address.is_multicast() || (prefix.bits == all && prefix.address.is_unspecified()) {
            return Err(format!(
                "{text} is multicast or unspecified: give an address that the guest sends from"
            ));
        }
        Ok(prefix)
    }

    /// Its first address.
    #[must_use]
    pub fn first(&self) -> IpAddr {
        self.address
    }

    /// Whether an address is this one, or in this network.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        let address = match ip {
            IpAddr::V4(ip) => ip.to_bits().into(),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let (first, last) = self.range();
        ip.is_ipv4() == self.address.is_ipv4() && (first..=last).contains(&address)
    }

    /// Its first address and its last, as numbers.
    #[must_use]
    pub fn range(&self) -> (u128, u128) {
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

    /// The address with its host bits cleared.
    fn network(&self) -> IpAddr {
        match self.address {
            IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & mask_v4(self.bits)).into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & mask_v6(self.bits)).into(),
        }
    }
}

/// Netmask of an IPv4 prefix.
fn mask_v4(bits: u32) -> u32 {
    u32::MAX.checked_shl(32 - bits).unwrap_or(0)
}

/// Netmask of an IPv6 prefix.
fn mask_v6(bits: u32) -> u128 {
    u128::MAX.checked_shl(128 - bits).unwrap_or(0)
}

/// IP addresses and networks of a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefixes(pub Vec<IpPrefix>);

impl Written for Prefixes {
    const MEANT: &'static str = "a list such as [\"192.0.2.10\", \"2001:db8::/64\"], or text in quotes";
    const JOINT: Option<char> = Some(',');

    /// Joined by commas, or by `+` where commas have another meaning.
    fn read(text: &str) -> Result<Self, String> {
        let parts = text.split([',', '+']).map(str::trim);
        let list: Vec<IpPrefix> = parts.map(IpPrefix::of_station).collect::<Result<_, _>>()?;
        match list.len() > MOST_ADDRESSES {
            true => Err(format!(
                "{} addresses, a port has {MOST_ADDRESSES} at most: name networks such as 192.0.2.0/24",
                list.len()
            )),
            false => Ok(Self(list)),
        }
    }

    fn text(&self) -> String {
        joined(&self.0, ",")
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
            assert_eq!(text.parse::<IpPrefix>().expect("valid").to_string(), text);
        }
        let host: IpPrefix = "192.0.2.10/32".parse().expect("valid");
        assert_eq!(host.to_string(), "192.0.2.10");
        for text in [
            "",
            "192.0.2",
            "192.0.2.1/33",
            "192.0.2.1/+1",
            "2001:db8::/129",
            "::1/",
            "vm1",
        ] {
            text.parse::<IpPrefix>().expect_err(text);
        }
        let error = "192.0.2.10/24".parse::<IpPrefix>().expect_err("not a network");
        assert!(error.contains("192.0.2.10, or 192.0.2.0/24"), "{error}");
        for text in ["224.0.0.1", "ff02::1", "0.0.0.0", "::"] {
            let error = IpPrefix::of_station(text).expect_err("no station");
            assert!(error.contains("multicast or unspecified"), "{error}");
        }
    }
}
