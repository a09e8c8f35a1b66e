//! A NIC that is not there (`--null`): frames are made and dropped in our process.
//!
//! Purpose: the cost of the virtqueue path alone, and a daemon that runs without privilege. Each
//! empty frame that it is given comes back at once as a received frame of a fixed length; each
//! frame sent comes back at once as sent. Like a real NIC in direct placement it writes the
//! virtio-net header where it is told to, and the first bytes of the frame; the rest of a received
//! frame is what the memory held (in direct placement: the guest's own).

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use xsk::{Frame, RxDesc, TxDesc, Umem, UmemOffset};

use crate::nic::queue::{LinkState, Nic};

/// A received frame begins so many bytes after its chunk.
const HEADROOM: u64 = xsk::XDP_PACKET_HEADROOM as u64;

/// How a null NIC receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NullConfig {
    /// Length of the frames it makes, bytes; 0: it makes none.
    pub(crate) frame_bytes: u32,
    /// Virtio-net header to write in front of each, as the steering program does; 0 for none.
    pub(crate) header_bytes: u32,
}

pub(crate) struct NullNic {
    umem: Umem,
    config: NullConfig,
    empty: VecDeque<Frame>,
    sent: Vec<Frame>,
    capacity: usize,
}

/// Header (num_buffers = 1), then Ethernet: broadcast, from a locally administered address, of the
/// ethertype that is reserved for local experiments (IEEE 802, 0x88b5).
const HEADER: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const ETHERNET: [u8; 14] = [
    0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 0, 0, 0, 1, 0x88, 0xb5,
];

impl NullNic {
    /// A null NIC over `umem` whose rings hold `capacity` frames each.
    pub(crate) fn new(umem: Umem, config: NullConfig, capacity: usize) -> Self {
        if writes_once(&umem) {
            for chunk in (0..umem.len()).step_by(umem.chunk_size() as usize) {
                let _ = umem.write(UmemOffset::new(chunk + HEADROOM), &ETHERNET);
            }
        }
        Self {
            umem,
            config,
            empty: VecDeque::with_capacity(capacity),
            sent: Vec::with_capacity(capacity),
            capacity,
        }
    }
}

/// Whether frames are received into chunks that nothing else writes: memory of ours, and of this NIC alone. Else the
/// UMEM is guest memory, with chunks of others behind it.
fn writes_once(umem: &Umem) -> bool {
    umem.private_from().get() == 0
}

impl Nic for NullNic {
    fn room_to_nic(&mut self) -> usize {
        self.capacity - self.sent.len()
    }

    fn to_nic(&mut self, frames: impl ExactSizeIterator<Item = TxDesc>) {
        self.sent.extend(frames.map(|desc| desc.frame));
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
        self.empty.extend(frames.drain(..room));
    }

    fn from_nic(&mut self, max: usize) -> impl Iterator<Item = RxDesc> + '_ {
        let (umem, config, empty) = (&self.umem, self.config, &mut self.empty);
        let max = if config.frame_bytes == 0 { 0 } else { max };
        std::iter::from_fn(move || empty.pop_front())
            .take(max)
            .map(move |frame| {
                let data = UmemOffset::new(frame.offset().get() + HEADROOM);
                if config.header_bytes > 0 {
                    let header = &HEADER[..config.header_bytes as usize];
                    let _ = umem.write(UmemOffset::new(data.get() - header.len() as u64), header);
                }
                if !writes_once(umem) {
                    let _ = umem.write(data, &ETHERNET);
                }
                RxDesc {
                    frame,
                    data,
                    len: config.frame_bytes,
                    more: false,
                }
            })
    }

    fn has_frames(&mut self) -> bool {
        self.config.frame_bytes > 0 && !self.empty.is_empty()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
