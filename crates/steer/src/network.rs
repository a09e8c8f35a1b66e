//! A program's state of networks: their addresses, their rings, their limits (see `bpf/steer.h`).

use anyhow::{Context as _, ensure};
use libbpf_rs::MapHandle;
use xsk::metadata::{Field, Layout};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::layout::{Filter, LAST_VLAN, MAX_QUEUES, MAX_STATIONS, Station};
use crate::map;
use crate::shape::Shape;
use crate::tunnel::Tunnels;

/// Bytes of the note before a frame in a network's socket; `STEER_NOTE_LEN`.
pub const NOTE_BYTES: usize = 8;
/// `STEER_NOTE_MARK`
const NOTE_MARK: u32 = 0x6574_6f6e;

/// VLAN of a [`Station`] behind a bridge without VLAN filtering: any tag, or none.
pub const ANY_VLAN: u16 = u16::MAX;

impl Filter {
    /// Its addresses, each in each of its VLANs, or untagged if it names none.
    pub fn stations(&self) -> impl Iterator<Item = Station> {
        let vlans = match self.vlans.is_empty() {
            true => &[0][..],
            false => &self.vlans[..],
        };
        let of_mac = move |&mac: &[u8; 6]| vlans.iter().map(move |&vlan| Station { vlan, mac });
        self.macs.iter().flat_map(of_mac)
    }
}

/// The port and network of an address; `struct steer_member`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Member {
    port: u32,
    network: u32,
}

/// How many multicast frames (broadcast included) each CPU copies into a network's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MulticastLimit {
    /// Frames per second; 0: no limit.
    pub a_second: u32,
    /// Burst after a pause, in frames; at least 1.
    pub burst: u32,
}

impl Default for MulticastLimit {
    /// Far more than a quiet network needs, at the cost of a few per cent of a CPU.
    fn default() -> Self {
        Self {
            a_second: 10_000,
            burst: 1_000,
        }
    }
}

impl MulticastLimit {
    /// `struct steer_limit`
    pub(crate) fn value(self) -> [u64; 2] {
        let each_ns = match self.a_second {
            0 => 0,
            a_second => 1_000_000_000 / u64::from(a_second),
        };
        // One frame is always allowed.
        [each_ns, each_ns * u64::from(self.burst.saturating_sub(1))]
    }
}

/// Port of the station that a frame in a network's socket is for, from the [`NOTE_BYTES`] before it. `None`:
/// the driver leaves no room for them; use the frame's own address.
///
/// Without a note, older bytes remain in that place. So the last four of these bytes must be zero when the
/// kernel gets the buffer.
#[must_use]
pub fn noted_port(note: [u8; NOTE_BYTES]) -> Option<u32> {
    let [a, b, c, d, mark @ ..] = note;
    (u32::from_ne_bytes(mark) == NOTE_MARK).then(|| u32::from_ne_bytes([a, b, c, d]))
}

/// The note as a structure with an id, like those of hints: a reader of hints in a network's socket uses this
/// layout to read the notes of a program without hints ([`xsk::metadata`]).
#[must_use]
pub fn note_layout() -> Layout {
    let fields = [(Field::Port, 0)];
    Layout::new(NOTE_MARK, NOTE_BYTES as u8, &fields).expect("four bytes before the mark")
}

fn text(Station { vlan, mac }: Station) -> String {
    format!("{} in VLAN {vlan}", crate::mac_text(mac))
}

/// The maps of networks.
#[derive(Debug)]
pub(crate) struct NetworkMaps {
    pub(crate) stations: MapHandle,
    pub(crate) rings: MapHandle,
    pub(crate) limits: MapHandle,
    pub(crate) tunnels: Tunnels,
}

impl NetworkMaps {
    pub(crate) const STATIONS: Shape = Shape {
        name: "stations",
        kind: libbpf_rs::MapType::Hash,
        key_bytes: size_of::<Station>() as u32,
        value_bytes: size_of::<Member>() as u32,
        entries: MAX_STATIONS,
    };
    pub(crate) const RINGS: Shape = Shape {
        name: "rings",
        kind: libbpf_rs::MapType::ArrayOfMaps,
        key_bytes: 4,
        value_bytes: 4,
        entries: MAX_QUEUES,
    };
    pub(crate) const LIMITS: Shape = Shape {
        name: "limits",
        kind: libbpf_rs::MapType::Array,
        key_bytes: 4,
        value_bytes: size_of::<[u64; 2]>() as u32,
        entries: MAX_QUEUES,
    };

    /// `has_tunnel`: the network's stations are those of a tunnel.
    pub(crate) fn set_station(
        &self,
        (network, has_tunnel): (u32, bool),
        station: Station,
        port: u32,
    ) -> anyhow::Result<()> {
        ensure!(
            station.is_possible(),
            "{} is no valid station: the address is multicast, or the VLAN above {LAST_VLAN}",
            text(station)
        );
        // The usual cause: the map has no room for more stations.
        let refused = || format!("cannot set {}", text(station));
        if has_tunnel {
            let set = self.tunnels.set_station(network, station, Some(port));
            return set.with_context(refused);
        }
        let before = self.member(station).with_context(refused)?;
        ensure!(
            before.is_none_or(|member| member.network == network),
            "another network of this interface has {}",
            text(station)
        );
        let member = Member { port, network };
        map::set(&self.stations, &station, &member).with_context(refused)
    }

    /// Removes it from the network and its tunnel.
    pub(crate) fn remove_station(&self, network: u32, station: Station) -> libbpf_rs::Result<()> {
        self.tunnels.set_station(network, station, None)?;
        match self.member(station)? {
            Some(member) if member.network == network => map::remove(&self.stations, &station).map(drop),
            _ => Ok(()),
        }
    }

    /// All stations with port and network, in order.
    pub(crate) fn all_stations(&self) -> Vec<(Station, u32, u32)> {
        let mut all: Vec<(Station, u32, u32)> = map::keys(&self.stations)
            .filter_map(|station| {
                let member = self.member(station).ok().flatten()?;
                Some((station, member.port, member.network))
            })
            .collect();
        all.extend(self.tunnels.all_stations());
        all.sort_unstable();
        all
    }

    fn member(&self, station: Station) -> libbpf_rs::Result<Option<Member>> {
        map::get(&self.stations, &station)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stations_and_members_are_laid_out_as_steer_h_says() {
        let station = Station {
            vlan: 0x0102,
            mac: [2, 3, 4, 5, 6, 7],
        };
        assert_eq!(station.as_bytes()[..2], 0x0102u16.to_ne_bytes());
        assert_eq!(station.as_bytes()[2..], station.mac);
        let member = Member {
            port: 0x0102_0304,
            network: 9,
        };
        assert_eq!(member.as_bytes()[..4], 0x0102_0304u32.to_ne_bytes());
    }

    #[test]
    fn groups_and_vlans_that_there_are_not_are_no_stations() {
        let possible = |vlan, first| {
            let mac = [first, 0, 0, 0, 0, 1];
            Station { vlan, mac }.is_possible()
        };
        assert!(possible(0, 2) && possible(LAST_VLAN, 0));
        assert!(!possible(4095, 2) && !possible(0, 3) && !possible(0, 0xff));
    }

    #[test]
    fn stations_of_a_filter_are_its_addresses_in_its_vlans() {
        let stations = |macs: &[[u8; 6]], vlans: &[u16]| {
            let (macs, vlans) = (macs.to_vec(), vlans.to_vec());
            let stations = Filter { macs, vlans }.stations().collect::<Vec<_>>();
            stations
                .into_iter()
                .map(|its| (its.vlan, its.mac[5]))
                .collect::<Vec<_>>()
        };
        let macs = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
        assert_eq!(stations(&macs, &[5, 6]), [(5, 1), (6, 1), (5, 2), (6, 2)]);
        assert_eq!(stations(&macs[..1], &[]), [(0, 1)]);
        assert_eq!(stations(&[], &[5]), []);
    }

    #[test]
    fn limit_is_a_time_between_frames() {
        let value = |a_second, burst| MulticastLimit { a_second, burst }.value();
        assert_eq!(value(10_000, 1_000), [100_000, 99_900_000]);
        assert_eq!(value(1, 1), [1_000_000_000, 0]);
        assert_eq!(value(5, 0), [200_000_000, 0]);
        assert_eq!(value(0, 7), [0, 0]);
        assert_eq!(value(u32::MAX, u32::MAX), [0, 0]);
    }

    #[test]
    fn note_counts_only_with_its_mark() {
        let mut note = [0; NOTE_BYTES];
        note[..4].copy_from_slice(&7u32.to_ne_bytes());
        assert_eq!(noted_port(note), None);
        note[4..].copy_from_slice(&NOTE_MARK.to_ne_bytes());
        assert_eq!(noted_port(note), Some(7));
    }
}
