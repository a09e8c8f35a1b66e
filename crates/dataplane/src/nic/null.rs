//! The null NIC (`--null`): frames are made and dropped in this process.
//!
//! Purpose: to measure the cost of the virtqueue path alone, and to run a daemon without privileges. Each empty frame
//! that it gets is returned at once as a received frame of a fixed length; each sent frame is completed at once. Like a
//! real NIC in direct placement it writes the virtio-net header, and the first bytes of the frame; the rest of a
//! received frame is the earlier content of the memory (in direct placement: the guest's own).

use std::os::fd::BorrowedFd;

use device::meter;
use xsk::{Frame, RxDesc, TxDesc, Umem, UmemOffset};

use crate::nic::queue::{LinkState, Nic};

/// A received frame begins at this offset in its chunk.
const HEADROOM: u64 = xsk::XDP_PACKET_HEADROOM as u64;

/// How a null NIC receives.
#[derive(Debug, Clone, Copy)]
pub struct NullConfig {
    /// Length of the frames it makes, bytes; 0: it makes none.
    pub frame_bytes: u32,
    /// Virtio-net header to write in front of each, as the steering program does; 0 for none.
    pub header_bytes: u32,
    /// Most received frames that it returns at a time.
    pub at_once: usize,
}

/// See the module's head.
pub struct NullNic {
    umem: Umem,
    config: NullConfig,
    empty: Ring,
    sent: Vec<Frame>,
    capacity: usize,
}

/// Chunks to receive into, first in, first out.
struct Ring {
    /// Their offsets; the length is a power of two.
    chunks: Box<[UmemOffset]>,
    /// Free-running indices: of the next chunk to take, and of the next free place.
    next: usize,
    end: usize,
}

impl Ring {
    fn new(capacity: usize) -> Self {
        Self {
            chunks: vec![UmemOffset::new(0); capacity.next_power_of_two()].into(),
            next: 0,
            end: 0,
        }
    }

    fn len(&self) -> usize {
        self.end - self.next
    }

    fn put(&mut self, frame: Frame) {
        let at = self.end & (self.chunks.len() - 1);
        self.chunks[at] = frame.into_offset();
        self.end += 1;
    }
}

/// Received frames. The index of the next chunk is kept here and stored in the ring at the end, as with a socket's
/// ring: a memory access for each frame would be a large part of the cost that this NIC measures.
struct Received<'a> {
    ring: &'a mut Ring,
    umem: &'a Umem,
    config: NullConfig,
    next: usize,
    end: usize,
}

impl Iterator for Received<'_> {
    type Item = RxDesc;

    #[inline]
    fn next(&mut self) -> Option<RxDesc> {
        if self.next == self.end {
            return None;
        }
        let chunk = self.ring.chunks[self.next & (self.ring.chunks.len() - 1)];
        let frame = self.umem.adopt(chunk).ok()?;
        self.next += 1;
        let data = UmemOffset::new(chunk.get() + HEADROOM);
        if self.config.header_bytes > 0 {
            let header = &HEADER[..self.config.header_bytes as usize];
            let _ = self
                .umem
                .write(UmemOffset::new(data.get() - header.len() as u64), header);
        }
        if !writes_once(self.umem) {
            let _ = self.umem.write(data, &ETHERNET);
        }
        Some(RxDesc {
            frame,
            data,
            len: self.config.frame_bytes,
            more: false,
        })
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end - self.next;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Received<'_> {}

impl Drop for Received<'_> {
    #[inline]
    fn drop(&mut self) {
        self.ring.next = self.next;
    }
}

/// Header (num_buffers = 1), then Ethernet: broadcast, from a locally administered address, of the
/// ethertype that is reserved for local experiments (IEEE 802, 0x88b5).
const HEADER: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const ETHERNET: [u8; 14] = [
    0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 0, 0, 0, 1, 0x88, 0xb5,
];

impl NullNic {
    /// A null NIC over `umem` whose rings hold `capacity` frames each.
    pub fn new(umem: Umem, config: NullConfig, capacity: usize) -> Self {
        if writes_once(&umem) {
            for chunk in (0..umem.len()).step_by(umem.chunk_size() as usize) {
                let _ = umem.write(UmemOffset::new(chunk + HEADROOM), &ETHERNET);
            }
        }
        Self {
            umem,
            config,
            empty: Ring::new(capacity),
            sent: Vec::with_capacity(capacity),
            capacity,
        }
    }
}

/// Whether all of the UMEM is memory of the daemon: then no guest overwrites frames' first bytes, and they are written
/// only once. Otherwise it begins with guest memory.
fn writes_once(umem: &Umem) -> bool {
    umem.private_from().get() == 0
}

impl Nic for NullNic {
    fn room_to_nic(&mut self) -> usize {
        self.capacity - self.sent.len()
    }

    #[inline]
    fn to_nic(&mut self, frames: impl ExactSizeIterator<Item = TxDesc>) {
        let mut given = 0;
        self.sent.extend(frames.map(|desc| {
            given += u64::from(!desc.more);
            desc.frame
        }));
        meter::count_delivered(given);
    }

    fn kick(&mut self) -> LinkState {
        LinkState::Up
    }

    fn unsent(&self) -> usize {
        self.sent.len()
    }

    fn sent(&mut self, max: usize) -> impl Iterator<Item = Frame> + '_ {
        let count = max.min(self.sent.len());
        self.sent.drain(..count)
    }

    fn came_back(&mut self, _frames: usize) {}

    fn room_to_give(&mut self) -> usize {
        self.capacity - self.empty.len()
    }

    fn give(&mut self, frames: &mut Vec<Frame>, note: impl FnOnce(&[Frame])) {
        let room = frames.len().min(self.capacity - self.empty.len());
        note(&frames[..room]);
        frames.drain(..room).for_each(|frame| self.empty.put(frame));
    }

    fn from_nic(&mut self, max: usize) -> impl ExactSizeIterator<Item = RxDesc> + '_ {
        let count = max.min(self.received());
        Received {
            next: self.empty.next,
            end: self.empty.next + count,
            ring: &mut self.empty,
            umem: &self.umem,
            config: self.config,
        }
    }

    fn received(&mut self) -> usize {
        match self.config.frame_bytes {
            0 => 0,
            _ => self.empty.len().min(self.config.at_once),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
