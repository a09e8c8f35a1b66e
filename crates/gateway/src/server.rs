//! HTTP/1.1 for an operator's programs: status, networks, ports, counters, events, metrics; and changes of ports.
//!
//! No client can delay others: the number of connections of a socket and of a user is limited, and so are length and
//! time of a request's head; connections without progress are closed, one request to the daemon serves all clients that
//! wait ([`crate::daemon`]), and no connection lasts for ever. hyper implements the protocol.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hyper::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use model::gateway::{Changers, Listeners};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use crate::answers::{self, State};
use crate::changes::Changes;
use crate::connection_limits::{Client, ConnectionLimits, Place, Watched};
use crate::daemon::Daemon;
use crate::events::Events;
use crate::idle_timeout::IdleTimeout;
use crate::link::Link;
use crate::problem::Problem;
use crate::requests;
use crate::routes::{self, Listener};

/// Most connections at a time: by one Unix socket, of these reserved for root and the owner, of one user there, by TCP,
/// and of one address there.
const MOST_BY_SOCKET: usize = 48;
const KEPT: usize = 1;
const MOST_OF_USER: usize = 16;
const MOST_BY_TCP: usize = 32;
const MOST_OF_ADDRESS: usize = 16;
/// How long a request's head may take, and how long a connection is kept without one.
const HEAD: Duration = Duration::from_secs(10);
/// Bytes of a head, and headers in it.
const HEAD_BYTES: usize = 16 << 10;
const HEADERS: usize = 64;
/// Longest time without a byte in either direction: longer than a client may wait for events.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest life of a connection; clients that read events reconnect, as after any other end.
const LIFETIME: Duration = Duration::from_secs(900);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// All sockets of the process.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) listeners: Listeners<OwnedFd>,
    /// Connections to the daemon: for its state, for events, and for changes.
    pub(crate) questions: UnixStream,
    pub(crate) events: UnixStream,
    pub(crate) changes: UnixStream,
}

/// Answers clients until the daemon ends. `limit` is called before anything is read.
/// Errors: it cannot start, or the daemon sends an invalid answer.
pub(crate) fn serve(sockets: Sockets, limit: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.context("no event queue")?;
    limit()?;
    runtime.block_on(run(sockets))
}

async fn run(sockets: Sockets) -> anyhow::Result<()> {
    let Sockets {
        listeners,
        questions,
        events,
        changes,
    } = sockets;
    let (daemon, askers) = Daemon::new();
    let (asked, changing) = Changes::new();
    let state = State {
        daemon,
        changes: asked,
        events: Events::new(),
        long_bodies: Arc::new(Semaphore::new(requests::LONG_BODIES)),
    };
    let all = listeners
        .all
        .map(|listener| (listener, May::Change(listeners.changers)));
    let read_only = listeners.read_only.map(|listener| (listener, May::Look));
    for (listener, may) in [all, read_only].into_iter().flatten() {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        tokio::spawn(accept_local(listener, may, listeners.owner, state.clone()));
    }
    if let Some(listener) = listeners.metrics.map(TcpListener::from) {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        tokio::spawn(accept_remote(listener, state.clone()));
    }
    // All end when the daemon does.
    let done = tokio::select! {
        done = askers.serve(Link::new(questions)?) => done,
        done = state.events.serve(Link::new(events)?) => done,
        done = changing.serve(Link::new(changes)?) => done,
    };
    match done {
        Err(error) if [io::ErrorKind::InvalidData, io::ErrorKind::Other].contains(&error.kind()) => {
            Err(error.into())
        }
        _ => Ok(()),
    }
}

/// What clients of a socket may do.
#[derive(Debug, Clone, Copy)]
enum May {
    Look,
    /// Changes by this user and group; `None`: by all.
    Change(Option<Changers>),
}

impl May {
    /// The listener that a client's requests are checked for.
    fn listener(self, user: u32, group: u32) -> Listener {
        match self {
            Self::Look => Listener::ReadOnly,
            Self::Change(Some(of)) if user != 0 && user != of.user && group != of.group => {
                Listener::ReadByOthers
            }
            Self::Change(_) => Listener::ReadWrite,
        }
    }
}

async fn accept_local(listener: tokio::net::UnixListener, may: May, owner: u32, state: State) {
    let places = ConnectionLimits::new(MOST_BY_SOCKET, MOST_OF_USER, KEPT);
    let of_owner = state.for_owner();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let peer = stream.peer_cred();
                let (user, group) = peer.map_or((u32::MAX, u32::MAX), |peer| (peer.uid(), peer.gid()));
                let is_kept_for = user == 0 || user == owner;
                let state = if is_kept_for { &of_owner } else { &state };
                let place = places.take(user, is_kept_for);
                let_in(stream, &places, place, may.listener(user, group), state);
                // Connections that were closed for it end first, which frees their descriptors.
                yield_now().await;
            }
            // No descriptor is left, and the next attempt would fail at once, too.
            Err(_) => sleep(PAUSE).await,
        }
    }
}

async fn accept_remote(listener: tokio::net::TcpListener, state: State) {
    let places = ConnectionLimits::new(MOST_BY_TCP, MOST_OF_ADDRESS, 0);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let place = places.take(network_of(from.ip()), false);
                let_in(stream, &places, place, Listener::Metrics, &state);
                yield_now().await;
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// The client that an address counts as: this host, an IPv4 address, or an IPv6 /64 network, in which one machine can
/// use any address.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

/// Serves a connection in a task of its own; without a place it is closed.
fn let_in<S, K>(
    stream: S,
    places: &ConnectionLimits<K>,
    place: Option<Place<K>>,
    listener: Listener,
    state: &State,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    K: Client,
{
    let Some(place) = place else { return };
    let (number, state) = (place.number(), state.clone());
    let task = tokio::spawn(converse(stream, Arc::new(place), listener, state));
    Place::served_by(places, number, task.abort_handle());
}

async fn converse<S, K>(stream: S, place: Arc<Place<K>>, listener: Listener, state: State)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    K: Client,
{
    let answer = service_fn(move |request: hyper::Request<Incoming>| {
        let (state, place) = (state.clone(), Arc::clone(&place));
        async move {
            let waits = routes::may_wait(request.uri());
            let request = request.map(|body| Watched::new(body, Arc::clone(&place)));
            if waits {
                place.set_idle();
            }
            let (head, body) = answers::answer(&state, listener, request).await.into_parts();
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
    let stream = TokioIo::new(IdleTimeout::new(stream, PATIENCE));
    // Errors are the client's: there is nothing to report.
    let _ = timeout(LIFETIME, protocol.serve_connection(stream, answer)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_who_can_connect_may_look_only() {
        let of = Changers { user: 7, group: 8 };
        let listener = |user, group| May::Change(Some(of)).listener(user, group);
        assert_eq!(listener(1, 1), Listener::ReadByOthers);
        for (user, group) in [(0, 1), (7, 1), (1, 8)] {
            assert_eq!(listener(user, group), Listener::ReadWrite);
        }
        assert_eq!(May::Change(None).listener(1, 1), Listener::ReadWrite);
        assert_eq!(May::Look.listener(0, 0), Listener::ReadOnly);
    }

    #[test]
    fn machine_with_many_addresses_of_a_network_counts_as_one() {
        let of = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("::2"), of("::1"));
        for own in ["127.0.0.2", "127.255.255.254", "::1", "::ffff:127.0.0.3"] {
            assert_eq!(of(own), of("127.0.0.1"), "{own}");
        }
    }
}
