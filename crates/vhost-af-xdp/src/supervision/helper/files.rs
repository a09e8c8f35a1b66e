//! Socket files of a daemon, which its helper removes when nobody listens on them any more.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use common::lock::Locked;

/// The files, by the path that the daemon knows them by.
pub(super) struct Files(Mutex<HashMap<PathBuf, SocketFile>>);

struct SocketFile {
    /// The path that this process uses.
    at: PathBuf,
    /// The directory that this path leads through, if it is open for this file only.
    _held: Option<OwnedFd>,
    identity: Identity,
    /// Created while the daemon runs, not at its start.
    later: bool,
}

/// Distinguishes a file from a later one of its name.
#[derive(PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    /// Inode numbers are reused; `None` if the file system does not record this time.
    created: Option<SystemTime>,
}

impl Identity {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            created: metadata.created().ok(),
        })
    }
}

impl SocketFile {
    fn new(at: &Path, held: Option<OwnedFd>, later: bool) -> io::Result<Self> {
        Ok(Self {
            at: at.to_owned(),
            _held: held,
            identity: Identity::of(at)?,
            later,
        })
    }

    fn remove(&self) {
        if Identity::of(&self.at).is_ok_and(|now| now == self.identity) {
            let _ = fs::remove_file(&self.at);
        }
    }
}

impl Files {
    /// The files that are at these paths now.
    pub(super) fn of(paths: Vec<PathBuf>) -> Self {
        let known = |path: PathBuf| {
            let file = SocketFile::new(&path, None, false).ok()?;
            Some((path, file))
        };
        Self(Mutex::new(paths.into_iter().filter_map(known).collect()))
    }

    /// Records the file that `make` creates at `at`, which the daemon knows as `path`. `held` stays open with it.
    pub(super) fn make<T, E: From<io::Error>>(
        &self,
        path: &Path,
        at: &Path,
        held: Option<OwnedFd>,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        // Held until the file is recorded: if the daemon ends meanwhile, the file must be removed, too.
        let mut files = self.0.locked();
        let made = make()?;
        files.insert(path.to_owned(), SocketFile::new(at, held, true)?);
        Ok(made)
    }

    /// Removes the file of that path; false if there is none.
    pub(super) fn remove(&self, path: &Path) -> bool {
        let known = self.0.locked().remove(path);
        known.as_ref().map(SocketFile::remove).is_some()
    }

    /// Removes files that were created at run time, except those at `paths`; returns this process's paths of the rest.
    pub(super) fn keep(&self, paths: &[PathBuf]) -> Vec<PathBuf> {
        let mut files = self.0.locked();
        let paths: HashSet<&PathBuf> = paths.iter().collect();
        let gone = files.extract_if(|path, file| file.later && !paths.contains(path));
        gone.for_each(|(_, file)| file.remove());
        let made = files.values().filter(|file| file.later);
        made.map(|file| file.at.clone()).collect()
    }

    /// Removes all, and prevents new ones.
    pub(super) fn remove_all(&self) {
        let mut files = self.0.locked();
        files.drain().for_each(|(_, file)| file.remove());
        // The process ends: a thread that waits to create one waits for ever.
        std::mem::forget(files);
    }
}
