//! A queue with `--memory=direct`: guest RAM is the UMEM, and no userspace code touches a frame.
//!
//! NIC → guest: an available receive buffer at offset B becomes the fill entry `B + header - 256 - headroom`. The
//! kernel puts a frame 256 bytes (XDP_PACKET_HEADROOM) and the UMEM's headroom after a fill address, and the steering
//! program's metadata, which is the virtio-net header, just before the frame: so the header lands at B, the frame
//! behind it, and the daemon only writes the used element.
//!
//! In zero-copy the NIC writes the frame itself, and may write to the end of its chunk, whatever the frame's length.
//! The headroom limits what it can write to what the driver needs for the longest frame. Only buffers that hold as much
//! are posted, and only if their chunk is in one huge page: the kernel silently rejects a chunk that is not contiguous
//! for DMA (`xp_check_unaligned`, net/xdp/xsk_buff_pool.c).
//!
//! Guest → NIC: a frame in one piece is sent directly from guest memory. One in several pieces is gathered in a chunk
//! of the bounce area if it fits, otherwise sent as a multi-buffer frame whose descriptors refer to the pieces.
//!
//! A GSO packet is segmented: each segment's headers are built in a chunk of the bounce area. By default, a socket that
//! reads by DMA gets the payload by reference, as further descriptors, and one that copies gets a copy of the segment
//! in one piece, because a further descriptor costs it more time than the bytes. If there is no room for a segment, it
//! waits, and so do the chains behind it in the guest's queue. The chain is returned when its last segment was sent.
//!
//! The bounce area is behind guest RAM in the same UMEM; no guest can see it. It also serves receive buffers that
//! cannot take a frame directly ([`place`]): too small for the longest frame of the interface, or for what a NIC may
//! write; made of several descriptors; too near the start of their region; in zero-copy, not in one huge page. Such
//! a buffer is *deferred*: a bounce chunk goes to the NIC in its place, and the frame is copied when it arrives. A
//! buffer too small for the longest frame cannot be paired with one chunk; from the first of these on, all buffers are
//! deferred until the queue restarts.
//!
//! Invariants: a chunk in the bounce area is in the pool or in one table, never both. Both tables return entries in
//! the order in which the guest made them available, with the exception below. So a queue can be stopped exactly: the
//! buffers that the kernel still held are unused, and the base is rewound to the first of them.
//!
//! The exception: receive buffers are returned in the order of their completions, where the guest and a successor of
//! this daemon support that ([`virtqueue::Queue::takes_any_order`]). A buffer that a driver keeps, because it dropped a
//! frame in it, then delays none of the others. If such a queue is stopped while the kernel holds a buffer that others
//! overtook, the queue cannot be rewound: all buffers that the kernel held are returned empty.
//!
//! When a lane stops, buffers that the kernel held are returned only after the last access to guest memory: where the
//! kernel copies, when the socket is closed; where the NIC reads and writes by DMA, when its driver has released the
//! memory, which is later ([`Release`]). If that is unknown, none of them is returned: a guest that lacks buffers is
//! better off than one whose memory is overwritten while it uses it for something else.
//!
//! With `--memory=send-direct` a queue sends so, too, and receives as in copy placement ([`Receiver`]): the NIC writes to
//! the daemon's chunks only, and each frame is copied once, verified, and perhaps merged with others. So neither the
//! kernel nor a NIC ever writes to guest RAM, not even in zero-copy: no frame for another guest gets there, and any
//! receive buffer is good enough.

pub(crate) mod from_guest;
pub(crate) mod in_flight;
pub(crate) mod place;
pub(crate) mod segmentation;
pub(crate) mod to_guest;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use common::binding::LARGE_CHUNK;
use virtqueue::{Buffer, Chain, ChainId, Chains, Prefetch};
use xsk::{Frame, FramePool, RxDesc, TxDesc, Umem, UmemError, UmemOffset};

use crate::backend::own_queue::OwnQueue;
use crate::backend::receiver::{Receive, Receiver};
use crate::backend::to_nic::copied;
use crate::direct::in_flight::InFlight;
use crate::direct::place::Place;
use crate::frame::checksums::PrivateLook;
use crate::frame::gso::GsoPacket;
use crate::guest::from_guest::{Budget, Sender, Sink};
use crate::guest::rx_queue::RxQueue;
use crate::lane::Work;
use crate::lane::limits::BATCH;
use crate::lane::shared::Shared;
use crate::nic::RECEIVE_RING;
use crate::nic::coupled::{Coupled, Release};
use crate::nic::endpoint::{Chunks, NicQueue};
use crate::nic::queue::{LinkState, MOST_PIECES, Nic};
use crate::nic::xdp::XdpNic;
use device::counters::PairCounters;
use device::pair::{Fault, Piece, QueuePair, Sending, Vring};

/// Chunk of the UMEM, bytes: the largest, because each bind costs kernel memory per chunk.
pub const CHUNK_BYTES: u32 = LARGE_CHUNK;
/// Most bounce chunks of a lane that the NIC has to receive into: the others are for frames from the guest, which
/// deferred buffers must not delay.
const MOST_BOUNCES_POSTED: usize = 128;
/// Buffers are deferred until they have this many descriptors in all. Each descriptor has a byte at least, so they hold
/// a frame of any length. The limit is needed because a guest chooses how many a buffer has, and the lane stores them.
const MOST_DEFERRED_BUFFERS: usize = 4096;

/// A buffer that the NIC receives into.
enum Posted {
    /// The guest's own; once done, it has a frame of `len` bytes.
    Guest { chain: ChainId, len: u32 },
    /// A bounce chunk for a deferred buffer; `filled` once done.
    Bounce { filled: Option<RxDesc> },
}

/// A descriptor that the NIC sends from, or a chain that can be returned when older ones have been.
struct Outbound {
    /// The chain is the guest's again once this descriptor is done.
    chain: Option<ChainId>,
    /// It refers to a bounce chunk.
    bounce: bool,
    /// It is the last one of a frame of the guest.
    ends: bool,
}

/// A GSO packet with segments that are not queued yet. Its chain is returned once the last segment is sent.
struct Segmentation {
    packet: GsoPacket,
    chain: ChainId,
}

/// A deferred receive buffer of the guest.
struct Deferred {
    chain: ChainId,
    /// Number of its descriptors.
    buffers: usize,
    bytes: u64,
}

/// A NIC queue whose UMEM is the guest's memory, with memory of the daemon behind it. Frames from the guest are sent
/// directly from guest memory. See the module's head.
pub struct DirectQueue<N, R = DirectReceiver> {
    /// Its pool has the free chunks of the daemon's memory.
    queue: NicQueue<N>,
    receiver: R,
    counters: Arc<PairCounters>,
    link: LinkState,
    sending: InFlight<Outbound>,
    /// A GSO packet whose next segments wait for room; the chains behind it wait, too.
    segmentation: Option<Segmentation>,
    /// The buffers of its chain.
    segmented_buffers: Vec<Buffer>,
    /// Descriptors that the ring had room for when the batch began.
    ring: usize,
    outgoing: Vec<TxDesc>,
    pieces: Vec<Piece>,
    /// Waits for the driver when the socket is closed.
    release: Option<Box<dyn Release>>,
}

/// Receives into buffers of the guest. While one could not be deferred (`is_awaited` of the queue), none is read until
/// a bounce chunk is free again.
pub struct DirectReceiver {
    posted: InFlight<Posted>,
    deferred: VecDeque<Deferred>,
    deferred_buffers: VecDeque<Buffer>,
    deferred_bytes: u64,
    /// Receive buffers are returned in the order of their completions.
    any_order: bool,
    place: Place,
    /// Bounce chunks in `posted`.
    bounces_posted: usize,
    /// There was a buffer smaller than the longest frame: all later ones are deferred, too, because a frame may need
    /// several of them now, and buffers must be used in the order in which they were made available.
    defer_all: bool,
    /// The last received piece was not the last one of its frame.
    inside: bool,
    /// Looks at received frames, where they may have partial checksums.
    look: Option<PrivateLook>,
    empty: Vec<Frame>,
    /// The descriptors of the deferred buffer that a frame is copied into.
    buffers: Vec<Buffer>,
    /// The guest receives, so frames have to wake the lane.
    awaits_nic: bool,
}

/// A direct lane's memory: guest RAM, and chunks of the daemon behind it.
pub struct DirectMemory {
    chunks: Chunks,
    /// Capacity of each in-flight table.
    in_flight: usize,
    /// The first bytes of the UMEM that are in huge pages.
    huge_bytes: u64,
}

impl DirectMemory {
    /// `umem`: guest RAM with memory of the daemon behind it, of which the bytes `own` are this lane's. `to_receive` of
    /// their chunks are for the NIC to receive into. `in_flight`: at least the size of the vrings and of the rings.
    /// Errors: the range is not inside the UMEM, or overlaps that of another lane.
    pub fn new(umem: Umem, own: Range<u64>, to_receive: usize, in_flight: usize) -> Result<Self, UmemError> {
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

    /// Sets how many bytes of the UMEM, from its start on, are in huge pages.
    pub fn in_huge_pages(self, bytes: u64) -> Self {
        Self {
            huge_bytes: bytes,
            ..self
        }
    }
}

impl<N: Nic> DirectQueue<N> {
    /// Connects a guest with a NIC queue whose UMEM is the guest's memory.
    pub fn new(
        pair: &mut QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        counters: &Arc<PairCounters>,
    ) -> Self {
        let to_guest = &pair.to_guest;
        let look = PrivateLook::of(to_guest, to_guest.guest.partial_checksums);
        let place = Place::new(
            to_guest,
            &memory.chunks.umem,
            queue.sends.by_dma.then_some(memory.huge_bytes),
        );
        let any_order = to_guest.queue.takes_any_order();
        // The RX ring has room for all: no driver ever finds it full.
        let most_posted = memory.in_flight.min(RECEIVE_RING as usize);
        let receiver = DirectReceiver {
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
            awaits_nic: true,
        };
        Self::couple(&mut pair.from_guest, queue, memory, (counters, |_| receiver))
    }
}

impl<N: Nic> DirectQueue<N, Receiver> {
    /// The same with `--memory=send-direct`. `untags`: the guest gets the frames of its VLAN without their tag.
    pub fn send_only(
        pair: &mut QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
        (untags, counters): (bool, &Arc<PairCounters>),
    ) -> Self {
        let receiver =
            |queue: &mut NicQueue<N>| Receiver::new(&pair.to_guest, queue, counters).untagging(untags);
        Self::couple(&mut pair.from_guest, queue, memory, (counters, receiver))
    }
}

impl<N: Nic, R> DirectQueue<N, R> {
    /// Couples a queue with the guest whose memory is its UMEM.
    fn couple(
        from_guest: &mut Vring,
        queue: Coupled<N>,
        memory: DirectMemory,
        (counters, receiver): (&Arc<PairCounters>, impl FnOnce(&mut NicQueue<N>) -> R),
    ) -> Self {
        let Coupled {
            mut nic,
            sends,
            release,
        } = queue;
        if sends.zero_copy && !from_guest.guest.offloads.csum {
            // Otherwise this CPU reads whole frames: the kernel copies them, or the daemon completes their checksums or
            // segments them.
            from_guest.queue.set_prefetch(Prefetch::Header);
        }
        // So the lane knows before the first frame if the interface is down.
        let link = nic.kick();
        let mut queue = NicQueue::new(nic, memory.chunks, sends);
        Self {
            receiver: receiver(&mut queue),
            queue,
            counters: Arc::clone(counters),
            link,
            sending: InFlight::new(memory.in_flight),
            segmentation: None,
            // A chain has as many buffers as its queue has entries, at most, and a batch as many descriptors as the TX
            // ring.
            segmented_buffers: Vec::with_capacity(memory.in_flight),
            ring: 0,
            outgoing: Vec::with_capacity(memory.in_flight),
            pieces: Vec::with_capacity(MOST_PIECES),
            release,
        }
    }
}

impl<N: Nic, R: Receive> OwnQueue for DirectQueue<N, R> {
    const IS_THERE: bool = true;
    type Nic = N;
    type Receiver = R;

    fn begin(&mut self, vring: &mut Vring, sender: &mut Sender, _counters: &PairCounters) -> usize {
        let mut moved = self.reap(vring);
        self.begin_batch();
        if self.segmentation.is_some() && sender.left() > 0 {
            let mut budget = sender.budget();
            moved += self.continue_segmentation(vring, &mut budget);
            sender.charge(&budget);
        }
        moved
    }

    fn room(&mut self) -> usize {
        self.ring_room().min(self.sending.room())
    }

    /// Sends frames directly from guest memory, as long as each is in one piece that a descriptor may refer to.
    #[inline]
    fn put_plain(
        &mut self,
        vring: &mut Vring,
        chains: &Chains,
        budget: &mut Budget,
        counters: &PairCounters,
    ) -> usize {
        if self.link.loses(counters).is_some() {
            return 0;
        }
        let (most, most_bytes) = budget.left();
        let longest = self.queue.umem.max_sent_bytes();
        let (mut done, mut bytes) = (0, 0);
        for chain in chains.iter().take(most.min(self.room())) {
            let buffers = chains.buffers(chain);
            let Some(Sending { start, len, .. }) = vring.plain(chain, buffers) else {
                break;
            };
            let offset = buffers[0].offset + u64::from(start.within);
            let is_direct = len <= longest
                && self.can_refer(Piece { offset, len })
                && !self.queue.sends.must_fill_up(len);
            if !is_direct || bytes >= most_bytes {
                break;
            }
            self.queue_piece(Some(chain.id), UmemOffset::new(offset), len, false);
            bytes += u64::from(len);
            done += 1;
        }
        budget.charge_plain(done, bytes);
        done
    }

    fn sink<'a>(&'a mut self, _counters: &'a PairCounters) -> Option<impl Sink + 'a> {
        Some(self)
    }

    fn has_rest(&self) -> bool {
        self.segmentation.is_some()
    }

    fn places(&self) -> usize {
        self.sending.room()
    }

    fn give_back(&mut self, _vring: &mut Vring, chains: &[Chain]) {
        chains.iter().for_each(|chain| self.return_unsent(chain.id));
    }

    fn finish(
        &mut self,
        (from_guest, to_guest): (&mut Vring, &Shared<RxQueue>),
        _counters: &PairCounters,
        moved: usize,
    ) -> Result<usize, Fault> {
        // Before the frames are sent: an answer may arrive at once, and needs the buffers that the guest has posted.
        let posted = match R::POSTS_BUFFERS && moved > 0 {
            true => to_guest.lock().map_or(Ok(()), |mut guest| {
                self.receiver.post_more(&mut self.queue, &mut guest)
            }),
            false => Ok(()),
        };
        self.hand_over();
        posted?;
        // While the interface is down every poll that sends checks whether it is up again.
        if self.queue.nic.unsent() > 0 || (moved > 0 && self.link == LinkState::Down) {
            self.kick();
        } else if moved == 0 {
            return Ok(0);
        }
        // Also returns the chains of dropped frames: the next poll may be much later.
        Ok(self.reap(from_guest))
    }

    fn parts(&self) -> Option<(&NicQueue<N>, &R)> {
        Some((&self.queue, &self.receiver))
    }

    #[inline]
    fn parts_mut(&mut self) -> Option<(&mut NicQueue<N>, &mut R)> {
        Some((&mut self.queue, &mut self.receiver))
    }

    fn enable_notifications(&mut self, to_guest: &mut Vring) -> Work {
        let received = self.receiver.enable_notifications(&mut self.queue, to_guest);
        let sent = Work::after(self.queue.until_sent());
        match self.segmentation {
            Some(_) => sent.max(Work::SOON).max(received),
            None => sent.max(received),
        }
    }

    fn inject(&mut self, frame: &[u8], _counters: &PairCounters) {
        if self.queue.nic.room_to_nic() == 0 || self.sending.room() == 0 {
            return;
        }
        if let Some(chunk) = self.queue.pool.take() {
            let outbound = Outbound {
                chain: None,
                bounce: true,
                ends: false,
            };
            self.sending.push(chunk.offset().get(), outbound);
            let desc = copied(chunk, frame, &self.queue.umem);
            self.queue.nic.to_nic(std::iter::once(desc));
            self.kick();
        }
    }

    fn stop(mut self, from_guest: &mut Vring, guest: &mut RxQueue) -> Option<NicQueue<XdpNic>> {
        let half_sent = self.send_before_stop(from_guest);
        // Frames that have arrived are delivered before the socket closes.
        self.receiver.finish(&mut self.queue, guest);
        if !R::POSTS_BUFFERS {
            self.queue.discard(&guest.counters);
        }
        self.close(from_guest, guest, half_sent);
        None
    }
}
