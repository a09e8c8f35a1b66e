//! What the XDP program left before the frames of a NIC queue ([`xsk::metadata`]), as a lane reads it.
//!
//! It is believed where the kernel lets frames begin, and nowhere else: only there was what stood in the chunk before
//! overwritten when the NIC got it ([`NicQueue::promise`]), an older frame for instance, whose bytes somebody else
//! chose.
//!
//! A program may be replaced while frames are under way. Those of the one before name their own layout, and are read by
//! that. What nobody knows is counted, and the frame is one of which nothing is known. That is not enough where the
//! program tells of tags that the NIC took off: the frame looks as one without a tag, and may be of any VLAN. It is
//! dropped then. Whether the NIC does take tags off is not asked: that is changed at any time (`ethtool -K`).

use device::counters::PairCounters;
use steer::HintSet;
use xsk::metadata::{Found, Hints, Layouts};
use xsk::{RxDesc, Umem};

use crate::nic::endpoint::{NicQueue, usual_place};
use crate::nic::hints::SeenHints;

/// See the module's head.
#[derive(Clone, Copy)]
pub(super) struct MetadataReader<'a> {
    pub(super) umem: &'a Umem,
    pub(super) layouts: &'a Layouts,
    pub(super) expected: HintSet,
    pub(super) seen: &'a SeenHints,
}

impl<'a> MetadataReader<'a> {
    /// Of frames of that queue.
    #[inline]
    pub(super) fn of<N>(queue: &'a NicQueue<N>) -> Self {
        Self {
            umem: &queue.umem,
            layouts: &queue.layouts,
            expected: queue.hints,
            seen: &queue.seen,
        }
    }

    /// Whether there is anything to read.
    #[inline]
    pub(super) fn is_read(&self) -> bool {
        !self.layouts.is_empty()
    }

    /// What is known of a received frame beside its bytes, by its first piece. `None`: it is to be dropped, and that is
    /// counted.
    #[inline]
    pub(super) fn read(&self, piece: &RxDesc, counters: &PairCounters) -> Option<Hints> {
        if !self.is_read() {
            return Some(Hints::default());
        }
        if piece.data != usual_place(self.umem, piece.frame.offset()) {
            return self.elsewhere(counters);
        }
        match self.layouts.read(self.umem, piece.data) {
            Found::Hints(hints) => {
                self.seen.note(&hints);
                Some(hints)
            }
            Found::Nothing => Some(Hints::default()),
            Found::Unknown(_) => self.unknown(counters),
        }
    }

    /// Nothing is missed of a note; hints are, which are there.
    #[cold]
    fn elsewhere(&self, counters: &PairCounters) -> Option<Hints> {
        match self.expected.is_empty() {
            true => Some(Hints::default()),
            false => self.unknown(counters),
        }
    }

    #[cold]
    fn unknown(&self, counters: &PairCounters) -> Option<Hints> {
        if self.expected.has(HintSet::VLAN) {
            counters.to_guest_tag_unknown.add(1);
            return None;
        }
        counters.to_guest_hints_unknown.add(1);
        Some(Hints::default())
    }
}
