//! XDP metadata of an interface's queues, and which of its hints frames really had.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use steer::HintSet;
use xsk::metadata::{Hints, Layout, MAX_LAYOUTS};

/// The hints that frames have had so far. Nothing is published through it.
#[derive(Debug, Default)]
pub struct SeenHints(AtomicU8);

impl SeenHints {
    /// Records the hints of a received frame; costs one load if earlier frames had all of them.
    #[inline]
    pub(crate) fn note(&self, hints: &Hints) {
        let there = hints.fields();
        if there & !self.0.load(Relaxed) != 0 {
            self.0.fetch_or(there, Relaxed);
        }
    }

    /// The hints that were seen.
    pub fn get(&self) -> HintSet {
        HintSet::of_bits(self.0.load(Relaxed))
    }
}

/// The metadata before frames of a lent queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct XdpMetadata {
    /// The hints that each frame should have.
    pub hints: HintSet,
    /// Layouts, the most usual first; none: there is no metadata to read.
    pub layouts: Vec<Layout>,
    /// The program may leave hints before its frames.
    pub leaves: bool,
}

impl XdpMetadata {
    /// These hints, in one of these layouts.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn of(hints: HintSet, layouts: &[Layout]) -> Self {
        Self {
            hints,
            layouts: layouts.to_vec(),
            leaves: !hints.is_empty(),
        }
    }

    /// Adds the layouts that the lane already reads: older frames may still have them.
    pub fn after(mut self, before: &Self) -> Self {
        let unknown = before
            .layouts
            .iter()
            .filter(|layout| !self.layouts.contains(layout));
        let unknown: Vec<Layout> = unknown.copied().collect();
        self.layouts.extend(unknown);
        self.layouts.truncate(MAX_LAYOUTS);
        self
    }
}

impl XdpMetadata {
    /// Replaces earlier metadata: `tell` sends it to the lane, and `let_leave` sets whether the program leaves metadata
    /// in the queue, if that changes (false: it could not be set). Returns the metadata that the lane got last. If it
    /// could not be set, the lane expects only hints that were there before, and the next check tries again.
    pub fn follow(
        mut self,
        before: &Self,
        tell: &mut dyn FnMut(&Self),
        let_leave: impl FnOnce(bool) -> bool,
    ) -> Self {
        tell(&self);
        if self.leaves != before.leaves && !let_leave(self.leaves) {
            self.leaves = before.leaves;
            self.hints = self.hints.among(before.hints);
            tell(&self);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use xsk::metadata::{Hash, Tag};

    use super::*;

    #[test]
    fn what_any_frame_had_is_seen() {
        let seen = SeenHints::default();
        seen.note(&Hints::default());
        assert_eq!(seen.get(), HintSet::NONE);
        let hash = Some(Hash { value: 0, kind: 0 });
        let hashed = Hints {
            hash,
            ..Hints::default()
        };
        seen.note(&hashed);
        seen.note(&Hints::default());
        assert_eq!(seen.get(), HintSet::HASH);
        seen.note(&Hints {
            tag: Some(Tag {
                proto: 0x8100,
                tci: 0,
            }),
            timestamp: NonZeroU64::new(1),
            mark: Some(0),
            ..hashed
        });
        assert_eq!(seen.get(), HintSet::ALL);
    }

    #[test]
    fn lane_expects_no_hints_of_a_queue_whose_word_could_not_be_set() {
        let (none, both) = (
            XdpMetadata::default(),
            XdpMetadata::of(HintSet::ALL, &[steer::note_layout()]),
        );
        for (is_set, leaves, hints) in [(true, true, HintSet::ALL), (false, false, HintSet::NONE)] {
            let mut told = Vec::new();
            let now = both
                .clone()
                .follow(&none, &mut |metadata| told.push(metadata.clone()), |_| is_set);
            assert_eq!((now.leaves, now.hints), (leaves, hints));
            assert_eq!(
                now.layouts, both.layouts,
                "metadata is read even if it is not expected"
            );
            assert_eq!(told.last(), Some(&now));
        }
        let mut told = Vec::new();
        let now = none
            .clone()
            .follow(&both, &mut |metadata| told.push(metadata.clone()), |_| false);
        assert!(now.leaves && now.hints.is_empty() && told.last() == Some(&now));
    }
}
