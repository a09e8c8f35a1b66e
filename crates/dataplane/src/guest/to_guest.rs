//! To a guest: takes its buffers during a burst, and writes frames into them.
//!
//! A [`Delivery`] takes buffers from the guest's receive queue as needed, writes frames into them, each with its
//! virtio-net header (VirtIO 1.3, 5.1.6.4), and returns unused ones. The source of a frame's bytes is a [`Bytes`]:
//! chunks of a UMEM, another guest's chain, or the daemon's memory.

use device::counters::PairCounters;
use device::meter;
use device::pair::{Cursor, Fault, Guest, HASH_HEADER_BYTES, HEADER_BYTES, Piece, Vring};
use virtqueue::{Buffer, Chain, Chains, DirtyLog, MemoryMap};
use xsk::{Frame, RxDesc, Umem, UmemOffset};

use crate::frame::bytes::{UmemRange, between_guests, frame_to_guest, umem_to_guest};
use crate::lane::limits::{BATCH, DESCRIPTORS};
use crate::nic::chunk_tracker::Unexpected;
use crate::nic::tap::Parts;

/// The virtio-net header without offloads, except for the number of buffers.
pub(crate) const NO_OFFLOAD: [u8; 10] = [0; 10];

/// The header without offloads of a frame in one buffer. A constant, because building it for each frame costs more than
/// writing it: a value that was stored in pieces is loaded as a whole.
pub(crate) const IN_ONE_BUFFER: [u8; HEADER_BYTES as usize] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Bytes of a frame, read from front to back.
pub(crate) trait Bytes {
    /// Copies the next `to.len` bytes into guest memory.
    fn copy_to(&mut self, memory: &MemoryMap, to: Piece);
}

/// A frame in a UMEM.
pub(crate) struct UmemBytes<'a> {
    umem: &'a Umem,
    ranges: &'a [UmemRange],
    /// Bytes of the first range already read.
    at: u32,
}

impl<'a> UmemBytes<'a> {
    pub(crate) fn new(umem: &'a Umem, ranges: &'a [UmemRange]) -> Self {
        Self { umem, ranges, at: 0 }
    }
}

impl Bytes for UmemBytes<'_> {
    #[inline]
    fn copy_to(&mut self, memory: &MemoryMap, to: Piece) {
        let mut to = to;
        while to.len > 0
            && let Some(&UmemRange { start, len }) = self.ranges.first()
        {
            let (part, rest) = to.split(to.len.min(len - self.at));
            let from = UmemOffset::new(start.get() + u64::from(self.at));
            // Both ranges come from checked descriptors; bytes outside the UMEM are not copied.
            let _ = umem_to_guest(self.umem, from, memory, part);
            to = rest;
            self.at += part.len;
            if self.at == len {
                (self.ranges, self.at) = (&self.ranges[1..], 0);
            }
        }
    }
}

impl Bytes for &[u8] {
    fn copy_to(&mut self, memory: &MemoryMap, to: Piece) {
        let (now, later) = self.split_at((to.len as usize).min(self.len()));
        let _ = memory.copy_to_guest(to.offset, now);
        *self = later;
    }
}

/// A guest's frame that another guest gets in one buffer: its new virtio-net header, its first bytes in the daemon's
/// memory, and the rest in one piece of the sender's memory.
pub(crate) struct WholeFrame<'a> {
    pub(crate) header: [u8; HEADER_BYTES as usize],
    pub(crate) head: &'a [u8],
    pub(crate) rest: Piece,
}

impl WholeFrame<'_> {
    /// Bytes of the frame.
    #[inline]
    fn len(&self) -> u32 {
        // A head is short, and the frame that it is part of has a length in 32 bits.
        self.head.len() as u32 + self.rest.len
    }

    /// Writes it into a chain of one buffer, and stores there how many bytes were written; false: the chain is another
    /// one, or too short. `memory`: the sender's.
    #[inline(always)]
    fn write(self, memory: &MemoryMap, (chain, buffer): (&mut Chain, Buffer), to: GuestMemory<'_>) -> bool {
        let written = self.len() + HEADER_BYTES;
        if chain.writable != 1 || buffer.len < written {
            return false;
        }
        let Self { header, head, rest } = self;
        if between_guests(memory, head, rest, to.memory, buffer.offset, header).is_none() {
            return false;
        }
        to.record_written(chain, buffer, written);
        true
    }
}

/// Whether a frame fits the buffers that the guest has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// It fits now.
    Now,
    /// It will fit when the guest has posted more buffers, or when another poll reads them.
    Later,
    /// It will never fit.
    Never,
}

/// The guest's receive queue during a batch; see the module's head.
pub(crate) struct Delivery<'a> {
    vring: &'a mut Vring,
    pub(crate) counters: &'a PairCounters,
    chains: &'a mut Chains,
    /// First of `chains` that is not used yet.
    next: usize,
    /// Buffers of the last fetch.
    asked: usize,
    /// Bytes that the unused `chains` hold.
    room: u64,
    /// Descriptors read in this batch.
    read: usize,
    bytes: u64,
    frames: u64,
}

impl<'a> Delivery<'a> {
    /// Begins a batch with the guest's next buffers.
    /// Errors: the guest's fault.
    pub(crate) fn begin(
        vring: &'a mut Vring,
        chains: &'a mut Chains,
        counters: &'a PairCounters,
    ) -> Result<Self, Fault> {
        Self::begin_with(vring, chains, counters, BATCH)
    }

    /// Like [`Self::begin`], with at most `most` buffers at first.
    #[inline]
    pub(crate) fn begin_with(
        vring: &'a mut Vring,
        chains: &'a mut Chains,
        counters: &'a PairCounters,
        most: usize,
    ) -> Result<Self, Fault> {
        chains.clear();
        let mut delivery = Self {
            vring,
            counters,
            chains,
            next: 0,
            asked: 0,
            room: 0,
            read: 0,
            bytes: 0,
            frames: 0,
        };
        if most > 0 {
            delivery.fetch(most.min(BATCH))?;
        }
        Ok(delivery)
    }

    /// Takes at most `most` buffers from the guest; before that, returns those left of the last batch.
    fn fetch(&mut self, most: usize) -> Result<(), Fault> {
        self.vring.queue.unpop(self.chains.slots(self.next));
        (self.next, self.asked) = (0, most);
        self.room = self.vring.pop_buffers(self.chains, most)?;
        self.read += self.chains.buffers.len();
        Ok(())
    }

    /// Fetches again, if that may find more buffers than are unused now, and the poll's limit of descriptors
    /// ([`DESCRIPTORS`]) allows it; returns whether it did.
    pub(crate) fn fetch_more(&mut self) -> Result<bool, Fault> {
        let may = (self.next > 0 || self.asked < BATCH) && self.read < DESCRIPTORS;
        if may {
            self.fetch(BATCH)?;
        }
        Ok(may)
    }

    /// Whether the guest has a buffer for the next frame in this poll. Takes as many buffers as frames wait: taking and
    /// returning an unused buffer costs as much as using one.
    #[inline]
    pub(crate) fn has_buffer(&mut self, waiting: usize) -> Result<bool, Fault> {
        if self.next == self.chains.len() {
            if self.read >= DESCRIPTORS {
                return Ok(false);
            }
            self.fetch(waiting.min(BATCH))?;
            if self.chains.is_empty() {
                self.counters.to_guest_waits.add(1);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether buffers are left, so that a waiting frame has some, but too few.
    pub(crate) fn is_short(&self) -> bool {
        self.next < self.chains.len()
    }

    /// How many chains are left.
    pub(crate) fn left(&self) -> usize {
        self.chains.len() - self.next
    }

    pub(crate) fn vring(&self) -> &Vring {
        self.vring
    }

    /// The common case: frames in one piece, each written into a buffer in one piece that holds it. Takes such frames
    /// from `incoming` while there are buffers, and puts their chunks into `empty`; stops at the first other frame or
    /// unexpected chunk, and returns that. `header`: the header of a frame; `None`: it is delivered in another way.
    ///
    /// One loop with its sums in registers, and without values that are stored in pieces and loaded as a whole, or
    /// vice versa: workers spend most of their time here.
    #[inline]
    pub(crate) fn take_whole(
        &mut self,
        umem: &Umem,
        incoming: &mut impl Iterator<Item = Result<RxDesc, Unexpected>>,
        empty: &mut Vec<Frame>,
        header: impl Fn(&RxDesc) -> Option<[u8; HEADER_BYTES as usize]>,
    ) -> Option<Result<RxDesc, Unexpected>> {
        let (mut room, mut bytes, before) = (0, 0, empty.len());
        let mut other = None;
        let Vring { queue, guest, .. } = &mut *self.vring;
        let to = GuestMemory::of(guest);
        let (chains, buffers) = (&mut self.chains.chains[self.next..], &self.chains.buffers[..]);
        for chain in &mut *chains {
            let Some(arrival) = incoming.next() else { break };
            let buffer = buffers[chain.first as usize];
            let piece = match arrival {
                Ok(piece) => piece,
                Err(unexpected) => {
                    other = Some(Err(unexpected));
                    break;
                }
            };
            if !to.write_whole(umem, &piece, (chain, buffer), &header) {
                other = Some(Ok(piece));
                break;
            }
            room += u64::from(buffer.len);
            bytes += u64::from(piece.len);
            empty.push(piece.frame);
        }
        let taken = empty.len() - before;
        queue.push_all_written(&chains[..taken]);
        self.next += taken;
        self.room -= room;
        self.frames += taken as u64;
        self.bytes += bytes;
        other
    }

    /// Does the same for one frame. False: the frame is not of that kind, and nothing is done.
    #[inline]
    pub(crate) fn whole(
        &mut self,
        umem: &Umem,
        piece: &RxDesc,
        header: impl Fn(&RxDesc) -> Option<[u8; HEADER_BYTES as usize]>,
    ) -> bool {
        let Some(chain) = self.chains.chains.get_mut(self.next) else {
            return false;
        };
        let buffer = self.chains.buffers[chain.first as usize];
        let Vring { queue, guest, .. } = &mut *self.vring;
        if !GuestMemory::of(guest).write_whole(umem, piece, (chain, buffer), header) {
            return false;
        }
        queue.push_used(chain.id, chain.writable_bytes);
        self.next += 1;
        self.room -= u64::from(buffer.len);
        self.note(piece.len);
        true
    }

    /// Does the same for frames of another guest, each with a head in the daemon's memory, which may be empty, and the
    /// rest in one piece. Stops once it has copied `most_bytes`. Returns the number of frames that it took, and of their
    /// bytes.
    #[inline]
    pub(crate) fn take_whole_of_guest<'f>(
        &mut self,
        memory: &MemoryMap,
        mut frames: impl Iterator<Item = WholeFrame<'f>>,
        most_bytes: u64,
    ) -> (usize, u64) {
        let (mut taken, mut room, mut bytes) = (0, 0, 0);
        let Vring { queue, guest, .. } = &mut *self.vring;
        let (chains, buffers) = (&mut self.chains.chains[self.next..], &self.chains.buffers[..]);
        let to = GuestMemory::of(guest);
        if !to.has_short_header {
            return (0, 0);
        }
        for chain in &mut *chains {
            if bytes >= most_bytes {
                break;
            }
            let Some(frame) = frames.next() else { break };
            let buffer = buffers[chain.first as usize];
            let len = frame.len();
            if !frame.write(memory, (chain, buffer), to) {
                break;
            }
            taken += 1;
            room += u64::from(buffer.len);
            bytes += u64::from(len);
        }
        queue.push_all_written(&chains[..taken]);
        self.next += taken;
        self.room -= room;
        self.frames += taken as u64;
        self.bytes += bytes;
        (taken, bytes)
    }

    /// Does the same for one frame; false: the frame is not of that kind, and nothing is done.
    #[inline]
    pub(crate) fn whole_of_guest(&mut self, memory: &MemoryMap, frame: WholeFrame<'_>) -> bool {
        let Some(chain) = self.chains.chains.get_mut(self.next) else {
            return false;
        };
        let buffer = self.chains.buffers[chain.first as usize];
        let Vring { queue, guest, .. } = &mut *self.vring;
        let (len, to) = (frame.len(), GuestMemory::of(guest));
        if !to.has_short_header || !frame.write(memory, (chain, buffer), to) {
            return false;
        }
        queue.push_used(chain.id, chain.writable_bytes);
        self.next += 1;
        self.room -= u64::from(buffer.len);
        self.note(len);
        true
    }

    /// Adds the next buffers, behind the place of the header, to the parts that a frame of `bytes` bytes is read into;
    /// returns how many bytes they hold. One part is left for the caller, for longer frames.
    pub(crate) fn offer<'p>(&'p self, parts: &mut Parts<'p>, bytes: u32) -> u32 {
        let (mut offered, mut taken) = (0, self.vring.guest.header_bytes);
        for chain in self.chains_of_frame() {
            for buffer in self.chains.buffers(chain) {
                let before = taken.min(buffer.len);
                let (at, len) = (buffer.offset + u64::from(before), buffer.len - before);
                if offered >= bytes
                    || parts.left() <= 1
                    || !parts.push(&self.vring.guest.memory, at, len as usize)
                {
                    return offered;
                }
                // A buffer may have up to 4 GiB.
                (offered, taken) = (offered.saturating_add(len), taken - before);
            }
        }
        offered
    }

    /// Delivers a frame of `len` bytes that was read into the offered buffers ([`Self::offer`]).
    pub(crate) fn take_in_place(&mut self, len: u32, offload: [u8; 10]) {
        let wanted = len + self.vring.guest.header_bytes;
        let Some(count) = self.chains_for(wanted) else {
            return;
        };
        let header = with_buffers(offload, count);
        let mut left = wanted;
        for (at, chain) in self.chains.chains[self.next..self.next + count]
            .iter()
            .enumerate()
        {
            let buffers = self.chains.buffers(chain);
            if at == 0 {
                write_header(self.vring, buffers, &header);
            }
            let written = left.min(chain.writable_bytes);
            if self.vring.guest.log.is_some() {
                // Log the written bytes only: a buffer may have 4 GiB, and the log has an entry for each page.
                let mut unnoted = written;
                for buffer in buffers {
                    let here = buffer.len.min(unnoted);
                    self.vring.log_write(buffer.offset, here);
                    unnoted -= here;
                }
            }
            self.vring.queue.push_used(chain.id, written);
            self.room -= u64::from(chain.writable_bytes);
            left -= written;
        }
        self.next += count;
        self.note(len);
    }

    /// Copies the first bytes of a frame that was read into the offered buffers.
    #[cold]
    pub(crate) fn read_back(&self, to: &mut [u8]) {
        let (mut left, mut taken) = (to, self.vring.guest.header_bytes);
        for chain in self.chains_of_frame() {
            for buffer in self.chains.buffers(chain) {
                let before = taken.min(buffer.len);
                let (at, len) = (buffer.offset + u64::from(before), buffer.len - before);
                let (now, later) = left.split_at_mut((len as usize).min(left.len()));
                // Inside the map, as checked when the descriptor was read.
                let _ = self.vring.guest.memory.copy_from_guest(at, now);
                (left, taken) = (later, taken - before);
            }
        }
    }

    /// The chains that the next frame may use.
    fn chains_of_frame(&self) -> &[Chain] {
        let chains = &self.chains.chains[self.next..];
        match self.vring.guest.mergeable {
            true => chains,
            false => &chains[..chains.len().min(1)],
        }
    }

    #[inline]
    fn note(&mut self, len: u32) {
        self.frames += 1;
        self.bytes += u64::from(len);
    }

    /// Bytes of the longest frame that the unused buffers hold.
    #[inline]
    pub(crate) fn room_for_frame(&self) -> u32 {
        let bytes = if self.vring.guest.mergeable {
            self.room
        } else {
            let next = self.chains.chains.get(self.next);
            next.map_or(0, |chain| u64::from(chain.writable_bytes))
        };
        u32::try_from(bytes)
            .unwrap_or(u32::MAX)
            .saturating_sub(self.vring.guest.header_bytes)
    }

    /// Whether a frame of `len` bytes fits, including buffers posted meanwhile. Counts a frame that does not.
    #[inline]
    pub(crate) fn fit(&mut self, len: u32) -> Result<Fit, Fault> {
        if len <= self.room_for_frame() || self.fetch_for(len)? {
            return Ok(Fit::Now);
        }
        Ok(self.misfit())
    }

    /// Fetches buffers for a frame of `len` bytes, which those in hand do not hold; returns whether it fits then.
    fn fetch_for(&mut self, len: u32) -> Result<bool, Fault> {
        // Buffers of a guest mostly have one length: no more of them are taken than the frame needs.
        let buffer_bytes = self.chains.buffers.last().map_or(0, |buffer| buffer.len);
        let wanted = len.saturating_add(self.vring.guest.header_bytes);
        let wanted = wanted
            .checked_div(buffer_bytes)
            .map_or(BATCH, |whole| whole as usize + 1);
        if wanted < BATCH && (self.next > 0 || self.asked < wanted) && self.read < DESCRIPTORS {
            self.fetch(wanted)?;
            if self.chains.len() < wanted {
                // The guest has no more, or they have many descriptors.
                return Ok(len <= self.room_for_frame());
            }
        }
        Ok(len <= self.room_for_frame() || (self.fetch_more()? && len <= self.room_for_frame()))
    }

    /// Whether a frame that does not fit the unused buffers will fit later; counted in both cases. It will never fit
    /// where more buffers would not help: without mergeable buffers a frame has one chain; with them, no more chains
    /// than a batch or the ring has.
    #[cold]
    pub(crate) fn misfit(&self) -> Fit {
        let in_hand = self.chains.len() - self.next;
        let most = usize::from(self.vring.queue.size().get()).min(BATCH);
        let in_vain = in_hand == most || (in_hand > 0 && !self.vring.guest.mergeable);
        if in_vain && (self.next == 0 || !self.vring.guest.mergeable) {
            self.counters.to_guest_buffer_too_small.add(1);
            return Fit::Never;
        }
        self.counters.to_guest_waits.add(1);
        Fit::Later
    }

    /// Writes a frame of `len` bytes, which fits, into as many buffers as it needs.
    #[inline]
    pub(crate) fn write(&mut self, len: u32, offload: [u8; 10], bytes: &mut impl Bytes) {
        let wanted = len.saturating_add(self.vring.guest.header_bytes);
        let Some(count) = self.chains_for(wanted) else {
            return;
        };
        let mut header = Some(with_buffers(offload, count));
        let mut left = len;
        for chain in &self.chains.chains[self.next..self.next + count] {
            let buffers = self.chains.buffers(chain);
            let written = write(self.vring, buffers, header.take(), &mut left, bytes);
            self.vring.queue.push_used(chain.id, written);
            self.room -= u64::from(chain.writable_bytes);
        }
        self.next += count;
        self.note(len);
    }

    /// How many of the unused chains hold `wanted` bytes; `None`: all of them together hold less.
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

    /// Bytes of the delivered frames.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many frames were delivered.
    #[inline]
    pub(crate) fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns unused buffers to the queue, and publishes the used ones to the guest; returns the number of frames.
    pub(crate) fn finish(self) -> usize {
        self.vring.queue.unpop(self.chains.slots(self.next));
        self.chains.clear();
        self.counters.to_guest_frames.add(self.frames);
        self.counters.to_guest_bytes.add(self.bytes);
        meter::count_delivered(self.frames);
        if self.frames > 0 {
            self.vring.publish(self.counters);
        }
        usize::try_from(self.frames).unwrap_or(usize::MAX)
    }
}

/// A guest's memory, and its dirty log, if there is one.
#[derive(Clone, Copy)]
struct GuestMemory<'a> {
    memory: &'a MemoryMap,
    log: Option<&'a DirtyLog>,
    /// Its frames have a virtio-net header of 12 bytes.
    has_short_header: bool,
}

impl<'a> GuestMemory<'a> {
    #[inline(always)]
    fn of(guest: &'a Guest) -> Self {
        Self {
            memory: &guest.memory,
            log: guest.log.as_deref(),
            has_short_header: guest.header_bytes == HEADER_BYTES,
        }
    }

    /// Writes a frame in one piece into a chain of one buffer, and stores in the chain how many bytes that are. False:
    /// the frame or chain is not of that kind, or there is no `header` for it, and nothing is done. Inline: a call would
    /// store and load all its arguments, once per frame.
    #[inline(always)]
    fn write_whole(
        self,
        umem: &Umem,
        piece: &RxDesc,
        (chain, buffer): (&mut Chain, Buffer),
        header: impl Fn(&RxDesc) -> Option<[u8; HEADER_BYTES as usize]>,
    ) -> bool {
        let written = piece.len + HEADER_BYTES;
        if piece.more || chain.writable != 1 || buffer.len < written || !self.has_short_header {
            return false;
        }
        // Last, because it may read the whole frame.
        let Some(header) = header(piece) else { return false };
        let bytes = UmemRange::of(piece);
        if frame_to_guest(umem, bytes, self.memory, buffer.offset, header).is_none() {
            return false;
        }
        self.record_written(chain, buffer, written);
        true
    }

    /// Records in the dirty log, and in the chain, that the first bytes of its one buffer were written.
    #[inline(always)]
    fn record_written(self, chain: &mut Chain, buffer: Buffer, written: u32) {
        if let Some(log) = self.log {
            self.memory.log(log, buffer.offset, written.into());
        }
        chain.writable_bytes = written;
    }
}

/// A whole virtio-net header: `offload` and the number of buffers.
#[inline]
pub(crate) fn with_buffers(offload: [u8; 10], buffers: usize) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..10].copy_from_slice(&offload);
    // A batch holds far fewer than 65,536 chains.
    #[allow(clippy::cast_possible_truncation)]
    header[10..].copy_from_slice(&(buffers as u16).to_le_bytes());
    header
}

/// Writes into one chain: the header, if it is the frame's first chain, and as many of the frame's last `left` bytes as
/// it holds. Returns the bytes written.
#[inline]
pub(crate) fn write(
    vring: &Vring,
    buffers: &[Buffer],
    header: Option<[u8; HEADER_BYTES as usize]>,
    left: &mut u32,
    bytes: &mut impl Bytes,
) -> u32 {
    let mut written = 0;
    let mut from = Cursor::default();
    if let Some(header) = header {
        // A hash report would follow, with the value "none"; no vhost-user session has one.
        let mut whole = [0; HASH_HEADER_BYTES as usize];
        whole[..header.len()].copy_from_slice(&header);
        written = write_header(vring, buffers, &whole[..vring.guest.header_bytes as usize]);
        from = Cursor::after(buffers, written);
    }
    for target in from.pieces(buffers) {
        if *left == 0 {
            break;
        }
        let (target, _) = target.split(target.len.min(*left));
        bytes.copy_to(&vring.guest.memory, target);
        vring.log_write(target.offset, target.len);
        *left -= target.len;
        written += target.len;
    }
    written
}

/// Writes the virtio-net header, which may span several buffers; returns its length.
#[inline]
fn write_header(vring: &Vring, buffers: &[Buffer], header: &[u8]) -> u32 {
    let mut rest = header;
    for buffer in buffers {
        let (now, later) = rest.split_at(rest.len().min(buffer.len as usize));
        // Inside the map, as checked when the descriptor was read.
        let _ = vring.guest.memory.copy_to_guest(buffer.offset, now);
        vring.log_write(buffer.offset, now.len() as u32);
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    vring.guest.header_bytes
}
