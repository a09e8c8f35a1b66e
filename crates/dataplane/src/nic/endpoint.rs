//! A NIC queue as an endpoint of frames: its rings, its UMEM, and the chunks that the kernel does not have.
//!
//! It outlives guests: a lane borrows it by value, and returns it when it is stopped ([`NicQueue`] is *lent*). Between
//! two lanes the kernel keeps its chunks: empty ones in the fill ring, sent ones in the TX or completion ring. All
//! others are in the pool again, or hold received frames that no lane has taken yet. The tracker records which chunks
//! the kernel has ([`ChunkTracker`]): so the next lane gives the NIC the missing ones, and unexpected completions are
//! detected.

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::binding::LARGE_CHUNK;
use device::counters::PairCounters;
use steer::HintSet;
use xsk::metadata::{Layouts, forget};
use xsk::{
    Frame, FramePool, MemoryError, OwnMemory, RxDesc, TxDesc, Umem, UmemError, UmemOffset,
    XDP_PACKET_HEADROOM,
};

use super::chunk_tracker::ChunkTracker;
use super::completion_time::CompletionTime;
use super::hints::{SeenHints, XdpMetadata};
use super::queue::{LinkState, Nic, Sends};
use super::tap::SendTap;

/// Default packet memory of a queue in copy placement, bytes; two fifths of it wait to be sent.
pub const COPY_BYTES: u32 = 6 << 20;
/// Least packet memory of a queue, bytes: 51 large chunks of it are for sending, enough for 64 KiB of TCP segments.
pub const LEAST_COPY_BYTES: u32 = 512 << 10;

/// The part of `bytes` for a queue that only sends, as in tap mode: of the default memory, one small chunk for each
/// entry of the TX ring.
pub const fn to_send_only(bytes: u32) -> u32 {
    bytes / 3 / 4096 * 4096
}

/// Memory for a queue in copy placement, none of which is with the kernel.
pub struct Chunks {
    /// The registered memory.
    pub umem: Umem,
    /// Where the first chunk begins; the others follow without gaps.
    pub first: UmemOffset,
    /// The chunks, all free.
    pub pool: FramePool,
    /// Chunks that the NIC should have to receive into; the others are for sending.
    pub to_receive: usize,
    /// What backs the memory, for `status`.
    pub backing: String,
}

impl Chunks {
    /// `bytes` of memory in chunks of `chunk` bytes, of which `to_send` at most are for sending.
    pub fn new(bytes: u32, chunk: u32, to_send: u32) -> Result<Self, ChunksError> {
        let memory = OwnMemory::new(bytes as usize)?;
        let backing = memory.backing().to_string();
        let umem = Umem::aligned(Arc::new(memory), chunk, 0)?;
        let pool: FramePool = umem.all_frames()?.collect();
        let to_send = (to_send as usize).min(for_sending(pool.len()));
        Ok(Self {
            umem,
            first: UmemOffset::new(0),
            to_receive: pool.len() - to_send,
            pool,
            backing,
        })
    }

    /// The chunks of [`LARGE_CHUNK`] in `bytes` of a UMEM from `first` on: the rest of it belongs to other queues.
    ///
    /// # Errors
    /// They are not in the UMEM.
    pub fn of_slice(
        umem: &Umem,
        first: UmemOffset,
        bytes: u32,
        backing: String,
    ) -> Result<Self, ChunksError> {
        let all = (first.get()..first.get() + u64::from(bytes)).step_by(LARGE_CHUNK as usize);
        let pool: Result<FramePool, _> = all.map(|at| umem.adopt(UmemOffset::new(at))).collect();
        let pool = pool?;
        Ok(Self {
            to_receive: pool.len() - for_sending(pool.len()),
            first,
            umem: umem.clone(),
            pool,
            backing,
        })
    }
}

/// How many of `chunks` are for sending at most.
fn for_sending(chunks: usize) -> usize {
    chunks * 2 / 5
}

/// Why there is no memory for a queue.
#[derive(Debug, thiserror::Error)]
pub enum ChunksError {
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Memory that cannot be a UMEM.
    #[error(transparent)]
    Umem(#[from] UmemError),
}

/// A queue's rings, with the UMEM and its chunks.
pub struct NicQueue<N> {
    /// The rings.
    pub nic: N,
    /// The registered memory.
    pub umem: Umem,
    /// Free chunks.
    pub(crate) pool: FramePool,
    /// Chunks that the NIC has, except for those in an in-flight table ([`crate::direct::in_flight`]).
    pub(crate) tracker: ChunkTracker,
    /// To chunks that several outstanding sent descriptors share.
    pub(crate) references: References,
    /// Descriptors were [queued](Self::send) since the last kick. Not maintained in direct placement, where the lane
    /// queues and kicks itself.
    is_unkicked: bool,
    /// A sender waits for room in the ring or for chunks, or, in direct placement, a receive buffer for a bounce chunk;
    /// cleared by the next completion.
    pub(crate) is_awaited: bool,
    /// How long completions take.
    completion_time: CompletionTime,
    /// Received, and not delivered: whole frames, and perhaps one whose last piece has not arrived.
    pub(crate) received: Vec<RxDesc>,
    /// Chunks that go back to the NIC to receive into.
    pub(crate) empty: Vec<Frame>,
    /// The queue's capabilities for frames that are sent.
    pub sends: Sends,
    /// The tap that sends GSO packets unsegmented; `None`: the daemon segments them.
    pub send_tap: Option<SendTap>,
    /// Why there is no such tap, although one is wanted.
    pub no_tap_because: Option<String>,
    /// As the last kick reported.
    pub(crate) link: LinkState,
    /// Longest frame that may be sent, bytes. It also limits segments of a tap's GSO packets, which no sender has
    /// limited.
    pub frame_limit: u32,
    /// What backs the memory, for `status`.
    pub backing: String,
    /// Bytes of the queue's own chunks.
    pub packet_bytes: u64,
    /// The hints that the program writes before frames.
    pub(crate) hints: HintSet,
    /// The hints that frames really had.
    pub seen: Arc<SeenHints>,
    /// Layouts of the metadata before frames; empty: there is no metadata to read.
    pub(crate) layouts: Layouts,
    /// Bytes of older frames are cleared in chunks that the NIC gets, because there is metadata to read.
    forgets: bool,
    /// Chunks that the NIC should have to receive into.
    to_receive: usize,
}

impl<N: Nic> NicQueue<N> {
    /// A queue with memory, none of which is with the kernel.
    pub fn new(nic: N, chunks: Chunks, sends: Sends) -> Self {
        let Chunks {
            umem,
            first,
            pool,
            to_receive,
            backing,
        } = chunks;
        Self {
            nic,
            tracker: ChunkTracker::new(&umem, first, pool.len()),
            references: References::new(&umem, first, pool.len()),
            packet_bytes: pool.len() as u64 * u64::from(umem.chunk_size()),
            umem,
            pool,
            is_unkicked: false,
            is_awaited: false,
            completion_time: CompletionTime::new(),
            received: Vec::with_capacity(to_receive.min(256)),
            empty: Vec::with_capacity(to_receive),
            sends,
            send_tap: None,
            no_tap_because: None,
            link: LinkState::Up,
            frame_limit: u32::MAX,
            backing,
            hints: HintSet::NONE,
            seen: Arc::default(),
            layouts: Layouts::default(),
            forgets: false,
            to_receive,
        }
    }

    /// Sets the metadata that is read before frames. Must be called before a program starts to leave metadata of a new
    /// layout in the queue.
    pub fn set_metadata(&mut self, metadata: &XdpMetadata) {
        self.hints = metadata.hints;
        self.layouts = Layouts::new(&metadata.layouts);
        if self.forgets || self.layouts.is_empty() {
            return;
        }
        self.forgets = true;
        // Chunks that the NIC has already may contain anything.
        for chunk in self.tracker.to_receive() {
            forget_before(&self.umem, chunk);
        }
    }

    /// Prepares the queue for a new lane: forgets the link state and waits of the last one, and fills the fill ring.
    pub(crate) fn begin(&mut self) {
        self.link = LinkState::Up;
        self.is_awaited = false;
        self.completion_time.forget();
        self.fill();
    }

    /// Gives the NIC chunks to receive into, until it has its share, or has no room for more now.
    pub fn fill(&mut self) {
        let missing = self.missing().min(self.nic.room_to_give());
        let taken = std::iter::from_fn(|| self.pool.take()).take(missing);
        self.empty.extend(taken);
        self.give();
    }

    /// How many chunks are for receiving.
    pub(crate) fn to_receive(&self) -> usize {
        self.to_receive
    }

    /// Kicks the kernel, and stores the link state that it reports.
    #[inline]
    pub(crate) fn kick(&mut self, counters: &PairCounters) {
        self.is_unkicked = false;
        self.link = self.nic.kick();
        counters.nic_kicks.add(1);
    }

    /// Kicks the kernel if frames were queued since the last kick, and takes completions; returns whether it kicked.
    #[inline]
    pub(crate) fn kick_queued(&mut self, most: usize, counters: &PairCounters) -> bool {
        let is_unkicked = self.is_unkicked;
        if is_unkicked {
            self.kick(counters);
        }
        self.reclaim(most, counters);
        is_unkicked
    }

    /// Checks whether a link that was down is up again, if the ring is empty.
    #[inline]
    pub(crate) fn update_link_state(&mut self, counters: &PairCounters) {
        if self.link == LinkState::Down && self.nic.unsent() == 0 {
            self.kick(counters);
        }
    }

    /// Chunks that the NIC lacks of its share.
    fn missing(&self) -> usize {
        // The chunks in these lists go back to the NIC.
        let soon = self.empty.len() + self.received.len();
        self.to_receive.saturating_sub(self.tracker.receiving() + soon)
    }

    /// Gives the NIC the empty chunks, as many as it has room for now.
    #[inline]
    pub(crate) fn give(&mut self) {
        let (tracker, umem) = (&mut self.tracker, &self.umem);
        let forgets = self.forgets;
        self.nic.give(&mut self.empty, |frames| {
            tracker.give(frames);
            if forgets {
                frames
                    .iter()
                    .for_each(|frame| forget_before(umem, frame.offset()));
            }
        });
    }

    /// Drops received frames without a receiver, and counts them.
    pub fn discard(&mut self, counters: &PairCounters) {
        let mut lose = |piece: RxDesc| {
            counters.to_guest_queue_stopped.add(u64::from(!piece.more));
            self.pool.put(piece.frame);
        };
        self.received.drain(..).for_each(&mut lose);
        for piece in self.nic.from_nic(usize::MAX) {
            match self.tracker.accept(piece) {
                Ok(piece) => lose(piece),
                Err(_) => counters.to_guest_stray.add(1),
            }
        }
    }

    /// Queues descriptors for sending; the NIC must have room for them.
    #[inline]
    pub(crate) fn send(&mut self, frames: &mut Vec<TxDesc>) {
        let tracker = &mut self.tracker;
        self.is_unkicked = true;
        self.nic
            .to_nic(frames.drain(..).inspect(|desc| tracker.send(&desc.frame)));
    }

    /// Takes completed descriptors, at most `most`.
    #[inline]
    pub(crate) fn reclaim(&mut self, most: usize, counters: &PairCounters) {
        if self.nic.unsent() == 0 {
            self.is_awaited = false;
            return;
        }
        let (mut back, mut unexpected) = (0, 0);
        for frame in self.nic.sent(most) {
            if self.tracker.sent(&frame) {
                back += 1;
                self.pool.extend(self.references.give_back(frame));
            } else {
                unexpected += 1;
            }
        }
        self.came_back(back);
        self.is_awaited &= back == 0;
        if back > 0 && self.link == LinkState::Down {
            // The kernel sends again. No kick may have reported that, because poll(2) also makes it send (`xsk_poll`).
            self.link = LinkState::Up;
        }
        if unexpected > 0 {
            counters.from_guest_strays.add(unexpected);
        }
    }

    /// Records that the caller has taken `descriptors` completed descriptors.
    #[inline]
    pub(crate) fn came_back(&mut self, descriptors: usize) {
        self.nic.came_back(descriptors);
        self.completion_time.came_back(descriptors);
    }

    /// How long to sleep until outstanding descriptors may be completed; `None`: there are none.
    pub(crate) fn until_sent(&mut self) -> Option<Duration> {
        match self.nic.unsent() {
            0 => {
                self.completion_time.forget();
                None
            }
            out => Some(self.completion_time.wait(out, Instant::now())),
        }
    }

    /// The same for a queue that sends copies. No wait is needed as long as half of the chunks for sending are free and
    /// the NIC has taken all descriptors: later work finds the completions.
    pub(crate) fn until_copies_sent(&mut self) -> Option<Duration> {
        let chunks = self.packet_bytes / u64::from(self.umem.chunk_size());
        let to_send = (chunks as usize).saturating_sub(self.to_receive);
        let has_enough = self.pool.len() >= to_send / 2 && !self.is_awaited;
        if !has_enough || self.nic.has_untaken() {
            return self.until_sent();
        }
        self.completion_time.forget();
        None
    }

    /// Returns chunks of unsent descriptors to the pool.
    pub(crate) fn take_back(&mut self, frames: impl Iterator<Item = Frame>) {
        let references = &mut self.references;
        self.pool
            .extend(frames.filter_map(|frame| references.give_back(frame)));
    }
}

/// Clears the metadata of an older frame before the frame that arrives in this chunk.
#[inline]
fn forget_before(umem: &Umem, chunk: UmemOffset) {
    forget(umem, usual_place(umem, chunk));
}

/// The start of a frame that the kernel receives into a chunk, in aligned mode (`xsk_copy_xdp`, net/xdp/xsk.c).
#[inline]
pub(crate) fn usual_place(umem: &Umem, chunk: UmemOffset) -> UmemOffset {
    let before = u64::from(umem.headroom() + XDP_PACKET_HEADROOM);
    UmemOffset::new(chunk.get() + before)
}

/// For each chunk of a queue, how many further descriptors refer to it after the first. (A chunk has 4096 bytes at
/// most, and each of them at least one.)
#[derive(Debug)]
pub(crate) struct References {
    further: Vec<u16>,
    /// Sum of all.
    total: usize,
    /// Where the first chunk begins.
    first: u64,
    chunk_bytes: u64,
}

impl References {
    /// For `chunks` chunks of a UMEM, the first of which begins at `first`, without references. In unaligned mode,
    /// where a guest's frames begin anywhere, none is shared.
    pub(crate) fn new(umem: &Umem, first: UmemOffset, chunks: usize) -> Self {
        let chunks = match umem.is_unaligned() {
            true => 0,
            false => chunks,
        };
        Self {
            further: vec![0; chunks],
            total: 0,
            first: first.get(),
            chunk_bytes: umem.chunk_size().into(),
        }
    }

    /// Descriptors that are out, without the first of each chunk.
    #[cfg(test)]
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Another frame for a chunk that at least one outstanding descriptor refers to.
    #[inline]
    pub(crate) fn share(&mut self, umem: &Umem, chunk: UmemOffset) -> Option<Frame> {
        let frame = umem.adopt(chunk).ok()?;
        *self.of(chunk)? += 1;
        self.total += 1;
        Some(frame)
    }

    /// Releases a frame of a completed descriptor; returns it if no other one refers to its chunk.
    #[inline]
    pub(crate) fn give_back(&mut self, frame: Frame) -> Option<Frame> {
        if self.total > 0
            && let Some(further @ 1..) = self.of(frame.offset())
        {
            *further -= 1;
            self.total -= 1;
            let _still_shared = frame.into_offset();
            return None;
        }
        Some(frame)
    }

    #[inline]
    fn of(&mut self, chunk: UmemOffset) -> Option<&mut u16> {
        let from_first = chunk.get().checked_sub(self.first)?;
        self.further
            .get_mut(usize::try_from(from_first / self.chunk_bytes).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use xsk::metadata::Layout;

    use super::*;
    use crate::tests::test_nic::{TestNic, Wire, frame_at, own_memory, queue};

    #[test]
    fn next_lane_gives_the_nic_what_it_lacks_and_no_more() {
        let umem = own_memory(16);
        let mut wire = Wire::new(umem.clone(), 8, 1);
        wire.fill = 7;
        let wire = Arc::new(Mutex::new(wire));
        let mut queue = queue(TestNic(Arc::clone(&wire)), umem, 10, Sends::PLAIN);
        let sent = |frame| TxDesc {
            frame,
            offset: UmemOffset::new(0),
            len: 60,
            more: false,
            metadata: false,
        };
        // Two are being sent, and the NIC has seven to receive into, and no room for more.
        let mut sending: Vec<_> = (0..2).filter_map(|_| queue.pool.take()).map(sent).collect();
        queue.send(&mut sending);
        queue.fill();
        assert_eq!((queue.tracker.receiving(), queue.missing()), (7, 3));
        wire.lock().expect("no panic").fill = 16;
        queue.fill();
        assert_eq!((queue.tracker.receiving(), queue.missing()), (10, 0));
        queue.fill();
        assert_eq!(queue.pool.len(), 4, "never more than its share");
    }

    #[test]
    fn metadata_of_an_older_frame_is_cleared_before_the_next_one() {
        let layout = Layout::new(7, 8, &[]).expect("an id");
        for [before, reads] in [[false, false], [false, true], [true, true]] {
            let umem = own_memory(16);
            let mut wire = Wire::new(umem.clone(), 8, 1);
            wire.fill = 16;
            let wire = Arc::new(Mutex::new(wire));
            let mut queue = queue(TestNic(Arc::clone(&wire)), umem.clone(), 10, Sends::PLAIN);
            for chunk in 0..16 {
                let _ = umem.write(UmemOffset::new(chunk * 2048), &[0xa5; 2048]);
            }
            if before {
                queue.set_metadata(&XdpMetadata::of(HintSet::HASH, &[layout]));
            }
            queue.fill();
            if reads && !before {
                queue.set_metadata(&XdpMetadata::of(HintSet::HASH, &[layout]));
            }
            let given = std::mem::take(&mut wire.lock().expect("no panic").given);
            assert_eq!(given.len(), 10);
            for frame in &given {
                let id = frame.offset().get() + u64::from(XDP_PACKET_HEADROOM) - 4;
                let mut bytes = [0; 5];
                umem.read(UmemOffset::new(id), &mut bytes).expect("inside");
                let expected = [if reads { 0 } else { 0xa5 }; 4];
                assert_eq!((&bytes[..4], bytes[4]), (&expected[..], 0xa5));
            }
        }
    }

    #[test]
    fn nothing_is_taken_from_a_nic_that_it_does_not_have() {
        let umem = own_memory(16);
        let mut wire = Wire::new(umem.clone(), 8, 8);
        wire.fill = 16;
        let wire = Arc::new(Mutex::new(wire));
        let mut queue = queue(TestNic(Arc::clone(&wire)), umem, 8, Sends::PLAIN);
        queue.fill();
        let counters = PairCounters::default();
        let wire = || wire.lock().expect("no panic");
        wire().receive(60, false);
        let twice = wire().received[0].frame.offset();
        // Twice, one that the daemon has, one outside.
        for offset in [twice, UmemOffset::new(0), UmemOffset::new(64 * 2048)] {
            wire().receive_into(frame_at(offset), 60, false);
        }
        queue.discard(&counters);
        assert_eq!(counters.to_guest_queue_stopped.get(), 1);
        assert_eq!(counters.to_guest_stray.get(), 3);
        assert_eq!((queue.pool.len(), queue.tracker.receiving()), (9, 7));
    }

    /// A driver's report about one queue cannot name a chunk of another's.
    #[test]
    fn chunk_of_another_slice_is_unexpected_from_either_ring() {
        const SLICE: u32 = 8 * LARGE_CHUNK;
        let memory = OwnMemory::new(3 * SLICE as usize).expect("memory");
        let umem = Umem::aligned(Arc::new(memory), LARGE_CHUNK, 0).expect("a UMEM");
        let mut wire = Wire::new(umem.clone(), 8, 8);
        wire.fill = 16;
        let wire = Arc::new(Mutex::new(wire));
        let slice = u64::from(SLICE);
        let chunks = Chunks::of_slice(&umem, UmemOffset::new(slice), SLICE, String::new()).expect("inside");
        let mut queue = NicQueue::new(TestNic(Arc::clone(&wire)), chunks, Sends::PLAIN);
        assert_eq!(queue.packet_bytes, slice);
        queue.fill();
        let counters = PairCounters::default();
        let wire = || wire.lock().expect("no panic");
        let others = [0, slice - 4096, 2 * slice, 3 * slice - 4096].map(UmemOffset::new);
        for other in others {
            wire().receive_into(frame_at(other), 60, false);
        }
        wire().receive(60, false);
        queue.discard(&counters);
        assert_eq!(counters.to_guest_stray.get(), others.len() as u64);
        assert_eq!(counters.to_guest_queue_stopped.get(), 1, "its own");
        for other in others {
            assert!(!queue.tracker.sent(&frame_at(other)), "{other}");
            assert!(queue.references.share(&umem, other).is_none(), "{other}");
        }
    }
}
