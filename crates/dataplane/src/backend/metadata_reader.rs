//! Reads the metadata that the XDP program left before the frames of a NIC queue ([`xsk::metadata`]).
//!
//! Metadata is trusted only before frames that start at the usual offset of their chunk, or behind outer headers there. Only there is the place of the
//! metadata's id overwritten before the NIC gets the chunk ([`NicQueue::set_metadata`]), so that bytes of an earlier
//! frame, which its sender chose, are never taken for an id.
//!
//! A program may be replaced while frames are in flight. Frames of the earlier program name their own layout, and are
//! read by that. A frame with an unknown layout is counted, and treated as one without metadata. If the program reports
//! tags that the NIC removed, the frame is dropped instead: it looks untagged, and may belong to any VLAN. The reader
//! does not check whether the NIC removes tags: that can change at any time (`ethtool -K`).

use device::counters::PairCounters;
use packet::tunnel::OUTER_LENS;
use steer::HintSet;
use xsk::metadata::{Found, Hints, Layouts};
use xsk::{RxDesc, Umem};

use crate::nic::endpoint::{NicQueue, usual_place};
use crate::nic::hints::SeenHints;

/// See the module's head.
#[derive(Clone, Copy)]
pub(crate) struct MetadataReader<'a> {
    pub(crate) umem: &'a Umem,
    pub(crate) layouts: &'a Layouts,
    pub(crate) expected: HintSet,
    pub(crate) seen: &'a SeenHints,
    /// The program may have removed outer headers. In zero-copy mode the frame then starts behind them. Only the program
    /// can have written metadata there: the last byte of an id is not 0, and the last byte of the headers is.
    pub(crate) decapsulated: bool,
}

impl<'a> MetadataReader<'a> {
    /// A reader for the frames of a queue.
    #[inline]
    pub(crate) fn of<N>(queue: &'a NicQueue<N>) -> Self {
        Self {
            umem: &queue.umem,
            layouts: &queue.layouts,
            expected: queue.hints,
            seen: &queue.seen,
            decapsulated: false,
        }
    }

    /// Whether frames of the queue may have metadata.
    #[inline]
    pub(crate) fn is_read(&self) -> bool {
        !self.layouts.is_empty()
    }

    /// The metadata of a received frame; `piece` is its first one. `None`: the frame must be dropped, and was counted.
    #[inline]
    pub(crate) fn read(&self, piece: &RxDesc, counters: &PairCounters) -> Option<Hints> {
        if !self.is_read() {
            return Some(Hints::default());
        }
        if !self.is_trusted(piece) {
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

    /// The port mark of a received frame without other metadata, from its first piece.
    #[inline]
    pub(crate) fn mark_only(&self, piece: &RxDesc) -> Option<u32> {
        let mark = self.layouts.port_only(self.umem, piece.data)?;
        self.is_trusted(piece).then_some(mark)
    }

    /// Whether a frame begins where metadata is trusted.
    #[inline]
    fn is_trusted(&self, piece: &RxDesc) -> bool {
        let usual = usual_place(self.umem, piece.frame.offset());
        let moved = piece.data.get().wrapping_sub(usual.get());
        moved == 0 || (self.decapsulated && OUTER_LENS.contains(&moved))
    }

    /// For a frame at another offset. A lost port mark does no harm, since the FDB finds the port; expected hints are
    /// lost.
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
