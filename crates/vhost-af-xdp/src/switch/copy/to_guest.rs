//! Copy placement, NIC → guest: received frames copied into the guest's buffers, and those of pairs that are off.

use std::sync::Arc;

use offload::coalesce::Run;
use virtqueue::{Buffer, Chains};
use xsk::{Frame, FramePool, RxDesc, Umem, UmemOffset};

use super::incoming::{Incoming, Range};
use super::{CopyLane, copied};
use crate::nic::queue::{MOST_PIECES, Nic};
use crate::switch::copy_bytes::{frame_to_guest, umem_to_guest};
use crate::switch::lane::{BATCH, DESCRIPTORS};
use crate::switch::spill::Spill;
use device::counters::PairCounters;
use device::pair::{Fault, HEADER_BYTES, Piece, QueuePair, pieces, skip};

/// The virtio-net header, but for the number of buffers, of a frame about which nothing is said.
pub(crate) const NO_OFFLOAD: [u8; 10] = [0; 10];

/// Batches delivered when a lane is stopped: what a receive ring holds, and not more although it may fill all the time.
const LAST_BATCHES: usize = 32;

/// What became of the frame in hand.
enum Delivery {
    Done,
    /// The guest has posted too few buffers.
    Wait,
}

impl<N: Nic> CopyLane<N> {
    /// NIC → guest.
    pub(super) fn to_guest(&mut self) -> Result<usize, Fault> {
        if !self.guest.to_guest.enabled {
            return Ok(self.spill_over());
        }
        let spilled = self.spilled().is_some_and(|spill| !spill.is_empty());
        if !spilled && !self.nic.has_frames() && !self.has_in_hand() {
            return Ok(0);
        }
        let mut chains = std::mem::take(&mut self.scratch.to_guest);
        let moved = match self.incoming.take() {
            None => self.receive(&mut chains),
            Some(mut incoming) => {
                let moved = self.receive_batch(&mut chains, &mut incoming);
                self.incoming = Some(incoming);
                moved
            }
        };
        self.scratch.to_guest = chains;
        self.nic.give(&mut self.scratch.empty);
        let moved = moved?;
        if moved > 0 {
            self.guest.to_guest.publish(&self.counters);
        }
        Ok(moved)
    }

    /// Delivers what has come since the last breath, as far as the guest has buffers: between that and [`stop`](crate::switch::lane::Lane::stop)
    /// the control thread may have waited for a CPU. What is wrong with the guest now is nobody's business any more.
    ///
    /// Not for a guest that did wrong, whose VMM takes the queue's place from the ring already; nor of a pair that is off: the first
    /// pair's lane may be gone.
    pub(super) fn deliver_at_last(&mut self) {
        if self.faulted || !self.guest.to_guest.enabled {
            return;
        }
        for _ in 0..LAST_BATCHES {
            if !matches!(self.to_guest(), Ok(1..)) {
                break;
            }
        }
    }

    /// Whether a frame waits that was taken from the NIC.
    pub(super) fn has_in_hand(&self) -> bool {
        let incoming = self.incoming.as_ref();
        !self.held.is_empty() || incoming.is_some_and(|incoming| !incoming.is_empty())
    }

    /// Delivers what is left of the last batch, and takes the next one; with a look at every frame.
    fn receive_batch(&mut self, chains: &mut Chains, incoming: &mut Incoming) -> Result<usize, Fault> {
        let spilled = self.spilled().map(Arc::clone);
        let scratch = (&mut self.scratch.empty, &mut self.scratch.ranges, chains);
        let mut delivery = Receiving::begin(&mut self.guest, (&self.umem, &self.counters), scratch)?;
        let mut waits = delivery.deliver_batch(incoming)?;
        if !waits {
            incoming.give_back(delivery.empty, &mut self.pool);
            // What finds no buffer is better left to the kernel to count.
            if delivery.has_buffer()? {
                incoming.fill(&mut self.nic, &self.umem, &self.counters);
                waits = delivery.deliver_batch(incoming)?;
            }
        }
        if !waits {
            incoming.give_back(delivery.empty, &mut self.pool);
            if let Some(spill) = &spilled
                && !spill.is_empty()
                && incoming.is_empty()
                && delivery.has_buffer()?
            {
                incoming.fill_spilled(|| spill.pop(), &mut self.pool, (&self.umem, &self.counters));
                waits = delivery.deliver_batch(incoming)?;
                if !waits {
                    incoming.give_back(delivery.empty, &mut self.pool);
                }
            }
        }
        self.short = waits && delivery.next < delivery.chains.len();
        Ok(delivery.finish())
    }

    fn receive(&mut self, chains: &mut Chains) -> Result<usize, Fault> {
        let spilled = self.spilled().map(Arc::clone);
        let scratch = (&mut self.scratch.empty, &mut self.scratch.ranges, chains);
        let mut delivery = Receiving::begin(&mut self.guest, (&self.umem, &self.counters), scratch)?;
        // A frame whose pieces are all in hand but which found no buffer the last time.
        let mut waiting = false;
        if self.held.last().is_some_and(|piece| !piece.more) {
            waiting = matches!(delivery.deliver(&mut self.held)?, Delivery::Wait);
        }
        if !waiting {
            let mut incoming = self.nic.from_nic(BATCH);
            while delivery.has_buffer()? {
                let Some(piece) = incoming.next() else { break };
                if self.held.is_empty() && delivery.deliver_whole(&piece, header(1)) {
                    delivery.empty.push(piece.frame);
                    continue;
                }
                let whole = !piece.more;
                self.held.push(piece);
                if whole && is_glued(&self.held, delivery.guest.frame_limit) {
                    self.counters.to_guest_in_pieces.add(1);
                    delivery
                        .empty
                        .extend(self.held.drain(..).map(|piece| piece.frame));
                } else if whole && matches!(delivery.deliver(&mut self.held)?, Delivery::Wait) {
                    break;
                }
            }
        }
        if self.held.is_empty() {
            delivery.deliver_spilled(spilled, &mut self.held, &mut self.pool)?;
        }
        self.short = !self.held.is_empty() && delivery.next < delivery.chains.len();
        Ok(delivery.finish())
    }

    /// Lets the first pair deliver what arrived while the guest has this one switched off; the frames
    /// taken from the NIC.
    fn spill_over(&mut self) -> usize {
        let Some(spill) = self.spills_to().map(Arc::clone) else {
            return 0;
        };
        if !self.nic.has_frames() && !self.has_in_hand() {
            return 0;
        }
        let (mut frames, counters) = (0, &self.counters);
        let mut give = |frame| {
            let counter = match spill.push(frame) {
                true => &counters.spilled_frames,
                false => &counters.to_guest_pair_off,
            };
            counter.add(1);
            frames += 1;
        };
        if let Some(incoming) = &mut self.incoming {
            // Looked at again by the first pair's lane.
            incoming.take_rest(&self.umem, &mut give);
            incoming.give_back(&mut self.scratch.empty, &mut self.pool);
            incoming.fill(&mut self.nic, &self.umem, counters);
            incoming.take_rest(&self.umem, &mut give);
            incoming.give_back(&mut self.scratch.empty, &mut self.pool);
        } else {
            // What waited for a buffer when the pair was switched off.
            if self.held.last().is_some_and(|piece| !piece.more) {
                give(gather(&self.held, &self.umem));
                self.scratch
                    .empty
                    .extend(self.held.drain(..).map(|piece| piece.frame));
            }
            for piece in self.nic.from_nic(BATCH) {
                let whole = !piece.more;
                self.held.push(piece);
                if whole {
                    give(gather(&self.held, &self.umem));
                    self.scratch
                        .empty
                        .extend(self.held.drain(..).map(|piece| piece.frame));
                }
            }
        }
        self.nic.give(&mut self.scratch.empty);
        spill.wake();
        frames
    }
}

/// Whether pieces of several frames were taken for one: one that is longer than any there is.
#[inline]
pub(super) fn is_glued(pieces: &[RxDesc], frame_limit: u32) -> bool {
    pieces.len() > 1 && pieces.iter().map(|piece| piece.len).sum::<u32>() > frame_limit
}

/// The bytes of a received frame.
pub(super) fn gather(held: &[RxDesc], umem: &Umem) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in held {
        let start = bytes.len();
        bytes.resize(start + piece.len as usize, 0);
        // Inside the UMEM: the kernel's own descriptor.
        let _ = umem.read(piece.data, &mut bytes[start..]);
    }
    bytes
}

/// The guest's receive queue during one batch.
struct Receiving<'a> {
    guest: &'a mut QueuePair,
    umem: &'a Umem,
    counters: &'a PairCounters,
    empty: &'a mut Vec<Frame>,
    /// Where the frame to be written lies.
    ranges: &'a mut Vec<Range>,
    chains: &'a mut Chains,
    /// First of `chains` that is not used yet.
    next: usize,
    /// Bytes that those hold which are not used yet.
    room: u64,
    /// Descriptors that were read.
    read: usize,
    bytes: u64,
    frames: u64,
}

impl<'a> Receiving<'a> {
    /// Begins a batch with the guest's next buffers. What it works with: chunks that became empty, ranges, and chains.
    fn begin(
        guest: &'a mut QueuePair,
        (umem, counters): (&'a Umem, &'a PairCounters),
        (empty, ranges, chains): (&'a mut Vec<Frame>, &'a mut Vec<Range>, &'a mut Chains),
    ) -> Result<Self, Fault> {
        let mut receiving = Self {
            guest,
            umem,
            counters,
            empty,
            ranges,
            chains,
            next: 0,
            room: 0,
            read: 0,
            bytes: 0,
            frames: 0,
        };
        receiving.fetch()?;
        Ok(receiving)
    }

    /// Takes a batch of buffers from the guest; those left from the last batch go back first.
    fn fetch(&mut self) -> Result<(), Fault> {
        self.guest.to_guest.queue.unpop(self.chains.slots(self.next));
        self.next = 0;
        self.room = self.guest.pop_buffers(self.chains, BATCH)?;
        self.read += self.chains.buffers.len();
        Ok(())
    }

    /// Whether the guest has a buffer for the next frame, in this turn.
    #[inline]
    fn has_buffer(&mut self) -> Result<bool, Fault> {
        if self.next == self.chains.len() {
            if self.read >= DESCRIPTORS {
                return Ok(false);
            }
            self.fetch()?;
            if self.chains.is_empty() {
                self.counters.to_guest_waits.add(1);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The common case: a frame in one piece, for a buffer in one piece that holds it. False, and
    /// nothing done, if it is another.
    #[inline]
    fn deliver_whole(&mut self, piece: &RxDesc, header: [u8; HEADER_BYTES as usize]) -> bool {
        let Some(chain) = self.chains.chains.get(self.next) else {
            return false;
        };
        let buffer = self.chains.buffers[chain.first as usize];
        let written = piece.len + HEADER_BYTES;
        if piece.more
            || chain.writable != 1
            || buffer.len < written
            || self.guest.header_bytes != HEADER_BYTES
        {
            return false;
        }
        let frame = (piece.data, piece.len);
        if frame_to_guest(self.umem, frame, &self.guest.memory, buffer.offset, header).is_none() {
            return false;
        }
        self.guest.wrote(buffer.offset, written);
        self.guest.to_guest.queue.push_used(chain.id, written);
        self.next += 1;
        self.room -= u64::from(buffer.len);
        self.frames += 1;
        self.bytes += u64::from(piece.len);
        true
    }

    /// Delivers what a batch holds, in super-frames as long as the buffers in hand allow; true if something is left,
    /// for which the guest has to post buffers first, or for which another turn has to read them.
    fn deliver_batch(&mut self, incoming: &mut Incoming) -> Result<bool, Fault> {
        let mut fetched = false;
        while let Some(run) = incoming.run(self.room_for_frame()) {
            let fits = run.bytes() <= self.room_for_frame();
            if (!fits || !run.is_whole()) && self.next > 0 && !fetched {
                if self.read >= DESCRIPTORS {
                    return Ok(true);
                }
                // With buffers that were posted meanwhile, and without those used up in front of them.
                self.fetch()?;
                fetched = true;
                continue;
            }
            if fits {
                self.deliver_run(incoming, &run);
            } else if self.never_fits() {
                self.counters.to_guest_buffer_too_small.add(1);
            } else {
                self.counters.to_guest_waits.add(1);
                return Ok(true);
            }
            incoming.advance(&run);
            fetched = false;
        }
        Ok(false)
    }

    /// Bytes of the longest frame that the buffers in hand hold.
    #[inline]
    fn room_for_frame(&self) -> u32 {
        let bytes = if self.guest.mergeable {
            self.room
        } else {
            let next = self.chains.chains.get(self.next);
            next.map_or(0, |chain| u64::from(chain.writable_bytes))
        };
        u32::try_from(bytes)
            .unwrap_or(u32::MAX)
            .saturating_sub(self.guest.header_bytes)
    }

    /// Writes a run, which fits.
    #[inline]
    fn deliver_run(&mut self, incoming: &mut Incoming, run: &Run) {
        let offload = incoming.header(run);
        if let Some(piece) = incoming.single(run)
            && self.deliver_whole(piece, with_buffers(offload, 1))
        {
            return;
        }
        let len = run.bytes();
        let Some(count) = self.chains_for(len.saturating_add(self.guest.header_bytes)) else {
            return;
        };
        incoming.assemble(run, self.umem, self.ranges);
        self.write(len, count, offload);
        self.frames += 1;
        self.bytes += u64::from(len);
        if run.frames() > 1 {
            self.counters.to_guest_super_frames.add(1);
            self.counters.to_guest_coalesced_frames.add(run.frames() as u64);
        }
    }

    /// Copies the frame in `held` into as many chains as it needs and gives its chunks back.
    #[inline]
    fn deliver(&mut self, held: &mut Vec<RxDesc>) -> Result<Delivery, Fault> {
        let len: u32 = held.iter().map(|piece| piece.len).sum();
        let wanted = len.saturating_add(self.guest.header_bytes);
        let mut count = self.chains_for(wanted);
        if count.is_none() && self.next > 0 {
            self.fetch()?;
            count = self.chains_for(wanted);
        }
        match count {
            Some(count) if count == 1 || self.guest.mergeable => {
                self.ranges.clear();
                self.ranges
                    .extend(held.iter().map(|piece| (piece.data, piece.len)));
                self.write(len, count, NO_OFFLOAD);
                self.frames += 1;
                self.bytes += u64::from(len);
            }
            // One chain is too small: no later one is asked, the frame goes with its buffer left.
            Some(_) => self.counters.to_guest_buffer_too_small.add(1),
            None if self.never_fits() => self.counters.to_guest_buffer_too_small.add(1),
            None => {
                self.counters.to_guest_waits.add(1);
                return Ok(Delivery::Wait);
            }
        }
        self.empty.extend(held.drain(..).map(|piece| piece.frame));
        Ok(Delivery::Done)
    }

    /// Delivers frames of pairs that are off: as if they had been received, in chunks from the pool. A frame
    /// that finds no buffer stays in `held`, and its chunks then go the way of received ones: no more of
    /// them than the NIC's rings have room for, which is less than the pool has.
    fn deliver_spilled(
        &mut self,
        spill: Option<Arc<Spill>>,
        held: &mut Vec<RxDesc>,
        pool: &mut FramePool,
    ) -> Result<(), Fault> {
        let Some(spill) = spill.filter(|spill| !spill.is_empty()) else {
            return Ok(());
        };
        for _ in 0..BATCH {
            if !held.is_empty() || pool.len() < MOST_PIECES || !self.has_buffer()? {
                break;
            }
            let Some(frame) = spill.pop() else { break };
            let chunk_bytes = self.umem.max_sent_bytes() as usize;
            let pieces = frame.chunks(chunk_bytes);
            let last = pieces.len() - 1;
            for (at, bytes) in pieces.enumerate() {
                let Some(chunk) = pool.take() else { break };
                let sent = copied(chunk, bytes, self.umem);
                held.push(RxDesc {
                    frame: sent.frame,
                    data: sent.offset,
                    len: sent.len,
                    more: at < last,
                });
            }
            let before = self.empty.len();
            if matches!(self.deliver(held)?, Delivery::Done) {
                self.empty.drain(before..).for_each(|chunk| pool.put(chunk));
            }
        }
        Ok(())
    }

    /// How many of the chains in hand hold `wanted` bytes; `None`: all of them do not.
    #[inline]
    fn chains_for(&self, wanted: u32) -> Option<usize> {
        let mut left = wanted;
        for (at, chain) in self.chains.iter().skip(self.next).enumerate() {
            if chain.writable_bytes >= left {
                return Some(at + 1);
            }
            left -= chain.writable_bytes;
        }
        None
    }

    /// Whether more buffers would not help: without mergeable buffers a frame has one chain, with
    /// them no frame gets more chains than a batch holds.
    fn never_fits(&self) -> bool {
        let in_hand = self.chains.len() - self.next;
        in_hand == BATCH || (in_hand > 0 && !self.guest.mergeable)
    }

    /// Writes header and frame, which lies in `ranges`, into `count` chains and marks them used.
    #[inline]
    fn write(&mut self, len: u32, count: usize, offload: [u8; 10]) {
        let header_bytes = self.guest.header_bytes;
        let mut source = Source {
            ranges: self.ranges,
            range: 0,
            at: 0,
        };
        let mut left = len;
        for index in 0..count {
            let Some(chain) = self.chains.chains.get(self.next + index) else {
                return;
            };
            let segments = self.chains.buffers(chain);
            let mut written = 0;
            let (mut from, mut within) = (0, 0);
            if index == 0 {
                write_header(self.guest, segments, with_buffers(offload, count));
                written = header_bytes;
                (from, within) = skip(segments, header_bytes);
            }
            for target in pieces(segments, from.min(segments.len()), within) {
                if left == 0 {
                    break;
                }
                let (target, _) = target.split(target.len.min(left));
                source.copy(self.umem, self.guest, target);
                self.guest.wrote(target.offset, target.len);
                left -= target.len;
                written += target.len;
            }
            self.guest.to_guest.queue.push_used(chain.id, written);
            self.room -= u64::from(chain.writable_bytes);
        }
        self.next += count;
    }

    /// Gives unused buffers back to the queue and counts; the frames delivered.
    fn finish(self) -> usize {
        self.guest.to_guest.queue.unpop(self.chains.slots(self.next));
        self.chains.clear();
        self.counters.to_guest_frames.add(self.frames);
        self.counters.to_guest_bytes.add(self.bytes);
        usize::try_from(self.frames).unwrap_or(usize::MAX)
    }
}

/// The virtio-net header of a received frame that takes so many buffers (VirtIO 1.3, 5.1.6.4).
#[inline]
fn header(buffers: usize) -> [u8; HEADER_BYTES as usize] {
    with_buffers(NO_OFFLOAD, buffers)
}

/// A virtio-net header, with the number of buffers that it lacks.
#[inline]
pub(crate) fn with_buffers(offload: [u8; 10], buffers: usize) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..10].copy_from_slice(&offload);
    // A batch holds far fewer than 65,536 chains.
    #[allow(clippy::cast_possible_truncation)]
    header[10..].copy_from_slice(&(buffers as u16).to_le_bytes());
    header
}

/// Writes the virtio-net header of a received frame, which may lie across descriptors.
#[inline]
pub(crate) fn write_header(guest: &QueuePair, segments: &[Buffer], header: [u8; HEADER_BYTES as usize]) {
    let mut rest = &header[..guest.header_bytes as usize];
    for segment in segments {
        let now = rest.len().min(segment.len as usize);
        // Inside the map, as checked when the descriptor was read.
        let _ = guest.memory.copy_to_guest(segment.offset, &rest[..now]);
        // At most a header.
        #[allow(clippy::cast_possible_truncation)]
        guest.wrote(segment.offset, now as u32);
        rest = &rest[now..];
        if rest.is_empty() {
            return;
        }
    }
}

/// Reads through the ranges of a received frame.
struct Source<'a> {
    ranges: &'a [Range],
    range: usize,
    /// Bytes of that range already read.
    at: u32,
}

impl Source<'_> {
    /// Copies the next `to.len` bytes of the frame into guest memory.
    #[inline]
    fn copy(&mut self, umem: &Umem, guest: &QueuePair, to: Piece) {
        let mut to = to;
        while to.len > 0 {
            let Some(&(start, len)) = self.ranges.get(self.range) else {
                return;
            };
            let (part, rest) = to.split(to.len.min(len - self.at));
            let from = UmemOffset::new(start.get() + u64::from(self.at));
            // Both ranges come from checked descriptors; a kernel that breaks that is not copied.
            let _ = umem_to_guest(umem, from, &guest.memory, part);
            to = rest;
            self.at += part.len;
            if self.at == len {
                self.range += 1;
                self.at = 0;
            }
        }
    }
}
