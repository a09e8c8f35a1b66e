//! What happened to ports and networks, in order: guests that came and went, links, queues that could not be set up;
//! ports that were added, changed and removed.
//!
//! It keeps a number of entries ([`KEPT`]). When there is no room, the port or network with most entries loses its
//! oldest one: a port whose VMM comes and goes without end displaces its own entries and no others.
//!
//! The journal is the daemon's only one. Each turn of a port writes what differs between the picture that it
//! [shows](crate::port::shown) and the one before. Others read from a place of theirs on, and wait for more; who reads too
//! slowly loses the oldest entries and is told how many. Nobody who writes waits for a reader.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Entries that are kept.
const KEPT: usize = 1024;

/// What is going on, for all who ask.
pub(crate) static JOURNAL: Journal = Journal::new();

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    /// A VMM has connected.
    Connected,
    /// Its session is over; why.
    Closed,
    /// The interface's link is up, or is down.
    LinkUp,
    LinkDown,
    /// No frames move although they should; why.
    Impaired,
    /// They do again.
    Recovered,
    /// It has more frames than its limit allows; which direction.
    LimitReached,
    /// Learned addresses of a network made room for others; which.
    AddressEvicted,
    /// There is one more port; it is said otherwise; it is gone. Why, in words.
    Added,
    Changed,
    Removed,
}

/// Of what something is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of<'a> {
    Port(&'a str),
    Network(&'a str),
}

impl<'a> Of<'a> {
    fn port(self) -> Option<&'a str> {
        match self {
            Self::Port(name) => Some(name),
            Self::Network(_) => None,
        }
    }

    fn network(self) -> Option<&'a str> {
        match self {
            Self::Network(name) => Some(name),
            Self::Port(_) => None,
        }
    }
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    /// From 1 on, since the start of the daemon; without gaps as long as none was displaced.
    pub(crate) sequence: u64,
    /// Milliseconds since 1970.
    pub(crate) unix_ms: u64,
    /// Of the one or of the other.
    pub(crate) port: Option<String>,
    pub(crate) network: Option<String>,
    pub(crate) event: What,
    /// Stable name of the reason, where there is one.
    pub(crate) reason: Option<String>,
    /// In words.
    pub(crate) detail: Option<String>,
}

/// What a reader gets.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    /// Entries that are not kept any more, before these.
    pub(crate) lost: u64,
    pub(crate) events: Vec<Event>,
}

/// The port or the network that an event is about.
type Owner = (Option<String>, Option<String>);

/// The newest events of each port and network.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Sequence of the newest one; 0 before the first.
    newest: u64,
    kept: VecDeque<Event>,
    /// How many are kept of each.
    counts: BTreeMap<Owner, usize>,
}

impl Ring {
    pub(crate) const fn new() -> Self {
        Self {
            newest: 0,
            kept: VecDeque::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Takes one in that is newer than all.
    pub(crate) fn push(&mut self, event: Event) {
        self.newest = event.sequence;
        if self.kept.len() == KEPT {
            self.displace();
        }
        *self.counts.entry(owner(&event)).or_default() += 1;
        self.kept.push_back(event);
    }

    /// Drops the oldest one of those of which most are kept.
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

    /// Those after this one.
    pub(crate) fn after(&self, sequence: u64) -> Read {
        let newer = self.kept.iter().filter(|event| event.sequence > sequence);
        let events: Vec<Event> = newer.cloned().collect();
        let missed = self.newest.saturating_sub(sequence);
        Read {
            lost: missed.saturating_sub(events.len() as u64),
            events,
        }
    }

    /// Sequence of the newest one; 0 before the first.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }
}

fn owner(event: &Event) -> Owner {
    (event.port.clone(), event.network.clone())
}

/// See the module's head.
pub(crate) struct Journal {
    ring: Mutex<Ring>,
    more: Condvar,
}

impl Journal {
    pub(crate) const fn new() -> Self {
        Self {
            ring: Mutex::new(Ring::new()),
            more: Condvar::new(),
        }
    }

    /// Notes what no port shows.
    pub(crate) fn tell(&self, of: Of<'_>, event: What, detail: Option<String>) {
        self.add(of, event, None, detail);
    }

    pub(crate) fn add(&self, of: Of<'_>, event: What, reason: Option<String>, detail: Option<String>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_ms = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0));
        let mut ring = self.ring();
        let sequence = ring.newest + 1;
        ring.push(Event {
            sequence,
            unix_ms,
            port: of.port().map(str::to_owned),
            network: of.network().map(str::to_owned),
            event,
            reason,
            detail,
        });
        drop(ring);
        self.more.notify_all();
    }

    /// Waits for what comes after this entry, until `over` says, which is asked after each [`wake`](Self::wake).
    pub(crate) fn read_after(&self, sequence: u64, over: impl Fn() -> bool) -> Option<Read> {
        let mut ring = self.ring();
        loop {
            if over() {
                return None;
            }
            let read = ring.after(sequence);
            if !read.events.is_empty() {
                return Some(read);
            }
            ring = self.more.wait(ring).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets all who wait look whether they are to go on.
    pub(crate) fn wake(&self) {
        // Under the lock: who has just looked waits by now.
        let _ring = self.ring();
        self.more.notify_all();
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_reader_is_told_how_many_it_lost() {
        let journal = Journal::new();
        let kept = u64::try_from(KEPT).expect("small");
        for _ in 0..kept + 10 {
            journal.add(Of::Port("vm1"), What::Connected, None, None);
        }
        let read = journal.read_after(3, || false).expect("there is more");
        assert_eq!((read.lost, read.events.len()), (7, KEPT));
        assert_eq!(read.events[0].sequence, 11);
        let read = journal.read_after(kept + 9, || false).expect("one more");
        assert_eq!((read.lost, read.events.len()), (0, 1));
        assert_eq!(journal.read_after(kept + 10, || true), None, "who is to end does");
    }

    #[test]
    fn port_that_comes_and_goes_without_end_displaces_its_own_events_only() {
        let journal = Journal::new();
        let add = |of, times| (0..times).for_each(|_| journal.add(of, What::Connected, None, None));
        add(Of::Port("vm1"), 3);
        add(Of::Network("vm9"), 2);
        add(Of::Port("vm9"), 10 * KEPT);
        add(Of::Port("vm2"), 4);
        add(Of::Port("vm9"), KEPT);
        let read = journal.read_after(0, || false).expect("there are some");
        let of = |port: &str| {
            let its = |event: &&Event| event.port.as_deref() == Some(port);
            read.events.iter().filter(its).count()
        };
        assert_eq!((of("vm1"), of("vm2"), of("vm9")), (3, 4, KEPT - 9));
        assert_eq!(read.lost as usize, 11 * KEPT + 9 - KEPT);
        let newest = read.events.last().map(|event| event.sequence);
        assert_eq!(newest, Some(read.lost + KEPT as u64), "the newest are kept");
        // Two that flood have half each.
        add(Of::Port("vm8"), 10 * KEPT);
        let read = journal.read_after(0, || false).expect("there are some");
        let flood = read
            .events
            .iter()
            .filter(|event| event.port.as_deref() == Some("vm8"));
        assert_eq!(flood.count(), (KEPT - 9).div_ceil(2));
    }
}
