//! `--classify`: what a filter with a flow cache costs for each frame, with the NIC's hash or without.
//!
//! The filter is the one that ports have ([`acl`]), and is called as they call it: with a copy of the
//! frame's first bytes. With hints the flow is looked up by the NIC's hash, else by a hash that is computed from the
//! fields that rules check; the header decides in both cases. Frames are classified in batches, and the CPU's counter
//! is read before and after each, so that the cost includes reading the hints. The decisions are only counted.

use acl::{Classifier, Facts};
use common::cycles;
use device::counters::PairCounters;
use model::config::{Direction, Filter, Rule};
use serde_json::{Value, json};
use steer::Program;
use xsk::metadata::Layouts;
use xsk::{Umem, UmemOffset};

use super::hints::{Cost, Inspect};

/// Classifies frames, and counts the cycles that takes.
#[derive(Debug)]
pub(super) struct FlowClassifier {
    rules: u32,
    classifier: Classifier<()>,
    counters: PairCounters,
    layouts: Layouts,
    /// Frames of the current batch, and their lengths.
    frames: Vec<UmemOffset>,
    lens: Vec<u32>,
    classified: u64,
    by_hash_of_nic: u64,
    cost: Cost,
}

impl FlowClassifier {
    /// A classifier with `rules` rules, at least one, for batches of at most `batch` frames.
    pub(super) fn new(rules: u32, program: &Program, batch: u32) -> Self {
        let config = Filter {
            rule: list(rules),
            ..Filter::default()
        };
        let compiled = acl::compile(&config, Direction::ToGuest);
        let layouts = match program.hints().is_empty() {
            true => Layouts::default(),
            false => Layouts::new(&program.layouts()),
        };
        let batch = batch as usize;
        Self {
            rules,
            classifier: Classifier::new(compiled.expect("there is a rule")),
            counters: PairCounters::default(),
            layouts,
            frames: Vec::with_capacity(batch),
            lens: Vec::with_capacity(batch),
            classified: 0,
            by_hash_of_nic: 0,
            cost: Cost::new(),
        }
    }

    fn classify(&mut self, umem: &Umem) {
        for (&frame, &len) in self.frames.iter().zip(&self.lens) {
            let hash = self.layouts.read(umem, frame).hints().hash;
            // The NIC's hash, where it distinguishes flows.
            let hash = hash.filter(|hash| hash.is_of_ports()).map(|hash| hash.value);
            let mut head = [0; packet::SHORT_HEAD];
            let known = (len as usize).min(packet::SHORT_HEAD);
            // Of a frame that was received.
            let _ = umem.read(frame, &mut head[..known]);
            self.by_hash_of_nic += u64::from(hash.is_some());
            let facts = Facts {
                hash,
                ..Facts::of_len(len as usize)
            };
            self.classifier.allows(&head[..known], facts, &self.counters);
        }
    }

    /// `by_hash_of_nic`: share of frames, 0 to 1. Cycles are those of the median frame, including reading its hints;
    /// none if they are not known.
    pub(super) fn report(&self) -> Value {
        let counters = &self.counters;
        json!({
            "rules": self.rules,
            "by_hash_of_nic": self.by_hash_of_nic as f64 / self.classified.max(1) as f64,
            "hits": counters.filter_hits.get(),
            "misses": counters.filter_misses.get(),
            "evictions": counters.filter_evictions.get(),
            "denied": counters.to_guest_filter.get(),
            "malformed": counters.to_guest_filter_headers.get(),
            "cycles_a_frame": self.cost.a_frame(),
        })
    }
}

impl Inspect for FlowClassifier {
    #[inline]
    fn note(&mut self, frame: UmemOffset, len: u32) {
        // No batch is larger than there was room made for.
        self.frames.push(frame);
        self.lens.push(len);
    }

    fn read(&mut self, umem: &Umem) {
        let begun = cycles::counter();
        self.classify(umem);
        if let (Some(begun), Some(ended)) = (begun, cycles::counter()) {
            self.cost
                .record(ended.saturating_sub(begun), self.frames.len() as u64);
        }
        self.classified += self.frames.len() as u64;
        self.frames.clear();
        self.lens.clear();
    }
}

/// So many rules, of which only the last one matches the frames of [`super::frame`].
fn list(rules: u32) -> Vec<Rule> {
    let others = (1..rules).map(|at| {
        let [_, a, b, c] = at.to_be_bytes();
        format!(
            "action=deny protocol=tcp source=172.{}.{b}.{c} destination-ports={}",
            16 + a,
            at % 1000
        )
    });
    let rules = others.chain(["action=allow protocol=udp destination-ports=9".to_owned()]);
    let rule = |words: String| {
        let rule = format!("direction=to-guest {words}").parse();
        rule.expect("it is valid")
    };
    rules.map(rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::template;

    #[test]
    fn only_the_last_rule_is_for_frames_that_are_made() {
        let config = Filter {
            rule: list(300),
            ..Filter::default()
        };
        let rules = acl::compile(&config, Direction::ToGuest).expect("some");
        let mut classifier = Classifier::<()>::new(std::sync::Arc::clone(&rules));
        let frame = template([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], 64);
        assert!(classifier.allows(&frame, Facts::of_len(64), &PairCounters::default()));
        let counted: Vec<_> = rules
            .counts()
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .collect();
        assert_eq!(counted, [(299, 1)]);
    }
}
