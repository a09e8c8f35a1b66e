//! HTTP/1.1 for an operator's programs: status, networks, ports, counters, events, metrics; and changes of ports.
//!
//! Nobody who connects can hold up anybody else: there are so many connections by each socket and of each user, a
//! request's head has a length and a time, what does not move is given up, what is asked of the daemon is asked once
//! for all who ask ([`daemon`]), and no connection lasts for ever. hyper reads and writes the protocol.

mod body;
mod changes;
mod daemon;
mod events;
mod metrics;
mod patient;
mod problem;
mod routes;
mod views;

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hyper::Response;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use self::changes::Changes;
use self::daemon::Daemon;
use self::events::Events;
use self::patient::Patient;
use self::problem::Problem;
use self::routes::{Door, State};

/// Connections at a time by one Unix socket, of one user there, by TCP, and of one address there.
const MOST_BY_SOCKET: usize = 48;
const MOST_OF_USER: usize = 16;
const MOST_BY_TCP: usize = 32;
const MOST_OF_ADDRESS: usize = 16;
/// Bytes of answers by one socket that wait to be read, and of one user, or address, there: who has as many gets no
/// more until they are read. A daemon with a thousand ports has answers of some MiB.
const MOST_BYTES: usize = 64 << 20;
const MOST_BYTES_OF_ONE: usize = 16 << 20;
/// How long a request's head may take, and how long a connection is kept without one.
const HEAD: Duration = Duration::from_secs(10);
/// Bytes of a head, and headers in it.
const HEAD_BYTES: usize = 16 << 10;
const HEADERS: usize = 64;
/// How long nothing may move on a connection: longer than events are waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a connection lasts; who reads events comes back, as it does after any other end.
const LIFETIME: Duration = Duration::from_secs(900);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Changers {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// What it all goes by.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) all: Option<UnixListener>,
    pub(crate) read_only: Option<UnixListener>,
    pub(crate) metrics: Option<TcpListener>,
    /// To the daemon, see [`link`](super::link).
    pub(crate) questions: UnixStream,
    pub(crate) events: UnixStream,
    pub(crate) changes: UnixStream,
    /// Who may change something by `all`; `None`: all who can connect.
    pub(crate) changers: Option<Changers>,
}

/// Answers until the daemon ends. `limit` is called before anything is read.
/// Errors: it cannot begin, or the daemon says what it should not.
pub(crate) fn serve(sockets: Sockets, limit: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.context("no event queue")?;
    limit()?;
    runtime.block_on(run(sockets))
}

async fn run(sockets: Sockets) -> anyhow::Result<()> {
    let Sockets {
        all,
        read_only,
        metrics,
        questions,
        events,
        changes,
        changers,
    } = sockets;
    let (daemon, askers) = Daemon::new();
    let (asked, changing) = Changes::new();
    let state = State {
        daemon,
        changes: asked,
        events: Events::new(),
        long_bodies: Arc::new(Semaphore::new(routes::LONG_BODIES)),
    };
    let all = all.map(|listener| (listener, May::Change(changers)));
    let read_only = read_only.map(|listener| (listener, May::Look));
    for (listener, may) in [all, read_only].into_iter().flatten() {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        tokio::spawn(accept_local(listener, may, state.clone()));
    }
    if let Some(listener) = metrics {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        tokio::spawn(accept_remote(listener, state.clone()));
    }
    questions.set_nonblocking(true)?;
    events.set_nonblocking(true)?;
    changes.set_nonblocking(true)?;
    let questions = tokio::net::UnixStream::from_std(questions)?;
    let events = tokio::net::UnixStream::from_std(events)?;
    let changes = tokio::net::UnixStream::from_std(changes)?;
    // All end when the daemon does.
    let done = tokio::select! {
        done = askers.serve(questions) => done,
        done = state.events.serve(events) => done,
        done = changing.serve(changes) => done,
    };
    match done {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(error.into()),
        _ => Ok(()),
    }
}

/// What may be done by a socket.
#[derive(Debug, Clone, Copy)]
enum May {
    Look,
    /// By these; `None`: by all.
    Change(Option<Changers>),
}

impl May {
    /// Where a client came in.
    fn door(self, user: u32, group: u32) -> Door {
        match self {
            Self::Look => Door::ReadOnly,
            Self::Change(Some(of)) if user != 0 && user != of.user && group != of.group => Door::Others,
            Self::Change(_) => Door::All,
        }
    }
}

async fn accept_local(listener: tokio::net::UnixListener, may: May, state: State) {
    let places = Places::new(MOST_BY_SOCKET, MOST_OF_USER);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let peer = stream.peer_cred();
                let (user, group) = peer.map_or((u32::MAX, u32::MAX), |peer| (peer.uid(), peer.gid()));
                let_in(stream, places.take(user), may.door(user, group), &state);
            }
            // No descriptor is left, and the next attempt would fail at once, too.
            Err(_) => sleep(PAUSE).await,
        }
    }
}

async fn accept_remote(listener: tokio::net::TcpListener, state: State) {
    let places = Places::new(MOST_BY_TCP, MOST_OF_ADDRESS);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => let_in(stream, places.take(network_of(from.ip())), Door::Metrics, &state),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Who counts as one: an IPv4 address, or an IPv6 network of 64 bits, in which a machine has what addresses it likes.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

/// Without a place it is closed.
fn let_in<S, K>(stream: S, place: Option<Place<K>>, door: Door, state: &State)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    K: Who,
{
    let Some(place) = place else { return };
    let state = state.clone();
    tokio::spawn(converse(stream, Arc::new(place), door, state));
}

async fn converse<S, K>(stream: S, place: Arc<Place<K>>, door: Door, state: State)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    K: Who,
{
    let answer = service_fn(move |request| {
        let (state, place) = (state.clone(), Arc::clone(&place));
        async move {
            let (head, body) = routes::answer(&state, door, request).await.into_parts();
            Ok::<_, Infallible>(match place.hold(body.bytes()) {
                Some(held) => Response::from_parts(head, body.held(held)),
                None => Problem::Unread.answer(),
            })
        }
    });
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS);
    let stream = TokioIo::new(Patient::new(stream, PATIENCE));
    // However it ends, it was the client's.
    let _ = timeout(LIFETIME, protocol.serve_connection(stream, answer)).await;
}

/// Who has connections: a user's number, or an address.
trait Who: Copy + Eq + Hash + Send + Sync + 'static {}

impl Who for u32 {}
impl Who for IpAddr {}

/// What one has.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    connections: usize,
    /// Of answers that wait to be read.
    bytes: usize,
}

/// Connections by one socket, by who has them.
#[derive(Clone)]
struct Places<K> {
    taken: Arc<Mutex<HashMap<K, Taken>>>,
    most: usize,
    most_of_one: usize,
}

/// One of them, until it is dropped.
struct Place<K: Who> {
    places: Places<K>,
    whose: K,
}

impl<K: Who> Places<K> {
    fn new(most: usize, most_of_one: usize) -> Self {
        Self {
            taken: Arc::default(),
            most,
            most_of_one,
        }
    }

    fn take(&self, whose: K) -> Option<Place<K>> {
        let mut taken = self.taken();
        let all: usize = taken.values().map(|taken| taken.connections).sum();
        let of_one = taken.get(&whose).map_or(0, |taken| taken.connections);
        if all >= self.most || of_one >= self.most_of_one {
            return None;
        }
        taken.entry(whose).or_default().connections += 1;
        let places = self.clone();
        Some(Place { places, whose })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<K, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Who> Drop for Place<K> {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        match taken.get_mut(&self.whose) {
            Some(taken) if taken.connections > 1 => taken.connections -= 1,
            _ => drop(taken.remove(&self.whose)),
        }
    }
}

/// Bytes of an answer, until it is dropped; its place is kept as long.
struct Held<K: Who> {
    place: Arc<Place<K>>,
    bytes: usize,
}

impl<K: Who> Place<K> {
    /// Counts the bytes of an answer; none, where too many wait to be read.
    fn hold(self: &Arc<Self>, bytes: usize) -> Option<Held<K>> {
        let mut taken = self.places.taken();
        let all: usize = taken.values().map(|taken| taken.bytes).sum();
        let of_one = taken.get_mut(&self.whose)?;
        if all >= MOST_BYTES || of_one.bytes >= MOST_BYTES_OF_ONE {
            return None;
        }
        of_one.bytes += bytes;
        let place = Arc::clone(self);
        Some(Held { place, bytes })
    }
}

impl<K: Who> Drop for Held<K> {
    fn drop(&mut self) {
        if let Some(taken) = self.place.places.taken().get_mut(&self.place.whose) {
            taken.bytes -= self.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_who_can_connect_may_look_only() {
        let of = Changers { user: 7, group: 8 };
        let door = |user, group| May::Change(Some(of)).door(user, group);
        assert_eq!(door(1, 1), Door::Others);
        for (user, group) in [(0, 1), (7, 1), (1, 8)] {
            assert_eq!(door(user, group), Door::All);
        }
        assert_eq!(May::Change(None).door(1, 1), Door::All);
        assert_eq!(May::Look.door(0, 0), Door::ReadOnly);
    }

    #[test]
    fn machine_with_many_addresses_of_a_network_counts_as_one() {
        let of = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    }

    #[test]
    fn user_who_takes_all_places_leaves_others_theirs() {
        let places = Places::new(6, 4);
        let mut greedy: Vec<_> = (0..4).map(|_| places.take(1).expect("a place")).collect();
        assert!(places.take(1).is_none(), "four of one user");
        let _others = [places.take(2).expect("free"), places.take(3).expect("free")];
        assert!(places.take(4).is_none(), "six of all");
        greedy.pop();
        assert!(places.take(4).is_some(), "one is free again");
        drop(greedy);
        assert_eq!(places.taken().len(), 2, "nothing is kept of those who went");
    }

    #[test]
    fn who_reads_no_answers_gets_no_more_and_others_get_theirs() {
        let places = Places::new(10, 10);
        let deaf = [places.take(1), places.take(1)].map(|place| Arc::new(place.expect("a place")));
        let mut unread: Vec<_> = deaf
            .iter()
            .map(|place| place.hold(MOST_BYTES_OF_ONE / 2))
            .collect();
        assert!(unread.iter().all(Option::is_some));
        assert!(deaf[0].hold(1).is_none() && deaf[1].hold(1).is_none());
        let other = Arc::new(places.take(2).expect("a place"));
        drop(other.hold(2 * MOST_BYTES).expect("however long it is"));
        drop(other.hold(2 * MOST_BYTES).expect("the other one was read"));
        unread.pop();
        assert!(deaf[0].hold(1).is_some(), "one was read");
        let [kept, gone] = deaf;
        drop((unread, gone));
        assert_eq!(places.taken()[&1].bytes, 0);
        let others: Vec<_> = (3..6)
            .map(|whose| Arc::new(places.take(whose).expect("a place")))
            .collect();
        let unread: Vec<_> = others
            .iter()
            .map(|place| place.hold(MOST_BYTES / 3 + 1))
            .collect();
        assert!(unread.iter().all(Option::is_some));
        assert!(kept.hold(1).is_none(), "all together have so many");
    }
}
