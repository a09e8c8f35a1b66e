//! What the kernel says of an interface that frames go through.

/// Frames that the interface has sent, whoever gave them to it; `None` if the kernel does not answer. Of this network
/// namespace, however old the mount of /sys is.
pub(super) fn sent(interface: &str) -> Option<u64> {
    let list = std::fs::read_to_string("/proc/self/net/dev").ok()?;
    let mut counters = list
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'));
    counters.next()?.split_ascii_whitespace().nth(9)?.parse().ok()
}
