//! Copy placement, guest → NIC: the segments of a GSO packet, built whole or by reference.
//!
//! Whole: each segment gets its own chunks. By reference ([`Sends::refers`](crate::nic::queue::Sends)): the payload is
//! copied once, into consecutive bytes of as few chunks as possible, and a segment is a multi-buffer frame: a
//! descriptor with its headers, then one for each chunk with some of its payload. Headers share chunks, too, each with
//! room for its metadata before it.
//!
//! So several descriptors refer to one chunk. For the second and each further one, another [`Frame`] is taken from
//! [`References`], which counts them. All completed frames go through [`References::give_back`], which returns a chunk
//! with its last frame.
//!
//! Invariants: a [`Segmenter`] fills a chunk from front to back, no two descriptors refer to the same byte, and the NIC
//! gets the queued descriptors only after the segmenter was dropped. So the kernel has no part of a chunk that is still
//! being filled.

use std::ops::Range;

use packet::segment::Plan;
use xsk::{Frame, FramePool, TxDesc, Umem, UmemOffset};

use crate::frame::bytes::UmemRange;
use crate::frame::gso::{Builder, Source};
use crate::nic::endpoint::References;

/// Headers begin at multiples of this, on separate cache lines, as frames do.
const HEADERS_ALIGNED: u32 = 64;

/// See the module's head. Builds the segments of one GSO packet.
pub(crate) struct Segmenter<'a> {
    builder: Builder<'a>,
    references: &'a mut References,
    /// Most descriptors that may be queued in all.
    most_queued: usize,
    refers: bool,
    headers: Filling,
    payload: Filling,
}

/// A chunk that is being filled from the front.
struct Filling {
    start: UmemOffset,
    /// Goes with the chunk's first descriptor.
    frame: Option<Frame>,
    taken: u32,
}

impl<'a> Segmenter<'a> {
    /// For segments of this plan. `most_queued`: descriptors that the NIC's ring has room for, queued ones included.
    /// `None`: a segment needs more descriptors than a frame may have.
    pub(crate) fn new(
        builder: Builder<'a>,
        references: &'a mut References,
        plan: &Plan,
        most_queued: usize,
    ) -> Option<Self> {
        let (umem, sends) = (builder.umem, builder.sends);
        let bytes = plan.segment_bytes_max();
        let payload = bytes - plan.header_len() as u32;
        let full = || Filling {
            start: UmemOffset::new(0),
            frame: None,
            taken: umem.chunk_size(),
        };
        // One for the headers, and one more for payload that begins anywhere in a chunk.
        let pieces = 2 + payload.div_ceil(umem.max_sent_bytes()) as usize;
        let fits_whole = bytes.div_ceil(umem.max_sent_bytes()) as usize <= sends.most_pieces;
        fits_whole.then(|| Self {
            builder,
            references,
            most_queued,
            refers: sends.refers && pieces <= sends.most_pieces,
            headers: full(),
            payload: full(),
        })
    }

    /// Whether there is room for these segments now, chunks and descriptors.
    pub(crate) fn has_room(&self, plan: &Plan, segments: Range<u32>) -> bool {
        let chunk = self.builder.umem.max_sent_bytes();
        let count = segments.len();
        let (descriptors, chunks) = if self.refers {
            let bytes = plan.payload(segments.end - 1).end - plan.payload(segments.start).start;
            // A segment whose payload crosses a chunk's end needs one more piece.
            let of_payload = bytes.div_ceil(chunk) as usize;
            let headers = self.builder.umem.chunk_size() / self.headers_bytes(plan);
            (
                2 * count + of_payload,
                of_payload + count.div_ceil(headers as usize),
            )
        } else {
            let each = plan.segment_bytes_max().div_ceil(chunk) as usize;
            (count * each, count * each)
        };
        let room = self.most_queued.saturating_sub(self.builder.outgoing.len());
        descriptors <= room && chunks <= self.builder.pool.len()
    }

    /// Builds the next segment, for which there is room, with payload from `source`; returns its length.
    #[inline]
    pub(crate) fn segment(&mut self, plan: &Plan, index: u32, source: &mut impl Source) -> u32 {
        if self.refers {
            self.refer(plan, index, source)
        } else {
            self.builder.segment(plan, index, source)
        }
    }

    #[inline(never)]
    fn refer(&mut self, plan: &Plan, index: u32, source: &mut impl Source) -> u32 {
        let first = self.builder.outgoing.len();
        let payload = plan.payload(index);
        let (header_len, bytes) = (plan.header_len() as u32, payload.end - payload.start);
        let umem = self.builder.umem;
        let all = self.headers_bytes(plan);
        if self.headers.left(umem) < all {
            self.headers.next(self.builder.pool);
        }
        let headers = UmemRange {
            start: self.headers.take(all, umem.tx_metadata_len()),
            len: header_len,
        };
        let desc = self.headers.descriptor(umem, self.references, headers);
        self.builder.outgoing.extend(desc);
        let mut left = bytes;
        while left > 0 {
            if self.payload.left(umem) == 0 {
                self.payload.next(self.builder.pool);
                self.payload.take(umem.tx_metadata_len(), 0);
            }
            let len = left.min(self.payload.left(umem));
            let start = self.payload.take(len, 0);
            source.copy(len, umem, start);
            let desc = self
                .payload
                .descriptor(umem, self.references, UmemRange { start, len });
            self.builder.outgoing.extend(desc);
            left -= len;
        }
        let descs = &mut self.builder.outgoing[first..];
        let last = descs.len().saturating_sub(1);
        descs[..last].iter_mut().for_each(|desc| desc.more = true);
        self.builder.finish(plan, index, first);
        self.builder.counters.from_guest_referred_segments.add(1);
        header_len + bytes
    }

    /// Bytes that the headers of a segment occupy in a chunk, including the metadata before them.
    #[inline]
    fn headers_bytes(&self, plan: &Plan) -> u32 {
        let bytes = self.builder.umem.tx_metadata_len() + plan.header_len() as u32;
        bytes.next_multiple_of(HEADERS_ALIGNED)
    }
}

impl Filling {
    /// Bytes of the chunk that are left.
    #[inline]
    fn left(&self, umem: &Umem) -> u32 {
        umem.chunk_size() - self.taken
    }

    /// Continues with a chunk of the pool, which has one.
    #[inline]
    fn next(&mut self, pool: &mut FramePool) {
        debug_assert!(self.frame.is_none() && !pool.is_empty());
        if let Some(frame) = pool.take() {
            (self.start, self.taken) = (frame.offset(), 0);
            self.frame = Some(frame);
        }
    }

    /// Takes the next `bytes`; returns the position behind the first `skip` of them.
    #[inline]
    fn take(&mut self, bytes: u32, skip: u32) -> UmemOffset {
        let at = UmemOffset::new(self.start.get() + u64::from(self.taken + skip));
        self.taken += bytes;
        at
    }

    /// A descriptor for bytes that were taken.
    #[inline]
    fn descriptor(&mut self, umem: &Umem, references: &mut References, bytes: UmemRange) -> Option<TxDesc> {
        let frame = match self.frame.take() {
            Some(frame) => frame,
            None => references.share(umem, self.start)?,
        };
        Some(TxDesc {
            frame,
            offset: bytes.start,
            len: bytes.len,
            more: false,
            metadata: false,
        })
    }
}

#[cfg(test)]
#[path = "segmenter_tests.rs"]
mod tests;
