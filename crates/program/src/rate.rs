//! Rate limits for work that others cause: token buckets.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A token bucket's rate: `burst` at once, and then one per `each`.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Units at once.
    pub burst: u32,
    /// Pause for one more.
    pub each: Duration,
}

/// Maximum number of keys with a bucket of their own; all others share one.
pub const KEYS_MAX: usize = 1024;

/// The units that are left of a rate.
#[derive(Debug)]
pub struct Bucket {
    /// Units.
    pub left: u32,
    /// When `left` was last refilled.
    since: Instant,
}

impl Bucket {
    /// With the whole burst.
    #[must_use]
    pub fn full(rate: Rate, now: Instant) -> Self {
        Self {
            left: rate.burst,
            since: now,
        }
    }

    /// Adds the units earned since the last call.
    pub fn refill(&mut self, rate: Rate, now: Instant) {
        let earned = now.saturating_duration_since(self.since).as_nanos() / rate.each.as_nanos().max(1);
        let earned = u32::try_from(earned).unwrap_or(rate.burst).min(rate.burst);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(rate.burst);
            self.since = match self.left == rate.burst {
                true => now,
                false => self.since + rate.each * earned,
            };
        }
    }
}

/// A bucket of the same rate for each key.
#[derive(Debug)]
pub struct Buckets<K> {
    rate: Rate,
    /// Buckets of the keys that have used some of their units.
    used: BTreeMap<K, Bucket>,
}

impl<K: Ord + Clone> Buckets<K> {
    /// None is used.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Self {
            rate,
            used: BTreeMap::new(),
        }
    }

    /// How long until this key may take `cost` units; `None`: it may now.
    pub fn wait(&mut self, of: &K, cost: u32, now: Instant) -> Option<Duration> {
        let bucket = self.used.get_mut(of)?;
        bucket.refill(self.rate, now);
        let lacks = cost.saturating_sub(bucket.left);
        let next = bucket.since + self.rate.each * lacks;
        (lacks > 0 && next > now).then(|| next.saturating_duration_since(now))
    }

    /// Returns `of`, or `crowd` (the shared key) if too many keys have their own bucket already.
    pub fn known_or(&mut self, of: K, crowd: K, now: Instant) -> K {
        if self.used.len() >= KEYS_MAX {
            self.forget_full(now);
        }
        match self.used.contains_key(&of) || self.used.len() < KEYS_MAX {
            true => of,
            false => crowd,
        }
    }

    /// Number of keys that have used some of their units.
    #[must_use]
    pub fn count(&self) -> usize {
        self.used.len()
    }

    fn forget_full(&mut self, now: Instant) {
        let rate = self.rate;
        self.used.retain(|_, bucket| {
            bucket.refill(rate, now);
            bucket.left < rate.burst
        });
    }

    /// Takes `cost` units of this key, or those that it has left.
    pub fn take(&mut self, of: &K, cost: u32, now: Instant) {
        let rate = self.rate;
        if !self.used.contains_key(of) {
            self.forget_full(now);
            self.used.insert(of.clone(), Bucket::full(rate, now));
        }
        if let Some(bucket) = self.used.get_mut(of) {
            bucket.refill(rate, now);
            bucket.left = bucket.left.saturating_sub(cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_is_refilled_by_time_up_to_its_burst() {
        let (rate, start) = (
            Rate {
                burst: 512,
                each: Duration::from_millis(1),
            },
            Instant::now(),
        );
        let mut bucket = Bucket::full(rate, start);
        bucket.left = 0;
        bucket.refill(rate, start);
        assert_eq!(bucket.left, 0);
        bucket.refill(rate, start + Duration::from_millis(20));
        assert_eq!(bucket.left, 20);
        bucket.refill(rate, start + Duration::from_secs(3600));
        assert_eq!(bucket.left, 512);
    }
}
