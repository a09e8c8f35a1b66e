//! Where `vhost-af-xdp status` finds a running daemon.
//!
//! A connection gets one JSON document, the [`Status`], and is closed; with the request `reload` before, the document
//! says what came of that ([`Outcome`]); so it does with `reset`, after which statistics of workers begin anew. With
//! `capture` it stays, and frames of a port are shown ([`Captures`]). Who connects and says nothing is given the status
//! after [`REQUEST_WAIT`]. The socket is for its owner only (and root).
//!
//! Daemons are looked for only in directories that nobody but their user can have made or filled: in /tmp anybody may
//! make one that is named after another user, and say there what he likes.
//!
//! Root asks the daemons of all users. What is in a directory of somebody else's may be anything: it is asked for a
//! limited time and length, beside the others, and what it says goes to the terminal without control characters.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{SocketAddrUnix, SocketFlags, connect};
use serde::Serialize;
use serde_json::Value;

use super::capture::Captures;
use super::capture::link::{Answer, Request};
use super::status::Status;
use crate::listener::{Access, ListenError, listen_at, remove_stale, stream};
use crate::reload::changes::RESET;
use crate::reload::{Outcome, Reload};

/// How long a peer may take to read its answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a request is waited for. `status` says at once that it has none.
const REQUEST_WAIT: Duration = Duration::from_millis(100);
/// Requests that there are.
const RELOAD: &[u8] = b"reload\n";
const RESET_WORKERS: &[u8] = b"reset\n";
/// What follows is what is to be captured.
const CAPTURE: &[u8] = b"capture ";
/// Longest request.
const LONGEST_REQUEST: usize = 4096;
/// How often it is said again where the status came back: the daemon was too busy to see it in time.
const ATTEMPTS: usize = 10;
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a daemon may take to answer: it waits for nothing but a CPU, and half a second for stewards.
const ANSWER: Duration = Duration::from_secs(10);
/// Most bytes that the daemons of a directory may answer: 256 ports of 128 pairs with all their counters have less.
const LONGEST: u64 = 256 << 20;
/// The same for a directory of another user's, who may fill our memory with what is no status: 1,000 queue pairs.
const LONGEST_OF_OTHERS: u64 = 4 << 20;
/// Most daemons of one directory of another user's that are asked.
const MOST_OF_OTHERS: usize = 64;
/// Most such directories, and most daemons in them together: one person may have 65,536 subordinate numbers
/// (subuid(5)), and a directory for each.
const MOST_DIRECTORIES: usize = 256;
const MOST_OF_ALL_OTHERS: usize = 1024;

/// Name of the directory, where it has no number of a user.
const NAME: &str = "vhost-af-xdp";

/// Directories of the control sockets of this user's daemons, one file a daemon, named after its process. A daemon
/// listens in the first; one that was started without the variable of a later session may be in another.
fn own_directories() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    if user == 0 {
        return vec![Path::new("/run").join(NAME)];
    }
    let said = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
    let usual = PathBuf::from(format!("/run/user/{user}"));
    let is_ours = |path: &PathBuf| owner_of(path) == Some(user);
    let mut directories: Vec<PathBuf> = said.into_iter().map(PathBuf::from).collect();
    directories.extend(Some(usual).filter(is_ours));
    directories.dedup();
    let directories = directories.into_iter().map(|path| path.join(NAME));
    let without_session = PathBuf::from(format!("/tmp/{NAME}-{user}"));
    directories.chain([without_session]).collect()
}

/// The user that a directory belongs to; no link to one.
fn owner_of(path: &Path) -> Option<u32> {
    let metadata = fs::symlink_metadata(path).ok()?;
    metadata.is_dir().then(|| metadata.uid())
}

/// Whether all that is in a directory is there by this user's will, or root's.
fn is_of(directory: &Path, user: u32) -> bool {
    let metadata = fs::symlink_metadata(directory);
    metadata.is_ok_and(|it| it.is_dir() && [0, user].contains(&it.uid()) && it.mode() & 0o022 == 0)
}

/// The default path of this process's control socket. Sockets of daemons that were killed are removed on the way.
pub(crate) fn default_path() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    let mut directories = own_directories();
    for path in sockets_of(&directories, user) {
        let _ = remove_stale(&path);
    }
    let directory = directories.swap_remove(0);
    directory.join(format!("{}.sock", std::process::id()))
}

/// Listens at `path`, replacing a socket that nobody listens on any more.
/// Errors: the socket cannot be made, or somebody listens there. Its directory is not there, and not one of those that
/// `status` looks into; or it is, and others can put something into it.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, ListenError> {
    let is_parent = |directory: &&PathBuf| path.parent() == Some(directory.as_path());
    if let Some(directory) = own_directories().iter().find(is_parent) {
        make_own(directory, rustix::process::geteuid().as_raw())?;
    }
    listen_at(path, &Access::OWN)
}

/// Makes a directory for sockets of this user's daemons, if it is not there, in one that is.
fn make_own(directory: &Path, user: u32) -> Result<(), ListenError> {
    // A steward's socket, to which everybody may connect, is beside root's.
    let mode = if user == 0 { 0o755 } else { 0o700 };
    let parent = || directory.parent().unwrap_or(directory).to_owned();
    if let Err(error) = fs::DirBuilder::new().mode(mode).create(directory) {
        match error.kind() {
            io::ErrorKind::AlreadyExists => {}
            io::ErrorKind::NotFound => return Err(ListenError::NoDirectory(parent())),
            io::ErrorKind::PermissionDenied => return Err(ListenError::MayNot(parent())),
            _ => return Err(error.into()),
        }
    }
    match is_of(directory, user) {
        true => Ok(()),
        false => Err(ListenError::OfOthers(directory.to_owned())),
    }
}

/// Answers everybody who connects, for ever. `reload`: for a daemon that has a file.
pub(crate) fn serve(
    listener: &UnixListener,
    read: impl Fn() -> Status,
    reload: Option<&Reload>,
    reset: impl Fn(),
    captures: &Arc<Captures>,
) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // No descriptor is left, and the next attempt would fail at once, too.
            std::thread::sleep(PAUSE);
            continue;
        };
        match request_of(&stream).as_slice() {
            RELOAD => answer_reload(stream, reload),
            RESET_WORKERS => {
                reset();
                let done = vec![RESET.to_owned()];
                let failed = Vec::new();
                drop(answer(stream, &Outcome { done, failed }));
            }
            request => match request.strip_prefix(CAPTURE) {
                Some(request) => captures.serve(stream, request),
                None => drop(answer(stream, &read())),
            },
        }
    }
}

/// What somebody wants, as far as he says that in time.
fn request_of(mut stream: &UnixStream) -> Vec<u8> {
    let (mut request, mut byte) = (Vec::new(), [0]);
    let _ = stream.set_read_timeout(Some(REQUEST_WAIT));
    let is_whole = |request: &[u8]| match CAPTURE.starts_with(&request[..request.len().min(CAPTURE.len())]) {
        true => request.len() >= LONGEST_REQUEST,
        false => request.len() >= RELOAD.len(),
    };
    while !is_whole(&request) && !request.ends_with(b"\n") {
        match stream.read(&mut byte) {
            Ok(1..) => request.push(byte[0]),
            Ok(0) | Err(_) => break,
        }
    }
    request
}

/// On a thread of its own: it may take a while, and others want the status.
fn answer_reload(stream: UnixStream, reload: Option<&Reload>) {
    let reload = reload.cloned();
    let body = move || {
        let without =
            || Outcome::failed("it was started without --config: there is nothing to read again".to_owned());
        let outcome = reload.map_or_else(without, |reload| reload.run());
        let _ = answer(stream, &outcome);
    };
    // Who asks sees the end of the connection.
    let _ = std::thread::Builder::new().name("reload".to_owned()).spawn(body);
}

fn answer(mut stream: UnixStream, document: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut text = serde_json::to_vec(document)?;
    text.push(b'\n');
    stream.write_all(&text)
}

/// Lets the daemon at `path` read its file again, however long that takes.
/// Errors: nobody listens there, or it ends meanwhile.
pub(crate) fn reload(path: &Path) -> io::Result<Outcome> {
    request(path, RELOAD)
}

/// Lets statistics of the workers of the daemon at `path` begin anew.
/// Errors: nobody listens there, it ends meanwhile, or is too old to know of that.
pub(crate) fn reset_workers(path: &Path) -> io::Result<Outcome> {
    request(path, RESET_WORKERS)
}

/// Lets the daemon at `path` show frames of a port; they follow its answer.
/// Errors: nobody listens there, or it is too old to know of that.
pub(crate) fn begin_capture(path: &Path, wanted: &Request) -> io::Result<(UnixStream, Answer)> {
    let wanted = serde_json::to_vec(wanted)?;
    let request = [CAPTURE, &wanted, b"\n"].concat();
    for _ in 0..ATTEMPTS {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(&request)?;
        let (mut line, mut byte) = (Vec::new(), [0]);
        // Byte by byte: what follows is not of the answer. A status is longer, or is none.
        while line.len() < LONGEST_REQUEST && !line.ends_with(b"\n") && stream.read(&mut byte)? == 1 {
            line.push(byte[0]);
        }
        if let Ok(answer) = serde_json::from_slice(&line) {
            return Ok((stream, answer));
        }
    }
    let old = "it answers with its status: is it older than this command?";
    Err(io::Error::new(io::ErrorKind::InvalidData, old))
}

fn request(path: &Path, request: &[u8]) -> io::Result<Outcome> {
    for _ in 0..ATTEMPTS {
        let mut stream = UnixStream::connect(path)?;
        stream.write_all(request)?;
        let mut text = Vec::new();
        (&stream).take(LONGEST).read_to_end(&mut text)?;
        let mut value: Value = serde_json::from_slice(&text)?;
        without_control_characters(&mut value);
        if let Ok(outcome) = serde_json::from_value(value) {
            return Ok(outcome);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
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
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
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
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the answer is longer than any status"))
    }
}

/// Asks the daemon at `path`.
/// Errors: nobody listens there, or it does not answer with a status in time.
pub(crate) fn ask(path: &Path) -> io::Result<Status> {
    ask_within(path, &Allowance::of(LONGEST))
}

fn ask_within(path: &Path, allowance: &Allowance) -> io::Result<Status> {
    let until = Instant::now() + ANSWER;
    let socket = stream(SocketFlags::empty())?;
    // Connecting waits for room among those that wait to be accepted, for as long as sending may.
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|errno| match errno {
        Errno::AGAIN => io::ErrorKind::TimedOut.into(),
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
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(count) => {
                allowance.take(count)?;
                text.extend_from_slice(&part[..count]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
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

/// The control sockets of all daemons that this user may ask.
pub(crate) fn find_all() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let mut paths = sockets_of(&own_directories(), user);
    if user == 0 {
        paths.extend(sockets_of_others(&directories_of_others()));
        // Where docs/deploy/vhost-af-xdp@.service puts it.
        let units = entries_of(Path::new("/run"), |name| {
            name.strip_prefix("vhost-af-xdp-").map(drop)
        });
        let sockets = units.into_iter().map(|unit| unit.path.join("control.sock"));
        paths.extend(sockets.filter(|path| is_socket(path)));
    }
    paths
}

/// The control sockets in these directories of others, as many as are worth to be asked.
fn sockets_of_others(directories: &[PathBuf]) -> Vec<PathBuf> {
    let asked = directories.iter().take(MOST_DIRECTORIES);
    let of_each = asked.flat_map(|directory| sockets_in(directory).into_iter().take(MOST_OF_OTHERS));
    let paths: Vec<PathBuf> = of_each.take(MOST_OF_ALL_OTHERS).collect();
    if directories.len() > MOST_DIRECTORIES || paths.len() == MOST_OF_ALL_OTHERS {
        tracing::warn!(
            "{} directories of users' daemons: asked are {MOST_DIRECTORIES} of them and {MOST_OF_ALL_OTHERS} daemons \
             at most; name another daemon with --control PATH",
            directories.len()
        );
    }
    paths
}

/// Directories of users that are not root, each of the user that it is named after; first those that come with a
/// session, of which nobody can make more.
fn directories_of_others() -> Vec<PathBuf> {
    let sessions = entries_of(Path::new("/run/user"), |name| user_in(name, ""));
    let sessions = sessions.into_iter().map(|session| Entry {
        path: session.path.join(NAME),
        ..session
    });
    let others = entries_of(Path::new("/tmp"), |name| user_in(name, &format!("{NAME}-")));
    sessions
        .chain(others)
        .filter(|entry| is_of(&entry.path, entry.meaning))
        .map(|entry| entry.path)
        .collect()
}

/// The user whose number follows these words in a name.
fn user_in(name: &str, words: &str) -> Option<u32> {
    name.strip_prefix(words)?.parse().ok()
}

/// The control sockets in those of these directories that are this user's.
fn sockets_of(directories: &[PathBuf], user: u32) -> Vec<PathBuf> {
    let theirs = directories.iter().filter(|directory| is_of(directory, user));
    theirs.flat_map(|directory| sockets_in(directory)).collect()
}

/// The control sockets in a directory: `PID.sock`.
fn sockets_in(directory: &Path) -> Vec<PathBuf> {
    let pid = |name: &str| name.strip_suffix(".sock")?.parse::<u32>().ok();
    let entries = entries_of(directory, pid).into_iter().map(|entry| entry.path);
    entries.filter(|path| is_socket(path)).collect()
}

/// An entry of a directory.
struct Entry<T> {
    /// What its name means.
    meaning: T,
    path: PathBuf,
}

/// Those entries whose names mean something, in the order of their paths.
fn entries_of<T>(directory: &Path, meaning: impl Fn(&str) -> Option<T>) -> Vec<Entry<T>> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        Some(Entry {
            meaning: meaning(entry.file_name().to_str()?)?,
            path: entry.path(),
        })
    });
    let mut found: Vec<_> = named.collect();
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::keeper::make_directory;

    #[test]
    fn only_sockets_named_after_a_process_are_asked() {
        let directory = make_directory().expect("a place");
        for name in ["12.sock", "steward.sock", "13.txt"] {
            let _ = UnixListener::bind(directory.join(name)).expect("a socket");
        }
        fs::write(directory.join("14.sock"), "").expect("a file");
        std::os::unix::fs::symlink("12.sock", directory.join("15.sock")).expect("a link");
        assert_eq!(sockets_in(&directory), [directory.join("12.sock")]);
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn directories_of_others_links_and_open_ones_are_not_this_users() {
        let place = make_directory().expect("a place");
        let (directory, user) = (place.join("sockets"), rustix::process::geteuid().as_raw());
        let stranger = user.wrapping_add(1);
        make_own(&directory, user).expect("made, ours alone");
        make_own(&directory, user).expect("still there");
        let _ = UnixListener::bind(directory.join("1.sock")).expect("a socket");
        let sockets = |directory: &PathBuf, user| sockets_of(std::slice::from_ref(directory), user);
        assert_eq!(sockets(&directory, user), [directory.join("1.sock")]);
        // Root's directories are believed; who tests may be root.
        if user != 0 {
            assert!(sockets(&directory, stranger).is_empty(), "another's");
        }
        let link = place.join("link");
        std::os::unix::fs::symlink(&directory, &link).expect("a link");
        for mode in [0o770, 0o702] {
            let open = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(&directory, open).expect("ours");
            assert!(sockets(&directory, user).is_empty(), "{mode:o}");
            let refused = make_own(&directory, user).expect_err("open").to_string();
            assert!(
                refused.contains(&format!("remove {}", directory.display())),
                "{refused}"
            );
        }
        fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("ours");
        assert!(sockets(&link, user).is_empty(), "a link, perhaps of another user");
        assert!(make_own(&link, user).is_err(), "a link, perhaps of another user");
        fs::remove_dir_all(place).expect("ours");
    }

    #[test]
    fn one_person_with_many_numbers_makes_root_ask_no_more_than_so_many() {
        let place = make_directory().expect("a place");
        let directories: Vec<PathBuf> = (0..MOST_DIRECTORIES + 1)
            .map(|number| place.join(number.to_string()))
            .collect();
        let socket = |directory: &Path, pid: usize| {
            let _ = UnixListener::bind(directory.join(format!("{pid}.sock"))).expect("a socket");
        };
        for directory in &directories {
            fs::create_dir(directory).expect("ours");
            socket(directory, 1);
        }
        assert_eq!(sockets_of_others(&directories).len(), MOST_DIRECTORIES);
        for directory in &directories[..20] {
            (2..=MOST_OF_OTHERS + 1).for_each(|pid| socket(directory, pid));
        }
        assert_eq!(sockets_of_others(&directories[..1]).len(), MOST_OF_OTHERS);
        assert_eq!(sockets_of_others(&directories).len(), MOST_OF_ALL_OTHERS);
        fs::remove_dir_all(place).expect("ours");
    }

    #[test]
    fn directory_is_made_in_one_that_is_there() {
        let place = make_directory().expect("a place");
        let said = make_own(&place.join("no/sockets"), 0)
            .expect_err("missing")
            .to_string();
        assert!(
            said.contains(&format!("`mkdir -p {}/no`", place.display())),
            "{said}"
        );
        fs::remove_dir_all(place).expect("ours");
    }

    #[test]
    fn users_are_read_from_names() {
        for (name, words, user) in [
            ("vhost-af-xdp-7", "vhost-af-xdp-", Some(7)),
            ("1000", "", Some(1000)),
            ("vhost-af-xdp-7-0", "vhost-af-xdp-", None),
            ("vhost-af-xdp--1", "vhost-af-xdp-", None),
            ("other-7", "vhost-af-xdp-", None),
            ("", "", None),
        ] {
            assert_eq!(user_in(name, words), user, "{name}");
        }
    }

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
