//! Names inboxes of an uplink's queue by their indices.

/// Where the current frame goes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Route {
    /// To the inbox at that index.
    Inbox(usize),
    Multicast,
    NoPort,
    /// To nobody, and it is counted already.
    Dropped,
}

/// Indices of a port's inboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum InboxIndex {
    /// It has no guest.
    #[default]
    None,
    /// One pair receives.
    One(usize),
    /// Several do: an inbox for each, side by side.
    Several { first: usize, count: usize },
}

impl InboxIndex {
    /// With another inbox of the port, at the next index.
    pub(super) fn and(self, at: usize) -> Self {
        match self {
            Self::None => Self::One(at),
            Self::One(first) => Self::Several { first, count: 2 },
            Self::Several { first, count } => Self::Several {
                first,
                count: count + 1,
            },
        }
    }

    /// The inbox of the first pair.
    pub(super) fn first(self) -> Option<usize> {
        match self {
            Self::None => None,
            Self::One(at) | Self::Several { first: at, .. } => Some(at),
        }
    }
}
