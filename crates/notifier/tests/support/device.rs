//! The device's side of a queue that consists of two counters: how often the guest notified, and how often that was
//! seen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

use notifier::notifiers::{Left, Serve};
use testkit::wait;

/// The counters that guest and device share. The guest counts before it notifies.
pub(crate) trait Counters: Send + Sync {
    /// Number of notifications that the guest has counted.
    fn kicked(&self) -> u32;
    /// How many of these a look has seen.
    fn seen(&self) -> u32;
    /// A look has seen so many.
    fn see(&self, kicks: u32);
}

/// Counters of a guest that is a thread.
#[derive(Default)]
pub(crate) struct ThreadCounters {
    pub(crate) kicked: AtomicU32,
    pub(crate) seen: AtomicU32,
}

// All accesses are sequentially consistent: the tests are about which thread looks, not about memory order.
impl Counters for ThreadCounters {
    fn kicked(&self) -> u32 {
        self.kicked.load(Ordering::SeqCst)
    }

    fn seen(&self) -> u32 {
        self.seen.load(Ordering::SeqCst)
    }

    fn see(&self, kicks: u32) {
        self.seen.store(kicks, Ordering::SeqCst);
    }
}

/// Counts looks, and simultaneous looks of two owners.
pub(crate) struct Device<C> {
    pub(crate) counters: C,
    pub(crate) looks: AtomicU64,
    pub(crate) met: AtomicU64,
    /// A test has taken the rings away.
    pub(crate) closed: AtomicBool,
    pub(crate) looks_at_closed: AtomicU64,
    busy: AtomicBool,
}

impl<C: Counters> Device<C> {
    pub(crate) fn new(counters: C) -> Arc<Self> {
        Arc::new(Self {
            counters,
            looks: AtomicU64::new(0),
            met: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            looks_at_closed: AtomicU64::new(0),
            busy: AtomicBool::new(false),
        })
    }

    pub(crate) fn look(&self) {
        let met = self.busy.swap(true, Ordering::SeqCst);
        self.met.fetch_add(met.into(), Ordering::SeqCst);
        let at_closed = self.closed.load(Ordering::SeqCst);
        self.looks_at_closed.fetch_add(at_closed.into(), Ordering::SeqCst);
        let kicks = self.counters.kicked();
        // A second owner, if there were one, would look now.
        thread::yield_now();
        self.counters.see(kicks);
        self.looks.fetch_add(1, Ordering::SeqCst);
        self.busy.store(false, Ordering::SeqCst);
    }

    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::SeqCst)
    }

    /// All that the guest has notified until now is seen, sooner or later.
    pub(crate) fn sees_all(&self) {
        let kicked = self.counters.kicked();
        let seen = || self.counters.seen().wrapping_sub(kicked) < u32::MAX / 2;
        assert!(
            wait::until(wait::SOON, seen),
            "notification {kicked} was lost: seen {}",
            self.counters.seen()
        );
    }
}

/// The part of the device that the notifiers call.
pub(crate) struct Side<C>(pub(crate) Arc<Device<C>>);

impl<C: Counters> Serve for Side<C> {
    fn look(&mut self) -> Left {
        self.0.look();
        Left::Nothing
    }
}
