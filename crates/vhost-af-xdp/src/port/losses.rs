//! Logs which kinds of frames a port loses: the first of each kind in a session, with what was wrong.
//!
//! Workers count and never log. A thread of the daemon's looks at the counters of all ports now and then
//! (`limit_watch.rs`), and the port's own thread when a session ends; so a line comes up to two seconds late. More than
//! [`LogLimit`] allows are left out.

use std::sync::Arc;

use device::counters::{Kind, PairCounters, Reading};
use steward::log_limit::LogLimit;

/// What was logged in this session.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Of each drop counter, in their order: its value when the session began, or the largest if its kind was logged.
    before: Vec<u64>,
    lines: LogLimit,
}

impl Losses {
    /// A session begins: each kind is logged once more. `counters`: of all pairs.
    pub(super) fn begin(&mut self, counters: &[Arc<PairCounters>]) {
        self.before = drops(counters).iter().map(|reading| reading.value).collect();
        // Of an earlier guest.
        counters.iter().for_each(|pair| _ = pair.why_malformed.take());
    }

    /// Logs the kinds of loss that were not logged in this session yet.
    pub(super) fn log(&mut self, port: &str, counters: &[Arc<PairCounters>]) {
        for (Reading { name, help, .. }, frames) in self.news(&drops(counters)) {
            let Some(left_out) = self.lines.allow() else {
                continue;
            };
            let mut reasons = counters.iter().filter_map(|pair| pair.why_malformed.take());
            let why = match name {
                "from_guest_offload_malformed" => reasons.next(),
                _ => None,
            };
            let why = why.map_or_else(String::new, |why| format!(" The first one: {why}."));
            tracing::info!(
                port,
                counter = name,
                frames,
                "frames are lost: {help}{why}{left_out}"
            );
        }
    }

    /// Takes note of what is lost by now, of which the last readings were others; those that are news, each with how
    /// many frames.
    fn news(&mut self, now: &[Reading]) -> Vec<(Reading, u64)> {
        self.before.resize(now.len(), 0);
        let mut news = Vec::new();
        for (before, reading) in self.before.iter_mut().zip(now) {
            if let Some(frames @ 1..) = reading.value.checked_sub(*before) {
                *before = u64::MAX;
                news.push((reading.clone(), frames));
            }
        }
        news
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

    #[test]
    fn first_loss_of_a_kind_is_news_and_no_other_one() {
        let mut losses = Losses {
            before: vec![5, 0],
            ..Losses::default()
        };
        let mut news = |values| -> Vec<_> {
            let news = losses.news(&readings(values));
            news.into_iter()
                .map(|(reading, frames)| (reading.name, frames))
                .collect()
        };
        assert_eq!(news([5, 0]), []);
        assert_eq!(news([7, 0]), [("one", 2)]);
        assert_eq!(news([9, 1]), [("other", 1)]);
        assert_eq!(news([99, 99]), []);
    }
}
