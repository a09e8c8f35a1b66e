//! Sums of the counters of a queue, a port or a network, and rates between two readings.

use std::time::Duration;

use serde::Serialize;

use super::{LaneStatus, Named, PortStatus};

/// Frames and bytes: counts, or with `f64` rates per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Traffic<T = u64> {
    /// Frames that guests sent.
    pub from_guest_frames: T,
    /// Their bytes, without the virtio-net header.
    pub from_guest_bytes: T,
    /// Frames that guests received.
    pub to_guest_frames: T,
    /// Their bytes, without the virtio-net header.
    pub to_guest_bytes: T,
    /// Frames dropped in both directions, for any reason.
    pub drops: T,
}

impl Traffic {
    fn of<'a>(counters: impl IntoIterator<Item = &'a Named>) -> Self {
        let mut sum = Self::default();
        for counter in counters {
            match counter.name.as_str() {
                "from_guest_frames" => sum.from_guest_frames += counter.value,
                "from_guest_bytes" => sum.from_guest_bytes += counter.value,
                "to_guest_frames" => sum.to_guest_frames += counter.value,
                "to_guest_bytes" => sum.to_guest_bytes += counter.value,
                _ if counter.drop => sum.drops += counter.value,
                _ => {}
            }
        }
        sum
    }

    /// The rates since an earlier reading. A counter that was reset meanwhile counts from 0.
    #[must_use]
    pub fn rates(self, before: Self, elapsed: Duration) -> Traffic<f64> {
        let rate = |now: u64, before: u64| {
            // Counts of an interval are exact as doubles.
            now.checked_sub(before).unwrap_or(now) as f64 / elapsed.as_secs_f64().max(1e-9)
        };
        Traffic {
            from_guest_frames: rate(self.from_guest_frames, before.from_guest_frames),
            from_guest_bytes: rate(self.from_guest_bytes, before.from_guest_bytes),
            to_guest_frames: rate(self.to_guest_frames, before.to_guest_frames),
            to_guest_bytes: rate(self.to_guest_bytes, before.to_guest_bytes),
            drops: rate(self.drops, before.drops),
        }
    }
}

impl LaneStatus {
    /// The sums of its counters.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic::of(&self.counters)
    }
}

impl PortStatus {
    /// The sums of its queue pairs.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic::of(self.lanes.iter().flat_map(|lane| &lane.counters))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(name: &str, drop: bool, value: u64) -> Named {
        Named {
            name: name.to_owned(),
            source: "lane".to_owned(),
            drop,
            value,
        }
    }

    #[test]
    fn rates_are_differences_by_time_and_a_reset_counter_starts_from_zero() {
        let at = |frames, bytes, drops| {
            Traffic::of(&[
                counter("from_guest_frames", false, frames),
                counter("to_guest_bytes", false, bytes),
                counter("to_guest_no_buffer", true, drops),
                counter("kicks", false, 7),
            ])
        };
        let rates = at(2_000, 5_000, 3).rates(at(500, 9_000, 1), Duration::from_millis(500));
        let wanted = Traffic {
            from_guest_frames: 3_000.0,
            to_guest_bytes: 10_000.0,
            drops: 4.0,
            ..Traffic::default()
        };
        assert_eq!(rates, wanted);
    }
}
