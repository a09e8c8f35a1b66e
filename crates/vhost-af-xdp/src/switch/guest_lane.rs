//! From a guest to another guest of this process: one copy, from RAM to RAM (`--cable`).
//!
//! Both lanes run on one worker, which passes the receiving guest to the sending lane as its [`RxTarget`]. Frames wait
//! in the sender's queue while the receiver has no buffers for them.
//!
//! GSO packets and partial checksums pass unchanged: they reach no wire, and the receiving guest completes what it
//! needs. For a guest that did not accept these offloads, the daemon segments GSO packets and completes checksums.
//!
//! A guest's requests are checked before they are passed on, so that no guest can make another parse headers that
//! differ from its bytes: the headers of a GSO packet are copied once, and both the plan and the sent headers are made
//! from that copy.

use std::sync::Arc;

use device::counters::{Counter, PairCounters};
use device::offloads::Offloads;
use device::pair::{Cursor, Fault, HEADER_BYTES, Piece, QueuePair, Sending};
use packet::HEADERS_MAX;
use packet::checksum::ChecksumAt;
use packet::layers::{self, Ip};
use packet::segment::{Gso, GsoKind, Request};
use virtqueue::{ChainId, MemoryMap};

use super::bytes::guest_to_guest;
use super::cross_worker_mark::CrossWorkerMark;
use super::filter::{Acl, Facts};
use super::from_guest::{Budget, Put, Sink};
use super::gso::{FromChain, GsoPacket};
use super::guest_frame::GuestFrame;
use super::lane::{Blame, Lane, LaneGuest, RxTarget, Siblings, Stopped, Work, enable_kicks};
use super::limits::BATCH;
use super::pending::Pending;
use super::policy::with_head;
use super::rate_limit::Policer;
use super::to_guest::{Bytes, Delivery, Fit, IN_ONE_BUFFER, NO_OFFLOAD, WholeFrame, with_buffers};

/// See the module's head. The lane of one of the two guests.
pub(crate) struct GuestLane {
    guest: LaneGuest,
    pending: Pending,
    /// A frame of its guest waits for buffers of the peer.
    waits: bool,
}

impl GuestLane {
    pub(crate) fn new(pair: QueuePair, counters: Arc<PairCounters>) -> Self {
        Self {
            guest: LaneGuest::new(pair, counters),
            pending: Pending::default(),
            waits: false,
        }
    }

    fn send(&mut self, target: Option<RxTarget<'_>>) -> Result<usize, Blame> {
        if self.guest.sender.begin() == 0 || !self.guest.pair.from_guest.enabled {
            return Ok(0);
        }
        let mut sink = GuestSink {
            to: To::of(target),
            from: &self.guest.counters,
            fault: None,
        };
        let burst = self
            .guest
            .sender
            .burst(&mut self.guest.pair, &mut sink, BATCH, &self.guest.counters);
        let fault = sink.finish();
        let burst = burst.map_err(Blame::Own)?;
        self.waits = burst.full;
        if burst.done > 0 {
            self.guest.pair.from_guest.publish(&self.guest.counters);
        } else if burst.full {
            self.guest.counters.from_guest_waits.add(1);
        }
        match fault {
            Some(fault) => Err(Blame::Target(fault)),
            None => Ok(burst.done),
        }
    }
}

/// The receiver of a burst's frames.
enum To<'a> {
    None,
    /// Its buffers are not fetched yet.
    Target(RxTarget<'a>),
    /// Its buffers are fetched.
    Open(Passing<'a>),
}

impl<'a> To<'a> {
    fn of(target: Option<RxTarget<'a>>) -> Self {
        target.map_or(Self::None, Self::Target)
    }
}

struct GuestSink<'a> {
    to: To<'a>,
    /// Counters of the guest that sends.
    from: &'a PairCounters,
    /// The receiving guest's fault.
    fault: Option<Fault>,
}

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

impl From<Fit> for Passed {
    #[inline]
    fn from(fit: Fit) -> Self {
        match fit {
            Fit::Now | Fit::Never => Self::Yes,
            Fit::Later => Self::Later,
        }
    }
}

impl Sink for GuestSink<'_> {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        matches!(self.to, To::None).then_some(&counters.from_guest_no_peer)
    }

    #[inline]
    fn put(&mut self, _chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put {
        let Some(frame) = frame else { return Put::Done };
        let passed = self.pass(frame);
        if let To::Open(passing) = &mut self.to {
            budget.charge_look_ups(passing.take_work());
        }
        match passed {
            Ok(Passed::Yes) => {
                budget.tally.add(frame.sending.len);
                Put::Done
            }
            Ok(Passed::Segmented(frames)) => {
                budget.tally.add(frame.sending.len);
                budget.charge_segments(frames);
                Put::Done
            }
            Ok(Passed::Dropped) => Put::Done,
            Ok(Passed::Later) => Put::NoRoom,
            Err(fault) => {
                self.fault = Some(fault);
                Put::NoRoom
            }
        }
    }

    #[inline]
    fn has_rest(&self) -> bool {
        match &self.to {
            To::Open(passing) => passing.has_rest(),
            To::None | To::Target(_) => false,
        }
    }
}

impl GuestSink<'_> {
    /// Passes a frame on.
    /// Errors: the receiving guest's fault.
    #[inline]
    fn pass(&mut self, frame: GuestFrame<'_>) -> Result<Passed, Fault> {
        if let To::Target(_) = self.to {
            self.open()?;
        }
        match &mut self.to {
            To::Open(passing) if passing.filter.is_some() => {
                passing.pass(with_head(frame, &mut [0; HEADERS_MAX]), self.from)
            }
            To::Open(passing) => passing.pass(frame, self.from),
            To::None | To::Target(_) => Ok(Passed::Later),
        }
    }

    /// Fetches the receiving guest's buffers.
    fn open(&mut self) -> Result<(), Fault> {
        if let To::Target(target) = std::mem::replace(&mut self.to, To::None)
            && let Some(passing) = Passing::begin(target, BATCH)?
        {
            self.to = To::Open(passing);
        }
        Ok(())
    }

    /// Publishes the delivered frames; returns the receiving guest's fault, if there is one.
    fn finish(self) -> Option<Fault> {
        if let (To::Open(passing), None) = (self.to, &self.fault) {
            passing.finish();
        }
        self.fault
    }
}

/// A guest's receive queue while frames of another guest are passed to it.
pub(crate) struct Passing<'a> {
    delivery: Delivery<'a>,
    pending: &'a mut Pending,
    policer: Policer<'a>,
    filter: Option<&'a mut Acl>,
}

impl<'a> Passing<'a> {
    /// Begins with at most `most` buffers; `None`: the guest takes no frames of other guests.
    /// Errors: its fault.
    #[inline]
    pub(crate) fn begin(guest: RxTarget<'a>, most: usize) -> Result<Option<Self>, Fault> {
        let Some(pending) = guest.pending else {
            return Ok(None);
        };
        let mut delivery = Delivery::begin_with(guest.pair, guest.buffers, guest.counters, most)?;
        delivery.write_marks_to(guest.marks);
        Ok(Some(Self {
            delivery,
            pending,
            policer: guest.policer,
            filter: guest.filter,
        }))
    }

    /// Sets the mark of the frames that follow, if they go to another worker.
    #[inline]
    pub(crate) fn about(&mut self, mark: impl FnOnce() -> CrossWorkerMark) {
        self.delivery.about(mark);
    }

    /// Passes a frame on; `from`: counters of the guest that sends.
    /// Errors: the receiving guest's fault; then the burst is over.
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

    /// The same with filter rules.
    #[cold]
    #[inline(never)]
    fn pass_filtered(&mut self, frame: GuestFrame<'_>, from: &PairCounters) -> Result<Passed, Fault> {
        let counters = self.delivery.counters;
        let stored = frame.sending.request.csum.map(ChecksumAt::field);
        let facts = Facts {
            stored,
            ..Facts::of_flow(frame.sending.len as usize, frame.flow)
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
            self.policer.give_back(|| frame.cost());
        }
        Ok(passed)
    }

    /// The common case: frames with a checked head and the rest in one piece, each with its requested checksum. Passes
    /// them on as long as they need nothing but a copy; returns how many, and their bytes.
    #[inline]
    pub(crate) fn pass_whole<'f>(
        &mut self,
        memory: &MemoryMap,
        frames: impl Iterator<Item = (Option<ChecksumAt>, &'f [u8], Piece)>,
        from: &PairCounters,
    ) -> (usize, u64) {
        let is_checked = self.filter.is_some() || self.policer.limit.is_some();
        if is_checked || self.pending.is_of(from) {
            return (0, 0);
        }
        let completes = self.delivery.pair().offloads.guest_csum;
        let frames = frames.map_while(|(asked, head, rest)| {
            let header = header_for(asked, completes)?;
            Some(WholeFrame { header, head, rest })
        });
        self.delivery.take_whole_of_guest(memory, frames)
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
        if let Some(header) = header_for(request.csum, delivery.pair().offloads.guest_csum)
            && let (head, Some(rest)) = (frame.head, frame.rest_in_one())
            && let whole = std::iter::once(WholeFrame { header, head, rest })
            && let (1, _) = delivery.take_whole_of_guest(frame.memory, whole)
        {
            return Ok(Passed::Yes);
        }
        let fit = delivery.fit(len)?;
        if fit != Fit::Now {
            return Ok(fit.into());
        }
        match request.csum {
            Some(at) if !delivery.pair().offloads.guest_csum => {
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

    /// Part of a GSO packet waits for buffers, and nothing overtakes it.
    #[inline]
    pub(crate) fn has_rest(&self) -> bool {
        self.pending.is_some()
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

    /// Publishes the delivered frames to the guest.
    #[inline]
    pub(crate) fn finish(self) {
        let bytes = self.delivery.bytes();
        let frames = self.delivery.finish();
        if frames > 0 {
            self.pending.took(frames, bytes);
        }
    }
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
    if !takes(&delivery.pair().offloads, gso, headers, len) {
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
fn takes(offloads: &Offloads, gso: Gso, headers: &[u8], len: u32) -> bool {
    let is_ipv6 = || layers::parse(headers, len).is_some_and(|layers| layers.version == Ip::V6);
    let kind = match gso.kind {
        GsoKind::Tcp4 => offloads.guest_tso4,
        GsoKind::Tcp6 => offloads.guest_tso6,
        GsoKind::Udp if offloads.guest_uso4 == offloads.guest_uso6 => offloads.guest_uso4,
        GsoKind::Udp => is_ipv6() == offloads.guest_uso6,
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

impl Lane for GuestLane {
    fn poll(&mut self, siblings: Siblings<'_>) -> Result<usize, Blame> {
        let mut moved = 0;
        if self.pending.is_some() && self.guest.pair.to_guest.enabled {
            let delivered = self.pending.deliver(
                &mut self.guest.pair,
                &mut self.guest.buffers,
                &self.guest.counters,
            );
            moved = delivered.map_err(Blame::Own)?;
        }
        Ok(moved + self.send(siblings.into_target())?)
    }

    fn enable_notifications(&mut self, siblings: Siblings<'_>) -> Work {
        let (mut work, frames) = enable_kicks(&self.guest.sender.throttle, &mut self.guest.pair);
        if frames && !self.waits {
            return Work::Now;
        }
        // The receiver has buffers, but fewer than the frame needs, and their kick may have come already.
        if frames
            && siblings
                .into_target()
                .is_some_and(|target| target.pair.to_guest.queue.enable_kicks())
        {
            work = work.max(Work::SOON);
        }
        if self.pending.is_some()
            && self.guest.pair.to_guest.enabled
            && self.guest.pair.to_guest.queue.enable_kicks()
        {
            work = work.max(Work::SOON);
        }
        work.or_polled(&self.guest.pair)
    }

    fn guest(&self) -> Option<&LaneGuest> {
        Some(&self.guest)
    }

    fn guest_mut(&mut self) -> Option<&mut LaneGuest> {
        Some(&mut self.guest)
    }

    fn rx_target(&mut self) -> Option<RxTarget<'_>> {
        Some(RxTarget {
            pair: &mut self.guest.pair,
            buffers: &mut self.guest.buffers,
            counters: &self.guest.counters,
            pending: Some(&mut self.pending),
            policer: Policer::new(self.guest.limit.as_ref()),
            filter: self.guest.sender.policy.to_guest(),
            marks: None,
        })
    }

    fn inject(&mut self, frame: &[u8], siblings: Siblings<'_>) {
        if let Some(mut target) = siblings.into_target()
            && target.allows_once(frame)
            && let Ok(mut delivery) = Delivery::begin(target.pair, target.buffers, target.counters)
        {
            let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
            if let Ok(Fit::Now) = delivery.fit(len) {
                delivery.write(len, NO_OFFLOAD, &mut { frame });
            }
            delivery.finish();
        }
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        self.guest.pair.leave_calls();
        self.guest
            .counters
            .to_guest_queue_stopped
            .add(self.pending.frames());
        Stopped {
            pair: Some(self.guest.pair.stopped()),
            queue: None,
        }
    }
}
