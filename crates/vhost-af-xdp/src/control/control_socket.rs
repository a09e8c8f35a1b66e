//! Where `vhost-af-xdp status` finds a running daemon.
//!
//! A connection gets one JSON document, the [`Status`], and is closed. There are no requests, so
//! nothing that connects can change or block anything; the socket is readable for its owner only.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::status::Status;

/// How long a peer may take to read its answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a daemon may take to answer: a port whose queue is still busy (`BIND_TIMEOUT`) answers when it has it, or has it not.
const ANSWER: Duration = Duration::from_secs(10);

/// Directory of the control sockets: one file a daemon, named after its process. `None` where
/// there is none that only this user can write to.
fn directory() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/run/vhost-af-xdp"));
    }
    std::env::var_os("XDG_RUNTIME_DIR").map(|path| PathBuf::from(path).join("vhost-af-xdp"))
}

/// The default path of this process's control socket. Sockets of daemons that were killed are
/// removed on the way.
pub(crate) fn default_path() -> Option<PathBuf> {
    for path in find_all() {
        let _ = remove_stale(&path);
    }
    directory().map(|directory| directory.join(format!("{}.sock", std::process::id())))
}

/// Listens at `path`, replacing a socket that nobody listens on any more.
///
/// # Errors
/// The directory or socket cannot be made, or somebody listens there.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent)?;
    }
    remove_stale(path)?;
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Removes a socket file that nobody listens on.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] if somebody does, [`io::ErrorKind::AlreadyExists`] if it is
/// another kind of file.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !metadata.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the file exists and is not a socket",
        ));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process listens there",
        )),
        Err(error) => Err(error),
    }
}

/// Answers everybody who connects, for ever.
pub(crate) fn serve(listener: &UnixListener, read: impl Fn() -> Status) {
    for stream in listener.incoming().flatten() {
        let _ = answer(stream, &read());
    }
}

fn answer(mut stream: UnixStream, status: &Status) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut text = serde_json::to_vec(status)?;
    text.push(b'\n');
    stream.write_all(&text)
}

/// Asks the daemon at `path`.
///
/// # Errors
/// Nobody listens there, or it does not answer with a status.
pub(crate) fn ask(path: &Path) -> io::Result<Status> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

/// The control sockets of all daemons that this user may ask.
pub(crate) fn find_all() -> Vec<PathBuf> {
    let entries = directory()
        .and_then(|path| fs::read_dir(path).ok())
        .into_iter()
        .flatten()
        .flatten();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "sock"))
        .collect();
    paths.sort();
    paths
}
