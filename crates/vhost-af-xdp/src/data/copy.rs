//! A lane with `--memory=copy`: the UMEM is ours, each frame is copied once.
//!
//! Chunks of the UMEM circulate: free pool → (filled from the guest) → TX ring → completion →
//! pool, and pool → fill ring → RX ring → (copied to the guest) → fill ring. A frame that the
//! guest has no buffer for stays in the RX ring: back-pressure reaches the kernel, which counts
//! what it then drops (`rx_ring_full`, `rx_fill_ring_empty_descs`).

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtqueue::{Chains, Segment};
use xsk::{Frame, FramePool, RxDesc, TxDesc, Umem, UmemOffset};

use super::copy_bytes::{frame_to_guest, guest_to_umem, umem_to_guest};
use super::counters::LaneCounters;
use super::guest::{Fault, GuestSide, HEADER_BYTES, Piece, Sending, pieces, skip};
use super::lane::{BATCH, Bases, Lane, Rest};
use super::nic::{Link, Nic};

/// Most pieces of one multi-buffer frame (the kernel's limit on veth, MAX_SKB_FRAGS + 1).
const MOST_PIECES: usize = 18;

/// See the module's head.
pub(crate) struct CopyLane<N> {
    guest: GuestSide,
    nic: N,
    umem: Umem,
    /// Bytes of a chunk that hold a sent frame's data.
    chunk_bytes: u32,
    /// The socket takes frames of several descriptors.
    multi_buffer: bool,
    pool: FramePool,
    counters: Arc<LaneCounters>,
    link: Link,
    scratch: Scratch,
    /// Pieces of the received frame in hand; complete when the last one says so.
    held: Vec<RxDesc>,
    /// The guest has buffers, but fewer than the frame in hand needs.
    short: bool,
    /// See [`Lane::awaits_nic`].
    awaits_nic: bool,
}

/// Buffers that every batch uses anew.
struct Scratch {
    from_guest: Chains,
    to_guest: Chains,
    outgoing: Vec<TxDesc>,
    empty: Vec<Frame>,
}

/// What became of the frame in hand.
enum Delivery {
    Done,
    /// The guest has posted too few buffers.
    Wait,
}

impl<N: Nic> CopyLane<N> {
    /// Joins a guest with a NIC. `pool` holds every free chunk of `umem`; `to_receive` of them go
    /// to the NIC to receive into.
    pub(crate) fn new(
        guest: GuestSide,
        nic: N,
        memory: (Umem, FramePool, usize),
        multi_buffer: bool,
        counters: Arc<LaneCounters>,
    ) -> Self {
        let (umem, mut pool, to_receive) = memory;
        let mut nic = nic;
        let count = to_receive.min(nic.room_to_give());
        let mut empty: Vec<Frame> = std::iter::from_fn(|| pool.take()).take(count).collect();
        nic.give(&mut empty);
        let chunk_bytes = umem.chunk_size();
        let scratch = Scratch {
            from_guest: Chains::default(),
            to_guest: Chains::default(),
            outgoing: Vec::with_capacity(BATCH * 2),
            empty,
        };
        let held = Vec::with_capacity(MOST_PIECES);
        Self {
            guest,
            nic,
            umem,
            chunk_bytes,
            multi_buffer,
            pool,
            counters,
            link: Link::Up,
            scratch,
            held,
            short: false,
            awaits_nic: true,
        }
    }

    /// Guest → NIC.
    fn from_guest(&mut self) -> Result<usize, Fault> {
        if self.nic.unsent() > 0 {
            for frame in self.nic.sent(BATCH * 2) {
                self.pool.put(frame);
            }
        }
        if !self.guest.from_guest.enabled {
            return Ok(0);
        }
        let room = BATCH.min(self.nic.room_to_nic()).min(self.pool.len());
        if room == 0 {
            self.counters.from_guest_waits.add(1);
            self.kick();
            return Ok(0);
        }
        let mut chains = std::mem::take(&mut self.scratch.from_guest);
        let taken = self.guest.from_guest.queue.pop(&mut chains, room);
        let moved = taken.map_err(Fault::from).and_then(|_| self.send(&chains));
        self.scratch.from_guest = chains;
        moved
    }

    /// Copies a batch of the guest's chains into chunks and hands them to the NIC.
    fn send(&mut self, chains: &Chains) -> Result<usize, Fault> {
        let (mut bytes, mut frames, mut done) = (0, 0, 0);
        for (at, chain) in chains.iter().enumerate() {
            let segments = chains.segments(chain);
            let judged = self.guest.judge(chain, segments, self.link, &self.counters)?;
            if let Sending::Frame { from, skip, len } = judged {
                let Some(sent) = self.copy_out(pieces(segments, from, skip), len, chains.len() - at) else {
                    // Needs more chunks than are free or than the ring has room for: later.
                    self.guest.from_guest.queue.unpop(chains.slots(at));
                    break;
                };
                frames += u64::from(sent);
                bytes += if sent { u64::from(len) } else { 0 };
            }
            self.guest.from_guest.queue.push_used(chain.id, 0);
            done += 1;
        }
        if !chains.is_empty() {
            // Given back before they are sent: should we die in between, they are lost; the other way
            // round a successor would send them once more.
            self.guest.from_guest.publish(&self.counters);
            self.flush_outgoing();
        } else if self.nic.unsent() > 0 {
            self.kick();
        }
        self.counters.from_guest_frames.add(frames);
        self.counters.from_guest_bytes.add(bytes);
        Ok(done)
    }

    /// Copies one frame into one chunk, or several; false when it had to be dropped, `None` when
    /// there is no room for it now. `reserved` chunks are wanted by this chain and the ones behind it.
    #[inline]
    fn copy_out(&mut self, pieces: impl Iterator<Item = Piece>, len: u32, reserved: usize) -> Option<bool> {
        if len > self.chunk_bytes {
            return self.copy_out_in_pieces(pieces, len, reserved);
        }
        let frame = self.pool.take()?;
        let data = frame.offset();
        let mut at = data.get();
        for piece in pieces {
            guest_to_umem(&self.guest.memory, piece, &self.umem, UmemOffset::new(at))?;
            at += u64::from(piece.len);
        }
        self.scratch.outgoing.push(TxDesc {
            frame,
            offset: data,
            len,
            more: false,
            metadata: false,
        });
        Some(true)
    }

    /// A frame longer than a chunk, as a multi-buffer frame.
    #[cold]
    fn copy_out_in_pieces(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        len: u32,
        reserved: usize,
    ) -> Option<bool> {
        let chunks = len.div_ceil(self.chunk_bytes) as usize;
        if !self.multi_buffer || chunks > MOST_PIECES {
            self.counters.from_guest_too_many_pieces.add(1);
            return Some(false);
        }
        let room = self.nic.room_to_nic().saturating_sub(self.scratch.outgoing.len());
        if chunks > self.pool.len() || chunks + reserved - 1 > room {
            return None;
        }
        let mut left = len;
        let mut pieces = pieces;
        let mut piece = pieces.next()?;
        while left > 0 {
            let frame = self.pool.take()?;
            let data = frame.offset();
            let fill = left.min(self.chunk_bytes);
            let mut done = 0;
            while done < fill {
                if piece.len == 0 {
                    piece = pieces.next()?;
                }
                let (part, rest) = piece.split(piece.len.min(fill - done));
                let to = UmemOffset::new(data.get() + u64::from(done));
                guest_to_umem(&self.guest.memory, part, &self.umem, to)?;
                piece = rest;
                done += part.len;
            }
            left -= fill;
            self.scratch.outgoing.push(TxDesc {
                frame,
                offset: data,
                len: fill,
                more: left > 0,
                metadata: false,
            });
        }
        Some(true)
    }

    fn flush_outgoing(&mut self) {
        self.nic.to_nic(self.scratch.outgoing.drain(..));
        self.kick();
    }

    fn kick(&mut self) {
        self.link = self.nic.kick();
        self.counters.nic_kicks.add(1);
    }

    /// NIC → guest.
    fn to_guest(&mut self) -> Result<usize, Fault> {
        if !self.guest.to_guest.enabled {
            return Ok(self.spill_over());
        }
        let spilled = self.guest.spilled().is_some_and(|spill| !spill.is_empty());
        if !spilled && !self.nic.has_frames() && self.held.is_empty() {
            return Ok(0);
        }
        let mut chains = std::mem::take(&mut self.scratch.to_guest);
        let moved = self.receive(&mut chains);
        self.scratch.to_guest = chains;
        self.nic.give(&mut self.scratch.empty);
        let moved = moved?;
        if moved > 0 {
            self.guest.to_guest.publish(&self.counters);
        }
        Ok(moved)
    }

    fn receive(&mut self, chains: &mut Chains) -> Result<usize, Fault> {
        let mut delivery = Receiving {
            guest: &mut self.guest,
            umem: &self.umem,
            counters: &self.counters,
            empty: &mut self.scratch.empty,
            chains,
            next: 0,
            bytes: 0,
            frames: 0,
        };
        delivery.fetch()?;
        // A frame whose pieces are all in hand but which found no buffer the last time.
        let mut waiting = false;
        if self.held.last().is_some_and(|piece| !piece.more) {
            waiting = matches!(delivery.deliver(&mut self.held)?, Delivery::Wait);
        }
        if !waiting {
            let mut incoming = self.nic.from_nic(BATCH);
            while delivery.has_buffer()? {
                let Some(piece) = incoming.next() else { break };
                if self.held.is_empty() && delivery.deliver_whole(&piece) {
                    delivery.empty.push(piece.frame);
                    continue;
                }
                let whole = !piece.more;
                self.held.push(piece);
                if whole && matches!(delivery.deliver(&mut self.held)?, Delivery::Wait) {
                    break;
                }
            }
        }
        if self.held.is_empty() {
            delivery.deliver_spilled(&mut self.held, &mut self.pool)?;
        }
        self.short = !self.held.is_empty() && delivery.next < delivery.chains.len();
        Ok(delivery.finish())
    }

    /// Lets the first pair deliver what arrived while the guest has this one switched off; the frames
    /// taken from the NIC.
    fn spill_over(&mut self) -> usize {
        let Some(spill) = self.guest.spills_to().map(Arc::clone) else {
            return 0;
        };
        if !self.nic.has_frames() {
            return 0;
        }
        let mut frames = 0;
        for piece in self.nic.from_nic(BATCH) {
            let whole = !piece.more;
            self.held.push(piece);
            if !whole {
                continue;
            }
            let counter = match spill.push(gather(&self.held, &self.umem)) {
                true => &self.counters.spilled_frames,
                false => &self.counters.to_guest_pair_off,
            };
            counter.add(1);
            frames += 1;
            self.scratch
                .empty
                .extend(self.held.drain(..).map(|piece| piece.frame));
        }
        self.nic.give(&mut self.scratch.empty);
        spill.wake();
        frames
    }
}

/// The bytes of a received frame.
fn gather(held: &[RxDesc], umem: &Umem) -> Vec<u8> {
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
    guest: &'a mut GuestSide,
    umem: &'a Umem,
    counters: &'a LaneCounters,
    empty: &'a mut Vec<Frame>,
    chains: &'a mut Chains,
    /// First of `chains` that is not used yet.
    next: usize,
    bytes: u64,
    frames: u64,
}

impl Receiving<'_> {
    /// Takes a batch of buffers from the guest; those left from the last batch go back first.
    fn fetch(&mut self) -> Result<(), Fault> {
        self.guest.to_guest.queue.unpop(self.chains.slots(self.next));
        self.next = 0;
        // Cleared first: on a fault nothing of an earlier batch may be taken for popped.
        self.chains.clear();
        self.guest.to_guest.queue.pop(self.chains, BATCH)?;
        for chain in self.chains.iter() {
            if chain.readable != 0 {
                return Err(Fault::ReadableInReceive { head: chain.id.head });
            }
            if chain.writable_bytes < self.guest.header_bytes {
                let bytes = chain.writable_bytes;
                return Err(Fault::ChainShorterThanHeader {
                    bytes,
                    header: self.guest.header_bytes,
                });
            }
        }
        Ok(())
    }

    /// Whether the guest has a buffer for the next frame.
    #[inline]
    fn has_buffer(&mut self) -> Result<bool, Fault> {
        if self.next == self.chains.len() {
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
    fn deliver_whole(&mut self, piece: &RxDesc) -> bool {
        let Some(chain) = self.chains.chains.get(self.next) else {
            return false;
        };
        let buffer = self.chains.segs[chain.first as usize];
        let written = piece.len + HEADER_BYTES;
        if piece.more
            || chain.writable != 1
            || buffer.len < written
            || self.guest.header_bytes != HEADER_BYTES
        {
            return false;
        }
        let frame = (piece.data, piece.len);
        if frame_to_guest(self.umem, frame, &self.guest.memory, buffer.offset, header(1)).is_none() {
            return false;
        }
        self.guest.wrote(buffer.offset, written);
        self.guest.to_guest.queue.push_used(chain.id, written);
        self.next += 1;
        self.frames += 1;
        self.bytes += u64::from(piece.len);
        true
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
                self.write(held, len, count);
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
    fn deliver_spilled(&mut self, held: &mut Vec<RxDesc>, pool: &mut FramePool) -> Result<(), Fault> {
        let Some(spill) = self
            .guest
            .spilled()
            .filter(|spill| !spill.is_empty())
            .map(Arc::clone)
        else {
            return Ok(());
        };
        for _ in 0..BATCH {
            if !held.is_empty() || pool.len() < MOST_PIECES || !self.has_buffer()? {
                break;
            }
            let Some(frame) = spill.pop() else { break };
            let chunk_bytes = self.umem.chunk_size() as usize;
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

    /// Writes header and frame into `count` chains and marks them used.
    #[inline]
    fn write(&mut self, held: &[RxDesc], len: u32, count: usize) {
        let header_bytes = self.guest.header_bytes;
        let mut source = Source {
            held,
            piece: 0,
            at: 0,
        };
        let mut left = len;
        for index in 0..count {
            let Some(chain) = self.chains.chains.get(self.next + index) else {
                return;
            };
            let segments = self.chains.segments(chain);
            let mut written = 0;
            let (mut from, mut within) = (0, 0);
            if index == 0 {
                write_header(self.guest, segments, count);
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
    let mut header = [0; HEADER_BYTES as usize];
    // A batch holds far fewer than 65,536 chains.
    #[allow(clippy::cast_possible_truncation)]
    header[10..].copy_from_slice(&(buffers as u16).to_le_bytes());
    header
}

/// A descriptor that sends `frame` from a chunk of ours, cut to what that holds.
pub(super) fn copied(chunk: Frame, frame: &[u8], umem: &Umem) -> TxDesc {
    let frame = &frame[..frame.len().min(umem.chunk_size() as usize)];
    let offset = chunk.offset();
    // The chunk is inside the UMEM, and the frame not longer than it.
    let _ = umem.write(offset, frame);
    TxDesc {
        frame: chunk,
        offset,
        // At most the size of a chunk.
        #[allow(clippy::cast_possible_truncation)]
        len: frame.len() as u32,
        more: false,
        metadata: false,
    }
}

/// Writes the virtio-net header of a received frame, which may lie across descriptors.
#[inline]
pub(super) fn write_header(guest: &GuestSide, segments: &[Segment], buffers: usize) {
    let header = header(buffers);
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

/// Reads through the pieces of a received frame.
struct Source<'a> {
    held: &'a [RxDesc],
    piece: usize,
    /// Bytes of that piece already read.
    at: u32,
}

impl Source<'_> {
    /// Copies the next `to.len` bytes of the frame into guest memory.
    #[inline]
    fn copy(&mut self, umem: &Umem, guest: &GuestSide, to: Piece) {
        let mut to = to;
        while to.len > 0 {
            let Some(piece) = self.held.get(self.piece) else {
                return;
            };
            let (part, rest) = to.split(to.len.min(piece.len - self.at));
            let from = UmemOffset::new(piece.data.get() + u64::from(self.at));
            // Both ranges come from checked descriptors; a kernel that breaks that is not copied.
            let _ = umem_to_guest(umem, from, &guest.memory, part);
            to = rest;
            self.at += part.len;
            if self.at == piece.len {
                self.piece += 1;
                self.at = 0;
            }
        }
    }
}

impl<N: Nic> Lane for CopyLane<N> {
    fn breathe(&mut self) -> Result<usize, Fault> {
        Ok(self.from_guest()? + self.to_guest()?)
    }

    fn arm(&mut self) -> Result<Rest, Fault> {
        let spilled = self.guest.spilled().is_some_and(|spill| !spill.is_empty());
        let waiting = spilled || self.nic.has_frames() || !self.held.is_empty();
        self.awaits_nic = !waiting;
        if self.guest.from_guest.enabled && self.guest.from_guest.queue.enable_kicks() {
            let stuck = self.nic.room_to_nic() == 0 || self.pool.is_empty();
            return Ok(if stuck { Rest::Soon } else { Rest::Busy });
        }
        if waiting && self.guest.to_guest.enabled && self.guest.to_guest.queue.enable_kicks() {
            return Ok(if self.short { Rest::Soon } else { Rest::Busy });
        }
        let soon = self.nic.unsent() > 0 || self.guest.is_polled();
        Ok(if soon { Rest::Soon } else { Rest::Idle })
    }

    fn guest(&self) -> &GuestSide {
        &self.guest
    }

    fn guest_mut(&mut self) -> &mut GuestSide {
        &mut self.guest
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    fn replace_guest(&mut self, guest: GuestSide) {
        self.guest = guest;
    }

    fn inject(&mut self, frame: &[u8]) {
        if self.nic.room_to_nic() == 0 {
            return;
        }
        if let Some(chunk) = self.pool.take() {
            self.scratch.outgoing.push(copied(chunk, frame, &self.umem));
            self.flush_outgoing();
        }
    }

    fn stop(mut self: Box<Self>) -> Bases {
        // Frames without buffers: whole ones in the ring, and perhaps one in hand.
        let rest = self.nic.from_nic(usize::MAX).filter(|piece| !piece.more).count() as u64;
        self.counters
            .to_guest_queue_stopped
            .add(rest + u64::from(!self.held.is_empty()));
        self.guest.bases()
    }
}
