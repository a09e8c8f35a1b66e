//! Files with records for the next steward, in TOML: each file is complete or absent.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use host::boot_id;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The content of a file; none: there is no such file.
///
/// # Errors
/// The kernel's; `InvalidData` if the content is of another form.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    let other = |error: toml::de::Error| io::Error::new(io::ErrorKind::InvalidData, error.message());
    toml::from_str(&text).map(Some).map_err(other)
}

/// Replaces a file: a reader sees the old or the new content.
///
/// # Errors
/// The kernel's.
pub fn write(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let text = toml::to_string(content).map_err(io::Error::other)?;
    let new = new_of(path);
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    may_crash("records-written");
    fs::rename(&new, path)
}

/// The path under which this file is written before it is renamed.
pub(crate) fn new_of(path: &Path) -> PathBuf {
    path.with_extension("toml.new")
}

/// Removes a file, if it is there.
///
/// # Errors
/// The kernel's.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Files of a directory whose names begin with `prefix` and end with `.toml`.
#[must_use]
pub fn all_of(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with(prefix) && name.ends_with(".toml")
    };
    entries.map(|entry| entry.path()).filter(is_ours).collect()
}

/// A change, and the boot in which it was made: after another one interfaces have other indexes, and NICs their
/// defaults.
#[derive(Serialize, Deserialize)]
struct OfBoot<T> {
    boot: String,
    #[serde(flatten)]
    change: T,
}

/// Writes a change of a NIC, before it is made.
///
/// # Errors
/// The kernel's.
pub fn write_change(path: &Path, change: &impl Serialize) -> io::Result<()> {
    let boot = boot_id();
    write(path, &OfBoot { boot, change })
}

/// The changes in files of a directory whose names begin with `prefix`. Files of another boot, and those that cannot
/// be read, are removed.
#[must_use]
pub fn changes_in<T: DeserializeOwned>(dir: &Path, prefix: &str) -> Vec<T> {
    let read = |path: PathBuf| {
        match read::<OfBoot<T>>(&path) {
            Ok(Some(of)) if of.boot == boot_id() => return Some(of.change),
            Ok(_) => {}
            Err(error) => tracing::error!(path = %path.display(), "a NIC may stay changed: {error}"),
        }
        let _ = remove(&path);
        None
    };
    all_of(dir, prefix).into_iter().filter_map(read).collect()
}

/// Kills this process if a test set this point; never in a release build.
pub fn may_crash(point: &str) {
    if cfg!(debug_assertions) && std::env::var("STEWARD_CRASH_AT").as_deref() == Ok(point) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Change {
        queue: u32,
    }

    #[test]
    fn changes_of_this_boot_are_read_and_all_others_are_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        write_change(&path("nic-1.toml"), &Change { queue: 7 }).expect("ours");
        fs::write(path("nic-2.toml"), "boot = \"another\"\nqueue = 8\n").expect("ours");
        fs::write(path("nic-3.toml"), "queue = 9\n").expect("ours");
        fs::write(path("state.toml"), "").expect("ours");
        assert_eq!(changes_in::<Change>(dir.path(), "nic-"), [Change { queue: 7 }]);
        assert_eq!(all_of(dir.path(), "nic-"), [path("nic-1.toml")]);
        assert!(path("state.toml").exists());
    }
}
