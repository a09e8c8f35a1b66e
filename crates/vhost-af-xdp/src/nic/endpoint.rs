//! A NIC queue as an endpoint of frames: its rings, its UMEM, and the chunks that are not with the kernel.
//!
//! It outlives guests: a lane borrows it by value, and gives it back when it is stopped ([`NicQueue`] is *lent*).
//! Chunks that the kernel has meanwhile stay where they are: those to receive into in the fill ring, those sent in
//! the TX or completion ring. All others are in the pool again, or hold received frames that nobody took yet. So what
//! the next lane gives the NIC to receive into is what is missing there: of all chunks those that are in none of
//! these places.

use std::sync::Arc;

use xsk::{Frame, FramePool, MemoryError, OwnMemory, RxDesc, Umem, UmemError, UmemOffset};

use super::queue::{Nic, Sends};

/// Packet memory of a queue in copy placement, bytes, unless somebody asks for less; two fifths of it wait to be sent.
pub(crate) const COPY_BYTES: u32 = 6 << 20;
/// Least of it, bytes: in large chunks, 51 of which are for sending, a GSO packet's segments of 1,448 bytes fit.
pub(crate) const LEAST_COPY_BYTES: u32 = 512 << 10;

/// Memory for a queue in copy placement, none of which is with the kernel.
pub(crate) struct Chunks {
    pub(crate) umem: Umem,
    pub(crate) pool: FramePool,
    /// How many the NIC is to have to receive into; the others are for sending.
    pub(crate) to_receive: usize,
    /// What backs the memory, in words.
    pub(crate) backing: String,
}

impl Chunks {
    /// `bytes` of memory in chunks of `chunk` bytes, of which `to_send` at most are for sending.
    pub(crate) fn new(bytes: u32, chunk: u32, to_send: u32) -> Result<Self, ChunksError> {
        let chunks = bytes / chunk;
        let memory = OwnMemory::new(bytes as usize)?;
        let backing = memory.backing().to_string();
        let umem = Umem::aligned(Arc::new(memory), chunk, 0)?;
        let pool: FramePool = umem.all_frames()?.collect();
        let to_send = to_send.min(chunks * 2 / 5);
        Ok(Self {
            umem,
            pool,
            to_receive: (chunks - to_send) as usize,
            backing,
        })
    }
}

/// Why there is no memory for a queue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChunksError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Umem(#[from] UmemError),
}

pub(crate) struct NicQueue<N> {
    pub(crate) nic: N,
    pub(crate) umem: Umem,
    /// Free chunks.
    pub(crate) pool: FramePool,
    /// Of descriptors that are being sent, to chunks that are not in the pool.
    pub(crate) references: References,
    /// Received, and not delivered: whole frames, and perhaps one whose last piece has not come.
    pub(crate) received: Vec<RxDesc>,
    /// Chunks that go back to the NIC to receive into.
    pub(crate) empty: Vec<Frame>,
    /// What it does for frames that are sent.
    pub(crate) sends: Sends,
    /// What backs the memory, in words.
    pub(crate) backing: String,
    /// How many chunks there are.
    all: usize,
    /// How many of them the NIC is to have to receive into.
    to_receive: usize,
}

impl<N: Nic> NicQueue<N> {
    /// A queue with memory, none of which is with the kernel.
    pub(crate) fn new(nic: N, chunks: Chunks, sends: Sends) -> Self {
        let Chunks {
            umem,
            pool,
            to_receive,
            backing,
        } = chunks;
        Self {
            nic,
            references: References::new(&umem),
            umem,
            all: pool.len(),
            pool,
            received: Vec::with_capacity(to_receive.min(256)),
            empty: Vec::with_capacity(to_receive),
            sends,
            backing,
            to_receive,
        }
    }

    /// Gives the NIC chunks to receive into, until it has its share, or has no room for more now.
    pub(crate) fn fill(&mut self) {
        let missing = self.missing().min(self.nic.room_to_give());
        let taken = std::iter::from_fn(|| self.pool.take()).take(missing);
        self.empty.extend(taken);
        self.nic.give(&mut self.empty);
    }

    /// Chunks that the NIC lacks of its share.
    fn missing(&self) -> usize {
        let with_us = self.pool.len() + self.empty.len() + self.received.len();
        let being_sent = self.nic.unsent().saturating_sub(self.references.total());
        let to_receive = self.all.saturating_sub(with_us + being_sent);
        // Those in hand go back to the NIC.
        let soon = self.empty.len() + self.received.len();
        self.to_receive.saturating_sub(to_receive + soon)
    }

    /// Drops what was received for nobody; how many frames that were.
    pub(crate) fn discard(&mut self) -> u64 {
        let mut frames = 0;
        for piece in self.received.drain(..).chain(self.nic.from_nic(usize::MAX)) {
            frames += u64::from(!piece.more);
            self.pool.put(piece.frame);
        }
        frames
    }

    /// Takes back what was sent.
    #[inline]
    pub(crate) fn reclaim(&mut self, most: usize) {
        if self.nic.unsent() > 0 {
            let references = &mut self.references;
            let free = |frame| references.give_back(frame);
            self.pool.extend(self.nic.sent(most).filter_map(free));
        }
    }

    /// Gives chunks back that were to be sent.
    pub(crate) fn take_back(&mut self, frames: impl Iterator<Item = Frame>) {
        let references = &mut self.references;
        self.pool
            .extend(frames.filter_map(|frame| references.give_back(frame)));
    }
}

/// For each chunk of a UMEM, how many descriptors refer to it beside the first. (A chunk has 4096 bytes at most, and
/// each of them at least one.)
#[derive(Debug)]
pub(crate) struct References {
    further: Vec<u16>,
    /// Sum of all.
    total: usize,
    chunk_bytes: u64,
}

impl References {
    /// Of a UMEM to the chunks of which nothing refers. In unaligned mode, where a guest's frames begin anywhere, none
    /// is shared.
    pub(crate) fn new(umem: &Umem) -> Self {
        let chunks = match umem.is_unaligned() {
            true => 0,
            false => usize::try_from(umem.chunks()).unwrap_or(0),
        };
        Self {
            further: vec![0; chunks],
            total: 0,
            chunk_bytes: umem.chunk_size().into(),
        }
    }

    /// Descriptors that are out beside the first of each chunk.
    #[inline]
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Another frame for a chunk of which at least one is out.
    #[inline]
    pub(crate) fn share(&mut self, umem: &Umem, chunk: UmemOffset) -> Option<Frame> {
        let frame = umem.adopt(chunk).ok()?;
        *self.of(chunk)? += 1;
        self.total += 1;
        Some(frame)
    }

    /// A frame comes back; it again, if it was the last one of its chunk.
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
        self.further
            .get_mut(usize::try_from(chunk.get() / self.chunk_bytes).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use xsk::TxDesc;

    use super::*;
    use crate::switch::test_nic::{TestNic, Wire};

    #[test]
    fn next_lane_gives_the_nic_what_it_lacks_and_no_more() {
        let memory = OwnMemory::new(16 * 2048).expect("memory");
        let umem = Umem::aligned(Arc::new(memory), 2048, 0).expect("good");
        let pool: FramePool = umem.all_frames().expect("ours").collect();
        let nic = TestNic(Arc::new(Mutex::new(Wire::new(umem.clone(), 8, 1))));
        let chunks = Chunks {
            umem,
            pool,
            to_receive: 10,
            backing: String::new(),
        };
        let mut queue = NicQueue::new(nic, chunks, Sends::PLAIN);
        let sent = |frame| TxDesc {
            frame,
            offset: UmemOffset::new(0),
            len: 60,
            more: false,
            metadata: false,
        };
        // Two are being sent, seven are with the NIC to receive into.
        let sending: Vec<_> = (0..2).filter_map(|_| queue.pool.take()).map(sent).collect();
        queue.nic.to_nic(sending.into_iter());
        let mut with_nic: Vec<_> = (0..7).filter_map(|_| queue.pool.take()).collect();
        assert_eq!(queue.missing(), 3);
        with_nic.extend((0..4).filter_map(|_| queue.pool.take()));
        assert_eq!(queue.missing(), 0, "never more than its share");
    }
}
