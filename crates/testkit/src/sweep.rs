//! What a test process leaves behind when it is killed by force, and nobody drops its guards: namespaces, mounts,
//! directories, guests.
//!
//! Their names begin with [`prefix`], which has the number of the process. The first guard that a test process makes
//! removes those of processes that are no more; a number that is in use, also by another process, keeps its things.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use rustix::mount::{UnmountFlags, unmount};

use crate::{cgroup, program};

/// Where directories of tests are. Short, because of the sockets in them.
pub const DIRECTORIES: &str = "/tmp";
/// Where ip(8) keeps namespaces.
const NAMESPACES: &str = "/run/netns";

/// What names of this process begin with.
pub fn prefix() -> String {
    format!("vax-{}-", std::process::id())
}

/// Removes what is left of processes that are no more, if this process has not done so yet.
pub(crate) fn once() {
    static SWEPT: Once = Once::new();
    SWEPT.call_once(sweep);
}

/// Removes what is left of processes that are no more. What cannot be removed stays.
pub fn sweep() {
    for name in names_in(NAMESPACES) {
        let _ = Command::new("ip").args(["netns", "delete", &name]).output();
    }
    let directories: Vec<PathBuf> = names_in(DIRECTORIES)
        .map(|name| Path::new(DIRECTORIES).join(name))
        .collect();
    // The last mount lies on top.
    for place in mounts().iter().rev() {
        if directories.iter().any(|directory| place.starts_with(directory)) {
            let _ = unmount(place, UnmountFlags::DETACH);
        }
    }
    if let Some(groups) = cgroup::mounted() {
        for name in groups.to_str().into_iter().flat_map(names_in) {
            cgroup::remove(&groups.join(name));
        }
    }
    for directory in directories {
        stop_guest(&directory);
        let _ = fs::remove_dir_all(directory);
    }
}

/// Ends the guest that has its state in this directory, if one runs there.
fn stop_guest(state: &Path) {
    if state.join("pid").exists() {
        let _ = program::guest("stop", state).output();
    }
}

/// Names in a directory whose process is gone.
fn names_in(directory: &str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_orphan(name))
}

fn is_orphan(name: &str) -> bool {
    let number = name.strip_prefix("vax-").and_then(|rest| rest.split_once('-'));
    let number = number.and_then(|(number, _)| number.parse::<u32>().ok());
    number.is_some_and(|number| !Path::new("/proc").join(number.to_string()).exists())
}

/// Where something is mounted (proc_pid_mountinfo(5)).
fn mounts() -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let place = |line: &str| line.split(' ').nth(4).map(PathBuf::from);
    table.lines().filter_map(place).collect()
}
