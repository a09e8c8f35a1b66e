//! Listening sockets with a path, whose owner, group and mode are set before anybody can connect.
//!
//! Whoever may write to the file of a Unix socket may connect to it (unix(7)). The file gets its mode from the socket
//! when it is bound (`unix_bind_bsd`, net/unix/af_unix.c), so the mode is set before; owner and group are set between
//! bind and listen, while every connect is refused. Both are set through a descriptor that was checked to be the socket
//! just bound: in a directory that others may write to, the path may name another file, theirs or root's, by then.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, accessat, chownat, fchmod, fstat, open};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::thread::CapabilitySet;

/// Most connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Who may connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    /// UID of the file's owner; `None`: this process's.
    pub(crate) owner: Option<u32>,
    /// GID of the file; `None`: this process's.
    pub(crate) group: Option<u32>,
    /// Permission bits.
    pub(crate) mode: u32,
}

impl Access {
    /// For this user alone.
    pub(crate) const OWN: Self = Self {
        owner: None,
        group: None,
        mode: 0o600,
    };
}

/// Why a socket cannot listen at a path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error("its directory does not exist: `mkdir -p {}`, or choose another path", .0.display())]
    NoDirectory(PathBuf),
    #[error("this user may not create files in {}: choose another path", .0.display())]
    NoPermission(PathBuf),
    #[error(
        "others can put files into {}: choose a path in a directory that only this user may write to", .0.display()
    )]
    WritableByOthers(PathBuf),
    #[error("the path is a file that is not a socket: choose another path")]
    NotASocket,
    #[error("another process listens there: stop it, or choose another path")]
    InUse,
    #[error(
        "the socket may not be given to {0}: only root may give it to others, other users to their own groups"
    )]
    CannotChown(String),
    #[error(transparent)]
    Other(#[from] io::Error),
}

impl ListenError {
    fn may_not_give(access: &Access) -> Self {
        let to = |what, number: Option<u32>| number.map(|number| format!("{what} {number}"));
        let to = [to("user", access.owner), to("group", access.group)];
        Self::CannotChown(to.into_iter().flatten().collect::<Vec<_>>().join(" and "))
    }
}

impl From<rustix::io::Errno> for ListenError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Other(errno.into())
    }
}

/// Listens at `path`, replacing a socket that nobody listens on any more. The calling thread should be the only one:
/// the umask is the process's.
/// Errors: [`ListenError`]; no file is left behind.
pub(crate) fn listen_at(path: &Path, access: &Access) -> Result<UnixListener, ListenError> {
    listen_as(SocketType::STREAM, path, access).map(UnixListener::from)
}

/// [`listen_at`] for any type of socket.
/// Errors: [`ListenError`]; no file is left behind.
pub(crate) fn listen_as(kind: SocketType, path: &Path, access: &Access) -> Result<OwnedFd, ListenError> {
    remove_stale(path)?;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::from_raw_mode(access.mode))?;
    let address = SocketAddrUnix::new(path)?;
    let umask = rustix::process::umask(Mode::empty());
    let bound = bind(&socket, &address);
    rustix::process::umask(umask);
    bound.map_err(|errno| explain(errno, path))?;
    let listens = give(path, access).and_then(|()| Ok(listen(&socket, BACKLOG)?));
    if let Err(error) = listens {
        let _ = fs::remove_file(path);
        return Err(error);
    }
    Ok(socket)
}

/// Checks what prevents [`listen_at`] there, except its directory ([`check_directory`]), as far as that can be seen;
/// creates and removes nothing.
pub(crate) fn check_at(path: &Path, access: &Access) -> Result<(), ListenError> {
    is_stale(path)?;
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let groups = rustix::process::getgroups().unwrap_or_default();
    let owner = access.owner.map(Uid::from_raw).unwrap_or(user);
    let to = access.group.map(Gid::from_raw).unwrap_or(group);
    let is_ours = owner == user && (to == group || groups.contains(&to));
    let may_give =
        || program::capabilities::lacking(CapabilitySet::CHOWN).is_ok_and(|lacking| lacking.is_empty());
    match is_ours || may_give() {
        true => Ok(()),
        false => Err(ListenError::may_not_give(access)),
    }
}

/// Checks whether this user may create files in a directory.
pub(crate) fn check_directory(directory: &Path) -> Result<(), ListenError> {
    let wanted = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    let checked = accessat(CWD, directory, wanted, AtFlags::EACCESS);
    checked.map_err(|errno| explain(errno, &directory.join("socket")))
}

/// Removes a socket file that nobody listens on.
/// Errors: [`ListenError::InUse`], [`ListenError::NotASocket`], or that it cannot be removed.
pub(crate) fn remove_stale(path: &Path) -> Result<(), ListenError> {
    match is_stale(path)? {
        true => Ok(fs::remove_file(path)?),
        false => Ok(()),
    }
}

/// Whether there is a socket that nobody listens on; false: there is no file.
fn is_stale(path: &Path) -> Result<bool, ListenError> {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return Ok(false);
    };
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket);
    }
    // Does not wait for a listener that does not accept.
    match connect(stream(SocketFlags::NONBLOCK)?, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::CONNREFUSED) => Ok(true),
        Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::PROTOTYPE) => Err(ListenError::InUse),
        Err(errno) => Err(errno.into()),
    }
}

/// A Unix stream socket that is closed on exec.
pub(crate) fn stream(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn explain(errno: rustix::io::Errno, path: &Path) -> ListenError {
    let directory = directory_of(path);
    match errno {
        rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR => ListenError::NoDirectory(directory),
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM | rustix::io::Errno::ROFS => {
            ListenError::NoPermission(directory)
        }
        // Created between the check and the bind.
        rustix::io::Errno::ADDRINUSE => ListenError::InUse,
        errno => errno.into(),
    }
}

/// The directory of a file.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Sets owner and group of the socket that was just bound at `path`.
fn give(path: &Path, access: &Access) -> Result<(), ListenError> {
    if (access.owner, access.group) == (None, None) {
        return Ok(());
    }
    let file = open(
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let is = fstat(&file)?;
    let is_ours = FileType::from_raw_mode(is.st_mode) == FileType::Socket
        && is.st_uid == rustix::process::geteuid().as_raw()
        && is.st_nlink == 1;
    if !is_ours {
        return Err(ListenError::InUse);
    }
    let (owner, group) = (access.owner.map(Uid::from_raw), access.group.map(Gid::from_raw));
    chownat(&file, "", owner, group, AtFlags::EMPTY_PATH).map_err(|errno| match errno {
        rustix::io::Errno::PERM => ListenError::may_not_give(access),
        errno => errno.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::supervision::helper::make_directory;

    #[test]
    fn socket_has_the_mode_that_was_asked_for_whatever_the_umask() {
        let directory = make_directory().expect("a place");
        let path = directory.join("a.sock");
        for mode in [0o600, 0o660, 0o666, 0o770] {
            let listener = listen_at(&path, &Access { mode, ..Access::OWN }).expect("listens");
            assert_eq!(fs::metadata(&path).expect("made").mode() & 0o7777, mode);
            UnixStream::connect(&path).expect("somebody listens");
            drop(listener);
        }
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn what_is_in_the_way_is_told_with_a_remedy() {
        let directory = make_directory().expect("a place");
        let at = |name: &str| {
            let error = listen_at(&directory.join(name), &Access::OWN).expect_err(name);
            error.to_string()
        };
        assert!(at("no/a.sock").contains(&format!("`mkdir -p {}/no`", directory.display())));
        fs::write(directory.join("file"), "").expect("written");
        assert!(at("file").contains("not a socket: choose another path"));
        let _taken = listen_at(&directory.join("taken"), &Access::OWN).expect("listens");
        assert!(at("taken").contains("another process listens there"));
        let seen =
            |name: &str| check_at(&directory.join(name), &Access::OWN).map_err(|error| error.to_string());
        assert_eq!(seen("file"), Err(at("file")));
        assert_eq!(seen("taken"), Err(at("taken")));
        assert_eq!(seen("free"), Ok(()));
        let in_directory = |path: &Path| check_directory(path).map_err(|error| error.to_string());
        assert_eq!(in_directory(&directory.join("no")), Err(at("no/a.sock")));
        assert_eq!(in_directory(&directory), Ok(()));
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn socket_that_nobody_listens_on_is_replaced() {
        let directory = make_directory().expect("a place");
        let path = directory.join("a.sock");
        drop(listen_at(&path, &Access::OWN).expect("listens"));
        listen_at(&path, &Access::OWN).expect("replaced");
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn name_that_leads_elsewhere_is_given_to_nobody() {
        let directory = make_directory().expect("a place");
        let (path, file) = (directory.join("a.sock"), directory.join("file"));
        fs::write(&file, "").expect("written");
        std::os::unix::fs::symlink(&file, &path).expect("made");
        let access = Access {
            group: Some(rustix::process::getegid().as_raw()),
            ..Access::OWN
        };
        assert!(matches!(give(&path, &access), Err(ListenError::InUse)));
        assert!(matches!(give(&file, &access), Err(ListenError::InUse)));
        fs::remove_dir_all(directory).expect("ours");
    }
}
