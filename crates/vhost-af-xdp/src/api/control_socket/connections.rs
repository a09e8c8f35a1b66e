//! Connections to one socket, or from the gateway: there are few, and each has a thread.
//!
//! When all places are taken, a new connection closes the oldest one that has no request in progress. So clients that
//! send nothing, or an incomplete line, cannot keep others out, and the number of threads is limited.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use common::lock::Locked;

struct Open {
    stream: Arc<UnixStream>,
    /// A request is in progress.
    is_busy: bool,
    /// The request is a change, which may take long.
    changes: bool,
}

/// See the module's head.
pub(crate) struct Connections {
    most: usize,
    /// Open connections by number: the oldest comes first.
    open: Mutex<BTreeMap<u64, Open>>,
    /// Number of the next connection.
    next: AtomicU64,
}

/// A place among them, until it is dropped.
pub(super) struct Place {
    of: Arc<Connections>,
    number: u64,
    pub(super) stream: Arc<UnixStream>,
}

impl Connections {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            open: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// A place for a connection; `None`: all others have requests in progress.
    pub(super) fn take(self: &Arc<Self>, stream: UnixStream) -> Option<Place> {
        let mut open = self.open();
        if open.len() >= self.most {
            let idle = open
                .iter()
                .find(|(_, open)| !open.is_busy)
                .map(|(number, _)| *number);
            // Its thread sees the end of the connection.
            let _ = open.remove(&idle?)?.stream.shutdown(Shutdown::Both);
        }
        let number = self.next.fetch_add(1, Relaxed);
        let stream = Arc::new(stream);
        let new = Open {
            stream: Arc::clone(&stream),
            is_busy: false,
            changes: false,
        };
        open.insert(number, new);
        let of = Arc::clone(self);
        Some(Place { of, number, stream })
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Open>> {
        self.open.locked()
    }
}

impl Place {
    /// Sets whether a request is in progress.
    pub(super) fn set_busy(&self, is_busy: bool) {
        if let Some(open) = self.of.open().get_mut(&self.number) {
            (open.is_busy, open.changes) = (is_busy, false);
        }
    }

    /// Starts a change, unless `most` are in progress.
    pub(super) fn begin_change(&self, most: usize) -> bool {
        let mut open = self.of.open();
        let may = open.values().filter(|open| open.changes).count() < most;
        if let Some(open) = open.get_mut(&self.number) {
            open.changes = may;
        }
        may
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // `take` may have removed it already, for a newer connection.
        self.of.open().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A connection with its place, and the client's end.
    fn connect(connections: &Arc<Connections>) -> (Option<Place>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        (connections.take(theirs), ours)
    }

    #[test]
    fn oldest_connection_without_a_request_is_closed_for_the_next() {
        let connections = Connections::new(2);
        let [(busy, _busy), (_idle, mut idle)] = [(); 2].map(|()| connect(&connections));
        let busy = busy.expect("a place");
        busy.set_busy(true);
        let (new, _new) = connect(&connections);
        new.expect("a place").set_busy(true);
        assert_eq!(idle.read(&mut [0]).expect("closed"), 0);
        drop(busy);
        assert!(connect(&connections).0.is_some());
    }

    #[test]
    fn no_connection_is_closed_while_its_request_is_under_way() {
        let connections = Connections::new(1);
        let (place, _client) = connect(&connections);
        place.as_ref().expect("a place").set_busy(true);
        assert!(connect(&connections).0.is_none());
        drop(place);
        assert!(connect(&connections).0.is_some());
    }

    #[test]
    fn changes_are_limited() {
        let connections = Connections::new(3);
        let places: Vec<_> = (0..3).filter_map(|_| connect(&connections).0).collect();
        let began: Vec<_> = places.iter().map(|place| place.begin_change(2)).collect();
        assert_eq!(began, [true, true, false]);
        places[0].set_busy(false);
        assert!(places[2].begin_change(2));
    }
}
