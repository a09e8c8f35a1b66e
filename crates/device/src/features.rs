//! What the device offers, and what follows from what the driver took of it.

use virtio_bindings::bindings::virtio_net as net;
use virtio_bindings::bindings::{virtio_config, virtio_ring};
use virtqueue::QueueFeatures;

use crate::offloads::Offloads;
use crate::pair::{HEADER_BYTES, LEGACY_HEADER_BYTES};

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
const F_MRG_RXBUF: u64 = 1 << net::VIRTIO_NET_F_MRG_RXBUF;
const F_MAC: u64 = 1 << net::VIRTIO_NET_F_MAC;
const F_MTU: u64 = 1 << net::VIRTIO_NET_F_MTU;
const F_STATUS: u64 = 1 << net::VIRTIO_NET_F_STATUS;
const F_MQ: u64 = 1 << net::VIRTIO_NET_F_MQ;
const F_CTRL_VQ: u64 = 1 << net::VIRTIO_NET_F_CTRL_VQ;
const F_GUEST_ANNOUNCE: u64 = 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE;

/// The virtio features that a device with so many queue pairs and such offloads offers.
///
/// CTRL_VQ is the VMM's to serve (vhost-user has no message for it); a backend that does not offer
/// it keeps VMMs from having one, and GUEST_ANNOUNCE and MQ need it (VirtIO 1.3, 5.1.3.1).
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

/// Features that are offered only where somebody asks for them, because a VMM has to do its part; by name.
const ON_REQUEST: [(&str, u64); 2] = [
    ("ring-reset", F_RING_RESET),
    ("access-platform", F_ACCESS_PLATFORM),
];

/// A set of features that are offered on request.
///
/// `ring-reset` (RING_RESET): the driver resets one virtqueue while the others go on (VirtIO 1.3, 2.6.1). The VMM has
/// to stop that vring and start it anew; of one that does not, the device goes on with a ring that is none any more.
/// `access-platform` (ACCESS_PLATFORM): the driver uses the DMA API. Addresses remain those of guest memory: there is
/// no IOTLB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnRequest(u64);

impl OnRequest {
    /// None at all.
    pub const NONE: Self = Self(0);

    /// All that there are.
    #[must_use]
    pub fn all() -> Self {
        Self(ON_REQUEST.iter().fold(0, |all, (_, bit)| all | bit))
    }

    /// The one of that name.
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

    /// Those of either set.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those of this set that are not in the other.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// What the two sides agreed on, as far as the data path is concerned.
#[derive(Debug, Clone, Copy)]
pub struct Negotiated {
    /// Virtio-net header in front of each frame, bytes.
    pub header_bytes: u32,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame may span several buffers.
    pub mergeable: bool,
    /// Offloads that the driver accepted, with all that they rest on.
    pub offloads: Offloads,
    /// How the rings look.
    pub ring: QueueFeatures,
}

impl From<u64> for Negotiated {
    /// From the virtio features that were acknowledged.
    fn from(features: u64) -> Self {
        let has = |feature| features & feature != 0;
        let long_header = has(F_VERSION_1) || has(F_MRG_RXBUF);
        Self {
            header_bytes: if long_header {
                HEADER_BYTES
            } else {
                LEGACY_HEADER_BYTES
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
