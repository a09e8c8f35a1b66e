//! What a holder of a network is told of the host.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::field::{NAME_BYTES, field, flags_of, interface_name, listed, padded, value};
use super::{ENTRIES_MAX, Malformed};

/// The host as one more receiver of a network: frames go to it and come from it by a tap device, of which the holder
/// alone has the descriptor. Each frame has a virtio-net header of 12 bytes before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostEnd {
    /// Name of that device.
    pub interface: String,
    /// Its index, by which it is told from the next one of that name.
    pub index: u32,
    /// It takes and gives UDP packets that are to be cut, beside TCP's; told with the descriptor.
    pub cuts_udp: bool,
    /// Addresses of the host, in any VLAN: frames to these are to be sent by that device. That of the interface of the
    /// lease first; at most [`ENTRIES_MAX`].
    pub macs: Vec<[u8; 6]>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct HostBody {
    interface: [u8; NAME_BYTES],
    index: u32,
    flags: u32,
    mac_count: u32,
    macs: [[u8; 6]; ENTRIES_MAX],
}

/// UDP packets that are to be cut.
const FLAG_CUTS_UDP: u32 = 1;

const _: () = assert!(size_of::<HostBody>() == 124);

impl HostEnd {
    pub(super) fn body(&self) -> HostBody {
        HostBody {
            interface: field(&self.interface),
            index: self.index,
            flags: flags_of([(self.cuts_udp, FLAG_CUTS_UDP)]),
            mac_count: self.macs.len().try_into().unwrap_or(u32::MAX),
            macs: padded(&self.macs),
        }
    }

    pub(super) fn read(body: &HostBody) -> Result<Self, Malformed> {
        if body.flags & !FLAG_CUTS_UDP != 0 {
            return Err(value("flags of a host", body.flags));
        }
        Ok(Self {
            index: body.index,
            cuts_udp: body.flags & FLAG_CUTS_UDP != 0,
            interface: interface_name(&body.interface)?,
            macs: listed(&body.macs, body.mac_count, "number of addresses")?,
        })
    }
}
