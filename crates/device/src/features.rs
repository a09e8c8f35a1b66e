//! The features that the device offers, and the consequences of those that the driver acknowledged.

use virtio_bindings::bindings::virtio_net as net;
use virtio_bindings::bindings::{virtio_config, virtio_ring};
use virtqueue::QueueFeatures;

use crate::offloads::Offloads;
use crate::pair::{HASH_HEADER_BYTES, HEADER_BYTES, LEGACY_HEADER_BYTES};

/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
/// VIRTIO_F_RING_PACKED.
pub const F_RING_PACKED: u64 = 1 << virtio_config::VIRTIO_F_RING_PACKED;
/// VIRTIO_F_RING_RESET.
pub const F_RING_RESET: u64 = 1 << virtio_config::VIRTIO_F_RING_RESET;
/// VIRTIO_F_ACCESS_PLATFORM.
pub const F_ACCESS_PLATFORM: u64 = 1 << virtio_config::VIRTIO_F_ACCESS_PLATFORM;
const F_IN_ORDER: u64 = 1 << virtio_config::VIRTIO_F_IN_ORDER;
const F_INDIRECT: u64 = 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
const F_EVENT_IDX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
/// VIRTIO_NET_F_MRG_RXBUF.
pub const F_MRG_RXBUF: u64 = 1 << net::VIRTIO_NET_F_MRG_RXBUF;
const F_MAC: u64 = 1 << net::VIRTIO_NET_F_MAC;
const F_MTU: u64 = 1 << net::VIRTIO_NET_F_MTU;
const F_STATUS: u64 = 1 << net::VIRTIO_NET_F_STATUS;
/// VIRTIO_NET_F_MQ.
pub const F_MQ: u64 = 1 << net::VIRTIO_NET_F_MQ;
/// VIRTIO_NET_F_CTRL_VQ.
pub const F_CTRL_VQ: u64 = 1 << net::VIRTIO_NET_F_CTRL_VQ;
/// VIRTIO_NET_F_GUEST_ANNOUNCE.
pub const F_GUEST_ANNOUNCE: u64 = 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE;
/// VIRTIO_NET_F_CTRL_RX.
pub const F_CTRL_RX: u64 = 1 << net::VIRTIO_NET_F_CTRL_RX;
/// VIRTIO_NET_F_CTRL_RX_EXTRA.
pub const F_CTRL_RX_EXTRA: u64 = 1 << net::VIRTIO_NET_F_CTRL_RX_EXTRA;
/// VIRTIO_NET_F_CTRL_VLAN.
pub const F_CTRL_VLAN: u64 = 1 << net::VIRTIO_NET_F_CTRL_VLAN;
/// VIRTIO_NET_F_CTRL_MAC_ADDR.
pub const F_CTRL_MAC_ADDR: u64 = 1 << net::VIRTIO_NET_F_CTRL_MAC_ADDR;
/// VIRTIO_NET_F_CTRL_GUEST_OFFLOADS.
pub const F_CTRL_GUEST_OFFLOADS: u64 = 1 << net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
/// VIRTIO_NET_F_RSS.
pub const F_RSS: u64 = 1 << net::VIRTIO_NET_F_RSS;
/// VIRTIO_NET_F_HASH_REPORT.
pub const F_HASH_REPORT: u64 = 1 << net::VIRTIO_NET_F_HASH_REPORT;

/// The virtio features that a device with `pairs` queue pairs and these offloads offers.
///
/// CTRL_VQ: the VMM serves the control queue or passes it on; if the backend did not offer it, VMMs would
/// have none, and GUEST_ANNOUNCE and MQ need it (VirtIO 1.3, 5.1.3.1). Features that only a device can offer
/// that serves the queue itself are in [`crate::control::OFFERED`].
pub fn offered(pairs: u16, offload: Offloads) -> u64 {
    let multi_queue = if pairs > 1 { F_MQ } else { 0 };
    F_VERSION_1
        | F_RING_PACKED
        | F_IN_ORDER
        | F_INDIRECT
        | F_EVENT_IDX
        | F_MRG_RXBUF
        | F_MAC
        | F_MTU
        | F_STATUS
        | F_CTRL_VQ
        | F_GUEST_ANNOUNCE
        | multi_queue
        | offload.features()
}

/// A feature without any of those that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("feature {feature} was acknowledged without {needs}, which it needs (VirtIO 1.3, 5.1.3.1)")]
pub struct Unmet {
    feature: &'static str,
    needs: &'static str,
}

/// A name, and the bits of the features that it names.
type Named = (&'static str, u64);

/// Each feature offered here that needs others, and those of which it needs one (VirtIO 1.3, 5.1.3.1).
const REQUIREMENTS: [(Named, Named); 18] = {
    const fn bit(number: u32) -> u64 {
        1 << number
    }
    const GUEST_TSO: Named = (
        "GUEST_TSO4 or GUEST_TSO6",
        bit(net::VIRTIO_NET_F_GUEST_TSO4) | bit(net::VIRTIO_NET_F_GUEST_TSO6),
    );
    const HOST_TSO: Named = (
        "HOST_TSO4 or HOST_TSO6",
        bit(net::VIRTIO_NET_F_HOST_TSO4) | bit(net::VIRTIO_NET_F_HOST_TSO6),
    );
    const GUEST_CSUM: Named = ("GUEST_CSUM", bit(net::VIRTIO_NET_F_GUEST_CSUM));
    const CSUM: Named = ("CSUM", bit(net::VIRTIO_NET_F_CSUM));
    const CTRL_VQ: Named = ("CTRL_VQ", F_CTRL_VQ);
    [
        (("GUEST_TSO4", bit(net::VIRTIO_NET_F_GUEST_TSO4)), GUEST_CSUM),
        (("GUEST_TSO6", bit(net::VIRTIO_NET_F_GUEST_TSO6)), GUEST_CSUM),
        (("GUEST_ECN", bit(net::VIRTIO_NET_F_GUEST_ECN)), GUEST_TSO),
        (("GUEST_USO4", bit(net::VIRTIO_NET_F_GUEST_USO4)), GUEST_CSUM),
        (("GUEST_USO6", bit(net::VIRTIO_NET_F_GUEST_USO6)), GUEST_CSUM),
        (("HOST_TSO4", bit(net::VIRTIO_NET_F_HOST_TSO4)), CSUM),
        (("HOST_TSO6", bit(net::VIRTIO_NET_F_HOST_TSO6)), CSUM),
        (("HOST_ECN", bit(net::VIRTIO_NET_F_HOST_ECN)), HOST_TSO),
        (("HOST_USO", bit(net::VIRTIO_NET_F_HOST_USO)), CSUM),
        (("CTRL_RX", F_CTRL_RX), CTRL_VQ),
        (("CTRL_VLAN", F_CTRL_VLAN), CTRL_VQ),
        (("GUEST_ANNOUNCE", F_GUEST_ANNOUNCE), CTRL_VQ),
        (("MQ", F_MQ), CTRL_VQ),
        (("CTRL_MAC_ADDR", F_CTRL_MAC_ADDR), CTRL_VQ),
        (("RSS", F_RSS), CTRL_VQ),
        // A driver "SHOULD NOT" negotiate these two without it (5.1.4.2), and the next is useless without it.
        (("CTRL_RX_EXTRA", F_CTRL_RX_EXTRA), CTRL_VQ),
        (("HASH_REPORT", F_HASH_REPORT), CTRL_VQ),
        (("CTRL_GUEST_OFFLOADS", F_CTRL_GUEST_OFFLOADS), CTRL_VQ),
    ]
};

/// Checks that each of these features comes with those that it needs.
///
/// # Errors
/// The first feature that does not.
pub fn check_requirements(features: u64) -> Result<(), Unmet> {
    for ((feature, bit), (needs, any_of)) in REQUIREMENTS {
        if features & bit != 0 && features & any_of == 0 {
            return Err(Unmet { feature, needs });
        }
    }
    Ok(())
}

/// Features that are offered only on request, because the VMM must support them, too; by name.
const ON_REQUEST: [(&str, u64); 2] = [
    ("ring-reset", F_RING_RESET),
    ("access-platform", F_ACCESS_PLATFORM),
];

/// A set of features that are offered on request.
///
/// `ring-reset` (RING_RESET): the driver resets one virtqueue while the others keep running (VirtIO 1.3,
/// 2.6.1). The VMM has to stop that vring and start it again; with one that does not, the device would keep
/// using an invalid ring. `access-platform` (ACCESS_PLATFORM): the driver uses the DMA API. Addresses remain
/// those of guest memory: there is no IOTLB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnRequest(u64);

impl OnRequest {
    /// None at all.
    pub const NONE: Self = Self(0);

    /// All of them.
    #[must_use]
    pub fn all() -> Self {
        Self(ON_REQUEST.iter().fold(0, |all, (_, bit)| all | bit))
    }

    /// The feature with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let (_, bit) = ON_REQUEST.iter().find(|(known, _)| *known == name)?;
        Some(Self(*bit))
    }

    /// Their names.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        let chosen = ON_REQUEST.iter().filter(|(_, bit)| self.0 & bit != 0);
        chosen.map(|(name, _)| *name).collect()
    }

    /// Their feature bits.
    #[must_use]
    pub fn features(self) -> u64 {
        self.0
    }

    /// The union of both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without the features of the other.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// The negotiated properties that concern the data path.
#[derive(Debug, Clone, Copy)]
pub struct Negotiated {
    /// Virtio-net header in front of each frame, bytes.
    pub header_bytes: u32,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame may span several buffers.
    pub mergeable: bool,
    /// Offloads that the driver accepted, without those whose prerequisites it did not accept.
    pub offloads: Offloads,
    /// Features of the rings.
    pub ring: QueueFeatures,
}

impl From<u64> for Negotiated {
    /// From the virtio features that were acknowledged.
    fn from(features: u64) -> Self {
        let has = |feature| features & feature != 0;
        let long_header = has(F_VERSION_1) || has(F_MRG_RXBUF);
        Self {
            header_bytes: match long_header {
                _ if has(F_HASH_REPORT) => HASH_HEADER_BYTES,
                true => HEADER_BYTES,
                false => LEGACY_HEADER_BYTES,
            },
            mergeable: has(F_MRG_RXBUF),
            offloads: Offloads::from_features(features).sound(),
            ring: QueueFeatures {
                event_idx: has(F_EVENT_IDX),
                indirect: has(F_INDIRECT),
                in_order: has(F_IN_ORDER),
                packed: has(F_RING_PACKED),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_as_long_as_the_features_say() {
        let bytes = |features| Negotiated::from(features).header_bytes;
        assert_eq!([0, F_MRG_RXBUF, F_VERSION_1].map(bytes), [10, 12, 12]);
        assert_eq!(bytes(F_VERSION_1 | F_HASH_REPORT), 20);
        assert_eq!(
            bytes(F_VERSION_1 | F_RSS),
            12,
            "RSS alone tells the guest nothing"
        );
    }

    #[test]
    fn back_end_of_vhost_user_offers_nothing_that_needs_a_control_queue_of_its_own() {
        let offered = offered(8, Offloads::all()) | OnRequest::all().features();
        assert_eq!(offered & crate::control::OFFERED, 0);
        assert_eq!(check_requirements(offered), Ok(()));
    }

    #[test]
    fn feature_is_accepted_with_what_it_rests_on_only() {
        for ((name, feature), (needs, any_of)) in REQUIREMENTS {
            let unmet = check_requirements(F_VERSION_1 | feature).expect_err(name);
            assert_eq!((unmet.feature, unmet.needs), (name, needs));
            let [low, high] = [any_of.trailing_zeros(), 63 - any_of.leading_zeros()];
            for one in [1 << low, 1 << high] {
                // The needed feature may have needs itself: so all others are set.
                let rest = !any_of;
                assert_eq!(check_requirements(rest | one), Ok(()), "{name} with {one:#x}");
            }
        }
    }
}
