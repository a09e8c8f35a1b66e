//! Frames of guests to stations on other hosts, which a tunnel connects (VXLAN, Geneve). The network's uplink is the kernel's
//! device, and the kernel can send all of them. Frames that need nothing but headers leave by a queue of the NIC below
//! instead, the underlay: the worker writes the headers of the VTEP that the FDB names ([`crate::fdb::remotes`]).
//!
//! If the underlay's queue has zero-copy, GSO packets are segmented, and each segment gets headers of its own. Without it
//! the kernel's segmentation costs less.
//!
//! All others take the way of frames to unknown addresses: GSO packets without zero-copy, frames that are too long for the
//! underlay with these headers, frames of taps, and one frame whenever the kernel has to confirm the next hop. Frames of a
//! flow must not overtake each other. So the kernel sends the frames in the underlay's ring before one leaves by the uplink,
//! and frames behind a GSO packet that left by the uplink leave there, too, until none has done so for a while. A GSO packet
//! that confirms a next hop is the exception: later frames may overtake its segments. Otherwise a guest that never pauses
//! would not use the underlay again.
//!
//! The checked bytes of a frame are those inside the tunnel, as on the uplink. Requested checksums are completed here: the
//! NIC would compute that of the outer headers.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use device::counters::{Counter, PairCounters};
use packet::SHORT_HEAD;
use packet::segment::Tunnel;
use packet::tunnel::{Headers, Outer};
use virtqueue::ChainId;

use super::classified::Classified;
use super::exits::{Frames, Sent, send_by};
use super::{Batch, NO_FDB_ENTRY, PortLane};
use crate::backend::own_queue::OwnQueue;
use crate::backend::to_nic::{NicSink, ON_ITS_WAY, Transmit};
use crate::fdb::Destination;
use crate::fdb::flows::Flow;
use crate::fdb::remotes::VtepNumber;
use crate::frame::new_head::NewHead;
use crate::guest::from_guest::{Budget, Put, Sink};
use crate::guest::guest_frame::GuestFrame;
use crate::lane::limits::SEGMENTS;
use crate::lane::shared::SharedGuard;
use crate::lane::{Siblings, Uplink};
use crate::nic::endpoint::NicQueue;
use crate::nic::xdp::XdpNic;
use crate::policy::bucket::Ticks;

/// Different UDP source ports.
const SOURCE_PORTS: usize = 1 << 14;

/// What a lane keeps between two batches to the underlay.
pub(super) struct Underlay {
    pub(super) transmit: Transmit,
    /// When the last frame behind a GSO packet left by the uplink, if frames still do.
    detour: Option<Ticks>,
    /// Identification of the last IPv4 packet.
    id: u16,
}

impl Default for Underlay {
    fn default() -> Self {
        Self {
            transmit: Transmit::shared(),
            detour: None,
            // Lanes use different ones at a time.
            id: RandomState::new().hash_one(0) as u16,
        }
    }
}

/// Makes the headers of frames to a VTEP.
struct Encapsulation<'a> {
    outer: &'a Outer,
    id: &'a mut u16,
}

impl Encapsulation<'_> {
    /// The headers of a frame with this head.
    // Inlined, as `Outer::headers` is, so that the headers are written once, not moved to the caller.
    #[inline(always)]
    fn headers(&mut self, head: &[u8], len: u32) -> Headers {
        let id = self.take_ids(1);
        // The frame fits: see `NicSink::longest_in`.
        #[allow(clippy::cast_possible_truncation)]
        self.outer.headers(head, len as u16, flow_of(head), id)
    }

    /// Takes IPv4 identifications, which wrap around, for so many packets; returns the first.
    #[inline]
    fn take_ids(&mut self, packets: u16) -> u16 {
        let first = self.id.wrapping_add(1);
        *self.id = self.id.wrapping_add(packets);
        first
    }
}

/// The number of the flow for the UDP source port of a frame with this head.
#[inline(always)]
fn flow_of(head: &[u8]) -> u16 {
    let flow = match head.first_chunk() {
        Some(start) => Flow::of(start),
        None => {
            let mut start = [0; SHORT_HEAD];
            start[..head.len()].copy_from_slice(head);
            Flow::of(&start)
        }
    };
    flow.spread(SOURCE_PORTS) as u16
}

/// A queue of the underlay as a sink of frames to a VTEP.
struct ToVtep<'a, 'b> {
    sink: &'a mut NicSink<'b, XdpNic>,
    encapsulation: Encapsulation<'a>,
    /// The next frame is a GSO packet with segments that are too long.
    refuses: bool,
}

impl Sink for ToVtep<'_, '_> {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        self.sink.unsendable(counters)
    }

    fn put(&mut self, chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put {
        let Some(frame) = frame else {
            return self.sink.put(chain, None, budget);
        };
        if let Some(gso) = frame.sending.request.gso {
            // At least as many as there are segments.
            let ids = frame.sending.len / u32::from(gso.size) + 1;
            let tunnel = Tunnel {
                outer: self.encapsulation.outer.clone(),
                flow: flow_of(frame.head),
                id: self.encapsulation.take_ids(ids as u16),
            };
            let put = self.sink.put_segments((frame, gso), tunnel, budget);
            self.refuses = put.is_none();
            // Ends the run; `refuses` says that it is not for room.
            return put.unwrap_or(Put::NoRoom);
        }
        let headers = self.encapsulation.headers(frame.head, frame.sending.len);
        let whole = NewHead::new(&frame, [headers.as_ref(), frame.head, &[]]);
        self.sink.put(chain, Some(whole.frame(frame)), budget)
    }

    #[inline]
    fn has_rest(&self) -> bool {
        self.sink.has_rest()
    }
}

impl ToVtep<'_, '_> {
    /// How many of the next frames, up to `end`, can leave here, one behind the other.
    #[inline(always)]
    fn count_fitting(&self, frames: &Frames<'_>, end: usize) -> usize {
        if self.sink.unsendable(frames.counters).is_some() {
            return 0;
        }
        let longest = self.sink.longest_in(self.encapsulation.outer);
        let segments_gso = self.sink.segments_for_tunnels();
        let next = frames.classified[frames.end..end].iter();
        let fitting = next.take_while(|entry| match entry.sending.request.gso {
            None => entry.fits(entry.sending.len, longest),
            // Its segments are measured when it is sent.
            Some(_) => segments_gso || !entry.is_sent,
        });
        fitting.count()
    }

    /// Puts the frames into the queue, as far as it has room; returns whether the next one waits for room.
    #[inline(always)]
    fn put_all(&mut self, mut frames: Frames<'_>, (budget, done): (&mut Budget, &mut usize)) -> bool {
        let (counters, outer, before) = (frames.counters, self.encapsulation.outer, budget.tally.frames);
        let headers = |head: &[u8], len| self.encapsulation.headers(head, len);
        frames.copy_whole(self.sink, headers, (budget, done));
        // Only checks return errors, and these frames were checked before.
        let waits = frames.put(self, None, (budget, done)).unwrap_or(true) && !self.refuses;
        self.sink.note_wait(waits);
        let encapsulated = budget.tally.frames - before;
        // Bytes are counted as the guest sent them.
        budget.tally.bytes -= encapsulated * outer.len() as u64;
        counters.from_guest_encapsulated.add(encapsulated);
        waits
    }
}

impl<O: OwnQueue> PortLane<O> {
    /// Finds the VTEPs of classified frames again: stations move without a new FDB, and rules remember the destinations of
    /// flows.
    #[inline(never)]
    pub(super) fn find_remotes(&mut self) {
        let fdb = &self.forwarding.fdb;
        if !fdb.has_remotes() {
            return;
        }
        for chain in &mut self.chains[..self.classified] {
            if let (Destination::Remote(_) | Destination::Unknown, Some(&to)) =
                (chain.to, chain.head.first_chunk())
            {
                chain.to = fdb.find_remote(to);
            }
        }
    }

    /// Sends the next frames of a run to stations behind a VTEP.
    // Not inlined, so that batches without such frames do not pay for its code.
    #[inline(never)]
    pub(super) fn to_remote(&mut self, to: VtepNumber, run: usize, batch: &mut Batch<'_>) {
        if O::IS_THERE || self.forwarding.underlays.is_empty() || self.takes_detour() {
            return self.leave(run, batch, NO_FDB_ENTRY);
        }
        let first = batch.done;
        let Classified { is_sent, sending, .. } = &self.chains[first];
        let is_gso = *is_sent && sending.request.gso.is_some();
        let vtep = self.forwarding.fdb.vtep(to);
        let confirmed = vtep.filter(|vtep| *is_sent && vtep.take_confirm());
        let confirmed = confirmed.map(Arc::clone);
        if confirmed.is_none() && self.put_to_underlay(to, run, batch).is_some() {
            return;
        }
        // Frames in its ring leave before this one, which must not overtake them.
        if let Some(mut queue) = self.underlay_queue(batch.siblings) {
            queue.kick_queued(SEGMENTS * 2, &self.counters);
        }
        self.leave(1, batch, NO_FDB_ENTRY);
        match confirmed {
            // There was no room: the next frame confirms instead.
            Some(vtep) if batch.done == first => vtep.confirm.store(true, Relaxed),
            // Later GSO packets leave by the underlay again, so nothing has to wait for this one.
            Some(_) if (self.underlay_queue(batch.siblings)).is_some_and(|queue| queue.sends.zero_copy) => {}
            // Frames behind a GSO packet follow it, so that they do not overtake it.
            _ => self.underlay.detour = is_gso.then(Ticks::now),
        }
    }

    /// Whether a GSO packet that left by the uplink, or a frame behind it, may still be on its way.
    fn takes_detour(&mut self) -> bool {
        let Some(last) = self.underlay.detour else {
            return false;
        };
        let now = Ticks::now();
        let is_on_its_way = now.minus(last) <= Ticks::of(ON_ITS_WAY);
        self.underlay.detour = is_on_its_way.then_some(now);
        is_on_its_way
    }

    /// Puts the next frames of a run into the underlay's queue, as far as they fit and there is room. `None`: the next one
    /// cannot leave there, and nothing is done.
    fn put_to_underlay(&mut self, to: VtepNumber, run: usize, batch: &mut Batch<'_>) -> Option<()> {
        let place = self.forwarding.underlay(self.flow())?;
        let outer = &self.forwarding.fdb.vtep(to)?.outer;
        let Underlay { transmit, id, .. } = &mut self.underlay;
        let mut frames = Frames {
            vring: &mut self.from_guest,
            classified: &mut self.chains,
            chains: &self.sender.chains,
            counters: &self.counters,
            end: batch.done,
        };
        let first = batch.done;
        let (mut fits, mut waits) = (0, false);
        let sent = send_by(batch.siblings.uplink(place), (transmit, &self.counters), |sink| {
            let mut vtep = ToVtep {
                sink,
                encapsulation: Encapsulation { outer, id },
                refuses: false,
            };
            fits = vtep.count_fitting(&frames, frames.end + run);
            frames.end += fits;
            waits = vtep.put_all(frames, (&mut batch.budget, &mut batch.done));
            if vtep.refuses && batch.done == first {
                // The caller sends it by the uplink.
                fits = 0;
            }
        });
        self.is_locked_out = sent == Sent::Busy;
        self.waits = waits || self.is_locked_out;
        (fits > 0 || self.is_locked_out).then_some(())
    }

    /// The underlay's queue, if there is one, and no other worker has locked it.
    #[cold]
    fn underlay_queue<'a>(
        &self,
        siblings: &'a mut dyn Siblings,
    ) -> Option<SharedGuard<'a, NicQueue<XdpNic>>> {
        match siblings.uplink(self.forwarding.underlay(self.flow())?) {
            Uplink::Queue { queue, .. } => Some(queue),
            Uplink::Busy | Uplink::None => None,
        }
    }
}
