//! The client side of control sockets, for commands.
//!
//! Root asks the daemons of all users. A socket in a directory of another user may be anything: its answer is limited
//! in time and length and printed without control characters, and all daemons are asked in parallel.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use model::control::{Answer, CaptureBegun, CaptureRequest, Change, Changed, Refused, Request, line};
use model::events;
use model::state::{RulesStatus, Status};
use program::peer;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::directories::{find_all, owner_of};

/// How long a daemon may take to answer: it waits for nothing but a CPU, and half a second for stewards.
const ANSWER: Duration = Duration::from_secs(10);
/// Most bytes that the daemons of a directory may answer: 256 ports of 128 pairs with all their counters have less.
const LONGEST: u64 = 256 << 20;
/// The same for a directory of another user, so that invalid answers cannot exhaust our memory: 1,000 queue pairs.
const LONGEST_OF_OTHERS: u64 = 4 << 20;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The daemon refused.
    #[error("{}: {}", .0.message, .0.remedy)]
    Refused(Refused),
    /// The daemon is of another release: its answer is invalid.
    #[error("its version is {version}, that of this program {}: restart the daemon", env!("CARGO_PKG_VERSION"))]
    OtherRelease {
        /// The version that the daemon reports.
        version: String,
        /// What is wrong with its answer.
        #[source]
        source: serde_json::Error,
    },
}

/// A connection to a daemon.
struct Client {
    stream: UnixStream,
    /// Process of the daemon, if it is in this process namespace.
    pid: Option<u32>,
    /// Bytes after the last answer.
    rest: Vec<u8>,
}

impl Client {
    /// Connects and sends a request.
    ///
    /// # Errors
    /// No daemon listens at `path`, or it does not accept in time.
    fn ask(path: &Path, request: &Request) -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // connect(2) waits for room in the listen backlog; SO_SNDTIMEO limits that wait, too.
        set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
        connect(&socket, &SocketAddrUnix::new(path)?).map_err(|errno| match errno {
            Errno::AGAIN => ErrorKind::TimedOut.into(),
            errno => io::Error::from(errno),
        })?;
        let pid = peer::process(socket.as_fd()).and_then(|pid| u32::try_from(pid).ok());
        let mut stream = UnixStream::from(socket);
        stream.write_all(&line(request)?)?;
        Ok(Self {
            stream,
            pid,
            rest: Vec::new(),
        })
    }

    /// The next answer.
    ///
    /// # Errors
    /// The daemon has ended, refuses, does not answer by `until`, or sends an invalid or too long answer.
    fn receive<T: DeserializeOwned>(
        &mut self,
        until: Option<Instant>,
        allowance: &Allowance,
    ) -> Result<T, Error> {
        let mut part = [0; 65536];
        let mut looked = 0;
        let end = loop {
            if let Some(end) = self.rest[looked..].iter().position(|&byte| byte == b'\n') {
                break looked + end;
            }
            looked = self.rest.len();
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
            self.stream.set_read_timeout(left)?;
            match self.stream.read(&mut part) {
                Ok(0) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                Ok(count) => {
                    allowance.take(count)?;
                    self.rest.extend_from_slice(&part[..count]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Err(io::Error::from(ErrorKind::TimedOut).into());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        };
        let line: Vec<u8> = self.rest.drain(..=end).collect();
        let mut value: Value = serde_json::from_slice(&line).unwrap_or_default();
        without_control_characters(&mut value);
        // A daemon from before this protocol answers every request with its status.
        let version = [&value["version"], &value["ok"]["version"]];
        let version = version.into_iter().find_map(Value::as_str);
        let version = version.unwrap_or("unknown").to_owned();
        let answer: Answer<T> =
            serde_json::from_value(value).map_err(|source| Error::OtherRelease { version, source })?;
        answer.into_result().map_err(Error::Refused)
    }
}

/// Asks the daemon at `path` for its status.
///
/// # Errors
/// No daemon listens there, or it does not send its status in time.
pub fn status(path: &Path) -> Result<Status, Error> {
    status_within(path, &Allowance::of(LONGEST))
}

fn status_within(path: &Path, allowance: &Allowance) -> Result<Status, Error> {
    let until = Instant::now() + ANSWER;
    let mut client = Client::ask(path, &Request::Get(Vec::new()))?;
    let status: Status = client.receive(Some(until), allowance)?;
    // The kernel's number is valid in this PID namespace, unlike perhaps the daemon's own.
    let pid = client.pid.unwrap_or(status.pid);
    Ok(Status { pid, ..status })
}

/// The filter rules of a port of the daemon at `path`.
///
/// # Errors
/// No daemon answers there, or it has no such port.
pub fn rules(path: &Path, port: &str) -> Result<RulesStatus, Error> {
    part(path, &["ports", port, "rules"])
}

/// The part of its status at these names.
///
/// # Errors
/// No daemon answers there in time, or it has no such part.
pub fn part<T: DeserializeOwned>(path: &Path, names: &[&str]) -> Result<T, Error> {
    let request = Request::Get(names.iter().map(|&name| name.to_owned()).collect());
    let allowance = Allowance::for_daemons_in(path.parent());
    Client::ask(path, &request)?.receive(Some(Instant::now() + ANSWER), &allowance)
}

/// Changes something of the daemon at `path`, however long that takes.
///
/// # Errors
/// No daemon answers there, or it refuses.
pub fn change(path: &Path, change: Change) -> Result<Changed, Error> {
    Client::ask(path, &Request::Change(change))?.receive(None, &Allowance::of(LONGEST))
}

/// As [`change`], but waits for the answer no longer than this; the daemon may still make the change.
///
/// # Errors
/// No daemon answers there in time, or it refuses.
pub fn change_within(path: &Path, change: Change, time: Duration) -> Result<Changed, Error> {
    let (until, allowance) = (Instant::now() + time, Allowance::for_daemons_in(path.parent()));
    Client::ask(path, &Request::Change(change))?.receive(Some(until), &allowance)
}

/// Calls `on_events` with events after that sequence number, at once, and whenever something happens, until it returns
/// false.
///
/// # Errors
/// No daemon answers there, or it has ended.
pub fn events(path: &Path, after: u64, mut on_events: impl FnMut(events::Read) -> bool) -> Result<(), Error> {
    let mut client = Client::ask(path, &Request::Events { after })?;
    while on_events(client.receive(None, &Allowance::of(LONGEST))?) {}
    Ok(())
}

/// Starts to capture frames of a port of the daemon at `path`. Returns the connection that carries them, the bytes of
/// frames that were received already, and what is not captured.
///
/// # Errors
/// No daemon answers there, or it refuses.
pub fn capture(path: &Path, wanted: CaptureRequest) -> Result<(UnixStream, Vec<u8>, CaptureBegun), Error> {
    let mut client = Client::ask(path, &Request::Capture(wanted))?;
    let begun = client.receive(Some(Instant::now() + ANSWER), &Allowance::of(LONGEST))?;
    Ok((client.stream, client.rest, begun))
}

/// Asks all these daemons at once. Returns the status of those that answer, in this order.
pub fn statuses(paths: &[PathBuf]) -> Vec<Status> {
    answering(paths).into_iter().map(|(_, status)| status).collect()
}

/// The control sockets of all daemons that this user may ask, each with the status or why there is none. They are asked at
/// once.
pub fn found() -> Vec<(PathBuf, Result<Status, Error>)> {
    ask_each(&find_all())
}

/// Those that answer.
fn answering(paths: &[PathBuf]) -> Vec<(PathBuf, Status)> {
    let answers = ask_each(paths).into_iter();
    let answering = answers.filter_map(|(path, asked)| match asked {
        Ok(status) => Some((path, status)),
        Err(Error::Io(error)) if error.kind() == ErrorKind::TimedOut => {
            let (path, seconds) = (path.display(), ANSWER.as_secs());
            tracing::warn!(%path, "no answer within {seconds} s: is its process stopped, or no daemon?");
            None
        }
        Err(error @ Error::OtherRelease { .. }) => {
            tracing::warn!("{}", no_answer(&path, &error));
            None
        }
        // A killed daemon left this socket behind: there is nothing to report.
        Err(_) => None,
    });
    answering.collect()
}

fn ask_each(paths: &[PathBuf]) -> Vec<(PathBuf, Result<Status, Error>)> {
    let mut allowances: HashMap<Option<&Path>, Allowance> = HashMap::new();
    for path in paths {
        let directory = allowances.entry(path.parent());
        directory.or_insert_with(|| Allowance::for_daemons_in(path.parent()));
    }
    let ask_one = |path: &PathBuf| (path.clone(), status_within(path, &allowances[&path.parent()]));
    std::thread::scope(|scope| {
        let asked: Vec<_> = paths
            .iter()
            .map(|path| std::thread::Builder::new().spawn_scoped(scope, move || ask_one(path)))
            .collect();
        let answers = asked.into_iter().filter_map(|thread| thread.ok()?.join().ok());
        answers.collect()
    })
}

/// The status of the daemon at `control`; without it of all that are found, which may be none.
///
/// # Errors
/// No daemon answers at `control`.
pub fn ask(control: Option<&Path>) -> Result<Vec<Status>, Unreachable> {
    match control {
        Some(path) => match status(path) {
            Ok(status) => Ok(vec![status]),
            Err(error) => Err(Unreachable(no_answer(path, &error))),
        },
        None => Ok(statuses(&find_all())),
    }
}

/// As [`ask`], but at least one daemon must answer.
///
/// # Errors
/// No daemon answers.
pub fn ask_some(control: Option<&Path>) -> Result<Vec<Status>, Unreachable> {
    Daemons::find(control).map(|(_, statuses)| statuses)
}

/// Daemons that answered, to be asked again without those that did not.
#[derive(Debug, Clone)]
pub struct Daemons(Vec<PathBuf>);

impl Daemons {
    /// The daemon at `control`, or without it all that are found, at least one; with their status.
    ///
    /// # Errors
    /// No daemon answers.
    pub fn find(control: Option<&Path>) -> Result<(Self, Vec<Status>), Unreachable> {
        if let Some(path) = control {
            return Ok((Self(vec![path.to_owned()]), ask(control)?));
        }
        let (paths, statuses): (Vec<_>, Vec<_>) = answering(&find_all()).into_iter().unzip();
        if paths.is_empty() {
            let others = match rustix::process::geteuid().is_root() {
                true => "",
                false => " run as root for those of other users,",
            };
            return Err(Unreachable(format!(
                "no daemon found: start one with `vhost-af-xdp serve`,{others} or name its socket with --control PATH"
            )));
        }
        Ok((Self(paths), statuses))
    }

    /// The status of those that still answer.
    #[must_use]
    pub fn ask(&self) -> Vec<Status> {
        statuses(&self.0)
    }
}

/// No daemon answers: why, and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreachable(String);

/// Bytes that may still be read.
struct Allowance(AtomicU64);

impl Allowance {
    fn of(bytes: u64) -> Self {
        Self(bytes.into())
    }

    /// One allowance for all daemons of a directory, and so for all daemons of its user.
    fn for_daemons_in(directory: Option<&Path>) -> Self {
        let user = rustix::process::geteuid().as_raw();
        let owner = directory.and_then(owner_of);
        Self::of(match owner {
            Some(owner) if owner != user => LONGEST_OF_OTHERS,
            _ => LONGEST,
        })
    }

    /// Takes this many bytes.
    ///
    /// # Errors
    /// Fewer are left.
    fn take(&self, bytes: usize) -> io::Result<()> {
        // A number only; nothing is published with it.
        let taken = self
            .0
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes as u64));
        taken
            .map(drop)
            .map_err(|_| io::Error::new(ErrorKind::InvalidData, "the answer is longer than any status"))
    }
}

/// The error message if no daemon answers at a given socket.
pub fn no_answer(path: &Path, error: &Error) -> String {
    match error {
        Error::Refused(_) => error.to_string(),
        Error::OtherRelease { .. } => {
            format!(
                "the daemon at {} speaks another control protocol: {error}",
                path.display()
            )
        }
        Error::Io(io) if io.kind() == ErrorKind::PermissionDenied => {
            let path = path.display();
            format!("no permission for {path}: run this as the user that started the daemon, or root")
        }
        Error::Io(_) => format!(
            "no daemon answers at {}: {error} (without --control all that are found are asked)",
            path.display()
        ),
    }
}

/// Replaces control characters, so that a daemon cannot control the terminal.
fn without_control_characters(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => {
            *text = text.replace(char::is_control, "?");
        }
        Value::Array(values) => values.iter_mut().for_each(without_control_characters),
        Value::Object(fields) => {
            let cleaned = std::mem::take(fields).into_iter().map(|(key, mut value)| {
                without_control_characters(&mut value);
                (key.replace(char::is_control, "?"), value)
            });
            *fields = cleaned.collect();
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_is_said_has_no_control_characters() {
        let mut value = serde_json::json!({"a": ["\u{1b}[2Jx", {"b\u{9b}": "line\nline"}], "c": 1});
        without_control_characters(&mut value);
        assert_eq!(
            value,
            serde_json::json!({"a": ["?[2Jx", {"b?": "line?line"}], "c": 1})
        );
    }

    #[test]
    fn daemons_of_a_directory_may_not_answer_without_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("1.sock");
        let listener = UnixListener::bind(&path).expect("listens");
        let liar = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().expect("somebody asks");
                // The client writes before it reads, and would not read what is closed by then.
                let read = std::io::BufRead::read_line(&mut io::BufReader::new(&stream), &mut String::new());
                read.expect("a request");
                stream.write_all(b"{}\n").expect("little");
            }
        });
        let allowance = Allowance::of(5);
        let said = || {
            status_within(&path, &allowance)
                .expect_err("no status")
                .to_string()
        };
        assert!(!said().contains("longer than"), "three bytes of five");
        assert!(said().contains("longer than"), "of all together");
        liar.join().expect("asked twice");
    }

    #[test]
    fn daemon_of_before_this_protocol_is_reported_with_its_version() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("1.sock");
        let listener = UnixListener::bind(&path).expect("listens");
        let older = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("somebody asks");
            let read = std::io::BufRead::read_line(&mut io::BufReader::new(&stream), &mut String::new());
            read.expect("a request");
            stream
                .write_all(b"{\"pid\":1,\"version\":\"0.0.9\"}\n")
                .expect("it is read");
        });
        let error = change(&path, Change::Reload).expect_err("no answer to that");
        let said = no_answer(&path, &error);
        let begin = format!(
            "the daemon at {} speaks another control protocol: its version is 0.0.9, ",
            path.display()
        );
        assert!(said.starts_with(&begin), "{said}");
        assert!(
            said.contains(env!("CARGO_PKG_VERSION")) && said.ends_with("restart the daemon"),
            "{said}"
        );
        older.join().expect("asked once");
    }

    #[test]
    fn daemon_that_answers_with_something_else_is_left_out() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("1.sock");
        let listener = UnixListener::bind(&path).expect("listens");
        let liar =
            std::thread::spawn(move || listener.accept().map(|(mut stream, _)| stream.write_all(b"{}\n")));
        assert!(statuses(&[path]).is_empty());
        let _ = liar.join();
    }
}
