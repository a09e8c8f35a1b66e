//! A guest's frame with other first bytes: with its tag changed, or behind the headers of a tunnel.

use device::pair::Sending;
use packet::HEADERS_MAX;
use packet::ethernet::TAG_BYTES;
use packet::tunnel::OUTER_MAX;

use crate::guest::guest_frame::GuestFrame;

/// A frame with another head than in guest memory.
pub(crate) struct NewHead {
    sending: Sending,
    head: [u8; OUTER_MAX + HEADERS_MAX + TAG_BYTES],
    known: usize,
}

impl NewHead {
    /// `parts`, one behind the other, are the new head. They differ from the frame's head only before a requested checksum,
    /// which moves by the difference in length.
    pub(crate) fn new(frame: &GuestFrame<'_>, parts: [&[u8]; 3]) -> Self {
        let mut head = [0; OUTER_MAX + HEADERS_MAX + TAG_BYTES];
        let mut known = 0;
        for part in parts {
            head[known..][..part.len()].copy_from_slice(part);
            known += part.len();
        }
        // Both lengths are at most that of `head`, which fits i16.
        let growth = known as i16 - frame.head.len() as i16;
        let mut sending = *frame.sending;
        sending.len = sending.len.saturating_add_signed(growth.into());
        if let Some(checksum) = &mut sending.request.csum {
            checksum.start = checksum.start.saturating_add_signed(growth);
        }
        Self { sending, head, known }
    }

    #[inline]
    pub(crate) fn frame<'a>(&'a self, of: GuestFrame<'a>) -> GuestFrame<'a> {
        GuestFrame {
            sending: &self.sending,
            head: &self.head[..self.known],
            ..of
        }
    }
}
