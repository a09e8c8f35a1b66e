//! What a process holds, as the kernel tells it: to see that nothing stays behind.

use std::fs;
use std::time::Duration;

use crate::wait;

/// What the kernel tells of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings.
    pub mappings: usize,
    /// Threads.
    pub threads: usize,
}

/// What a process holds now.
///
/// # Panics
/// If there is no such process.
#[must_use]
pub fn of(pid: u32) -> Holdings {
    let count = |what: &str| {
        fs::read_dir(format!("/proc/{pid}/{what}"))
            .expect("it lives")
            .count()
    };
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    Holdings {
        descriptors: count("fd"),
        mappings: maps.lines().count(),
        threads: count("task"),
    }
}

/// What it holds once that has been the same for so long.
///
/// # Panics
/// If that never comes.
#[must_use]
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
#[must_use]
pub fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("a line for it");
    line.split_ascii_whitespace()
        .nth(1)
        .expect("a number")
        .parse()
        .expect("a number")
}
