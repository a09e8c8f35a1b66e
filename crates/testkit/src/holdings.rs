//! What a process holds, as the kernel tells it: to see that nothing stays behind.

use crate::assert_soon;
use crate::procfs;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::wait;

/// What the kernel tells of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings, without what the C library keeps for threads, stacks and heaps: how much that is is a matter of how
    /// many threads ran at the same time.
    pub mappings: usize,
    /// Threads.
    pub threads: usize,
}

impl Holdings {
    /// Whether it is no more than was held before, of anything. Less it may be: on a machine that is busy, what was
    /// over before was perhaps closed only afterwards.
    pub fn is_within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.mappings <= before.mappings
            && self.threads <= before.threads
    }
}

/// What a process holds now.
///
/// # Panics
/// If there is no such process.
pub fn of(pid: u32) -> Holdings {
    let count = |what: &str| {
        fs::read_dir(format!("/proc/{pid}/{what}"))
            .expect("it lives")
            .count()
    };
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    Holdings {
        descriptors: count("fd"),
        mappings: mappings(&maps),
        threads: count("task"),
    }
}

/// Waits until each of these processes holds no more than before.
///
/// # Panics
/// If that never comes, with what it holds then; or if there is no such process.
#[track_caller]
pub fn await_within(pids: &[u32], before: &[Holdings]) {
    let now = || pids.iter().map(|&pid| of(pid)).collect::<Vec<_>>();
    let is_within = || {
        now()
            .iter()
            .zip(before)
            .all(|(now, before)| now.is_within(before))
    };
    assert_soon!(is_within(), "before {before:?}, after {:?}", now());
}

/// AF_XDP sockets of a process by inode: those whose rings are mapped, and their mappings hold them. A socket can be
/// bound once, and numbers of inodes are not used again: with the same ones, nothing was bound and nothing unbound.
///
/// # Panics
/// If there is no such process, or we are not root.
pub fn xdp_sockets(pid: u32) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("we are root");
    let named = maps.lines().filter_map(|line| line.split_once("socket:"));
    named.map(|(_, inode)| inode.to_owned()).collect()
}

/// A copy of each socket of a process, by inode, as [`xdp_sockets`] has it. As long as one is open so is the socket,
/// whatever the process does: an AF_XDP socket keeps its queue.
///
/// # Panics
/// If there is no such process, or we are not root.
pub fn copies_of_sockets(pid: u32) -> BTreeMap<String, OwnedFd> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = pidfd_open(number.expect("a process number"), PidfdFlags::empty()).expect("it runs");
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("we are root");
    let copies = entries.flatten().filter_map(|entry| {
        let link = fs::read_link(entry.path()).ok()?;
        let inode = link.to_str()?.strip_prefix("socket:")?.to_owned();
        let number = entry.file_name().to_str()?.parse().ok()?;
        let copy = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()?;
        Some((inode, copy))
    });
    copies.collect()
}

/// Counts them in the text of proc_pid_maps(5). Left out is what is anonymous and either has no access, or lies behind
/// such a guard, as stacks do, or begins at a multiple of 64 MiB, as the heaps of arenas do (`HEAP_MAX_SIZE`,
/// malloc/arena.c in glibc).
fn mappings(maps: &str) -> usize {
    let mut guard_end = "";
    let mut count = 0;
    for line in maps.lines() {
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        let (start, end) = fields[0].split_once('-').expect("a range");
        let is_heap = u64::from_str_radix(start, 16).is_ok_and(|start| start.is_multiple_of(64 << 20));
        match fields[..] {
            [_, "---p", _, _, "0"] => guard_end = end,
            [_, "rw-p", _, _, "0"] if guard_end == start || is_heap => {}
            _ => count += 1,
        }
    }
    count
}

/// What it holds once that has been the same for so long.
///
/// # Panics
/// If that never comes.
pub fn steady(pid: u32, quiet: Duration) -> Holdings {
    let steady = wait::until_some(wait::SOON, || {
        let held = of(pid);
        std::thread::sleep(quiet);
        (of(pid) == held).then_some(held)
    });
    steady.expect("it does nothing")
}

/// Resident memory of a process, KiB.
///
/// # Panics
/// If there is no such process.
pub fn resident_kib(pid: u32) -> u64 {
    procfs::number(pid, "VmRSS")
}

/// Memory of a process that is nobody else's, KiB: resident anonymous pages, and tables for all of its pages.
///
/// # Panics
/// If there is no such process.
pub fn own_kib(pid: u32) -> u64 {
    procfs::number(pid, "RssAnon") + procfs::number(pid, "VmPTE")
}

/// CPU time of all threads that a process has now.
///
/// # Panics
/// If there is no such process.
pub fn cpu_time(pid: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    let on_cpu = |thread: std::io::Result<fs::DirEntry>| {
        let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(threads.filter_map(on_cpu).sum::<u64>())
}

/// Address space of a process, KiB.
///
/// # Panics
/// If there is no such process.
pub fn address_space_kib(pid: u32) -> u64 {
    procfs::number(pid, "VmSize")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_and_heaps_of_threads_are_not_counted() {
        let heap = "7f0004000000-7f0004021000 rw-p 00000000 00:00 0 \n7f0004021000-7f0008000000 ---p 00000000 00:00 0 \n";
        assert_eq!(mappings(heap), 0);
        let stack = "7f0000021000-7f0000022000 ---p 00000000 00:00 0 \n7f0000022000-7f0000222000 rw-p 00000000 00:00 0 \n";
        assert_eq!(mappings(stack), 0);
        let others = "7f0000400000-7f0000a00000 rw-p 00000000 00:00 0 \n7f0004000000-7f0004021000 rw-s 00000000 00:01 12 /memfd:ram (deleted)\n";
        assert_eq!(mappings(&[stack, others].concat()), 2);
    }
}
