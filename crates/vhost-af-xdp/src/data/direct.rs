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

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use virtqueue::{Chain, Chains, Segment};
use xsk::{Frame, FramePool, TxDesc, Umem, UmemOffset};

use super::copy::write_header;
use super::copy_bytes::{guest_to_umem, umem_to_guest};
use super::counters::LaneCounters;
use super::guest::{Fault, GuestSide, Piece, Sending, pieces, skip};
use super::in_flight::InFlight;
use super::lane::{BATCH, Bases, Direction, Lane, Rest};
use super::nic::{Link, Nic};

/// The kernel puts a received frame this many bytes after the fill address
/// (`XDP_PACKET_HEADROOM`, include/uapi/linux/bpf.h).
pub(crate) const XDP_HEADROOM: u64 = 256;
/// Chunk of the UMEM, bytes: the largest, because each bind costs kernel memory per chunk.
pub(crate) const CHUNK_BYTES: u32 = 4096;
/// Longest frame that the kernel receives into one chunk, bytes.
pub(crate) const LONGEST_FRAME: u32 = CHUNK_BYTES - 256;
/// Most descriptors of a multi-buffer frame (MAX_SKB_FRAGS + 1).
const MOST_PIECES: usize = 18;

/// A buffer that the NIC receives into.
enum Posted {
    /// The guest's own; filled with `len` bytes of frame once done.
    Guest { head: u16, len: u32 },
    /// A bounce chunk for a parked buffer; `filled` once done: where its frame lies.
    Bounce {
        filled: Option<(Frame, UmemOffset, u32)>,
    },
}

/// A descriptor that the NIC sends from, or a chain that waits to be given back in its turn.
struct Outbound {
    /// The chain is the guest's again once this descriptor is done.
    head: Option<u16>,
    /// The chunk to put back, where the frame was gathered.
    bounce: Option<Frame>,
}

/// A receive buffer of the guest that frames reach through the bounce area.
struct Parked {
    head: u16,
    segments: usize,
    bytes: u64,
}

/// See the module's head.
pub(crate) struct DirectLane<N> {
    guest: GuestSide,
    nic: N,
    umem: Umem,
    multi_buffer: bool,
    /// Pages that a chunk must not cross: set where the NIC's DMA sees pages (zero-copy).
    dma_page_bytes: Option<u64>,
    pool: FramePool,
    counters: Arc<LaneCounters>,
    link: Link,
    posted: InFlight<Posted>,
    sending: InFlight<Outbound>,
    parked: VecDeque<Parked>,
    parked_segments: VecDeque<Segment>,
    parked_bytes: u64,
    /// Bounce chunks among `posted` that are not filled yet.
    bounces_posted: usize,
    /// A buffer smaller than the longest frame was seen: all later ones are parked, too, because
    /// frames may now need several, and the order of use must stay that of posting.
    park_all: bool,
    scratch: Scratch,
}

struct Scratch {
    chains: Chains,
    outgoing: Vec<TxDesc>,
    empty: Vec<Frame>,
    segments: Vec<Segment>,
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
    /// See [`DirectLane::dma_page_bytes`].
    pub(crate) dma_page_bytes: Option<u64>,
}

impl<N: Nic> DirectLane<N> {
    /// Joins a guest with a NIC whose UMEM is the guest's memory.
    pub(crate) fn new(
        guest: GuestSide,
        nic: N,
        memory: DirectMemory,
        multi_buffer: bool,
        counters: Arc<LaneCounters>,
    ) -> Self {
        let mut nic = nic;
        // An interface that is down is known before the first frame waits in its ring.
        let link = nic.kick();
        Self {
            guest,
            nic,
            umem: memory.umem,
            multi_buffer,
            dma_page_bytes: memory.dma_page_bytes,
            pool: memory.pool,
            counters,
            link,
            posted: InFlight::new(memory.in_flight),
            sending: InFlight::new(memory.in_flight),
            parked: VecDeque::new(),
            parked_segments: VecDeque::new(),
            parked_bytes: 0,
            bounces_posted: 0,
            park_all: false,
            scratch: Scratch {
                chains: Chains::default(),
                outgoing: Vec::with_capacity(BATCH * 2),
                empty: Vec::with_capacity(BATCH),
                segments: Vec::with_capacity(MOST_PIECES),
                pieces: Vec::with_capacity(MOST_PIECES),
            },
        }
    }

    // ---- guest → NIC ----

    fn from_guest(&mut self) -> Result<usize, Fault> {
        let mut moved = self.reap();
        if self.guest.from_guest.enabled {
            let room = BATCH.min(self.nic.room_to_nic()).min(self.sending.room());
            if room == 0 {
                self.counters.from_guest_waits.add(1);
            } else {
                let mut chains = std::mem::take(&mut self.scratch.chains);
                let taken = self.guest.from_guest.queue.pop(&mut chains, room);
                let sent = taken.map_err(Fault::from).and_then(|_| self.send(&chains));
                self.scratch.chains = chains;
                moved += sent?;
            }
        }
        // While the interface is down every breath that sends asks whether it is up again.
        if self.nic.unsent() > 0 || (moved > 0 && self.link == Link::Down) {
            self.kick();
            moved += self.reap();
        }
        Ok(moved)
    }

    /// Gives the guest back what was sent.
    fn reap(&mut self) -> usize {
        for frame in self.nic.sent(BATCH * 2) {
            // An address that we never gave cannot be attributed; the kernel does not do that.
            let _ = self.sending.complete(frame.offset().get());
        }
        if self.link == Link::Gone {
            // Nothing comes back from a NIC that is gone.
            let all: Vec<Outbound> = self.sending.drain().collect();
            let count = all.len();
            all.into_iter().for_each(|outbound| self.give_back(outbound));
            return self.publish_sent(count);
        }
        let mut count = 0;
        while let Some(outbound) = self.sending.pop_done() {
            self.give_back(outbound);
            count += 1;
        }
        self.publish_sent(count)
    }

    fn publish_sent(&mut self, count: usize) -> usize {
        if count > 0 {
            self.guest.from_guest.publish(&self.counters);
        }
        count
    }

    #[inline]
    fn give_back(&mut self, outbound: Outbound) {
        if let Some(frame) = outbound.bounce {
            self.pool.put(frame);
        }
        if let Some(head) = outbound.head {
            self.guest.from_guest.queue.push_used(head, 0);
        }
    }

    fn send(&mut self, chains: &Chains) -> Result<usize, Fault> {
        let (mut frames, mut bytes, mut done) = (0, 0, 0);
        for (at, chain) in chains.iter().enumerate() {
            let segments = chains.segments(chain);
            match self.guest.judge(chain, segments, &self.counters)? {
                Sending::Drop => self.sending.push_done(Outbound {
                    head: Some(chain.head),
                    bounce: None,
                }),
                Sending::Frame { from, skip, len } => {
                    if !self.queue_frame(chain.head, (&segments[from..], skip), len, chains.len() - at) {
                        self.guest.from_guest.queue.unpop(chains.len() - at);
                        break;
                    }
                    frames += 1;
                    bytes += u64::from(len);
                }
            }
            done += 1;
        }
        self.nic.to_nic(self.scratch.outgoing.drain(..));
        self.counters.from_guest_frames.add(frames);
        self.counters.from_guest_bytes.add(bytes);
        Ok(done)
    }

    /// Queues one frame; false when there is no room for it now.
    #[inline]
    fn queue_frame(
        &mut self,
        head: u16,
        (segments, skip): (&[Segment], u32),
        len: u32,
        behind: usize,
    ) -> bool {
        let count = match self.link {
            Link::Up if segments.len() == 1 && len <= CHUNK_BYTES => {
                let data = UmemOffset::new(segments[0].offset + u64::from(skip));
                self.queue_piece(Some(head), data, len, false);
                return true;
            }
            Link::Up => return self.queue_pieces(head, (segments, skip), len, behind),
            Link::Down => &self.counters.from_guest_interface_down,
            Link::Gone => &self.counters.from_guest_interface_gone,
        };
        count.add(1);
        self.sending.push_done(Outbound {
            head: Some(head),
            bounce: None,
        });
        true
    }

    /// Queues a descriptor that refers to guest memory.
    #[inline]
    fn queue_piece(&mut self, head: Option<u16>, data: UmemOffset, len: u32, more: bool) {
        // The kernel keeps the lowest bit of a sent address for itself (6.18), so that the chunk,
        // by which the completion is recognised, starts at an even one.
        if let Ok(frame) = self.umem.adopt(UmemOffset::new(data.get() & !1)) {
            self.sending
                .push(frame.offset().get(), Outbound { head, bounce: None });
            self.scratch.outgoing.push(TxDesc {
                frame,
                offset: data,
                len,
                more,
                metadata: false,
            });
        } else {
            // Checked when the descriptor was read; kept as a drop, not as a panic.
            self.counters.from_guest_too_many_pieces.add(1);
            self.sending.push_done(Outbound { head, bounce: None });
        }
    }

    /// A frame in several pieces: gathered in a bounce chunk, or sent as multi-buffer frame.
    fn queue_pieces(
        &mut self,
        head: u16,
        (segments, skip): (&[Segment], u32),
        len: u32,
        behind: usize,
    ) -> bool {
        if len <= CHUNK_BYTES {
            let Some(frame) = self.pool.take() else {
                return false;
            };
            let data = frame.offset();
            let mut at = data.get();
            for piece in pieces(segments, 0, skip) {
                let _ = guest_to_umem(&self.guest.memory, piece, &self.umem, UmemOffset::new(at));
                at += u64::from(piece.len);
            }
            self.counters.bounced_frames.add(1);
            let Ok(sent) = self.umem.adopt(data) else {
                return false;
            };
            self.sending.push(
                data.get(),
                Outbound {
                    head: Some(head),
                    bounce: Some(frame),
                },
            );
            self.scratch.outgoing.push(TxDesc {
                frame: sent,
                offset: data,
                len,
                more: false,
                metadata: false,
            });
            return true;
        }
        let mut parts = std::mem::take(&mut self.scratch.pieces);
        parts.clear();
        parts.extend(pieces(segments, 0, skip).flat_map(chunks));
        let queued = self.queue_multi_buffer(head, &parts, behind);
        self.scratch.pieces = parts;
        queued
    }

    fn queue_multi_buffer(&mut self, head: u16, parts: &[Piece], behind: usize) -> bool {
        if !self.multi_buffer || parts.len() > MOST_PIECES {
            self.counters.from_guest_too_many_pieces.add(1);
            self.sending.push_done(Outbound {
                head: Some(head),
                bounce: None,
            });
            return true;
        }
        let room = self
            .nic
            .room_to_nic()
            .saturating_sub(self.scratch.outgoing.len())
            .min(self.sending.room());
        if parts.len() + behind - 1 > room {
            return false;
        }
        for (at, part) in parts.iter().enumerate() {
            let last = at + 1 == parts.len();
            self.queue_piece(
                last.then_some(head),
                UmemOffset::new(part.offset),
                part.len,
                !last,
            );
        }
        true
    }

    fn kick(&mut self) {
        self.link = self.nic.kick();
        self.counters.nic_kicks.add(1);
    }

    // ---- NIC → guest ----

    fn to_guest(&mut self) -> Result<usize, Fault> {
        if !self.guest.to_guest.enabled {
            return Ok(0);
        }
        let received = self.collect();
        if received > 0 {
            self.guest.to_guest.publish(&self.counters);
        }
        self.post()?;
        Ok(received)
    }

    /// Takes what the NIC received and gives it to the guest, in the order of posting.
    fn collect(&mut self) -> usize {
        for piece in self.nic.from_nic(BATCH) {
            match self.posted.complete(piece.frame.offset().get()) {
                Some(Posted::Guest { len, .. }) => *len = piece.len,
                Some(Posted::Bounce { filled }) => *filled = Some((piece.frame, piece.data, piece.len)),
                None => {}
            }
        }
        let (mut frames, mut bytes) = (0, 0u64);
        while let Some(posted) = self.posted.pop_done() {
            match posted {
                Posted::Guest { head, len } => {
                    self.guest
                        .to_guest
                        .queue
                        .push_used(head, self.guest.header_bytes + len);
                    bytes += u64::from(len);
                    frames += 1;
                }
                Posted::Bounce {
                    filled: Some((frame, data, len)),
                } => {
                    self.bounces_posted -= 1;
                    if self.deliver_bounced(data, len) {
                        bytes += u64::from(len);
                        frames += 1;
                    }
                    self.pool.put(frame);
                }
                Posted::Bounce { filled: None } => self.bounces_posted -= 1,
            }
        }
        self.counters.to_guest_frames.add(frames);
        self.counters.to_guest_bytes.add(bytes);
        usize::try_from(frames).unwrap_or(usize::MAX)
    }

    /// Gives the NIC the buffers that the guest made available.
    fn post(&mut self) -> Result<(), Fault> {
        let room = BATCH.min(self.nic.room_to_give()).min(self.posted.room());
        if room > 0 {
            let mut chains = std::mem::take(&mut self.scratch.chains);
            let popped = self.guest.to_guest.queue.pop(&mut chains, room);
            let posted = popped
                .map_err(Fault::from)
                .and_then(|_| self.post_chains(&chains));
            self.scratch.chains = chains;
            posted?;
        }
        if self.park_all {
            self.post_bounces();
        }
        self.nic.give(self.scratch.empty.drain(..));
        Ok(())
    }

    fn post_chains(&mut self, chains: &Chains) -> Result<(), Fault> {
        let header = self.guest.header_bytes;
        for (at, chain) in chains.iter().enumerate() {
            if chain.readable != 0 {
                return Err(Fault::ReadableInReceive { head: chain.head });
            }
            if chain.writable_bytes < header {
                return Err(Fault::ChainShorterThanHeader {
                    bytes: chain.writable_bytes,
                    header,
                });
            }
            let segments = chains.segments(chain);
            if let Some(fill) = self.fill_address(segments)
                && let Ok(frame) = self.umem.adopt(UmemOffset::new(fill))
            {
                self.posted.push(
                    fill,
                    Posted::Guest {
                        head: chain.head,
                        len: 0,
                    },
                );
                self.scratch.empty.push(frame);
            } else if !self.park(chain, segments) {
                self.guest.to_guest.queue.unpop(chains.len() - at);
                break;
            }
        }
        Ok(())
    }

    /// Parks a buffer that frames must reach through the bounce area, and posts the chunk that it
    /// is paired with; false when there is no chunk now.
    fn park(&mut self, chain: &Chain, segments: &[Segment]) -> bool {
        self.park_all |= u64::from(chain.writable_bytes) < self.longest();
        if !self.park_all {
            let Some(frame) = self.pool.take() else {
                return false;
            };
            self.post_bounce(frame);
        }
        let bytes = u64::from(chain.writable_bytes);
        self.parked.push_back(Parked {
            head: chain.head,
            segments: segments.len(),
            bytes,
        });
        self.parked_segments.extend(segments.iter().copied());
        self.parked_bytes += bytes;
        true
    }

    fn post_bounce(&mut self, frame: Frame) {
        self.posted
            .push(frame.offset().get(), Posted::Bounce { filled: None });
        self.bounces_posted += 1;
        self.scratch.empty.push(frame);
    }

    /// Header and longest frame, bytes: what a buffer must hold to take any frame.
    fn longest(&self) -> u64 {
        u64::from(self.guest.header_bytes) + u64::from(self.guest.frame_limit)
    }

    /// The fill address that makes the kernel put header and frame at the start of a buffer;
    /// `None` for a buffer that must be served through the bounce area.
    #[inline]
    fn fill_address(&self, segments: &[Segment]) -> Option<u64> {
        let [buffer] = segments else { return None };
        let header = self.guest.header_bytes;
        let before = XDP_HEADROOM - u64::from(header);
        if self.park_all
            || buffer.len < header + self.guest.frame_limit
            || u64::from(buffer.room_before) < before
        {
            return None;
        }
        let fill = buffer.offset - before;
        match self.dma_page_bytes {
            Some(page) if fill % page + u64::from(CHUNK_BYTES) > page => None,
            _ => Some(fill),
        }
    }

    /// Posts as many bounce chunks as the parked buffers can take frames of.
    fn post_bounces(&mut self) {
        let frames = if self.guest.mergeable {
            usize::try_from(self.parked_bytes / self.longest()).unwrap_or(usize::MAX)
        } else {
            self.parked.len()
        };
        while self.bounces_posted < frames
            && self.posted.room() > 0
            && self.nic.room_to_give() > self.scratch.empty.len()
        {
            let Some(frame) = self.pool.take() else { return };
            self.post_bounce(frame);
        }
    }

    /// Copies a frame from a bounce chunk into parked buffers; false when they are too small.
    fn deliver_bounced(&mut self, data: UmemOffset, len: u32) -> bool {
        let mut wanted = u64::from(self.guest.header_bytes) + u64::from(len);
        let mut count = 0;
        for parked in &self.parked {
            count += 1;
            wanted = wanted.saturating_sub(parked.bytes);
            if wanted == 0 || !self.guest.mergeable {
                break;
            }
        }
        if wanted > 0 {
            self.counters.to_guest_buffer_too_small.add(1);
            return false;
        }
        self.counters.bounced_frames.add(1);
        let (mut from, mut left) = (data.get(), len);
        for index in 0..count {
            let Some(parked) = self.parked.pop_front() else {
                return false;
            };
            self.parked_bytes -= parked.bytes;
            self.scratch.segments.clear();
            self.scratch
                .segments
                .extend(self.parked_segments.drain(..parked.segments));
            let segments = &self.scratch.segments;
            let (mut first, mut within, mut written) = (0, 0, 0);
            if index == 0 {
                write_header(&self.guest, segments, count);
                written = self.guest.header_bytes;
                (first, within) = skip(segments, written);
            }
            for target in pieces(segments, first, within) {
                let (part, _) = target.split(target.len.min(left));
                let _ = umem_to_guest(&self.umem, UmemOffset::new(from), &self.guest.memory, part);
                from += u64::from(part.len);
                left -= part.len;
                written += part.len;
            }
            self.guest.to_guest.queue.push_used(parked.head, written);
        }
        true
    }
}

/// Cuts a piece of guest memory into pieces that a descriptor can refer to.
fn chunks(piece: Piece) -> impl Iterator<Item = Piece> {
    let mut rest = piece;
    std::iter::from_fn(move || {
        let part;
        (part, rest) = rest.split(rest.len.min(CHUNK_BYTES));
        (part.len > 0).then_some(part)
    })
}

impl<N: Nic> Lane for DirectLane<N> {
    fn breathe(&mut self) -> Result<usize, Fault> {
        Ok(self.from_guest()? + self.to_guest()?)
    }

    fn arm(&mut self) -> Result<Rest, Fault> {
        if self.guest.from_guest.enabled && self.guest.from_guest.queue.enable_kicks() {
            let stuck = self.nic.room_to_nic() == 0 || self.sending.room() == 0 || self.pool.is_empty();
            return Ok(if stuck { Rest::Soon } else { Rest::Busy });
        }
        if self.guest.to_guest.enabled {
            if self.nic.has_frames() {
                return Ok(Rest::Busy);
            }
            let room = self.nic.room_to_give() > 0 && self.posted.room() > 0;
            if self.guest.to_guest.queue.enable_kicks() && room {
                return Ok(Rest::Busy);
            }
        }
        Ok(if self.nic.unsent() > 0 {
            Rest::Soon
        } else {
            Rest::Idle
        })
    }

    fn disarm(&mut self) {
        self.guest.from_guest.queue.disable_kicks();
        self.guest.to_guest.queue.disable_kicks();
    }

    fn set_call(&mut self, direction: Direction, call: Option<OwnedFd>) {
        self.guest.vring(direction).call = call;
    }

    fn set_enabled(&mut self, direction: Direction, enabled: bool) {
        self.guest.vring(direction).enabled = enabled;
    }

    fn watch(&self) -> Vec<BorrowedFd<'_>> {
        let kicks = [&self.guest.from_guest.kick, &self.guest.to_guest.kick];
        kicks
            .into_iter()
            .flatten()
            .map(AsFd::as_fd)
            .chain(self.nic.fd())
            .collect()
    }

    fn stop(self: Box<Self>) -> Bases {
        let mut lane = *self;
        // What is queued is sent or given up now: repeating a frame would be worse than losing it.
        for _ in 0..4 {
            if lane.nic.unsent() == 0 || lane.link != Link::Up {
                break;
            }
            lane.kick();
            lane.reap();
        }
        // Frames that arrived are the guest's; taken before the socket closes.
        let received = lane.collect();
        lane.counters.to_guest_queue_stopped.add(lane.posted.len_done());
        let rest: Vec<Outbound> = lane.sending.drain().collect();
        rest.into_iter().for_each(|outbound| lane.give_back(outbound));
        lane.guest.from_guest.publish(&lane.counters);
        if received > 0 {
            lane.guest.to_guest.publish(&lane.counters);
        }
        // Everything that the NIC or the parking place still holds was never used: rewind to it.
        let open = lane
            .posted
            .drain()
            .filter(|posted| matches!(posted, Posted::Guest { .. }))
            .count();
        let held = open + lane.parked.len();
        let mut bases = lane.guest.bases();
        // At most the queue size, which fits.
        #[allow(clippy::cast_possible_truncation)]
        {
            bases.to_guest = bases.to_guest.wrapping_sub(held as u16);
        }
        // Closing the socket here, before the bases are answered, ends the kernel's writes.
        drop(lane.nic);
        bases
    }
}
