//! Where frames that came by an uplink's queue wait, by places of inboxes.

/// Where a frame in hand goes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Route {
    /// To an inbox, by its place.
    Inbox(usize),
    /// The same, to that of a link: to a port of another worker.
    Link(usize),
    Multicast,
    Nobody,
    /// The same, and it is counted already.
    Lost,
}

/// Where the inboxes of a port are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum InboxIndex {
    /// It has no guest.
    #[default]
    None,
    /// One pair receives.
    One(usize),
    /// Several do: an inbox for each, side by side.
    Several { first: usize, count: usize },
    /// Its guest is another worker's: the link there has one, for all of its ports.
    Link(usize),
}

impl InboxIndex {
    /// With another inbox, the last one so far.
    pub(super) fn and(self, at: usize) -> Self {
        match self {
            Self::None | Self::Link(_) => Self::One(at),
            Self::One(first) => Self::Several { first, count: 2 },
            Self::Several { first, count } => Self::Several {
                first,
                count: count + 1,
            },
        }
    }

    /// That of the first pair.
    pub(super) fn first(self) -> Option<usize> {
        match self {
            Self::None => None,
            Self::One(at) | Self::Several { first: at, .. } | Self::Link(at) => Some(at),
        }
    }
}
