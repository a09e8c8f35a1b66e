//! Which lanes give frames to which: between the guests of a cable, and from pairs that are off.
//!
//! The place for a table that decides by a frame's address: a worker asks here, each time its lanes change, who takes
//! the frames that a lane has for others.

use std::sync::Arc;

/// What a lane is to others: by this a worker finds the guest that a lane gives frames to ([`super::lane::Peer`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// A pair of a port of that name. What arrives for it while it is off goes to the port's first.
    Pair { port: Arc<str>, pair: u16 },
    /// A pair of one of the two ends of a cable of that name. Its frames go to the same pair of the other end, or where
    /// that does not receive to its first.
    CableEnd { cable: Arc<str>, end: usize, pair: u16 },
}

impl Role {
    /// What the lanes that must share a worker have in common; `None`: any worker will do. `receives`: the pair is on.
    pub(super) fn group(&self, receives: bool) -> Option<&Arc<str>> {
        match self {
            Self::CableEnd { cable, .. } => Some(cable),
            Self::Pair { port, pair } => (*pair == 0 || !receives).then_some(port),
        }
    }

    /// Who takes the frames that the lane has for others, the first choice first. `receives`: the pair is on.
    pub(super) fn peers(&self, receives: bool) -> [Option<Self>; 2] {
        match self {
            Self::Pair { port, pair: 1.. } if !receives => {
                let port = Arc::clone(port);
                [Some(Self::Pair { port, pair: 0 }), None]
            }
            Self::Pair { .. } => [None, None],
            Self::CableEnd { cable, end, pair } => [*pair, 0].map(|pair| {
                Some(Self::CableEnd {
                    cable: Arc::clone(cable),
                    end: 1 - end,
                    pair,
                })
            }),
        }
    }
}
