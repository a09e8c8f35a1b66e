//! What the steward sends with a tap device by which GSO packets leave.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Malformed;
use super::field::{NAME_BYTES, field, flags_of, interface_name, value};

/// A tap device whose frames the kernel sends by the interface of the lease, from the queue that was asked for: GSO
/// packets unsegmented, as far as the NIC takes them. Only the lessee has its descriptor. The device is removed when that
/// is closed, or with the lease. Each frame has a virtio-net header of 12 bytes before it. Nothing can be read from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendTapEnd {
    /// Name of that device.
    pub interface: String,
    /// It takes UDP GSO packets as well as TCP's.
    pub cuts_udp: bool,
}

const FLAG_CUTS_UDP: u32 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct SendTapBody {
    interface: [u8; NAME_BYTES],
    flags: u32,
}

const _: () = assert!(size_of::<SendTapBody>() == 20);

impl SendTapEnd {
    pub(super) fn body(&self) -> SendTapBody {
        SendTapBody {
            interface: field(&self.interface),
            flags: flags_of([(self.cuts_udp, FLAG_CUTS_UDP)]),
        }
    }

    pub(super) fn read(body: &SendTapBody) -> Result<Self, Malformed> {
        if body.flags & !FLAG_CUTS_UDP != 0 {
            return Err(value("flags of a tap to send by", body.flags));
        }
        Ok(Self {
            interface: interface_name(&body.interface)?,
            cuts_udp: body.flags & FLAG_CUTS_UDP != 0,
        })
    }
}
