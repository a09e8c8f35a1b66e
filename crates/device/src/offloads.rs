//! The offloads: which a port offers, and which a guest accepted.
//!
//! Names are VirtIO's feature names in lower case, without the `HOST_` of offloads that we perform for the
//! guest: `csum`, `tso4`, `tso6`, `ecn`, `uso` for frames from the guest, `guest-…` for frames to it (VirtIO
//! 1.3, 5.1.3). Some need others (5.1.3.1): [`Offloads::closed`] adds those, [`Offloads::sound`] removes
//! offloads that a driver accepted without them.

use std::fmt;

use virtio_bindings::bindings::virtio_net as net;

/// A set of offloads; see the module's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offloads {
    /// The guest sends partial checksums, we complete them.
    pub csum: bool,
    /// The guest sends TCP GSO packets over IPv4, we segment them.
    pub tso4: bool,
    /// The guest sends TCP GSO packets over IPv6, we segment them.
    pub tso6: bool,
    /// GSO packets of the guest may have the congestion window reduced flag set.
    pub ecn: bool,
    /// The guest sends UDP GSO packets, we segment them.
    pub uso: bool,
    /// The guest accepts partial checksums, and the flag that a checksum was verified.
    pub guest_csum: bool,
    /// The guest accepts TCP GSO packets over IPv4.
    pub guest_tso4: bool,
    /// The guest accepts TCP GSO packets over IPv6.
    pub guest_tso6: bool,
    /// It accepts GSO packets with the congestion window reduced flag set.
    pub guest_ecn: bool,
    /// It accepts UDP GSO packets over IPv4.
    pub guest_uso4: bool,
    /// It accepts UDP GSO packets over IPv6.
    pub guest_uso6: bool,
}

/// An offload: its name, its feature bit, its field in the set.
type Entry = (&'static str, u32, fn(&mut Offloads) -> &mut bool);

const ENTRIES: [Entry; 11] = [
    ("csum", net::VIRTIO_NET_F_CSUM, |set| &mut set.csum),
    ("tso4", net::VIRTIO_NET_F_HOST_TSO4, |set| &mut set.tso4),
    ("tso6", net::VIRTIO_NET_F_HOST_TSO6, |set| &mut set.tso6),
    ("ecn", net::VIRTIO_NET_F_HOST_ECN, |set| &mut set.ecn),
    ("uso", net::VIRTIO_NET_F_HOST_USO, |set| &mut set.uso),
    ("guest-csum", net::VIRTIO_NET_F_GUEST_CSUM, |set| {
        &mut set.guest_csum
    }),
    ("guest-tso4", net::VIRTIO_NET_F_GUEST_TSO4, |set| {
        &mut set.guest_tso4
    }),
    ("guest-tso6", net::VIRTIO_NET_F_GUEST_TSO6, |set| {
        &mut set.guest_tso6
    }),
    ("guest-ecn", net::VIRTIO_NET_F_GUEST_ECN, |set| &mut set.guest_ecn),
    ("guest-uso4", net::VIRTIO_NET_F_GUEST_USO4, |set| {
        &mut set.guest_uso4
    }),
    ("guest-uso6", net::VIRTIO_NET_F_GUEST_USO6, |set| {
        &mut set.guest_uso6
    }),
];

impl Offloads {
    /// None at all.
    pub const NONE: Self = Self {
        csum: false,
        tso4: false,
        tso6: false,
        ecn: false,
        uso: false,
        guest_csum: false,
        guest_tso4: false,
        guest_tso6: false,
        guest_ecn: false,
        guest_uso4: false,
        guest_uso6: false,
    };

    /// All of them.
    pub fn all() -> Self {
        Self::from_features(u64::MAX)
    }

    /// The offloads of this set for frames to the guest.
    #[must_use]
    pub fn for_guest(self) -> Self {
        Self {
            csum: false,
            tso4: false,
            tso6: false,
            ecn: false,
            uso: false,
            ..self
        }
    }

    /// The offloads that allow frames for the guest that are longer than the interface's maximum.
    pub fn coalescing() -> Self {
        Self {
            guest_tso4: true,
            guest_tso6: true,
            guest_ecn: true,
            guest_uso4: true,
            guest_uso6: true,
            ..Self::NONE
        }
    }

    /// The offloads whose feature bit is set.
    pub fn from_features(features: u64) -> Self {
        let mut set = Self::NONE;
        for (_, bit, place) in ENTRIES {
            *place(&mut set) = features & (1 << bit) != 0;
        }
        set
    }

    /// Their feature bits.
    pub fn features(self) -> u64 {
        let mut set = self;
        let bits = ENTRIES.map(|(_, bit, place)| u64::from(*place(&mut set)) << bit);
        bits.into_iter().fold(0, |all, bit| all | bit)
    }

    /// Their names.
    pub fn names(self) -> Vec<&'static str> {
        let mut set = self;
        let chosen = ENTRIES.into_iter().filter(|(_, _, place)| *place(&mut set));
        chosen.map(|(name, ..)| name).collect()
    }

    /// This set without the offloads of the other.
    pub fn without(self, other: Self) -> Self {
        Self::from_features(self.features() & !other.features())
    }

    /// The set with all offloads that its members need.
    pub fn closed(self) -> Self {
        let mut set = self;
        set.tso4 |= set.ecn && !set.tso6;
        set.csum |= set.tso4 || set.tso6 || set.uso;
        set.guest_tso4 |= set.guest_ecn && !set.guest_tso6;
        set.guest_csum |= set.receives_gso_packets();
        set
    }

    /// The set without members that need a missing one: the result for a driver that accepted too little.
    pub fn sound(self) -> Self {
        let mut set = self;
        set.tso4 &= set.csum;
        set.tso6 &= set.csum;
        set.uso &= set.csum;
        set.ecn &= set.tso4 || set.tso6;
        set.guest_tso4 &= set.guest_csum;
        set.guest_tso6 &= set.guest_csum;
        set.guest_uso4 &= set.guest_csum;
        set.guest_uso6 &= set.guest_csum;
        set.guest_ecn &= set.guest_tso4 || set.guest_tso6;
        set
    }

    /// Whether the guest accepts frames longer than the interface's maximum.
    #[inline]
    pub fn receives_gso_packets(&self) -> bool {
        self.guest_tso4 || self.guest_tso6 || self.guest_uso4 || self.guest_uso6
    }

    /// The offload with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let (_, bit, _) = ENTRIES.iter().find(|(known, ..)| *known == name)?;
        Some(Self::from_features(1 << bit))
    }

    /// The union of both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self::from_features(self.features() | other.features())
    }
}

impl fmt::Display for Offloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names().as_slice() {
            [] => f.write_str("none"),
            names if *self == Self::all() => write!(f, "all ({})", names.join(", ")),
            names => f.write_str(&names.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_bits_and_sets_are_the_same_thing() {
        let all = Offloads::all();
        assert_eq!(all.names().len(), ENTRIES.len());
        assert_eq!(Offloads::from_features(all.features()), all);
        assert_eq!(
            all.features(),
            1 | 1 << 1 | 7 << 7 | 7 << 11 | 7 << 54,
            "VirtIO 1.3, 5.1.3"
        );
        assert_eq!(Offloads::NONE.features(), 0);
    }

    #[test]
    fn driver_that_accepts_segmentation_without_checksums_gets_neither() {
        let accepted = Offloads {
            tso4: true,
            ecn: true,
            guest_tso6: true,
            ..Offloads::NONE
        };
        assert_eq!(accepted.sound(), Offloads::NONE);
    }
}
