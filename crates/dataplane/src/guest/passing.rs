//! From a guest to another guest of this process: one copy, from RAM to RAM.
//!
//! GSO packets and partial checksums pass unchanged: they reach no wire, and the receiving guest completes what it
//! needs. For a guest that did not accept these offloads, the daemon segments GSO packets and completes checksums.
//!
//! A guest's requests are checked before they are passed on, so that no guest can make another parse headers that
//! differ from its bytes: the headers of a GSO packet are copied once, and both the plan and the sent headers are made
//! from that copy.

use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::{Cursor, Fault, HEADER_BYTES, Piece, Sending};
use packet::checksum::ChecksumAt;
use packet::ip::is_long;
use packet::layers::Ip;
use packet::segment::{Gso, GsoKind, Request};
use packet::{HEADERS_MAX, SHORT_HEAD};
use virtqueue::MemoryMap;

use crate::frame::bytes::guest_to_guest;
use crate::frame::gso::{FromChain, GsoPacket};
use crate::guest::from_guest::Budget;
use crate::guest::guest_frame::GuestFrame;
use crate::guest::pending::Pending;
use crate::guest::rx_queue::RxQueue;
use crate::guest::to_guest::{Bytes, Delivery, Fit, IN_ONE_BUFFER, NO_OFFLOAD, WholeFrame, with_buffers};
use crate::lane::shared::Waits;
use crate::policy::filter::{Acl, Facts};
use crate::policy::rate_limit::{Cost, Policer};

/// Result of passing a frame to a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passed {
    /// The other guest has it, or will never have room for it.
    Yes,
    /// The other guest gets it as this many frames, one after the other.
    Segmented(u32),
    /// Dropped and counted: its headers contradict its request, or the other guest may not get it.
    Dropped,
    /// The other guest has no room for it now.
    Later,
}

impl Passed {
    /// Charges a frame of `len` bytes to a budget, if it was passed on.
    #[inline]
    pub(crate) fn charge(self, budget: &mut Budget, len: u32) {
        match self {
            Self::Yes => budget.tally.add(len),
            Self::Segmented(frames) => {
                budget.tally.add(len);
                budget.charge_segments(frames);
            }
            Self::Dropped | Self::Later => {}
        }
    }
}

impl From<Fit> for Passed {
    #[inline]
    fn from(fit: Fit) -> Self {
        match fit {
            Fit::Now | Fit::Never => Self::Yes,
            Fit::Later => Self::Later,
        }
    }
}

/// A guest's receive queue while frames of another guest are passed to it.
pub(crate) struct Passing<'a> {
    delivery: Delivery<'a>,
    pending: &'a mut Pending,
    waits: &'a Waits,
    is_tap: bool,
    policer: Policer<'a>,
    filter: Option<&'a mut Acl>,
}

impl<'a> Passing<'a> {
    /// Begins with at most `most` buffers.
    /// Errors: its fault.
    #[inline]
    pub(crate) fn begin(guest: &'a mut RxQueue, most: usize) -> Result<Self, Fault> {
        let RxQueue {
            vring,
            buffers,
            counters,
            pending,
            waits,
            is_tap,
            limit,
            filter,
        } = guest;
        Ok(Self {
            delivery: Delivery::begin_with(vring, buffers, counters, most)?,
            pending,
            waits,
            is_tap: *is_tap,
            policer: Policer::new(limit.as_ref()),
            filter: filter.as_deref_mut(),
        })
    }

    /// Passes a frame on; `from`: counters of the guest that sends.
    /// Errors: the receiving guest's fault; then no more frames may be passed to it.
    #[inline]
    pub(crate) fn pass(&mut self, frame: GuestFrame<'_>, from: &PairCounters) -> Result<Passed, Fault> {
        // No frame overtakes earlier ones of the same guest.
        if self.pending.is_of(from) {
            return Ok(Passed::Later);
        }
        if self.filter.is_some() {
            return self.pass_filtered(frame, from);
        }
        self.pass_limited(frame, from)
    }

    /// Like [`Self::pass`], with filter rules.
    #[cold]
    #[inline(never)]
    fn pass_filtered(&mut self, frame: GuestFrame<'_>, from: &PairCounters) -> Result<Passed, Fault> {
        let counters = self.delivery.counters;
        let mut head = [0; HEADERS_MAX];
        let frame = match has_head(&frame) {
            true => frame,
            false => with_head(frame, &mut head),
        };
        let stored = frame.sending.request.csum.map(ChecksumAt::field);
        let facts = Facts {
            stored,
            ..Facts::of_len(frame.sending.len as usize)
        };
        let Some(filter) = self.filter.as_mut() else {
            return self.pass_limited(frame, from);
        };
        let said = filter.admits(frame.head, facts, counters);
        let passed = match said {
            Ok(_) => self.pass_limited(frame, from)?,
            Err(_) => Passed::Dropped,
        };
        if passed != Passed::Later
            && let Some(filter) = &self.filter
        {
            filter.settle(said, facts, facts.len, |to| frame.read_start(to));
        }
        Ok(passed)
    }

    #[inline]
    fn pass_limited(&mut self, frame: GuestFrame<'_>, from: &PairCounters) -> Result<Passed, Fault> {
        if !self.policer.allows(|| frame.cost(), self.delivery.counters) {
            return Ok(Passed::Dropped);
        }
        let passed = self.put(frame, from)?;
        if passed == Passed::Later {
            self.policer.give_back();
        }
        Ok(passed)
    }

    /// The common case: frames with a checked head and the rest in one piece, each with its requested checksum. Passes
    /// them on as long as they need nothing but a copy. Stops once it has copied `most_bytes`; `most`: the most that they
    /// cost the receiver's rate limit. Returns the number of frames that it copied, and of their bytes.
    #[inline]
    pub(crate) fn pass_whole<'f>(
        &mut self,
        memory: &MemoryMap,
        frames: impl Iterator<Item = (Option<ChecksumAt>, &'f [u8], Piece)>,
        (most_bytes, most): (u64, impl FnOnce() -> Cost),
        from: &PairCounters,
    ) -> (usize, u64) {
        if self.filter.is_some() || self.pending.is_of(from) || !self.policer.has(most) {
            return (0, 0);
        }
        let completes = self.delivery.vring().guest.offloads.guest_csum;
        let frames = frames.map_while(|(asked, head, rest)| {
            let header = header_for(asked, completes)?;
            Some(WholeFrame { header, head, rest })
        });
        let (count, bytes) = self.delivery.take_whole_of_guest(memory, frames, most_bytes);
        self.policer.charge(Cost::of(count as u64, bytes));
        (count, bytes)
    }

    /// Takes the cost of the look-ups since the last call, in frames of a budget.
    #[inline]
    pub(crate) fn take_work(&mut self) -> u64 {
        self.filter.as_mut().map_or(0, |filter| filter.take_work())
    }

    #[inline]
    fn put(&mut self, frame: GuestFrame<'_>, from: &PairCounters) -> Result<Passed, Fault> {
        let Self {
            delivery, pending, ..
        } = self;
        let &Sending { len, request, .. } = frame.sending;
        if let Some(gso) = request.gso {
            return pass_packet(frame, gso, from, delivery, pending);
        }
        if let Some(header) = header_for(request.csum, delivery.vring().guest.offloads.guest_csum)
            && let (head, Some(rest)) = (frame.head, frame.rest_in_one())
            && delivery.whole_of_guest(frame.memory, WholeFrame { header, head, rest })
        {
            return Ok(Passed::Yes);
        }
        let fit = delivery.fit(len)?;
        if fit != Fit::Now {
            return Ok(fit.into());
        }
        match request.csum {
            Some(at) if !delivery.vring().guest.offloads.guest_csum => {
                let mut bytes = pending.complete(frame, at);
                delivery.write(len, NO_OFFLOAD, &mut bytes);
            }
            _ => {
                let mut at = Cursor::default();
                delivery.write(len, request.to_header(0), &mut FromChain::frame(frame, &mut at));
            }
        }
        Ok(Passed::Yes)
    }

    /// Whether a frame that found no buffer may wait for one; if not, counts it as lost.
    #[cold]
    pub(crate) fn may_wait(&mut self) -> bool {
        let may = self.pending.may_wait();
        if !may {
            self.lose();
        }
        may
    }

    /// Counts a frame that is lost because it found no buffer.
    #[cold]
    pub(crate) fn lose(&mut self) {
        self.delivery.counters.to_guest_no_buffer.add(1);
    }

    /// Publishes the delivered frames to the guest. Its own lane is polled then if only that can go on.
    #[inline]
    pub(crate) fn finish(self) {
        let bytes = self.delivery.bytes();
        let frames = self.delivery.finish();
        if frames > 0 {
            self.pending.took(frames, bytes);
        }
        if self.pending.is_some() || (self.is_tap && frames > 0) {
            self.waits.set();
        }
    }
}

/// Whether a frame's head has all bytes that filter rules read.
#[inline]
fn has_head(frame: &GuestFrame<'_>) -> bool {
    let len = frame.sending.len as usize;
    let wanted = match frame.head.first_chunk().is_some_and(is_long) {
        true => HEADERS_MAX,
        false => SHORT_HEAD,
    };
    frame.head.len() >= wanted.min(len)
}

/// Copies the first bytes of a frame, as many as filter rules read, into `head`: they are sent in place of those in
/// guest memory. Bytes that an earlier check has copied keep their values.
fn with_head<'a>(frame: GuestFrame<'a>, head: &'a mut [u8; HEADERS_MAX]) -> GuestFrame<'a> {
    let len = frame.sending.len as usize;
    let mut known = SHORT_HEAD.max(frame.head.len()).min(len);
    frame.read_start(&mut head[..known]);
    if head.first_chunk().is_some_and(is_long) {
        // Reads all of it again: no byte of the first read is used.
        known = HEADERS_MAX.min(len);
        frame.read_start(&mut head[..known]);
    }
    frame.headed(&head[..known])
}

/// The virtio-net header of a frame in one buffer with this checksum request; `completes`: the guest completes
/// checksums. `None`: the daemon has to complete it.
#[inline]
fn header_for(asked: Option<ChecksumAt>, completes: bool) -> Option<[u8; HEADER_BYTES as usize]> {
    match asked {
        None => Some(IN_ONE_BUFFER),
        Some(_) if completes => {
            let request = Request {
                csum: asked,
                gso: None,
            };
            Some(with_buffers(request.to_header(0), 1))
        }
        Some(_) => None,
    }
}

/// Passes a GSO packet on whole, or keeps a copy of it that is segmented later.
#[inline(never)]
fn pass_packet(
    frame: GuestFrame<'_>,
    gso: Gso,
    from: &PairCounters,
    delivery: &mut Delivery<'_>,
    pending: &mut Pending,
) -> Result<Passed, Fault> {
    let mut headers = [0; HEADERS_MAX];
    let Some(mut packet) = GsoPacket::open(frame, gso, from, &mut headers) else {
        return Ok(Passed::Dropped);
    };
    let headers = &headers[..packet.plan.header_len()];
    let len = frame.sending.len;
    if !takes(&delivery.vring().guest.offloads, gso, packet.plan.version()) {
        if !pending.admits(from) {
            return Ok(Passed::Later);
        }
        pending.keep(frame, &packet, from);
        pending.segment_into(delivery)?;
        return Ok(Passed::Segmented(packet.left()));
    }
    let fit = delivery.fit(len)?;
    if fit == Fit::Now {
        // A header's length is at most HEADERS_MAX.
        #[allow(clippy::cast_possible_truncation)]
        let header = frame.sending.request.to_header(headers.len() as u16);
        let mut bytes = FromChain {
            head: headers,
            ..FromChain::rest(frame, &mut packet.payload)
        };
        delivery.write(len, header, &mut bytes);
    }
    Ok(fit.into())
}

/// Whether a guest accepts such a packet unsegmented.
fn takes(offloads: &Offloads, gso: Gso, version: Ip) -> bool {
    let kind = match gso.kind {
        GsoKind::Tcp4 => offloads.guest_tso4,
        GsoKind::Tcp6 => offloads.guest_tso6,
        GsoKind::Udp => match version {
            Ip::V4 => offloads.guest_uso4,
            Ip::V6 => offloads.guest_uso6,
        },
    };
    kind && (offloads.guest_ecn || !gso.ecn)
}

impl Bytes for FromChain<'_> {
    #[inline]
    fn copy_to(&mut self, memory: &MemoryMap, to: Piece) {
        let mut to = to;
        if !self.head.is_empty() {
            let mut head = self.take_head(to.len);
            // At most the piece's length.
            #[allow(clippy::cast_possible_truncation)]
            let (now, rest) = to.split(head.len() as u32);
            head.copy_to(memory, now);
            to = rest;
        }
        while to.len > 0
            && let Some(piece) = self.at.next(self.buffers, to.len)
        {
            let (now, rest) = to.split(piece.len);
            // Both were checked when their descriptors were read.
            let _ = guest_to_guest(self.memory, piece, memory, now.offset);
            to = rest;
        }
    }
}
