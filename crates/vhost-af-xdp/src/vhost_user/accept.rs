//! Where the VMMs of all ports come from: one thread accepts their connections, and starts a thread for each that it
//! serves. (Another one connects to the VMMs that listen themselves, as the path of a socket may lead to a file system
//! that does not answer.)
//!
//! A port serves one VMM. One that comes while another is served, or while the port pauses after one that did wrong,
//! waits for a while: a VMM that is started again may be there before the end of the first is seen. Then it is refused,
//! so that it does not wait for what may never come. Further ones wait in the listener, for which the kernel tells of
//! the next connection only when there is room for it (EPOLLONESHOT).
//!
//! The thread waits for nobody: listeners and connections are looked at without waiting, pauses are times to go on.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
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
use steward::backoff::Backoff;
use steward::log_limit::{LeftOut, LogLimit};

/// Pause between attempts to connect to a VMM that is not there: short, because the guest's outage lasts as
/// long, and cheap.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a VMM that did wrong, or comes for nothing, is served again: doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Sessions in a row in which nothing runs, without a pause.
const IDLE_MAX: u32 = 8;
/// Sessions of a port without a pause, however they end, and then one in each such time: each costs a bind, lines and
/// events, and no VMM needs as many.
const SESSIONS_MAX: u32 = 256;
const SESSION_EACH: Duration = Duration::from_millis(100);
/// How long a VMM waits for the end of another's session, which may wait for a bind or for an answer of the steward.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// Before the next connection is accepted, after one that only looked whether anybody listens: else a client that does
/// so without end keeps this thread busy.
const PROBE_PAUSE: Duration = Duration::from_millis(5);
/// Between two looks whether a connection is closed.
const CLOSING_PAUSE: Duration = Duration::from_secs(1);
/// Where a port's VMMs come from.
pub(crate) enum VmmSource {
    Listen(UnixListener),
    Connect(PathBuf),
    Once(UnixStream),
}

/// The sources of VMMs that a thread serves, by the numbers of their ports.
pub(crate) struct Doors {
    epoll: OwnedFd,
    wake: Event,
    notes: Mutex<Vec<Note>>,
}

/// What the thread is told.
enum Note {
    Open(u64, Box<Door>),
    /// Answered when it is closed.
    Close(u64, Sender<()>),
    /// The session of a port is over.
    Ended(u64, Ended),
}

/// What is waited for beside the doors.
const WAKE: u64 = u64::MAX;

impl Doors {
    /// Starts the thread.
    pub(crate) fn start(name: &str) -> io::Result<Arc<Self>> {
        let (epoll, wake) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, Event::new()?);
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN)?;
        let doors = Arc::new(Self {
            epoll,
            wake,
            notes: Mutex::default(),
        });
        let theirs = Arc::clone(&doors);
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || theirs.work())?;
        connection::prepare()?;
        Ok(doors)
    }

    /// Serves the VMMs that come by a listener, or listen at a path.
    pub(crate) fn open(&self, port: &Arc<Port>, way: Way) -> io::Result<()> {
        if let Way::Listener(listener) = &way {
            fcntl_setfl(listener, fcntl_getfl(listener)? | OFlags::NONBLOCK)?;
        }
        let door = Door {
            port: Arc::clone(port),
            way,
            pauses: Pauses::default(),
            lines: LogLimit::default(),
            denied: None,
            is_served: false,
            not_before: Instant::now(),
            accepts_from: Some(Instant::now()),
            waiting: None,
            closing: None,
        };
        self.tell(Note::Open(port.looks.port, Box::new(door)));
        Ok(())
    }

    /// Accepts nobody for a port any more.
    pub(crate) fn close(&self, port: &Port) {
        let (closed, done) = mpsc::channel();
        self.tell(Note::Close(port.looks.port, closed));
        let _ = done.recv();
    }

    fn tell(&self, note: Note) {
        self.notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(note);
        self.wake.tell();
    }

    fn work(self: &Arc<Self>) {
        let mut doors: HashMap<u64, Box<Door>> = HashMap::new();
        loop {
            let next = doors.values().filter_map(|door| door.next()).min();
            let left = next.map(|next| next.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut space = [MaybeUninit::uninit(); 64];
            let ready = epoll::wait(&self.epoll, &mut space, left.as_ref());
            for event in ready.map_or(&[][..], |(events, _)| &*events) {
                match doors.get_mut(&event.data.u64()) {
                    Some(door) => door.look(self),
                    None => self.wake.clear(),
                }
            }
            let notes = std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner));
            for note in notes {
                match note {
                    Note::Open(port, door) => drop(doors.insert(port, door)),
                    Note::Close(port, closed) => {
                        let waiting = doors.remove(&port).and_then(|door| door.waiting);
                        let _ = waiting.and_then(|(stream, _)| close_apart(stream));
                        let _ = closed.send(());
                    }
                    Note::Ended(port, ended) => {
                        if let Some(door) = doors.get_mut(&port) {
                            door.note_end(ended);
                        }
                    }
                }
            }
            let now = Instant::now();
            let due = doors
                .values_mut()
                .filter(|door| door.next().is_some_and(|next| next <= now));
            due.for_each(|door| door.go_on(self, now));
        }
    }

    /// Is told once when there is something of that kind.
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

/// How VMMs come.
pub(crate) enum Way {
    Listener(UnixListener),
    Path(PathBuf),
}

/// The source of a port's VMMs.
struct Door {
    port: Arc<Port>,
    way: Way,
    pauses: Pauses,
    lines: LogLimit,
    /// Whether what was said last of a path was a lack of permission: that may follow on a socket that was not there.
    denied: Option<bool>,
    /// A VMM is served.
    is_served: bool,
    /// None is served before.
    not_before: Instant,
    /// None is accepted before.
    accepts_from: Option<Instant>,
    /// A VMM that waits to be served, and until when.
    waiting: Option<(UnixStream, Instant)>,
    /// Closes a connection that was turned away.
    closing: Option<JoinHandle<()>>,
}

impl Door {
    /// When there is something to do, if nothing is told before.
    fn next(&self) -> Option<Instant> {
        let comes = self.waiting.is_some() || matches!(self.way, Way::Path(_));
        let serves = (comes && !self.is_served).then_some(self.not_before);
        let gives_up = self.waiting.as_ref().map(|(_, until)| *until);
        [serves, gives_up, self.accepts_from].into_iter().flatten().min()
    }

    /// Somebody connected, or one who waits has gone.
    fn look(&mut self, doors: &Arc<Doors>) {
        let Way::Listener(listener) = &self.way else {
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
                // Somebody looked whether anybody listens, as another daemon of the same path does (listener.rs).
                self.accepts_from = Some(now + PROBE_PAUSE);
                if !self.is_served && self.not_before <= now {
                    self.note_end(Ended::Idle);
                }
            }
            Ok((stream, _)) => {
                doors.watch(&self.port, &stream, epoll::EventFlags::RDHUP);
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

    /// Does what it is time for.
    fn go_on(&mut self, doors: &Arc<Doors>, now: Instant) {
        let comes = self.waiting.is_some() || matches!(self.way, Way::Path(_));
        if comes && !self.is_served && self.not_before <= now {
            match connection::prepare() {
                Ok(()) => {
                    let waiting = self.waiting.take().map(|(stream, _)| stream);
                    if let Some(stream) = waiting.or_else(|| self.connect(now)) {
                        self.serve(doors, stream);
                    }
                }
                // The thread of another VMM may be free soon.
                Err(error) => self.lack_a_thread(&error, now),
            }
        }
        if let Some((second, _)) = self.waiting.take_if(|(_, until)| *until <= now) {
            self.port.turn_away(&second, HANDOVER_TIMEOUT, &mut self.lines);
            self.closing = close_apart(second);
            self.accepts_from = Some(now);
        }
        if self.accepts_from.take_if(|time| *time <= now).is_some()
            && let Way::Listener(listener) = &self.way
        {
            doors.watch(&self.port, listener, epoll::EventFlags::IN);
        }
    }

    fn serve(&mut self, doors: &Arc<Doors>, stream: UnixStream) {
        let now = Instant::now();
        if matches!(self.way, Way::Listener(_)) {
            let _ = epoll::delete(&doors.epoll, &stream);
            self.accepts_from = Some(now);
        }
        let (told, port) = (Arc::clone(doors), self.port.looks.port);
        match connection::start(&self.port, stream, move |ended| {
            told.tell(Note::Ended(port, ended));
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
    fn note_end(&mut self, ended: Ended) {
        self.is_served = false;
        let mut pause = self.pauses.after(&self.port, ended);
        if matches!(self.way, Way::Path(_)) {
            pause += CONNECT_PAUSE;
        }
        self.not_before = Instant::now() + pause;
    }

    /// A connection to a VMM that listens.
    fn connect(&mut self, now: Instant) -> Option<UnixStream> {
        let Way::Path(path) = &self.way else { return None };
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
                    say_absent(path, &error, &left_out);
                }
                self.denied = denied;
                self.not_before = now + CONNECT_PAUSE;
                None
            }
        }
    }
}

/// Closes a connection that nothing was read from, on a thread of its own: a descriptor that waits in it may be a TCP
/// socket that lingers (`unix_release_sock`, net/unix/af_unix.c; `tcp_close`), and all ports have one thread that accepts.
fn close_apart(stream: UnixStream) -> Option<JoinHandle<()>> {
    let closing = std::thread::Builder::new().name("close".to_owned());
    closing.spawn(move || drop(stream)).ok()
}

/// Connects, and does not wait for a VMM that accepts nobody.
fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let socket = listener::stream(SocketFlags::NONBLOCK)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    fcntl_setfl(&socket, fcntl_getfl(&socket)? - OFlags::NONBLOCK)?;
    Ok(socket.into())
}

/// The VMM that is to be connected to cannot be.
fn say_absent(path: &Path, error: &io::Error, left_out: &LeftOut) {
    let path = path.display();
    if error.kind() == io::ErrorKind::PermissionDenied {
        let user = rustix::process::geteuid().as_raw();
        tracing::warn!(%path, "the VMM's socket may not be connected to by this user ({user}): let it write there and \
                               search the directory, or choose another with --user; trying again{left_out}");
    } else {
        tracing::info!(%path, %error, "no VMM there yet, trying again{left_out}");
    }
}

/// How long the next VMM waits after one that did wrong or came for nothing.
struct Pauses {
    pause: Backoff,
    /// Sessions in a row in which nothing ran.
    idle: u32,
    /// Of [`SESSIONS_MAX`], and since when that is right.
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

    /// By how it ended.
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

    /// By how many there were before it.
    fn by_number(&mut self, now: Instant) -> Duration {
        let past = now.saturating_duration_since(self.since);
        let earned = u32::try_from(past.as_nanos() / SESSION_EACH.as_nanos()).unwrap_or(SESSIONS_MAX);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(SESSIONS_MAX);
            self.since = now;
        }
        if self.left == 0 {
            // What the pause earns is spent by it.
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
        // Who waits as long as it is to is served ten times a second.
        let mut time = Duration::ZERO;
        for _ in 0..100 {
            assert_eq!(at(time), SESSION_EACH);
            time += SESSION_EACH;
        }
        // Later it may be as quick again.
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
