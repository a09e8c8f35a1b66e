//! A place for BPF pins, as a guard.

use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

use crate::directory::private_dir;

/// A bpffs of the test's own. Unmounted on drop, and all that is pinned there gone with it.
#[derive(Debug)]
#[must_use]
pub struct BpfFs {
    dir: TempDir,
}

impl BpfFs {
    /// Mounts one. Processes that are started from now on see it, also those of other network namespaces.
    ///
    /// # Panics
    /// If that is not allowed.
    pub fn new() -> Self {
        let dir = private_dir();
        mount("bpf", dir.path(), "bpf", MountFlags::empty(), c"mode=0700").expect("we are root");
        Self { dir }
    }

    /// Where pins may be made.
    pub fn pins(&self) -> PathBuf {
        self.dir.path().join("pins")
    }

    /// Everything that is pinned, by path.
    pub fn pinned(&self) -> Vec<PathBuf> {
        fn add(dir: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                found.push(entry.path());
                add(&entry.path(), found);
            }
        }
        let mut found = Vec::new();
        add(&self.pins(), &mut found);
        found
    }
}

impl Default for BpfFs {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for BpfFs {
    fn drop(&mut self) {
        let _ = unmount(self.dir.path(), UnmountFlags::DETACH);
    }
}
