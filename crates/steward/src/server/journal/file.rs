//! Files in which a steward keeps what the next one has to know: TOML, there whole or not at all.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use host::boot_id;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The content of a file; none: it is not there.
///
/// # Errors
/// The kernel's; `InvalidData`, if it has something else.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    let other = |error: toml::de::Error| io::Error::new(io::ErrorKind::InvalidData, error.message());
    toml::from_str(&text).map(Some).map_err(other)
}

/// Writes a file again: a reader sees the old or the new one.
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

/// Files of a directory whose names begin so.
#[must_use]
pub fn all_of(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with(prefix) && name.ends_with(".toml")
    };
    entries.map(|entry| entry.path()).filter(is_ours).collect()
}

/// A change of this boot: another one has other indexes of interfaces, and NICs that start again.
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

/// The changes in files of a directory whose names begin so. Files of another boot, and those that cannot be read, are
/// removed.
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

/// Ends the process without a word if a test asked for it at this point. In a release build there is no such thing.
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
