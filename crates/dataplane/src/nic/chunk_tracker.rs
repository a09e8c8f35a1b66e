//! Which chunks of a queue's memory the NIC has: to receive into, or to send from.
//!
//! Purpose: kernel and driver name a returned chunk by its address alone. A driver that returns one twice (mlx5e did,
//! after it had failed to pass a frame on), or one that it never had, must not give a chunk two owners: a guest would
//! get bytes of another frame, and the NIC would write over them. So the tracker records each chunk that the NIC gets,
//! and looks up each one that comes back. A completion for a chunk that the NIC does not have is *unexpected*: it is
//! counted and ignored.
//!
//! Invariants: a chunk is recorded before the NIC gets it, and not after it is back. A look-up is one index into a
//! table that never grows. An unexpected completion is detected only while the daemon has its chunk: if the NIC got the
//! chunk again meanwhile, it cannot be distinguished from the real one. A driver that fails to pass frames on because
//! the ring is full cannot cause this: the RX ring has room for all chunks that a NIC gets to receive into.

use xsk::{Frame, RxDesc, Umem, UmemOffset};

/// The NIC has the chunk to receive into. (As a number of descriptors it is larger than any ring.)
const TO_RECEIVE: u16 = u16::MAX;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct ChunkTracker {
    /// For each chunk: [`TO_RECEIVE`], or how many descriptors refer to it that the NIC has to send.
    with_nic: Box<[u16]>,
    /// Where the first chunk begins in the UMEM.
    first: u64,
    /// Bytes of a chunk, a power of two.
    chunk_bytes: u64,
    /// Its base-2 logarithm.
    chunk_bits: u32,
}

/// A completion for a chunk that the NIC does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unexpected {
    /// It is not the last piece of its frame.
    pub(crate) more: bool,
}

impl ChunkTracker {
    /// For `chunks` chunks of a UMEM, the first of which begins at `first`. The NIC has none of them.
    pub(crate) fn new(umem: &Umem, first: UmemOffset, chunks: usize) -> Self {
        let chunk_bytes = u64::from(umem.chunk_size());
        Self {
            with_nic: vec![0; chunks].into_boxed_slice(),
            first: first.get(),
            chunk_bytes,
            chunk_bits: chunk_bytes.trailing_zeros(),
        }
    }

    /// Chunks that the NIC has to receive into. Computed on demand, never per frame.
    pub(crate) fn receiving(&self) -> usize {
        self.with_nic.iter().filter(|&&chunk| chunk == TO_RECEIVE).count()
    }

    /// The offsets of these chunks.
    pub(crate) fn to_receive(&self) -> impl Iterator<Item = UmemOffset> {
        let (first, bytes) = (self.first, self.chunk_bytes);
        let chunks = (0..).zip(&self.with_nic);
        let theirs = chunks.filter(|&(_, &chunk)| chunk == TO_RECEIVE);
        theirs.map(move |(number, _): (u64, _)| UmemOffset::new(first + number * bytes))
    }

    /// Records empty chunks that the NIC gets next.
    #[inline]
    pub(crate) fn give(&mut self, frames: &[Frame]) {
        for frame in frames {
            if let Some(chunk) = self.chunk(frame) {
                debug_assert_eq!(*chunk, 0, "{frame:?} is with the NIC already");
                *chunk = TO_RECEIVE;
            }
        }
    }

    /// Accepts a received piece in a chunk that the NIC had to receive into; the daemon has the chunk again.
    /// Errors: it is not inside such a chunk.
    #[inline]
    pub(crate) fn accept(&mut self, piece: RxDesc) -> Result<RxDesc, Unexpected> {
        let begin = piece.data.get().wrapping_sub(piece.frame.offset().get());
        let is_inside = begin.saturating_add(piece.len.into()) <= self.chunk_bytes;
        match self.chunk(&piece.frame) {
            Some(chunk) if *chunk == TO_RECEIVE && is_inside => {
                *chunk = 0;
                Ok(piece)
            }
            _ => Err(Unexpected { more: piece.more }),
        }
    }

    /// Records a descriptor to send that the NIC gets next.
    #[inline]
    pub(crate) fn send(&mut self, frame: &Frame) {
        if let Some(chunk) = self.chunk(frame) {
            debug_assert_ne!(*chunk, TO_RECEIVE, "{frame:?} is with the NIC already");
            *chunk += 1;
        }
    }

    /// Records that a sent descriptor was completed; false: the NIC had no such descriptor.
    #[inline]
    pub(crate) fn sent(&mut self, frame: &Frame) -> bool {
        match self.chunk(frame) {
            Some(chunk) if (1..TO_RECEIVE).contains(chunk) => {
                *chunk -= 1;
                true
            }
            _ => false,
        }
    }

    /// The record of the chunk that begins at a frame's offset; `None`: there is none. Of an offset inside a chunk, the
    /// low bits become the highest bits of the number, which is then beyond the last chunk.
    #[inline]
    fn chunk(&mut self, frame: &Frame) -> Option<&mut u16> {
        let from_first = frame.offset().get().wrapping_sub(self.first);
        let number = from_first.rotate_right(self.chunk_bits);
        self.with_nic.get_mut(usize::try_from(number).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use xsk::OwnMemory;

    use super::*;

    const CHUNK: u64 = 4096;
    /// Where the first chunk begins, behind memory of a guest.
    const FIRST: u64 = 4 * CHUNK;
    const CHUNKS: usize = 4;

    /// Memory in which a frame may begin anywhere, also behind the chunks.
    fn umem() -> Umem {
        let memory = OwnMemory::new(16 * CHUNK as usize).expect("memory");
        Umem::unaligned(Arc::new(memory), CHUNK as u32, 0).expect("good")
    }

    fn tracker(umem: &Umem) -> ChunkTracker {
        ChunkTracker::new(umem, UmemOffset::new(FIRST), CHUNKS)
    }

    fn frame(umem: &Umem, offset: u64) -> Frame {
        umem.adopt(UmemOffset::new(offset)).expect("inside")
    }

    /// As a driver would report it.
    fn piece(umem: &Umem, offset: u64) -> RxDesc {
        RxDesc {
            frame: frame(umem, offset),
            data: UmemOffset::new(offset + 256),
            len: 60,
            more: false,
        }
    }

    #[test]
    fn chunk_comes_back_as_often_as_it_was_given() {
        let umem = umem();
        let mut tracker = tracker(&umem);
        for _ in 0..3 {
            tracker.give(&[frame(&umem, FIRST + CHUNK)]);
            assert_eq!(tracker.receiving(), 1);
            assert!(tracker.accept(piece(&umem, FIRST + CHUNK)).is_ok());
            assert_eq!(
                tracker.accept(piece(&umem, FIRST + CHUNK)),
                Err(Unexpected { more: false })
            );
            assert_eq!(tracker.receiving(), 0);
        }
    }

    #[test]
    fn addresses_never_given_to_the_nic_are_unexpected() {
        let umem = umem();
        let mut tracker = tracker(&umem);
        let chunks = (0..CHUNKS as u64).map(|number| frame(&umem, FIRST + number * CHUNK));
        tracker.give(&chunks.collect::<Vec<_>>());
        let end = FIRST + CHUNKS as u64 * CHUNK;
        // In guest memory, behind the last chunk, in the middle of one, across the end.
        for offset in [
            0,
            FIRST - CHUNK,
            end,
            end + CHUNK,
            FIRST + 1,
            FIRST + 2048,
            end - 64,
        ] {
            assert!(tracker.accept(piece(&umem, offset)).is_err(), "{offset:#x}");
            assert!(!tracker.sent(&frame(&umem, offset)), "{offset:#x}");
        }
        assert_eq!(tracker.receiving(), CHUNKS);
    }

    #[test]
    fn bytes_outside_the_chunk_are_unexpected() {
        let umem = umem();
        let mut tracker = tracker(&umem);
        tracker.give(&[frame(&umem, FIRST)]);
        let good = || piece(&umem, FIRST);
        for bad in [
            RxDesc {
                len: 4096 - 255,
                ..good()
            },
            RxDesc {
                len: u32::MAX,
                ..good()
            },
            RxDesc {
                data: UmemOffset::new(FIRST - 1),
                ..good()
            },
            RxDesc {
                data: UmemOffset::new(FIRST + CHUNK),
                ..good()
            },
            RxDesc {
                data: UmemOffset::new(u64::MAX),
                ..good()
            },
        ] {
            assert!(tracker.accept(bad).is_err());
        }
        assert!(
            tracker
                .accept(RxDesc {
                    len: 4096 - 256,
                    ..good()
                })
                .is_ok()
        );
    }

    #[test]
    fn chunk_that_is_sent_is_not_received_into_nor_the_other_way_round() {
        let umem = umem();
        let mut tracker = tracker(&umem);
        // Two descriptors refer to it.
        tracker.send(&frame(&umem, FIRST));
        tracker.send(&frame(&umem, FIRST));
        tracker.give(&[frame(&umem, FIRST + CHUNK)]);
        assert!(tracker.accept(piece(&umem, FIRST)).is_err());
        assert!(!tracker.sent(&frame(&umem, FIRST + CHUNK)));
        let sent = std::iter::repeat_with(|| tracker.sent(&frame(&umem, FIRST)));
        assert_eq!(sent.take(3).collect::<Vec<_>>(), [true, true, false]);
        assert!(tracker.accept(piece(&umem, FIRST + CHUNK)).is_ok());
    }
}
