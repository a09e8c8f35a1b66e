//! A token bucket: how much may pass at a time, by the clock.
//!
//! It is kept as one number, the time at which the bucket will be full again (the generic cell rate algorithm, ITU-T
//! I.371, in its form as virtual scheduling). Taking units moves that time forward by as long as they need to flow in
//! again. So nothing is added as time passes, and lanes of a port may run on several workers: each takes units with one
//! compare-and-swap. Nothing is published through it, so all accesses are relaxed.
//!
//! The unit of time is 1/64 ns, which separates frames of 64 bytes at 100 Gb/s to 0.3 % and lasts for nine years of a
//! process. A cost is rounded up, never down: rounding never exceeds a limit.
//!
//! A frame that costs more than the bucket holds passes when the bucket is full, and nothing else passes until its cost
//! has flowed in again. So each frame can pass at some time.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use model::rates::Rate;

/// Ticks of a nanosecond.
const TICKS_A_NS: u64 = 64;
/// Fractional bits of the cost of one bit or packet: so many that a second, the cost at the lowest rate, fits 64 bits.
const FRACTION: u32 = 28;
/// Ticks for one bit or packet at the lowest rate, with [`FRACTION`] fractional bits.
const COST_AT_ONE_A_SECOND: u64 = (TICKS_A_NS * 1_000_000_000) << FRACTION;

/// A time, or how long something takes, in units of 1/64 ns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticks(u64);

impl Ticks {
    /// Time since the first call of this process. No system call where the vDSO has the clock (x86-64, arm64).
    pub(crate) fn now() -> Self {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        Self::of(START.elapsed())
    }

    pub(crate) fn of(duration: Duration) -> Self {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(ns.saturating_mul(TICKS_A_NS))
    }

    /// Rounded up, so that a waiter does not wake too early.
    pub(crate) fn duration(self) -> Duration {
        Duration::from_nanos(self.0.div_ceil(TICKS_A_NS))
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference; zero if `other` is later.
    pub(crate) fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    pub(crate) fn half(self) -> Self {
        Self(self.0 / 2)
    }
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// Ticks for one bit, or packet, with [`FRACTION`] fractional bits.
    cost: u64,
    /// The time in which the empty bucket becomes full.
    depth: Ticks,
    full_at: AtomicU64,
}

impl Bucket {
    /// A full bucket.
    pub(crate) fn new(rate: Rate) -> Self {
        let bucket = Self {
            cost: COST_AT_ONE_A_SECOND.div_ceil(rate.per_second.max(1)),
            depth: Ticks(0),
            full_at: AtomicU64::new(0),
        };
        Self {
            depth: bucket.ticks(rate.burst),
            ..bucket
        }
    }

    /// The time in which the empty bucket becomes full.
    pub(crate) fn depth(&self) -> Ticks {
        self.depth
    }

    /// The time in which this many units flow in.
    #[inline]
    fn ticks(&self, units: u64) -> Ticks {
        let ticks = (u128::from(units) * u128::from(self.cost)).div_ceil(1 << FRACTION);
        // A time that does not fit 64 bits is years.
        Ticks(u64::try_from(ticks).unwrap_or(u64::MAX / 4))
    }

    /// Whether it has this many units.
    pub(crate) fn has(&self, units: u64, now: Ticks) -> bool {
        let lack = Ticks(self.full_at.load(Relaxed)).minus(now);
        lack.plus(self.ticks(units)) <= self.depth
    }

    /// Takes bits, or packets.
    /// Errors: the bucket has fewer; how long to wait.
    #[inline]
    pub(crate) fn take(&self, units: u64, now: Ticks) -> Result<(), Ticks> {
        let cost = self.ticks(units);
        let mut full_at = self.full_at.load(Relaxed);
        loop {
            let lack = Ticks(full_at).minus(now);
            if lack != Ticks(0) && lack.plus(cost) > self.depth {
                // Until it has this many, or is full.
                return Err(lack.min(lack.plus(cost).minus(self.depth)));
            }
            let next = Ticks(full_at.max(now.0)).plus(cost).0;
            match self
                .full_at
                .compare_exchange_weak(full_at, next, Relaxed, Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(other) => full_at = other,
            }
        }
    }

    /// Takes units even from an empty bucket, which later calls of [`Self::take`] wait for.
    pub(crate) fn overdraw(&self, units: u64, now: Ticks) {
        let cost = self.ticks(units);
        let next = |full_at: u64| Some(Ticks(full_at.max(now.0)).plus(cost).0);
        // It never fails: each value has a next one.
        let _ = self.full_at.fetch_update(Relaxed, Relaxed, next);
    }

    /// Returns units that were taken.
    pub(crate) fn give_back(&self, units: u64) {
        let cost = self.ticks(units).0;
        // It never fails: each value has a next one.
        let _ = self
            .full_at
            .fetch_update(Relaxed, Relaxed, |full_at| Some(full_at.saturating_sub(cost)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use model::rates::LONGEST_BURST_SECONDS;

    const HIGHEST: u64 = 1_000_000_000_000;

    const SECOND: Ticks = Ticks(1_000_000_000 * TICKS_A_NS);

    fn bucket(per_second: u64, burst: u64) -> Bucket {
        Bucket::new(Rate { per_second, burst })
    }

    /// Takes frames of these sizes as early as possible, until the time is over; returns the units taken.
    fn drain(bucket: &Bucket, sizes: impl Iterator<Item = u64>, start: Ticks, lasts: Ticks) -> u64 {
        let (mut now, mut taken) = (start, 0);
        for size in sizes {
            while let Err(wait) = bucket.take(size, now) {
                assert_ne!(wait, Ticks(0), "it would be asked again and again");
                now = now.plus(wait);
                if now > start.plus(lasts) {
                    return taken;
                }
            }
            taken += size;
        }
        taken
    }

    #[test]
    fn rate_is_kept_to_a_percent_from_one_packet_a_second_to_a_terabit() {
        for (per_second, size, seconds) in [
            (1, 1, 1000),
            (10, 1, 100),
            (64_000, 12_112, 100),
            (10_000_000, 12_112, 10),
            (1_000_000_000, 512, 1),
        ] {
            let bucket = bucket(per_second, size);
            let lasts = Ticks(SECOND.0 * seconds);
            let taken = drain(&bucket, std::iter::repeat(size), Ticks(7), lasts);
            let exact = per_second * seconds;
            assert!(taken <= exact + size, "{per_second}: {taken} of {exact}");
            assert!(taken * 100 >= exact * 99, "{per_second}: {taken} of {exact}");
        }
        // Rates at which testing a whole second would take long.
        for (per_second, size) in [(14_880_952, 1), (100_000_000_000, 512), (HIGHEST, 512)] {
            let bucket = bucket(per_second, size);
            let lasts = Ticks(SECOND.0 / 1000);
            let taken = drain(&bucket, std::iter::repeat(size), Ticks(7), lasts);
            let exact = per_second / 1000;
            assert!(
                taken <= exact + size && taken * 100 >= exact * 99,
                "{per_second}: {taken}"
            );
        }
    }

    #[test]
    fn frame_larger_than_the_burst_passes_when_it_is_full_and_is_made_up_for() {
        let bucket = bucket(1000, 100);
        assert_eq!(bucket.take(1, SECOND), Ok(()));
        let wait = bucket.take(5000, SECOND).expect_err("it is not full");
        assert!(wait.duration() <= Duration::from_micros(1001), "{wait:?}");
        let full = SECOND.plus(wait);
        assert_eq!(bucket.take(5000, full), Ok(()));
        let wait = bucket.take(1, full).expect_err("much is to be made up for");
        let seconds = wait.duration().as_secs_f64();
        assert!((4.9..4.92).contains(&seconds), "{seconds}");
        // What takes longer than 64 bits count passes for good.
        bucket.overdraw(u64::MAX, full);
        let wait = bucket.take(1, full).expect_err("years");
        assert!(wait.duration() > Duration::from_secs(60_000_000), "{wait:?}");
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let bucket = bucket(1000, 10);
        assert_eq!(bucket.take(10, SECOND), Ok(()));
        assert!(bucket.take(10, SECOND).is_err());
        bucket.give_back(10);
        assert_eq!(bucket.take(10, SECOND), Ok(()));
    }

    proptest! {
        #[test]
        fn never_more_passes_than_the_limit_and_one_burst(
            per_second in 1..=HIGHEST,
            burst_us in 1..=10_000_000_u64,
            sizes in proptest::collection::vec(1..=2_000_000_u64, 1..200),
            pauses in proptest::collection::vec(0..=2_000_000_u64, 200),
            start_ms in 0..=10_000_000_u64,
        ) {
            let burst = u64::try_from(u128::from(per_second) * u128::from(burst_us) / 1_000_000);
            let burst = burst.expect("it fits").max(1);
            let bucket = bucket(per_second, burst);
            let start = Ticks(start_ms * (SECOND.0 / 1000));
            // One frame may be larger than the burst: it passes when the bucket is full.
            let at_once = burst.max(*sizes.iter().max().expect("one"));
            // By the definition: what passed in each window, from the first frame on that passed.
            let mut passed: Vec<(Ticks, u64)> = Vec::new();
            let mut now = start;
            for (size, pause) in sizes.iter().zip(pauses) {
                now = now.plus(Ticks(pause * TICKS_A_NS));
                if bucket.take(*size, now).is_ok() {
                    passed.push((now, *size));
                }
            }
            for first in 0..passed.len() {
                let mut sum = 0_u128;
                for (at, size) in &passed[first..] {
                    sum += u128::from(*size);
                    let elapsed = u128::from(at.minus(passed[first].0).0);
                    let flowed = (u128::from(per_second) * elapsed).div_ceil(SECOND.0.into());
                    let most = flowed + u128::from(at_once);
                    prop_assert!(sum <= most, "{sum} passed, {most} may");
                }
            }
        }

        #[test]
        fn waiting_for_the_returned_time_is_enough(
            per_second in 1..=HIGHEST,
            burst_seconds in 1..=LONGEST_BURST_SECONDS,
            before in 1..=u64::from(u32::MAX),
            size in 1..=u64::from(u32::MAX),
        ) {
            let bucket = bucket(per_second, per_second * burst_seconds);
            prop_assert_eq!(bucket.take(before, SECOND), Ok(()));
            if let Err(wait) = bucket.take(size, SECOND) {
                prop_assert_eq!(bucket.take(size, SECOND.plus(wait)), Ok(()));
            }
        }
    }
}
