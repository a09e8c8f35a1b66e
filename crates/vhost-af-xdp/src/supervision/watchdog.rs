//! Detects a worker that hangs, and names the port whose guest memory it may wait for; for a cable, both ports.
//!
//! Guest memory is a file of the VMM, and a file system may stop answering: the worker that touches it waits in the
//! kernel, with all its lanes, and the daemon cannot end that wait. It can report the hang, give new lanes to other
//! workers, and still exit in time after a signal (serve.rs).
//!
//! One thread reads the workers' progress ([`dataplane::worker::progress`]) every [`LOOK`], but not while all of them sleep
//! and no other thread writes to a VMM (interrupt.rs). If a worker hung and then went to sleep, it is read once more:
//! otherwise it would be reported as hanging until some worker wakes. A worker that is awake and has finished no
//! round between three readings hangs: three, because after the whole process was stopped the watchdog may be the first
//! thread to continue.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::interrupt;
use crate::thread;
use common::lock::Locked;
use dataplane::worker::progress::Activity;
use dataplane::worker::workers::{Observation, Workers};
use program::log_limit::LogLimit;

/// Time between two readings.
const LOOK: Duration = Duration::from_millis(500);
/// Number of readings without progress after which a worker hangs.
const LOOKS: u32 = 2;

/// The workers that hang, by worker.
#[derive(Clone, Default)]
pub(crate) struct Watchdog(Arc<Mutex<Vec<Option<Hang>>>>);

/// A worker that hangs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hang {
    /// When it was first seen in the same round.
    since: Instant,
    /// The ports whose guest memory it may wait for.
    ports: Vec<Arc<str>>,
}

impl Hang {
    /// In words, without the worker's name.
    pub(crate) fn words(&self) -> String {
        let seconds = self.since.elapsed().as_secs().max(1);
        let place = if self.ports.is_empty() { "" } else { ", in port " };
        let ports = self.ports.join(" or ");
        format!("has not finished a round for {seconds} s{place}{ports}")
    }
}

/// The last reading of a worker.
struct Watched {
    seen: Observation,
    since: Instant,
    /// Number of readings since then that were the same.
    same: u32,
}

/// Result of a reading.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    Hangs(Instant),
    /// It continues, after it hung for this long.
    GoesOn(Duration),
}

impl Watched {
    fn new(now: Instant) -> Self {
        let seen = Observation {
            rounds: 0,
            activity: Activity::Asleep,
        };
        Self {
            seen,
            since: now,
            same: 0,
        }
    }

    /// Whether it hung at the last reading.
    fn hangs(&self) -> bool {
        self.same >= LOOKS
    }

    fn look(&mut self, seen: Observation, now: Instant) -> Change {
        if seen.activity != Activity::Asleep
            && seen.rounds == self.seen.rounds
            && self.seen.activity != Activity::Asleep
        {
            self.seen = seen;
            self.same = self.same.saturating_add(1);
            return match self.same {
                LOOKS => Change::Hangs(self.since),
                _ => Change::None,
            };
        }
        let hung = self.hangs().then(|| now.duration_since(self.since));
        *self = Self {
            seen,
            since: now,
            same: 0,
        };
        hung.map_or(Change::None, Change::GoesOn)
    }
}

impl Watchdog {
    /// Watches from now on, on a thread of its own.
    pub(crate) fn start(workers: Arc<Workers>) -> io::Result<Self> {
        let watchdog = Self::default();
        watchdog.hangs().resize(workers.observe().count(), None);
        let hangs = watchdog.clone();
        thread::start("watchdog", move || hangs.watch(&workers))?;
        Ok(watchdog)
    }

    /// The workers that hang, by worker.
    pub(crate) fn hangs(&self) -> MutexGuard<'_, Vec<Option<Hang>>> {
        self.0.locked()
    }

    fn watch(&self, workers: &Workers) {
        let mut log = LogLimit::default();
        let mut watched: Vec<_> = workers.observe().map(|_| Watched::new(Instant::now())).collect();
        loop {
            let hangs = watched.iter().any(Watched::hangs);
            let is_awake = || workers.observe().any(|seen| seen.activity != Activity::Asleep);
            workers
                .watcher
                .park_unless(|| hangs || interrupt::has_writers() || is_awake());
            for (worker, seen) in workers.observe().enumerate() {
                let change = watched[worker].look(seen, Instant::now());
                if change != Change::None {
                    let hang = hang(&change, seen.activity, workers);
                    workers.note_hang(worker, hang.is_some());
                    self.hangs()[worker].clone_from(&hang);
                    // Without the lock: `status` takes it, and logging may be slow.
                    report(worker, hang.as_ref(), &change, &mut log);
                }
            }
            interrupt_for(LOOK, workers);
        }
    }
}

/// What `status` reports of a worker after this change.
fn hang(change: &Change, activity: Activity, workers: &Workers) -> Option<Hang> {
    let &Change::Hangs(since) = change else {
        return None;
    };
    let ports = match activity {
        Activity::InLane(lane) => workers.owners(lane),
        Activity::BetweenLanes | Activity::Asleep => Vec::new(),
    };
    Some(Hang { since, ports })
}

/// For `time`, interrupts workers that are awake and have finished no round between two readings, and control
/// threads that write ([`interrupt`]). This does not end a wait for memory that never answers.
fn interrupt_for(time: Duration, workers: &Workers) {
    let mut before: Vec<_> = workers.observe().collect();
    for _ in 0..time.as_millis() / interrupt::PERIOD.as_millis() {
        std::thread::sleep(interrupt::PERIOD);
        let now: Vec<_> = workers.observe().collect();
        for ((before, now), thread) in before.iter().zip(&now).zip(workers.threads()) {
            if now.activity != Activity::Asleep && now.rounds == before.rounds {
                interrupt::interrupt(thread);
            }
        }
        before = now;
        interrupt::interrupt_writers();
    }
}

fn report(worker: usize, hang: Option<&Hang>, change: &Change, log: &mut LogLimit) {
    let Some(left_out) = log.allow() else { return };
    match (change, hang) {
        (Change::Hangs(_), Some(hang)) => tracing::error!(
            "worker-{worker} {}: the guests of its ports wait. If it goes on, see to the file system that the memory \
             of a guest there is on, or end its VMM{left_out}",
            hang.words()
        ),
        (Change::GoesOn(hung), _) => {
            tracing::warn!(
                "worker-{worker} goes on after {} s{left_out}",
                hung.as_secs().max(1)
            );
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dataplane::lane::LaneId;

    const HERE: Activity = Activity::InLane(LaneId(7));

    /// Results of these readings, half a second apart.
    fn changes(observations: &[(u64, Activity)]) -> Vec<&'static str> {
        let begun = Instant::now();
        let mut watched = Watched::new(begun);
        let looks = (0u32..).zip(observations).map(|(at, &(rounds, activity))| {
            match watched.look(Observation { rounds, activity }, begun + LOOK * at) {
                Change::None => "",
                Change::Hangs(_) => "hangs",
                Change::GoesOn(_) => "goes on",
            }
        });
        looks.collect()
    }

    #[test]
    fn worker_without_a_round_in_a_second_hangs_and_is_named_once() {
        let observations = [(1, HERE), (1, HERE), (1, HERE), (1, HERE), (1, HERE), (2, HERE)];
        assert_eq!(changes(&observations), ["", "", "hangs", "", "", "goes on"]);
    }

    #[test]
    fn sleeper_does_not_hang_however_long_it_sleeps() {
        assert_eq!(changes(&[(1, Activity::Asleep); 8]), [""; 8]);
        let woken = [
            (1, Activity::Asleep),
            (1, Activity::Asleep),
            (1, HERE),
            (1, HERE),
            (2, HERE),
        ];
        assert_eq!(changes(&woken), [""; 5]);
    }

    #[test]
    fn worker_that_gets_on_slowly_does_not_hang() {
        let observations = [
            (1, HERE),
            (1, HERE),
            (2, HERE),
            (2, Activity::BetweenLanes),
            (3, HERE),
        ];
        assert_eq!(changes(&observations), [""; 5]);
    }
}
