//! Figures of workers: shares of time, cycles for a frame, frames in a batch. For `workers`, its JSON and the API.
//!
//! Rounds, frames, batches and system calls are counted exactly; busy, idle and asleep are measured by the clock. Shares
//! of lanes are estimated from rounds that were timed lane by lane, and durations of system calls from those that were
//! timed. Cycles are nanoseconds multiplied by the rate of the CPU's time stamp counter.

use schemars::JsonSchema;
use serde::Serialize;

use super::Status;
use super::work::{
    BATCH_SIZES, CacheReading, CallsReading, KERNEL_CALLS, LaneName, LaneReading, Reading, WorkerReading,
};

/// The workers of a daemon.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct WorkersDocument {
    /// Process ID of the daemon.
    pub pid: u32,
    /// CPU cycles (of the time stamp counter) in a microsecond; none if unknown.
    pub cycles_per_us: Option<f64>,
    /// The workers, by number.
    pub workers: Vec<WorkerDocument>,
}

/// Figures of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct WorkerDocument {
    /// Its number.
    pub worker: usize,
    /// NUMA node that it runs on, where there are several.
    pub node: Option<u16>,
    /// Set while it hangs: for how long, and in which port.
    pub hangs: Option<String>,
    /// Nanoseconds that all of this covers: since it started, or since statistics were reset.
    pub interval_ns: u64,
    /// Its rounds.
    pub iterations: Iterations,
    /// Its time.
    pub time: Times,
    /// Frames that it moved.
    pub frames: Frames,
    /// Batches of these frames.
    pub batches: Batches,
    /// Its flow cache, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "CacheReading")]
    pub cache: Option<CacheReading>,
    /// System calls, by kind.
    pub kernel: Vec<Kernel>,
    /// Its lanes, by network and port.
    pub lanes: Vec<LaneShare>,
    /// Percent of time in rounds that moved frames, without the time of its lanes; null before a round was timed.
    pub overhead_percent: Option<f64>,
}

/// Rounds of a worker over its lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Iterations {
    /// Rounds that moved frames.
    pub busy: u64,
    /// Rounds that moved none.
    pub idle: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Sleeps in which it waited for frames of busy guests to accumulate.
    pub pauses: u64,
    /// Busy rounds that were timed, lane by lane.
    pub timed: u64,
}

/// Where the time of a worker went.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub struct Times {
    /// In rounds that moved frames.
    pub busy: Share,
    /// In other rounds.
    pub idle: Share,
    /// Asleep.
    pub asleep: Share,
}

/// A part of a worker's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, JsonSchema)]
pub struct Share {
    /// Nanoseconds.
    pub ns: u64,
    /// Cycles; none if their rate is unknown, and asleep.
    pub cycles: Option<u64>,
    /// Percent of all its time.
    pub percent: f64,
}

/// Frames of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub struct Frames {
    /// Frames that it took from guests, NICs and the host.
    #[serde(rename = "in")]
    pub taken: u64,
    /// Frames that it delivered to guests, NICs and the host.
    pub out: u64,
    /// Busy time for a pass; none without frames.
    pub ns_each: Option<f64>,
    /// Cycles for a pass; none without frames, or if their rate is unknown.
    pub cycles_each: Option<f64>,
}

/// Batches of frames.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Batches {
    /// How many.
    pub count: u64,
    /// Frames in a batch on average; none without batches.
    pub frames_each: Option<f64>,
    /// Batches of each size.
    pub sizes: Vec<Size>,
}

/// Batches of so many frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Size {
    /// Least number of frames.
    pub from: u64,
    /// Largest number; none: no limit.
    pub to: Option<u64>,
    /// How many batches.
    pub count: u64,
}

/// System calls of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub struct Kernel {
    /// `kick`: sendto, `wake`: recvfrom, `host`: a tap device, `call`: the guest's interrupt.
    #[schemars(extend("enum" = KERNEL_CALLS))]
    pub call: &'static str,
    /// How many.
    pub count: u64,
    /// Their duration, estimated from the calls that were timed.
    #[serde(flatten)]
    pub time: Share,
}

/// Share that a lane has of its worker.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct LaneShare {
    #[serde(flatten)]
    /// Which lane.
    pub lane: LaneName,
    /// Frames that it took.
    pub frames: u64,
    /// Percent of the frames that all lanes of the worker took.
    pub frames_percent: f64,
    /// Part of the worker's busy time; none before a round was timed.
    pub time: Option<Share>,
}

impl WorkersDocument {
    /// The figures of a daemon since it started or its statistics were reset.
    #[must_use]
    pub fn of(status: &Status) -> Self {
        let readings = status.work.iter();
        Self::with(
            status,
            readings.map(|reading| (reading.since_reset(), &*reading.lanes)),
        )
    }

    /// The figures of a daemon since an earlier status.
    #[must_use]
    pub fn between(earlier: &Status, status: &Status) -> Self {
        let mut lanes = Vec::new();
        for (at, reading) in status.work.iter().enumerate() {
            let before = earlier.work.get(at);
            let before = before.map_or(&[][..], |before| &before.lanes);
            lanes.push(lanes_since(&reading.lanes, before));
        }
        let nothing = WorkerReading::default();
        let since = status.work.iter().enumerate().map(|(at, reading)| {
            let before = earlier.work.get(at).unwrap_or(&nothing);
            reading.total.since(&before.total)
        });
        Self::with(status, since.zip(lanes.iter().map(Vec::as_slice)))
    }

    fn with<'a>(status: &Status, readings: impl Iterator<Item = (Reading, &'a [LaneReading])>) -> Self {
        let rate = status.cycles_per_us;
        let worker = |(worker, (reading, lanes)): (usize, (Reading, &[LaneReading]))| {
            let known = status.workers.get(worker);
            WorkerDocument {
                worker,
                node: known.and_then(|known| known.node),
                hangs: known.and_then(|known| known.hangs.clone()),
                ..WorkerDocument::of(&reading, lanes, rate)
            }
        };
        Self {
            pid: status.pid,
            cycles_per_us: rate,
            workers: readings.enumerate().map(worker).collect(),
        }
    }
}

/// Differences to earlier readings, in which a lane may be missing.
fn lanes_since(now: &[LaneReading], before: &[LaneReading]) -> Vec<LaneReading> {
    let since = |now: &LaneReading| {
        let same = before.iter().find(|before| before.lane == now.lane);
        // The lane was reset or recreated since: all of it is new.
        let same = same.filter(|before| before.frames <= now.frames && before.timed_ns <= now.timed_ns);
        let (frames, timed_ns) = same.map_or((0, 0), |before| (before.frames, before.timed_ns));
        LaneReading {
            lane: now.lane.clone(),
            frames: now.frames - frames,
            timed_ns: now.timed_ns - timed_ns,
        }
    };
    now.iter().map(since).collect()
}

impl WorkerDocument {
    /// The figures of one worker, without its number, node and `hangs`.
    #[must_use]
    pub fn of(reading: &Reading, lanes: &[LaneReading], rate: Option<f64>) -> Self {
        let whole = reading.busy_ns + reading.idle_ns + reading.asleep_ns;
        let share = |ns: u64| Share {
            ns,
            cycles: rate.map(|rate| (ns as f64 / 1e3 * rate) as u64),
            percent: percent(ns, whole),
        };
        let asleep = Share {
            cycles: None,
            ..share(reading.asleep_ns)
        };
        let ns_each = ratio(reading.busy_ns, reading.frames_in);
        let taken: u64 = lanes.iter().map(|lane| lane.frames).sum();
        let kernel = KERNEL_CALLS.iter().zip(&reading.calls);
        let lane_share = |lane: &LaneReading| LaneShare {
            lane: lane.lane.clone(),
            frames: lane.frames,
            frames_percent: percent(lane.frames, taken),
            time: part(reading.busy_ns, lane.timed_ns, reading.timed_ns).map(share),
        };
        let lanes: Vec<LaneShare> = lanes.iter().map(lane_share).collect();
        let busy = share(reading.busy_ns);
        let timed: Vec<f64> = (lanes.iter().filter_map(|lane| lane.time))
            .map(|time| time.percent)
            .collect();
        let overhead = (!timed.is_empty()).then(|| (busy.percent - timed.iter().sum::<f64>()).max(0.0));
        Self {
            worker: 0,
            node: None,
            hangs: None,
            interval_ns: reading.age_ns,
            iterations: Iterations {
                busy: reading.busy_rounds,
                idle: reading.idle_rounds,
                sleeps: reading.sleeps,
                pauses: reading.pauses,
                timed: reading.timed_rounds,
            },
            time: Times {
                busy,
                idle: share(reading.idle_ns),
                asleep,
            },
            frames: Frames {
                taken: reading.frames_in,
                out: reading.frames_out,
                ns_each,
                cycles_each: ns_each.zip(rate).map(|(ns, rate)| ns / 1e3 * rate),
            },
            batches: batches(reading),
            cache: reading.cache,
            kernel: kernel
                .map(|(call, calls)| Kernel {
                    call,
                    count: calls.all,
                    time: share(taken_by(calls)),
                })
                .collect(),
            lanes,
            overhead_percent: overhead,
        }
    }
}

fn batches(reading: &Reading) -> Batches {
    let count = reading.batches.iter().sum();
    let sizes = reading.batches.iter().enumerate().map(|(at, &count)| Size {
        from: 1 << at,
        to: (at + 1 < BATCH_SIZES).then_some((2 << at) - 1),
        count,
    });
    Batches {
        count,
        frames_each: ratio(reading.frames_in, count),
        sizes: sizes.collect(),
    }
}

/// Duration of all calls of a kind, estimated from those that were timed.
fn taken_by(calls: &CallsReading) -> u64 {
    part(calls.timed_ns, calls.all, calls.timed).unwrap_or(0)
}

/// `whole * of / parts`; `None` if `parts` is 0.
fn part(whole: u64, of: u64, parts: u64) -> Option<u64> {
    let product = u128::from(whole) * u128::from(of);
    let part = product.checked_div(u128::from(parts))?;
    Some(u64::try_from(part).unwrap_or(u64::MAX))
}

fn ratio(of: u64, by: u64) -> Option<f64> {
    (by > 0).then(|| of as f64 / by as f64)
}

fn percent(of: u64, whole: u64) -> f64 {
    ratio(of, whole).map_or(0.0, |ratio| ratio * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that was busy for a quarter of 10 s, in which it moved a million frames.
    fn reading() -> Reading {
        Reading {
            age_ns: 10_000_000_000,
            busy_rounds: 40_000,
            idle_rounds: 60_000,
            sleeps: 200,
            pauses: 50,
            busy_ns: 2_500_000_000,
            idle_ns: 500_000_000,
            asleep_ns: 7_000_000_000,
            frames_in: 1_000_000,
            frames_out: 990_000,
            batches: [10_000, 0, 0, 0, 0, 0, 15_000],
            calls: [
                CallsReading {
                    all: 31_000,
                    timed: 1000,
                    timed_ns: 20_000_000,
                },
                CallsReading::default(),
                CallsReading::default(),
                CallsReading {
                    all: 10,
                    timed: 10,
                    timed_ns: 15_000,
                },
            ],
            timed_rounds: 200,
            timed_ns: 10_000_000,
            cache: None,
        }
    }

    fn lane(port: &str, frames: u64, timed_ns: u64) -> LaneReading {
        let lane = LaneName {
            network: Some("lan".to_owned()),
            port: Some(port.to_owned()),
            kind: "pair".to_owned(),
            pair: Some(0),
            ..LaneName::default()
        };
        LaneReading {
            lane,
            frames,
            timed_ns,
        }
    }

    fn is(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() < 1e-6
    }

    #[test]
    fn shares_are_of_all_time_and_of_all_frames() {
        let lanes = [lane("a", 750_000, 6_000_000), lane("b", 250_000, 2_000_000)];
        let worker = WorkerDocument::of(&reading(), &lanes, Some(2000.0));
        let Times { busy, idle, asleep } = worker.time;
        let percents = [busy.percent, idle.percent, asleep.percent];
        assert!(is(percents.iter().sum(), 100.0), "{percents:?}");
        assert!(is(busy.percent, 25.0) && is(asleep.percent, 70.0));
        assert_eq!((busy.cycles, asleep.cycles), (Some(5_000_000_000), None));
        assert_eq!(worker.frames.ns_each, Some(2500.0));
        assert_eq!(worker.frames.cycles_each, Some(5000.0));
        assert_eq!(
            (worker.batches.count, worker.batches.frames_each),
            (25_000, Some(40.0))
        );
        // 20 µs each.
        assert_eq!(
            (worker.kernel[0].time.ns, worker.kernel[3].time.ns),
            (620_000_000, 15_000)
        );
        assert!(is(worker.kernel[0].time.percent, 6.2));
        let times: Vec<_> = worker.lanes.iter().filter_map(|lane| lane.time).collect();
        assert!(
            is(times[0].percent, 15.0) && is(times[1].percent, 5.0),
            "{times:?}"
        );
        assert!(is(worker.overhead_percent.expect("timed"), 5.0));
        let frames: f64 = worker.lanes.iter().map(|lane| lane.frames_percent).sum();
        assert!(is(frames, 100.0));
    }

    #[test]
    fn sizes_of_batches_are_side_by_side_and_add_up() {
        let Batches { count, sizes, .. } = batches(&reading());
        assert_eq!(sizes.iter().map(|size| size.count).sum::<u64>(), count);
        assert_eq!((sizes[0].from, sizes[0].to), (1, Some(1)));
        for pair in sizes.windows(2) {
            assert_eq!(pair[0].to, Some(pair[1].from - 1));
        }
        assert_eq!(sizes.last().map(|size| (size.from, size.to)), Some((64, None)));
    }

    #[test]
    fn worker_without_frames_has_no_averages() {
        let worker = WorkerDocument::of(&Reading::default(), &[lane("a", 0, 0)], None);
        assert_eq!((worker.frames.ns_each, worker.batches.frames_each), (None, None));
        assert_eq!((worker.lanes[0].time, worker.overhead_percent), (None, None));
        let json = serde_json::to_value(&worker).expect("JSON");
        assert!(json.get("cache").is_none() && json["frames"]["in"] == 0, "{json}");
        assert_eq!(json["lanes"][0]["port"], "a");
        assert_eq!(json["time"]["busy"]["percent"], 0.0);
        let cached = Reading {
            cache: Some(CacheReading::default()),
            ..reading()
        };
        let json = serde_json::to_value(WorkerDocument::of(&cached, &[], None)).expect("JSON");
        assert_eq!(json["cache"]["evictions"], 0);
    }

    #[test]
    fn lane_that_was_reset_counts_as_new() {
        let before = [lane("a", 10, 10), lane("b", 100, 10)];
        let now = [lane("a", 15, 10), lane("b", 3, 0), lane("c", 7, 1)];
        let since = lanes_since(&now, &before);
        let told: Vec<_> = since.iter().map(|lane| (lane.frames, lane.timed_ns)).collect();
        assert_eq!(told, [(5, 0), (3, 0), (7, 1)]);
    }
}
