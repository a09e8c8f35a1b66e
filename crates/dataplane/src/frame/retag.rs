//! Changes the VLAN tag of a frame from a port with tags to one without, or vice versa.

use device::counters::PairCounters;
use packet::ethernet::{self, ADDRESS_BYTES, LOOK_BYTES, TAG_BYTES};
use xsk::metadata::Tag;
use xsk::{RxDesc, Umem, UmemOffset};

use crate::frame::new_head::NewHead;
use crate::guest::guest_frame::GuestFrame;

/// A change of a frame's tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retag {
    Keep,
    Insert(u16),
    Remove,
}

impl Retag {
    /// A guest's frame with its tag changed.
    #[cold]
    pub(crate) fn change(self, frame: &GuestFrame<'_>) -> NewHead {
        let (addresses, rest) = frame.head.split_at(ADDRESS_BYTES);
        match self {
            Self::Insert(vlan) => NewHead::new(frame, [addresses, &ethernet::tag(vlan), rest]),
            Self::Remove => NewHead::new(frame, [addresses, &[], &rest[TAG_BYTES..]]),
            Self::Keep => NewHead::new(frame, [addresses, &[], rest]),
        }
    }
}

/// Inserts the tag that the NIC removed from a received frame, of which `piece` is the first piece: the addresses move
/// down into the room of the metadata. Counts the frame.
#[cold]
pub(crate) fn put_tag_back(umem: &Umem, piece: &mut RxDesc, tag: Tag, counters: &PairCounters) {
    let mut head = [0; ADDRESS_BYTES + TAG_BYTES];
    let begin = piece.data.get().checked_sub(TAG_BYTES as u64);
    let Some(begin) = begin.filter(|&begin| begin >= piece.frame.offset().get()) else {
        return;
    };
    let (addresses, rest) = head.split_at_mut(ADDRESS_BYTES);
    if (piece.len as usize) < ADDRESS_BYTES || umem.read(piece.data, addresses).is_none() {
        return;
    }
    rest.copy_from_slice(&ethernet::any_tag(tag.proto, tag.tci));
    if umem.write(UmemOffset::new(begin), &head).is_some() {
        piece.data = UmemOffset::new(begin);
        piece.len += TAG_BYTES as u32;
        counters.to_guest_tags_put_back.add(1);
    }
}

/// Removes the VLAN tag of a frame, of which `piece` is the first piece, if it has one: the addresses overwrite it, and
/// the frame begins 4 bytes later.
#[cold]
pub(crate) fn untag(umem: &Umem, piece: &mut RxDesc) {
    let mut bytes = [0; LOOK_BYTES];
    let is_long = piece.len as usize >= LOOK_BYTES;
    if !is_long || umem.read(piece.data, &mut bytes).is_none() || ethernet::head(&bytes).tags.vlan() == 0 {
        return;
    }
    // Inside the piece, and so inside the daemon's chunk.
    let begin = UmemOffset::new(piece.data.get() + TAG_BYTES as u64);
    if umem.write(begin, &bytes[..ADDRESS_BYTES]).is_some() {
        piece.data = begin;
        piece.len -= TAG_BYTES as u32;
    }
}
