//! A guest's GSO packet, and the frames that are built from it.
//!
//! Purpose: the common part of both placements when a guest's frame requests an offload. A [`GsoPacket`] is the plan
//! for its segmentation, made from a private copy of its headers, and the progress. A [`Builder`] makes frames in
//! chunks of the daemon: headers, payload from any memory, and the checksum. Where the socket supports it, the kernel
//! or the NIC completes the checksum (XDP TX metadata, Documentation/networking/xsk-tx-metadata.rst), otherwise the
//! builder.
//!
//! Invariants: plans and metadata depend only on bytes that no guest can change any more. The kernel stops a TX ring
//! for good at invalid metadata (`xsk_build_skb`, net/xdp/xsk.c, leaves the descriptor in the ring), so it only gets
//! metadata that it cannot reject: for a checksum in the frame's first descriptor. That is always the checksum of TCP
//! or UDP at its real position: a guest must not make a NIC try other positions.

#![allow(unsafe_code)]

use common::binding::TX_METADATA_BYTES;
use packet::HEADERS_MAX;
use packet::checksum::{self, ChecksumAt, Sum};
use packet::layers;
use packet::segment::{Gso, Malformed, Plan};
use virtqueue::{Buffer, MemoryMap};
use xsk::{FramePool, TxDesc, Umem, UmemOffset};

use crate::frame::bytes::{guest_to_umem, own_bytes};
use crate::guest::guest_frame::GuestFrame;
use crate::nic::queue::Sends;
use crate::policy::rate_limit::Cost;
use device::counters::PairCounters;
use device::pair::Cursor;

/// `XDP_TXMD_FLAGS_CHECKSUM`.
pub(crate) const TXMD_CHECKSUM: u64 = 1 << 1;

/// Most frames of one GSO packet: more than 64 KiB need at the smallest MSS that Linux sends with, 48 bytes
/// less 12 of timestamps (net.ipv4.tcp_min_snd_mss). The kernel has no limit for TCP from a tap, and 128 for UDP
/// (`virtio_net_hdr_to_skb`, include/linux/virtio_net.h).
pub(crate) const MOST_SEGMENTS: u32 = 2048;

/// A GSO packet that is being segmented.
pub(crate) struct GsoPacket {
    /// How it is segmented.
    pub(crate) plan: Plan,
    /// First segment that has not been built.
    pub(crate) next: u32,
    /// Where the payload of that segment begins, in the chain.
    pub(crate) payload: Cursor,
}

impl GsoPacket {
    /// Plans how to segment a frame, from a private copy of its headers, which is left in `headers`; `None`: it has to
    /// be dropped, and is counted.
    pub(crate) fn open(
        frame: GuestFrame<'_>,
        gso: Gso,
        counters: &PairCounters,
        headers: &mut [u8; HEADERS_MAX],
    ) -> Option<Self> {
        // Made in place: a plan has hundreds of bytes.
        let made = frame.plan(gso, headers).map(|plan| Self {
            payload: frame.place_of(plan.header_len() as u32),
            plan,
            next: 0,
        });
        let plan = match &made {
            Ok(packet) => &packet.plan,
            Err(why) => {
                counters.drop_malformed(*why);
                return None;
            }
        };
        if plan.segment_bytes_max() > frame.frame_limit {
            counters.from_guest_segment_too_long.add(1);
            return None;
        }
        if plan.segments() > MOST_SEGMENTS {
            counters.from_guest_too_many_segments.add(1);
            return None;
        }
        made.ok()
    }

    /// Segments that have not been built.
    #[inline]
    pub(crate) fn left(&self) -> u32 {
        self.plan.segments() - self.next
    }
}

impl GuestFrame<'_> {
    /// How a GSO packet is segmented, from a private copy of its headers, which is left in `headers`.
    /// Errors: the headers contradict the guest's request.
    #[inline]
    pub(crate) fn plan(&self, gso: Gso, headers: &mut [u8; HEADERS_MAX]) -> Result<Plan, Malformed> {
        let len = self.sending.len;
        let headers = &mut headers[..HEADERS_MAX.min(len as usize)];
        self.read_start(headers);
        let plan = Plan::new(headers, len, gso)?;
        let asked = self.sending.request.csum.ok_or(Malformed::GsoWithoutChecksum)?;
        match plan.checksum_at() {
            found if found != asked => Err(Malformed::ChecksumPlace { asked, found }),
            _ => Ok(plan),
        }
    }

    /// Its cost on a wire, where a GSO packet is segmented.
    #[cold]
    #[inline(never)]
    pub(crate) fn cost(&self) -> Cost {
        let one = Cost::frame(self.sending.len);
        let Some(gso) = self.sending.request.gso else {
            return one;
        };
        match self.plan(gso, &mut [0; HEADERS_MAX]) {
            Ok(plan) => Cost {
                frames: plan.segments(),
                bytes: one.bytes + u64::from(plan.segments() - 1) * plan.header_len() as u64,
            },
            // The guest may put its headers right before they are read again.
            Err(_) => Cost {
                frames: self.sending.len.div_ceil(gso.size.into()),
                ..one
            },
        }
    }

    /// Copies its first bytes.
    pub(crate) fn read_start(&self, to: &mut [u8]) {
        let (known, rest) = to.split_at_mut(self.head.len().min(to.len()));
        known.copy_from_slice(&self.head[..known.len()]);
        if !rest.is_empty() {
            self.read(self.place_of(known.len() as u32), rest);
        }
    }

    /// Copies the bytes of the chain from a position on. If the chain ends first, the rest of `to` keeps its values.
    pub(crate) fn read(&self, from: Cursor, to: &mut [u8]) {
        let (mut from, mut rest) = (from, to);
        while let Some(piece) = from.next(self.buffers, u32::try_from(rest.len()).unwrap_or(u32::MAX)) {
            let (now, later) = rest.split_at_mut(piece.len as usize);
            // Inside the map, as checked when the descriptor was read.
            let _ = self.memory.copy_from_guest(piece.offset, now);
            rest = later;
            if rest.is_empty() {
                return;
            }
        }
    }
}

/// A GSO packet that was copied whole into the daemon's memory, and is sent in portions.
#[derive(Default)]
pub(crate) struct Remainder {
    /// How it is segmented; `None`: there is no packet.
    pub(crate) plan: Option<Plan>,
    /// Its first segment that has not been built.
    pub(crate) next: u32,
    /// Its payload; the memory is reused.
    pub(crate) payload: Vec<u8>,
}

impl Remainder {
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        self.plan.is_some()
    }

    /// Copies a GSO packet.
    pub(crate) fn keep(&mut self, frame: GuestFrame<'_>, packet: &GsoPacket) {
        let bytes = (frame.sending.len - packet.plan.payload(0).start) as usize;
        self.payload.resize(bytes, 0);
        frame.read(packet.payload, &mut self.payload);
        self.next = 0;
        self.plan = Some(packet.plan.clone());
    }
}

/// Where the bytes of a frame come from.
pub(crate) trait Source {
    /// Copies the next `len` bytes into the UMEM.
    fn copy(&mut self, len: u32, umem: &Umem, to: UmemOffset);
}

/// Bytes of a guest's chain.
pub(crate) struct FromChain<'a> {
    /// First bytes, in the daemon's memory.
    pub(crate) head: &'a [u8],
    pub(crate) memory: &'a MemoryMap,
    pub(crate) buffers: &'a [Buffer],
    pub(crate) at: &'a mut Cursor,
}

impl<'a> FromChain<'a> {
    /// The bytes of a frame; `at`: room for the position in the chain.
    #[inline]
    pub(crate) fn frame(frame: GuestFrame<'a>, at: &'a mut Cursor) -> Self {
        *at = frame.place_of(u32::try_from(frame.head.len()).unwrap_or(u32::MAX));
        Self {
            head: frame.head,
            ..Self::rest(frame, at)
        }
    }

    /// The bytes of a frame's chain from the position `at` on.
    #[inline]
    pub(crate) fn rest(frame: GuestFrame<'a>, at: &'a mut Cursor) -> Self {
        Self {
            head: &[],
            memory: frame.memory,
            buffers: frame.buffers,
            at,
        }
    }

    /// Takes at most `len` bytes of the head.
    #[inline]
    pub(crate) fn take_head(&mut self, len: u32) -> &'a [u8] {
        let (now, later) = self.head.split_at(self.head.len().min(len as usize));
        self.head = later;
        now
    }
}

impl Source for FromChain<'_> {
    #[inline]
    fn copy(&mut self, len: u32, umem: &Umem, to: UmemOffset) {
        let mut done = 0;
        if !self.head.is_empty() {
            let head = self.take_head(len);
            let _ = umem.write(to, head);
            // At most `len`.
            #[allow(clippy::cast_possible_truncation)]
            let known = head.len() as u32;
            done = known;
        }
        while done < len
            && let Some(piece) = self.at.next(self.buffers, len - done)
        {
            let to = UmemOffset::new(to.get() + u64::from(done));
            // Both were checked: the piece when its descriptor was read, the chunk when it was made.
            let _ = guest_to_umem(self.memory, piece, umem, to);
            done += piece.len;
        }
    }
}

/// Bytes in the daemon's memory.
impl Source for &[u8] {
    fn copy(&mut self, len: u32, umem: &Umem, to: UmemOffset) {
        let (now, later) = self.split_at((len as usize).min(self.len()));
        let _ = umem.write(to, now);
        *self = later;
    }
}

/// Builds frames in chunks of the daemon; the caller has checked that there are enough.
pub(crate) struct Builder<'a> {
    pub(crate) umem: &'a Umem,
    pub(crate) pool: &'a mut FramePool,
    pub(crate) outgoing: &'a mut Vec<TxDesc>,
    pub(crate) sends: Sends,
    pub(crate) counters: &'a PairCounters,
}

impl Builder<'_> {
    /// Builds the next segment, with payload from `source`; returns its length.
    #[inline]
    pub(crate) fn segment(&mut self, plan: &Plan, index: u32, source: &mut impl Source) -> u32 {
        let first = self.outgoing.len();
        let payload = plan.payload(index);
        let header_len = plan.header_len() as u32;
        let len = header_len + (payload.end - payload.start);
        self.chunks(len, header_len, source);
        self.finish(plan, index, first);
        len
    }

    /// Builds the headers of a segment whose payload follows in separate descriptors.
    pub(crate) fn headers(&mut self, plan: &Plan, index: u32) {
        let first = self.outgoing.len();
        let header_len = plan.header_len() as u32;
        self.chunks(header_len, header_len, &mut &[][..]);
        self.finish(plan, index, first);
        if let Some(desc) = self.outgoing.get_mut(first) {
            desc.more = true;
        }
    }

    /// Writes the headers of a segment whose descriptors, from `first` on, are otherwise done, and requests or
    /// completes its checksum.
    #[inline]
    pub(crate) fn finish(&mut self, plan: &Plan, index: u32, first: usize) {
        if let Some(bytes) = self.bytes(first) {
            plan.write_header(index, bytes);
        }
        match plan.outer_len() {
            0 => self.checksum(first, plan.checksum_at()),
            // The NIC would compute that of the outer headers.
            _ => self.complete(first, plan.checksum_at()),
        }
    }

    /// Builds a frame of `len` bytes as they are in `source`, and completes its checksum.
    pub(crate) fn frame(&mut self, len: u32, at: ChecksumAt, source: &mut impl Source) {
        let first = self.outgoing.len();
        self.chunks(len, 0, source);
        if self.is_transport(first, len, at) {
            self.checksum(first, at);
        } else {
            self.complete(first, at);
        }
    }

    /// Fills chunks with `len` bytes, of which the first `skip` are left for the caller to write.
    #[inline]
    fn chunks(&mut self, len: u32, skip: u32, source: &mut impl Source) {
        let (mut left, mut skip) = (len, skip);
        while left > 0
            && let Some(frame) = self.pool.take()
        {
            let offset = self.umem.send_offset(&frame);
            let fill = left.min(self.umem.max_sent_bytes());
            let to = UmemOffset::new(offset.get() + u64::from(skip));
            source.copy(fill - skip, self.umem, to);
            (left, skip) = (left - fill, 0);
            self.outgoing.push(TxDesc {
                frame,
                offset,
                len: fill,
                more: left > 0,
                metadata: false,
            });
        }
    }

    /// Whether the checksum is that of TCP or UDP, at its real position in the frame.
    fn is_transport(&mut self, first: usize, len: u32, at: ChecksumAt) -> bool {
        let layers = self.bytes(first).and_then(|bytes| layers::parse(bytes, len));
        layers.is_some_and(|layers| layers.checksum_at() == at)
    }

    /// Requests or completes the checksum of the frame that begins with descriptor `first`; the field is there, in the
    /// headers of TCP or UDP.
    #[inline]
    fn checksum(&mut self, first: usize, at: ChecksumAt) {
        if !self.sends.checksum {
            return self.complete(first, at);
        }
        let Some(desc) = self.outgoing.get_mut(first) else {
            return;
        };
        let mut metadata = [0; 16];
        metadata[..8].copy_from_slice(&TXMD_CHECKSUM.to_ne_bytes());
        metadata[8..10].copy_from_slice(&at.start.to_ne_bytes());
        metadata[10..12].copy_from_slice(&at.offset.to_ne_bytes());
        let before = UmemOffset::new(desc.offset.get() - u64::from(TX_METADATA_BYTES));
        // Part of the same chunk: see `Umem::send_offset`.
        let _ = self.umem.write(before, &metadata);
        desc.metadata = true;
        self.counters.from_guest_checksums_left.add(1);
    }

    /// Completes the checksum of the frame that begins with descriptor `first`.
    fn complete(&mut self, first: usize, at: ChecksumAt) {
        self.counters.from_guest_checksums.add(1);
        if self.outgoing.len() - first > 1 {
            return self.complete_across(first, at);
        }
        if let Some(bytes) = self.bytes(first) {
            // The field is inside, as was checked.
            let _ = checksum::complete(bytes, at);
        }
    }

    /// The bytes of a descriptor that waits to be sent, in a chunk of the daemon.
    #[inline]
    fn bytes(&mut self, index: usize) -> Option<&mut [u8]> {
        let desc = self.outgoing.get_mut(index)?;
        // SAFETY: no NIC has the descriptors in `outgoing` yet. Chunks of the pool belong to the daemon. Descriptors
        // that share a chunk have no byte in common (segmenter.rs), and all of them are here.
        unsafe { own_bytes(self.umem, desc) }
    }

    /// The same for a frame of several descriptors.
    #[inline(never)]
    fn complete_across(&mut self, first: usize, at: ChecksumAt) {
        let begin = usize::from(at.start);
        let (mut sum, mut passed) = (Sum::default(), 0);
        for index in first..self.outgoing.len() {
            let Some(bytes) = self.bytes(index) else { return };
            let from = begin.saturating_sub(passed).min(bytes.len());
            let piece = Sum::of(&bytes[from..]);
            let odd = (passed + from).abs_diff(begin) % 2 == 1;
            sum = sum + if odd { piece.swapped() } else { piece };
            passed += bytes.len();
        }
        for (mut at, byte) in (at.field()..).zip(at.stored(sum)) {
            for index in first..self.outgoing.len() {
                let Some(bytes) = self.bytes(index) else { return };
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                    break;
                }
                at -= bytes.len();
            }
        }
    }
}

#[cfg(test)]
#[path = "gso_tests.rs"]
mod tests;
