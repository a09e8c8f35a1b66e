//! A batch of received frames that is looked at before it is delivered: checksums judged, segments coalesced.
//!
//! Frames leave the NIC's ring a batch at a time, and the next batch is not taken before this one is delivered: nothing is held back for
//! more to come, and what the guest has no buffers for is at most one batch, while the rest waits in the ring.
//! Chunks are given back when the whole batch is delivered.

use offload::coalesce::{Batch, MOST_FRAMES, Position, Rules, Run};
use offload::verify::Verdict;
use xsk::{Frame, FramePool, RxDesc, Umem, UmemOffset};

use super::copied;
use super::to_guest::is_glued;
use crate::nic::queue::Nic;
use crate::switch::copy_bytes::received_bytes_mut;
use crate::switch::received::{self, Looks};
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::QueuePair;

/// Bytes in the UMEM: where, and how many.
pub(super) type Range = (UmemOffset, u32);

/// A frame of the batch: its pieces.
#[derive(Clone, Copy, Default)]
struct Place {
    first: u16,
    pieces: u16,
}

/// See the module's head.
pub(super) struct Incoming {
    looks: Looks,
    /// Longest frame there is, bytes.
    frame_limit: u32,
    batch: Batch,
    position: Position,
    places: [Place; MOST_FRAMES],
    /// All pieces of the batch, then those of a frame whose last piece has not come yet.
    pieces: Vec<RxDesc>,
    /// How many of `pieces` belong to whole frames.
    whole: usize,
    /// The chunks are the pool's.
    borrowed: bool,
}

impl Incoming {
    /// For a guest; `None` if frames can be delivered without a look at them.
    pub(super) fn of(guest: &QueuePair) -> Option<Box<Self>> {
        let looks = Looks::of(guest)?;
        Some(Box::new(Self {
            looks,
            frame_limit: guest.frame_limit,
            batch: Batch::new(rules(&guest.offloads)),
            position: Position::default(),
            places: [Place::default(); MOST_FRAMES],
            pieces: Vec::with_capacity(2 * MOST_FRAMES),
            whole: 0,
            borrowed: false,
        }))
    }

    /// Frames that wait to be delivered, those coalesced counted as one.
    pub(super) fn waiting(&self) -> usize {
        let (mut position, mut count) = (self.position, 0);
        while let Some(run) = self.batch.run(&position, u32::MAX) {
            self.batch.advance(&mut position, &run);
            count += 1;
        }
        count
    }

    /// Nothing is in hand, not even a piece.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Takes a batch from the NIC. The last one has been given back.
    #[inline]
    pub(super) fn fill<N: Nic>(&mut self, nic: &mut N, umem: &Umem, counters: &PairCounters) {
        for piece in nic.from_nic(MOST_FRAMES) {
            let whole = !piece.more;
            self.pieces.push(piece);
            if whole {
                self.add(umem, counters);
            }
        }
    }

    /// Takes frames of pairs that are off; as if they had been received, in chunks from the pool. Nothing else is in hand.
    pub(super) fn fill_spilled(
        &mut self,
        mut next: impl FnMut() -> Option<Vec<u8>>,
        pool: &mut FramePool,
        (umem, counters): (&Umem, &PairCounters),
    ) {
        while self.batch.len() < MOST_FRAMES && pool.len() >= crate::nic::queue::MOST_PIECES {
            let Some(frame) = next() else { return };
            self.borrowed = true;
            let pieces = frame.chunks(umem.max_sent_bytes() as usize);
            let last = pieces.len().saturating_sub(1);
            for (at, bytes) in pieces.enumerate() {
                let Some(chunk) = pool.take() else { break };
                let sent = copied(chunk, bytes, umem);
                self.pieces.push(RxDesc {
                    frame: sent.frame,
                    data: sent.offset,
                    len: sent.len,
                    more: at < last,
                });
            }
            self.add(umem, counters);
        }
    }

    /// The pieces behind those of whole frames have become one.
    #[inline]
    fn add(&mut self, umem: &Umem, counters: &PairCounters) {
        let number = self.batch.len();
        let Some(place) = self.places.get_mut(number) else {
            return;
        };
        let pieces = &mut self.pieces[self.whole..];
        if is_glued(pieces, self.frame_limit) {
            // Its chunks go back with those of the batch.
            counters.to_guest_in_pieces.add(1);
            self.whole += pieces.len();
            return;
        }
        // Pieces of a batch are few.
        #[allow(clippy::cast_possible_truncation)]
        let at = Place {
            first: self.whole as u16,
            pieces: pieces.len() as u16,
        };
        *place = at;
        self.whole += pieces.len();
        let len: u32 = pieces.iter().map(|piece| piece.len).sum();
        let headers = received::headers(pieces, umem);
        let looks = self.looks;
        self.batch
            .add(headers, len, |layers| looks.judge(headers, layers, pieces, umem));
        if !looks.tell
            && let (Verdict::Partial, Some(layers)) = self.batch.verdict(number)
        {
            received::complete(pieces, umem, layers);
            counters.to_guest_checksums_completed.add(1);
        }
    }

    /// What to deliver next, of at most `room` bytes if that can be.
    #[inline]
    pub(super) fn run(&self, room: u32) -> Option<Run> {
        self.batch.run(&self.position, room)
    }

    /// `run` was delivered, or dropped.
    #[inline]
    pub(super) fn advance(&mut self, run: &Run) {
        self.batch.advance(&mut self.position, run);
    }

    /// The virtio-net header of a run, but for `num_buffers`.
    #[inline]
    pub(super) fn header(&self, run: &Run) -> [u8; 10] {
        if self.looks.tell {
            self.batch.header(run).to_bytes()
        } else {
            [0; 10]
        }
    }

    /// The only piece of a run of one frame in one piece.
    #[inline]
    pub(super) fn single(&self, run: &Run) -> Option<&RxDesc> {
        let place = self.places[run.first()];
        (run.frames() == 1 && place.pieces == 1).then(|| &self.pieces[usize::from(place.first)])
    }

    /// Makes a run what is delivered, and lists where it lies.
    pub(super) fn assemble(&mut self, run: &Run, umem: &Umem, ranges: &mut Vec<Range>) {
        let first = usize::from(self.places[run.first()].first);
        if run.frames() > 1
            && let Some(bytes) = received_bytes_mut(umem, &mut self.pieces[first])
        {
            self.batch.rewrite(run, bytes);
        }
        ranges.clear();
        for (number, bytes) in self.batch.members(run) {
            let mut skip = bytes.start;
            for piece in self.pieces_of(number) {
                let skipped = skip.min(piece.len);
                skip -= skipped;
                if piece.len > skipped {
                    let at = UmemOffset::new(piece.data.get() + u64::from(skipped));
                    ranges.push((at, piece.len - skipped));
                }
            }
        }
    }

    fn pieces_of(&self, number: usize) -> &[RxDesc] {
        let place = self.places[number];
        &self.pieces[usize::from(place.first)..][..usize::from(place.pieces)]
    }

    /// Every frame in hand that was not delivered, to be delivered by somebody else: its bytes.
    pub(super) fn take_rest(&mut self, umem: &Umem, mut give: impl FnMut(Vec<u8>)) {
        // No room: a run is one frame.
        while let Some(run) = self.run(0) {
            give(super::to_guest::gather(self.pieces_of(run.first()), umem));
            self.advance(&run);
        }
    }

    /// All chunks in hand, whosesoever they were.
    pub(super) fn into_chunks(self) -> impl Iterator<Item = Frame> {
        self.pieces.into_iter().map(|piece| piece.frame)
    }

    /// The batch is delivered: its chunks go to where they came from.
    #[inline]
    pub(super) fn give_back(&mut self, empty: &mut Vec<Frame>, pool: &mut FramePool) {
        let chunks = self.pieces.drain(..self.whole).map(|piece| piece.frame);
        if self.borrowed {
            pool.extend(chunks);
        } else {
            empty.extend(chunks);
        }
        (self.whole, self.borrowed) = (0, false);
        self.position = Position::default();
        self.batch.clear();
    }
}

/// What may be merged for a guest.
fn rules(offloads: &Offloads) -> Rules {
    Rules {
        tcp4: offloads.guest_tso4,
        tcp6: offloads.guest_tso6,
        ecn: offloads.guest_ecn,
        udp4: offloads.guest_uso4,
        udp6: offloads.guest_uso6,
    }
}
