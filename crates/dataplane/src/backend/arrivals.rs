//! From a NIC queue to a guest: takes received frames, checks them where that is needed, and delivers them.
//!
//! Frames leave the NIC's ring a batch at a time. The next batch is not taken before this one is delivered, and no
//! frame is held back to be merged with later ones. So at most one batch waits here for the guest's buffers, and the
//! rest waits in the ring: back-pressure reaches the kernel, which counts what it then drops (`rx_ring_full`,
//! `rx_fill_ring_empty_descs`). Chunks return to the NIC when the whole batch is delivered. Until then they are kept in
//! the queue ([`NicQueue::received`]), where the guest's next lane finds them.
//!
//! A frame in one piece that no other one can be merged with goes straight into the guest's buffers, unless frames
//! before it wait. Without rules and metadata, and while a rate limit has room for a batch, one loop does so
//! (`deliver_each`), also for frames from an inbox of an uplink; otherwise each frame is checked first (`take_batch`). A
//! frame that may be merged goes into a batch, with the frames behind it.

#![allow(unsafe_code)]

use std::collections::VecDeque;

use device::counters::PairCounters;
use device::meter;
use device::offloads::Offloads;
use device::pair::{Fault, HEADER_BYTES, Vring};
use packet::HEADERS_MAX;
use packet::coalesce::{Batch, MOST_FRAMES, Position, Rules, Run};
use packet::verify::{Unfinished, Verdict};
use xsk::metadata::Hints;
use xsk::{Frame, RxDesc, Umem, UmemOffset};

use crate::backend::metadata_reader::MetadataReader;
use crate::frame::bytes::{UmemRange, received_bytes_mut};
use crate::frame::checksums::{self, Looks};
use crate::frame::retag::{put_tag_back, untag};
use crate::guest::rx_queue::Admission;
use crate::guest::to_guest::{Delivery, Fit, IN_ONE_BUFFER, NO_OFFLOAD, UmemBytes, with_buffers};
use crate::lane::limits::BATCH;
use crate::nic::chunk_tracker::{ChunkTracker, Unexpected};
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::Nic;
use crate::policy::filter::read_received;
use crate::policy::rate_limit::{Cost, Policer};

/// The pieces of a frame of the batch.
#[derive(Clone, Copy, Default)]
struct FramePieces {
    /// Index of the first in [`NicQueue::received`].
    first: u16,
    pieces: u16,
}

/// What is known of all received frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Longest possible frame, bytes.
    pub frame_limit: u32,
    /// They may come from a stack on the same machine, which leaves checksums unfinished.
    pub partial_checksums: bool,
}

impl Origin {
    /// Frames to a guest come from the interface that its own frames leave by.
    fn of(vring: &Vring) -> Self {
        Self {
            frame_limit: vring.guest.frame_limit,
            partial_checksums: vring.guest.partial_checksums,
        }
    }
}

/// Whether filter rules and rate limit admit a frame, by its first piece and its metadata; counts a denied one.
#[cold]
fn admits(
    admission: &mut Admission<'_>,
    piece: &RxDesc,
    hints: &Hints,
    umem: &Umem,
    counters: &PairCounters,
) -> bool {
    if let Some(filter) = &mut admission.filter {
        let mut head = [0; HEADERS_MAX];
        let (head, facts) = read_received(umem, piece, hints, &mut head);
        if !filter.allows(head, facts, counters) {
            return false;
        }
    }
    admission.policer.allows(|| Cost::frame(piece.len), counters)
}

/// The virtio-net header of a frame in one piece that is delivered at once, as no other one is merged with it. `None`:
/// it may be merged, or has a checksum to complete.
#[inline]
fn header_alone(
    batch: &Batch,
    looks: Looks,
    piece: &RxDesc,
    umem: &Umem,
) -> Option<[u8; HEADER_BYTES as usize]> {
    let pieces = std::slice::from_ref(piece);
    let first = checksums::first_bytes(pieces, umem);
    let offload = batch.header_alone(first, piece.len, |layers| {
        match looks.verify(first, layers, pieces, umem) {
            (_, Some(_)) => None,
            (Verdict::Partial, None) if !looks.tell => None,
            (verdict, None) => Some(verdict),
        }
    });
    offload.map(|offload| with_buffers(offload, 1))
}

/// Pieces that a NIC received, each checked by the tracker.
struct Checked<'a, I> {
    received: I,
    tracker: &'a mut ChunkTracker,
}

impl<I: ExactSizeIterator<Item = RxDesc>> Iterator for Checked<'_, I> {
    type Item = Result<RxDesc, Unexpected>;

    // Inline in each loop: a call would store and load the result, once per frame.
    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        self.received.next().map(|piece| self.tracker.accept(piece))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.received.size_hint()
    }
}

impl<I: ExactSizeIterator<Item = RxDesc>> ExactSizeIterator for Checked<'_, I> {}

/// Frames that wait for a guest's buffers; those that are not taken stay.
struct Waiting<'a>(&'a mut VecDeque<RxDesc>);

impl Iterator for Waiting<'_> {
    type Item = Result<RxDesc, Unexpected>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.0.pop_front().map(Ok)
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.len(), Some(self.0.len()))
    }
}

impl ExactSizeIterator for Waiting<'_> {}

/// See the module's head. The state of the batch in [`NicQueue::received`].
pub(crate) struct Arrivals {
    /// What to look for in frames, if anything.
    looks: Option<Looks>,
    /// Longest possible frame, bytes.
    frame_limit: u32,
    batch: Batch,
    position: Position,
    frames: [FramePieces; MOST_FRAMES],
    /// Pieces that belong to whole frames. Later ones belong to a frame whose last piece has not arrived.
    whole: usize,
    /// A piece of that frame is missing.
    torn: bool,
    /// The next piece belongs to a frame that the guest does not get.
    refused: bool,
    /// The guest gets frames without the tag that they arrive with.
    untags: bool,
    /// Where the bytes of the frame to be written are.
    ranges: Vec<UmemRange>,
    /// Frames taken from the NIC in this batch.
    taken: u64,
    /// The guest has buffers, but fewer than the next frame needs.
    pub(crate) short: bool,
}

impl Arrivals {
    /// For a guest, and a queue that may hold received frames for it.
    pub(crate) fn new<N>(vring: &Vring, queue: &mut NicQueue<N>, counters: &PairCounters) -> Self {
        let mut arrivals = Self::from(Origin::of(vring), vring);
        // At most a batch, because no more were taken. Draining keeps the capacity of `received`.
        let pieces: Vec<_> = queue.received.drain(..).collect();
        for piece in pieces {
            arrivals.push(Ok(piece), &mut queue.received, &queue.umem, counters);
        }
        arrivals
    }

    /// For a guest for which no received frames are held.
    pub(crate) fn from(origin: Origin, vring: &Vring) -> Self {
        Self {
            looks: Looks::of(vring, origin.partial_checksums),
            frame_limit: origin.frame_limit,
            batch: Batch::new(rules(&vring.guest.offloads)),
            position: Position::default(),
            frames: [FramePieces::default(); MOST_FRAMES],
            whole: 0,
            torn: false,
            refused: false,
            untags: false,
            ranges: Vec::with_capacity(BATCH * 2),
            taken: 0,
            short: false,
        }
    }

    /// The same, for a guest that gets the frames of its VLAN without their tag.
    pub(crate) fn untagging(self, untags: bool) -> Self {
        Self { untags, ..self }
    }

    /// Sets the longest frame, bytes.
    pub(crate) fn set_frame_limit(&mut self, bytes: u32) {
        self.frame_limit = bytes;
    }

    /// Delivers frames that a queue shared with other guests received into chunks of `umem`, as far as the guest has
    /// buffers. `received`: those taken out of `waiting` and not delivered yet.
    /// Errors: the guest's fault.
    pub(crate) fn deliver_waiting(
        &mut self,
        (waiting, received): (&mut VecDeque<RxDesc>, &mut Vec<RxDesc>),
        umem: &Umem,
        empty: &mut Vec<Frame>,
        delivery: &mut Delivery<'_>,
    ) -> Result<(), Fault> {
        let mut waits = self.finish_batch((received, empty), umem, delivery)?;
        if !waits {
            let policer = &mut Policer::default();
            waits = self.deliver_each(Waiting(waiting), (received, empty), umem, delivery, policer)?;
        }
        self.short = waits && delivery.is_short();
        Ok(())
    }

    /// Takes frames from the NIC, and delivers those that the guest may get, as far as it has buffers.
    /// Errors: the guest's fault.
    pub(crate) fn deliver<N: Nic>(
        &mut self,
        queue: &mut NicQueue<N>,
        delivery: &mut Delivery<'_>,
        mut admission: Admission<'_>,
    ) -> Result<(), Fault> {
        let (received, empty) = (&mut queue.received, &mut queue.empty);
        let mut waits = self.finish_batch((received, empty), &queue.umem, delivery)?;
        self.taken = 0;
        if !waits {
            let is_read = MetadataReader::of(queue).is_read();
            let left = queue.nic.received().min(BATCH);
            let most = || Cost::most(left, queue.umem.max_frame_bytes());
            let admits_all = admission.filter.is_none() && admission.policer.has(most);
            if admits_all && !self.untags && !is_read && !self.refused {
                let NicQueue {
                    nic,
                    umem,
                    tracker,
                    received,
                    empty,
                    ..
                } = queue;
                let incoming = Checked {
                    received: nic.from_nic(left),
                    tracker,
                };
                let policer = &mut admission.policer;
                waits = self.deliver_each(incoming, (received, empty), umem, delivery, policer)?;
            } else if left > 0 && delivery.has_buffer(left)? {
                // Frames that find no buffer are better left in the ring: the kernel counts what it drops.
                self.take_batch(queue, &mut admission, delivery);
                let (received, empty) = (&mut queue.received, &mut queue.empty);
                waits = self.finish_batch((received, empty), &queue.umem, delivery)?;
            }
        }
        meter::count_taken(usize::try_from(self.taken).unwrap_or(usize::MAX));
        self.short = waits && delivery.is_short();
        Ok(())
    }

    /// Takes at most a batch of frames from the NIC, and inserts or removes their tags as the guest expects it.
    /// Delivers a frame at once if none before it waits, it is in one piece that fits one buffer, and no other one can
    /// be merged with it.
    fn take_batch<N: Nic>(
        &mut self,
        queue: &mut NicQueue<N>,
        admission: &mut Admission<'_>,
        delivery: &mut Delivery<'_>,
    ) {
        let counters = delivery.counters;
        let NicQueue {
            nic,
            umem,
            tracker,
            received,
            empty,
            layouts,
            hints: expected,
            seen,
            ..
        } = queue;
        let (umem, expected) = (&*umem, *expected);
        let before = MetadataReader {
            umem,
            layouts,
            expected,
            seen,
            decapsulated: false,
        };
        for piece in nic.from_nic(MOST_FRAMES) {
            let mut arrival = tracker.accept(piece);
            let is_first = self.is_first(received.len()) && !self.refused;
            let mut hints = Some(Hints::default());
            if let (true, Ok(piece)) = (is_first, &mut arrival) {
                hints = before.read(piece, counters);
                match hints.and_then(|hints| hints.tag) {
                    None if self.untags => untag(umem, piece),
                    Some(tag) if !self.untags => put_tag_back(umem, piece, tag, counters),
                    _ => {}
                }
            }
            let may_get = self.may_get(&arrival, hints, (is_first, umem), admission, counters);
            let goes_at_once = is_first && received.is_empty();
            let is_delivered = may_get
                && goes_at_once
                && arrival.as_ref().is_ok_and(|piece| {
                    delivery.whole(umem, piece, |piece| match self.looks {
                        None => Some(IN_ONE_BUFFER),
                        Some(looks) => header_alone(&self.batch, looks, piece, umem),
                    })
                });
            if may_get && !is_delivered {
                self.push(arrival, received, umem, counters);
            } else if let Ok(piece) = arrival {
                self.taken += u64::from(!piece.more);
                empty.push(piece.frame);
            }
        }
    }

    /// Delivers frames that the guest may get and that have no metadata, as far as it has buffers: each at once, except
    /// those that may be merged. True if one waits for buffers. A separate function, so that the loop has all
    /// registers.
    #[inline(never)]
    fn deliver_each(
        &mut self,
        mut incoming: impl ExactSizeIterator<Item = Result<RxDesc, Unexpected>>,
        (received, empty): (&mut Vec<RxDesc>, &mut Vec<Frame>),
        umem: &Umem,
        delivery: &mut Delivery<'_>,
        policer: &mut Policer<'_>,
    ) -> Result<bool, Fault> {
        while incoming.len() > 0 && delivery.has_buffer(incoming.len())? {
            let (frames, bytes) = (delivery.frames(), delivery.bytes());
            let other = match self.looks {
                _ if !received.is_empty() || self.torn => incoming.next(),
                None => delivery.take_whole(umem, &mut incoming, empty, |_| Some(IN_ONE_BUFFER)),
                Some(looks) => {
                    let header = |piece: &RxDesc| header_alone(&self.batch, looks, piece, umem);
                    delivery.take_whole(umem, &mut incoming, empty, header)
                }
            };
            let frames = delivery.frames() - frames;
            self.taken += frames;
            policer.charge(Cost::of(frames, delivery.bytes() - bytes));
            let Some(other) = other else { continue };
            self.add_to_batch(other, &mut incoming, received, (umem, delivery.counters), policer);
            if self.finish_batch((received, empty), umem, delivery)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Adds to the batch a piece that cannot be delivered at once, and the pieces behind it until the batch is full,
    /// since some may be merged. If nothing is looked for in frames, adds only that piece.
    #[inline(never)]
    fn add_to_batch(
        &mut self,
        first: Result<RxDesc, Unexpected>,
        incoming: &mut impl Iterator<Item = Result<RxDesc, Unexpected>>,
        received: &mut Vec<RxDesc>,
        (umem, counters): (&Umem, &PairCounters),
        policer: &mut Policer<'_>,
    ) {
        let mut next = Some(first);
        while let Some(arrival) = next {
            if let Ok(piece) = &arrival {
                policer.charge(match self.is_first(received.len()) {
                    true => Cost::frame(piece.len),
                    false => Cost::bytes(piece.len),
                });
            }
            self.push(arrival, received, umem, counters);
            next = match self.looks {
                Some(_) if self.batch.len() < MOST_FRAMES => incoming.next(),
                _ => None,
            };
        }
    }

    /// Whether the next piece is the first of a frame. `received`: how many pieces are in the batch.
    #[inline]
    fn is_first(&self, received: usize) -> bool {
        received == self.whole && !self.torn
    }

    /// Whether the guest gets the frame of a piece; counts a denied one. `hints`: the frame's metadata; `None`: it has
    /// to be dropped, and is counted already.
    #[inline]
    fn may_get(
        &mut self,
        arrival: &Result<RxDesc, Unexpected>,
        hints: Option<Hints>,
        (is_first, umem): (bool, &Umem),
        admission: &mut Admission<'_>,
        counters: &PairCounters,
    ) -> bool {
        let Ok(piece) = arrival else {
            self.refused = false;
            return true;
        };
        if std::mem::take(&mut self.refused) {
            self.refused = piece.more;
            return false;
        }
        if admission.admits_all() && hints.is_some() {
            return true;
        }
        if !is_first {
            admission.policer.charge(Cost::bytes(piece.len));
            return true;
        }
        let may = hints.is_some_and(|hints| admits(admission, piece, &hints, umem, counters));
        self.refused = !may && piece.more;
        may
    }

    /// Adds a piece to the batch; the last piece completes a frame. Counts what cannot be a frame.
    #[inline]
    fn push(
        &mut self,
        arrival: Result<RxDesc, Unexpected>,
        received: &mut Vec<RxDesc>,
        umem: &Umem,
        counters: &PairCounters,
    ) {
        let more = match arrival {
            Ok(piece) => {
                let more = piece.more;
                received.push(piece);
                more
            }
            Err(Unexpected { more }) => {
                counters.to_guest_stray.add(1);
                self.torn = more || received.len() > self.whole;
                more
            }
        };
        self.taken += u64::from(!more);
        if self.torn && !more {
            // Its chunks go back with those of the batch.
            counters.to_guest_in_pieces.add(1);
            (self.whole, self.torn) = (received.len(), false);
        } else if !more && received.len() > self.whole {
            self.add(received, umem, counters);
        }
    }

    /// Makes a frame of the pieces behind those of whole frames.
    #[inline]
    fn add(&mut self, received: &mut [RxDesc], umem: &Umem, counters: &PairCounters) {
        let number = self.batch.len();
        let Some(frame) = self.frames.get_mut(number) else {
            return;
        };
        let pieces = &mut received[self.whole..];
        let len: u32 = pieces.iter().map(|piece| piece.len).sum();
        // Pieces of a batch are few.
        #[allow(clippy::cast_possible_truncation)]
        let at = FramePieces {
            first: self.whole as u16,
            pieces: pieces.len() as u16,
        };
        self.whole += pieces.len();
        if pieces.len() > 1 && len > self.frame_limit {
            // Pieces of several frames were taken for one frame: no frame is that long. Its chunks go back with those
            // of the batch.
            counters.to_guest_in_pieces.add(1);
            return;
        }
        *frame = at;
        let Some(looks) = self.looks else {
            self.batch.add_unread(len);
            return;
        };
        let first = checksums::first_bytes(pieces, umem);
        let headers = &first[..first.len().min(HEADERS_MAX)];
        let mut unfinished = None;
        self.batch.add(headers, len, |layers| {
            let verdict;
            (verdict, unfinished) = looks.verify(first, layers, pieces, umem);
            verdict
        });
        if !looks.tell
            && let Some(layers) = self.batch.partial(number)
        {
            unfinished = Some(Unfinished::of(layers));
        }
        if let Some(unfinished) = &unfinished {
            checksums::complete(pieces, umem, unfinished);
            counters.to_guest_checksums_completed.add(1);
        }
    }

    /// Delivers the batch, if there is one, and gives its chunks back; true if a frame is left, for which the guest has
    /// to post buffers first, or for which another poll has to read them.
    #[inline]
    fn finish_batch(
        &mut self,
        (received, empty): (&mut Vec<RxDesc>, &mut Vec<Frame>),
        umem: &Umem,
        delivery: &mut Delivery<'_>,
    ) -> Result<bool, Fault> {
        if received.is_empty() {
            return Ok(false);
        }
        let waits = self.deliver_batch(received, umem, delivery)?;
        if !waits {
            self.give_back(received, empty);
        }
        Ok(waits)
    }

    /// Delivers a batch, merged into GSO packets that the buffers can hold; true if a frame is left.
    #[inline]
    fn deliver_batch(
        &mut self,
        received: &mut [RxDesc],
        umem: &Umem,
        delivery: &mut Delivery<'_>,
    ) -> Result<bool, Fault> {
        let mut fetched = false;
        while let Some(run) = self.batch.run(&self.position, delivery.room_for_frame()) {
            let fits = run.bytes() <= delivery.room_for_frame();
            // Tries again with buffers that were posted meanwhile, and in place of used ones.
            if (!fits || !run.is_whole()) && !fetched && delivery.fetch_more()? {
                fetched = true;
                continue;
            }
            if fits {
                self.deliver_run(received, umem, delivery, &run);
            } else if delivery.misfit() == Fit::Later {
                return Ok(true);
            }
            self.batch.advance(&mut self.position, &run);
            fetched = false;
        }
        Ok(false)
    }

    /// Writes a run of frames, which fits.
    #[inline]
    fn deliver_run(&mut self, received: &mut [RxDesc], umem: &Umem, delivery: &mut Delivery<'_>, run: &Run) {
        let offload = match self.looks {
            Some(Looks { tell: true, .. }) => self.batch.header(run),
            _ => NO_OFFLOAD,
        };
        let frame = self.frames[run.first()];
        let first = usize::from(frame.first);
        if (run.frames(), frame.pieces) == (1, 1)
            && delivery.whole(umem, &received[first], |_| Some(with_buffers(offload, 1)))
        {
            return;
        }
        if run.frames() > 1
            // SAFETY: frames of the batch go back to the NIC only after they were delivered.
            && let Some(bytes) = unsafe { received_bytes_mut(umem, &mut received[first]) }
        {
            self.batch.rewrite(run, bytes);
        }
        self.ranges.clear();
        for (number, bytes) in self.batch.members(run) {
            let mut skip = bytes.start;
            let frame = self.frames[number];
            for piece in &received[usize::from(frame.first)..][..usize::from(frame.pieces)] {
                let skipped = skip.min(piece.len);
                skip -= skipped;
                if piece.len > skipped {
                    self.ranges.push(UmemRange {
                        start: UmemOffset::new(piece.data.get() + u64::from(skipped)),
                        len: piece.len - skipped,
                    });
                }
            }
        }
        delivery.write(run.bytes(), offload, &mut UmemBytes::new(umem, &self.ranges));
        if run.frames() > 1 {
            let counters = delivery.counters;
            counters.to_guest_super_frames.add(1);
            counters.to_guest_coalesced_frames.add(run.frames() as u64);
        }
    }

    /// The lane is stopped: delivered pieces of the batch go back to the NIC, so that none is delivered twice.
    pub(crate) fn leave<N>(&mut self, queue: &mut NicQueue<N>) {
        let mut waits = vec![false; self.whole];
        while let Some(run) = self.batch.run(&self.position, u32::MAX) {
            for (number, _) in self.batch.members(&run) {
                let frame = self.frames[number];
                waits[usize::from(frame.first)..][..usize::from(frame.pieces)].fill(true);
            }
            self.batch.advance(&mut self.position, &run);
        }
        // Pieces behind whole frames belong to one whose last piece has not arrived.
        let pieces: Vec<_> = queue.received.drain(..).collect();
        for (at, piece) in pieces.into_iter().enumerate() {
            match waits.get(at) {
                Some(false) => queue.empty.push(piece.frame),
                None if self.torn => queue.empty.push(piece.frame),
                _ => queue.received.push(piece),
            }
        }
    }

    /// The batch is delivered: its chunks go back to the NIC.
    #[inline]
    fn give_back(&mut self, received: &mut Vec<RxDesc>, empty: &mut Vec<Frame>) {
        empty.extend(received.drain(..self.whole).map(|piece| piece.frame));
        self.whole = 0;
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
