//! Reads the statistics of workers and their lanes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use device::counters::Counter;
use model::state::{CacheReading, CallsReading, LaneName, LaneReading, Reading};

use crate::lane::LaneId;
use crate::lane::role::Role;
use crate::worker::statistics::{LaneCounted, WorkerCounters};

/// The present statistics of a worker.
pub(crate) fn read(counters: &WorkerCounters) -> Reading {
    let now = Instant::now();
    let counted = &counters.counted;
    let [hits, misses, evictions] = counted.cached.each_ref().map(Counter::get);
    Reading {
        age_ns: counters.time.age(now),
        busy_rounds: counters.busy_rounds.get(),
        idle_rounds: counters.idle_rounds.get(),
        sleeps: counters.sleeps.get(),
        pauses: counters.pauses.get(),
        busy_ns: counters.time.busy.get(),
        idle_ns: counters.time.idle.get(),
        asleep_ns: counters.time.asleep(now),
        frames_in: counted.taken.get(),
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

/// Statistics of the lanes of all workers.
#[derive(Default)]
pub(crate) struct LaneList(HashMap<LaneId, Listed>);

struct Listed {
    worker: usize,
    lane: LaneName,
    counted: Arc<LaneCounted>,
    /// Frames and nanoseconds at the last reset of statistics.
    before: [u64; 2],
}

impl Listed {
    fn now(&self) -> [u64; 2] {
        [self.counted.frames.get(), self.counted.timed_ns.get()]
    }
}

impl LaneList {
    /// Adds a lane of an owner; returns its counters.
    pub(crate) fn add(&mut self, id: LaneId, worker: usize, owner: &str, role: &Role) -> Arc<LaneCounted> {
        let counted: Arc<LaneCounted> = Arc::default();
        let listed = Listed {
            worker,
            lane: name_of(owner, role),
            counted: Arc::clone(&counted),
            before: [0; 2],
        };
        self.0.insert(id, listed);
        counted
    }

    pub(crate) fn remove(&mut self, id: LaneId) {
        self.0.remove(&id);
    }

    /// The lanes of a worker, sorted by name.
    pub(crate) fn of(&self, worker: usize) -> Vec<LaneReading> {
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

    /// Resets the statistics.
    pub(crate) fn reset(&mut self) {
        for listed in self.0.values_mut() {
            listed.before = listed.now();
        }
    }
}

/// The name of a lane.
fn name_of(owner: &str, role: &Role) -> LaneName {
    let network = role.network().map(ToString::to_string);
    let port = Some(owner.to_owned());
    let of_network = |kind: &str| LaneName {
        network: network.clone(),
        kind: kind.to_owned(),
        ..LaneName::default()
    };
    match role {
        Role::Pair { pair, .. } | Role::PatchPort { pair, .. } | Role::Member { pair, .. } => LaneName {
            port,
            pair: Some(*pair),
            ..of_network("pair")
        },
        Role::Uplink { queue, .. } => LaneName {
            queue: Some(*queue),
            ..of_network("uplink")
        },
        Role::Underlay { queue, .. } => LaneName {
            queue: Some(*queue),
            ..of_network("underlay")
        },
        Role::UplinkTap { .. } => of_network("uplink"),
        Role::Host { .. } => of_network("host"),
        Role::Multicast { .. } => of_network("groups"),
    }
}

#[cfg(test)]
mod tests {
    use device::meter::{self, KernelCall};
    use model::state::{BATCH_SIZES, KERNEL_CALLS};

    use super::*;

    #[test]
    fn kinds_of_batches_and_system_calls_are_those_of_the_documents() {
        assert_eq!(KernelCall::ALL.map(KernelCall::name), KERNEL_CALLS);
        assert_eq!(meter::size(u64::MAX), BATCH_SIZES - 1);
    }

    #[test]
    fn readings_are_differences_to_earlier_ones() {
        let counters = WorkerCounters::default();
        let before = read(&counters);
        counters.counted.taken.add(10);
        counters.counted.batches[2].add(3);
        counters.counted.calls[1].all.add(2);
        counters.counted.cached[1].add(5);
        counters.busy_rounds.add(7);
        let first = read(&counters).since(&before);
        assert_eq!((first.frames_in, first.busy_rounds), (10, 7));
        assert_eq!((first.batches[2], first.calls[1].all), (3, 2));
        assert_eq!(first.cache.map(|cache| cache.misses), Some(5));
        counters.counted.taken.add(1);
        let second = read(&counters).since(&first);
        assert_eq!((second.frames_in, second.batches[2]), (1, 0));
        assert_eq!(before.since(&first).frames_in, 0, "never less than nothing");
    }

    #[test]
    fn lanes_are_listed_with_their_worker_and_can_be_reset() {
        let mut list = LaneList::default();
        let pair = |pair| Role::Member {
            network: "lan".into(),
            port: crate::fdb::PortNumber(0),
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
