//! The answer with a tap device for GSO packets.

use super::wire::{Flag, Name, wire};

/// A tap device whose frames the kernel sends by the interface of the lease, from the requested queue: GSO packets
/// unsegmented, as far as the NIC supports that. Only the lessee has its descriptor. The device is removed when
/// that is closed, or with the lease. Each frame has a virtio-net header of 12 bytes before it. Nothing can be read
/// from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendTapEnd {
    /// Name of that device.
    pub interface: String,
    /// It accepts GSO packets of UDP as well as of TCP.
    pub cuts_udp: bool,
}

wire!(SendTapEnd {
    interface: Name,
    cuts_udp: Flag
});
