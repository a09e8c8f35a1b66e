//! How long a worker is busy, idle and asleep.
//!
//! The clock is read at the end of each round that moved no frame, and now and then in a long run of rounds that did: a
//! busy worker pays nothing for it. The time between two readings belongs to the rounds that moved frames, if there
//! were some, except for the length of one idle round, since one ends each such run.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use device::counters::Counter;

/// All in nanoseconds; `busy` and `idle` as of the worker's last reading of the clock.
#[derive(Debug)]
pub struct WorkerTime {
    /// Time in rounds that moved frames.
    pub busy: Counter,
    /// Time in rounds that moved none, and while falling asleep.
    pub idle: Counter,
    /// Time asleep. During a sleep ([`SLEEPS`]) the time at which it would have fallen asleep, had it not slept before;
    /// in one number, so that no reader counts a sleep twice or misses it. Written by the worker alone; nothing is
    /// published through it.
    asleep: AtomicU64,
    /// The start of the measured time.
    began: Instant,
}

/// Flag in [`WorkerTime::asleep`]: the worker sleeps.
const SLEEPS: u64 = 1 << 63;

impl Default for WorkerTime {
    fn default() -> Self {
        Self {
            busy: Counter::default(),
            idle: Counter::default(),
            asleep: AtomicU64::new(0),
            began: Instant::now(),
        }
    }
}

impl WorkerTime {
    /// The measured time so far, nanoseconds.
    pub(crate) fn age(&self, now: Instant) -> u64 {
        ns(now.saturating_duration_since(self.began))
    }

    /// How long it has slept, as of now.
    pub fn asleep(&self, now: Instant) -> u64 {
        match self.asleep.load(Relaxed) {
            sleeps @ SLEEPS.. => self.age(now).saturating_sub(sleeps & !SLEEPS),
            slept => slept,
        }
    }

    /// Records that the worker falls asleep.
    pub(crate) fn fall_asleep(&self, now: Instant) {
        let since = self.age(now).saturating_sub(self.asleep.load(Relaxed));
        self.asleep.store(since | SLEEPS, Relaxed);
    }

    /// Records that the worker has woken.
    pub(crate) fn wake(&self, now: Instant) {
        self.asleep.store(self.asleep(now), Relaxed);
    }
}

/// Reads the clock for [`WorkerTime`].
pub(crate) struct Watch {
    last: Instant,
    /// How long the last idle round took that followed another one.
    idle_round: Duration,
    /// Rounds since `last` moved frames.
    was_busy: bool,
}

impl Watch {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            last: now,
            idle_round: Duration::ZERO,
            was_busy: false,
        }
    }

    /// Records a round that moved frames.
    #[inline]
    pub(crate) fn note_busy(&mut self) {
        self.was_busy = true;
    }

    /// Measures a run of busy rounds; called in one of many rounds.
    pub(crate) fn look(&mut self, now: Instant, time: &WorkerTime) {
        if std::mem::take(&mut self.was_busy) {
            time.busy.add(ns(self.pass(now)));
        }
    }

    /// Records a round that moved no frame.
    #[inline]
    pub(crate) fn note_idle(&mut self, now: Instant, time: &WorkerTime) {
        let passed = self.pass(now);
        if std::mem::take(&mut self.was_busy) {
            let idle = self.idle_round.min(passed);
            time.busy.add(ns(passed - idle));
            time.idle.add(ns(idle));
        } else {
            self.idle_round = passed;
            time.idle.add(ns(passed));
        }
    }

    /// Records a sleep of the length `asleep`, which [`WorkerTime::wake`] has counted already.
    pub(crate) fn note_sleep(&mut self, asleep: Duration, now: Instant, time: &WorkerTime) {
        let awake = self.pass(now).saturating_sub(asleep);
        time.idle.add(ns(awake));
    }

    /// Time since the last reading of the clock.
    fn pass(&mut self, now: Instant) -> Duration {
        let passed = now.duration_since(self.last);
        self.last = now;
        passed
    }
}

/// Nanoseconds.
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_idle_and_asleep_add_up_to_the_time() {
        let time = WorkerTime::default();
        let began = time.began;
        let at = |us| began + Duration::from_micros(us);
        let read = |us| [time.busy.get(), time.idle.get(), time.asleep(at(us))].map(|ns| ns / 1000);
        let mut watch = Watch::new(began);
        watch.note_idle(at(2), &time);
        watch.note_idle(at(5), &time);
        assert_eq!(read(5), [0, 5, 0]);
        for _ in 0..10 {
            watch.note_busy();
        }
        watch.look(at(105), &time);
        watch.note_busy();
        watch.note_idle(at(118), &time);
        assert_eq!(read(118), [110, 8, 0], "the last of these rounds was an idle one");
        watch.look(at(119), &time);
        time.fall_asleep(at(125));
        assert_eq!(read(140), [110, 8, 15], "as it sleeps");
        time.wake(at(195));
        watch.note_sleep(Duration::from_micros(70), at(200), &time);
        assert_eq!(read(200), [110, 20, 70]);
        watch.note_busy();
        watch.note_idle(at(201), &time);
        assert_eq!(read(300), [110, 21, 70], "shorter than the idle round before");
    }
}
