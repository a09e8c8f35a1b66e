//! From a guest to a NIC queue: copies frames into chunks of the UMEM, and segments GSO packets.
//!
//! A GSO packet is segmented while it is copied (`segmenter.rs`), each segment into a chunk of its own or, where the
//! NIC reads by DMA, into descriptors that refer to one copy of the payload. All segments are built at once: the packet
//! waits in the guest's queue until there is room for all of them. A packet with more than [`SEGMENTS`] segments, or
//! with more than there can ever be room for, is first copied whole into the daemon's memory, and then sent in portions
//! ([`Remainder`]). Either way its chain is marked used before the NIC gets the frames: if the daemon dies, its
//! successor sends nothing twice.
//!
//! A queue that several guests fill may never have room for all segments of a packet, because other guests' frames take
//! each free place. There, a packet that has waited once without success is copied into the daemon's memory, too.
//!
//! In copy mode, and where the NIC has TSO, a queue has a cheaper path: a tap ([`SendTap`]). The kernel sends its
//! frames through the same interface and queue, and GSO packets unsegmented. Frames of one flow must not overtake each
//! other, so the kernel takes the frames in the ring before a packet is written to the tap. Frames behind the packet
//! use the tap, too, until the guest pauses for longer than packets wait in the interface's queue (tc(8)), which frames
//! of the socket bypass. The kernel gets such a packet before its chain is marked used: if the daemon dies in between,
//! its successor sends the packet again. Frames with more pieces than the queue takes use the tap, too.

mod plain;

use std::io::ErrorKind;
use std::time::Duration;

use device::counters::{Counter, PairCounters};
use device::meter;
use device::pair::{Cursor, Sending};
use packet::HEADERS_MAX;
use packet::ethernet;
use packet::segment::{Gso, GsoKind, Plan, Request, Tunnel};
use packet::tunnel::Outer;
use rustix::io::Errno;
use virtqueue::ChainId;
use xsk::{TxDesc, Umem, UmemOffset};

use crate::frame::bytes::head_and_rest_to_umem;
use crate::frame::gso::{Builder, FromChain, GsoPacket, Remainder, Source};
use crate::frame::segmenter::Segmenter;
use crate::guest::from_guest::{Budget, Put, Sink, Tally};
use crate::guest::guest_frame::GuestFrame;
use crate::host::tap_frame::{push_frame, tap_header};
use crate::lane::limits::SEGMENTS;
use crate::nic::endpoint::{NicQueue, References};
use crate::nic::queue::{LinkState, Nic, SHORTEST_BY_DMA, Sends};
use crate::nic::tap::{Parts, SendTap};
use crate::policy::bucket::Ticks;

/// The longest frame with the headers of a tunnel, whose lengths have 16 bits.
const LONGEST: u32 = u16::MAX as u32;

/// How often a stopped lane waits for room for the rest of a GSO packet, and how long each time.
pub(crate) const STOP_WAITS: usize = 20;
pub(crate) const STOP_WAIT: Duration = Duration::from_millis(1);

/// How long a packet from the tap may wait in the interface's queue: at 100 Mbit/s this drains the longest queue
/// (`most_unsent`, steward/src/links/tap.rs).
pub(crate) const ON_ITS_WAY: Duration = Duration::from_millis(200);

/// How often it then kicks the kernel to send queued frames.
pub(crate) const STOP_KICKS: usize = 4;

/// What a lane keeps between two batches to its NIC queue.
pub(crate) struct Transmit {
    /// The rest of a GSO packet with more segments than are sent at once.
    rest: Remainder,
    pub(crate) outgoing: Vec<TxDesc>,
    /// Other lanes fill the queue, too.
    is_shared: bool,
    /// The kernel has not taken all that was in the queue of another worker when the lane sent there last.
    pub(crate) is_untaken: bool,
    /// The guest's next GSO packet found no room before.
    has_waited: bool,
    /// A GSO packet or a long frame was sent through the tap, and may still be in the interface's queue.
    uses_tap: bool,
    /// When the last frame was written to the tap.
    last_by_tap: Ticks,
    /// The guest's next frame found no room in the tap.
    tap_is_full: bool,
}

impl Default for Transmit {
    fn default() -> Self {
        Self {
            rest: Remainder::default(),
            outgoing: Vec::with_capacity(SEGMENTS * 2),
            is_shared: false,
            is_untaken: false,
            has_waited: false,
            uses_tap: false,
            last_by_tap: Ticks::default(),
            tap_is_full: false,
        }
    }
}

impl Transmit {
    /// For a queue that other lanes fill, too.
    pub(crate) fn shared() -> Self {
        Self {
            is_shared: true,
            ..Self::default()
        }
    }

    /// Part of a GSO packet waits to be sent.
    pub(crate) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }

    /// No descriptor waits to be published.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// The guest has nothing to send, so nothing waits for the tap. If the last frame was written to the tap long
    /// enough ago, the next one uses the ring again.
    #[inline]
    pub(crate) fn pause(&mut self) {
        self.tap_is_full = false;
        if self.uses_tap && Ticks::now().minus(self.last_by_tap) > Ticks::of(ON_ITS_WAY) {
            self.uses_tap = false;
        }
    }

    /// The guest's next frame waits for room in the tap; no event reports such room.
    #[inline]
    pub(crate) fn tap_is_full(&self) -> bool {
        self.tap_is_full
    }

    /// Drops and counts the rest of a GSO packet: its NIC queue is gone.
    #[cold]
    pub(crate) fn lose(&mut self, counters: &PairCounters) {
        if self.rest.plan.take().is_some() {
            counters.from_guest_rest_of_super_frame.add(1);
        }
        self.outgoing.clear();
    }
}

/// Sends the frames of one batch; see the module's head.
pub(crate) struct NicSink<'a, N> {
    queue: &'a mut NicQueue<N>,
    transmit: &'a mut Transmit,
    counters: &'a PairCounters,
    /// Descriptors that the ring had room for when the batch began.
    ring: usize,
    /// The kernel was kicked in this batch.
    is_kicked: bool,
}

/// Result of sending a frame through the tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ByTap {
    Sent,
    /// The frame is dropped, and counted.
    Lost,
    /// There is no room for it now.
    NoRoom,
    /// There is no tap, or it does not take this frame.
    Refused,
}

impl<N: Nic> Sink for NicSink<'_, N> {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        self.queue.link.loses(counters)
    }

    #[inline]
    fn put(&mut self, _chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put {
        let taken = match frame {
            None => Some(()),
            Some(frame) => match frame.sending.request {
                Request { csum: None, .. } if !self.transmit.uses_tap => self.copy(frame, &mut budget.tally),
                _ => self.copy_asking(frame, budget),
            },
        };
        self.put_result(taken)
    }

    #[inline]
    fn has_rest(&self) -> bool {
        self.transmit.has_rest()
    }
}

impl<'a, N: Nic> NicSink<'a, N> {
    #[inline]
    pub(crate) fn new(
        queue: &'a mut NicQueue<N>,
        transmit: &'a mut Transmit,
        counters: &'a PairCounters,
    ) -> Self {
        let ring = queue.nic.room_to_nic();
        Self {
            queue,
            transmit,
            counters,
            ring,
            is_kicked: false,
        }
    }

    /// What [`Sink::put`] returns for a frame that was taken or not; counts one that has to wait.
    #[inline]
    fn put_result(&self, taken: Option<()>) -> Put {
        match taken {
            Some(()) => Put::Done,
            None => {
                // The frame needs more chunks than are free, or more than the ring has room for: it is retried later.
                self.counters.from_guest_waits.add(1);
                Put::NoRoom
            }
        }
    }

    /// Whether GSO packets are segmented for a tunnel: where the kernel copies, its own segmentation costs less.
    #[inline]
    pub(crate) fn segments_for_tunnels(&self) -> bool {
        self.queue.sends.zero_copy
    }

    /// Sends the segments of a GSO packet by a tunnel; `None`: they are too long for the queue behind its headers.
    pub(crate) fn put_segments(
        &mut self,
        (frame, gso): (GuestFrame<'_>, Gso),
        tunnel: Tunnel,
        budget: &mut Budget,
    ) -> Option<Put> {
        let Some(mut packet) = GsoPacket::open(frame, gso, self.counters, &mut [0; HEADERS_MAX]) else {
            return Some(Put::Done);
        };
        if packet.plan.segment_bytes_max() > self.longest_in(&tunnel.outer) {
            return None;
        }
        packet.plan = packet.plan.in_tunnel(tunnel);
        let taken = self.put_packet(frame, packet, budget);
        Some(self.put_result(taken))
    }

    /// Publishes queued frames, and kicks the kernel.
    pub(crate) fn flush(&mut self) {
        if self.transmit.outgoing.is_empty() && self.is_kicked {
            return;
        }
        self.queue.send(&mut self.transmit.outgoing);
        self.kick();
        self.ring = self.queue.nic.room_to_nic();
    }

    /// Publishes queued frames; the uplink's lane kicks the kernel ([`crate::uplink::uplink_lane`]).
    pub(crate) fn hand_over(&mut self) {
        self.queue.send(&mut self.transmit.outgoing);
        self.ring = self.queue.nic.room_to_nic();
    }

    pub(crate) fn kick(&mut self) {
        self.is_kicked = true;
        self.queue.kick(self.counters);
    }

    /// A frame waits for room, which sent frames make.
    #[inline]
    pub(crate) fn note_wait(&mut self, waits: bool) {
        self.queue.is_awaited |= waits;
    }

    /// See [`NicQueue::until_sent`].
    pub(crate) fn until_sent(&mut self) -> Option<Duration> {
        self.queue.until_sent()
    }

    /// Descriptors that can be queued now.
    #[inline]
    fn ring_room(&self) -> usize {
        self.ring.saturating_sub(self.transmit.outgoing.len())
    }

    /// Sends a frame of the daemon, if there is room now.
    pub(crate) fn inject(&mut self, frame: &[u8]) {
        if self.ring_room() > 0
            && let Some(chunk) = self.queue.pool.take()
        {
            self.transmit
                .outgoing
                .push(copied(chunk, frame, &self.queue.umem));
            self.flush();
        }
    }

    /// Copies a frame into one chunk, or into several; `None`: there is no room for it now.
    #[inline]
    fn copy(&mut self, frame: GuestFrame<'_>, tally: &mut Tally) -> Option<()> {
        let len = frame.sending.len;
        if len > self.queue.umem.max_sent_bytes() {
            return self.copy_in_pieces(frame, tally);
        }
        if self.ring_room() == 0 {
            return None;
        }
        let chunk = self.queue.pool.take()?;
        let data = self.queue.umem.send_offset(&chunk);
        match frame.rest_in_one() {
            Some(rest) => {
                head_and_rest_to_umem(frame.memory, (&[], frame.head), rest, &self.queue.umem, data)?;
            }
            None => FromChain::frame(frame, &mut Cursor::default()).copy(len, &self.queue.umem, data),
        }
        let whole = plain::whole(&self.queue.umem, self.queue.sends, chunk, len);
        self.transmit.outgoing.push(whole);
        tally.add(len);
        Some(())
    }

    /// Sends a frame longer than a chunk as a multi-buffer frame.
    #[cold]
    fn copy_in_pieces(&mut self, frame: GuestFrame<'_>, tally: &mut Tally) -> Option<()> {
        let len = frame.sending.len;
        if self.needs_tap(len)
            && let Some(done) = self.put_by_tap(frame, tally)
        {
            return done;
        }
        let Some(chunks) = self.chunks(len) else {
            return Some(());
        };
        if chunks > self.ring_room().min(self.queue.pool.len()) {
            return None;
        }
        let mut from = Cursor::default();
        let mut source = FromChain::frame(frame, &mut from);
        let mut left = len;
        while left > 0 {
            let chunk = self.queue.pool.take()?;
            let data = self.queue.umem.send_offset(&chunk);
            let fill = left.min(self.queue.umem.max_sent_bytes());
            source.copy(fill, &self.queue.umem, data);
            left -= fill;
            self.transmit.outgoing.push(TxDesc {
                frame: chunk,
                offset: data,
                len: fill,
                more: left > 0,
                metadata: false,
            });
        }
        tally.add(len);
        Some(())
    }

    /// The longest frame that the queue itself can send behind these headers.
    #[inline]
    pub(crate) fn longest_in(&self, outer: &Outer) -> u32 {
        let tag = if outer.is_tagged() {
            0
        } else {
            ethernet::TAG_BYTES as u32
        };
        // The limit has room for a tag.
        let longest = self.queue.frame_limit.saturating_sub(tag).min(LONGEST);
        let longest = longest.min(self.queue.umem.max_sent_bytes() * self.queue.sends.most_pieces as u32);
        longest.saturating_sub(outer.len() as u32)
    }

    /// Whether a frame of this length can only be sent through the tap, if there is one.
    #[inline]
    fn needs_tap(&self, len: u32) -> bool {
        self.queue.send_tap.is_some() && self.pieces(len) > self.queue.sends.most_pieces
    }

    #[inline]
    fn pieces(&self, len: u32) -> usize {
        len.div_ceil(self.queue.umem.max_sent_bytes()) as usize
    }

    /// Chunks that a frame needs; `None`: more than a frame may have, which is counted.
    #[inline]
    fn chunks(&self, len: u32) -> Option<usize> {
        let chunks = self.pieces(len);
        if chunks > self.queue.sends.most_pieces {
            self.counters.from_guest_too_many_pieces.add(1);
            return None;
        }
        Some(chunks)
    }

    /// Copies a frame that requests an offload; `None`: there is no room for it now.
    #[inline(never)]
    fn copy_asking(&mut self, frame: GuestFrame<'_>, budget: &mut Budget) -> Option<()> {
        let &Sending { len, request, .. } = frame.sending;
        if request.gso.is_none()
            && (self.transmit.uses_tap || self.needs_tap(len))
            && let Some(done) = self.put_by_tap(frame, &mut budget.tally)
        {
            return done;
        }
        match request {
            Request {
                gso: Some(gso),
                csum: Some(_),
            } => self.segment(frame, gso, budget),
            Request { csum: Some(at), .. } => {
                let Some(chunks) = self.chunks(len) else {
                    return Some(());
                };
                if chunks > self.ring_room().min(self.queue.pool.len()) {
                    return None;
                }
                let mut from = Cursor::default();
                let mut source = FromChain::frame(frame, &mut from);
                self.builder().0.frame(len, at, &mut source);
                budget.tally.add(len);
                Some(())
            }
            Request { csum: None, .. } => self.copy(frame, &mut budget.tally),
        }
    }

    /// Sends a frame through the tap. `None`: the tap does not take it; `Some(None)`: there is no room for it now.
    fn put_by_tap(&mut self, frame: GuestFrame<'_>, tally: &mut Tally) -> Option<Option<()>> {
        let &Sending { len, request, .. } = frame.sending;
        match self.send_by_tap(frame) {
            ByTap::Sent => {
                self.transmit.uses_tap = true;
                let leaves_checksum = request.csum.is_some();
                self.counters
                    .from_guest_checksums_left
                    .add(leaves_checksum.into());
                tally.add(len);
                Some(Some(()))
            }
            ByTap::Lost => Some(Some(())),
            ByTap::NoRoom => Some(None),
            ByTap::Refused => None,
        }
    }

    /// Returns the builder of frames that request an offload.
    fn builder(&mut self) -> (Builder<'_>, &mut References) {
        let builder = Builder {
            umem: &self.queue.umem,
            pool: &mut self.queue.pool,
            outgoing: &mut self.transmit.outgoing,
            sends: self.queue.sends,
            counters: self.counters,
        };
        (builder, &mut self.queue.references)
    }

    /// Returns the builder of a GSO packet's segments; see [`Segmenter::new`].
    fn segmenter(&mut self, plan: &Plan) -> Option<Segmenter<'_>> {
        let ring = self.ring;
        let (builder, references) = self.builder();
        Segmenter::new(builder, references, plan, ring)
    }

    /// Sends a GSO packet through the tap, or segments it; `None`: there is no room for that now.
    fn segment(&mut self, frame: GuestFrame<'_>, gso: Gso, budget: &mut Budget) -> Option<()> {
        let mut headers = [0; HEADERS_MAX];
        let frame = GuestFrame {
            frame_limit: frame.frame_limit.min(self.queue.frame_limit),
            ..frame
        };
        let Some(packet) = GsoPacket::open(frame, gso, self.counters, &mut headers) else {
            return Some(());
        };
        if self.queue.send_tap.is_some() {
            let headed = frame.headed(&headers[..packet.plan.header_len()]);
            match self.send_unsegmented(headed, &packet.plan, budget) {
                ByTap::Sent | ByTap::Lost => return Some(()),
                ByTap::NoRoom => return None,
                ByTap::Refused => {}
            }
        }
        self.put_packet(frame, packet, budget)
    }

    /// Sends the segments of a GSO packet, all at once unless there are very many; `None`: there is no room for that now.
    fn put_packet(
        &mut self,
        frame: GuestFrame<'_>,
        mut packet: GsoPacket,
        budget: &mut Budget,
    ) -> Option<()> {
        let waits = self.queue.nic.unsent() > 0 || !self.transmit.outgoing.is_empty();
        let Some(mut segmenter) = self.segmenter(&packet.plan) else {
            self.counters.from_guest_too_many_pieces.add(1);
            return Some(());
        };
        let many = packet.plan.segments() as usize > SEGMENTS;
        if many || !segmenter.has_room(&packet.plan, 0..packet.plan.segments()) {
            let in_vain = self.transmit.is_shared && self.transmit.has_waited;
            if !many && waits && !in_vain {
                self.transmit.has_waited = true;
                return None;
            }
            self.transmit.has_waited = false;
            // Building all of it would take more than a few polls, or other guests take each completed chunk, or all
            // chunks are completed and there will never be more room than now.
            self.keep(frame, &packet);
            self.build_rest(budget);
            return Some(());
        }
        let mut source = FromChain::rest(frame, &mut packet.payload);
        for index in 0..packet.plan.segments() {
            budget
                .tally
                .add(segmenter.segment(&packet.plan, index, &mut source));
        }
        self.transmit.has_waited = false;
        self.counters.from_guest_super_frames.add(1);
        Some(())
    }

    /// Sends a GSO packet unsegmented, with its checked headers.
    fn send_unsegmented(&mut self, frame: GuestFrame<'_>, plan: &Plan, budget: &mut Budget) -> ByTap {
        let (segments, headers) = (u64::from(plan.segments()), plan.header_len() as u32);
        if segments > SEGMENTS as u64 {
            // The kernel would segment it all at once, in the worker's time; the daemon sends it in portions.
            return ByTap::Refused;
        }
        let untagged_limit = frame.frame_limit.saturating_sub(ethernet::TAG_BYTES as u32);
        if plan.segment_bytes_max() > untagged_limit && !ethernet::has_tag(frame.head) {
            // Only tagged frames may be that long: the kernel takes frames of that length, but not such segments.
            return ByTap::Refused;
        }
        let sent = self.send_by_tap(frame);
        if sent == ByTap::Sent {
            self.transmit.uses_tap = true;
            self.counters.from_guest_super_frames.add(1);
            self.counters.from_guest_super_frames_unsegmented.add(1);
            self.counters.from_guest_checksums_left.add(segments);
            budget.tally.add_unsegmented(frame.sending.len, segments, headers);
        }
        sent
    }

    /// Sends a frame through the queue's tap, if there is one; before that, publishes the queued frames.
    fn send_by_tap(&mut self, frame: GuestFrame<'_>) -> ByTap {
        self.transmit.tap_is_full = false;
        let gso = frame.sending.request.gso;
        let is_udp = gso.is_some_and(|gso| gso.kind == GsoKind::Udp);
        match &self.queue.send_tap {
            Some(SendTap { segments_udp, .. }) if *segments_udp || !is_udp => {}
            _ => return ByTap::Refused,
        }
        if self.transmit.is_shared && self.queue.is_awaited {
            // Other lanes wait for room in the ring: this frame waits with them.
            return ByTap::NoRoom;
        }
        if !self.transmit.outgoing.is_empty() {
            self.flush();
        } else if !self.is_kicked {
            // Sends published frames, and reports whether there is a link.
            self.kick();
        }
        if let Some(counter) = self.queue.link.loses(self.counters) {
            counter.add(1);
            return ByTap::Lost;
        }
        if self.queue.nic.has_untaken() {
            // Where other lanes fill the ring, too, it may never be empty.
            let in_vain = self.transmit.is_shared && self.transmit.has_waited;
            self.transmit.has_waited = true;
            return match in_vain {
                true => ByTap::Refused,
                false => ByTap::NoRoom,
            };
        }
        let header = tap_header(frame);
        let mut parts = Parts::new();
        let Some(send_tap) = &self.queue.send_tap else {
            return ByTap::Refused;
        };
        if !push_frame(&mut parts, &header, frame) {
            return ByTap::Refused;
        }
        match send_tap.tap.write(&parts) {
            Ok(()) => {
                self.transmit.has_waited = false;
                self.transmit.last_by_tap = Ticks::now();
                meter::count_delivered(1);
                ByTap::Sent
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.transmit.tap_is_full = true;
                ByTap::NoRoom
            }
            Err(error) => {
                if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) {
                    // The tap was removed. The lane of the next guest requests another one.
                    self.queue.send_tap = None;
                }
                // Otherwise the tap is down, or the kernel does not segment such packets.
                ByTap::Refused
            }
        }
    }

    /// Copies a GSO packet into the daemon's memory.
    #[cold]
    fn keep(&mut self, frame: GuestFrame<'_>, packet: &GsoPacket) {
        self.counters.from_guest_super_frames.add(1);
        self.transmit.rest.keep(frame, packet);
    }

    /// Builds as many further segments of the copied GSO packet as there is room for and the budget allows.
    #[cold]
    fn build_rest(&mut self, budget: &mut Budget) {
        let Some(plan) = self.transmit.rest.plan.take() else {
            return;
        };
        // The queue may be another one than that for which the packet was copied.
        let fits = plan.segment_bytes_max() <= self.queue.frame_limit;
        let mut next = self.transmit.rest.next;
        let first = (plan.payload(next).start - plan.payload(0).start) as usize;
        let payload = std::mem::take(&mut self.transmit.rest.payload);
        let mut source = &payload[first..];
        let Some(mut segmenter) = self.segmenter(&plan).filter(|_| fits) else {
            self.counters.from_guest_rest_of_super_frame.add(1);
            return;
        };
        while next < plan.segments() && budget.has_frames() && segmenter.has_room(&plan, next..next + 1) {
            budget.tally.add(segmenter.segment(&plan, next, &mut source));
            next += 1;
        }
        let rest = &mut self.transmit.rest;
        (rest.next, rest.payload) = (next, payload);
        if next < plan.segments() {
            rest.plan = Some(plan);
        }
    }

    /// Continues the copied GSO packet within the budget; returns the number of segments sent.
    #[cold]
    pub(crate) fn send_rest(&mut self, budget: &mut Budget) -> usize {
        if self.queue.link == LinkState::Gone {
            self.transmit.rest.plan = None;
            self.counters.from_guest_rest_of_super_frame.add(1);
            return 0;
        }
        let outer_len = self.transmit.rest.plan.as_ref().map_or(0, Plan::outer_len);
        self.build_rest(budget);
        let tally = &mut budget.tally;
        if tally.frames == 0 {
            self.counters.from_guest_waits.add(1);
        }
        if outer_len > 0 {
            // Bytes are counted without the tunnel's headers.
            tally.bytes -= tally.frames * outer_len as u64;
            self.counters.from_guest_encapsulated.add(tally.frames);
        }
        tally.count(self.counters);
        let sent = usize::try_from(tally.frames).unwrap_or(usize::MAX);
        self.flush();
        sent
    }

    /// The lane is stopped, on a thread that may wait: sends the rest of a GSO packet, and queued frames, as far as the
    /// kernel takes them.
    pub(crate) fn send_before_stop(&mut self) {
        let mut waits = 0;
        while self.has_rest() && self.queue.link == LinkState::Up && waits < STOP_WAITS {
            self.queue.reclaim(usize::MAX, self.counters);
            if self.send_rest(&mut Budget::new(usize::MAX)) == 0 {
                std::thread::sleep(STOP_WAIT);
                waits += 1;
            }
        }
        if self.transmit.rest.plan.take().is_some() {
            self.counters.from_guest_rest_of_super_frame.add(1);
        }
        // Kicks the kernel for frames that earlier kicks left in the ring.
        for _ in 0..STOP_KICKS {
            self.queue.reclaim(usize::MAX, self.counters);
            if self.queue.nic.unsent() == 0 || self.queue.link != LinkState::Up {
                break;
            }
            self.kick();
        }
        // Descriptors that a guest's fault left unpublished.
        let outgoing = self.transmit.outgoing.drain(..);
        self.queue.take_back(outgoing.map(|desc| {
            self.counters.from_guest_queue_stopped.add((!desc.more).into());
            desc.frame
        }));
    }
}

/// A descriptor that sends `frame` from a chunk of the daemon, truncated to the chunk.
pub(crate) fn copied(chunk: xsk::Frame, frame: &[u8], umem: &xsk::Umem) -> TxDesc {
    let frame = &frame[..frame.len().min(umem.max_sent_bytes() as usize)];
    let offset = umem.send_offset(&chunk);
    // The chunk is inside the UMEM, and the frame not longer than it.
    let _ = umem.write(offset, frame);
    TxDesc {
        frame: chunk,
        offset,
        // At most the size of a chunk.
        #[allow(clippy::cast_possible_truncation)]
        len: frame.len() as u32,
        more: false,
        metadata: false,
    }
}

/// Pads a frame in a chunk of the daemon with zeros if it is too short for the NIC; returns its length.
#[inline]
pub(crate) fn fill_up(umem: &Umem, frame: UmemOffset, len: u32, sends: Sends) -> u32 {
    if !sends.must_fill_up(len) {
        return len;
    }
    let zeros = [0; SHORTEST_BY_DMA as usize];
    let rest = UmemOffset::new(frame.get() + u64::from(len));
    let _ = umem.write(rest, &zeros[len as usize..]);
    SHORTEST_BY_DMA
}
