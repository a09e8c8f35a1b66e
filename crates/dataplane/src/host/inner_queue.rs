//! Virtqueues in the daemon's memory, where the daemon is also the driver. They carry frames to and from a tap
//! ([`crate::host::tap_lane`]).
//!
//! For a sender, the device's half is a guest that accepts frames with their tags, GSO packets and partial checksums.
//! So frames are batched, held back and finally lost here like frames to guests.

use std::sync::Arc;

use device::call::{Call, CallBlocked};
use device::offloads::Offloads;
use device::pair::{Guest, HEADER_BYTES, Vring};
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, RamError, SplitDriver};
use virtqueue::{
    GuestAddr, Journal, MapError, MemoryMap, Queue, QueueFeatures, QueueSize, QueueStart, RingError,
    RingFormat, RingLayout, RingShape, TrustedFiles,
};

/// Entries of a queue, and buffers of one that receives frames.
pub(crate) const BUFFERS: u16 = 256;
/// Bytes of a buffer that receives frames: a frame takes one, a GSO packet 17.
const BUFFER_BYTES: u32 = 4096;
/// Bytes for the rings of a queue.
const RING_BYTES: u64 = 1 << 16;
/// Offset of `num_buffers` in the virtio-net header.
const NUM_BUFFERS_AT: u64 = 10;
/// More than a GSO packet with its tag.
const FRAME_LIMIT: u32 = 65_550;
/// Most buffers that a received frame is in, with its header.
const PARTS: usize = (FRAME_LIMIT + HEADER_BYTES).div_ceil(BUFFER_BYTES) as usize;
/// Bytes of the longest frame with its header, in whole pages.
pub(crate) const LONGEST_BYTES: u32 = PARTS as u32 * BUFFER_BYTES;

/// Why a queue could not be created.
#[derive(Debug, thiserror::Error)]
pub enum InnerQueueError {
    #[error("no memory for frames to and from a tap")]
    Memory(#[from] RamError),
    #[error("cannot map the memory of frames to and from a tap")]
    Map(#[from] MapError),
    #[error("no descriptor left")]
    Descriptor(#[from] std::io::Error),
    #[error("the ring does not fit the queue's memory")]
    Ring(#[from] RingError),
}

/// Memory for queues and their buffers.
pub(crate) struct Memory {
    pub(crate) ram: Arc<GuestRam>,
    map: Arc<MemoryMap>,
}

impl Memory {
    /// For two queues: one that receives frames, and one for at most `longest` frames of any length.
    pub(crate) fn new(longest: u64) -> Result<Self, InnerQueueError> {
        let received = u64::from(BUFFERS) * u64::from(BUFFER_BYTES);
        let len = received + longest * u64::from(LONGEST_BYTES) + 2 * RING_BYTES;
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), len)])?);
        let regions = ram.regions()?;
        Ok(Self {
            map: Arc::new(MemoryMap::new(regions, 0, &TrustedFiles)?),
            ram,
        })
    }

    /// A queue for a device that accepts these offloads, and its driver.
    pub(crate) fn queue(&self, offloads: Offloads) -> Result<(Vring, SplitDriver), InnerQueueError> {
        let size = QueueSize::new(BUFFERS.into()).map_err(|_| std::io::Error::other("a power of two"))?;
        let features = DriverFeatures {
            event_idx: true,
            in_order: false,
        };
        let driver = SplitDriver::new(&self.ram, size, features)?;
        let shape = RingShape::new(RingFormat::Split, size);
        let rings = RingLayout::from_user(&self.map, shape, driver.ring_user_addresses())?;
        let features = QueueFeatures {
            event_idx: true,
            ..QueueFeatures::default()
        };
        let start = QueueStart {
            base: 0,
            journal: Journal::None,
            log: None,
        };
        let vring = Vring {
            queue: Queue::new(&self.map, rings, features, start)?,
            kick: None,
            call: Call::new(None, CallBlocked::default()),
            enabled: true,
            guest: Guest {
                memory: Arc::clone(&self.map),
                header_bytes: HEADER_BYTES,
                mergeable: true,
                frame_limit: FRAME_LIMIT,
                offloads,
                partial_checksums: false,
                log: None,
            },
            sent_before: 0,
        };
        Ok((vring, driver))
    }
}

/// The driver of a queue that receives frames.
pub(crate) struct Received {
    pub(crate) driver: SplitDriver,
    ram: Arc<GuestRam>,
    /// By chain: its buffer.
    address_of: Vec<GuestAddr>,
    /// Buffers of the frame that is being assembled, or was assembled last.
    frame: Vec<Buffer>,
    /// How many of its buffers have not arrived.
    missing: u16,
}

impl Received {
    /// Posts all buffers of the queue.
    pub(crate) fn new(driver: SplitDriver, memory: &Memory) -> Result<Self, InnerQueueError> {
        let mut received = Self {
            driver,
            ram: Arc::clone(&memory.ram),
            address_of: vec![GuestAddr(0); usize::from(BUFFERS)],
            frame: Vec::with_capacity(PARTS + 1),
            missing: 0,
        };
        for _ in 0..BUFFERS {
            let buffer = received.ram.alloc(BUFFER_BYTES.into(), 64)?;
            received.post(buffer);
        }
        received.driver.publish();
        received.driver.disable_calls();
        Ok(received)
    }

    /// Posts a buffer, without publishing it.
    pub(crate) fn post(&mut self, buffer: GuestAddr) {
        // There are as many descriptors as buffers.
        if let Some(chain) = self.driver.add(&[Buffer::writable(buffer, BUFFER_BYTES)]) {
            self.address_of[usize::from(chain)] = buffer;
        }
    }

    /// The buffers of the next whole frame, with its header.
    pub(crate) fn next(&mut self) -> Option<&[Buffer]> {
        if self.missing == 0 {
            self.frame.clear();
        }
        loop {
            let used = self.driver.take_used()?;
            let buffer = self.address_of[usize::from(used.head)];
            if self.missing == 0 {
                let mut count = [0; 2];
                self.ram
                    .read(GuestAddr(buffer.get() + NUM_BUFFERS_AT), &mut count);
                self.missing = u16::from_le_bytes(count).max(1);
            }
            self.frame.push(Buffer::readable(buffer, used.len));
            self.missing -= 1;
            if self.missing == 0 {
                return Some(&self.frame);
            }
        }
    }

    /// Posts the buffers of the last frame again, without publishing them.
    pub(crate) fn post_again(&mut self) {
        let mut frame = std::mem::take(&mut self.frame);
        frame.drain(..).for_each(|part| self.post(part.addr));
        self.frame = frame;
    }
}
