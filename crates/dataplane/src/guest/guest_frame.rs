//! A frame of a guest between the guest's queue and its destination.

use device::pair::{Cursor, Piece, Sending, Vring};
use virtqueue::{Buffer, MemoryMap};

/// A frame that the guest sends, in guest memory.
#[derive(Clone, Copy)]
pub struct GuestFrame<'a> {
    /// The guest's memory.
    pub(crate) memory: &'a MemoryMap,
    /// Longest frame that its interface carries, bytes.
    pub(crate) frame_limit: u32,
    /// The buffers of its chain.
    pub(crate) buffers: &'a [Buffer],
    pub(crate) sending: &'a Sending,
    /// A checked copy of the frame's first bytes, sent in place of those in the chain, which the guest may change;
    /// empty, if nothing was checked.
    pub(crate) head: &'a [u8],
    /// Bytes of the chain, from the frame's start, that `head` replaces.
    pub(crate) replaced: u32,
}

impl<'a> GuestFrame<'a> {
    /// A frame without a checked head.
    #[inline]
    pub(crate) fn new(vring: &'a Vring, buffers: &'a [Buffer], sending: &'a Sending) -> Self {
        Self {
            memory: &vring.guest.memory,
            frame_limit: vring.guest.frame_limit,
            buffers,
            sending,
            head: &[],
            replaced: 0,
        }
    }

    /// The same frame with other first bytes: `head`, a private copy, replaces as many bytes of it.
    #[inline]
    pub(crate) fn headed(self, head: &'a [u8]) -> Self {
        let bytes = u32::try_from(head.len()).unwrap_or(u32::MAX);
        Self {
            head,
            replaced: (bytes + self.replaced).saturating_sub(self.head.len() as u32),
            ..self
        }
    }

    /// The position in the chain of a byte of the frame that is not in `head`.
    #[inline]
    pub(crate) fn place_of(&self, byte: u32) -> Cursor {
        let mut place = self.sending.start;
        if !self.head.is_empty() {
            let head = u32::try_from(self.head.len()).unwrap_or(u32::MAX);
            place.pass(self.buffers, (byte + self.replaced).saturating_sub(head));
        } else if byte > 0 {
            place.pass(self.buffers, byte);
        }
        place
    }

    /// The bytes behind `head`, if they lie in one buffer.
    #[inline]
    pub(crate) fn rest_in_one(&self) -> Option<Piece> {
        let start = self.sending.start;
        let buffer = self.buffers.get(start.buffer)?;
        let len = (self.sending.len as usize).checked_sub(self.head.len())? as u32;
        let within = start.within + self.replaced;
        (u64::from(within) + u64::from(len) <= u64::from(buffer.len)).then(|| Piece {
            offset: buffer.offset + u64::from(within),
            len,
        })
    }
}
