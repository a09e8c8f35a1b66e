//! A classified chain: its frame and the destination.

use device::pair::{Cursor, Piece, Sending, Vring};
use packet::checksum::ChecksumAt;
use packet::ethernet::{self, ADDRESS_BYTES, Tags};
use packet::ethertype::ARP;
use packet::ip::is_long;
use packet::segment::{Malformed, Request};
use packet::{HEADERS_MAX, SHORT_HEAD, word};
use virtqueue::{Buffer, Chain};

use crate::fdb::Destination;
use crate::fdb::flows::Flow;
use crate::frame::bytes::guest_to_own;
use crate::frame::retag::Retag;
use crate::guest::guest_frame::GuestFrame;
use crate::policy::filter::Verdict;

/// A classified chain of a batch.
pub(super) struct Classified {
    /// Valid if `is_sent`.
    pub(super) sending: Sending,
    pub(super) is_sent: bool,
    pub(super) to: Destination,
    /// The frame's VLAN; 0: none.
    pub(super) vlan: u16,
    /// The frame has that VLAN's tag.
    pub(super) is_tagged: bool,
    /// Verdict of filter rules, if there are some.
    pub(super) verdict: Option<Verdict>,
    /// Valid bytes of `head`.
    pub(super) known: u16,
    pub(super) head: [u8; HEADERS_MAX],
}

impl Classified {
    /// A chain of which nothing is known.
    pub(super) const NOTHING: Self = Self {
        sending: Sending {
            start: Cursor { buffer: 0, within: 0 },
            len: 0,
            request: Request {
                csum: None,
                gso: None,
            },
        },
        is_sent: false,
        to: Destination::Unknown,
        vlan: 0,
        is_tagged: false,
        verdict: None,
        known: 0,
        head: [0; HEADERS_MAX],
    };

    /// Its frame, as the guest sent it; `buffers`: those of the chain.
    #[inline]
    pub(super) fn frame<'a>(&'a self, vring: &'a Vring, buffers: &'a [Buffer]) -> Option<GuestFrame<'a>> {
        self.is_sent.then(|| self.any_frame(vring, buffers))
    }

    /// The same, also for a frame that may not be sent.
    #[inline]
    pub(super) fn any_frame<'a>(&'a self, vring: &'a Vring, buffers: &'a [Buffer]) -> GuestFrame<'a> {
        GuestFrame {
            head: &self.head[..self.known.into()],
            replaced: self.known.into(),
            ..GuestFrame::new(vring, buffers, &self.sending)
        }
    }

    /// Its frame, if it is in one buffer, is not segmented, and keeps its tag: the requested checksum, the checked
    /// bytes, and the rest.
    #[inline]
    pub(super) fn whole<'a>(
        &'a self,
        is_tagged: bool,
        vring: &'a Vring,
        buffers: &'a [Buffer],
    ) -> Option<(Option<ChecksumAt>, &'a [u8], Piece)> {
        let frame = self.frame(vring, buffers)?;
        let Request { csum, gso } = self.sending.request;
        let goes_as_it_is = gso.is_none() && self.retag(is_tagged) == Retag::Keep;
        let rest = frame.rest_in_one()?;
        goes_as_it_is.then_some((csum, frame.head, rest))
    }

    /// Whether its multicast frame, without a tag, may ask for a MAC address: it is of ARP, or to a solicited-node
    /// address (RFC 4291, 2.7.1).
    pub(super) fn may_ask(&self) -> bool {
        let head = &self.head[..self.known.into()];
        self.vlan == 0 && (word(head, ADDRESS_BYTES) == Some(ARP) || head.starts_with(&[0x33, 0x33, 0xff]))
    }

    /// Whether a frame of `len` bytes, with the tag of its VLAN, is no longer than this.
    #[inline]
    pub(super) fn fits(&self, len: u32, longest: u32) -> bool {
        let tag = match self.retag(true) {
            Retag::Insert(_) => ethernet::TAG_BYTES as u32,
            Retag::Keep | Retag::Remove => 0,
        };
        len + tag <= longest
    }

    /// Whether a tag can be removed or inserted so that the guest's requests stay inside the frame: a tagged frame has
    /// bytes behind its tag, and no checksum begins before that.
    #[inline]
    pub(super) fn may_be_retagged(&self, tags: Tags) -> bool {
        let is_whole = tags == Tags::None || self.sending.len as usize >= ethernet::LOOK_BYTES;
        let asked = self.sending.request.csum;
        is_whole && asked.is_none_or(|asked| usize::from(asked.start) >= ethernet::LOOK_BYTES)
    }

    /// Why its tag cannot be removed, or a tag inserted.
    pub(super) fn not_retagged(&self) -> Malformed {
        Malformed::Tag {
            len: self.sending.len,
            least: ethernet::LOOK_BYTES,
        }
    }

    /// Copies the frame's first bytes out of guest memory. `has_checks`: a source guard or rules read all headers.
    #[inline(always)]
    pub(super) fn read_head(&mut self, vring: &Vring, buffers: &[Buffer], has_checks: bool) {
        self.read_as_much(SHORT_HEAD, vring, buffers);
        if has_checks && self.head.first_chunk().is_some_and(is_long) {
            // Reads all of it again: no byte of the first read is used.
            self.read_as_much(HEADERS_MAX, vring, buffers);
        }
    }

    #[inline(always)]
    fn read_as_much(&mut self, most: usize, vring: &Vring, buffers: &[Buffer]) {
        // At most HEADERS_MAX.
        #[allow(clippy::cast_possible_truncation)]
        let known = most.min(self.sending.len as usize) as u16;
        self.known = known;
        if let (SHORT_HEAD, Some(short)) = (most, self.head.first_chunk_mut()) {
            return read_short_head(vring, buffers, &self.sending, short);
        }
        self.head[..ethernet::LOOK_BYTES].fill(0);
        GuestFrame::new(vring, buffers, &self.sending).read_start(&mut self.head[..known.into()]);
    }

    /// Reads a plain chain, whose frame only has to be passed on, and its first bytes; false: it is not plain. Sets
    /// `sending` and the head; the caller sets the rest. Fields that only lanes with rules use keep their
    /// values.
    #[inline(always)]
    pub(super) fn read_plain(&mut self, vring: &Vring, chain: &Chain, buffers: &[Buffer]) -> bool {
        let Some(sending) = vring.plain(chain, buffers) else {
            return false;
        };
        self.sending = sending;
        self.read_as_much(SHORT_HEAD, vring, buffers);
        true
    }

    /// The flow of its frame, which chooses the pair of the destination port.
    #[inline]
    pub(super) fn flow(&self) -> Flow {
        self.head.first_chunk().map_or(Flow::default(), Flow::of)
    }

    /// The change of the tag for a receiver that gets frames of a VLAN with a tag, or without one.
    #[inline]
    fn retag(&self, with_tag: bool) -> Retag {
        match (self.is_tagged, with_tag && self.vlan != 0) {
            (false, true) => Retag::Insert(self.vlan),
            (true, false) => Retag::Remove,
            (false, false) | (true, true) => Retag::Keep,
        }
    }
}

/// Calls `act` with the frame, its tag changed for the receiver.
#[inline(always)]
pub(super) fn with_tag<R>(
    entry: &Classified,
    frame: GuestFrame<'_>,
    is_tagged: bool,
    act: impl FnOnce(GuestFrame<'_>) -> R,
) -> R {
    match entry.retag(is_tagged) {
        Retag::Keep => act(frame),
        retag => act(retag.change(&frame).frame(frame)),
    }
}

/// Copies the first bytes of a frame; those that it does not have are 0.
#[inline(always)]
fn read_short_head(vring: &Vring, buffers: &[Buffer], sending: &Sending, head: &mut [u8; SHORT_HEAD]) {
    let (at, len) = (sending.start, sending.len as usize);
    let (start, here) = buffers.get(at.buffer).map_or((0, 0), |buffer| {
        let here = (buffer.len - at.within) as usize;
        (buffer.offset + u64::from(at.within), here)
    });
    // Nearly all lie in one piece, which is inside the map, as checked when the descriptor was read.
    if here >= SHORT_HEAD {
        // A copy of constant length, which takes no call.
        let _ = vring.guest.memory.copy_from_guest(start, head);
        return;
    }
    *head = [0; SHORT_HEAD];
    if here >= len {
        let _ = guest_to_own(&vring.guest.memory, start, &mut head[..len]);
        return;
    }
    GuestFrame::new(vring, buffers, sending).read_start(&mut head[..SHORT_HEAD.min(len)]);
}
