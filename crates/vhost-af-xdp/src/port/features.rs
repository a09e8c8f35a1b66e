//! The features that are between VMM and back end alone, beside those of the device.

use device::offloads::Offloads;

/// VHOST_F_LOG_ALL: every write to guest memory is noted in the dirty log.
pub(crate) const F_LOG_ALL: u64 = 1 << 26;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(crate) const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Features that are between VMM and back end alone.
pub(crate) const TRANSPORT: u64 = F_LOG_ALL | F_PROTOCOL_FEATURES;

/// The features that a port with so many queue pairs and such offloads offers: the device's, and those of vhost-user.
pub(crate) fn offered(pairs: u16, offload: Offloads) -> u64 {
    device::features::offered(pairs, offload) | TRANSPORT
}
