//! `--classify`: what a filter with a flow cache takes for each frame, with the NIC's hash or without.
//!
//! The filter is the one that ports have ([`acl`]), and is asked as they ask it: by a copy of the
//! frame's first bytes. Where the program leaves hints the flow is looked for by the NIC's hash, else by one that is
//! computed of what rules look at; the header decides in both cases. Frames are judged by the batch, and the CPU's
//! counter is read before it and behind it: what hints take to be read is in it. What was decided is counted, and not
//! done.

use acl::{Classifier, Facts, SHORT_LOOK_BYTES};
use anyhow::Context as _;
use common::cycles;
use device::counters::PairCounters;
use serde::Serialize;
use steer::Program;
use xsk::metadata::{Expected, Layouts};
use xsk::{Umem, UmemOffset};

use super::hints::{Cost, Reads};
use model::config::{Direction, Filter, MOST_RULES, Rule};

/// Judges frames, and counts what that takes.
#[derive(Debug)]
pub(super) struct FlowJudge {
    rules: u32,
    classifier: Classifier<()>,
    counters: PairCounters,
    layouts: Layouts,
    /// `None`: nothing is left before frames.
    expected: Option<Expected>,
    /// The batch in hand, with lengths.
    frames: Vec<UmemOffset>,
    lens: Vec<u32>,
    /// The NIC's, where they tell flows apart.
    hashes: Vec<Option<u32>>,
    judged: u64,
    by_hash_of_nic: u64,
    cost: Cost,
}

impl FlowJudge {
    /// By so many rules, of batches of at most so many frames.
    /// Errors: there are no so many rules.
    pub(super) fn new(rules: u32, program: &Program, batch: u32) -> anyhow::Result<Self> {
        let config = Filter {
            rule: list(rules)?,
            ..Filter::default()
        };
        let compiled = acl::compile(&config, Direction::ToGuest);
        let layouts = match program.hints().is_empty() {
            true => Layouts::default(),
            false => Layouts::new(&program.layouts()),
        };
        let batch = batch as usize;
        Ok(Self {
            rules,
            classifier: Classifier::new(compiled.context("--rules 0: choose one at least")?),
            counters: PairCounters::default(),
            expected: Expected::latest(&layouts),
            layouts,
            frames: Vec::with_capacity(batch),
            lens: Vec::with_capacity(batch),
            hashes: vec![None; batch],
            judged: 0,
            by_hash_of_nic: 0,
            cost: Cost::new(),
        })
    }

    fn judge(&mut self, umem: &Umem) {
        // All that is read of a batch comes at once, and not a line after the other.
        for &frame in &self.frames {
            umem.prefetch(frame);
            if self.expected.is_some() {
                umem.prefetch(UmemOffset::new(frame.get().saturating_sub(1)));
            }
        }
        if let Some(expected) = &self.expected {
            self.hashes.clear();
            expected.read_hashes(&self.layouts, umem, &self.frames, |hash| {
                let hash = hash.filter(|hash| hash.is_of_ports());
                self.hashes.push(hash.map(|hash| hash.value));
            });
            self.classifier.look_ahead(self.hashes.iter().flatten().copied());
        }
        for ((&frame, &len), &hash) in self.frames.iter().zip(&self.lens).zip(&self.hashes) {
            let mut head = [0; SHORT_LOOK_BYTES];
            let known = (len as usize).min(SHORT_LOOK_BYTES);
            // Of a frame that was received.
            let _ = umem.read(frame, &mut head[..known]);
            self.by_hash_of_nic += u64::from(hash.is_some());
            let facts = Facts {
                hash,
                ..Facts::of_len(len as usize)
            };
            self.classifier.lets_pass(&head[..known], facts, &self.counters);
        }
    }

    pub(super) fn report(&self) -> ClassifyReport {
        let counters = &self.counters;
        ClassifyReport {
            rules: self.rules,
            by_hash_of_nic: self.by_hash_of_nic as f64 / self.judged.max(1) as f64,
            hits: counters.filter_hits.get(),
            misses: counters.filter_misses.get(),
            evictions: counters.filter_evictions.get(),
            denied: counters.to_guest_filter.get(),
            malformed: counters.to_guest_filter_headers.get(),
            cycles_a_frame: self.cost.a_frame(),
        }
    }
}

impl Reads for FlowJudge {
    #[inline]
    fn note(&mut self, frame: UmemOffset, len: u32) {
        // No batch is larger than there was room made for.
        self.frames.push(frame);
        self.lens.push(len);
    }

    fn read(&mut self, umem: &Umem) {
        let begun = cycles::counter();
        self.judge(umem);
        if let (Some(begun), Some(ended)) = (begun, cycles::counter()) {
            self.cost
                .record(ended.saturating_sub(begun), self.frames.len() as u64);
        }
        self.judged += self.frames.len() as u64;
        self.frames.clear();
        self.lens.clear();
    }
}

/// So many rules, of which the last one is for what [`super::frame`] makes, and none before it.
/// Errors: more than a port can have.
fn list(rules: u32) -> anyhow::Result<Vec<Rule>> {
    anyhow::ensure!(
        (1..=MOST_RULES as u32).contains(&rules),
        "--rules {rules}: choose 1 to {MOST_RULES}"
    );
    let others = (1..rules).map(|at| {
        let [_, a, b, c] = at.to_be_bytes();
        let source = format!("172.{}.{b}.{c}", 16 + a);
        format!(
            "direction=to-guest action=deny protocol=tcp source={source} destination-ports={}",
            at % 1000
        )
    });
    let last = "direction=to-guest action=allow protocol=udp destination-ports=9".to_owned();
    let rules = others.chain([last]).map(|words| words.parse::<Rule>());
    rules.collect::<Result<_, _>>().map_err(anyhow::Error::msg)
}

/// The field names are the names in the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct ClassifyReport {
    rules: u32,
    /// Share of frames, 0 to 1.
    by_hash_of_nic: f64,
    hits: u64,
    misses: u64,
    evictions: u64,
    denied: u64,
    malformed: u64,
    /// Of the median frame, what reading its hints takes included; none where cycles are not known.
    cycles_a_frame: Option<f64>,
}

impl ClassifyReport {
    /// For the table.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let Self {
            rules,
            hits,
            misses,
            evictions,
            denied,
            malformed,
            ..
        } = self;
        let percent = self.by_hash_of_nic * 100.0;
        let mut rows = vec![
            (
                "classified",
                format!("by {rules} rules, {percent:.1} % of frames by the NIC's hash"),
            ),
            (
                "flow cache",
                format!("{hits} hits, {misses} misses, {evictions} evictions"),
            ),
            (
                "would be dropped",
                format!("{denied} denied, {malformed} malformed"),
            ),
        ];
        rows.extend(
            self.cycles_a_frame
                .map(|cycles| ("classifying a frame", format!("{cycles:.1} cycles"))),
        );
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::template;

    #[test]
    fn only_the_last_rule_is_for_frames_that_are_made() {
        let config = Filter {
            rule: list(300).expect("so many"),
            ..Filter::default()
        };
        let rules = acl::compile(&config, Direction::ToGuest).expect("some");
        let mut classifier = Classifier::<()>::new(std::sync::Arc::clone(&rules));
        let frame = template([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], 64);
        assert!(classifier.lets_pass(&frame, Facts::of_len(64), &PairCounters::default()));
        let counted: Vec<_> = rules
            .counts()
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .collect();
        assert_eq!(counted, [(299, 1)]);
    }

    #[test]
    fn no_more_rules_than_a_port_can_have() {
        for rules in [0, MOST_RULES as u32 + 1] {
            assert!(list(rules).is_err(), "{rules}");
        }
    }
}
