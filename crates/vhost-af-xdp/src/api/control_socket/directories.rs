//! Where control sockets are, and whose.
//!
//! Daemons are looked for only in directories that nobody but their user can have made or filled: in /tmp anybody may
//! make one that is named after another user, and say there what he likes.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::listener::{Access, ListenError, listen_at, remove_stale};

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
pub(super) fn owner_of(path: &Path) -> Option<u32> {
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

/// Whether [`listen`] makes a directory, if it is not there.
pub(crate) fn is_own(directory: &Path) -> bool {
    own_directories().iter().any(|own| own == directory)
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
                refused.contains(&format!("put files into {}", directory.display())),
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
}
