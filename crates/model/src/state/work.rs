//! Statistics of workers and their lanes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Kinds of batches, by how many frames they have: 1, 2 to 3, 4 to 7 and so on, and 64 or more.
pub const BATCH_SIZES: usize = 7;

/// Kinds of system calls that move frames: kick (sendto), wake (recvfrom), host (a tap device), call (the guest's
/// interrupt).
pub const KERNEL_CALLS: [&str; 4] = ["kick", "wake", "host", "call"];

/// Statistics of a worker, since it started or since an earlier reading.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Nanoseconds since it started.
    pub age_ns: u64,
    /// Rounds that moved frames.
    pub busy_rounds: u64,
    /// Rounds that did not.
    pub idle_rounds: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Sleeps in which it waited for frames of busy guests to accumulate.
    #[serde(default)]
    pub pauses: u64,
    /// Nanoseconds in rounds that moved frames, as of its last clock reading.
    pub busy_ns: u64,
    /// Nanoseconds in rounds that did not, and falling asleep.
    pub idle_ns: u64,
    /// Nanoseconds asleep, until now.
    pub asleep_ns: u64,
    /// Frames that it took from guests, NICs and the host.
    pub frames_in: u64,
    /// Frames that it delivered to guests, NICs and the host.
    pub frames_out: u64,
    /// Batches that it took, by size: see [`BATCH_SIZES`].
    pub batches: [u64; BATCH_SIZES],
    /// System calls, by kind: see [`KERNEL_CALLS`].
    pub calls: [CallsReading; KERNEL_CALLS.len()],
    /// Rounds that were timed, of those that moved frames.
    pub timed_rounds: u64,
    /// Duration of these, nanoseconds.
    pub timed_ns: u64,
    /// Its flow cache, if there is one.
    pub cache: Option<CacheReading>,
}

/// System calls of a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallsReading {
    /// How many.
    pub all: u64,
    /// How many of them were timed.
    pub timed: u64,
    /// Duration of these, nanoseconds.
    pub timed_ns: u64,
}

/// Statistics of a flow cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CacheReading {
    /// Frames of flows that it knew.
    pub hits: u64,
    /// Frames of flows that it did not know.
    pub misses: u64,
    /// Flows that were evicted for others.
    pub evictions: u64,
}

/// Statistics of a lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneReading {
    /// Which lane.
    pub lane: LaneName,
    /// Frames that it took.
    pub frames: u64,
    /// Its share of the rounds that were timed and in which it moved frames, nanoseconds.
    pub timed_ns: u64,
}

/// The name of a lane.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct LaneName {
    /// The network that it is part of.
    pub network: Option<String>,
    /// The port that it is part of.
    pub port: Option<String>,
    /// `pair`, `uplink`, `underlay`, `host`, `groups`.
    #[schemars(extend("enum" = ["pair", "uplink", "underlay", "host", "groups"]))]
    pub kind: String,
    /// Queue pair of a port.
    pub pair: Option<u16>,
    /// NIC queue.
    pub queue: Option<u32>,
}

/// Statistics of a worker and its lanes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReading {
    /// Since it started.
    pub total: Reading,
    /// The reading when statistics were reset.
    pub before: Reading,
    /// Its lanes, and what they did since then.
    pub lanes: Vec<LaneReading>,
}

impl WorkerReading {
    /// Since statistics were reset.
    #[must_use]
    pub fn since_reset(&self) -> Reading {
        self.total.since(&self.before)
    }
}

impl Reading {
    /// The difference to an earlier reading.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        // Counters are read without ordering: one may be older than another, so differences saturate at 0.
        let less = u64::saturating_sub;
        let mut batches = self.batches;
        for (now, before) in batches.iter_mut().zip(before.batches) {
            *now = less(*now, before);
        }
        let mut calls = self.calls;
        for (now, before) in calls.iter_mut().zip(before.calls) {
            *now = CallsReading {
                all: less(now.all, before.all),
                timed: less(now.timed, before.timed),
                timed_ns: less(now.timed_ns, before.timed_ns),
            };
        }
        let cache = self.cache.map(|now| {
            let before = before.cache.unwrap_or_default();
            CacheReading {
                hits: less(now.hits, before.hits),
                misses: less(now.misses, before.misses),
                evictions: less(now.evictions, before.evictions),
            }
        });
        Self {
            age_ns: less(self.age_ns, before.age_ns),
            busy_rounds: less(self.busy_rounds, before.busy_rounds),
            idle_rounds: less(self.idle_rounds, before.idle_rounds),
            sleeps: less(self.sleeps, before.sleeps),
            pauses: less(self.pauses, before.pauses),
            busy_ns: less(self.busy_ns, before.busy_ns),
            idle_ns: less(self.idle_ns, before.idle_ns),
            asleep_ns: less(self.asleep_ns, before.asleep_ns),
            frames_in: less(self.frames_in, before.frames_in),
            frames_out: less(self.frames_out, before.frames_out),
            batches,
            calls,
            timed_rounds: less(self.timed_rounds, before.timed_rounds),
            timed_ns: less(self.timed_ns, before.timed_ns),
            cache,
        }
    }
}
