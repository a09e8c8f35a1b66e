//! The roles of lanes. They decide which lane receives another one's frames: between the ends of a cable, from disabled
//! queue pairs, and within a network.
//!
//! A worker computes that each time its lanes change. In a network the address of each frame decides
//! ([`crate::fdb::forwarding`]).

use std::sync::Arc;

use crate::fdb::{PortNumber, UnderlayOf};

/// What a lane serves. A worker finds the target of each lane by the target's role.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant describes its fields")]
pub enum Role {
    /// A queue pair of the port of that name. While it is disabled or not set up, its frames go to the port's first
    /// pair.
    Pair { port: Arc<str>, pair: u16 },
    /// A queue pair of one of the two ends of the cable of that name. Its frames go to the same pair of the other end,
    /// or, if that pair does not receive, to the other end's first pair.
    PatchPort { cable: Arc<str>, end: usize, pair: u16 },
    /// A pair of a port of a network.
    Member {
        network: Arc<str>,
        port: PortNumber,
        pair: u16,
    },
    /// A queue of a network's uplink.
    Uplink { network: Arc<str>, queue: u32 },
    /// A queue of the NIC that carries the tunnels' packets of the uplinks of a network, and of those that share it
    /// ([`Fdb::sharing`](crate::fdb::Fdb::sharing)).
    Underlay { underlay: UnderlayOf, queue: u32 },
    /// The tap of a network's uplink, in tap mode.
    UplinkTap { network: Arc<str> },
    /// The tap between a network and the host.
    Host { network: Arc<str> },
    /// Multicast frames that arrived at a network's uplink.
    Multicast { network: Arc<str> },
}

/// A key of lanes: lanes with the same key must run on the same worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Affinity {
    /// Pairs of the port, or of both ends of the cable, of that name.
    Name(Arc<str>),
    /// Pairs of a port of a network.
    Port(Arc<str>, PortNumber),
}

impl Role {
    /// The key that decides which lanes share a worker with this one; `None`: it may run on any worker. `receives`: the
    /// pair is enabled.
    pub(crate) fn affinity(&self, receives: bool) -> Option<Affinity> {
        match self {
            Self::PatchPort { cable, .. } => Some(Affinity::Name(Arc::clone(cable))),
            Self::Member { network, port, .. } => Some(Affinity::Port(Arc::clone(network), *port)),
            Self::Pair { port, pair } => (*pair == 0 || !receives).then(|| Affinity::Name(Arc::clone(port))),
            Self::Uplink { .. }
            | Self::Underlay { .. }
            | Self::UplinkTap { .. }
            | Self::Host { .. }
            | Self::Multicast { .. } => None,
        }
    }

    /// The pair of a port of a network; 0 for other lanes.
    pub(crate) fn pair(&self) -> u16 {
        match self {
            Self::Member { pair, .. } => *pair,
            _ => 0,
        }
    }

    /// Whether the lane need not be polled while its guest is idle: other lanes deliver its frames.
    #[inline]
    pub(crate) fn may_idle(&self) -> bool {
        matches!(self, Self::Member { .. })
    }

    /// Its network, if it belongs to one.
    pub(crate) fn network(&self) -> Option<&Arc<str>> {
        match self {
            Self::Member { network, .. }
            | Self::Uplink { network, .. }
            | Self::Underlay {
                underlay: UnderlayOf { network, .. },
                ..
            }
            | Self::UplinkTap { network }
            | Self::Host { network }
            | Self::Multicast { network } => Some(network),
            Self::Pair { .. } | Self::PatchPort { .. } => None,
        }
    }

    /// The underlay that it is a queue of.
    pub(crate) fn underlay(&self) -> Option<&UnderlayOf> {
        match self {
            Self::Underlay { underlay, .. } => Some(underlay),
            _ => None,
        }
    }

    /// The roles of the lanes that may receive this lane's frames, the preferred one first. `receives`: the pair is
    /// enabled.
    pub(crate) fn targets(&self, receives: bool) -> [Option<Self>; 2] {
        match self {
            Self::Pair { port, pair: 1.. } if !receives => {
                let port = Arc::clone(port);
                [Some(Self::Pair { port, pair: 0 }), None]
            }
            Self::PatchPort { cable, end, pair } => [*pair, 0].map(|pair| {
                Some(Self::PatchPort {
                    cable: Arc::clone(cable),
                    end: 1 - end,
                    pair,
                })
            }),
            _ => [None, None],
        }
    }
}
