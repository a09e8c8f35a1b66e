//! The rx ring: frames that the kernel received.

use crate::desc::{CONTINUED, Descriptor};
use crate::frame::Frame;
use crate::ring::{Consumer, Heap, Taken};
use crate::umem::AddressCodec;
use crate::units::UmemOffset;

/// The rx ring. The kernel produces, we consume.
#[derive(Debug)]
pub struct RxRing {
    ring: Consumer<Descriptor>,
    codec: AddressCodec,
}

impl RxRing {
    pub(crate) fn new(ring: Consumer<Descriptor>, codec: AddressCodec) -> Self {
        Self { ring, codec }
    }

    /// A ring with no entries, for a socket that only sends.
    pub(crate) fn absent(codec: AddressCodec) -> Self {
        Self::new(Consumer::heap(Heap::new(0), 0), codec)
    }

    /// The number of entries that fit.
    #[inline]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The number of descriptors to be read now.
    #[inline]
    pub fn available(&self) -> u32 {
        self.ring.available()
    }

    /// Takes up to `wanted` descriptors, fewer if there are fewer.
    #[inline]
    pub fn peek(&mut self, wanted: u32) -> RxBatch<'_> {
        RxBatch {
            codec: self.codec,
            entries: self.ring.peek(wanted),
        }
    }
}

/// A received frame, or a piece of one.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the frame in it would be lost"]
pub struct RxDesc {
    /// The chunk, as it was given to the fill ring (aligned mode: rounded down to the chunk).
    pub frame: Frame,
    /// Where the bytes start.
    pub data: UmemOffset,
    /// How many bytes there are.
    pub len: u32,
    /// Whether the frame goes on in the next descriptor (only with multi-buffer).
    pub more: bool,
}

/// Received descriptors. Those not taken when it is dropped stay in the ring.
#[derive(Debug)]
#[must_use]
pub struct RxBatch<'a> {
    codec: AddressCodec,
    entries: Taken<'a, Descriptor>,
}

impl Iterator for RxBatch<'_> {
    type Item = RxDesc;

    #[inline]
    fn next(&mut self) -> Option<RxDesc> {
        let Descriptor {
            address,
            len,
            options,
        } = self.entries.next()?;
        let (frame, data) = (self.codec.frame(address), self.codec.data(address));
        Some(RxDesc {
            frame,
            data,
            len,
            more: options & CONTINUED != 0,
        })
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.entries.len() as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for RxBatch<'_> {}
