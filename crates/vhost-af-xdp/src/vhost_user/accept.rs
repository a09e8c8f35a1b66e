//! Connections of VMMs: one thread accepts those of all ports, and starts a thread for each that is served. A second
//! one connects to VMMs that listen themselves, since the path of a socket may lead to a file system that does not
//! answer.
//!
//! A port serves one VMM. Another one that connects meanwhile, or while the port pauses after a VMM that broke the
//! protocol, waits for up to 10 s: a restarted VMM may connect before the end of its first connection is noticed. Then
//! it is rejected. Further ones wait in the listener's backlog: the listener is armed in epoll (EPOLLONESHOT) only while
//! no connection waits.
//!
//! The thread never blocks on a client: accept and the check for a closed connection do not wait, and a pause is a
//! deadline.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::shortage::shortage;
use rustix::event::{Timespec, epoll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{SocketAddrUnix, SocketFlags, connect};

use super::connection;
use crate::listener;
use crate::nic::wakers::Event;
use crate::port::Port;
use crate::port::reasons::Ended;
use crate::thread;
use common::lock::Locked;
use program::backoff::Backoff;
use program::log_limit::{LeftOut, LogLimit};

/// Pause between attempts to connect to a VMM that is not there. It is short, because it prolongs the guest's
/// outage, and an attempt costs little.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Pause after a VMM that broke the protocol, or whose sessions start no queue: doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Sessions in a row that may start no queue before a pause follows.
const IDLE_MAX: u32 = 8;
/// Number of sessions that a port may start without a pause, however they end; after that, one in each `SESSION_EACH`.
/// Each session costs a bind, log lines and events, and no VMM needs as many.
const SESSIONS_MAX: u32 = 256;
const SESSION_EACH: Duration = Duration::from_millis(100);
/// How long a VMM waits for the end of another's session, which may wait for a bind or for an answer of the steward.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a client that only probed whether anything listens: repeated probes must not keep this thread busy.
const PROBE_PAUSE: Duration = Duration::from_millis(5);
/// Between two checks whether a connection is closed.
const CLOSING_PAUSE: Duration = Duration::from_secs(1);

/// How the VMMs of a port connect.
pub(crate) enum VmmSource {
    Listen(UnixListener),
    Connect(PathBuf),
    Once(UnixStream),
}

/// A thread that accepts VMMs, or connects to them, for many ports.
pub(crate) struct AcceptThread {
    epoll: OwnedFd,
    wake: Event,
    messages: Mutex<Vec<Message>>,
}

/// A message to the thread about the port of that number.
enum Message {
    Open(u64, Box<Acceptor>),
    /// Answered when it is closed.
    Close(u64, Sender<()>),
    /// The session of the port is over.
    Ended(u64, Ended),
}

/// Epoll data of the wake-up event; ports have their numbers.
const WAKE: u64 = u64::MAX;

impl AcceptThread {
    /// Starts the thread.
    pub(crate) fn start(name: &str) -> io::Result<Arc<Self>> {
        let (epoll, wake) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, Event::new()?);
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN)?;
        let thread = Arc::new(Self {
            epoll,
            wake,
            messages: Mutex::default(),
        });
        let theirs = Arc::clone(&thread);
        thread::start(name, move || theirs.work())?;
        connection::prepare()?;
        Ok(thread)
    }

    /// Serves the VMMs of a port.
    pub(crate) fn open(&self, port: &Arc<Port>, source: Source) -> io::Result<()> {
        if let Source::Listener(listener) = &source {
            fcntl_setfl(listener, fcntl_getfl(listener)? | OFlags::NONBLOCK)?;
        }
        let acceptor = Acceptor {
            port: Arc::clone(port),
            source,
            pauses: Pauses::default(),
            lines: LogLimit::default(),
            denied: None,
            is_served: false,
            not_before: Instant::now(),
            accepts_from: Some(Instant::now()),
            waiting: None,
            closing: None,
        };
        self.send(Message::Open(port.looks.port, Box::new(acceptor)));
        Ok(())
    }

    /// Accepts no further VMM of a port.
    pub(crate) fn close(&self, port: &Port) {
        let (closed, done) = mpsc::channel();
        self.send(Message::Close(port.looks.port, closed));
        let _ = done.recv();
    }

    fn send(&self, message: Message) {
        self.messages.locked().push(message);
        self.wake.tell();
    }

    fn work(self: &Arc<Self>) {
        let mut acceptors: HashMap<u64, Box<Acceptor>> = HashMap::new();
        loop {
            let next = acceptors.values().filter_map(|acceptor| acceptor.next()).min();
            let left = next.map(|next| next.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut space = [MaybeUninit::uninit(); 64];
            let ready = epoll::wait(&self.epoll, &mut space, left.as_ref());
            for event in ready.map_or(&[][..], |(events, _)| &*events) {
                match acceptors.get_mut(&event.data.u64()) {
                    Some(acceptor) => acceptor.on_ready(self),
                    None => self.wake.clear(),
                }
            }
            let messages = std::mem::take(&mut *self.messages.locked());
            for message in messages {
                match message {
                    Message::Open(port, acceptor) => drop(acceptors.insert(port, acceptor)),
                    Message::Close(port, closed) => {
                        let waiting = acceptors.remove(&port).and_then(|acceptor| acceptor.waiting);
                        let _ = waiting.and_then(|(stream, _)| close_apart(stream));
                        let _ = closed.send(());
                    }
                    Message::Ended(port, ended) => {
                        if let Some(acceptor) = acceptors.get_mut(&port) {
                            acceptor.session_ended(ended);
                        }
                    }
                }
            }
            let now = Instant::now();
            let due = acceptors
                .values_mut()
                .filter(|acceptor| acceptor.next().is_some_and(|next| next <= now));
            due.for_each(|acceptor| acceptor.on_deadline(self, now));
        }
    }

    /// Waits for one event of that kind.
    fn watch(&self, port: &Port, what: impl AsFd, of: epoll::EventFlags) {
        let (data, flags) = (
            epoll::EventData::new_u64(port.looks.port),
            of | epoll::EventFlags::ONESHOT,
        );
        if epoll::modify(&self.epoll, &what, data, flags).is_err() {
            let _ = epoll::add(&self.epoll, &what, data, flags);
        }
    }
}

/// Where connections to VMMs come from.
pub(crate) enum Source {
    Listener(UnixListener),
    Path(PathBuf),
}

/// Accepts, or makes, the connections of one port.
struct Acceptor {
    port: Arc<Port>,
    source: Source,
    pauses: Pauses,
    lines: LogLimit,
    /// Whether the last attempt to connect failed for lack of permission; `None`: it did not fail. A failure is logged
    /// when this changes.
    denied: Option<bool>,
    /// A VMM is served.
    is_served: bool,
    /// No VMM is served before this time.
    not_before: Instant,
    /// No connection is accepted before this time; `None`: the listener is armed, or a connection waits.
    accepts_from: Option<Instant>,
    /// A connection that waits to be served, and until when.
    waiting: Option<(UnixStream, Instant)>,
    /// Closes a connection that was rejected.
    closing: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// The next deadline.
    fn next(&self) -> Option<Instant> {
        let has_vmm = self.waiting.is_some() || matches!(self.source, Source::Path(_));
        let serves = (has_vmm && !self.is_served).then_some(self.not_before);
        let gives_up = self.waiting.as_ref().map(|(_, until)| *until);
        [serves, gives_up, self.accepts_from].into_iter().flatten().min()
    }

    /// Its listener has a connection, or the one that waits was closed.
    fn on_ready(&mut self, thread: &Arc<AcceptThread>) {
        let Source::Listener(listener) = &self.source else {
            return;
        };
        if let Some((waiting, _)) = &self.waiting {
            if connection::is_over(waiting) {
                self.waiting = None;
                self.accepts_from = Some(Instant::now() + PROBE_PAUSE);
            }
            return;
        }
        let now = Instant::now();
        if self
            .closing
            .as_ref()
            .is_some_and(|closing| !closing.is_finished())
        {
            self.accepts_from = Some(now + CLOSING_PAUSE);
            return;
        }
        match listener.accept() {
            Ok((stream, _)) if connection::is_over(&stream) => {
                // A probe whether anything listens, as another daemon with the same path makes (listener.rs).
                self.accepts_from = Some(now + PROBE_PAUSE);
                if !self.is_served && self.not_before <= now {
                    self.session_ended(Ended::Idle);
                }
            }
            Ok((stream, _)) => {
                thread.watch(&self.port, &stream, epoll::EventFlags::RDHUP);
                self.waiting = Some((stream, now + HANDOVER_TIMEOUT));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.accepts_from = Some(now),
            Err(error) => {
                if let Some(left_out) = self.lines.allow() {
                    let hint = shortage(&error.to_string());
                    tracing::warn!(
                        port = %self.port.config.name,
                        "cannot accept a connection, trying again: {error}{hint}{left_out}"
                    );
                }
                self.accepts_from = Some(now + self.pauses.next());
            }
        }
    }

    /// Handles the deadlines that have passed.
    fn on_deadline(&mut self, thread: &Arc<AcceptThread>, now: Instant) {
        let has_vmm = self.waiting.is_some() || matches!(self.source, Source::Path(_));
        if has_vmm && !self.is_served && self.not_before <= now {
            match connection::prepare() {
                Ok(()) => {
                    let waiting = self.waiting.take().map(|(stream, _)| stream);
                    if let Some(stream) = waiting.or_else(|| self.connect(now)) {
                        self.serve(thread, stream);
                    }
                }
                // A thread may become free soon.
                Err(error) => self.lack_a_thread(&error, now),
            }
        }
        if let Some((second, _)) = self.waiting.take_if(|(_, until)| *until <= now) {
            self.port.turn_away(&second, HANDOVER_TIMEOUT, &mut self.lines);
            self.closing = close_apart(second);
            self.accepts_from = Some(now);
        }
        if self.accepts_from.take_if(|time| *time <= now).is_some()
            && let Source::Listener(listener) = &self.source
        {
            thread.watch(&self.port, listener, epoll::EventFlags::IN);
        }
    }

    fn serve(&mut self, thread: &Arc<AcceptThread>, stream: UnixStream) {
        let now = Instant::now();
        if matches!(self.source, Source::Listener(_)) {
            let _ = epoll::delete(&thread.epoll, &stream);
            self.accepts_from = Some(now);
        }
        let (waker, port) = (Arc::clone(thread), self.port.looks.port);
        match connection::start(&self.port, stream, move |ended| {
            waker.send(Message::Ended(port, ended));
        }) {
            Ok(()) => self.is_served = true,
            Err(error) => self.lack_a_thread(&error, now),
        }
    }

    /// Tries again after a pause.
    fn lack_a_thread(&mut self, error: &io::Error, now: Instant) {
        self.not_before = now + self.pauses.next();
        if let Some(left_out) = self.lines.allow() {
            tracing::error!(
                port = %self.port.config.name,
                %error,
                "no thread that serves the VMM, trying again: raise `ulimit -u`, systemd: TasksMax={left_out}"
            );
        }
    }

    /// The session is over.
    fn session_ended(&mut self, ended: Ended) {
        self.is_served = false;
        let mut pause = self.pauses.after(&self.port, ended);
        if matches!(self.source, Source::Path(_)) {
            pause += CONNECT_PAUSE;
        }
        self.not_before = Instant::now() + pause;
    }

    /// A connection to a VMM that listens.
    fn connect(&mut self, now: Instant) -> Option<UnixStream> {
        let Source::Path(path) = &self.source else {
            return None;
        };
        match connect_to(path) {
            Ok(stream) => {
                self.denied = None;
                Some(stream)
            }
            Err(error) => {
                let denied = Some(error.kind() == io::ErrorKind::PermissionDenied);
                if self.denied != denied
                    && let Some(left_out) = self.lines.allow()
                {
                    log_absent(path, &error, &left_out);
                }
                self.denied = denied;
                self.not_before = now + CONNECT_PAUSE;
                None
            }
        }
    }
}

/// Closes a connection that nothing was read from, on a thread of its own, so that the one accept thread of all ports
/// need not wait: an unread descriptor may be a TCP socket that lingers (`unix_release_sock`, net/unix/af_unix.c).
fn close_apart(stream: UnixStream) -> Option<JoinHandle<()>> {
    thread::start("close", move || drop(stream)).ok()
}

/// Connects without waiting for a VMM whose backlog is full.
fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let socket = listener::stream(SocketFlags::NONBLOCK)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    fcntl_setfl(&socket, fcntl_getfl(&socket)? - OFlags::NONBLOCK)?;
    Ok(socket.into())
}

/// Logs why a VMM cannot be connected to.
fn log_absent(path: &Path, error: &io::Error, left_out: &LeftOut) {
    let path = path.display();
    if error.kind() == io::ErrorKind::PermissionDenied {
        let user = rustix::process::geteuid().as_raw();
        tracing::warn!(%path, "the VMM's socket may not be connected to by this user ({user}): let it write there and \
                               search the directory, or choose another with --user; trying again{left_out}");
    } else {
        tracing::info!(%path, %error, "no VMM there yet, trying again{left_out}");
    }
}

/// How long the next VMM waits after one that broke the protocol or started no queue.
struct Pauses {
    pause: Backoff,
    /// Sessions in a row that started no queue.
    idle: u32,
    /// Number of sessions that could start without a pause at the time `since`.
    left: u32,
    since: Instant,
}

impl Default for Pauses {
    fn default() -> Self {
        Self {
            pause: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            idle: 0,
            left: SESSIONS_MAX,
            since: Instant::now(),
        }
    }
}

impl Pauses {
    /// The pause after a session like this.
    fn after(&mut self, port: &Port, ended: Ended) -> Duration {
        let by_end = self.by_end(ended);
        let by_number = self.by_number(Instant::now());
        if !by_number.is_zero() {
            port.warn(&format!(
                "a VMM connected more than {SESSIONS_MAX} times in a short time: the next one waits for {} ms",
                by_number.as_millis()
            ));
        }
        by_end.max(by_number)
    }

    /// The pause for how the session ended.
    fn by_end(&mut self, ended: Ended) -> Duration {
        match ended {
            Ended::Served => {
                self.pause.reset();
                self.idle = 0;
            }
            Ended::Wrong => return self.next(),
            Ended::Declined => return LONGEST_PAUSE,
            Ended::Idle => {
                self.idle = self.idle.saturating_add(1);
                if self.idle > IDLE_MAX {
                    return self.next();
                }
                self.pause.reset();
            }
        }
        Duration::ZERO
    }

    /// The pause for the number of sessions before it.
    fn by_number(&mut self, now: Instant) -> Duration {
        let past = now.saturating_duration_since(self.since);
        let earned = u32::try_from(past.as_nanos() / SESSION_EACH.as_nanos()).unwrap_or(SESSIONS_MAX);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(SESSIONS_MAX);
            self.since = now;
        }
        if self.left == 0 {
            // No session is earned during the pause.
            self.since = now + SESSION_EACH;
            return SESSION_EACH;
        }
        self.left -= 1;
        Duration::ZERO
    }

    fn next(&mut self) -> Duration {
        self.pause.failed(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vmm_that_comes_and_goes_without_end_waits_and_others_do_not() {
        let (mut pauses, begun) = (Pauses::default(), Instant::now());
        pauses.since = begun;
        let mut at = |after: Duration| pauses.by_number(begun + after);
        let at_once = (0..1000).filter(|_| at(Duration::ZERO).is_zero()).count();
        assert_eq!(at_once, SESSIONS_MAX as usize);
        // A VMM that waits for each pause is served ten times a second.
        let mut time = Duration::ZERO;
        for _ in 0..100 {
            assert_eq!(at(time), SESSION_EACH);
            time += SESSION_EACH;
        }
        // After a quiet time it is served at once again.
        time += SESSION_EACH * SESSIONS_MAX * 2;
        assert_eq!(
            (0..1000).filter(|_| at(time).is_zero()).count(),
            SESSIONS_MAX as usize
        );
        // One that connects again after each outage of a second never waits.
        let mut pauses = Pauses::default();
        let calm = (1..1000).all(|second| pauses.by_number(begun + Duration::from_secs(second)).is_zero());
        assert!(calm);
    }

    #[test]
    fn session_that_ran_begins_the_pauses_of_wrong_ones_again_and_not_their_number() {
        let mut pauses = Pauses::default();
        assert_eq!(pauses.by_end(Ended::Wrong), FIRST_PAUSE);
        assert_eq!(pauses.by_end(Ended::Wrong), FIRST_PAUSE * 2);
        pauses.left = 0;
        assert_eq!(pauses.by_end(Ended::Served), Duration::ZERO);
        assert_eq!((pauses.by_end(Ended::Wrong), pauses.left), (FIRST_PAUSE, 0));
    }
}
