//! Which hints stood before frames.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use steer::HintSet;
use xsk::metadata::Hints;

/// Which hints frames have had, from the first frame on. Nothing is published through it.
#[derive(Debug, Default)]
pub(crate) struct SeenHints(AtomicU8);

impl SeenHints {
    /// A frame came with these. Costs a look where each was there before.
    #[inline]
    #[allow(dead_code, reason = "said by the readers of frames, in switch/")]
    pub(crate) fn note(&self, hints: &Hints) {
        let of = |is_there: bool, hint: HintSet| if is_there { hint.bits() } else { 0 };
        let there = of(hints.hash.is_some(), HintSet::HASH)
            | of(hints.tag.is_some(), HintSet::VLAN)
            | of(hints.timestamp.is_some(), HintSet::TIMESTAMP)
            | of(hints.mark.is_some(), HintSet::MARK);
        if there & !self.0.load(Relaxed) != 0 {
            self.0.fetch_or(there, Relaxed);
        }
    }

    #[allow(dead_code, reason = "shown by status")]
    pub(crate) fn get(&self) -> HintSet {
        HintSet::of_bits(self.0.load(Relaxed))
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
}
