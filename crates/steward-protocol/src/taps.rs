//! The answers with tap devices: of a network, to the host or to the wire, with the bridge that the uplink is part of;
//! and for GSO packets.

use super::wire::{Body, Checked, Codec, Flag, List, NAME_BYTES, Name, Wire, wire};
use super::{ANY_VLAN, BEHIND_MAX, CHANGES_MAX, ENTRIES_MAX, Malformed};
use steer::Station;

/// A tap device between a network and the host, or between a network and the wire
/// ([`Request::Uplink`](super::Request::Uplink)). The lessee alone has its descriptor. Each frame has a virtio-net
/// header of 12 bytes before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostEnd {
    /// Name of that device.
    pub interface: String,
    /// Its index, which distinguishes it from a later device of that name.
    pub index: u32,
    /// It supports GSO packets of UDP as well as of TCP; valid if the answer carries the descriptor.
    pub cuts_udp: bool,
    /// Addresses of the host, in any VLAN: send frames to these by that device. The first is that of the lease's
    /// interface; at most [`ENTRIES_MAX`]. For a device to the wire this and all fields below are empty.
    pub macs: Vec<[u8; 6]>,
    /// Name of the bridge that the interface of the lease is part of; empty: none.
    pub bridge: String,
    /// How many stations are behind that bridge, which [`Request::Behind`](super::Request::Behind) asks for; at most
    /// [`BEHIND_MAX`].
    pub behind: u32,
    /// How many more stations there are, which the steward does not send.
    pub left_out: u32,
}

wire!(HostEnd {
    interface: Name,
    index,
    cuts_udp: Flag,
    macs: List::set(ENTRIES_MAX, 6, "addresses of the host"),
    bridge: NameOrNone,
    behind: Checked(
        |count| count as usize <= BEHIND_MAX,
        "number of stations behind a bridge"
    ),
    left_out,
});

/// Name of an interface, or empty.
struct NameOrNone;

impl Codec<String> for NameOrNone {
    fn write(&self, name: &String, to: &mut Vec<u8>) {
        Name.write(name, to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<String, Malformed> {
        const NONE: [u8; NAME_BYTES] = [0; NAME_BYTES];
        match from.clone().next::<[u8; NAME_BYTES]>()? {
            NONE => from.bytes(NAME_BYTES).map(|_| String::new()),
            _ => Name.read(from),
        }
    }
}

/// Stations behind a bridge.
pub(super) const BEHIND: List = List::set(CHANGES_MAX, 8, "stations behind a bridge");

/// The VLAN may be [`ANY_VLAN`].
impl Wire for Station {
    fn write(&self, to: &mut Vec<u8>) {
        self.vlan.write(to);
        self.mac.write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let (vlan, mac) = (from.next()?, from.next()?);
        let (station, untagged) = (Self { vlan, mac }, Self { vlan: 0, mac });
        match station.is_possible() || (vlan == ANY_VLAN && untagged.is_possible()) {
            true => Ok(station),
            false => Err(Malformed::List(BEHIND.name)),
        }
    }
}

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
