//! Finds control sockets, and whose they are.
//!
//! A directory counts only if nobody but its user or root can have filled it: in /tmp anybody can create a directory
//! that is named after another user.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Most daemons that are asked in one directory of another user.
const MOST_OF_OTHERS: usize = 64;
/// Most such directories, and most daemons in them together: one person may have 65,536 subordinate numbers
/// (subuid(5)), and a directory for each.
const MOST_DIRECTORIES: usize = 256;
const MOST_OF_ALL_OTHERS: usize = 1024;

/// Name of the directory, if it does not contain a user's number.
const NAME: &str = "vhost-af-xdp";

/// Directories of the control sockets of this user's daemons, one file a daemon, named after its process. A daemon
/// listens in the first; one that was started without XDG_RUNTIME_DIR may be in another.
pub fn own_directories() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    if user == 0 {
        return vec![Path::new("/run").join(NAME)];
    }
    let session = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
    let usual = PathBuf::from(format!("/run/user/{user}"));
    let is_ours = |path: &PathBuf| owner_of(path) == Some(user);
    let mut directories: Vec<PathBuf> = session.into_iter().map(PathBuf::from).collect();
    directories.extend(Some(usual).filter(is_ours));
    directories.dedup();
    let directories = directories.into_iter().map(|path| path.join(NAME));
    let without_session = PathBuf::from(format!("/tmp/{NAME}-{user}"));
    directories.chain([without_session]).collect()
}

/// The user that owns a directory; `None` for a symbolic link.
pub(super) fn owner_of(path: &Path) -> Option<u32> {
    let metadata = fs::symlink_metadata(path).ok()?;
    metadata.is_dir().then(|| metadata.uid())
}

/// Whether only this user or root can have created what is in a directory.
pub fn is_of(directory: &Path, user: u32) -> bool {
    let metadata = fs::symlink_metadata(directory);
    metadata.is_ok_and(|it| it.is_dir() && [0, user].contains(&it.uid()) && it.mode() & 0o022 == 0)
}

/// The control sockets of all daemons that this user may ask.
pub fn find_all() -> Vec<PathBuf> {
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

/// The control sockets in these directories of others, up to the limits above.
fn sockets_of_others(directories: &[PathBuf]) -> Vec<PathBuf> {
    let asked = directories.iter().take(MOST_DIRECTORIES);
    let of_each = asked.flat_map(|directory| sockets_in(directory).into_iter().take(MOST_OF_OTHERS));
    let paths: Vec<PathBuf> = of_each.take(MOST_OF_ALL_OTHERS).collect();
    if directories.len() > MOST_DIRECTORIES || paths.len() == MOST_OF_ALL_OTHERS {
        tracing::warn!(
            "{} directories of users' daemons: shown are {MOST_DIRECTORIES} of them and {MOST_OF_ALL_OTHERS} daemons \
             at most; name another daemon with --control PATH",
            directories.len()
        );
    }
    paths
}

/// Directories of users other than root, each owned by the user in its name. Those of login sessions come first, since
/// users cannot create more of them.
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

/// The control sockets in those of these directories that only this user or root can write to.
pub fn sockets_of(directories: &[PathBuf], user: u32) -> Vec<PathBuf> {
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

/// Entries whose names `meaning` can parse, in the order of their paths.
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
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_sockets_named_after_a_process_are_asked() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = place.path();
        for name in ["12.sock", "steward.sock", "13.txt"] {
            let _ = UnixListener::bind(directory.join(name)).expect("a socket");
        }
        fs::write(directory.join("14.sock"), "").expect("a file");
        std::os::unix::fs::symlink("12.sock", directory.join("15.sock")).expect("a link");
        assert_eq!(sockets_in(directory), [directory.join("12.sock")]);
    }

    #[test]
    fn sockets_in_a_link_or_in_a_directory_that_others_may_write_to_are_ignored() {
        let place = tempfile::tempdir().expect("a directory");
        let (directory, user) = (place.path().join("sockets"), rustix::process::geteuid().as_raw());
        fs::create_dir(&directory).expect("a directory");
        let set_mode = |mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(&directory, mode).expect("our directory");
        };
        set_mode(0o700);
        let _ = UnixListener::bind(directory.join("1.sock")).expect("a socket");
        let sockets = |directory: &PathBuf, user| sockets_of(std::slice::from_ref(directory), user);
        assert_eq!(sockets(&directory, user), [directory.join("1.sock")]);
        // Root's directories are trusted, and root may run this test.
        if user != 0 {
            assert!(sockets(&directory, user.wrapping_add(1)).is_empty());
        }
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&directory, &link).expect("a link");
        assert!(sockets(&link, user).is_empty());
        for mode in [0o770, 0o702] {
            set_mode(mode);
            assert!(sockets(&directory, user).is_empty(), "{mode:o}");
        }
    }

    #[test]
    fn one_person_with_many_numbers_makes_root_ask_no_more_than_so_many() {
        let place = tempfile::tempdir().expect("a directory");
        let directories: Vec<PathBuf> = (0..MOST_DIRECTORIES + 1)
            .map(|number| place.path().join(number.to_string()))
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
