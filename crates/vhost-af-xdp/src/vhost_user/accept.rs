//! The thread that reads a port's VMMs: takes one connection after the other, and speaks vhost-user over each.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::shortage::shortage;
use rustix::net::{RecvFlags, recv};

use super::connection::Connection;
use crate::guard::alarm::Alarm;
use crate::port::Port;
use crate::port::reasons::{Closed, Ended};
use crate::port::session::VmmConnection;
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
/// Between two attempts to hand it over.
const HANDOVER_PAUSE: Duration = Duration::from_millis(5);
/// Reads without taking, and does not wait.
const PEEK: RecvFlags = RecvFlags::PEEK.union(RecvFlags::DONTWAIT);

/// Where a port's VMMs come from.
pub(crate) enum VmmSource {
    Listen(UnixListener),
    Connect(PathBuf),
    Once(UnixStream),
}

/// Serves VMMs, one after the other, until the port ends.
pub(crate) fn serve_vmms(port: &Arc<Port>, source: VmmSource) {
    match source {
        VmmSource::Once(stream) => {
            serve_connection(port, stream);
        }
        VmmSource::Listen(listener) => serve_all_of(port, listener),
        VmmSource::Connect(path) => serve_all_at(port, &path),
    }
}

/// Serves those who connect.
fn serve_all_of(port: &Arc<Port>, listener: UnixListener) {
    let mut pauses = Pauses::default();
    // Of no length: what is handed over is served at once.
    let (handover, connections) = mpsc::sync_channel(0);
    let listener = Arc::new(listener);
    let accepting = match start_accepting(port, Arc::clone(&listener), handover) {
        Ok(thread) => Some(thread),
        Err(error) => {
            tracing::error!(
                port = %port.config.name,
                %error,
                "no thread that accepts connections (ulimit -u, systemd: TasksMax=): a VMM that comes while another \
                 is there waits until that one goes"
            );
            None
        }
    };
    while let Ok(stream) = connections.recv() {
        pauses.after(port, serve_connection(port, stream));
    }
    // Only without that thread, which goes on until the port ends.
    while port.removed.await_message(&*listener).is_ok() {
        match listener.accept() {
            Ok((stream, _)) => pauses.after(port, serve_connection(port, stream)),
            Err(_) => std::thread::sleep(pauses.next()),
        }
    }
    // It has ended, or does in a moment.
    let _ = accepting.map(JoinHandle::join);
}

/// Serves those who listen there.
fn serve_all_at(port: &Arc<Port>, path: &Path) {
    let mut pauses = Pauses::default();
    // Of what was said last, whether it was a lack of permission: that may follow on a socket that was not there.
    let (mut said, mut lines) = (None, LogLimit::default());
    while !port.removed.is_raised() {
        match UnixStream::connect(path) {
            Ok(stream) => {
                said = None;
                pauses.after(port, serve_connection(port, stream));
            }
            Err(error) => {
                let denied = Some(error.kind() == io::ErrorKind::PermissionDenied);
                if said != denied
                    && let Some(left_out) = lines.allow()
                {
                    say_absent(path, &error, &left_out);
                }
                said = denied;
            }
        }
        std::thread::sleep(CONNECT_PAUSE);
    }
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

/// Accepts connections on a thread of its own, and hands them over one at a time. One that comes while another is
/// served waits for a while: a VMM that is started again may be there before the end of the first is seen. Then it is
/// refused, so that it does not wait for what may never come.
fn start_accepting(
    port: &Arc<Port>,
    listener: Arc<UnixListener>,
    handover: SyncSender<UnixStream>,
) -> io::Result<JoinHandle<()>> {
    let port = Arc::clone(port);
    let body = move || {
        let (mut lines, mut pauses) = (LogLimit::default(), Pauses::default());
        while port.removed.await_message(&*listener).is_ok() {
            match listener.accept() {
                Ok((stream, _)) => match offer(&handover, stream) {
                    Ok(()) => pauses = Pauses::default(),
                    Err(Some(second)) => port.turn_away(&second, HANDOVER_TIMEOUT, &mut lines),
                    Err(None) => return,
                },
                Err(error) => {
                    if let Some(left_out) = lines.allow() {
                        let hint = shortage(&error.to_string());
                        tracing::warn!(
                            port = %port.config.name,
                            "cannot accept a connection, trying again: {error}{hint}{left_out}"
                        );
                    }
                    std::thread::sleep(pauses.next());
                }
            }
        }
    };
    std::thread::Builder::new().name("accept".to_owned()).spawn(body)
}

/// Hands a connection over, or drops one that is over before anything was said: somebody only looked whether anybody
/// listens, as another daemon of the same path does (listener.rs).
/// Errors: the connection, if nobody took it in time; nothing, if nobody ever will.
fn offer(handover: &SyncSender<UnixStream>, mut stream: UnixStream) -> Result<(), Option<UnixStream>> {
    let deadline = Instant::now() + HANDOVER_TIMEOUT;
    loop {
        match handover.try_send(stream) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Disconnected(_)) => return Err(None),
            Err(TrySendError::Full(back)) if recv(&back, &mut [0], PEEK) == Ok((0, 0)) => {
                // Else a client that probes without end keeps this thread busy.
                std::thread::sleep(HANDOVER_PAUSE);
                return Ok(());
            }
            Err(TrySendError::Full(back)) if Instant::now() >= deadline => return Err(Some(back)),
            Err(TrySendError::Full(back)) => stream = back,
        }
        std::thread::sleep(HANDOVER_PAUSE);
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
    /// Pauses after a session like this.
    fn after(&mut self, port: &Arc<Port>, ended: Ended) {
        let by_end = self.by_end(ended);
        let by_number = self.by_number(Instant::now());
        if !by_number.is_zero() {
            port.warn(format!(
                "a VMM connected more than {SESSIONS_MAX} times in a short time: the next one waits for {} ms",
                by_number.as_millis()
            ));
        }
        std::thread::sleep(by_end.max(by_number));
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

/// Speaks vhost-user until the connection ends.
pub(crate) fn serve_connection(port: &Arc<Port>, stream: UnixStream) -> Ended {
    let (Ok(second), Ok(alarm)) = (stream.try_clone(), Alarm::new()) else {
        port.warn(
            "no descriptors left, the connection is dropped: raise the limit of open files (`ulimit -n`, \
                   systemd: LimitNOFILE=)"
                .to_owned(),
        );
        return Ended::Wrong;
    };
    // A client that leaves without a message only probed the socket, and is no VMM.
    let came = port.removed.await_message(&stream);
    if came.is_err() || recv(&stream, &mut [0], PEEK) == Ok((0, 0)) {
        return Ended::Idle;
    }
    let ours = VmmConnection {
        stream: second,
        alarm: alarm.clone(),
    };
    if !port.begin_session(ours) {
        return Ended::Wrong;
    }
    let mut connection = Connection::new(port);
    let mut pending = false;
    loop {
        match connection.wait(&alarm, &stream, &mut pending) {
            Ok(false) => continue,
            // It may start the control queue.
            Ok(true) => pending = true,
            Err(error) => return port.end_session(Closed::Protocol(format!("vhost-user: {error}"))),
        }
        if let Err(closed) = connection.serve_message(&stream) {
            return port.end_session(closed);
        }
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
