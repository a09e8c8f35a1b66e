//! A lane with `--memory=direct`: guest RAM is the UMEM, nobody in userspace touches a frame.
//!
//! NIC → guest: an available receive buffer at offset B becomes the fill entry `B + header - 256`.
//! The kernel puts a frame 256 bytes (XDP_PACKET_HEADROOM) after a fill address, and the steering
//! program's metadata, which is the virtio-net header, just before the frame: so the header lands
//! at B, the frame behind it, and all that is left for us is the used element.
//!
//! Guest → NIC: a frame that lies in one piece is sent from where it is. One in several pieces is
//! gathered in a chunk of the bounce area when it fits, else sent as a multi-buffer frame whose
//! descriptors refer to the pieces.
//!
//! A GSO packet is cut: each segment's headers are built in a chunk of the bounce area. A socket that reads by DMA gets
//! the payload by reference, as further descriptors; one that copies anyway gets the segment whole, because it needs
//! more time for each further descriptor than for the bytes. Segments for which there is no room stay in hand, and the
//! chains behind them in the guest's queue; the chain is given back when the last one was sent.
//!
//! The bounce area lies behind guest RAM in the same UMEM; no guest can see it. It also serves
//! receive buffers that cannot take a frame directly: too small for the longest frame of the
//! interface, made of several descriptors, or with less than 256 - header bytes of their region
//! before them. Such a buffer is *parked*, a bounce chunk goes to the NIC in its place, and the
//! frame is copied when it arrives. A buffer too small for the longest frame cannot be paired with
//! one chunk; from the first of these on, all buffers are parked until the queue starts anew.
//!
//! Invariants: a chunk in the bounce area is in the pool or in one table, never both. Both tables
//! give entries back in the order in which the guest made them available, so a queue can be
//! stopped exactly: what the kernel still held is not used, and the base is rewound to it.

mod from_guest;
pub(crate) mod in_flight;
pub(crate) mod registration;
mod to_guest;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtqueue::{Buffer, ChainId, Chains, Prefetch};
use xsk::{Frame, FramePool, RxDesc, TxDesc, Umem, UmemOffset};

use crate::direct::in_flight::InFlight;
use crate::nic::binding::LARGE_CHUNK;
use crate::nic::interface_queue::Coupled;
use crate::nic::queue::{LinkState, MOST_PIECES, Nic, Sends};
use crate::switch::checksums::PrivateLook;
use crate::switch::from_guest::Sender;
use crate::switch::gso::GsoPacket;
use crate::switch::lane::{Blame, Lane, Peer, Stopped, Work};
use crate::switch::limits::{BATCH, SEGMENTS};
use crate::switch::to_nic::{LAST_KICKS, copied};
use device::counters::PairCounters;
use device::pair::{Piece, QueuePair};

/// Chunk of the UMEM, bytes: the largest, because each bind costs kernel memory per chunk.
pub(crate) const CHUNK_BYTES: u32 = LARGE_CHUNK;
/// Most bounce chunks that wait for frames at a time, of those that a lane has: the others are for
/// frames of the guest, which parked buffers must not hold up.
const MOST_BOUNCES_POSTED: usize = 128;
/// Buffers are parked until they have so many segments in all: each has a byte at least, so that they hold a frame of
/// any length. A guest chooses how many segments a buffer has, and we keep them.
const MOST_PARKED_BUFFERS: usize = 4096;

/// A buffer that the NIC receives into.
enum Posted {
    /// The guest's own; filled with `len` bytes of frame once done.
    Guest { chain: ChainId, len: u32 },
    /// A bounce chunk for a parked buffer; `filled` once done.
    Bounce { filled: Option<RxDesc> },
}

/// A descriptor that the NIC sends from, or a chain that waits to be given back in its turn.
struct Outbound {
    /// The chain is the guest's again once this descriptor is done.
    chain: Option<ChainId>,
    /// It lies in the bounce area.
    bounce: bool,
}

/// A GSO packet in hand. Its chain is the guest's again once the last segment is sent.
struct Cutting {
    packet: GsoPacket,
    chain: ChainId,
}

/// A receive buffer of the guest that frames reach through the bounce area.
struct Parked {
    chain: ChainId,
    /// How many it has.
    buffers: usize,
    bytes: u64,
}

pub(crate) struct DirectLane<N> {
    pair: QueuePair,
    end: DirectEnd<N>,
    counters: Arc<PairCounters>,
    sender: Sender,
    posted: InFlight<Posted>,
    parked: VecDeque<Parked>,
    parked_buffers: VecDeque<Buffer>,
    parked_bytes: u64,
    /// Bounce chunks among `posted` that are not filled yet.
    bounces_posted: usize,
    /// A buffer smaller than the longest frame was seen: all later ones are parked, too, because
    /// frames may now need several, and the order of use must stay that of posting.
    park_all: bool,
    /// The last piece that was received said that its frame goes on.
    inside: bool,
    /// Looks at received frames, where they may have partial checksums.
    look: Option<PrivateLook>,
    chains: Chains,
    empty: Vec<Frame>,
    /// Those of a parked buffer that is written.
    buffers: Vec<Buffer>,
}

/// A NIC queue coupled with a guest: its UMEM is the guest's memory, with the bounce area behind it.
struct DirectEnd<N> {
    nic: N,
    umem: Umem,
    sends: Sends,
    /// Where the bounce area begins.
    own_from: UmemOffset,
    pool: FramePool,
    counters: Arc<PairCounters>,
    link: LinkState,
    sending: InFlight<Outbound>,
    /// A GSO packet of which segments wait for room; the chains behind it wait, too.
    cutting: Option<Cutting>,
    /// The buffers of its chain.
    cut_buffers: Vec<Buffer>,
    /// A buffer waits to be parked until a bounce chunk comes back, and with it, perhaps, a parked buffer goes.
    bounces_out: bool,
    /// Descriptors that the ring had room for when the burst began.
    ring: usize,
    outgoing: Vec<TxDesc>,
    pieces: Vec<Piece>,
}

/// What the lane needs to know of its memory.
pub(crate) struct DirectMemory {
    /// Guest RAM and bounce area, registered.
    pub(crate) umem: Umem,
    /// The chunks of the bounce area that are this lane's.
    pub(crate) pool: FramePool,
    /// Entries that either table may hold: at least the size of the vrings and of the rings.
    pub(crate) in_flight: usize,
    /// Where the bounce area begins, behind guest RAM.
    pub(crate) own_from: UmemOffset,
}

impl<N: Nic> DirectLane<N> {
    /// Joins a guest with a NIC queue whose UMEM is the guest's memory.
    pub(crate) fn new(
        pair: QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        counters: Arc<PairCounters>,
    ) -> Self {
        let (mut pair, Coupled { mut nic, sends }) = (pair, queue);
        if sends.zero_copy && !pair.offloads.csum {
            // Else frames, or some of them, are read by this CPU: by the kernel that copies them, or by us, to sum or
            // to cut them.
            pair.from_guest.queue.set_prefetch(Prefetch::Header);
        }
        // An interface that is down is known before the first frame waits in its ring.
        let link = nic.kick();
        let look = PrivateLook::of(&pair);
        let end = DirectEnd {
            nic,
            umem: memory.umem,
            sends,
            own_from: memory.own_from,
            pool: memory.pool,
            counters: Arc::clone(&counters),
            link,
            sending: InFlight::new(memory.in_flight),
            cutting: None,
            cut_buffers: Vec::new(),
            bounces_out: false,
            ring: 0,
            outgoing: Vec::with_capacity(SEGMENTS * 2),
            pieces: Vec::with_capacity(MOST_PIECES),
        };
        Self {
            pair,
            end,
            counters,
            sender: Sender::default(),
            posted: InFlight::new(memory.in_flight),
            parked: VecDeque::new(),
            parked_buffers: VecDeque::new(),
            parked_bytes: 0,
            bounces_posted: 0,
            park_all: false,
            inside: false,
            look,
            chains: Chains::default(),
            empty: Vec::with_capacity(BATCH),
            buffers: Vec::with_capacity(MOST_PIECES),
        }
    }
}

impl<N: Nic> Lane for DirectLane<N> {
    fn breathe(&mut self, _peer: Option<Peer<'_>>) -> Result<usize, Blame> {
        // Buffers first: what a guest sends that had to wait for this lane may be answered at once.
        let moved = self
            .to_guest()
            .and_then(|received| Ok(received + self.from_guest()?));
        moved.map_err(Blame::Own)
    }

    fn arm(&mut self, _peer: Option<Peer<'_>>) -> Work {
        if self.pair.from_guest.enabled && self.pair.from_guest.queue.enable_kicks() {
            let full =
                self.end.nic.room_to_nic() == 0 || self.end.sending.room() == 0 || self.end.pool.is_empty();
            let stuck = full || self.end.cutting.is_some();
            return if stuck { Work::Soon } else { Work::Now };
        }
        if self.pair.to_guest.enabled {
            if self.end.nic.has_frames() {
                return Work::Now;
            }
            let room = self.end.nic.room_to_give() > 0 && self.posted.room() > 0 && !self.end.bounces_out;
            if self.pair.to_guest.queue.enable_kicks() && room {
                return Work::Now;
            }
        }
        let soon = self.end.nic.unsent() > 0 || self.end.cutting.is_some() || self.pair.is_polled();
        if soon { Work::Soon } else { Work::None }
    }

    fn pair(&self) -> &QueuePair {
        &self.pair
    }

    fn pair_mut(&mut self) -> &mut QueuePair {
        &mut self.pair
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.end.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        // Frames lie in the guest's buffers already; they never wait for others.
        self.pair.to_guest.enabled
    }

    fn inject(&mut self, frame: &[u8], _peer: Option<Peer<'_>>) {
        if self.end.nic.room_to_nic() == 0 || self.end.sending.room() == 0 {
            return;
        }
        if let Some(chunk) = self.end.pool.take() {
            let outbound = Outbound {
                chain: None,
                bounce: true,
            };
            self.end.sending.push(chunk.offset().get(), outbound);
            let desc = copied(chunk, frame, &self.end.umem);
            self.end.nic.to_nic(std::iter::once(desc));
            self.end.kick();
        }
    }

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        lane.pair.leave_calls();
        let half_sent = lane.end.cut_at_last(&mut lane.pair);
        // What is queued is sent or given up now: repeating a frame would be worse than losing it.
        for _ in 0..LAST_KICKS {
            if lane.end.nic.unsent() == 0 || lane.end.link != LinkState::Up {
                break;
            }
            lane.end.kick();
            lane.end.reap(&mut lane.pair);
        }
        // Frames that arrived are the guest's; taken before the socket closes.
        let mut received = 0;
        loop {
            match lane.collect() {
                0 => break,
                frames => received += frames,
            }
        }
        lane.counters.to_guest_queue_stopped.add(lane.posted.len_done());
        // Closing the socket ends the kernel's reads and writes: only then is the rest given back, and
        // only then may the bases be answered.
        drop(lane.end.nic);
        while let Some(outbound) = lane.end.sending.pop_any() {
            if let Some(chain) = outbound.chain {
                lane.pair.from_guest.queue.push_used(chain, 0);
            }
        }
        if let Some(chain) = half_sent {
            lane.pair.from_guest.queue.push_used(chain, 0);
        }
        lane.pair.from_guest.publish(&lane.counters);
        if received > 0 {
            lane.pair.to_guest.publish(&lane.counters);
        }
        // Everything that the NIC or the parking place still holds was never used: rewind to it.
        let mut held: u16 = lane.parked.iter().map(|parked| parked.chain.slots).sum();
        while let Some(posted) = lane.posted.pop_any() {
            if let Posted::Guest { chain, .. } = posted {
                held += chain.slots;
            }
        }
        lane.pair.to_guest.queue.unpop(held);
        Stopped {
            pair: lane.pair.stopped(),
            queue: None,
        }
    }
}
