//! Checksums of received frames: verification for the guest, and completion of partial ones.
//!
//! | the guest accepted GUEST_CSUM | the checksum is | the frame |
//! |---|---|---|
//! | yes | valid | is marked DATA_VALID: the guest need not verify it |
//! | yes | partial | is marked NEEDS_CSUM, with the position of the checksum |
//! | no | partial | has its checksum completed here |
//! | | invalid, missing, of another protocol, of a fragment | is delivered as it is, unmarked |
//!
//! In direct placement frames are in the guest's memory. There a valid checksum is not reported: that needs a sum over
//! a private copy of the whole frame, which costs the worker as much as it saves the guest. Partial checksums are
//! handled, with a private copy of the headers, or of the frame if its checksum has to be completed. If the guest
//! changes the frame meanwhile, only that guest loses.
//!
//! Partial checksums arrive from interfaces whose other end is a stack on the same machine ([`Looks::partial`]: veth);
//! see [`packet::verify`] for how a partial one is distinguished from a valid one. Without GUEST_CSUM and on other
//! interfaces nothing is verified.
//!
//! The partial checksum of a packet inside VXLAN or Geneve ([`packet::tunnel`]) is completed for every guest: few
//! drivers expect NEEDS_CSUM to point there. The outer checksum is valid in that case.
//!
//! Not handled, because nothing in the frame shows them: SCTP's checksum, which local senders leave out as well, and
//! partial checksums inside of other tunnels. `ethtool -K PEER tx off` makes a sender on the other end of a veth
//! complete them.

#![allow(unsafe_code)]

use packet::HEADERS_MAX;
use packet::checksum::{self, Sum};
use packet::layers::{self, Layers};
use packet::segment::Request;
use packet::tunnel::{self, TUNNEL_HEADERS_MAX};
use packet::verify::{self, Unfinished, Verdict};
use xsk::{RxDesc, Umem, UmemOffset};

use crate::frame::bytes::{UmemRange, received_bytes, received_bytes_mut};
use device::counters::PairCounters;
use device::pair::Vring;

/// Longest frame of which a private copy is made, bytes: a chunk.
const LONGEST_COPY: usize = 4096;

/// What to look for in received frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Looks {
    /// Partial checksums may occur.
    pub(crate) partial: bool,
    /// The guest accepts the result of the verification.
    pub(crate) tell: bool,
}

impl Looks {
    /// For frames to a guest; `None`: the guest accepts no result, and nothing has to be completed.
    pub(crate) fn of(vring: &Vring, partial: bool) -> Option<Self> {
        let looks = Self {
            partial,
            tell: vring.guest.offloads.guest_csum,
        };
        (looks.partial || looks.tell).then_some(looks)
    }

    /// Verifies the checksum of a frame in chunks of the daemon; also returns a checksum inside a tunnel that has to be
    /// completed first. `first`: the bytes of the frame's first piece.
    #[inline]
    pub(crate) fn verify(
        self,
        first: &[u8],
        layers: &Layers,
        pieces: &[RxDesc],
        umem: &Umem,
    ) -> (Verdict, Option<Unfinished>) {
        if self.partial
            && let Some((inner, verdict)) = tunnel::unfinished(first, layers)
        {
            let verdict = if self.tell { verdict } else { Verdict::Unknown };
            return (verdict, Some(inner));
        }
        let verdict = match self.tell {
            true => verify::verify(first, layers, self.partial, || {
                let covered = Unfinished::of(layers);
                let sum = match pieces {
                    [_] => first
                        .get(covered.at.start.into()..covered.end as usize)
                        .map(Sum::of),
                    _ => sum_of_pieces(pieces, umem, &covered),
                };
                sum.unwrap_or_default()
            }),
            false => verify::is_partial(first, layers),
        };
        (verdict, None)
    }
}

/// A partial checksum in a frame that others may still write, or that several guests get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Partial {
    /// The frame's own. A guest that accepted GUEST_CSUM completes it itself.
    Own(Unfinished),
    /// That of the packet inside a tunnel.
    Inner(Unfinished),
}

impl Partial {
    /// Looks for one. `known`: the frame's first bytes, [`TUNNEL_HEADERS_MAX`] of them or all.
    pub(crate) fn find(known: &[u8], layers: &Layers) -> Option<Self> {
        match verify::is_partial(known, layers) {
            Verdict::Partial => Some(Self::Own(Unfinished::of(layers))),
            _ => tunnel::unfinished(known, layers).map(|(inner, _)| Self::Inner(inner)),
        }
    }
}

/// Looks at frames that lie in memory which others may write, by private copies.
pub(crate) struct PrivateLook {
    looks: Looks,
    copy: Box<[u8; LONGEST_COPY]>,
}

impl PrivateLook {
    /// For frames to a guest; `None`: no partial checksums occur.
    pub(crate) fn of(vring: &Vring, partial: bool) -> Option<Self> {
        let looks = Looks::of(vring, partial)?;
        looks.partial.then(|| Self {
            looks,
            copy: Box::new([0; LONGEST_COPY]),
        })
    }

    /// Looks at a frame, and completes its checksum if that is needed. Returns the virtio-net header for it, except for
    /// `num_buffers`.
    pub(crate) fn look(&mut self, umem: &Umem, frame: UmemRange, counters: &PairCounters) -> [u8; 10] {
        let request = match self.find(umem, frame) {
            Some(Partial::Own(own)) if self.looks.tell => Request::of_partial(own.at),
            Some(Partial::Own(unfinished) | Partial::Inner(unfinished)) => {
                if self.complete(umem, frame, &unfinished).is_some() {
                    counters.to_guest_checksums_completed.add(1);
                }
                Request::default()
            }
            None => Request::default(),
        };
        request.to_header(0)
    }

    /// Looks for a partial checksum in a frame, of which the headers are copied.
    fn find(&mut self, umem: &Umem, frame: UmemRange) -> Option<Partial> {
        let known = HEADERS_MAX.min(frame.len as usize);
        umem.read(frame.start, &mut self.copy[..known])?;
        let layers = layers::parse(&self.copy[..known], frame.len)?;
        if !tunnel::is_tunnel(&self.copy[..known], &layers) {
            return Partial::find(&self.copy[..known], &layers);
        }
        // Does not read again the bytes from which the layers were parsed.
        let more = TUNNEL_HEADERS_MAX.min(frame.len as usize);
        let behind = UmemOffset::new(frame.start.get() + known as u64);
        umem.read(behind, &mut self.copy[known..more])?;
        Partial::find(&self.copy[..more], &layers)
    }

    /// Completes a partial checksum. `None`: the frame is too long or inconsistent, and nothing is written.
    fn complete(&mut self, umem: &Umem, frame: UmemRange, unfinished: &Unfinished) -> Option<()> {
        let copy = self.copy.get_mut(..frame.len as usize)?;
        umem.read(frame.start, copy)?;
        let packet = copy.get_mut(..unfinished.end as usize)?;
        checksum::complete(packet, unfinished.at).ok()?;
        let at = unfinished.at.field();
        umem.write(
            UmemOffset::new(frame.start.get() + at as u64),
            packet.get(at..at + 2)?,
        )
    }
}

/// The bytes of a frame's first piece, in a chunk of the daemon.
#[inline]
pub(crate) fn first_bytes<'a>(pieces: &'a [RxDesc], umem: &'a Umem) -> &'a [u8] {
    // SAFETY: received pieces ([`Arrivals`](crate::backend::arrivals::Arrivals)) go back to the NIC only after they were
    // delivered.
    let bytes = pieces
        .first()
        .and_then(|piece| unsafe { received_bytes(umem, piece) });
    bytes.unwrap_or_default()
}

/// The sum of what a checksum covers; `None` if a piece is not where it should be.
#[cold]
fn sum_of_pieces(pieces: &[RxDesc], umem: &Umem, of: &Unfinished) -> Option<Sum> {
    let mut all = Sum::default();
    let (mut skip, mut left) = (
        usize::from(of.at.start),
        of.end as usize - usize::from(of.at.start),
    );
    let mut odd = false;
    for piece in pieces {
        // SAFETY: as in `first_bytes`.
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

/// Completes a partial checksum of a frame in chunks of the daemon.
#[inline(never)]
pub(crate) fn complete(pieces: &mut [RxDesc], umem: &Umem, unfinished: &Unfinished) {
    // The field holds the sum of the pseudo-header, so the sum over it is that of all.
    let Some(sum) = sum_of_pieces(pieces, umem, unfinished) else {
        return;
    };
    let at = unfinished.at;
    let Some(piece) = pieces.first_mut() else { return };
    // SAFETY: as in `first_bytes`; the piece is borrowed mutably.
    if let Some(bytes) = unsafe { received_bytes_mut(umem, piece) }
        && let Some(place) = bytes.get_mut(at.field()..at.field() + 2)
    {
        place.copy_from_slice(&at.stored(sum));
    }
}
