//! A guest's frame as it is written to a tap: a virtio-net header, the checked copy of its first bytes, and the rest in
//! guest memory.

use device::pair::{HEADER_BYTES, Piece};

use crate::guest::guest_frame::GuestFrame;
use crate::nic::tap::Parts;

/// Longest header from the start of the checksummed bytes on: TCP's.
const TRANSPORT_BYTES: u32 = 60;

/// The virtio-net header of a frame in a tap.
pub(crate) fn tap_header(frame: GuestFrame<'_>) -> [u8; HEADER_BYTES as usize] {
    let request = frame.sending.request;
    let headers = request.csum.map_or(0, |at| u32::from(at.start) + TRANSPORT_BYTES);
    let headers = u16::try_from(headers.min(frame.sending.len)).unwrap_or(u16::MAX);
    let mut header = [0; HEADER_BYTES as usize];
    let (asked, _) = header.split_at_mut(10);
    asked.copy_from_slice(&request.to_header(headers));
    header
}

/// Adds the parts of a write to a tap: header, checked head, and the rest in guest memory; false: the frame has too many
/// pieces. They are not returned, because they would be copied: there is room for many.
pub(crate) fn push_frame<'a>(parts: &mut Parts<'a>, header: &'a [u8], frame: GuestFrame<'a>) -> bool {
    let is_there = parts.push_bytes(header) && (frame.head.is_empty() || parts.push_bytes(frame.head));
    let head = frame.head.len() as u32;
    let mut place = frame.place_of(head);
    let mut left = frame.sending.len.saturating_sub(head);
    while left > 0 {
        let Some(Piece { offset, len }) = place.next(frame.buffers, left) else {
            return false;
        };
        if !parts.push(frame.memory, offset, len as usize) {
            return false;
        }
        left -= len;
    }
    is_there
}
