//! Counters and flags that the threads of server and client share with the thread that watches them.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::meter::Shown;

/// All values are for display and for decisions that may be a little late: Relaxed throughout, they publish nothing
/// else.
#[derive(Debug)]
pub(super) struct Counts {
    /// A place for the server's thread, and one for each of the client's.
    shown: Vec<Shown>,
    connected: AtomicU32,
    measuring: AtomicBool,
    seconds: AtomicU64,
    /// ID of the server's thread; 0: it does not serve yet.
    server: AtomicI32,
}

impl Counts {
    /// With places for so many threads of a client.
    pub(super) fn new(clients: usize) -> Self {
        Self {
            shown: (0..=clients).map(|_| Shown::default()).collect(),
            connected: AtomicU32::new(0),
            measuring: AtomicBool::new(false),
            seconds: AtomicU64::new(0),
            server: AtomicI32::new(0),
        }
    }

    /// Stores the messages and bytes that a thread has counted: place 0 is the server's, the others are the client's.
    #[inline]
    pub(super) fn show(&self, place: usize, messages: u64, bytes: u64) {
        if let Some(shown) = self.shown.get(place) {
            shown.set(messages, bytes);
        }
    }

    /// Messages and bytes that clients received; without a client here, those that the server sent back.
    pub(super) fn total(&self) -> (u64, u64) {
        let clients = self.shown.len() - 1;
        let each = self.shown.iter().skip(clients.min(1)).map(Shown::get);
        each.fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1))
    }

    /// Counts a connection of the client.
    pub(super) fn add_connected(&self) {
        self.connected.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn connected(&self) -> u32 {
        self.connected.load(Ordering::Relaxed)
    }

    /// Whether latencies are recorded.
    #[inline]
    pub(super) fn is_measuring(&self) -> bool {
        self.measuring.load(Ordering::Relaxed)
    }

    pub(super) fn measure(&self) {
        self.measuring.store(true, Ordering::Relaxed);
    }

    /// Seconds that have passed, for deadlines: the threads read no clock for them.
    #[inline]
    pub(super) fn seconds(&self) -> u64 {
        self.seconds.load(Ordering::Relaxed)
    }

    pub(super) fn set_seconds(&self, seconds: u64) {
        self.seconds.store(seconds, Ordering::Relaxed);
    }

    /// Called by the server's thread when it is ready.
    pub(super) fn serve_here(&self) {
        let number = rustix::thread::gettid().as_raw_nonzero().get();
        self.server.store(number, Ordering::Relaxed);
    }

    /// ID of the server's thread.
    pub(super) fn server(&self) -> Option<i32> {
        Some(self.server.load(Ordering::Relaxed)).filter(|&number| number != 0)
    }
}
