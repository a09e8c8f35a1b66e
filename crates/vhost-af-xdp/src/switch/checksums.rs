//! What is done about the checksums of received frames.
//!
//! | the guest accepted GUEST_CSUM | the checksum is | the frame |
//! |---|---|---|
//! | yes | right | is marked DATA_VALID: the guest need not look |
//! | yes | partial | is marked NEEDS_CSUM, with the place of the checksum |
//! | no | partial | has its checksum completed here |
//! | | wrong, missing, of another protocol, of a fragment | is passed as it is, unmarked |
//!
//! In direct placement frames lie in the guest's memory. There a right checksum is not confirmed: it would have to be
//! added up from a private copy of the whole frame, which costs the worker as much as it saves the guest. Partial
//! ones are handled, with a private copy of the headers, or of the frame where it is to be completed. What the guest
//! changes meanwhile is its own loss.
//!
//! Partial checksums come from interfaces whose other end is a stack on the same machine ([`Looks::partial`]: veth);
//! see [`offload::verify`] for how one is told from a right one. Without GUEST_CSUM and on another interface nobody
//! looks.
//!
//! Not handled, because nothing in the frame tells: SCTP's checksum, which local senders leave out as well, and partial
//! checksums inside of tunnels. A sender on the other end of a veth can be told to finish them: `ethtool -K PEER tx
//! off`.

#![allow(unsafe_code)]

use offload::checksum::{self, ChecksumAt, Sum};
use offload::coalesce::NetHeader;
use offload::packet::{self, HEADERS_MAX, Layers};
use offload::verify::{self, Verdict};
use xsk::{RxDesc, Umem, UmemOffset};

use super::bytes::{UmemRange, received_bytes, received_bytes_mut};
use device::counters::PairCounters;
use device::pair::QueuePair;

/// Longest frame of which a private copy is made, bytes: a chunk.
const LONGEST_COPY: usize = 4096;

/// What to look for in received frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Looks {
    /// Partial checksums may occur.
    pub(crate) partial: bool,
    /// The guest is told what is known of the checksum.
    pub(crate) tell: bool,
}

impl Looks {
    /// For a guest to which frames come; `None`: nobody wants to know, and nothing has to be done.
    pub(crate) fn of(guest: &QueuePair, partial: bool) -> Option<Self> {
        let looks = Self {
            partial,
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

/// Looks at frames that lie in memory which others may write, by private copies.
pub(crate) struct PrivateLook {
    looks: Looks,
    copy: Box<[u8; LONGEST_COPY]>,
    /// End of the IP packet in the frame last looked at.
    end: u32,
}

impl PrivateLook {
    /// For a guest to which frames come; `None`: no partial checksums occur.
    pub(crate) fn of(guest: &QueuePair, partial: bool) -> Option<Self> {
        let looks = Looks::of(guest, partial)?;
        looks.partial.then(|| Self {
            looks,
            copy: Box::new([0; LONGEST_COPY]),
            end: 0,
        })
    }

    /// Looks at a frame, and completes its checksum if that has to be; the virtio-net header that it gets, but for
    /// `num_buffers`.
    pub(crate) fn look(&mut self, umem: &Umem, frame: UmemRange, counters: &PairCounters) -> [u8; 10] {
        let header = self.headers(umem, frame).unwrap_or(NetHeader::NONE);
        if header.flags == 0 || self.looks.tell {
            return header.to_bytes();
        }
        if self.complete(umem, frame, &header).is_some() {
            counters.to_guest_checksums_completed.add(1);
        }
        NetHeader::NONE.to_bytes()
    }

    /// What is to be said of a frame, of which the headers are copied.
    fn headers(&mut self, umem: &Umem, frame: UmemRange) -> Option<NetHeader> {
        let headers = &mut self.copy[..HEADERS_MAX.min(frame.len as usize)];
        umem.read(frame.start, headers)?;
        let layers = packet::parse(headers, frame.len)?;
        let verdict = verify::is_partial(headers, &layers);
        // Where the packet ends, for `complete`.
        self.end = layers.ip_len_end;
        Some(NetHeader::of_frame(&layers, verdict))
    }

    /// Completes a partial checksum; `None`, and nothing written, if the frame is longer than any may be.
    fn complete(&mut self, umem: &Umem, frame: UmemRange, header: &NetHeader) -> Option<()> {
        let copy = self.copy.get_mut(..frame.len as usize)?;
        umem.read(frame.start, copy)?;
        let packet = copy.get_mut(..self.end as usize)?;
        let at = ChecksumAt {
            start: header.csum_start,
            offset: header.csum_offset,
        };
        checksum::complete(packet, at).ok()?;
        let at = at.field();
        umem.write(
            UmemOffset::new(frame.start.get() + at as u64),
            packet.get(at..at + 2)?,
        )
    }
}

/// The first bytes of a frame in chunks of our own, as many as a parser wants.
#[inline]
pub(crate) fn headers<'a>(pieces: &'a [RxDesc], umem: &'a Umem) -> &'a [u8] {
    // SAFETY: pieces of frames in hand ([`Arrivals`](super::arrivals::Arrivals)) are given back after they were
    // delivered.
    let bytes = pieces
        .first()
        .and_then(|piece| unsafe { received_bytes(umem, piece) });
    let bytes = bytes.unwrap_or_default();
    &bytes[..bytes.len().min(HEADERS_MAX)]
}

/// The sum from the transport header to the end of the packet; `None` if a piece is not where it should be.
#[inline]
fn sum(pieces: &[RxDesc], umem: &Umem, layers: &Layers) -> Option<Sum> {
    if let [piece] = pieces {
        // SAFETY: as in `headers`.
        let bytes = unsafe { received_bytes(umem, piece) }?;
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
        // SAFETY: as in `headers`.
        let bytes = unsafe { received_bytes(umem, piece) }?;
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
    let at = layers.checksum_at();
    let Some(piece) = pieces.first_mut() else { return };
    // SAFETY: as in `headers`; it is borrowed alone.
    if let Some(bytes) = unsafe { received_bytes_mut(umem, piece) }
        && let Some(place) = bytes.get_mut(at.field()..at.field() + 2)
    {
        place.copy_from_slice(&at.stored(sum));
    }
}
