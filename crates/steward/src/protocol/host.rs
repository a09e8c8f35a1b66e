//! What the steward sends the lessee of a network about its tap to the host or to the wire, and about the bridge that
//! the uplink is part of.

use steer::Station;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::field::{NAME_BYTES, field, flags_of, interface_name, listed, padded, value};
use super::{ANY_VLAN, BEHIND_MAX, CHANGES_MAX, ENTRIES_MAX, Malformed};

/// A tap device between a network and the host, or between a network and the wire
/// ([`Request::Uplink`](super::Request::Uplink)). The lessee alone has its descriptor. Each frame has a virtio-net
/// header of 12 bytes before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostEnd {
    /// Name of that device.
    pub interface: String,
    /// Its index, by which it is told from the next one of that name.
    pub index: u32,
    /// It takes and gives UDP packets that are to be cut, beside TCP's; told with the descriptor.
    pub cuts_udp: bool,
    /// Addresses of the host, in any VLAN: frames to these are to be sent by that device. That of the interface of the
    /// lease first; at most [`ENTRIES_MAX`]. None for a device to the wire, as for all that follows.
    pub macs: Vec<[u8; 6]>,
    /// The bridge that the interface of the lease is part of; empty: none.
    pub bridge: String,
    /// How many stations are behind that bridge, which [`Request::Behind`](super::Request::Behind) asks for; at most
    /// [`BEHIND_MAX`].
    pub behind: u32,
    /// How many further ones there are, which the steward does not send.
    pub left_out: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct HostBody {
    interface: [u8; NAME_BYTES],
    index: u32,
    flags: u32,
    mac_count: u32,
    macs: [[u8; 6]; ENTRIES_MAX],
    bridge: [u8; NAME_BYTES],
    behind: u32,
    left_out: u32,
}

/// UDP packets that are to be cut.
const FLAG_CUTS_UDP: u32 = 1;

const _: () = assert!(size_of::<HostBody>() == 148);

impl HostEnd {
    pub(super) fn body(&self) -> HostBody {
        HostBody {
            interface: field(&self.interface),
            index: self.index,
            flags: flags_of([(self.cuts_udp, FLAG_CUTS_UDP)]),
            mac_count: self.macs.len().try_into().unwrap_or(u32::MAX),
            macs: padded(&self.macs),
            bridge: field(&self.bridge),
            behind: self.behind,
            left_out: self.left_out,
        }
    }

    pub(super) fn read(body: &HostBody) -> Result<Self, Malformed> {
        if body.flags & !FLAG_CUTS_UDP != 0 {
            return Err(value("flags of a host", body.flags));
        }
        if body.behind as usize > BEHIND_MAX {
            return Err(value("number of stations behind a bridge", body.behind));
        }
        let bridge = match body.bridge == [0; NAME_BYTES] {
            true => String::new(),
            false => interface_name(&body.bridge)?,
        };
        Ok(Self {
            index: body.index,
            cuts_udp: body.flags & FLAG_CUTS_UDP != 0,
            interface: interface_name(&body.interface)?,
            macs: listed(&body.macs, body.mac_count, "number of addresses")?,
            bridge,
            behind: body.behind,
            left_out: body.left_out,
        })
    }
}

/// A station; the VLAN may be [`ANY_VLAN`].
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(super) struct StationBody {
    vlan: u16,
    mac: [u8; 6],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct BehindBody {
    count: u32,
    stations: [StationBody; CHANGES_MAX],
}

const _: () = assert!(size_of::<BehindBody>() == 516);

impl StationBody {
    pub(super) fn of(station: Station) -> Self {
        let Station { vlan, mac } = station;
        Self { vlan, mac }
    }

    pub(super) fn read(self) -> Result<Station, Malformed> {
        let Self { vlan, mac } = self;
        let station = Station { vlan, mac };
        let untagged = Station { vlan: 0, mac };
        match station.is_possible() || (vlan == ANY_VLAN && untagged.is_possible()) {
            true => Ok(station),
            false => Err(Malformed::List("stations behind a bridge")),
        }
    }
}

pub(super) fn behind(stations: &[Station]) -> BehindBody {
    let bodies: Vec<StationBody> = stations.iter().map(|&station| StationBody::of(station)).collect();
    BehindBody {
        count: stations.len().try_into().unwrap_or(u32::MAX),
        stations: padded(&bodies),
    }
}

pub(super) fn read_behind(body: &BehindBody) -> Result<Vec<Station>, Malformed> {
    let bodies = listed(&body.stations, body.count, "number of stations")?;
    bodies.into_iter().map(StationBody::read).collect()
}
