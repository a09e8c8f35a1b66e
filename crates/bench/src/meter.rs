//! The counts that the measuring loop publishes, and the flag that stops it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use signal_hook::consts::{SIGINT, SIGTERM};

/// What a loop has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Frames received (rxdrop), sent and completed (txonly), received and sent on (l2fwd).
    pub(super) frames: u64,
    /// Bytes of these frames, without checksum and gap.
    pub(super) bytes: u64,
    /// Frames that the device or its queue refused while sending (EBUSY): they are completed, but not sent.
    pub(super) refused: u64,
    /// System calls that sent.
    pub(super) kicks: u64,
}

/// Shared between the measuring loop, the progress thread and signal handlers.
#[derive(Debug)]
pub(super) struct Meter {
    stop: Arc<AtomicBool>,
    signalled: Arc<AtomicBool>,
    shown: Shown,
}

/// What a thread has counted, for others to read. On a cache line of its own: it is written once a batch.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Shown {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Shown {
    #[inline]
    pub(super) fn set(&self, count: u64, bytes: u64) {
        // Relaxed: the numbers are for display, and need not be consistent with each other.
        self.count.store(count, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> (u64, u64) {
        (
            self.count.load(Ordering::Relaxed),
            self.bytes.load(Ordering::Relaxed),
        )
    }
}

impl CpuTime {
    pub(super) const NONE: Self = Self {
        user: Duration::ZERO,
        system: Duration::ZERO,
    };
}

impl Meter {
    /// A meter that SIGINT and SIGTERM stop; a second signal ends the process as if there were no handler.
    pub(super) fn new() -> anyhow::Result<Self> {
        let meter = Self {
            stop: Arc::new(AtomicBool::new(false)),
            signalled: Arc::new(AtomicBool::new(false)),
            shown: Shown::default(),
        };
        for signal in [SIGINT, SIGTERM] {
            // Order matters: the first reads the flag before the second raises it.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&meter.signalled))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&meter.signalled)))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&meter.stop)))
                .context("cannot handle SIGINT and SIGTERM")?;
        }
        Ok(meter)
    }

    /// For the loop, once a batch.
    #[inline]
    pub(super) fn show(&self, tally: &Tally) {
        self.shown.set(tally.frames, tally.bytes);
    }

    /// For the loop, once a batch: whether to end.
    #[inline]
    pub(super) fn is_stopped(&self) -> bool {
        // Relaxed: nothing is published by it.
        self.stop.load(Ordering::Relaxed)
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Makes it ready for another loop. After a signal that loop stops at once.
    pub(super) fn begin_again(&self) {
        self.show(&Tally::default());
        self.stop.store(false, Ordering::Relaxed);
        // A signal raises both, `signalled` first: one that arrives meanwhile is not lost.
        if self.signalled() {
            self.stop();
        }
    }

    /// Whether a signal arrived.
    pub(super) fn signalled(&self) -> bool {
        self.signalled.load(Ordering::Relaxed)
    }

    /// What ended a run with this result.
    pub(super) fn ended<T, E>(&self, result: &Result<T, E>) -> &'static str {
        match (result, self.signalled()) {
            (Err(_), _) => "error",
            (Ok(_), true) => "signal",
            (Ok(_), false) => "duration",
        }
    }

    /// Frames and bytes so far, as last shown.
    pub(super) fn shown(&self) -> (u64, u64) {
        self.shown.get()
    }
}

/// Time and CPU time of the process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spent {
    pub(super) elapsed: Duration,
    pub(super) cpu: CpuTime,
}

/// CPU time of the process, all threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CpuTime {
    pub(super) user: Duration,
    pub(super) system: Duration,
}

/// Measures [`Spent`].
#[derive(Debug)]
pub(super) struct Stopwatch {
    at: Instant,
    cpu: CpuTime,
}

impl Stopwatch {
    pub(super) fn start() -> anyhow::Result<Self> {
        Ok(Self {
            cpu: cpu_time()?,
            at: Instant::now(),
        })
    }

    pub(super) fn stop(self) -> anyhow::Result<Spent> {
        let elapsed = self.at.elapsed();
        let cpu = cpu_time()?;
        Ok(Spent {
            elapsed,
            cpu: CpuTime {
                user: cpu.user.saturating_sub(self.cpu.user),
                system: cpu.system.saturating_sub(self.cpu.system),
            },
        })
    }
}

fn cpu_time() -> anyhow::Result<CpuTime> {
    cpu_time_in("/proc/self/stat")
}

/// Fields 14 and 15 of the `stat` of a process or a thread, in ticks of 10 ms or so.
pub(super) fn cpu_time_in(path: &str) -> anyhow::Result<CpuTime> {
    let stat = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    parse_stat(&stat, rustix::param::clock_ticks_per_second())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        .with_context(|| format!("cannot read the CPU time in {path}"))
}

fn parse_stat(stat: &str, ticks_per_second: u64) -> Option<CpuTime> {
    // The second field is the program's name in brackets, and may contain anything: count after it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let mut ticks = || -> Option<Duration> {
        let ticks: u64 = fields.next()?.parse().ok()?;
        Some(Duration::from_nanos(
            ticks.checked_mul(1_000_000_000 / ticks_per_second.max(1))?,
        ))
    };
    Some(CpuTime {
        user: ticks()?,
        system: ticks()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_behind_a_nasty_name() {
        let stat = "12 (a) b (c) R 1 12 12 0 -1 4194304 100 0 0 0 250 31 0 0 20 0 1 0 5 6 7";
        assert_eq!(
            parse_stat(stat, 100),
            Some(CpuTime {
                user: Duration::from_millis(2500),
                system: Duration::from_millis(310)
            })
        );
        assert_eq!(parse_stat("12 (a) R 1 12", 100), None);
    }
}
