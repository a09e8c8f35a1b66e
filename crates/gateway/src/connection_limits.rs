//! Limits the connections of one listening socket, and the bytes of answers that its clients have not read.
//!
//! A client is a user, or an address. The number of places is limited for each client and for all together; some are
//! reserved for root and the socket's owner. A connection is *busy* from the end of a request to
//! the end of its answer; one that waits for events is not. When no place is left, the oldest connection that is not
//! busy is closed: one of the client that has most. So clients that are silent, send slowly or wait for events
//! cannot keep others from being answered.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::task::AbortHandle;

/// Most unread bytes of answers on one socket, and of one client there: a client at its limit gets no further answer
/// until it reads. With a thousand ports an answer has some MiB. As many bytes as one client may have are reserved for
/// root and the owner.
const MOST_BYTES: usize = 64 << 20;
const MOST_BYTES_OF_ONE: usize = 16 << 20;

/// The owner of connections: a user's number, or an address.
pub(super) trait Client: Copy + Eq + Hash + Send + Sync + 'static {}

impl Client for u32 {}
impl Client for IpAddr {}

/// A connection.
#[derive(Debug)]
struct Open<K> {
    client: K,
    is_kept_for: bool,
    is_busy: bool,
    /// Ends it; none until it is served.
    task: Option<AbortHandle>,
}

#[derive(Debug)]
struct Room<K> {
    /// Open connections, oldest first.
    open: BTreeMap<u64, Open<K>>,
    /// Number of the next one.
    next: u64,
    /// Bytes of answers that wait to be read.
    unread: HashMap<K, usize>,
}

/// See the module's head.
#[derive(Clone)]
pub(super) struct ConnectionLimits<K> {
    room: Arc<Mutex<Room<K>>>,
    most: usize,
    most_of_one: usize,
    /// How many of `most` are reserved for root and the owner.
    kept: usize,
}

/// The place of one connection, until it is dropped.
pub(super) struct Place<K: Client> {
    places: ConnectionLimits<K>,
    number: u64,
    client: K,
    is_kept_for: bool,
}

impl<K: Client> Room<K> {
    fn of(&self, client: K) -> usize {
        self.open.values().filter(|open| open.client == client).count()
    }

    /// Closes the oldest connection that is not busy, of the client that has most, among those that match `is_one`.
    fn close_one(&mut self, is_one: impl Fn(&Open<K>) -> bool) -> bool {
        let idle = self.open.iter().filter(|(_, open)| !open.is_busy && is_one(open));
        let oldest = idle.rev().max_by_key(|(_, open)| self.of(open.client));
        let Some(number) = oldest.map(|(&number, _)| number) else {
            return false;
        };
        if let Some(task) = self.open.remove(&number).and_then(|open| open.task) {
            task.abort();
        }
        true
    }
}

impl<K: Client> ConnectionLimits<K> {
    pub(super) fn new(most: usize, most_of_one: usize, kept: usize) -> Self {
        let room = Room {
            open: BTreeMap::new(),
            next: 0,
            unread: HashMap::new(),
        };
        Self {
            room: Arc::new(Mutex::new(room)),
            most,
            most_of_one,
            kept,
        }
    }

    /// Takes a place for a client (`is_kept_for`: root or the owner). `None`: no connection can be closed for it.
    pub(super) fn take(&self, client: K, is_kept_for: bool) -> Option<Place<K>> {
        let mut room = self.room();
        if room.of(client) >= self.most_of_one && !room.close_one(|open| open.client == client) {
            return None;
        }
        let is_other = |open: &Open<K>| !open.is_kept_for;
        let others = room.open.values().filter(|open| is_other(open)).count();
        let is_full = room.open.len() >= self.most || (!is_kept_for && others + self.kept >= self.most);
        if is_full && !room.close_one(is_other) {
            return None;
        }
        let number = room.next;
        room.next += 1;
        let open = Open {
            client,
            is_kept_for,
            is_busy: false,
            task: None,
        };
        room.open.insert(number, open);
        Some(Place {
            places: self.clone(),
            number,
            client,
            is_kept_for,
        })
    }

    fn room(&self) -> MutexGuard<'_, Room<K>> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Client> Place<K> {
    /// Records the task that serves it, to be aborted when another client needs the place.
    pub(super) fn served_by(places: &ConnectionLimits<K>, number: u64, task: AbortHandle) {
        if let Some(open) = places.room().open.get_mut(&number) {
            open.task = Some(task);
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The connection waits for events: it may be closed for another client.
    pub(super) fn set_idle(&self) {
        self.set_busy(false);
    }

    /// A request is complete (busy), or its answer is over.
    fn set_busy(&self, is_busy: bool) {
        if let Some(open) = self.places.room().open.get_mut(&self.number) {
            open.is_busy = is_busy;
        }
    }

    /// Counts the bytes of an answer until the result is dropped; `None`: too many bytes are unread.
    pub(super) fn hold(self: &Arc<Self>, bytes: usize) -> Option<Held<K>> {
        let mut room = self.places.room();
        let all: usize = room.unread.values().sum();
        let of_one = room.unread.get(&self.client).copied().unwrap_or(0);
        let most = match self.is_kept_for || self.places.kept == 0 {
            true => MOST_BYTES,
            false => MOST_BYTES - MOST_BYTES_OF_ONE,
        };
        if all >= most || of_one >= MOST_BYTES_OF_ONE {
            drop(room);
            self.set_busy(false);
            return None;
        }
        *room.unread.entry(self.client).or_default() += bytes;
        let place = Arc::clone(self);
        Some(Held { place, bytes })
    }
}

impl<K: Client> Drop for Place<K> {
    fn drop(&mut self) {
        // It is absent if it was closed for another client.
        self.places.room().open.remove(&self.number);
    }
}

/// Counted bytes of an answer; keeps the place as long.
pub(super) struct Held<K: Client> {
    place: Arc<Place<K>>,
    bytes: usize,
}

impl<K: Client> Drop for Held<K> {
    fn drop(&mut self) {
        self.place.set_busy(false);
        let mut room = self.place.places.room();
        let client = self.place.client;
        if let Some(unread) = room.unread.get_mut(&client) {
            *unread -= self.bytes;
            if *unread == 0 {
                room.unread.remove(&client);
            }
        }
    }
}

/// A request's body, whose end marks the connection as busy.
pub(super) struct Watched<K: Client> {
    body: Incoming,
    place: Arc<Place<K>>,
}

impl<K: Client> Watched<K> {
    pub(super) fn new(body: Incoming, place: Arc<Place<K>>) -> Self {
        place.set_busy(body.is_end_stream());
        Self { body, place }
    }
}

impl<K: Client> Body for Watched<K> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let next = Pin::new(&mut self.body).poll_frame(context);
        if matches!(next, Poll::Ready(None)) {
            self.place.set_busy(true);
        }
        next
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of the connections that have a place.
    fn open(places: &ConnectionLimits<u32>) -> Vec<u64> {
        places.room().open.keys().copied().collect()
    }

    fn take(places: &ConnectionLimits<u32>, user: u32) -> Option<Arc<Place<u32>>> {
        places.take(user, false).map(Arc::new)
    }

    #[test]
    fn oldest_connection_without_a_request_goes_for_the_next_one() {
        let places = ConnectionLimits::new(6, 3, 0);
        let held: Vec<_> = [1, 1, 1, 2, 2, 3]
            .map(|user| take(&places, user).expect("a place"))
            .into();
        // One of the client that has most.
        let next = take(&places, 4).expect("a place");
        assert_eq!(open(&places), [1, 2, 3, 4, 5, 6]);
        held[1].set_busy(true);
        let _again = take(&places, 4).expect("a place");
        assert_eq!(open(&places), [1, 3, 4, 5, 6, 7], "busy ones stay");
        // One of its own, if a client has as many as it may have.
        let third = take(&places, 4).expect("a place");
        let _fourth = take(&places, 4).expect("a place");
        assert!(!open(&places).contains(&next.number()), "{:?}", open(&places));
        drop((held, third));
        assert_eq!(open(&places).len(), 2, "what was closed frees nothing twice");
    }

    #[test]
    fn client_whose_requests_are_all_under_way_gets_no_further_place() {
        let places = ConnectionLimits::new(6, 2, 0);
        let busy = [take(&places, 1), take(&places, 1)].map(|place| place.expect("a place"));
        busy.iter().for_each(|place| place.set_busy(true));
        assert!(take(&places, 1).is_none());
        drop(busy[0].hold(1));
        assert!(take(&places, 1).is_some(), "an answer is over");
    }

    #[test]
    fn one_place_is_kept_for_root_and_the_owner() {
        let places = ConnectionLimits::new(6, 3, 1);
        let others: Vec<_> = [1, 1, 1, 2, 2]
            .map(|user| take(&places, user).expect("a place"))
            .into();
        others.iter().for_each(|place| place.set_busy(true));
        assert!(take(&places, 3).is_none(), "all of theirs are busy");
        let root = places.take(0, true).expect("it is kept");
        assert!(places.take(7, true).is_none(), "there are no more");
        drop(root);
        assert!(places.take(7, true).is_some());
    }

    #[test]
    fn who_reads_no_answers_gets_no_more_and_others_get_theirs() {
        let places = ConnectionLimits::new(10, 10, 1);
        let deaf = [take(&places, 1), take(&places, 1)].map(|place| place.expect("a place"));
        let mut unread: Vec<_> = deaf
            .iter()
            .map(|place| place.hold(MOST_BYTES_OF_ONE / 2))
            .collect();
        assert!(unread.iter().all(Option::is_some));
        assert!(deaf[0].hold(1).is_none() && deaf[1].hold(1).is_none());
        let other = take(&places, 2).expect("a place");
        drop(other.hold(2 * MOST_BYTES).expect("however long it is"));
        drop(other.hold(2 * MOST_BYTES).expect("the other one was read"));
        unread.pop();
        assert!(deaf[0].hold(1).is_some(), "one was read");
        let [kept, gone] = deaf;
        drop((unread, gone));
        assert!(places.room().unread.is_empty());
        let others: Vec<_> = (3..6).map(|user| take(&places, user).expect("a place")).collect();
        let unread: Vec<_> = others.iter().map(|place| place.hold(MOST_BYTES_OF_ONE)).collect();
        assert!(unread.iter().all(Option::is_some));
        assert!(kept.hold(1).is_none(), "all together have so many");
        let root = Arc::new(places.take(0, true).expect("a place"));
        assert!(root.hold(1).is_some(), "some are kept for root");
    }
}
