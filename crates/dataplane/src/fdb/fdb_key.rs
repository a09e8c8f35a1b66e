//! The key of the FDB: a MAC address in a VLAN.

use packet::ethernet::Mac;

/// An address in a VLAN, as a number: bits 0 to 47 are the address, its first byte the highest; the bits from 48 on are
/// the VLAN, 0 for frames without a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FdbKey(u64);

impl FdbKey {
    /// The key of an address in a VLAN; 0: untagged.
    #[inline]
    pub fn new(vlan: u16, mac: Mac) -> Self {
        let [a, b, c, d, e, f] = mac;
        Self(u64::from_be_bytes([0, 0, a, b, c, d, e, f]) | u64::from(vlan) << 48)
    }

    /// The number.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The key of that number.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The VLAN; 0: none.
    pub fn vlan(self) -> u16 {
        // The bits above are 0.
        #[allow(clippy::cast_possible_truncation)]
        let vlan = (self.0 >> 48) as u16;
        vlan
    }

    /// The address.
    #[inline]
    pub fn mac(self) -> Mac {
        let [_, _, mac @ ..] = self.0.to_be_bytes();
        mac
    }

    /// Whether the address is multicast or broadcast (IEEE 802: bit 0 of the first byte).
    #[inline]
    pub(crate) fn is_multicast(self) -> bool {
        self.0 & 1 << 40 != 0
    }
}
