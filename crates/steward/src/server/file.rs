//! Files that are there whole or not at all.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The path under which this file is written before it is renamed.
pub(super) fn new_of(path: &Path) -> PathBuf {
    path.with_extension("toml.new")
}

/// Writes a file again: a reader sees the old or the new one.
pub(super) fn replace(path: &Path, text: &str) -> io::Result<()> {
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

/// Ends the process without a word if a test asked for it at this point. In a release build there is no such thing.
pub(super) fn may_crash(point: &str) {
    if cfg!(debug_assertions) && std::env::var("STEWARD_CRASH_AT").as_deref() == Ok(point) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
