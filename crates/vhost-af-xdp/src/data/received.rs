//! What is done about the checksums of received frames.
//!
//! | the guest accepted GUEST_CSUM | the checksum is | the frame |
//! |---|---|---|
//! | yes | right | is marked DATA_VALID: the guest need not look |
//! | yes | partial | is marked NEEDS_CSUM, with the place of the checksum |
//! | no | partial | has its checksum completed here |
//! | | wrong, missing, of another protocol, of a fragment | is passed as it is, unmarked |
//!
//! Partial checksums come from interfaces whose other end is a stack on the same machine ([`Looks::partial`]: veth); see
//! [`offload::verify`] for how one is told from a right one. Without GUEST_CSUM and on another interface nobody looks.
//!
//! Not handled, because nothing in the frame tells: SCTP's checksum, which local senders leave out as well, and partial
//! checksums inside of tunnels. A sender on the other end of a veth can be told to finish them: `ethtool -K PEER tx off`.

use offload::checksum::Sum;
use offload::packet::{self, HEADERS_MAX, Layers};
use offload::verify::{self, Verdict};
use xsk::{RxDesc, Umem};

use super::copy_bytes::{received_bytes, received_bytes_mut};
use super::guest::GuestSide;

/// What to look for in received frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Looks {
    /// Partial checksums may occur.
    pub(crate) partial: bool,
    /// The guest is told what is known of the checksum.
    pub(crate) tell: bool,
}

impl Looks {
    /// For a guest; `None`: nobody wants to know, and nothing has to be done.
    pub(crate) fn of(guest: &GuestSide) -> Option<Self> {
        let looks = Self {
            partial: guest.partial_checksums,
            tell: guest.offloads.guest_csum,
        };
        (looks.partial || looks.tell).then_some(looks)
    }

    /// What the checksum of a frame in chunks of our own says. `headers`: bytes of its first piece.
    #[inline]
    pub(crate) fn judge(self, headers: &[u8], layers: &Layers, pieces: &[RxDesc], umem: &Umem) -> Verdict {
        if self.tell {
            verify::verify(headers, layers, self.partial, || {
                sum(pieces, umem, layers).unwrap_or_default()
            })
        } else {
            verify::is_partial(headers, layers)
        }
    }
}

/// The first bytes of a frame in chunks of our own, as many as a parser wants.
#[inline]
pub(crate) fn headers<'a>(pieces: &'a [RxDesc], umem: &'a Umem) -> &'a [u8] {
    let bytes = pieces.first().and_then(|piece| received_bytes(umem, piece));
    let bytes = bytes.unwrap_or_default();
    &bytes[..bytes.len().min(HEADERS_MAX)]
}

/// The sum from the transport header to the end of the packet; `None` if a piece is not where it should be.
#[inline]
fn sum(pieces: &[RxDesc], umem: &Umem, layers: &Layers) -> Option<Sum> {
    if let [piece] = pieces {
        let bytes = received_bytes(umem, piece)?;
        let transport = bytes.get(usize::from(layers.transport)..layers.ip_len_end as usize)?;
        return Some(Sum::of(transport));
    }
    sum_of_pieces(pieces, umem, layers)
}

#[cold]
fn sum_of_pieces(pieces: &[RxDesc], umem: &Umem, layers: &Layers) -> Option<Sum> {
    let mut all = Sum::default();
    let (mut skip, mut left) = (
        usize::from(layers.transport),
        layers.ip_len_end as usize - usize::from(layers.transport),
    );
    let mut odd = false;
    for piece in pieces {
        let bytes = received_bytes(umem, piece)?;
        let bytes = bytes.get(skip.min(bytes.len())..)?;
        let bytes = &bytes[..bytes.len().min(left)];
        let sum = Sum::of(bytes);
        all = all + if odd { sum.swapped() } else { sum };
        odd ^= bytes.len() % 2 == 1;
        left -= bytes.len();
        skip = 0;
    }
    (left == 0).then_some(all)
}

/// Completes a partial checksum; the frame lies in chunks of our own.
#[inline(never)]
pub(crate) fn complete(pieces: &mut [RxDesc], umem: &Umem, layers: &Layers) {
    // The field holds the sum of the pseudo-header, so the sum over it is that of all.
    let Some(sum) = sum(pieces, umem, layers) else {
        return;
    };
    let field = checksum_field(sum, layers);
    let at = usize::from(layers.transport + layers.transport_kind.checksum_offset());
    if let Some(bytes) = pieces
        .first_mut()
        .and_then(|piece| received_bytes_mut(umem, piece))
        && let Some(place) = bytes.get_mut(at..at + 2)
    {
        place.copy_from_slice(&field);
    }
}

/// The checksum field for a sum over packet and pseudo-header; UDP has no zero (RFC 768).
fn checksum_field(sum: Sum, layers: &Layers) -> [u8; 2] {
    match (sum.complement(), layers.transport_kind) {
        (0, packet::Transport::Udp) => [0xff, 0xff],
        (field, _) => field.to_be_bytes(),
    }
}
