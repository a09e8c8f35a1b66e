//! Stations of a network: changes that a lessee requests.

use std::collections::BTreeSet;

use super::wire::{Body, Codec, List, Wire};
use super::{CHANGES_MAX, Malformed};
use steer::Station;

/// A change of a network's station: its new port, or its removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StationChange {
    /// The destination of frames.
    pub station: Station,
    /// Port number that precedes its frames, not [`u32::MAX`]; `None`: its frames go to the host.
    pub port: Option<u32>,
}

/// Stands for no port.
const NO_PORT: u32 = u32::MAX;

impl Wire for StationChange {
    fn write(&self, to: &mut Vec<u8>) {
        self.station.write(to);
        self.port.unwrap_or(NO_PORT).write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let station = Station {
            vlan: from.next()?,
            mac: from.next()?,
        };
        let port = from.next()?;
        match station.is_possible() && station.mac != [0; 6] {
            true => Ok(Self {
                station,
                port: (port != NO_PORT).then_some(port),
            }),
            false => Err(Malformed::List("stations")),
        }
    }
}

/// Changes of one message.
pub(super) struct Changes;

const CHANGES: List = List::new(CHANGES_MAX, 12, "stations").filled();

impl Codec<Vec<StationChange>> for Changes {
    fn write(&self, changes: &Vec<StationChange>, to: &mut Vec<u8>) {
        CHANGES.write(changes, to);
    }

    fn read(&self, from: &mut Body<'_>) -> Result<Vec<StationChange>, Malformed> {
        let changes: Vec<StationChange> = CHANGES.read(from)?;
        let stations: BTreeSet<Station> = changes.iter().map(|change| change.station).collect();
        match stations.len() < changes.len() {
            true => Err(Malformed::List(CHANGES.name)),
            false => Ok(changes),
        }
    }
}
