//! The features that a port offers: those of the device, and those that only VMM and back end use.

use device::features::F_CTRL_GUEST_OFFLOADS;

use crate::config::PortConfig;

/// VHOST_F_LOG_ALL: every write to guest memory is recorded in the dirty log.
pub(crate) const F_LOG_ALL: u64 = 1 << 26;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(crate) const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Features that only VMM and back end use.
pub(crate) const TRANSPORT: u64 = F_LOG_ALL | F_PROTOCOL_FEATURES;

/// Features of the device for which the VMM has to pass the control queue on to the daemon.
pub(crate) const PASSED_CONTROL: u64 = F_CTRL_GUEST_OFFLOADS;

/// All features that a port with this configuration offers.
pub(crate) fn offered(port: &PortConfig) -> u64 {
    device::features::offered(port.queues, port.offload) | port.offer.features() | PASSED_CONTROL | TRANSPORT
}
