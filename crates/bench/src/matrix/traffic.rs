//! The kernel's counters of an interface.

/// Frames that the interface has sent, of all senders; `None` if the kernel does not report them. /proc/self/net is of
/// this network namespace, even if /sys was mounted in another one.
pub(super) fn sent(interface: &str) -> Option<u64> {
    let list = std::fs::read_to_string("/proc/self/net/dev").ok()?;
    let mut counters = list
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'));
    counters.next()?.split_ascii_whitespace().nth(9)?.parse().ok()
}
