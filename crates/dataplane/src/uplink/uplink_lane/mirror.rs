//! Copies of frames that arrived at the uplink, for promiscuous ports.
//!
//! While there is such a port, each frame is copied on arrival, before its tag is removed and its chunks are returned,
//! and delivered to promiscuous ports when its last piece has arrived.

use acl::FlowHints;
use device::counters::PairCounters;
use packet::ethernet::{self, ADDRESS_BYTES, LOOK_BYTES, TAG_BYTES};
use xsk::metadata::{Hints, Tag};
use xsk::{RxDesc, Umem};

use crate::backend::arrivals::Origin;
use crate::fdb::PortNumber;
use crate::fdb::forwarding::Forwarding;
use crate::guest::copies::Several;
use crate::lane::Siblings;

/// No frame is longer, bytes.
const LONGEST: usize = 1 << 16;

#[derive(Default)]
pub(super) struct Mirror {
    /// The current frame; the memory is reused.
    frame: Vec<u8>,
    /// A piece of the frame is missing.
    spoiled: bool,
    /// What the NIC reported about its flow.
    flow: FlowHints,
}

impl Mirror {
    /// Copies a piece. `first`: the frame's metadata, if it is the frame's first piece.
    #[cold]
    pub(super) fn take(&mut self, umem: &Umem, piece: &RxDesc, first: Option<&Hints>) {
        if let Some(hints) = first {
            self.frame.clear();
            self.spoiled = false;
            self.flow = FlowHints::of(hints);
        }
        let before = self.frame.len();
        if before > LONGEST {
            self.spoiled = true;
            return;
        }
        self.frame.resize(before + piece.len as usize, 0);
        self.spoiled |= umem.read(piece.data, &mut self.frame[before..]).is_none();
        if let Some(tag) = first.and_then(|hints| hints.tag) {
            self.put_tag_back(tag);
        }
    }

    /// Inserts the tag that the NIC removed from the frame, of which only the first piece is there.
    fn put_tag_back(&mut self, tag: Tag) {
        let len = self.frame.len();
        if len >= ADDRESS_BYTES {
            self.frame.resize(len + TAG_BYTES, 0);
            self.frame
                .copy_within(ADDRESS_BYTES..len, ADDRESS_BYTES + TAG_BYTES);
            let tag = ethernet::any_tag(tag.proto, tag.tci);
            self.frame[ADDRESS_BYTES..][..TAG_BYTES].copy_from_slice(&tag);
        }
    }

    /// Drops the current frame: a piece of it is unusable.
    pub(super) fn spoil(&mut self) {
        self.spoiled = true;
    }

    /// Delivers a whole unicast frame (multicast goes to all ports anyway); `found`: its port. Returns the cost of the
    /// listeners' filter rules, in frames of a budget.
    #[cold]
    pub(super) fn give(
        &mut self,
        (found, origin): (Option<PortNumber>, Origin),
        forwarding: &Forwarding,
        counters: &PairCounters,
        siblings: &mut dyn Siblings,
    ) -> usize {
        let Some(bytes) = self.frame.first_chunk::<LOOK_BYTES>() else {
            return 0;
        };
        if self.spoiled {
            return 0;
        }
        let vlan = ethernet::head(bytes).tags.vlan();
        let several = Several {
            frame: &mut self.frame,
            vlan,
            may_be_partial: origin.partial_checksums,
            flow: self.flow,
            counters,
        };
        several.give(forwarding.listeners(vlan, None, found), forwarding, siblings)
    }
}
