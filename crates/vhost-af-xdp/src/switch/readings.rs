//! What is known of workers and their lanes at a time, and since an earlier one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use device::counters::Counter;
use device::meter::{CALLS, SIZES};
use serde::{Deserialize, Serialize};

use super::lane::LaneId;
use super::role::Role;
use super::statistics::{LaneCounted, WorkerCounters};

/// What a worker did, since it started or since an earlier reading.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reading {
    /// Nanoseconds that it has been there.
    pub(crate) age_ns: u64,
    /// Rounds that moved frames.
    pub(crate) busy_rounds: u64,
    /// Rounds that did not.
    pub(crate) idle_rounds: u64,
    /// Times it went to sleep.
    pub(crate) sleeps: u64,
    /// Those of them in which it let frames of busy guests gather.
    #[serde(default)]
    pub(crate) pauses: u64,
    /// Nanoseconds in rounds that moved frames, as of its last look at the clock.
    pub(crate) busy_ns: u64,
    /// In those that did not, and falling asleep.
    pub(crate) idle_ns: u64,
    /// Asleep, as of now.
    pub(crate) asleep_ns: u64,
    /// Frames that it took of guests, NICs and the host.
    pub(crate) frames_in: u64,
    /// These, and those that other workers gave it.
    pub(crate) passes: u64,
    /// Frames that it gave to guests, NICs, the host and other workers.
    pub(crate) frames_out: u64,
    /// Batches that it took, by size ([`device::meter::size`]).
    pub(crate) batches: [u64; SIZES],
    /// Calls of the kernel, by [`device::meter::KernelCall::ALL`].
    pub(crate) calls: [CallsReading; CALLS],
    /// Rounds that were timed, of those that moved frames.
    pub(crate) timed_rounds: u64,
    /// What these took, nanoseconds.
    pub(crate) timed_ns: u64,
    /// What its flow cache did, if there is one.
    pub(crate) cache: Option<CacheReading>,
}

/// Calls of a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CallsReading {
    /// How many.
    pub(crate) all: u64,
    /// How many of them were timed.
    pub(crate) timed: u64,
    /// What these took, nanoseconds.
    pub(crate) timed_ns: u64,
}

/// What a flow cache did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheReading {
    /// Frames whose flow it knew.
    pub(crate) hits: u64,
    /// Frames whose flow it did not know.
    pub(crate) misses: u64,
    /// Flows that went for others.
    pub(crate) evictions: u64,
}

/// What a lane did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaneReading {
    pub(crate) lane: LaneName,
    /// Frames that it took.
    pub(crate) frames: u64,
    /// What it took of rounds that were timed and in which it moved frames, nanoseconds.
    pub(crate) timed_ns: u64,
}

/// Which lane, in words.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct LaneName {
    pub(crate) network: Option<String>,
    pub(crate) port: Option<String>,
    /// `pair`, `uplink`, `host`, `groups`, `link`.
    pub(crate) kind: String,
    /// Queue pair of a port.
    pub(crate) pair: Option<u16>,
    /// NIC queue.
    pub(crate) queue: Option<u32>,
    /// The other worker, of a link from or to it.
    pub(crate) worker: Option<usize>,
}

/// What is known of a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerReading {
    /// Since it started.
    pub(crate) total: Reading,
    /// What that was when statistics began anew.
    pub(crate) before: Reading,
    /// Its lanes now, and what they did since then.
    pub(crate) lanes: Vec<LaneReading>,
}

impl WorkerReading {
    /// Since statistics began anew.
    pub(crate) fn since_reset(&self) -> Reading {
        self.total.since(&self.before)
    }
}

impl Reading {
    /// Of a worker now.
    pub(super) fn of(counters: &WorkerCounters) -> Self {
        let now = Instant::now();
        let counted = &counters.counted;
        let [hits, misses, evictions] = counted.cached.each_ref().map(Counter::get);
        let passes = counted.passes.get();
        Self {
            age_ns: counters.time.age(now),
            busy_rounds: counters.busy_rounds.get(),
            idle_rounds: counters.idle_rounds.get(),
            sleeps: counters.sleeps.get(),
            pauses: counters.pauses.get(),
            busy_ns: counters.time.busy.get(),
            idle_ns: counters.time.idle.get(),
            asleep_ns: counters.time.asleep(now),
            frames_in: passes.saturating_sub(counted.linked.get()),
            passes,
            frames_out: counted.given.get(),
            batches: counted.batches.each_ref().map(Counter::get),
            calls: counted.calls.each_ref().map(|calls| CallsReading {
                all: calls.all.get(),
                timed: calls.timed.get(),
                timed_ns: calls.timed_ns.get(),
            }),
            timed_rounds: counted.timed_rounds.get(),
            timed_ns: counted.timed_ns.get(),
            cache: (hits | misses | evictions != 0).then_some(CacheReading {
                hits,
                misses,
                evictions,
            }),
        }
    }

    /// What was done since an earlier reading.
    pub(crate) fn since(&self, before: &Self) -> Self {
        // A reader needs no order between counters: one may be older than another.
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
            passes: less(self.passes, before.passes),
            frames_out: less(self.frames_out, before.frames_out),
            batches,
            calls,
            timed_rounds: less(self.timed_rounds, before.timed_rounds),
            timed_ns: less(self.timed_ns, before.timed_ns),
            cache,
        }
    }
}

/// The lanes of all workers, as far as statistics go.
#[derive(Default)]
pub(super) struct LaneList(HashMap<LaneId, Listed>);

struct Listed {
    worker: usize,
    lane: LaneName,
    counted: Arc<LaneCounted>,
    /// Frames and nanoseconds when statistics began anew.
    before: [u64; 2],
}

impl Listed {
    fn now(&self) -> [u64; 2] {
        [self.counted.frames.get(), self.counted.timed_ns.get()]
    }
}

impl LaneList {
    /// A worker gets a lane of an owner; where what it does is counted.
    pub(super) fn add(&mut self, id: LaneId, worker: usize, owner: &str, role: &Role) -> Arc<LaneCounted> {
        let counted: Arc<LaneCounted> = Arc::default();
        let listed = Listed {
            worker,
            lane: LaneName::of(owner, role),
            counted: Arc::clone(&counted),
            before: [0; 2],
        };
        self.0.insert(id, listed);
        counted
    }

    pub(super) fn remove(&mut self, id: LaneId) {
        self.0.remove(&id);
    }

    /// Those of a worker, by name.
    pub(super) fn of(&self, worker: usize) -> Vec<LaneReading> {
        let its = self.0.values().filter(|listed| listed.worker == worker);
        let reading = |listed: &Listed| {
            let ([frames, timed_ns], before) = (listed.now(), listed.before);
            LaneReading {
                lane: listed.lane.clone(),
                frames: frames.saturating_sub(before[0]),
                timed_ns: timed_ns.saturating_sub(before[1]),
            }
        };
        let mut lanes: Vec<_> = its.map(reading).collect();
        lanes.sort_by(|one, other| one.lane.cmp(&other.lane));
        lanes
    }

    /// Statistics are reset.
    pub(super) fn reset(&mut self) {
        for listed in self.0.values_mut() {
            listed.before = listed.now();
        }
    }
}

impl LaneName {
    fn of(owner: &str, role: &Role) -> Self {
        let network = role.network().map(ToString::to_string);
        let port = Some(owner.to_owned());
        let of_network = |kind: &str| Self {
            network: network.clone(),
            kind: kind.to_owned(),
            ..Self::default()
        };
        match role {
            Role::Pair { pair, .. } | Role::CableEnd { pair, .. } | Role::Member { pair, .. } => Self {
                port,
                pair: Some(*pair),
                ..of_network("pair")
            },
            Role::Uplink { queue, .. } => Self {
                queue: Some(*queue),
                ..of_network("uplink")
            },
            Role::UplinkTap { .. } => of_network("uplink"),
            Role::Host { .. } => of_network("host"),
            Role::Groups { .. } => of_network("groups"),
            Role::LinkTo { worker, .. } | Role::LinkFrom { worker, .. } => Self {
                worker: Some(*worker),
                ..of_network("link")
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_told_since_earlier_ones() {
        let counters = WorkerCounters::default();
        let before = Reading::of(&counters);
        counters.counted.passes.add(10);
        counters.counted.linked.add(4);
        counters.counted.batches[2].add(3);
        counters.counted.calls[1].all.add(2);
        counters.counted.cached[1].add(5);
        counters.busy_rounds.add(7);
        let first = Reading::of(&counters).since(&before);
        assert_eq!((first.passes, first.frames_in, first.busy_rounds), (10, 6, 7));
        assert_eq!((first.batches[2], first.calls[1].all), (3, 2));
        assert_eq!(first.cache.map(|cache| cache.misses), Some(5));
        counters.counted.passes.add(1);
        let second = Reading::of(&counters).since(&first);
        assert_eq!((second.passes, second.batches[2]), (1, 0));
        assert_eq!(before.since(&first).passes, 0, "never less than nothing");
    }

    #[test]
    fn lanes_are_listed_with_their_worker_and_begin_anew() {
        let mut list = LaneList::default();
        let pair = |pair| Role::Member {
            network: "lan".into(),
            port: crate::switch::table::PortNumber(0),
            pair,
        };
        let other = list.add(LaneId(2), 1, "vm1", &pair(0));
        let counted = list.add(LaneId(1), 0, "vm1", &pair(1));
        list.add(
            LaneId(3),
            0,
            "lan",
            &Role::Uplink {
                network: "lan".into(),
                queue: 3,
            },
        );
        counted.frames.add(5);
        other.frames.add(9);
        let names = |lanes: &[LaneReading]| -> Vec<_> {
            let name = |of: &LaneReading| (of.lane.kind.clone(), of.lane.pair, of.lane.queue, of.frames);
            lanes.iter().map(name).collect()
        };
        let wanted = [
            ("uplink".to_owned(), None, Some(3), 0),
            ("pair".to_owned(), Some(1), None, 5),
        ];
        assert_eq!(names(&list.of(0)), wanted);
        list.reset();
        counted.frames.add(1);
        assert_eq!(list.of(0)[1].frames, 1);
        list.remove(LaneId(1));
        assert_eq!((list.of(0).len(), list.of(1).len()), (1, 1));
    }
}
