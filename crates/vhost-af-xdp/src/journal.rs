//! The daemon's only journal of events ([`Ring`]).
//!
//! A thread that releases a port's lock records the differences between the snapshot that it publishes and the one
//! before ([`crate::port::snapshot`]).
//! Readers start after an event that they know, and wait for more; a slow reader loses the oldest events and receives
//! their number. Writers never wait for readers.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use model::events::{Event, Read, Ring, What};

use common::lock::Locked;

/// The events of this process.
pub(crate) static JOURNAL: Journal = Journal::new();

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject<'a> {
    Port(&'a str),
    Network(&'a str),
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

    /// Records an event that does not follow from a port's snapshot.
    pub(crate) fn record(&self, of: Subject<'_>, event: What, detail: Option<String>) {
        self.add(of, event, None, detail);
    }

    pub(crate) fn add(&self, of: Subject<'_>, event: What, reason: Option<String>, detail: Option<String>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_ms = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0));
        let (port, network) = match of {
            Subject::Port(name) => (Some(name.to_owned()), None),
            Subject::Network(name) => (None, Some(name.to_owned())),
        };
        let mut ring = self.ring.locked();
        let sequence = ring.newest() + 1;
        ring.push(Event {
            sequence,
            unix_ms,
            port,
            network,
            event,
            reason,
            detail,
        });
        drop(ring);
        self.more.notify_all();
    }

    /// Events after that sequence number, and the number to wait after. A number that is higher than all is from an
    /// earlier daemon: this one began with 1 again.
    pub(crate) fn read(&self, sequence: u64) -> (u64, Read) {
        let ring = self.ring.locked();
        let sequence = if sequence > ring.newest() { 0 } else { sequence };
        (sequence, ring.after(sequence))
    }

    /// Waits for events after that sequence number; `None`: there were none in time.
    pub(crate) fn wait(&self, sequence: u64, time: Duration) -> Option<Read> {
        let waits = |ring: &mut Ring| ring.newest() <= sequence;
        let waited = self.more.wait_timeout_while(self.ring.locked(), time, waits);
        let (ring, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Some(ring.after(sequence)).filter(|read| !read.events.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use model::events::KEPT;

    use super::*;

    #[test]
    fn slow_reader_is_told_how_many_it_lost() {
        let journal = Journal::new();
        let kept = u64::try_from(KEPT).expect("small");
        for _ in 0..kept + 10 {
            journal.add(Subject::Port("vm1"), What::Connected, None, None);
        }
        let read = journal.read(3).1;
        assert_eq!((read.lost, read.events.len()), (7, KEPT));
        assert_eq!(read.events[0].sequence, 11);
        let read = journal.read(kept + 9).1;
        assert_eq!((read.lost, read.events.len()), (0, 1));
        assert_eq!(journal.wait(kept + 10, Duration::ZERO), None);
        assert_eq!(
            journal
                .wait(kept + 9, Duration::MAX)
                .map(|read| read.events.len()),
            Some(1)
        );
        assert_eq!(journal.read(kept + 11).0, 0, "of a daemon before this one");
    }

    #[test]
    fn port_that_comes_and_goes_without_end_displaces_its_own_events_only() {
        let journal = Journal::new();
        let add = |of, times| (0..times).for_each(|_| journal.add(of, What::Connected, None, None));
        add(Subject::Port("vm1"), 3);
        add(Subject::Network("vm9"), 2);
        add(Subject::Port("vm9"), 10 * KEPT);
        add(Subject::Port("vm2"), 4);
        add(Subject::Port("vm9"), KEPT);
        let read = journal.read(0).1;
        let of = |port: &str| {
            let its = |event: &&Event| event.port.as_deref() == Some(port);
            read.events.iter().filter(its).count()
        };
        assert_eq!((of("vm1"), of("vm2"), of("vm9")), (3, 4, KEPT - 9));
        assert_eq!(read.lost as usize, 11 * KEPT + 9 - KEPT);
        let newest = read.events.last().map(|event| event.sequence);
        assert_eq!(newest, Some(read.lost + KEPT as u64), "the newest are kept");
        // Two that flood have half each.
        add(Subject::Port("vm8"), 10 * KEPT);
        let read = journal.read(0).1;
        let flood = read
            .events
            .iter()
            .filter(|event| event.port.as_deref() == Some("vm8"));
        assert_eq!(flood.count(), (KEPT - 9).div_ceil(2));
    }
}
