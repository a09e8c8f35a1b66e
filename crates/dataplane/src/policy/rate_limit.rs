//! Rate limits of a port: how much its guest may send, and get, per second.
//!
//! Frames count as on a wire: a GSO packet counts as the frames that it is segmented into, even if it is passed whole
//! to another guest. Bytes are those of Ethernet frames as the guest has them, without the FCS.
//!
//! Most frames are not checked one by one: if the limit has room for the most that a run of frames can cost, the run
//! passes, and its cost is taken afterwards ([`RateLimit::has`], [`RateLimit::charge`]). Pairs on several workers that
//! do so at the same time may together exceed the port's burst by a run each; later frames make up for it.
//!
//! A guest that sends more waits ([`Throttle`]): frames stay in its queue, it is not asked for kicks, and its lane
//! sleeps until the next frame may be sent. Frames to a guest beyond its limit are dropped and counted ([`Policer`]). A
//! port's pairs share its limits.

use std::sync::Arc;
use std::time::Duration;

use device::counters::PairCounters;

use crate::policy::bucket::{Bucket, Ticks};
use model::rates::{PortRates, Rates};

/// A throttled lane is not woken for each frame: it waits at least this long, if the burst size allows it.
const LEAST_WAIT: Duration = Duration::from_millis(1);

/// The cost of a frame, as on a wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) frames: u32,
    pub(crate) bytes: u64,
}

impl Cost {
    /// One frame of `bytes`.
    #[inline]
    pub(crate) fn frame(bytes: u32) -> Self {
        Self {
            frames: 1,
            bytes: bytes.into(),
        }
    }

    /// Further bytes of a frame.
    #[inline]
    pub(crate) fn bytes(bytes: u32) -> Self {
        Self {
            frames: 0,
            bytes: bytes.into(),
        }
    }

    /// The most that `frames` frames of at most `longest` bytes cost.
    #[inline]
    pub(crate) fn most(frames: usize, longest: u32) -> Self {
        Self::of(frames as u64, frames as u64 * u64::from(longest))
    }

    /// Frames of a batch, and their bytes.
    #[inline]
    pub(crate) fn of(frames: u64, bytes: u64) -> Self {
        // A batch has few.
        #[allow(clippy::cast_possible_truncation)]
        let frames = frames as u32;
        Self { frames, bytes }
    }
}

/// The limit of one direction.
#[derive(Debug)]
pub(crate) struct RateLimit {
    bits: Option<Bucket>,
    packets: Option<Bucket>,
}

impl RateLimit {
    /// `None`: there is no limit.
    pub(crate) fn new(rates: Rates) -> Option<Arc<Self>> {
        let limit = Self {
            bits: rates.bits.map(Bucket::new),
            packets: rates.packets.map(Bucket::new),
        };
        (limit.bits.is_some() || limit.packets.is_some()).then(|| Arc::new(limit))
    }

    /// Takes the cost of a frame.
    /// Errors: the frame may not pass yet; how long to wait.
    #[inline]
    pub(crate) fn take(&self, cost: Cost, now: Ticks) -> Result<(), Ticks> {
        if let Some(bits) = &self.bits {
            bits.take(cost.bytes * 8, now)?;
        }
        let Some(packets) = &self.packets else {
            return Ok(());
        };
        packets.take(cost.frames.into(), now).inspect_err(|_| {
            if let Some(bits) = &self.bits {
                bits.give_back(cost.bytes * 8);
            }
        })
    }

    /// Whether a run of frames that costs at most this may pass; the caller then takes what it costs. `now`: the time of
    /// the burst, once it was read.
    #[cold]
    #[inline(never)]
    fn has(&self, most: Cost, now: &mut Option<Ticks>) -> bool {
        let now = *now.get_or_insert_with(Ticks::now);
        let of_bits = self.bits.as_ref().map(|bits| bits.has(most.bytes * 8, now));
        let of_packets = self
            .packets
            .as_ref()
            .map(|packets| packets.has(most.frames.into(), now));
        of_bits != Some(false) && of_packets != Some(false)
    }

    /// Takes the cost of frames, or of further bytes, that passed, even if the limit is exceeded.
    #[cold]
    #[inline(never)]
    pub(crate) fn charge(&self, cost: Cost, now: &mut Option<Ticks>) {
        let now = *now.get_or_insert_with(Ticks::now);
        if let Some(bits) = &self.bits {
            bits.overdraw(cost.bytes * 8, now);
        }
        if let Some(packets) = &self.packets {
            packets.overdraw(cost.frames.into(), now);
        }
    }

    /// Returns the cost of a frame that did not pass after all.
    #[cold]
    pub(crate) fn give_back(&self, cost: Cost) {
        if let Some(bits) = &self.bits {
            bits.give_back(cost.bytes * 8);
        }
        if let Some(packets) = &self.packets {
            packets.give_back(cost.frames.into());
        }
    }

    /// The least time that a throttled lane sleeps: short enough that no bucket becomes full meanwhile.
    fn least_wait(&self) -> Ticks {
        let buckets = self.bits.iter().chain(&self.packets);
        let halves = buckets.map(|bucket| bucket.depth().half());
        halves.fold(Ticks::of(LEAST_WAIT), Ticks::min)
    }
}

/// The limits of both directions, which the lanes of a port's pairs share.
#[derive(Debug, Clone)]
pub struct PortLimits {
    /// The configured rates.
    pub rates: PortRates,
    pub(crate) from_guest: Option<Arc<RateLimit>>,
    pub(crate) to_guest: Option<Arc<RateLimit>>,
}

impl PortLimits {
    /// Limits to these rates.
    pub fn new(rates: PortRates) -> Self {
        Self {
            rates,
            from_guest: RateLimit::new(rates.from_guest),
            to_guest: RateLimit::new(rates.to_guest),
        }
    }
}

/// Delays a guest that sends more than its limit.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    limit: Option<Arc<RateLimit>>,
    /// The time of this batch, once it was read.
    now: Option<Ticks>,
    /// Nothing is sent before this time.
    until: Option<Ticks>,
    /// Cost of the last frame that passed.
    last: Cost,
}

impl Throttle {
    /// Sets another limit; a throttled guest tries again.
    pub(crate) fn set(&mut self, limit: Option<&Arc<RateLimit>>) {
        *self = Self {
            limit: limit.cloned(),
            ..Self::default()
        };
    }

    /// Begins a poll; returns whether the guest is throttled in it.
    #[inline]
    pub(crate) fn is_held(&mut self) -> bool {
        self.limit.is_some() && self.is_held_still()
    }

    #[cold]
    #[inline(never)]
    fn is_held_still(&mut self) -> bool {
        self.now = None;
        if let Some(until) = self.until {
            let now = Ticks::now();
            if now < until {
                return true;
            }
            (self.now, self.until) = (Some(now), None);
        }
        false
    }

    /// Whether a run of frames that costs at most this may pass; the caller then charges what it costs.
    #[inline]
    pub(crate) fn has(&mut self, most: impl FnOnce() -> Cost) -> bool {
        let limit = self.limit.as_deref();
        limit.is_none_or(|limit| limit.has(most(), &mut self.now))
    }

    /// Takes the cost of a run of frames that passed.
    #[inline]
    pub(crate) fn charge(&mut self, cost: Cost) {
        if let Some(limit) = &self.limit {
            limit.charge(cost, &mut self.now);
        }
    }

    /// Whether a frame has to wait, and all frames behind it. If not, takes its cost. `cost`: `None`: there is no
    /// frame.
    #[inline]
    pub(crate) fn holds(&mut self, cost: impl FnOnce() -> Option<Cost>, counters: &PairCounters) -> bool {
        self.limit.is_some() && cost().is_some_and(|cost| !self.allows(cost, counters))
    }

    #[cold]
    #[inline(never)]
    fn allows(&mut self, cost: Cost, counters: &PairCounters) -> bool {
        let Some(limit) = &self.limit else { return true };
        let now = *self.now.get_or_insert_with(Ticks::now);
        match limit.take(cost, now) {
            Ok(()) => {
                self.last = cost;
                true
            }
            Err(wait) => {
                self.until = Some(now.plus(wait.max(limit.least_wait())));
                counters.from_guest_limit_waits.add(1);
                false
            }
        }
    }

    /// Cost of the last frame that passed, for [`Self::give_back`].
    #[inline]
    pub(crate) fn last(&self) -> Cost {
        self.last
    }

    /// Returns the costs of frames that were not sent after all, in one sum: that of a run was taken so, and each cost is
    /// rounded up. They are retried, and frames behind them do not wait for them.
    #[inline]
    pub(crate) fn give_back(&mut self, costs: &[Cost]) {
        let Some(limit) = &self.limit else { return };
        let sum = costs.iter().fold(Cost::default(), |sum, cost| Cost {
            frames: sum.frames + cost.frames,
            bytes: sum.bytes + cost.bytes,
        });
        if sum.frames > 0 {
            limit.give_back(sum);
            self.until = None;
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.limit.is_some()
    }

    /// How long the guest stays throttled, if it is. Kicks change nothing meanwhile.
    pub(crate) fn held(&self) -> Option<Duration> {
        self.until.map(|until| until.minus(Ticks::now()).duration())
    }
}

/// Drops frames to a guest that exceed its limit; for one burst.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Policer<'a> {
    pub(crate) limit: Option<&'a Arc<RateLimit>>,
    /// The time of the burst, once it was read.
    now: Option<Ticks>,
    /// Cost of the last frame: the guest that sent it may change what that is read from.
    last: Cost,
}

impl<'a> Policer<'a> {
    #[inline]
    pub(crate) fn new(limit: Option<&'a Arc<RateLimit>>) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Whether a frame may be delivered; counts one that may not.
    #[inline]
    pub(crate) fn allows(&mut self, cost: impl FnOnce() -> Cost, counters: &PairCounters) -> bool {
        self.limit.is_none() || self.takes(cost(), counters)
    }

    #[cold]
    #[inline(never)]
    fn takes(&mut self, cost: Cost, counters: &PairCounters) -> bool {
        let Some(limit) = self.limit else { return true };
        let now = *self.now.get_or_insert_with(Ticks::now);
        self.last = cost;
        let may = limit.take(cost, now).is_ok();
        if !may {
            counters.to_guest_limit.add(cost.frames.into());
        }
        may
    }

    /// Whether a run of frames that costs at most this may pass; the caller then charges what it costs.
    #[inline]
    pub(crate) fn has(&mut self, most: impl FnOnce() -> Cost) -> bool {
        self.limit.is_none_or(|limit| limit.has(most(), &mut self.now))
    }

    /// Takes the cost of frames, or of further bytes, that passed.
    #[inline]
    pub(crate) fn charge(&mut self, cost: Cost) {
        if let Some(limit) = self.limit {
            limit.charge(cost, &mut self.now);
        }
    }

    /// Returns the cost of the last frame, which passed, but is retried.
    #[inline]
    pub(crate) fn give_back(&self) {
        if let Some(limit) = self.limit {
            limit.give_back(self.last);
        }
    }
}

#[cfg(test)]
#[path = "rate_limit_tests.rs"]
mod tests;
