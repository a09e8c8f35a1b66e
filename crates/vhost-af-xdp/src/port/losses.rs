//! Logs which kinds of frames a port loses: the first of each kind in a session, with the reason.
//!
//! Workers count and never log. A thread of the daemon reads the counters of all ports now and then (`port_watch.rs`),
//! and the port's own thread when a session ends; so a line may be two seconds late. A line that [`LogLimit`] does not
//! allow is logged at a later check, if the session lasts so long. `other_losses.rs` logs the losses of sockets,
//! programs and networks.

use std::sync::Arc;

use device::counters::{Kind, PairCounters, Reading};
use program::log_limit::LogLimit;

/// What was logged in this session.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// For each drop counter, in order: its value when the session began, or `u64::MAX` once its kind was logged.
    before: Vec<u64>,
    lines: LogLimit,
}

impl Losses {
    /// A session begins: each kind is logged once more. `counters`: of all pairs.
    pub(super) fn begin(&mut self, counters: &[Arc<PairCounters>]) {
        self.before = drops(counters).iter().map(|reading| reading.value).collect();
        // These are reasons of an earlier guest.
        counters.iter().for_each(|pair| _ = pair.why_malformed.take());
    }

    /// Logs the kinds of loss that were not logged in this session yet.
    pub(super) fn log(&mut self, port: &str, counters: &[Arc<PairCounters>]) {
        for (Reading { name, help, .. }, frames) in self.first(&drops(counters)) {
            let mut reasons = counters.iter().filter_map(|pair| pair.why_malformed.take());
            let why = match name {
                "from_guest_offload_malformed" => reasons.next(),
                _ => None,
            };
            let why = why.map_or_else(String::new, |why| format!(" The first one: {why}."));
            tracing::info!(port, counter = name, frames, "frames are lost: {help}{why}");
        }
    }

    /// Kinds of loss to log now, each with its number of frames: not logged in this session yet, and allowed by the
    /// limit.
    fn first(&mut self, now: &[Reading]) -> Vec<(Reading, u64)> {
        self.before.resize(now.len(), 0);
        let mut first = Vec::new();
        for (before, reading) in self.before.iter_mut().zip(now) {
            if let Some(frames @ 1..) = reading.value.checked_sub(*before)
                && self.lines.would_allow()
            {
                self.lines.allow();
                *before = u64::MAX;
                first.push((reading.clone(), frames));
            }
        }
        first
    }
}

/// The drop counters, each the sum over all pairs.
fn drops(counters: &[Arc<PairCounters>]) -> Vec<Reading> {
    let mut all = counters.iter().map(|pair| pair.read());
    let mut sum = all.next().unwrap_or_default();
    for pair in all {
        for (sum, reading) in sum.iter_mut().zip(pair) {
            sum.value = sum.value.wrapping_add(reading.value);
        }
    }
    sum.retain(|reading| reading.kind == Kind::Drop);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readings(values: [u64; 2]) -> Vec<Reading> {
        let reading = |(name, value)| Reading {
            name,
            kind: Kind::Drop,
            value,
            help: "",
        };
        ["one", "other"].into_iter().zip(values).map(reading).collect()
    }

    fn first(losses: &mut Losses, values: [u64; 2]) -> Vec<(&'static str, u64)> {
        let first = losses.first(&readings(values));
        first
            .into_iter()
            .map(|(reading, frames)| (reading.name, frames))
            .collect()
    }

    #[test]
    fn first_loss_of_a_kind_is_logged_and_no_other_one() {
        let mut losses = Losses {
            before: vec![5, 0],
            ..Losses::default()
        };
        let mut first = |values| first(&mut losses, values);
        assert_eq!(first([5, 0]), []);
        assert_eq!(first([7, 0]), [("one", 2)]);
        assert_eq!(first([9, 1]), [("other", 1)]);
        assert_eq!(first([99, 99]), []);
    }

    #[test]
    fn loss_that_the_limit_holds_back_is_logged_later() {
        let mut losses = Losses::default();
        while losses.lines.allow().is_some() {}
        assert_eq!(first(&mut losses, [1, 0]), []);
        losses.lines = LogLimit::default();
        assert_eq!(first(&mut losses, [3, 0]), [("one", 3)]);
    }
}
