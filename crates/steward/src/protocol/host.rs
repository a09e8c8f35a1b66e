//! What a holder of a network is told of the host.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::field::{NAME_BYTES, field, interface_name, listed, padded};
use super::{ENTRIES_MAX, Malformed};

/// The host as one more receiver of a network: frames go to it and come from it by an interface whose one queue is to be
/// leased.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostEnd {
    /// Name of that interface.
    pub interface: String,
    /// Addresses of the host, in any VLAN: frames to these are to be sent by that interface. That of the interface of the
    /// lease first; at most [`ENTRIES_MAX`].
    pub macs: Vec<[u8; 6]>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct HostBody {
    interface: [u8; NAME_BYTES],
    mac_count: u32,
    macs: [[u8; 6]; ENTRIES_MAX],
}

const _: () = assert!(size_of::<HostBody>() == 116);

impl HostEnd {
    pub(super) fn body(&self) -> HostBody {
        HostBody {
            interface: field(&self.interface),
            mac_count: self.macs.len().try_into().unwrap_or(u32::MAX),
            macs: padded(&self.macs),
        }
    }

    pub(super) fn read(body: &HostBody) -> Result<Self, Malformed> {
        Ok(Self {
            interface: interface_name(&body.interface)?,
            macs: listed(&body.macs, body.mac_count, "number of addresses")?,
        })
    }
}
