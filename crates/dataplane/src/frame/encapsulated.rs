//! A guest's frame behind the headers of a tunnel.

use device::pair::Sending;
use packet::HEADERS_MAX;
use packet::ethernet::TAG_BYTES;
use packet::tunnel::OUTER_MAX;

use crate::guest::guest_frame::GuestFrame;

/// The head of a frame, with the headers in front.
pub(crate) struct Encapsulated {
    sending: Sending,
    head: [u8; OUTER_MAX + HEADERS_MAX + TAG_BYTES],
    known: usize,
}

impl Encapsulated {
    /// `outer`: the headers. A requested checksum moves with the bytes that it covers.
    pub(crate) fn new(frame: GuestFrame<'_>, outer: &[u8]) -> Self {
        let mut head = [0; OUTER_MAX + HEADERS_MAX + TAG_BYTES];
        let known = outer.len() + frame.head.len();
        head[..outer.len()].copy_from_slice(outer);
        head[outer.len()..known].copy_from_slice(frame.head);
        let mut sending = *frame.sending;
        sending.len += outer.len() as u32;
        if let Some(checksum) = &mut sending.request.csum {
            checksum.start = checksum.start.saturating_add(outer.len() as u16);
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
