//! The hash that a NIC computed, from XDP's RX metadata, and whether it is the one that the guest wants.

use super::toeplitz::KEY_BYTES;
use super::{HashConfig, HashType, HashTypes};

/// Result of `bpf_xdp_metadata_rx_hash` for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicHash {
    /// The hash.
    pub value: u32,
    /// `enum xdp_rss_hash_type` (include/net/xdp.h).
    pub rss_type: u32,
}

/// Bits of `enum xdp_rss_hash_type`.
const L3_IPV4: u32 = 1 << 0;
const L3_IPV6: u32 = 1 << 1;
/// IPv4 options, IPv6 extension headers.
const L3_DYNHDR: u32 = 1 << 2;
const L4: u32 = 1 << 3;
const L4_TCP: u32 = L4 | 1 << 4;
const L4_UDP: u32 = L4 | 1 << 5;

impl NicHash {
    /// Its input; `None` if VirtIO has no such hash type: SCTP, the SPI of IPsec, ports of an unknown
    /// protocol (all that veth reports of a frame), no hash at all.
    #[inline]
    #[must_use]
    pub fn kind(self) -> Option<HashType> {
        const V4_OPT: u32 = L3_IPV4 | L3_DYNHDR;
        const V6_EX: u32 = L3_IPV6 | L3_DYNHDR;
        const V4_TCP: u32 = L3_IPV4 | L4_TCP;
        const V4_OPT_TCP: u32 = V4_OPT | L4_TCP;
        const V4_UDP: u32 = L3_IPV4 | L4_UDP;
        const V4_OPT_UDP: u32 = V4_OPT | L4_UDP;
        const V6_TCP: u32 = L3_IPV6 | L4_TCP;
        const V6_UDP: u32 = L3_IPV6 | L4_UDP;
        const V6_EX_TCP: u32 = V6_EX | L4_TCP;
        const V6_EX_UDP: u32 = V6_EX | L4_UDP;
        Some(match self.rss_type {
            L3_IPV4 | V4_OPT => HashType::Ipv4,
            V4_TCP | V4_OPT_TCP => HashType::TcpV4,
            V4_UDP | V4_OPT_UDP => HashType::UdpV4,
            L3_IPV6 => HashType::Ipv6,
            V6_TCP => HashType::TcpV6,
            V6_UDP => HashType::UdpV6,
            V6_EX => HashType::Ipv6Ex,
            V6_EX_TCP => HashType::TcpV6Ex,
            V6_EX_UDP => HashType::UdpV6Ex,
            _ => return None,
        })
    }
}

/// The key of a NIC whose hash function is Toeplitz, as `ethtool -x` shows both (ETHTOOL_GRSSH).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicKey(Vec<u8>);

impl NicKey {
    /// A key of these bytes; NICs have 40 or more.
    #[must_use]
    pub fn toeplitz(key: &[u8]) -> Self {
        Self(key.to_vec())
    }

    /// The types of the NIC's hashes that are the correct ones for that driver in every frame.
    ///
    /// A type alone does not prove that: a NIC may use the type `L3_IPV4` for TCP, too, for which the driver wants
    /// ports; and one that reports `L3_IPV6` without extension headers may have skipped some. So a hash of addresses is
    /// used only if no type with ports is enabled for that kind of packet, and plain IPv6 only if no `_EX` type is.
    #[must_use]
    pub(super) fn usable(&self, driver: &HashConfig) -> HashTypes {
        use HashType as T;
        let wanted = |kinds: &[T]| kinds.iter().any(|&kind| driver.types.has(kind));
        let usable = |kind: T| {
            let better = match kind {
                T::TcpV4 | T::UdpV4 | T::TcpV6Ex | T::UdpV6Ex => wanted(&[]),
                T::Ipv4 => wanted(&[T::TcpV4, T::UdpV4]),
                T::Ipv6Ex => wanted(&[T::TcpV6Ex, T::UdpV6Ex]),
                T::TcpV6 | T::UdpV6 => wanted(&[T::Ipv6Ex, T::TcpV6Ex, T::UdpV6Ex]),
                T::Ipv6 => wanted(&[T::TcpV6, T::UdpV6, T::Ipv6Ex, T::TcpV6Ex, T::UdpV6Ex]),
            };
            driver.types.has(kind) && !better && self.is_key_of(driver, kind)
        };
        let kinds = T::ALL.into_iter().filter(|&kind| usable(kind));
        kinds.fold(HashTypes::NONE, HashTypes::with)
    }

    /// Whether the keys are equal in the part that a hash of this type uses.
    fn is_key_of(&self, driver: &HashConfig, kind: HashType) -> bool {
        let used = (kind.input_bytes() + 4).min(KEY_BYTES);
        self.0.get(..used) == Some(&driver.key[..used])
    }
}
