//! How long a worker polls without work before it sleeps: between zero and `--spin-us`, adapted to the last pauses
//! between work.
//!
//! Polling pays where work arrives within that time, and takes a CPU from guests and their peers where it does not: TCP
//! with GSO packets pauses for hundreds of microseconds. The rule is that of KVM for idle virtual CPUs (halt_poll_ns,
//! virt/kvm/kvm_main.c): a pause longer than the limit halves the time, one that polling up to the limit would have met
//! doubles it.
//!
//! Where the peer needs the worker's own CPU, a pause grows by the time that the worker polls: polling meets no work,
//! however long it is, and delays the work that it waits for. The worker detects this when it has polled longer than
//! before, and has not slept shorter. From the second time in a row on, it polls in fewer and fewer pauses, until
//! polling has met work. (KVM checks whether its CPU has other threads to run, which a process cannot.)

use std::time::Duration;

/// How a worker without work waits before it sleeps until an event.
#[derive(Debug, Clone, Copy, Default)]
pub struct Waits {
    /// Longest polling.
    pub spin: Duration,
    /// Longest pause in which frames of busy guests accumulate ([`crate::worker::moderation`]).
    pub moderation: Duration,
}

/// See the module's head.
pub(crate) struct Polling {
    pub(crate) now: Duration,
    most: Duration,
    /// How long the worker polled, and then slept, in the last pause in which polling met no work.
    last: (Duration, Duration),
    /// Times in a row that polling longer was in vain.
    in_vain: u32,
    /// How many of the next pauses it does not poll in.
    left_out: u32,
}

/// Most pauses in a row without polling are two to the power of this.
const MOST_IN_VAIN: u32 = 10;

impl Polling {
    /// Shortest polling that pays.
    pub(crate) const LEAST: Duration = Duration::from_micros(4);

    pub(crate) fn new(most: Duration) -> Self {
        Self {
            now: most,
            most,
            last: (Duration::MAX, Duration::MAX),
            in_vain: 0,
            left_out: 0,
        }
    }

    /// Work arrived while the worker polled.
    #[inline]
    pub(crate) fn hit(&mut self) {
        self.in_vain = 0;
    }

    /// A pause longer than the polling is over; `pause`: its length, sleep included.
    pub(crate) fn adapt(&mut self, pause: Duration) {
        let asleep = pause.saturating_sub(self.now);
        let (polled, slept) = std::mem::replace(&mut self.last, (self.now, asleep));
        let longer = self.now.saturating_sub(polled);
        let was_in_vain = !longer.is_zero() && asleep + longer / 2 >= slept;
        if was_in_vain {
            self.in_vain = (self.in_vain + 1).min(MOST_IN_VAIN);
            if self.in_vain > 1 {
                self.left_out = 1 << self.in_vain;
            }
        }
        if self.left_out > 0 {
            self.left_out -= 1;
            self.now = Duration::ZERO;
        } else if was_in_vain || pause > self.most {
            self.now = match self.now / 2 {
                less if less < Self::LEAST => Duration::ZERO,
                less => less,
            };
        } else {
            self.now = (self.now * 2).max(Self::LEAST).min(self.most);
        }
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
        polling.adapt(Duration::from_micros(45));
        assert_eq!(polling.now, Polling::LEAST);
        for _ in 0..4 {
            polling.adapt(Duration::from_micros(45));
        }
        assert_eq!(polling.now, limit);
    }

    /// The peer needs the worker's CPU for this long, and gets it when the worker sleeps.
    #[test]
    fn polling_that_only_delays_its_peer_stops() {
        for most in [20, 50] {
            let mut polling = Polling::new(Duration::from_micros(most));
            let peer = Duration::from_micros(15);
            let mut polled = Duration::ZERO;
            for _ in 0..1000 {
                polled += polling.now;
                polling.adapt(polling.now + peer);
            }
            assert!(polled < 20 * peer, "{polled:?}");
            // The peer has a CPU of its own now.
            let mut met = 0;
            for _ in 0..5000 {
                match polling.now > peer {
                    true => {
                        polling.hit();
                        met += 1;
                    }
                    false => polling.adapt(peer),
                }
            }
            assert!(met > 3000, "{met}");
        }
    }

    #[test]
    fn worker_with_zero_spin_time_never_polls() {
        let mut polling = Polling::new(Duration::ZERO);
        polling.adapt(Duration::ZERO);
        assert_eq!(polling.now, Duration::ZERO);
    }
}
