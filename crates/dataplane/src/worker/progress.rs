//! What a worker does, for the watchdog.
//!
//! A worker may hang in memory that never answers (a file of a file system that has stopped), and with it all its
//! lanes. It cannot report that itself. So it stores here which lane it takes up, one relaxed store each. Its rounds
//! are counted anyway ([`crate::worker::statistics::WorkerCounters`]). A watcher checks twice a second, but
//! only while a worker is awake. When all workers sleep it parks, and the first worker that wakes wakes it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst, fence};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use crate::lane::LaneId;

/// No lane has this number.
const BETWEEN_LANES: u64 = 0;
/// No lane has this number either: the worker sleeps.
const ASLEEP: u64 = u64::MAX;

/// Where a worker is. Written by it alone, for each lane of each round: on cache lines of its own (they are fetched in
/// twos), or workers would take them from each other.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// The lane that it took up last, [`BETWEEN_LANES`] or [`ASLEEP`]. Relaxed where nothing is published through it;
    /// see [`Watcher::rouse`] for the one order that matters.
    at: AtomicU64,
    watcher: Arc<Watcher>,
}

/// Activity of a worker when the watcher checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// In a round, in none of its lanes.
    BetweenLanes,
    /// In this lane, or just out of it.
    InLane(LaneId),
    /// Waiting for something to do.
    Asleep,
}

impl Progress {
    pub(crate) fn new(watcher: Arc<Watcher>) -> Self {
        Self {
            at: AtomicU64::new(BETWEEN_LANES),
            watcher,
        }
    }

    /// The worker takes up a lane.
    #[inline]
    pub(crate) fn take_up(&self, lane: LaneId) {
        self.at.store(lane.0, Relaxed);
    }

    /// The worker is about to wait.
    pub(crate) fn sleep(&self) {
        self.at.store(ASLEEP, Relaxed);
    }

    /// The worker continues; from here on the watcher notices if it hangs.
    pub(crate) fn wake(&self) {
        self.at.store(BETWEEN_LANES, Relaxed);
        self.watcher.rouse();
    }

    pub(crate) fn activity(&self) -> Activity {
        match self.at.load(Relaxed) {
            BETWEEN_LANES => Activity::BetweenLanes,
            ASLEEP => Activity::Asleep,
            lane => Activity::InLane(LaneId(lane)),
        }
    }
}

/// Parks the thread that checks workers while all of them sleep.
#[derive(Debug, Default)]
pub struct Watcher {
    /// The watcher is parked, or about to park. [`Self::rouse`] explains the ordering.
    parked: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Watcher {
    /// Parks the watcher's thread until [`Self::rouse`]; not at all if a worker is `awake`.
    pub fn park_unless(&self, awake: impl Fn() -> bool) {
        self.thread.get_or_init(std::thread::current);
        self.parked.store(true, Relaxed);
        // See rouse.
        fence(SeqCst);
        if awake() {
            self.parked.store(false, Relaxed);
            return;
        }
        while self.parked.load(Relaxed) {
            std::thread::park();
        }
    }

    /// Wakes the watcher, if it is parked. The caller has published before that it is awake.
    ///
    /// Either the caller sees that the watcher has parked, or the watcher sees that the caller is awake: the fence
    /// pairs with that of [`Self::park_unless`]. Without them each could read the value before the other's store (store
    /// buffering), and a hang from here on would not be noticed.
    pub fn rouse(&self) {
        fence(SeqCst);
        if self.parked.load(Relaxed) {
            self.unpark();
        }
    }

    fn unpark(&self) {
        // Of several callers only one unparks it.
        if self.parked.swap(false, Relaxed)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}
