//! The hash of a frame: its input, its key, and its report to the guest (VirtIO 1.3, 5.1.6.4.3 and 5.1.6.4.5).
//!
//! A driver enables hash types and sets the key ([`Hashing`]). For each frame the device takes the first type that the
//! frame's headers allow ([`fields`]), computes the Toeplitz hash of these fields with that key ([`toeplitz`]), and
//! reports value and type: the [`Report`]. The same value chooses the receive queue under RSS ([`crate::receive`]).
//!
//! # A hash that the NIC computed
//! A NIC may have computed a hash already ([`nic::NicHash`]). It is reported only if it is the one that VirtIO
//! requires, bit by bit. That is: the NIC uses Toeplitz; its key is the driver's, as far as the fields reach; and its
//! type is the one that 5.1.6.4.3 chooses for each frame with that type of the NIC. The specification leaves no room
//! for another: the device "uses a key as defined in `hash_key_data`" for "the hash", and `hash_value` is "the value of
//! calculated hash". Linux's virtio_net does not check where the value comes from (`virtio_skb_set_hash`), and would
//! take any; but it also shows the key to its users (`ethtool -x`), DPDK's users compute the same hash in software to
//! find a flow again, and under RSS the value has to lead to the queue in the driver's table.
//!
//! So a NIC's hash is used if the NIC has the guest's key (`ethtool -X IFNAME hkey …`, or the RSS context of the queue
//! that the guest has), and otherwise the hash is computed: tens of nanoseconds. The choice of the NIC's own queues,
//! and flow caches, are not bound by this.

pub mod fields;
pub mod nic;
pub mod toeplitz;

use fields::Input;
use nic::{NicHash, NicKey};
use toeplitz::{KEY_BYTES, Toeplitz};

/// What a hash was computed of; the number is that of the report (VirtIO 1.3, 5.1.6.4.5).
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
    /// Addresses of IPv6, of a packet with extension headers, which may name others.
    Ipv6Ex = 7,
    /// The same and ports of TCP.
    TcpV6Ex = 8,
    /// The same and ports of UDP.
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

    /// Bytes of the fields: two addresses, and two ports where it has them.
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
    /// All that this device has.
    pub const ALL: Self = Self(0x1ff);

    /// Those of a bitmask; `None` if it has other bits.
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

    /// With one more.
    #[must_use]
    pub const fn with(self, one: HashType) -> Self {
        Self(self.0 | one.bit())
    }

    /// Whether it has that one.
    #[inline]
    #[must_use]
    pub const fn has(self, one: HashType) -> bool {
        self.0 & one.bit() != 0
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// The report about a frame's hash. By default: there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// The hash; 0 if there is none.
    pub value: u32,
    /// Of what; `None`: it was not calculated.
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

/// What a driver wants to be hashed, and how: what RSS_CONFIG and HASH_CONFIG have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashConfig {
    /// Hash types that are enabled.
    pub types: HashTypes,
    /// The key; a shorter one has zeros behind it.
    pub key: [u8; KEY_BYTES],
}

/// The origin of a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The NIC: nothing of the frame was looked at.
    Nic,
    /// This device.
    Device,
    /// No hash: no enabled type applies to the frame.
    Nobody,
}

/// Calculates hashes for one driver. Made when the driver sets its types, and used for each frame.
#[derive(Debug, Clone)]
pub struct Hashing {
    types: HashTypes,
    toeplitz: Toeplitz,
    /// Types of a NIC's hashes that are what the driver wants.
    from_nic: HashTypes,
}

impl Hashing {
    /// For that driver, and a NIC whose key is known, or none.
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

    /// Types of a NIC's hashes that are reported as they are.
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
