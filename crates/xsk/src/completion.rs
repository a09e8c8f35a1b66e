//! The completion ring: frames that were sent come back.

use crate::frame::Frame;
use crate::ring::{Consumer, Taken};
use crate::umem::AddressCodec;

/// The completion ring. The kernel produces, we consume.
#[derive(Debug)]
pub struct CompletionRing {
    ring: Consumer<u64>,
    codec: AddressCodec,
}

impl CompletionRing {
    pub(crate) fn new(ring: Consumer<u64>, codec: AddressCodec) -> Self {
        Self { ring, codec }
    }

    /// The number of entries that fit.
    #[inline]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The number of completed frames now.
    #[inline]
    pub fn available(&self) -> u32 {
        self.ring.available()
    }

    /// Takes up to `wanted` completed frames, fewer if there are fewer.
    ///
    /// Each is the [`Frame`] that was pushed into the tx ring with it; the order may differ.
    #[inline]
    pub fn peek(&mut self, wanted: u32) -> CompletionBatch<'_> {
        CompletionBatch {
            codec: self.codec,
            entries: self.ring.peek(wanted),
        }
    }
}

/// Completed frames. Those not taken when it is dropped stay in the ring.
#[derive(Debug)]
#[must_use]
pub struct CompletionBatch<'a> {
    codec: AddressCodec,
    entries: Taken<'a, u64>,
}

impl Iterator for CompletionBatch<'_> {
    type Item = Frame;

    #[inline]
    fn next(&mut self) -> Option<Frame> {
        Some(self.codec.frame(self.entries.next()?))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.entries.len() as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for CompletionBatch<'_> {}
