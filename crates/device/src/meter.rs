//! What a thread does for frames: how many it takes and gives and how many at once, its calls of the kernel, and how
//! often its flow cache knew a frame.
//!
//! Theory of operation. Each of these is counted where it happens, by the batch, in cells of its thread: nothing is
//! shared, no counter is passed down, and counting is an addition in memory that is in the cache. A worker reads the
//! cells of its thread in one of many rounds, and before it sleeps, and publishes them then. Cells only grow; work of
//! other threads is not reported.
//!
//! Reading the clock costs more than counting. So of the calls of the kernel one in [`TIMED_EACH`] is timed, the first
//! one among them; how long all of them took follows from how many there were.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Whether anything is counted. Not in the build that the cost of counting is measured by (docs/benchmarks.md).
pub const IS_KEPT: bool = !cfg!(feature = "no-statistics");

/// One in this many calls of a kind is timed. A prime, so that it does not keep step with what lanes do each second or
/// eighth time.
pub const TIMED_EACH: u64 = 31;

/// Kinds of batches, by how many frames they have: 1, 2 to 3, 4 to 7 and so on, and 64 or more.
pub const SIZES: usize = 7;

/// Kinds of [`KernelCall`].
pub const CALLS: usize = 4;

/// A system call that moves frames, or notifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelCall {
    /// Sends the frames in a transmit ring (sendto).
    Kick,
    /// Makes the kernel receive into the buffers of a fill ring, or look for frames (recvfrom).
    Wake,
    /// Writes a frame to the host, or reads one (writev and readv of its tap device).
    Host,
    /// A guest is interrupted (write to an eventfd). Each of these is timed, as they are anyway.
    Call,
}

impl KernelCall {
    /// All kinds, in the order of [`Work::calls`].
    pub const ALL: [Self; CALLS] = [Self::Kick, Self::Wake, Self::Host, Self::Call];

    /// Its name in documents.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kick => "kick",
            Self::Wake => "wake",
            Self::Host => "host",
            Self::Call => "call",
        }
    }
}

/// Calls of a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// How many.
    pub all: u64,
    /// How many of them were timed.
    pub timed: u64,
    /// What these took, nanoseconds.
    pub timed_ns: u64,
}

/// What a flow cache did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cached {
    /// Frames whose flow was found.
    pub hits: u64,
    /// Frames whose flow was not found.
    pub misses: u64,
    /// Flows that went for others.
    pub evictions: u64,
}

/// What a thread has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Frames taken: from a guest, a NIC or the host, or of those that another worker took, and so once more.
    pub passes: u64,
    /// Those of them that another worker had taken.
    pub linked: u64,
    /// Frames given: to a guest, a NIC, the host or another worker.
    pub given: u64,
    /// How many batches of which size were taken.
    pub batches: [u64; SIZES],
    /// By [`KernelCall::ALL`].
    pub calls: [Calls; CALLS],
    /// Nothing, where there is no cache.
    pub cached: Cached,
}

struct Meter {
    passes: Cell<u64>,
    linked: Cell<u64>,
    given: Cell<u64>,
    batches: [Cell<u64>; SIZES],
    calls: [Cell<Calls>; CALLS],
    hits: Cell<u64>,
    misses: Cell<u64>,
    evictions: Cell<u64>,
}

const NO_CALLS: Calls = Calls {
    all: 0,
    timed: 0,
    timed_ns: 0,
};

thread_local! {
    static METER: Meter = const {
        Meter {
            passes: Cell::new(0),
            linked: Cell::new(0),
            given: Cell::new(0),
            batches: [const { Cell::new(0) }; SIZES],
            calls: [const { Cell::new(NO_CALLS) }; CALLS],
            hits: Cell::new(0),
            misses: Cell::new(0),
            evictions: Cell::new(0),
        }
    };
}

/// A batch of frames was taken, from a guest, a NIC or the host.
#[inline]
pub fn took(frames: usize) {
    if IS_KEPT && frames > 0 {
        METER.with(|meter| meter.take(frames as u64));
    }
}

/// The same of a link from another worker.
#[inline]
pub fn took_linked(frames: usize) {
    if IS_KEPT && frames > 0 {
        METER.with(|meter| {
            meter.take(frames as u64);
            add(&meter.linked, frames as u64);
        });
    }
}

/// Frames were delivered to a guest, a NIC, the host or another worker.
#[inline]
pub fn gave(frames: u64) {
    if IS_KEPT {
        METER.with(|meter| add(&meter.given, frames));
    }
}

/// Look-ups in a flow cache.
#[inline]
pub fn looked_up(hits: u64, misses: u64) {
    if IS_KEPT {
        METER.with(|meter| {
            add(&meter.hits, hits);
            add(&meter.misses, misses);
        });
    }
}

/// Flows of a cache were replaced.
#[inline]
pub fn evicted(flows: u64) {
    if IS_KEPT {
        METER.with(|meter| add(&meter.evictions, flows));
    }
}

/// Makes a call of the kernel.
#[inline]
pub fn call<R>(kind: KernelCall, make: impl FnOnce() -> R) -> R {
    if !IS_KEPT {
        return make();
    }
    let is_timed = METER.with(|meter| meter.calls[kind as usize].get().all.is_multiple_of(TIMED_EACH));
    if !is_timed {
        METER.with(|meter| meter.note(kind, None));
        return make();
    }
    let begun = Instant::now();
    let made = make();
    called(kind, begun.elapsed());
    made
}

/// A call of the kernel was made, and timed.
#[inline]
pub fn called(kind: KernelCall, took: Duration) {
    if IS_KEPT {
        METER.with(|meter| meter.note(kind, Some(took)));
    }
}

/// Frames that this thread has taken so far.
#[inline]
#[must_use]
pub fn passes() -> u64 {
    METER.with(|meter| meter.passes.get())
}

/// What this thread has done so far.
#[must_use]
pub fn read() -> Work {
    METER.with(|meter| Work {
        passes: meter.passes.get(),
        linked: meter.linked.get(),
        given: meter.given.get(),
        batches: meter.batches.each_ref().map(Cell::get),
        calls: meter.calls.each_ref().map(Cell::get),
        cached: Cached {
            hits: meter.hits.get(),
            misses: meter.misses.get(),
            evictions: meter.evictions.get(),
        },
    })
}

/// The index in [`Work::batches`] of a batch of `frames`.
#[inline]
#[must_use]
pub fn size(frames: u64) -> usize {
    (frames.max(1).ilog2() as usize).min(SIZES - 1)
}

impl Meter {
    #[inline]
    fn take(&self, frames: u64) {
        add(&self.passes, frames);
        add(&self.batches[size(frames)], 1);
    }

    #[inline]
    fn note(&self, kind: KernelCall, took: Option<Duration>) {
        let cell = &self.calls[kind as usize];
        let mut calls = cell.get();
        calls.all = calls.all.wrapping_add(1);
        if let Some(took) = took {
            calls.timed = calls.timed.wrapping_add(1);
            let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            calls.timed_ns = calls.timed_ns.wrapping_add(ns);
        }
        cell.set(calls);
    }
}

#[inline]
fn add(cell: &Cell<u64>, n: u64) {
    cell.set(cell.get().wrapping_add(n));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_by_size_and_each_thread_counts_for_itself() {
        for (frames, at) in [(1, 0), (2, 1), (3, 1), (4, 2), (63, 5), (64, 6), (1000, 6)] {
            assert_eq!(size(frames), at, "{frames}");
        }
        let before = read();
        took(0);
        assert_eq!(read(), before, "no batch");
        took(3);
        took_linked(64);
        gave(5);
        looked_up(2, 1);
        evicted(4);
        std::thread::spawn(|| took(9)).join().expect("no panic");
        let now = read();
        assert_eq!((now.passes, now.linked, now.given), (67, 64, 5));
        assert_eq!(now.batches, [0, 1, 0, 0, 0, 0, 1]);
        assert_eq!(
            now.cached,
            Cached {
                hits: 2,
                misses: 1,
                evictions: 4
            }
        );
        assert_eq!(passes(), 67);
    }

    #[test]
    fn first_call_is_timed_and_then_one_of_many() {
        for n in 1..=TIMED_EACH + 1 {
            assert_eq!(call(KernelCall::Wake, || n), n);
        }
        called(KernelCall::Call, Duration::from_nanos(7));
        let calls = read().calls;
        let [kicks, wakes, _, of_guests] = calls;
        assert_eq!((kicks.all, kicks.timed), (0, 0));
        assert_eq!((wakes.all, wakes.timed), (TIMED_EACH + 1, 2));
        assert_eq!((of_guests.all, of_guests.timed_ns), (1, 7));
    }

    #[test]
    fn kinds_of_calls_are_in_their_places() {
        for (at, kind) in KernelCall::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at, "{}", kind.name());
        }
    }
}
