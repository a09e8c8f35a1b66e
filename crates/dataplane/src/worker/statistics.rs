//! Statistics of workers and their lanes, for other threads to read.
//!
//! Theory of operation. A worker thread counts its work in thread-local counters ([`device::meter`]). In one of many
//! rounds ([`CHECKS_PER_TIMED`]), and before it falls asleep, it adds the new counts to [`Counted`], which other threads
//! read. So these values lag by that many rounds at most, and are exact for a sleeping worker.
//!
//! The frames that a lane takes are counted in each round. Its time is not: reading the clock for each lane would cost
//! more than polling a lane that has nothing to do. Instead, that one round of many is timed, lane by lane, and the
//! worker's busy time is attributed to the lanes in these proportions.
//!
//! The measured cost (docs/benchmarks.md) is about one percent of full rounds, and more of rounds with few frames.
//!
//! One writer, the worker; see [`Counter`].

use std::time::Instant;

use device::counters::Counter;
use device::meter::{self, CALLS, SIZES, Work};

use crate::worker::worker_time::{WorkerTime, ns};

/// A worker publishes its counts, and times the round, in one of this many looks. Odd, as is the number of rounds from
/// one look to the next: some lanes do something each eighth round.
pub(crate) const CHECKS_PER_TIMED: u32 = 3;

/// Counters of a worker.
#[derive(Debug, Default)]
pub struct WorkerCounters {
    /// Rounds in which at least one frame moved.
    pub busy_rounds: Counter,
    /// Rounds in which no frame moved.
    pub idle_rounds: Counter,
    /// Times it went to sleep.
    pub sleeps: Counter,
    /// Sleeps in which busy lanes paused.
    pub(crate) pauses: Counter,
    /// How long it was busy, idle and asleep.
    pub time: WorkerTime,
    /// What it counted in [`device::meter`].
    pub(crate) counted: Counted,
}

/// See the module's head. The counts of a worker.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    /// See [`Work::taken`].
    pub(crate) taken: Counter,
    /// See [`Work::given`].
    pub(crate) given: Counter,
    /// See [`Work::batches`].
    pub(crate) batches: [Counter; SIZES],
    /// See [`Work::calls`].
    pub(crate) calls: [CallsCounted; CALLS],
    /// Hits, misses and evictions of a flow cache, see [`meter::Cached`].
    pub(crate) cached: [Counter; 3],
    /// Rounds that moved frames and were timed.
    pub(crate) timed_rounds: Counter,
    /// The length of these, nanoseconds.
    pub(crate) timed_ns: Counter,
}

/// See [`meter::Calls`].
#[derive(Debug, Default)]
pub(crate) struct CallsCounted {
    pub(crate) all: Counter,
    pub(crate) timed: Counter,
    pub(crate) timed_ns: Counter,
}

/// The counts of a lane.
#[derive(Debug, Default)]
pub(crate) struct LaneCounted {
    /// Frames that it took.
    pub(crate) frames: Counter,
    /// Its time in timed rounds in which it moved frames, nanoseconds.
    pub(crate) timed_ns: Counter,
}

impl Counted {
    /// Adds what the calling thread has counted since it was read into `was`; updates that.
    pub(crate) fn publish(&self, was: &mut Work) {
        let now = meter::read();
        let before = std::mem::replace(was, now);
        let add = |to: &Counter, now: u64, before: u64| {
            if now != before {
                to.add(now.wrapping_sub(before));
            }
        };
        add(&self.taken, now.taken, before.taken);
        add(&self.given, now.given, before.given);
        for (at, to) in self.batches.iter().enumerate() {
            add(to, now.batches[at], before.batches[at]);
        }
        for (at, to) in self.calls.iter().enumerate() {
            let (now, before) = (now.calls[at], before.calls[at]);
            if now.all != before.all {
                add(&to.all, now.all, before.all);
                add(&to.timed, now.timed, before.timed);
                add(&to.timed_ns, now.timed_ns, before.timed_ns);
            }
        }
        if now.cached != before.cached {
            let of = |work: Work| [work.cached.hits, work.cached.misses, work.cached.evictions];
            for ((to, now), before) in self.cached.iter().zip(of(now)).zip(of(before)) {
                add(to, now, before);
            }
        }
    }
}

/// Times a round, lane by lane.
pub(crate) struct Stopwatch {
    begun: Instant,
    last: Instant,
}

impl Stopwatch {
    pub(crate) fn start(now: Instant) -> Self {
        Self {
            begun: now,
            last: now,
        }
    }

    /// Ends a lane's part of the round, which counts if the lane moved frames.
    pub(crate) fn lap(&mut self, now: Instant, lane: &LaneCounted, moved: bool) {
        if moved {
            lane.timed_ns.add(ns(now.saturating_duration_since(self.last)));
        }
        self.last = now;
    }

    /// Ends a round in which frames moved.
    pub(crate) fn stop(self, counted: &Counted) {
        counted.timed_rounds.add(1);
        counted
            .timed_ns
            .add(ns(self.last.saturating_duration_since(self.begun)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_a_thread_did_is_added_once() {
        let (counted, mut was) = (Counted::default(), meter::read());
        meter::count_taken(5);
        meter::count_taken(2);
        meter::count_delivered(6);
        meter::count_lookups(4, 3);
        meter::call(meter::KernelCall::Kick, || ());
        for _ in 0..2 {
            counted.publish(&mut was);
            let counters = [&counted.taken, &counted.given];
            assert_eq!(counters.map(Counter::get), [7, 6]);
            assert_eq!(
                counted.batches.each_ref().map(Counter::get),
                [0, 1, 1, 0, 0, 0, 0]
            );
            assert_eq!(counted.cached.each_ref().map(Counter::get), [4, 3, 0]);
            assert_eq!((counted.calls[0].all.get(), counted.calls[0].timed.get()), (1, 1));
        }
    }

    #[test]
    fn time_of_a_round_is_that_of_lanes_and_what_is_between() {
        let (counted, begun) = (Counted::default(), Instant::now());
        let [one, other] = [LaneCounted::default(), LaneCounted::default()];
        let at = |ns| begun + Duration::from_nanos(ns);
        let mut stopwatch = Stopwatch::start(begun);
        stopwatch.lap(at(100), &one, true);
        stopwatch.lap(at(110), &other, false);
        stopwatch.lap(at(150), &one, true);
        stopwatch.stop(&counted);
        assert_eq!((one.timed_ns.get(), other.timed_ns.get()), (140, 0));
        assert_eq!((counted.timed_rounds.get(), counted.timed_ns.get()), (1, 150));
    }
}
