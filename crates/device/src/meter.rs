//! Statistics of a thread: how many frames it takes and delivers, and how many at once, its system calls, and
//! how often its flow cache had a frame's flow.
//!
//! Theory of operation. Each event is counted where it happens, per batch, in cells of its thread: nothing is
//! shared, no counter is passed down, and counting is an addition in cached memory. A worker reads and
//! publishes the cells of its thread once in many rounds, and before it sleeps. Cells only grow; work of
//! other threads is not reported.
//!
//! Reading the clock costs more than counting. So only one in [`TIMED_EACH`] system calls is timed, beginning
//! with the first; the time of all of them is extrapolated from their number.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Whether anything is counted. False only in the build that measures the cost of counting (docs/benchmarks.md).
pub const IS_KEPT: bool = !cfg!(feature = "no-statistics");

/// One in this many calls of a kind is timed. A prime, so that it does not align with events that lanes
/// repeat every second or eighth time.
pub const TIMED_EACH: u64 = 31;

/// Number of batch size classes: 1, 2 to 3, 4 to 7 and so on, and 64 or more.
pub const SIZES: usize = 7;

/// Number of kinds of [`KernelCall`].
pub const CALLS: usize = 4;

/// A system call that moves frames, or notifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelCall {
    /// Sends the frames in a transmit ring (sendto).
    Kick,
    /// Makes the kernel receive into the buffers of a fill ring, or poll for frames (recvfrom).
    Wake,
    /// Writes a frame to the host, or reads one (writev and readv of its tap device).
    Host,
    /// Interrupts a guest (write to an eventfd). Each of these is timed, because `call.rs` needs the time.
    Call,
}

impl KernelCall {
    /// All kinds, in the order of [`Work::calls`].
    pub const ALL: [Self; CALLS] = [Self::Kick, Self::Wake, Self::Host, Self::Call];

    /// Its name in JSON.
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
    /// Time of these, nanoseconds.
    pub timed_ns: u64,
}

/// Statistics of a flow cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cached {
    /// Frames whose flow was found.
    pub hits: u64,
    /// Frames whose flow was not found.
    pub misses: u64,
    /// Flows evicted for others.
    pub evictions: u64,
}

/// What a thread has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Frames taken from a guest, a NIC or the host.
    pub taken: u64,
    /// Frames delivered to a guest, a NIC or the host.
    pub given: u64,
    /// Number of batches taken, by size class.
    pub batches: [u64; SIZES],
    /// By [`KernelCall::ALL`].
    pub calls: [Calls; CALLS],
    /// All 0 without a cache.
    pub cached: Cached,
}

struct Meter {
    taken: Cell<u64>,
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
            taken: Cell::new(0),
            given: Cell::new(0),
            batches: [const { Cell::new(0) }; SIZES],
            calls: [const { Cell::new(NO_CALLS) }; CALLS],
            hits: Cell::new(0),
            misses: Cell::new(0),
            evictions: Cell::new(0),
        }
    };
}

/// Counts a batch of frames taken from a guest, a NIC or the host.
#[inline]
pub fn count_taken(frames: usize) {
    if IS_KEPT && frames > 0 {
        METER.with(|meter| meter.take(frames as u64));
    }
}

/// Counts frames delivered to a guest, a NIC or the host.
#[inline]
pub fn count_delivered(frames: u64) {
    if IS_KEPT {
        METER.with(|meter| add(&meter.given, frames));
    }
}

/// Counts look-ups in a flow cache.
#[inline]
pub fn count_lookups(hits: u64, misses: u64) {
    if IS_KEPT {
        METER.with(|meter| {
            add(&meter.hits, hits);
            add(&meter.misses, misses);
        });
    }
}

/// Counts flows evicted from a cache.
#[inline]
pub fn count_evictions(flows: u64) {
    if IS_KEPT {
        METER.with(|meter| add(&meter.evictions, flows));
    }
}

/// Makes a system call, and counts it.
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

/// Counts a system call that the caller has made and timed.
#[inline]
pub fn called(kind: KernelCall, took: Duration) {
    if IS_KEPT {
        METER.with(|meter| meter.note(kind, Some(took)));
    }
}

/// Frames that this thread has taken so far.
#[inline]
#[must_use]
pub fn taken() -> u64 {
    METER.with(|meter| meter.taken.get())
}

/// The statistics of this thread so far.
#[must_use]
pub fn read() -> Work {
    METER.with(|meter| Work {
        taken: meter.taken.get(),
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
        add(&self.taken, frames);
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
        count_taken(0);
        assert_eq!(read(), before, "no batch");
        count_taken(3);
        count_taken(64);
        count_delivered(5);
        count_lookups(2, 1);
        count_evictions(4);
        std::thread::spawn(|| count_taken(9)).join().expect("no panic");
        let now = read();
        assert_eq!((now.taken, now.given), (67, 5));
        assert_eq!(now.batches, [0, 1, 0, 0, 0, 0, 1]);
        assert_eq!(
            now.cached,
            Cached {
                hits: 2,
                misses: 1,
                evictions: 4
            }
        );
        assert_eq!(taken(), 67);
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
