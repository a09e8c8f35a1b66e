//! CPU time of the server's thread, and of softirqs.
//!
//! The thread's is in `/proc/self/task/N/stat`, that of softirqs in `/proc/stat`, in ticks of 10 ms. A softirq that
//! runs at the end of a system call is charged to the thread that called, too: the two overlap.

use std::fs;
use std::time::{Duration, Instant};

use super::counts::Counts;
use crate::meter::{CpuTime, cpu_time_in};

/// The counters at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    at: Instant,
    messages: u64,
    bytes: u64,
    /// CPU time of the server's thread.
    cpu: CpuTime,
    softirq: Softirq,
}

/// Time in softirqs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Softirq {
    /// On the server's CPU.
    server: Duration,
    /// On all CPUs.
    all: Duration,
}

/// Sums of the differences between readings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    pub(super) elapsed: Duration,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) cpu: CpuTime,
    pub(super) softirq_server: Duration,
    pub(super) softirq_all: Duration,
}

impl Usage {
    pub(super) const NONE: Self = Self {
        elapsed: Duration::ZERO,
        messages: 0,
        bytes: 0,
        cpu: CpuTime::NONE,
        softirq_server: Duration::ZERO,
        softirq_all: Duration::ZERO,
    };

    /// Adds the difference between two readings.
    pub(super) fn add(&mut self, earlier: &Reading, now: &Reading) {
        self.elapsed += now.at.duration_since(earlier.at);
        self.messages += now.messages.saturating_sub(earlier.messages);
        self.bytes += now.bytes.saturating_sub(earlier.bytes);
        self.cpu.user += now.cpu.user.saturating_sub(earlier.cpu.user);
        self.cpu.system += now.cpu.system.saturating_sub(earlier.cpu.system);
        let softirq = (now.softirq.server, earlier.softirq.server);
        self.softirq_server += softirq.0.saturating_sub(softirq.1);
        self.softirq_all += now.softirq.all.saturating_sub(earlier.softirq.all);
    }
}

impl Reading {
    /// The counters now. A value that the kernel does not report is zero.
    pub(super) fn take(counts: &Counts, cpu: usize) -> Self {
        let stat = |thread| cpu_time_in(&format!("/proc/self/task/{thread}/stat")).ok();
        let (messages, bytes) = counts.total();
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        Self {
            at: Instant::now(),
            messages,
            bytes,
            cpu: counts.server().and_then(stat).unwrap_or(CpuTime::NONE),
            softirq: parse_softirq(&text, cpu, rustix::param::clock_ticks_per_second()),
        }
    }

    /// Messages and bytes a second since then.
    pub(super) fn rate_since(&self, earlier: &Self) -> (f64, f64) {
        let seconds = self.at.duration_since(earlier.at).as_secs_f64().max(1e-9);
        let of = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        (of(self.messages, earlier.messages), of(self.bytes, earlier.bytes))
    }

    /// Whether messages moved since then.
    pub(super) fn moved_since(&self, earlier: &Self) -> bool {
        self.messages > earlier.messages
    }
}

/// The seventh figure of the lines `cpu` and `cpuN` of /proc/stat.
fn parse_softirq(stat: &str, cpu: usize, ticks_per_second: u64) -> Softirq {
    let of = |name: &str| -> Duration {
        let mut lines = stat.lines().map(str::split_ascii_whitespace);
        let found = lines.find_map(|mut words| (words.next() == Some(name)).then_some(words));
        let ticks = found.and_then(|mut words| words.nth(6)?.parse::<u64>().ok());
        let nanoseconds = 1_000_000_000 / ticks_per_second.max(1);
        Duration::from_nanos(ticks.unwrap_or(0).saturating_mul(nanoseconds))
    };
    Softirq {
        server: of(&format!("cpu{cpu}")),
        all: of("cpu"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softirqs_are_of_the_cpu_and_of_all() {
        let stat =
            "cpu  1 2 3 4 5 6 70 8 0 0\ncpu0 1 2 3 4 5 6 20 8 0 0\ncpu1 1 2 3 4 5 6 50 8 0 0\nctxt 9\n";
        let found = parse_softirq(stat, 1, 100);
        assert_eq!(found.server, Duration::from_millis(500));
        assert_eq!(found.all, Duration::from_millis(700));
        assert_eq!(parse_softirq("cpu 1 2", 1, 100), Softirq::default());
    }

    #[test]
    fn usage_is_the_sum_of_what_came_between() {
        // Of a server alone.
        let counts = Counts::new(0);
        let first = Reading::take(&counts, 0);
        counts.show(0, 10, 640);
        let second = Reading::take(&counts, 0);
        assert!(second.moved_since(&first) && !second.moved_since(&second));
        let mut usage = Usage::NONE;
        usage.add(&first, &second);
        usage.add(&second, &second);
        assert_eq!((usage.messages, usage.bytes), (10, 640));
    }
}
