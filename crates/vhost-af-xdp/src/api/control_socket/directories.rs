//! The daemon's own control socket: its default path, and its directory.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use client::directories::{is_of, own_directories, sockets_of};

use crate::listener::{Access, ListenError, listen_at, remove_stale};

/// The default path of this process's control socket. Removes sockets of daemons that were killed.
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
/// Errors: the socket cannot be created; somebody listens there; others can put files into its directory; or the
/// directory is missing, and is not one of those that `status` searches.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, ListenError> {
    let is_parent = |directory: &&PathBuf| path.parent() == Some(directory.as_path());
    if let Some(directory) = own_directories().iter().find(is_parent) {
        make_own(directory, rustix::process::geteuid().as_raw())?;
    }
    listen_at(path, &Access::OWN)
}

/// Whether [`listen`] creates this directory, if it is missing.
pub(crate) fn is_own(directory: &Path) -> bool {
    own_directories().iter().any(|own| own == directory)
}

/// Creates a directory for sockets of this user's daemons, if it is missing, in one that exists.
fn make_own(directory: &Path, user: u32) -> Result<(), ListenError> {
    // root's directory also has the steward's socket, to which everybody may connect.
    let mode = if user == 0 { 0o755 } else { 0o700 };
    let parent = || directory.parent().unwrap_or(directory).to_owned();
    if let Err(error) = fs::DirBuilder::new().mode(mode).create(directory) {
        match error.kind() {
            io::ErrorKind::AlreadyExists => {}
            io::ErrorKind::NotFound => return Err(ListenError::NoDirectory(parent())),
            io::ErrorKind::PermissionDenied => return Err(ListenError::NoPermission(parent())),
            _ => return Err(error.into()),
        }
    }
    match is_of(directory, user) {
        true => Ok(()),
        false => Err(ListenError::WritableByOthers(directory.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::assert_has;

    #[test]
    fn directory_is_created_for_its_user_alone_and_used_only_if_it_is() {
        let place = tempfile::tempdir().expect("a directory");
        let (directory, user) = (place.path().join("sockets"), rustix::process::geteuid().as_raw());
        make_own(&directory, user).expect("created");
        make_own(&directory, user).expect("still there");
        for mode in [0o770, 0o702] {
            let open = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(&directory, open).expect("our directory");
            let error = make_own(&directory, user).expect_err("open").to_string();
            let wanted = format!("put files into {}", directory.display());
            assert_has(&error, &[&wanted]);
        }
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&directory, &link).expect("a link");
        assert!(make_own(&link, user).is_err(), "a link, perhaps of another user");
        let missing = place.path().join("no/sockets");
        let error = make_own(&missing, 0).expect_err("no parent").to_string();
        assert_has(&error, &[&format!("`mkdir -p {}/no`", place.path().display())]);
    }
}
