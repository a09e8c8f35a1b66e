//! The features between VMM and back end alone, besides those of the device.

use device::features::F_CTRL_GUEST_OFFLOADS;

use crate::config::PortConfig;

/// VHOST_F_LOG_ALL: every write to guest memory is noted in the dirty log.
pub(crate) const F_LOG_ALL: u64 = 1 << 26;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(crate) const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Features that are between VMM and back end alone.
pub(crate) const TRANSPORT: u64 = F_LOG_ALL | F_PROTOCOL_FEATURES;

/// Features that need a control queue that the VMM passes on, besides those that VMMs serve themselves.
pub(crate) const PASSED_CONTROL: u64 = F_CTRL_GUEST_OFFLOADS;

/// The features that such a port offers: the device's, and those of vhost-user.
pub(crate) fn offered(port: &PortConfig) -> u64 {
    device::features::offered(port.queues, port.offload) | port.offer.features() | PASSED_CONTROL | TRANSPORT
}
