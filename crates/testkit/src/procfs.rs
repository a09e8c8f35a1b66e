//! What the kernel tells of a process (proc(5)).

use std::fs;

/// The value of a line of its status; `None` if there is no such process or line.
pub fn status(pid: u32, line: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let value = text
        .lines()
        .find_map(|its| its.strip_prefix(line)?.strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

/// The same, a number; of memory in KiB.
///
/// # Panics
/// If there is none.
pub fn number(pid: u32, line: &str) -> u64 {
    let value = status(pid, line).unwrap_or_else(|| panic!("no {line} of process {pid}"));
    value.trim_end_matches(" kB").parse().expect("a number")
}

/// A set of capabilities, by the name of its line.
pub fn capabilities(pid: u32, line: &str) -> Option<u64> {
    u64::from_str_radix(&status(pid, line)?, 16).ok()
}

/// Its children; none if it has ended.
pub fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let numbers = text.split_whitespace().filter_map(|child| child.parse().ok());
    numbers.collect()
}

/// How many descriptors it has open.
///
/// # Panics
/// If there is no such process.
pub fn descriptors(pid: u32) -> usize {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    entries.count()
}
