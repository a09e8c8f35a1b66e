//! How long a worker polls without work before it sleeps: between nothing and `--spin-us`, by what the last pauses were
//! like.
//!
//! Polling pays where work comes again within that time, and takes a CPU from guests and their peers where it does not:
//! TCP by GSO packets pauses for hundreds of microseconds. The rule is that of KVM for idle virtual CPUs (halt_poll_ns,
//! virt/kvm/kvm_main.c): a pause longer than the limit halves the time, one that polling up to the limit would have met
//! doubles it.

use std::time::Duration;

/// What a worker does that has nothing left to do, before it sleeps until somebody wakes it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Waits {
    /// It polls so long at most.
    pub(crate) spin: Duration,
    /// And lets frames of busy guests gather so long at most ([`super::moderation`]).
    pub(crate) moderation: Duration,
}

/// See the module's head.
pub(super) struct Polling {
    pub(super) now: Duration,
    most: Duration,
}

impl Polling {
    /// Least time that is worth to poll.
    pub(super) const LEAST: Duration = Duration::from_micros(4);

    pub(super) fn new(most: Duration) -> Self {
        Self { now: most, most }
    }

    /// A pause is over that was longer than the polling: it lasted so long, sleep included.
    pub(super) fn adapt(&mut self, pause: Duration) {
        self.now = if pause > self.most {
            match self.now / 2 {
                less if less < Self::LEAST => Duration::ZERO,
                less => less,
            }
        } else {
            (self.now * 2).max(Self::LEAST).min(self.most)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_stops_where_pauses_are_long_and_comes_back_where_they_are_short() {
        let limit = Duration::from_micros(50);
        let mut polling = Polling::new(limit);
        for _ in 0..5 {
            polling.adapt(Duration::from_millis(1));
        }
        assert_eq!(polling.now, Duration::ZERO);
        polling.adapt(Duration::from_micros(20));
        assert_eq!(polling.now, Polling::LEAST);
        for _ in 0..5 {
            polling.adapt(Duration::from_micros(20));
        }
        assert_eq!(polling.now, limit);
    }

    #[test]
    fn worker_that_is_told_not_to_poll_never_does() {
        let mut polling = Polling::new(Duration::ZERO);
        polling.adapt(Duration::ZERO);
        assert_eq!(polling.now, Duration::ZERO);
    }
}
