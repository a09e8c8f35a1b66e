//! Who asks daemons by their control sockets.
//!
//! Root asks the daemons of all users. What is in a directory of somebody else's may be anything: it is asked for a
//! limited time and length, beside the others, and what it says goes to the terminal without control characters.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{SocketAddrUnix, SocketFlags, connect};
use serde_json::Value;

use super::directories::owner_of;
use super::requests::{CAPTURE, LONGEST_REQUEST, RELOAD, RESET_WORKERS};
use crate::api::capture::link::{Answer, Request};
use crate::api::status::Status;
use crate::listener::stream;
use crate::reload::Outcome;

/// How often a request is repeated that the daemon was too busy to see in time.
const ATTEMPTS: usize = 10;
/// How long a daemon may take to answer: it waits for nothing but a CPU, and half a second for stewards.
const ANSWER: Duration = Duration::from_secs(10);
/// Most bytes that the daemons of a directory may answer: 256 ports of 128 pairs with all their counters have less.
const LONGEST: u64 = 256 << 20;
/// The same for a directory of another user's, who may fill our memory with what is no status: 1,000 queue pairs.
const LONGEST_OF_OTHERS: u64 = 4 << 20;

/// Lets the daemon at `path` read its file again, however long that takes.
/// Errors: nobody listens there, or it ends meanwhile.
pub(crate) fn reload(path: &Path) -> io::Result<Outcome> {
    request(path, RELOAD)
}

/// Resets statistics of the workers of the daemon at `path`.
/// Errors: nobody listens there, it ends meanwhile, or is too old to know of that.
pub(crate) fn reset_workers(path: &Path) -> io::Result<Outcome> {
    request(path, RESET_WORKERS)
}

/// Lets the daemon at `path` show frames of a port; they follow its answer.
/// Errors: nobody listens there, or it is too old to know of that.
pub(crate) fn begin_capture(path: &Path, wanted: &Request) -> io::Result<(UnixStream, Answer)> {
    let wanted = serde_json::to_vec(wanted)?;
    let request = [CAPTURE, &wanted, b"\n"].concat();
    let begun = until_answered(|| {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(&request)?;
        let (mut line, mut byte) = (Vec::new(), [0]);
        // Byte by byte: what follows is not of the answer. A status is longer, or is none.
        while line.len() < LONGEST_REQUEST && !line.ends_with(b"\n") && stream.read(&mut byte)? == 1 {
            line.push(byte[0]);
        }
        let answer = serde_json::from_slice(&line).ok();
        Ok(answer.map(|answer| (stream, answer)))
    })?;
    let old = "it answers with its status: is it older than this command?";
    begun.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, old))
}

fn request(path: &Path, request: &[u8]) -> io::Result<Outcome> {
    let outcome = until_answered(|| {
        let mut stream = UnixStream::connect(path)?;
        stream.write_all(request)?;
        let mut text = Vec::new();
        (&stream).take(LONGEST).read_to_end(&mut text)?;
        let mut value: Value = serde_json::from_slice(&text)?;
        without_control_characters(&mut value);
        Ok(serde_json::from_value(value).ok())
    })?;
    outcome.ok_or_else(|| ErrorKind::TimedOut.into())
}

/// Repeats a request that arrived after the daemon had stopped waiting for it: the daemon answered with its status, or
/// closed the connection with the request unread, which resets it (`unix_release_sock`, net/unix/af_unix.c).
fn until_answered<T>(mut ask: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    for _ in 0..ATTEMPTS {
        match ask() {
            Ok(None) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
            answered => return answered,
        }
    }
    Ok(None)
}

/// Asks all these daemons at once; those that answer, in this order.
pub(crate) fn ask_all(paths: &[PathBuf]) -> Vec<Status> {
    let mut allowances: HashMap<Option<&Path>, Allowance> = HashMap::new();
    for path in paths {
        let directory = allowances.entry(path.parent());
        directory.or_insert_with(|| Allowance::for_daemons_in(path.parent()));
    }
    let ask_one = |path: &PathBuf| match ask_within(path, &allowances[&path.parent()]) {
        Ok(status) => Some(status),
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            let (path, seconds) = (path.display(), ANSWER.as_secs());
            tracing::warn!(%path, "no answer within {seconds} s: is its process stopped, or no daemon?");
            None
        }
        // A socket that a killed daemon left behind is not worth a word.
        Err(_) => None,
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> = paths
            .iter()
            .map(|path| std::thread::Builder::new().spawn_scoped(scope, move || ask_one(path)))
            .collect();
        let answers = asked.into_iter().filter_map(|thread| thread.ok()?.join().ok()?);
        answers.collect()
    })
}

/// Bytes that may still be read.
struct Allowance(AtomicU64);

impl Allowance {
    fn of(bytes: u64) -> Self {
        Self(bytes.into())
    }

    /// For all daemons of a directory together: users are kept apart by it, too.
    fn for_daemons_in(directory: Option<&Path>) -> Self {
        let user = rustix::process::geteuid().as_raw();
        let owner = directory.and_then(owner_of);
        Self::of(match owner {
            Some(owner) if owner != user => LONGEST_OF_OTHERS,
            _ => LONGEST,
        })
    }

    /// Takes so many of them.
    /// Errors: there are not as many.
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

/// Asks the daemon at `path`.
/// Errors: nobody listens there, or it does not answer with a status in time.
pub(crate) fn ask(path: &Path) -> io::Result<Status> {
    ask_within(path, &Allowance::of(LONGEST))
}

/// What to say where nobody answers at a socket that was named.
pub(crate) fn no_answer(path: &Path, error: &io::Error) -> String {
    format!(
        "no daemon answers at {}: {error} (without --control all that are found are asked)",
        path.display()
    )
}

fn ask_within(path: &Path, allowance: &Allowance) -> io::Result<Status> {
    let until = Instant::now() + ANSWER;
    let socket = stream(SocketFlags::empty())?;
    // Connecting waits for room among those that wait to be accepted, for as long as sending may.
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|errno| match errno {
        Errno::AGAIN => ErrorKind::TimedOut.into(),
        errno => io::Error::from(errno),
    })?;
    let pid = socket_peercred(&socket)?.pid.as_raw_pid();
    let mut stream = UnixStream::from(socket);
    // There is no request. Fails for who has gone already, whose answer may be there.
    let _ = stream.shutdown(Shutdown::Write);
    let mut text = Vec::new();
    let mut part = [0; 65536];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(count) => {
                allowance.take(count)?;
                text.extend_from_slice(&part[..count]);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(ErrorKind::TimedOut.into());
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let mut value: Value = serde_json::from_slice(&text)?;
    without_control_characters(&mut value);
    let mut status: Status = serde_json::from_value(value)?;
    // The kernel knows better; 0: of another process namespace.
    if let Some(pid) = u32::try_from(pid).ok().filter(|&pid| pid != 0) {
        status.pid = pid;
    }
    Ok(status)
}

/// A terminal must not obey what a daemon says.
pub(crate) fn without_control_characters(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => {
            *text = text.replace(char::is_control, "?");
        }
        Value::Array(values) => values.iter_mut().for_each(without_control_characters),
        Value::Object(fields) => fields.values_mut().for_each(without_control_characters),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::guard::keeper::make_directory;

    #[test]
    fn what_is_said_has_no_control_characters() {
        let mut value = serde_json::json!({"a": ["\u{1b}[2Jx", {"b": "line\nline"}], "c": 1});
        without_control_characters(&mut value);
        assert_eq!(
            value,
            serde_json::json!({"a": ["?[2Jx", {"b": "line?line"}], "c": 1})
        );
    }

    #[test]
    fn daemons_of_a_directory_may_not_answer_without_end() {
        let directory = make_directory().expect("a place");
        let path = directory.join("1.sock");
        let listener = UnixListener::bind(&path).expect("listens");
        let liar = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().expect("somebody asks");
                stream.write_all(b"{}").expect("little");
            }
        });
        let allowance = Allowance::of(3);
        let said = || ask_within(&path, &allowance).expect_err("no status").to_string();
        assert!(!said().contains("longer than"), "two bytes of three");
        assert!(said().contains("longer than"), "of all together");
        liar.join().expect("asked twice");
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn request_that_a_busy_daemon_left_unread_is_repeated() {
        let directory = make_directory().expect("a place");
        let path = directory.join("1.sock");
        let listener = UnixListener::bind(&path).expect("listens");
        let busy = std::thread::spawn(move || {
            let mut request = [0; RELOAD.len()];
            let (mut unread, _) = listener.accept().expect("somebody asks");
            // It is there, and the rest of it is not read.
            unread.read_exact(&mut request[..1]).expect("a request");
            drop(unread);
            let (mut read, _) = listener.accept().expect("and again");
            read.read_exact(&mut request).expect("a request");
            let done = Outcome {
                done: vec!["x".to_owned()],
                ..Outcome::default()
            };
            serde_json::to_writer(read, &done).expect("a reader");
        });
        assert_eq!(reload(&path).expect("answered").done, ["x"]);
        busy.join().expect("asked twice");
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn daemon_that_answers_with_something_else_is_left_out() {
        let directory = make_directory().expect("a place");
        let path = directory.join("1.sock");
        let listener = UnixListener::bind(&path).expect("listens");
        let liar =
            std::thread::spawn(move || listener.accept().map(|(mut stream, _)| stream.write_all(b"{}")));
        assert!(ask_all(&[path]).is_empty());
        let _ = liar.join();
        fs::remove_dir_all(directory).expect("ours");
    }
}
