//! Control groups of version 2.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups of version 2 are, if they can be made there.
pub(crate) fn mounted() -> Option<PathBuf> {
    let table = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut mounts = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"))?;
    mount[3]
        .split(',')
        .any(|option| option == "rw")
        .then(|| PathBuf::from(mount[1]))
}

/// Removes a control group and those in it, as far as nobody is in them.
pub(crate) fn remove(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}
