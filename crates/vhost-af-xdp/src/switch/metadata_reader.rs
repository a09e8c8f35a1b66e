//! What the XDP program left before the frames of a NIC queue ([`xsk::metadata`]), as a lane reads it.
//!
//! Metadata is trusted only at the usual position of frames: only there the bytes of earlier frames, which others
//! chose, were overwritten when the NIC got the chunk ([`NicQueue::set_metadata`]).
//!
//! A program may be replaced while frames are in flight. Frames of the earlier program name their own layout, and are
//! read by that. An unknown layout is counted, and the frame has no metadata. That is not enough where the program
//! reports tags that the NIC removed: the frame looks untagged, and may be of any VLAN. It is dropped then. The reader
//! does not ask whether the NIC removes tags: that can change at any time (`ethtool -K`).

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

    /// The metadata of a received frame, by its first piece. `None`: drop the frame, which is counted.
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
