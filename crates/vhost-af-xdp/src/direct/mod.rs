//! A lane with `--memory=direct`: guest RAM is the UMEM, and no userspace code touches a frame.
//!
//! NIC → guest: an available receive buffer at offset B becomes the fill entry `B + header - 256 - headroom`. The
//! kernel puts a frame 256 bytes (XDP_PACKET_HEADROOM) and the UMEM's headroom after a fill address, and the steering
//! program's metadata, which is the virtio-net header, just before the frame: so the header lands at B, the frame
//! behind it, and all that is left for us is the used element.
//!
//! In zero-copy the NIC writes the frame itself, and may write to the end of its chunk, whatever the frame's length.
//! The headroom leaves no more of a chunk than the driver wants for the longest frame, and only buffers that hold that
//! are posted; and only those whose chunk is in one huge page, because the kernel silently rejects one that is not
//! contiguous for DMA (`xp_check_unaligned`, net/xdp/xsk_buff_pool.c).
//!
//! Guest → NIC: a frame in one piece is sent directly from guest memory. One in several pieces is gathered in a chunk
//! of the bounce area if it fits, otherwise sent as a multi-buffer frame whose descriptors refer to the pieces.
//!
//! A GSO packet is cut: each segment's headers are built in a chunk of the bounce area. A socket that reads by DMA gets
//! the payload by reference, as further descriptors; one that copies anyway gets the segment whole, because it needs
//! more time for each further descriptor than for the bytes. Segments for which there is no room stay in hand, and the
//! chains behind them in the guest's queue; the chain is given back when the last one was sent.
//!
//! The bounce area is behind guest RAM in the same UMEM; no guest can see it. It also serves receive buffers that
//! cannot take a frame directly ([`place`]): too small for the longest frame of the interface, or for what a NIC may
//! write; made of several descriptors; too near behind the start of their region; in zero-copy, across huge pages. Such
//! a buffer is *deferred*: a bounce chunk goes to the NIC in its place, and the frame is copied when it arrives. A
//! buffer too small for the longest frame cannot be paired with one chunk; from the first of these on, all buffers are
//! deferred until the queue restarts.
//!
//! Invariants: a chunk in the bounce area is in the pool or in one table, never both. Both tables give entries back in
//! the order in which the guest made them available, with the exception below. So a queue can be stopped exactly: what
//! the kernel still held is not used, and the base is rewound to it.
//!
//! The exception: receive buffers are returned in the order of their completions, where the guest and a successor of
//! this daemon support that ([`virtqueue::Queue::takes_any_order`]). A buffer that a driver keeps, because it dropped a
//! frame in it, then delays none of the others. If such a queue is stopped while a buffer is out that others overtook,
//! the queue cannot be rewound: all buffers that the kernel held are returned empty.
//!
//! No buffer is returned before the kernel and the NIC are done with guest memory: where the kernel copies, when the
//! socket is closed; where the NIC reads and writes by DMA, when its driver has released it, which is later
//! ([`Release`]). If that is unknown, no buffer is returned at all: a guest that lacks buffers is better off than one
//! whose memory is overwritten in another use.

mod from_guest;
pub(crate) mod in_flight;
pub(crate) mod member;
mod place;
pub(crate) mod registration;
mod segmentation;
pub(crate) mod send_direct;
mod to_guest;

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use common::binding::LARGE_CHUNK;
use virtqueue::{Buffer, ChainId, Prefetch};
use xsk::{Frame, FramePool, RxDesc, TxDesc, Umem, UmemError, UmemOffset};

use crate::direct::in_flight::InFlight;
use crate::direct::place::Place;
use crate::nic::endpoint::{Chunks, NicQueue};
use crate::nic::interface::RECEIVE_RING;
use crate::nic::interface_queue::{Coupled, Release};
use crate::nic::queue::{LinkState, MOST_PIECES, Nic};
use crate::switch::checksums::PrivateLook;
use crate::switch::gso::GsoPacket;
use crate::switch::lane::{Blame, Lane, LaneGuest, Siblings, Stopped, Work, enable_kicks};
use crate::switch::limits::BATCH;
use device::counters::PairCounters;
use device::pair::{Piece, QueuePair};

/// Chunk of the UMEM, bytes: the largest, because each bind costs kernel memory per chunk.
pub(crate) const CHUNK_BYTES: u32 = LARGE_CHUNK;
/// Most bounce chunks of a lane that wait for frames at a time: the others are for frames of the guest, which deferred
/// buffers must not delay.
const MOST_BOUNCES_POSTED: usize = 128;
/// Buffers are deferred until they have this many segments in all: each has a byte at least, so that they hold a frame
/// of any length. A guest chooses how many segments a buffer has, and the lane stores them.
const MOST_DEFERRED_BUFFERS: usize = 4096;

/// A buffer that the NIC receives into.
enum Posted {
    /// The guest's own; filled with `len` bytes of frame once done.
    Guest { chain: ChainId, len: u32 },
    /// A bounce chunk for a deferred buffer; `filled` once done.
    Bounce { filled: Option<RxDesc> },
}

/// A descriptor that the NIC sends from, or a chain that waits for older ones to be returned.
struct Outbound {
    /// The chain is the guest's again once this descriptor is done.
    chain: Option<ChainId>,
    /// It lies in the bounce area.
    bounce: bool,
    /// A frame of the guest ends with it.
    ends: bool,
}

/// A GSO packet in hand. Its chain is the guest's again once the last segment is sent.
struct Segmentation {
    packet: GsoPacket,
    chain: ChainId,
}

/// A receive buffer of the guest that frames reach through the bounce area.
struct Deferred {
    chain: ChainId,
    /// How many it has.
    buffers: usize,
    bytes: u64,
}

pub(crate) struct DirectLane<N> {
    guest: LaneGuest,
    end: DirectEnd<N>,
    posted: InFlight<Posted>,
    deferred: VecDeque<Deferred>,
    deferred_buffers: VecDeque<Buffer>,
    deferred_bytes: u64,
    /// Receive buffers go back as the NIC is done with them.
    any_order: bool,
    place: Place,
    /// Bounce chunks among `posted` that are not filled yet.
    bounces_posted: usize,
    /// There was a buffer smaller than the longest frame: all later ones are deferred, too, because frames may now need
    /// several, and the order of use must stay that of posting.
    defer_all: bool,
    /// The last received piece was not the last of its frame.
    inside: bool,
    /// Looks at received frames, where they may have partial checksums.
    look: Option<PrivateLook>,
    empty: Vec<Frame>,
    /// Those of a deferred buffer that is written.
    buffers: Vec<Buffer>,
}

/// A NIC queue coupled with a guest: its UMEM is the guest's memory, with memory of the daemon behind it. Frames from
/// the guest are sent directly from guest memory.
pub(crate) struct DirectEnd<N> {
    /// Chunks of its pool are those of the bounce area.
    queue: NicQueue<N>,
    counters: Arc<PairCounters>,
    link: LinkState,
    sending: InFlight<Outbound>,
    /// A GSO packet of which segments wait for room; the chains behind it wait, too.
    segmentation: Option<Segmentation>,
    /// The buffers of its chain.
    segmented_buffers: Vec<Buffer>,
    /// No buffer can be deferred until a bounce chunk comes back, perhaps with a deferred buffer.
    bounces_out: bool,
    /// Descriptors that the ring had room for when the burst began.
    ring: usize,
    outgoing: Vec<TxDesc>,
    pieces: Vec<Piece>,
    /// Waits for the driver when the socket is closed.
    release: Option<Release>,
}

/// What the lane needs to know of its memory.
pub(crate) struct DirectMemory {
    chunks: Chunks,
    /// Entries that a table of what the kernel has may hold.
    in_flight: usize,
    /// How much of it is in huge pages, bytes from its start.
    huge_bytes: u64,
}

impl DirectMemory {
    /// With guest RAM as UMEM, and the bytes `own` behind it for this lane; `to_receive` of the chunks there are for
    /// the NIC to receive into. `in_flight`: at least the size of the vrings and of the rings.
    /// Errors: the range is not all behind guest RAM.
    pub(crate) fn new(
        umem: Umem,
        own: Range<u64>,
        to_receive: usize,
        in_flight: usize,
    ) -> Result<Self, UmemError> {
        let first = UmemOffset::new(own.start);
        let pool: FramePool = umem.frames(own)?.collect();
        let chunks = Chunks {
            umem,
            first,
            pool,
            to_receive,
            backing: "guest memory".to_owned(),
        };
        Ok(Self {
            chunks,
            in_flight,
            huge_bytes: 0,
        })
    }

    /// With `bytes` in huge pages, from its start.
    pub(crate) fn in_huge_pages(self, bytes: u64) -> Self {
        Self {
            huge_bytes: bytes,
            ..self
        }
    }
}

impl<N: Nic> DirectLane<N> {
    /// Connects a guest with a NIC queue whose UMEM is the guest's memory.
    pub(crate) fn new(
        pair: QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        counters: Arc<PairCounters>,
    ) -> Self {
        let mut pair = pair;
        let look = PrivateLook::of(&pair, pair.partial_checksums);
        let in_flight = memory.in_flight;
        let place = Place::new(
            &pair,
            &memory.chunks.umem,
            queue.sends.by_dma.then_some(memory.huge_bytes),
        );
        let end = DirectEnd::new(&mut pair, queue, memory, &counters);
        let any_order = pair.to_guest.queue.takes_any_order();
        // The RX ring has room for all: no driver ever finds it full.
        let most_posted = in_flight.min(RECEIVE_RING as usize);
        Self {
            guest: LaneGuest::new(pair, counters),
            end,
            any_order,
            place,
            posted: match any_order {
                true => InFlight::in_any_order(most_posted),
                false => InFlight::new(most_posted),
            },
            deferred: VecDeque::new(),
            deferred_buffers: VecDeque::new(),
            deferred_bytes: 0,
            bounces_posted: 0,
            defer_all: false,
            inside: false,
            look,
            empty: Vec::with_capacity(BATCH),
            buffers: Vec::with_capacity(MOST_PIECES),
        }
    }
}

impl<N: Nic> DirectEnd<N> {
    /// A queue for the frames of that guest.
    fn new(
        guest: &mut QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        counters: &Arc<PairCounters>,
    ) -> Self {
        let Coupled {
            mut nic,
            sends,
            release,
        } = queue;
        if sends.zero_copy && !guest.offloads.csum {
            // Else frames, or some of them, are read by this CPU: by the kernel that copies them, or by us, to sum or
            // to cut them.
            guest.from_guest.queue.set_prefetch(Prefetch::Header);
        }
        // An interface that is down is known before the first frame waits in its ring.
        let link = nic.kick();
        Self {
            queue: NicQueue::new(nic, memory.chunks, sends),
            counters: Arc::clone(counters),
            link,
            sending: InFlight::new(memory.in_flight),
            segmentation: None,
            // A chain has as many buffers as its queue has entries, at most, and a burst as many descriptors as the TX
            // ring.
            segmented_buffers: Vec::with_capacity(memory.in_flight),
            bounces_out: false,
            ring: 0,
            outgoing: Vec::with_capacity(memory.in_flight),
            pieces: Vec::with_capacity(MOST_PIECES),
            release,
        }
    }
}

impl<N: Nic> Lane for DirectLane<N> {
    fn poll(&mut self, _siblings: Siblings<'_>) -> Result<usize, Blame> {
        let received = self.to_guest().map_err(Blame::Own)?;
        let sent =
            self.end
                .take_from_guest(&mut self.guest.pair, &mut self.guest.sender, &self.guest.counters);
        let sent = sent.map_err(Blame::Own)?;
        // Before it is sent: it may be answered at once, and buffers that the guest posted before it are there then.
        let posted = if sent > 0 { self.post_more() } else { Ok(()) };
        self.end.hand_over();
        posted.map_err(Blame::Own)?;
        Ok(received + sent + self.end.stop_batch(&mut self.guest.pair, sent))
    }

    fn enable_notifications(&mut self, _siblings: Siblings<'_>) -> Work {
        let (held, has_chains) = enable_kicks(&self.guest.sender.throttle, &mut self.guest.pair);
        if has_chains {
            return self.end.when_chains_wait();
        }
        if self.guest.pair.to_guest.enabled {
            if self.end.queue.nic.received() > 0 {
                return Work::Now;
            }
            let room =
                self.end.queue.nic.room_to_give() > 0 && self.posted.room() > 0 && !self.end.bounces_out;
            if self.guest.pair.to_guest.queue.enable_kicks() && room {
                return Work::Now;
            }
        }
        self.end.when_sent().max(held).or_polled(&self.guest.pair)
    }

    fn guest(&self) -> Option<&LaneGuest> {
        Some(&self.guest)
    }

    fn guest_mut(&mut self) -> Option<&mut LaneGuest> {
        Some(&mut self.guest)
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.end.queue.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        // Frames lie in the guest's buffers already; they never wait for others.
        self.guest.pair.to_guest.enabled
    }

    fn inject(&mut self, frame: &[u8], _siblings: Siblings<'_>) {
        self.end.inject(frame);
    }

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        lane.guest.pair.leave_calls();
        let half_sent = lane.end.send_at_last(&mut lane.guest.pair);
        // Frames that arrived are the guest's; taken before the socket closes.
        while lane.collect() > 0 {}
        lane.guest
            .counters
            .to_guest_queue_stopped
            .add(lane.posted.len_done());
        let let_go = lane.end.close(&mut lane.guest.pair, half_sent);
        if let_go {
            give_up(&mut lane.guest.pair, &mut lane.posted, &lane.deferred);
        }
        lane.guest.pair.to_guest.publish(&lane.guest.counters);
        Stopped {
            pair: Some(lane.guest.pair.stopped()),
            queue: None,
        }
    }
}

/// Returns unused buffers of the NIC and deferred ones, after the last access: the queue is rewound to them; where it
/// cannot be, they are returned empty.
fn give_up(pair: &mut QueuePair, posted: &mut InFlight<Posted>, deferred: &VecDeque<Deferred>) {
    let queue = &mut pair.to_guest.queue;
    let overtaken = posted.has_overtaken();
    let posted = std::iter::from_fn(|| posted.pop_any()).filter_map(|posted| match posted {
        Posted::Guest { chain, .. } => Some(chain),
        Posted::Bounce { .. } => None,
    });
    let held = posted.chain(deferred.iter().map(|deferred| deferred.chain));
    match overtaken {
        true => held.for_each(|chain| queue.push_used_in_any_order(chain, 0)),
        false => queue.unpop(held.map(|chain| chain.slots).sum()),
    }
}
