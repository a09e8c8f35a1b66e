//! The features of vhost-user, beside those of the device.

use device::offloads::Offloads;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

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

/// The protocol features that every port offers. REPLY_ACK is added by the `vhost` crate, which
/// implements it.
pub(crate) fn offered_protocol() -> Protocol {
    Protocol::MQ
        | Protocol::CONFIG
        | Protocol::CONFIGURE_MEM_SLOTS
        | Protocol::INFLIGHT_SHMFD
        | Protocol::LOG_SHMFD
        | Protocol::RARP
        | Protocol::MTU
        | Protocol::STATUS
        | Protocol::RESET_DEVICE
        | Protocol::BACKEND_REQ
}
