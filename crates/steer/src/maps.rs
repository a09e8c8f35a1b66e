//! The maps of a program, with those of its networks: how they are found, loaded, pinned and passed on.

use libbpf_rs::{MapHandle, MapType};

use crate::layout::{Entry, MAX_ENTRIES, MAX_QUEUES, QueueCounters};
use crate::network::NetworkMaps;
use crate::shape::Shape;
use crate::tunnel::Tunnels;

/// Handles of the maps. They outlive the skeleton that loaded them.
#[derive(Debug)]
pub(crate) struct Maps {
    pub(crate) queues: MapHandle,
    pub(crate) sockets: MapHandle,
    /// The socket maps of single queues.
    pub(crate) own: MapHandle,
    pub(crate) entries: MapHandle,
    pub(crate) counts: MapHandle,
    pub(crate) networks: NetworkMaps,
}

impl Maps {
    /// Finds each by its shape.
    pub(crate) fn each<E>(map: impl Fn(Shape) -> Result<MapHandle, E>) -> Result<Self, E> {
        Ok(Self {
            queues: map(QUEUES)?,
            sockets: map(SOCKETS)?,
            own: map(OWN)?,
            entries: map(ENTRIES)?,
            counts: map(COUNTS)?,
            networks: NetworkMaps {
                stations: map(NetworkMaps::STATIONS)?,
                rings: map(NetworkMaps::RINGS)?,
                limits: map(NetworkMaps::LIMITS)?,
                tunnels: Tunnels {
                    tunnels: map(Tunnels::TUNNELS)?,
                    vteps: map(Tunnels::VTEPS)?,
                    inner: map(Tunnels::INNER)?,
                },
            },
        })
    }

    /// All of them.
    pub(crate) fn all(&self) -> [(Shape, &MapHandle); 11] {
        let NetworkMaps {
            stations,
            rings,
            limits,
            tunnels,
        } = &self.networks;
        [
            (QUEUES, &self.queues),
            (SOCKETS, &self.sockets),
            (OWN, &self.own),
            (ENTRIES, &self.entries),
            (COUNTS, &self.counts),
            (NetworkMaps::STATIONS, stations),
            (NetworkMaps::RINGS, rings),
            (NetworkMaps::LIMITS, limits),
            (Tunnels::TUNNELS, &tunnels.tunnels),
            (Tunnels::VTEPS, &tunnels.vteps),
            (Tunnels::INNER, &tunnels.inner),
        ]
    }
}

pub(crate) const QUEUES: Shape = Shape {
    name: "queues",
    kind: MapType::Array,
    key_bytes: 4,
    value_bytes: 8,
    entries: MAX_QUEUES,
};
const SOCKETS: Shape = Shape {
    name: "sockets",
    kind: MapType::Xskmap,
    key_bytes: 4,
    value_bytes: 4,
    entries: 2 * MAX_QUEUES,
};
const OWN: Shape = Shape {
    name: "own",
    kind: MapType::ArrayOfMaps,
    key_bytes: 4,
    value_bytes: 4,
    entries: MAX_QUEUES,
};
const ENTRIES: Shape = Shape {
    name: "entries",
    kind: MapType::Hash,
    key_bytes: size_of::<Entry>() as u32,
    value_bytes: 1,
    entries: MAX_ENTRIES,
};
const COUNTS: Shape = Shape {
    name: "counts",
    kind: MapType::PercpuArray,
    key_bytes: 4,
    value_bytes: size_of::<QueueCounters>() as u32,
    entries: MAX_QUEUES,
};
