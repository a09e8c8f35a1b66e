//! The hash of a frame: its input, its key, and its report to the guest (VirtIO 1.3, 5.1.6.4.3 and 5.1.6.4.5).
//!
//! A driver enables hash types and sets the key ([`Hashing`]). For each frame the device uses the first type that
//! applies to its headers ([`fields`]), computes the Toeplitz hash of these fields with that key ([`toeplitz`]), and
//! reports value and type: the [`Report`]. The same value chooses the receive queue under RSS ([`crate::receive`]).
//!
//! # A hash that the NIC computed
//! A NIC may have computed a hash already ([`nic::NicHash`]). It is reported only if it is the one that VirtIO
//! requires, bit by bit. That is: the NIC uses Toeplitz; its key equals the driver's, as far as the input needs it; and
//! for every frame with the NIC's type, 5.1.6.4.3 would choose the same type. The specification allows no other hash:
//! the device "uses a key as defined in `hash_key_data`" for "the hash", and `hash_value` is "the value of calculated
//! hash". Linux's virtio_net does not check where the value comes from (`virtio_skb_set_hash`), and would accept any;
//! but it also shows the key to its users (`ethtool -x`), DPDK's users compute the same hash in software to find a flow
//! again, and with RSS the value must select the queue in the driver's table.
//!
//! So a NIC's hash is used if the NIC has the guest's key (`ethtool -X IFNAME hkey …`, or the RSS context of
//! the guest's queue). Otherwise the hash is computed, which takes tens of nanoseconds. These rules do not
//! concern the choice of the NIC's own queues, or flow caches.

pub mod fields;
pub mod nic;
pub mod toeplitz;

use fields::Input;
use nic::{NicHash, NicKey};
use toeplitz::{KEY_BYTES, Toeplitz};

/// The input of a hash; the number is that in the report (VirtIO 1.3, 5.1.6.4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum HashType {
    /// Addresses of IPv4.
    Ipv4 = 1,
    /// Addresses of IPv4 and ports of TCP.
    TcpV4 = 2,
    /// Addresses of IPv4 and ports of UDP.
    UdpV4 = 3,
    /// Addresses of IPv6.
    Ipv6 = 4,
    /// Addresses of IPv6 and ports of TCP.
    TcpV6 = 5,
    /// Addresses of IPv6 and ports of UDP.
    UdpV6 = 6,
    /// Addresses of IPv6, from a packet with extension headers, which may contain the ones to use.
    Ipv6Ex = 7,
    /// The addresses of `Ipv6Ex` and ports of TCP.
    TcpV6Ex = 8,
    /// The addresses of `Ipv6Ex` and ports of UDP.
    UdpV6Ex = 9,
}

impl HashType {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Ipv4,
        Self::TcpV4,
        Self::UdpV4,
        Self::Ipv6,
        Self::TcpV6,
        Self::UdpV6,
        Self::Ipv6Ex,
        Self::TcpV6Ex,
        Self::UdpV6Ex,
    ];

    /// The number in a report.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }

    const fn bit(self) -> u32 {
        1 << (self.number() - 1)
    }

    /// Bytes of the input: two addresses, and two ports if it has them.
    #[must_use]
    pub const fn input_bytes(self) -> usize {
        match self {
            Self::Ipv4 => 8,
            Self::TcpV4 | Self::UdpV4 => 12,
            Self::Ipv6 | Self::Ipv6Ex => 32,
            Self::TcpV6 | Self::UdpV6 | Self::TcpV6Ex | Self::UdpV6Ex => 36,
        }
    }
}

/// A set of hash types: `VIRTIO_NET_HASH_TYPE_…` (VirtIO 1.3, 5.1.6.4.3.1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HashTypes(u32);

impl HashTypes {
    /// None at all.
    pub const NONE: Self = Self(0);
    /// All types that this device supports.
    pub const ALL: Self = Self(0x1ff);

    /// The types in a bitmask; `None` if it has other bits.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::ALL.0 == 0 {
            Some(Self(bits))
        } else {
            None
        }
    }

    /// The bitmask.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The set with one more type.
    #[must_use]
    pub const fn with(self, one: HashType) -> Self {
        Self(self.0 | one.bit())
    }

    /// Whether the set has that type.
    #[inline]
    #[must_use]
    pub const fn has(self, one: HashType) -> bool {
        self.0 & one.bit() != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// The report of a frame's hash. The default: no hash.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// The hash; 0 if there is none.
    pub value: u32,
    /// Its input; `None`: it was not calculated.
    pub kind: Option<HashType>,
}

impl Report {
    /// No hash was calculated: VIRTIO_NET_HASH_REPORT_NONE.
    pub const NONE: Self = Self { value: 0, kind: None };

    /// `hash_value`, `hash_report` and `padding_reserved` of the virtio-net header.
    #[inline]
    #[must_use]
    pub fn bytes(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&self.value.to_le_bytes());
        let kind = self.kind.map_or(0, HashType::number);
        bytes[4..6].copy_from_slice(&kind.to_le_bytes());
        bytes
    }
}

/// The driver's hash types and key: the common part of RSS_CONFIG and HASH_CONFIG.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashConfig {
    /// Hash types that are enabled.
    pub types: HashTypes,
    /// The key; a shorter one is padded with zeros.
    pub key: [u8; KEY_BYTES],
}

/// The origin of a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The NIC: the frame was not read.
    Nic,
    /// This device.
    Device,
    /// No hash: no enabled type applies to the frame.
    Nobody,
}

/// Calculates hashes for one driver. Created when the driver sets its types, and used for each frame.
#[derive(Debug, Clone)]
pub struct Hashing {
    types: HashTypes,
    toeplitz: Toeplitz,
    /// Types of the NIC's hashes that can be reported to the driver.
    from_nic: HashTypes,
}

impl Hashing {
    /// For a driver, and for a NIC if its key is known.
    #[must_use]
    pub fn new(config: &HashConfig, nic: Option<&NicKey>) -> Self {
        Self {
            types: config.types,
            toeplitz: Toeplitz::new(&config.key),
            from_nic: nic.map_or(HashTypes::NONE, |nic| nic.usable(config)),
        }
    }

    /// Hash types that are enabled.
    #[must_use]
    pub fn types(&self) -> HashTypes {
        self.types
    }

    /// Types of the NIC's hashes that are reported unchanged.
    #[must_use]
    pub fn from_nic(&self) -> HashTypes {
        self.from_nic
    }

    /// The hash of a frame that begins with `head`: at least its headers, up to [`packet::HEADERS_MAX`] bytes, or all of
    /// it. `nic`: the hash that its NIC reported.
    #[inline]
    #[must_use]
    pub fn report(&self, head: &[u8], nic: Option<NicHash>) -> (Report, Source) {
        if let Some(hash) = nic
            && let Some(kind) = hash.kind()
            && self.from_nic.has(kind)
        {
            let report = Report {
                value: hash.value,
                kind: Some(kind),
            };
            return (report, Source::Nic);
        }
        match Input::of(head, self.types) {
            Some(input) => {
                let report = Report {
                    value: self.toeplitz.hash(&input.parts()),
                    kind: Some(input.kind()),
                };
                (report, Source::Device)
            }
            None => (Report::NONE, Source::Nobody),
        }
    }
}

#[cfg(test)]
#[path = "hash_tests.rs"]
mod tests;
