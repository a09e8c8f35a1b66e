//! A frame on its way to somebody who has frames of a VLAN with a tag, from one who has them without, or the other way
//! round.

use device::pair::Sending;

use super::ethernet::{self, ADDRESS_BYTES, TAG_BYTES};
use super::from_guest::GuestFrame;
use super::guard::LOOK_BYTES as LONG_HEAD;

/// What is done with a frame's tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retag {
    Keep,
    Insert(u16),
    Remove,
}

/// The head of a frame whose tag is another one than the guest's.
pub(super) struct Retagged {
    sending: Sending,
    head: [u8; LONG_HEAD + TAG_BYTES],
    known: usize,
}

impl Retagged {
    #[cold]
    pub(super) fn new(frame: GuestFrame<'_>, retag: Retag) -> Self {
        let mut sending = *frame.sending;
        let mut head = [0; LONG_HEAD + TAG_BYTES];
        let (addresses, rest) = frame.head.split_at(ADDRESS_BYTES);
        head[..ADDRESS_BYTES].copy_from_slice(addresses);
        let behind = match retag {
            Retag::Insert(vlan) => {
                head[ADDRESS_BYTES..][..TAG_BYTES].copy_from_slice(&ethernet::tag(vlan));
                head[ADDRESS_BYTES + TAG_BYTES..][..rest.len()].copy_from_slice(rest);
                ADDRESS_BYTES + TAG_BYTES + rest.len()
            }
            Retag::Remove => {
                let rest = &rest[TAG_BYTES..];
                head[ADDRESS_BYTES..][..rest.len()].copy_from_slice(rest);
                ADDRESS_BYTES + rest.len()
            }
            Retag::Keep => frame.head.len(),
        };
        let shift = |at: u32| match retag {
            Retag::Insert(_) => at + TAG_BYTES as u32,
            Retag::Remove => at.saturating_sub(TAG_BYTES as u32),
            Retag::Keep => at,
        };
        sending.len = shift(sending.len);
        if let Some(checksum) = &mut sending.request.csum {
            checksum.start = u16::try_from(shift(checksum.start.into())).unwrap_or(u16::MAX);
        }
        Self {
            sending,
            head,
            known: behind,
        }
    }

    #[inline]
    pub(super) fn frame<'a>(&'a self, of: GuestFrame<'a>) -> GuestFrame<'a> {
        GuestFrame {
            sending: &self.sending,
            head: &self.head[..self.known],
            ..of
        }
    }
}
