//! `rxdrop --hints`: which hints are before frames, how long ago the NIC received the frames, and the cost of reading.
//!
//! They are read as ports read them ([`xsk::metadata`]): each frame's layout is looked up by its ID. Cycles are counted.
//!
//! The NIC's clock may show any time. So the first timestamp is compared with the kernel's clocks. One that shows up to
//! a second more is assumed to be synchronized with the NIC's (by phc2sys), and latencies are measured with it. Without
//! such a clock each latency is relative to the shortest one.

use std::time::Duration;

use common::cycles;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, DynamicClockId, clock_gettime, clock_gettime_dynamic};
use serde_json::{Value, json};
use steer::{HintSet, Program};
use xsk::metadata::{Found, Layouts};
use xsk::{Umem, UmemOffset};

/// Largest age of a frame for which the clocks are considered synchronized.
const PLAUSIBLE: Duration = Duration::from_secs(1);
/// Longest latency that the histogram distinguishes.
const LONGEST_NS: u64 = 10_000_000_000;
/// Highest cost of a frame that the histogram distinguishes, tenths of a cycle.
const MOST_TENTHS: u64 = 1_000_000;
const CLOCKS: [(Clock, &str); 4] = [
    (Clock::Tai, "TAI"),
    (Clock::Kernel(ClockId::Realtime), "real time"),
    (Clock::Kernel(ClockId::Monotonic), "monotonic"),
    (Clock::Kernel(ClockId::Boottime), "boot time"),
];

/// A clock of the kernel's.
#[derive(Debug, Clone, Copy)]
enum Clock {
    Kernel(ClockId),
    Tai,
}

/// What a receiving loop does with the offsets of frames.
pub(super) trait Inspect {
    /// Records where a frame begins, and the bytes of its first piece.
    fn note(&mut self, frame: UmemOffset, len: u32);
    /// Inspects the recorded frames, before any of them is returned to the kernel.
    fn read(&mut self, umem: &Umem);
}

/// No inspection, at no cost.
impl Inspect for () {
    #[inline]
    fn note(&mut self, _frame: UmemOffset, _len: u32) {}
    #[inline]
    fn read(&mut self, _umem: &Umem) {}
}

/// Reads hints, and counts them.
#[derive(Debug)]
pub(super) struct HintReader {
    asked: HintSet,
    layouts: Layouts,
    /// Frames of the current batch.
    frames: Vec<UmemOffset>,
    found: Vec<Found>,
    seen: Seen,
    cost: Cost,
    latency: Option<Latency>,
}

/// Numbers of frames, by what was found before them.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    frames: u64,
    hash: u64,
    vlan: u64,
    timestamp: u64,
    mark: u64,
    nothing: u64,
    unknown: u64,
}

/// Cost of reading or classifying: tenths of a cycle for a frame, weighted by frames.
#[derive(Debug)]
pub(super) struct Cost(Histogram<u64>);

impl Cost {
    pub(super) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, MOST_TENTHS, 3).expect("constants that it takes"))
    }

    pub(super) fn record(&mut self, cycles: u64, frames: u64) {
        if let Some(tenths) = cycles.saturating_mul(10).checked_div(frames) {
            self.0.saturating_record_n(tenths.max(1), frames);
        }
    }

    /// Cycles of the median frame, so that interruptions do not count.
    pub(super) fn a_frame(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(0.5) as f64 / 10.0)
    }
}

impl HintReader {
    /// A reader of the hints that the program writes, for batches of at most so many frames.
    pub(super) fn new(program: &Program, batch: u32) -> Self {
        let layouts = Layouts::new(&program.layouts());
        let batch = batch as usize;
        Self {
            asked: program.hints(),
            layouts,
            frames: Vec::with_capacity(batch),
            found: vec![Found::Nothing; batch],
            seen: Seen::default(),
            cost: Cost::new(),
            latency: None,
        }
    }

    fn count(&mut self) {
        let frames = self.frames.len();
        let mut now = None;
        for found in self.found.iter().take(frames) {
            let seen = &mut self.seen;
            seen.frames += 1;
            let hints = match found {
                Found::Hints(hints) => hints,
                Found::Nothing => {
                    seen.nothing += 1;
                    continue;
                }
                // Bytes of the driver: virtio_net has its header there in zero-copy.
                Found::Unknown(_) if self.asked.is_empty() => {
                    seen.nothing += 1;
                    continue;
                }
                Found::Unknown(_) => {
                    seen.unknown += 1;
                    continue;
                }
            };
            seen.hash += u64::from(hints.hash.is_some());
            seen.vlan += u64::from(hints.tag.is_some());
            seen.mark += u64::from(hints.mark.is_some());
            if let Some(timestamp) = hints.timestamp {
                seen.timestamp += 1;
                let latency = self.latency.get_or_insert_with(|| Latency::new(timestamp.get()));
                // One reading of the clock for the whole batch.
                let now = *now.get_or_insert_with(|| nanoseconds(latency.clock));
                latency.record(now, timestamp.get());
            }
        }
        self.frames.clear();
    }

    /// Shares of frames are 0 to 1. Cycles are those of reading the median frame; none if they are not known.
    pub(super) fn report(&self) -> Value {
        let seen = self.seen;
        let share = |frames: u64| frames as f64 / seen.frames.max(1) as f64;
        json!({
            "asked": self.asked.to_string(),
            "with_hash": share(seen.hash),
            "with_vlan": share(seen.vlan),
            "with_timestamp": share(seen.timestamp),
            "with_mark": share(seen.mark),
            "with_nothing": share(seen.nothing),
            "of_unknown_layout": share(seen.unknown),
            "cycles_a_frame_by_id": self.cost.a_frame(),
            "latency": self.latency.as_ref().map(Latency::report),
            "no_latency": self.why_no_latency(),
        })
    }

    fn why_no_latency(&self) -> Option<&'static str> {
        let is_asked = self.asked.to_string().contains("timestamp");
        self.latency.is_none().then_some(match is_asked {
            true => "no frame has a time of receipt: its driver, or NIC, has no clock (veth never has)",
            false => "not asked for (--hints timestamp)",
        })
    }
}

impl Inspect for HintReader {
    #[inline]
    fn note(&mut self, frame: UmemOffset, _len: u32) {
        // No batch is larger than there was room made for.
        self.frames.push(frame);
    }

    fn read(&mut self, umem: &Umem) {
        let begun = cycles::counter();
        for (&frame, found) in self.frames.iter().zip(&mut self.found) {
            *found = self.layouts.read(umem, frame);
        }
        if let (Some(begun), Some(ended)) = (begun, cycles::counter()) {
            self.cost
                .record(ended.saturating_sub(begun), self.frames.len() as u64);
        }
        self.count();
    }
}

/// How long ago frames were received.
#[derive(Debug)]
struct Latency {
    clock: Clock,
    clock_name: Option<&'static str>,
    histogram: Histogram<u64>,
    /// For a clock that is not synchronized: subtracted from each difference; it is the least one so far.
    offset: i128,
}

impl Latency {
    fn new(timestamp: u64) -> Self {
        let ago = |clock| nanoseconds(clock).checked_sub(timestamp);
        let is_plausible = |&(clock, _): &(Clock, &str)| {
            ago(clock).is_some_and(|ago| u128::from(ago) <= PLAUSIBLE.as_nanos())
        };
        let kept = CLOCKS.into_iter().find(is_plausible);
        let (clock, clock_name) = kept.map_or((Clock::Kernel(ClockId::Monotonic), None), |(clock, name)| {
            (clock, Some(name))
        });
        Self {
            clock,
            clock_name,
            histogram: Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constants that it takes"),
            offset: match clock_name {
                Some(_) => 0,
                None => i128::from(nanoseconds(clock)) - i128::from(timestamp),
            },
        }
    }

    fn record(&mut self, now: u64, timestamp: u64) {
        let ago = i128::from(now) - i128::from(timestamp);
        if self.clock_name.is_none() {
            self.offset = self.offset.min(ago);
        }
        // Clocks are not exactly synchronized: a timestamp in the future counts as no latency.
        let ago = u64::try_from(ago - self.offset).unwrap_or(0);
        self.histogram.saturating_record(ago.max(1));
    }

    /// Latencies from the NIC's receipt until this program has the batch. `clock`: the kernel's clock that the NIC's is
    /// synchronized with; none: times are relative to the least.
    fn report(&self) -> Value {
        let at = |quantile| self.histogram.value_at_quantile(quantile);
        json!({
            "clock": self.clock_name,
            "frames": self.histogram.len(),
            "min_ns": self.histogram.min(),
            "p50_ns": at(0.5),
            "p90_ns": at(0.9),
            "p99_ns": at(0.99),
            "p999_ns": at(0.999),
            "max_ns": self.histogram.max(),
        })
    }
}

fn nanoseconds(clock: Clock) -> u64 {
    let now = match clock {
        Clock::Kernel(clock) => clock_gettime(clock),
        // Every kernel that this program runs on has it.
        Clock::Tai => {
            clock_gettime_dynamic(DynamicClockId::Tai).unwrap_or_else(|_| clock_gettime(ClockId::Realtime))
        }
    };
    // None of these clocks is before its beginning.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_that_of_the_frame_in_the_middle() {
        let mut cost = Cost::new();
        assert_eq!(cost.a_frame(), None);
        cost.record(100, 0);
        assert_eq!(cost.a_frame(), None);
        for (cycles, frames) in [(640, 64), (u64::MAX, 1), (30, 2)] {
            cost.record(cycles, frames);
        }
        assert_eq!(cost.a_frame(), Some(10.0));
    }

    #[test]
    fn clock_that_the_nic_is_kept_at_is_recognised() {
        for (clock, name) in CLOCKS {
            let latency = Latency::new(nanoseconds(clock) - 1000);
            // Some may show the same, such as TAI where nobody has set it, or a machine that never slept.
            let alike = nanoseconds(latency.clock).abs_diff(nanoseconds(clock)) < 1_000_000_000;
            assert!(latency.clock_name == Some(name) || alike, "{name}: {latency:?}");
        }
    }

    #[test]
    fn latencies_by_a_clock_of_its_own_are_relative_to_the_least() {
        let mut latency = Latency::new(12_345);
        assert_eq!(latency.clock_name, None);
        let first = u64::try_from(latency.offset).expect("it began long ago") + 12_345;
        for (now, timestamp) in [(first, 12_345), (first + 5000, 12_400), (first, 20_345)] {
            latency.record(now, timestamp);
        }
        let report = latency.report();
        assert_eq!(
            (&report["frames"], &report["min_ns"], &report["clock"]),
            (&json!(3), &json!(1), &json!(null))
        );
        let most = report["max_ns"].as_u64().expect("a number");
        assert!((4900..5000).contains(&most), "{report}");
    }

    #[test]
    fn frame_from_the_future_has_come_at_once() {
        let now = nanoseconds(Clock::Kernel(ClockId::Realtime));
        let mut latency = Latency::new(now);
        latency.record(now, now + 500);
        latency.record(now + 100_000_000_000, now);
        let report = latency.report();
        assert_eq!((&report["min_ns"], &report["frames"]), (&json!(1), &json!(2)));
        assert!(report["max_ns"].as_u64() >= Some(LONGEST_NS), "{report}");
    }
}
