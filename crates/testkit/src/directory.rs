//! Directories of tests.

use tempfile::TempDir;

use crate::sweep;

/// A short directory for sockets: their paths have at most 107 bytes.
///
/// # Panics
/// If it cannot be made.
pub fn private_dir() -> TempDir {
    sweep::once();
    tempfile::Builder::new()
        .prefix(&sweep::prefix())
        .tempdir_in(sweep::DIRECTORIES)
        .expect("/tmp is writable")
}
