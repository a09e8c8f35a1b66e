//! Events of a daemon: guests that connected and disconnected, links, queues that could not be set up, ports that were
//! added, changed and removed.
//!
//! A [`Ring`] keeps a number of events ([`KEPT`]). When it is full, the port or network with most events loses its
//! oldest one: a port whose VMM connects and disconnects without end displaces its own events and no others.

use std::collections::{BTreeMap, VecDeque};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of events that are kept.
pub const KEPT: usize = 1024;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum What {
    /// A VMM has connected.
    Connected,
    /// The session of a VMM is over; why.
    Closed,
    /// The link of the interface is up.
    LinkUp,
    /// The link of the interface is down.
    LinkDown,
    /// No frames move although they should; why.
    Impaired,
    /// Frames move again.
    Recovered,
    /// A port has more frames than its limit allows; in which direction.
    LimitReached,
    /// Learned addresses of a network were evicted for others; which.
    AddressEvicted,
    /// A port was added.
    Added,
    /// Options of a port changed; which.
    Changed,
    /// A port was removed; why.
    Removed,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Counts from 1, since the start of the daemon.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub unix_ms: u64,
    /// The port that it is about; none: it is about a network.
    pub port: Option<String>,
    /// The network that it is about.
    pub network: Option<String>,
    /// What happened.
    pub event: What,
    /// Stable name of the reason, where there is one.
    pub reason: Option<String>,
    /// Details, in words.
    pub detail: Option<String>,
}

/// Events after the last one that a client has read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Number of events before these that are not kept any more.
    pub lost: u64,
    /// In order.
    pub events: Vec<Event>,
}

/// The port or the network that an event is about.
type Owner = (Option<String>, Option<String>);

/// The newest events of each port and network.
#[derive(Debug, Default)]
pub struct Ring {
    /// Sequence of the newest one; 0 before the first.
    newest: u64,
    kept: VecDeque<Event>,
    /// How many are kept of each.
    counts: BTreeMap<Owner, usize>,
}

impl Ring {
    /// An empty ring.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            newest: 0,
            kept: VecDeque::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Adds an event that is newer than all others.
    pub fn push(&mut self, event: Event) {
        self.newest = event.sequence;
        if self.kept.len() == KEPT {
            self.displace();
        }
        *self.counts.entry(owner(&event)).or_default() += 1;
        self.kept.push_back(event);
    }

    /// Drops the oldest event of the port or network that has most events.
    fn displace(&mut self) {
        let most = self.counts.values().copied().max();
        let has_most = |event: &Event| self.counts.get(&owner(event)).copied() == most;
        let oldest = self.kept.iter().position(has_most).unwrap_or(0);
        let Some(dropped) = self.kept.remove(oldest) else {
            return;
        };
        let its = owner(&dropped);
        match self.counts.get_mut(&its) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.counts.remove(&its)),
        }
    }

    /// Events after that sequence number.
    #[must_use]
    pub fn after(&self, sequence: u64) -> Read {
        let newer = self.kept.iter().filter(|event| event.sequence > sequence);
        let events: Vec<Event> = newer.cloned().collect();
        let missed = self.newest.saturating_sub(sequence);
        Read {
            lost: missed.saturating_sub(events.len() as u64),
            events,
        }
    }

    /// Sequence number of the newest one; 0 before the first.
    #[must_use]
    pub fn newest(&self) -> u64 {
        self.newest
    }
}

fn owner(event: &Event) -> Owner {
    (event.port.clone(), event.network.clone())
}
