//! Entries of the journal: each is a file in TOML, which is complete or absent.
//!
//! An entry is replaced by rename(2): a reader sees the old or the new one. There is no fsync(2), because what entries
//! describe does not outlive the machine either: after another boot interfaces have other indexes, and NICs their
//! defaults. So each entry names its boot, and those of another one are not read.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use host::boot_id;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The directory of all entries; by default none, for a steward that keeps no state: then nothing can be written.
#[derive(Debug, Clone, Default)]
pub struct Journal {
    dir: Option<PathBuf>,
}

/// The place of one entry, which may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entry {
    path: Option<PathBuf>,
}

/// An entry as it is written.
#[derive(Serialize, Deserialize)]
struct OfBoot<T> {
    // Entries about rules of NICs had none in an earlier version.
    #[serde(default = "boot_id")]
    boot: String,
    #[serde(flatten)]
    content: T,
}

impl Journal {
    /// In a directory that is there.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        let dir = Some(dir.to_owned());
        let journal = Self { dir };
        // A steward may have died while it wrote.
        let new = journal.files(|name| name.ends_with(".toml.new"));
        for path in new {
            let _ = fs::remove_file(path);
        }
        journal
    }

    /// The entry of this name.
    #[must_use]
    pub fn entry(&self, name: &str) -> Entry {
        let path = self.dir.as_ref().map(|dir| dir.join(format!("{name}.toml")));
        Entry { path }
    }

    /// The entries that are there and whose names begin with `prefix`.
    #[must_use]
    pub fn entries(&self, prefix: &str) -> Vec<Entry> {
        let found = self.files(|name| name.starts_with(prefix) && name.ends_with(".toml"));
        found.into_iter().map(|path| Entry { path: Some(path) }).collect()
    }

    /// What they say. Those that cannot be used are removed.
    #[must_use]
    pub fn contents<T: DeserializeOwned>(&self, prefix: &str) -> Vec<T> {
        let read = |entry: Entry| {
            let content = entry.read();
            if let Err(error) = &content {
                tracing::error!("a NIC may stay changed: {entry}: {error}");
            }
            let content = content.ok().flatten();
            if content.is_none() {
                let _ = entry.remove();
            }
            content
        };
        self.entries(prefix).into_iter().filter_map(read).collect()
    }

    fn files(&self, is_meant: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let entries = self.dir.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten();
        let paths = entries.flatten().map(|entry| entry.path());
        let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(&is_meant);
        paths.filter(|path| name(path) == Some(true)).collect()
    }
}

impl Entry {
    /// Its file.
    ///
    /// # Errors
    /// The steward keeps no state.
    pub fn path(&self) -> io::Result<&Path> {
        let path = self.path.as_deref();
        path.ok_or_else(|| io::Error::other("the steward keeps no state (--state)"))
    }

    /// What it says; `None`: it is absent, or of another boot.
    ///
    /// # Errors
    /// The kernel's; `InvalidData` if it is of another form.
    pub fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let Ok(path) = self.path() else {
            return Ok(None);
        };
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read?,
        };
        let other = |error: toml::de::Error| io::Error::new(io::ErrorKind::InvalidData, error.message());
        let of: OfBoot<T> = toml::from_str(&text).map_err(other)?;
        if of.boot != boot_id() {
            tracing::info!("of another boot, and not read: {self}");
            return Ok(None);
        }
        Ok(Some(of.content))
    }

    /// Replaces it.
    ///
    /// # Errors
    /// The kernel's, or that the steward keeps no state; then it is as before.
    pub fn write(&self, content: &impl Serialize) -> io::Result<()> {
        let (path, boot) = (self.path()?, boot_id());
        let text = toml::to_string(&OfBoot { boot, content }).map_err(io::Error::other)?;
        let new = path.with_extension("toml.new");
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

    /// Removes it, if it is there.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn remove(&self) -> io::Result<()> {
        match self.path.as_ref().map(fs::remove_file) {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.as_deref().unwrap_or(Path::new("no entry"));
        path.display().fmt(f)
    }
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
    fn entries_of_this_boot_are_read_and_all_others_are_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        let journal = Journal::open(dir.path());
        let entry = journal.entry("nic-1");
        entry.write(&Change { queue: 7 }).expect("ours");
        fs::write(path("nic-2.toml"), "boot = \"another\"\nqueue = 8\n").expect("ours");
        fs::write(path("nic-3.toml"), "boot = 9\nqueue = 9\n").expect("ours");
        fs::write(path("nic-1.toml.new"), "queue = ").expect("ours");
        fs::write(path("state.toml"), "").expect("ours");
        let journal = Journal::open(dir.path());
        assert_eq!(journal.entries("nic-").len(), 3);
        assert_eq!(journal.contents::<Change>("nic-"), [Change { queue: 7 }]);
        assert_eq!(journal.entries(""), [journal.entry("state"), entry]);
        assert!(!path("nic-1.toml.new").exists());
    }

    #[test]
    fn entry_that_is_cut_anywhere_is_unreadable_or_says_less() {
        #[derive(Serialize, Deserialize)]
        struct List {
            change: Vec<Change>,
        }
        let dir = tempfile::tempdir().expect("a directory");
        let entry = Journal::open(dir.path()).entry("list");
        let change = vec![Change { queue: 1 }, Change { queue: 2 }];
        entry.write(&List { change }).expect("ours");
        let path = dir.path().join("list.toml");
        let whole = fs::read(&path).expect("written");
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).expect("ours");
            if let Ok(Some(List { change })) = entry.read() {
                assert!(change.len() < 2 || len + 1 == whole.len(), "{len}: {change:?}");
            }
        }
    }

    #[test]
    fn nothing_is_written_without_a_directory() {
        let entry = Journal::default().entry("nic-1");
        let error = entry.write(&Change { queue: 7 }).expect_err("no place");
        assert!(error.to_string().contains("--state"), "{error}");
        assert!(entry.read::<Change>().expect("nothing").is_none() && entry.remove().is_ok());
    }

    /// Only that it is absent is no error.
    #[test]
    fn entry_that_cannot_be_read_or_removed_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let entry = Journal::open(dir.path()).entry("nic-1");
        assert!(entry.read::<Change>().is_ok_and(|read| read.is_none()) && entry.remove().is_ok());
        let path = dir.path().join("nic-1.toml");
        assert_eq!(entry.to_string(), path.display().to_string());
        fs::create_dir(path).expect("ours");
        assert!(entry.read::<Change>().is_err() && entry.remove().is_err());
    }
}
