//! Stations of a network: what a lessee says of them.

use steer::Station;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::field::value;
use super::{CHANGES_MAX, Malformed};

/// One station of a network is another one's from now on, or nobody's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StationChange {
    /// Who frames are for.
    pub station: Station,
    /// Number that comes before its frames, not [`u32::MAX`]; `None`: its frames go to the host.
    pub port: Option<u32>,
}

/// In the place of a port's number: none.
const NO_PORT: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ChangeBody {
    vlan: u16,
    mac: [u8; 6],
    port: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StationsBody {
    count: u32,
    changes: [ChangeBody; CHANGES_MAX],
}

const _: () = assert!(size_of::<StationsBody>() == 772);

pub(super) fn body(changes: &[StationChange]) -> StationsBody {
    let bodies: Vec<ChangeBody> = changes
        .iter()
        .map(|change| ChangeBody {
            vlan: change.station.vlan,
            mac: change.station.mac,
            port: change.port.unwrap_or(NO_PORT),
        })
        .collect();
    StationsBody {
        count: changes.len().try_into().unwrap_or(u32::MAX),
        changes: super::padded(&bodies),
    }
}

pub(super) fn read(body: &StationsBody) -> Result<Vec<StationChange>, Malformed> {
    let count = usize::try_from(body.count).unwrap_or(usize::MAX);
    if !(1..=CHANGES_MAX).contains(&count) {
        return Err(value("number of stations", body.count));
    }
    let (bodies, rest) = body.changes.split_at(count);
    if rest.iter().any(|&body| body != ChangeBody::default()) {
        return Err(Malformed::List("stations"));
    }
    let mut changes = Vec::new();
    for body in bodies {
        let station = Station {
            vlan: body.vlan,
            mac: body.mac,
        };
        if !station.is_possible() || station.mac == [0; 6] {
            return Err(Malformed::List("stations"));
        }
        if changes
            .iter()
            .any(|change: &StationChange| change.station == station)
        {
            return Err(Malformed::List("stations"));
        }
        let port = (body.port != NO_PORT).then_some(body.port);
        changes.push(StationChange { station, port });
    }
    Ok(changes)
}
