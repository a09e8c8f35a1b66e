//! Which lanes give frames to which: between the guests of a cable, from pairs that are off, and within a network.
//!
//! A worker looks up here, each time its lanes change, which lane receives another one's frames. In a network the
//! address of each frame decides ([`super::forwarding`]).

use std::sync::Arc;

use super::fdb::PortNumber;

/// What a lane is for: a worker finds the target of another lane by it ([`super::lane::RxTarget`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// A pair of a port of that name. What arrives for it while it is off or not set up goes to the port's first.
    Pair { port: Arc<str>, pair: u16 },
    /// A pair of one of the two ends of a cable of that name. Its frames go to the same pair of the other end, or where
    /// that does not receive to its first.
    PatchPort { cable: Arc<str>, end: usize, pair: u16 },
    /// A pair of a port of a network.
    Member {
        network: Arc<str>,
        port: PortNumber,
        pair: u16,
    },
    /// A queue of a network's uplink.
    Uplink { network: Arc<str>, queue: u32 },
    /// The tap of a network's uplink, in tap mode.
    UplinkTap { network: Arc<str> },
    /// The way to the host of a network's uplink.
    Host { network: Arc<str> },
    /// Multicast frames that arrived at a network's uplink.
    Multicast { network: Arc<str> },
    /// A link to the worker of that number, for frames of a network ([`super::link`]).
    LinkTo { network: Arc<str>, worker: usize },
    /// A link from it.
    LinkFrom { network: Arc<str>, worker: usize },
}

/// What lanes that must share a worker have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Affinity {
    Name(Arc<str>),
    /// Pairs of a port of a network.
    Port(Arc<str>, PortNumber),
}

impl Role {
    /// What the lanes that must share a worker have in common; `None`: any worker will do. `receives`: the pair is on.
    pub(super) fn affinity(&self, receives: bool) -> Option<Affinity> {
        match self {
            Self::PatchPort { cable, .. } => Some(Affinity::Name(Arc::clone(cable))),
            Self::Member { network, port, .. } => Some(Affinity::Port(Arc::clone(network), *port)),
            Self::Pair { port, pair } => (*pair == 0 || !receives).then(|| Affinity::Name(Arc::clone(port))),
            Self::Uplink { .. }
            | Self::UplinkTap { .. }
            | Self::Host { .. }
            | Self::Multicast { .. }
            | Self::LinkTo { .. }
            | Self::LinkFrom { .. } => None,
        }
    }

    /// The order in which the lanes of a network are listed: by port and pair.
    pub(super) fn order(&self) -> (u16, u16) {
        match self {
            Self::Member { port, pair, .. } => (port.0, *pair),
            _ => (0, 0),
        }
    }

    /// Whether the lane need not be polled while its guest is idle: other lanes deliver its frames.
    #[inline]
    pub(super) fn may_idle(&self) -> bool {
        matches!(
            self,
            Self::Member { .. } | Self::LinkTo { .. } | Self::LinkFrom { .. }
        )
    }

    /// Its network, if it belongs to one.
    pub(super) fn network(&self) -> Option<&Arc<str>> {
        match self {
            Self::Member { network, .. }
            | Self::Uplink { network, .. }
            | Self::UplinkTap { network }
            | Self::Host { network }
            | Self::Multicast { network }
            | Self::LinkTo { network, .. }
            | Self::LinkFrom { network, .. } => Some(network),
            Self::Pair { .. } | Self::PatchPort { .. } => None,
        }
    }

    /// The roles that receive the lane's frames for others, the first choice first. `receives`: the pair is on.
    pub(super) fn targets(&self, receives: bool) -> [Option<Self>; 2] {
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
