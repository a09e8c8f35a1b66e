//! HTTP/1.1 for an operator's programs: status, networks, ports, counters, events, metrics; and changes of ports.
//!
//! Nobody who connects can hold up anybody else: there are so many connections by each socket and of each user, a
//! request's head has a length and a time, what does not move is given up, what is asked of the daemon is asked once for
//! all who ask ([`daemon`]), and no connection lasts for ever. hyper reads and writes the protocol.

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
use std::io;
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use self::changes::Changes;
use self::daemon::Daemon;
use self::events::Events;
use self::patient::Patient;
use self::routes::{Door, State};

/// Connections at a time by one Unix socket, of one user there, and by TCP.
const MOST_BY_SOCKET: usize = 48;
const MOST_OF_USER: usize = 16;
const MOST_BY_TCP: usize = 16;
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
    let places = Places::new(MOST_BY_TCP, MOST_BY_TCP);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => let_in(stream, places.take(0), Door::Metrics, &state),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Without a place it is closed.
fn let_in<S>(stream: S, place: Option<Place>, door: Door, state: &State)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Some(place) = place else { return };
    let state = state.clone();
    tokio::spawn(async move {
        converse(stream, door, state).await;
        drop(place);
    });
}

async fn converse<S>(stream: S, door: Door, state: State)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answer = service_fn(move |request| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(routes::answer(&state, door, request).await) }
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

/// Connections by one socket, by user.
#[derive(Clone)]
struct Places {
    taken: Arc<Mutex<HashMap<u32, usize>>>,
    most: usize,
    most_of_user: usize,
}

/// One of them, until it is dropped.
struct Place {
    places: Places,
    user: u32,
}

impl Places {
    fn new(most: usize, most_of_user: usize) -> Self {
        Self {
            taken: Arc::default(),
            most,
            most_of_user,
        }
    }

    fn take(&self, user: u32) -> Option<Place> {
        let mut taken = self.taken();
        let all: usize = taken.values().sum();
        let of_user = taken.get(&user).copied().unwrap_or(0);
        if all >= self.most || of_user >= self.most_of_user {
            return None;
        }
        taken.insert(user, of_user + 1);
        Some(Place {
            places: self.clone(),
            user,
        })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        match taken.get_mut(&self.user) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(taken.remove(&self.user)),
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
}
