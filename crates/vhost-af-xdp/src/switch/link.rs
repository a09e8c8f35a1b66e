//! From one worker to another: what guests of a network send whose destinations other workers serve.
//!
//! Theory of operation. A link is a virtqueue in memory of ours, with the device on the worker that gives frames and
//! the driver on the one that takes them. To the giving worker the link is one more guest of the network: one that
//! takes frames with their tags, GSO packets whole and checksums unfinished. So all that is done for guests is done for
//! it: batches, back-pressure for a while and loss after that (`to_guest_no_buffer`), calls where the other side
//! sleeps, with the re-check that loses none. Both sides' fences are those of [`virtqueue`].
//!
//! On the other side the buffers that came are put, as they lie there, into a second virtqueue, of which the device is
//! a [`PortLane`]: frames are taken from it like those of a guest, but judged by their addresses only, as who sent them
//! was judged where he is. They go to ports of this worker, and to the uplink where the other worker has none. What
//! finds no buffer is lost at once, so that no guest holds up what goes to others.
//!
//! ```text
//!     worker A                                      worker B
//!     PortLane ── to_guest ══ calls ═══▶ driver ── driver ══▶ PortLane (Judge::Link) ── ports of B, uplink
//!               ◀══ kicks ═ posts buffers again ◀── used ══
//! ```

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use device::call::{Call, CallBlocked};
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::{HEADER_BYTES, QueuePair, Vring};
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, RamError, SplitDriver};
use virtqueue::{
    GuestAddr, Journal, MapError, MemoryMap, Queue, QueueFeatures, QueueSize, QueueStart, RingError,
    RingFormat, RingLayout, RingShape, TrustedFiles,
};

use super::lane::{Blame, Lane, Near, Stopped, Work};
use super::members::Members;
use super::port_lane::PortLane;
use super::table::PortNumber;

/// Buffers of a link, and entries of its queues: 1 MiB.
const BUFFERS: u16 = 256;
/// Of each, bytes: one has a frame, 17 a GSO packet.
const BUFFER_BYTES: u32 = 4096;
/// Bytes for the rings of four queues.
const RING_BYTES: u64 = 4 << 16;
/// `num_buffers` in the virtio-net header.
const NUM_BUFFERS_AT: u64 = 10;
/// More than a GSO packet with its tag.
const FRAME_LIMIT: u32 = 65_550;

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("no memory for a link between workers")]
    Memory(#[from] RamError),
    #[error("cannot map the memory of a link between workers")]
    Map(#[from] MapError),
    #[error("no descriptor left")]
    Descriptor(#[from] std::io::Error),
    #[error("a ring of a link between workers does not fit")]
    Ring(#[from] RingError),
}

/// Both ends of a link.
pub(crate) struct Link {
    /// For the worker that gives frames.
    pub(crate) giving: PortLane,
    /// For the one that takes them.
    pub(crate) taking: LinkLane,
}

impl Link {
    /// Makes one, whose ends count there.
    /// Errors: [`LinkError`].
    pub(crate) fn new([gives, takes]: [Arc<PairCounters>; 2]) -> Result<Self, LinkError> {
        let buffers = u64::from(BUFFERS) * u64::from(BUFFER_BYTES);
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), buffers + RING_BYTES)])?);
        let regions = ram.regions()?;
        let memory = Memory {
            map: Arc::new(MemoryMap::new(regions, 0, &TrustedFiles)?),
            ram,
        };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = || eventfd(0, flags).map_err(std::io::Error::from);
        let (posted, came) = (event()?, event()?);
        let (mut given, received) = memory.queue(Some(posted.try_clone()?), Some(came.try_clone()?))?;
        let (mut taken, sent) = memory.queue(Some(came), None)?;
        (given.enabled, taken.enabled) = (true, true);
        let giving = memory.pair(memory.queue(None, None)?.0, given);
        let taking = memory.pair(taken, memory.queue(None, None)?.0);
        let mut taking = LinkLane {
            lane: PortLane::of_link(taking, takes),
            received,
            sent,
            posted,
            ram: memory.ram,
            address_of: vec![GuestAddr(0); usize::from(BUFFERS)],
            parts_of: vec![Vec::new(); usize::from(BUFFERS)],
            frame: Vec::with_capacity(FRAME_LIMIT.div_ceil(BUFFER_BYTES) as usize + 1),
            missing: 0,
        };
        for _ in 0..BUFFERS {
            let buffer = taking.ram.alloc(BUFFER_BYTES.into(), 64)?;
            taking.post(buffer);
        }
        taking.received.publish();
        taking.received.disable_calls();
        // It is given frames, and has none of its own.
        let nobody = (PortNumber(u16::MAX), 0);
        Ok(Self {
            giving: PortLane::new(giving, gives, nobody),
            taking,
        })
    }
}

/// Memory of a link.
struct Memory {
    ram: Arc<GuestRam>,
    map: Arc<MemoryMap>,
}

impl Memory {
    /// A queue, off, and its driver.
    fn queue(&self, kick: Option<OwnedFd>, call: Option<OwnedFd>) -> Result<(Vring, SplitDriver), LinkError> {
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
            kick,
            call: Call::new(call, CallBlocked::default()),
            enabled: false,
        };
        Ok((vring, driver))
    }

    /// A pair that takes all offloads.
    fn pair(&self, from_guest: Vring, to_guest: Vring) -> QueuePair {
        QueuePair {
            sent_before: 0,
            memory: Arc::clone(&self.map),
            from_guest,
            to_guest,
            header_bytes: HEADER_BYTES,
            mergeable: true,
            frame_limit: FRAME_LIMIT,
            offloads: Offloads::all(),
            partial_checksums: false,
            log: None,
        }
    }
}

/// See the module's head: the end that takes frames.
pub(crate) struct LinkLane {
    lane: PortLane,
    /// What the other worker gives.
    received: SplitDriver,
    /// What our half takes.
    sent: SplitDriver,
    /// Wakes the other worker, if it waits for buffers.
    posted: OwnedFd,
    ram: Arc<GuestRam>,
    /// By chain of `received`: its buffer.
    address_of: Vec<GuestAddr>,
    /// By chain of `sent`: its buffers.
    parts_of: Vec<Vec<GuestAddr>>,
    /// The one that is put together.
    frame: Vec<Buffer>,
    /// Buffers of it that have not come.
    missing: u16,
}

impl LinkLane {
    /// Gives the other worker a buffer, not yet published.
    fn post(&mut self, buffer: GuestAddr) {
        // There are as many descriptors as buffers.
        if let Some(chain) = self.received.add(&[Buffer::writable(buffer, BUFFER_BYTES)]) {
            self.address_of[usize::from(chain)] = buffer;
        }
    }

    /// Puts what came into the queue of our half.
    fn take(&mut self) {
        let mut any = false;
        while let Some(used) = self.received.take_used() {
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
                // There are as many descriptors as buffers.
                if let Some(chain) = self.sent.add(&self.frame) {
                    let parts = self.frame.iter().map(|part| part.addr);
                    self.parts_of[usize::from(chain)].extend(parts);
                }
                self.frame.clear();
                any = true;
            }
        }
        if any {
            // It looks right after.
            self.sent.publish();
        }
    }

    /// Gives the other worker the buffers again that our half is done with.
    fn give_back(&mut self) {
        let mut any = false;
        while let Some(used) = self.sent.take_used() {
            let mut parts = std::mem::take(&mut self.parts_of[usize::from(used.head)]);
            parts.drain(..).for_each(|part| self.post(part));
            self.parts_of[usize::from(used.head)] = parts;
            any = true;
        }
        if any && self.received.publish() {
            let _ = rustix::io::write(&self.posted, &1u64.to_ne_bytes());
        }
    }
}

impl Lane for LinkLane {
    fn breathe(&mut self, near: Near<'_>) -> Result<usize, Blame> {
        self.take();
        let moved = self.lane.breathe(near);
        self.give_back();
        moved
    }

    fn arm(&mut self, near: Near<'_>) -> Work {
        match self.received.enable_calls() {
            true => Work::Now,
            false => self.lane.arm(near),
        }
    }

    fn disarm(&mut self) {
        self.received.disable_calls();
        self.lane.disarm();
    }

    fn pair(&self) -> Option<&QueuePair> {
        self.lane.pair()
    }

    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        self.lane.pair_mut()
    }

    fn meet(&mut self, members: &Arc<Members>) {
        self.lane.meet(members);
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn inject(&mut self, _frame: &[u8], _near: Near<'_>) {}

    fn stop(self: Box<Self>) -> Stopped {
        Box::new(self.lane).stop()
    }
}
