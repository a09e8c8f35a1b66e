//! A frame for several ports: a copy for each guest that has a buffer now.

use acl::FlowHints;
use device::counters::PairCounters;
use device::pair::Fault;
use packet::HEADERS_MAX;
use packet::checksum::{self, ChecksumAt};
use packet::ethernet::{ADDRESS_BYTES, TAG_BYTES};
use packet::layers;
use packet::segment::Request;
use packet::verify::Unfinished;

use crate::fdb::PortNumber;
use crate::fdb::forwarding::{Forwarding, LaneRef};
use crate::frame::checksums::Partial;
use crate::guest::rx_queue::RxQueue;
use crate::guest::to_guest::{Bytes, Delivery, Fit, NO_OFFLOAD};
use crate::lane::{Siblings, SlotAt};
use crate::policy::filter::Facts;
use crate::policy::rate_limit::Cost;

/// Writes one of several copies of a frame for a guest. The copy is lost if the guest has no buffer now, or its rate
/// limit is used up. Returns the number of frames delivered. The caller has applied the filter rules
/// ([`RxQueue::allows`]).
/// Errors: the guest's fault.
pub(crate) fn write_copy(
    guest: &mut RxQueue,
    len: u32,
    offload: [u8; 10],
    bytes: &mut impl Bytes,
) -> Result<usize, Fault> {
    if !guest.policer().allows(|| Cost::frame(len), &guest.counters) {
        return Ok(0);
    }
    let mut delivery = Delivery::begin_with(&mut guest.vring, &mut guest.buffers, &guest.counters, 1)?;
    match delivery.fit(len)? {
        Fit::Now => delivery.write(len, offload, bytes),
        Fit::Later => delivery.counters.to_guest_no_buffer.add(1),
        Fit::Never => {}
    }
    let frames = delivery.finish();
    if guest.is_tap && frames > 0 {
        guest.waits.set();
    }
    Ok(frames)
}

/// Writes an announcement of the daemon for the guest of a lane, if its rules admit that.
pub(crate) fn write_announcement(siblings: &mut dyn Siblings, at: SlotAt, frame: &[u8]) {
    siblings.deliver_to(at, |guest| match guest.allows_once(frame) {
        true => {
            let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
            write_copy(guest, len, NO_OFFLOAD, &mut { frame })
        }
        false => Ok(0),
    });
}

/// A frame in the daemon's memory that is copied for several guests, as the offloads of each require.
pub(crate) struct Several<'a> {
    pub(crate) frame: &'a mut Vec<u8>,
    /// The frame's VLAN; 0: none.
    pub(crate) vlan: u16,
    /// It may come from a stack on the same machine, which leaves checksums unfinished.
    pub(crate) may_be_partial: bool,
    /// What the NIC reported about its flow.
    pub(crate) flow: FlowHints,
    /// Counters of the sender.
    pub(crate) counters: &'a PairCounters,
}

impl Several<'_> {
    /// Delivers it to these ports; returns the cost of their filter rules, in frames of a budget.
    pub(crate) fn give(
        mut self,
        to: impl Iterator<Item = (PortNumber, LaneRef)> + Clone,
        forwarding: &Forwarding,
        siblings: &mut dyn Siblings,
    ) -> usize {
        let (partial, unfinished) = match self.partial() {
            None => return self.give_alike(to, forwarding, None, true, siblings),
            Some(Partial::Inner(inner)) => {
                self.complete(&inner);
                return self.give_alike(to, forwarding, None, true, siblings);
            }
            Some(Partial::Own(own)) => (Some(own.at), own),
        };
        let work = self.give_alike(to.clone(), forwarding, partial, true, siblings);
        self.complete(&unfinished);
        work + self.give_alike(to, forwarding, partial, false, siblings)
    }

    /// Completes a checksum, at the position that the parsed headers give.
    fn complete(&mut self, unfinished: &Unfinished) {
        if let Some(packet) = self.frame.get_mut(..unfinished.end as usize) {
            let _ = checksum::complete(packet, unfinished.at);
            self.counters.to_guest_checksums_completed.add(1);
        }
    }

    /// Delivers to the ports that take partial checksums, or to the others, if the frame has one; otherwise to all.
    fn give_alike(
        &self,
        to: impl Iterator<Item = (PortNumber, LaneRef)>,
        forwarding: &Forwarding,
        partial: Option<ChecksumAt>,
        takes_partial: bool,
        siblings: &mut dyn Siblings,
    ) -> usize {
        let mut work = 0;
        for (port, guest) in to {
            siblings.deliver_to(guest.at, |target| {
                if partial.is_some() && target.vring.guest.offloads.guest_csum != takes_partial {
                    return Ok(0);
                }
                let tag_off = self.vlan != 0 && !forwarding.is_tagged(port);
                let offload = match partial.filter(|_| takes_partial) {
                    Some(ChecksumAt { start, offset }) if tag_off => {
                        let start = start.saturating_sub(TAG_BYTES as u16);
                        Request::of_partial(ChecksumAt { start, offset }).to_header(0)
                    }
                    Some(at) => Request::of_partial(at).to_header(0),
                    None => NO_OFFLOAD,
                };
                let mut shown = TwoParts::of(self.frame, tag_off);
                let admits = shown.is_allowed(self.flow, target);
                work += target.take_work();
                // The number of such frames is limited at their source.
                match admits {
                    true => write_copy(target, shown.len(), offload, &mut shown),
                    false => Ok(0),
                }
            });
        }
        work
    }

    /// Its partial checksum, if it has one.
    fn partial(&self) -> Option<Partial> {
        if !self.may_be_partial {
            return None;
        }
        let headers = &self.frame[..HEADERS_MAX.min(self.frame.len())];
        let layers = layers::parse(headers, u32::try_from(self.frame.len()).ok()?)?;
        Partial::find(self.frame, &layers)
    }
}

/// A frame in two parts.
struct TwoParts<'a>(&'a [u8], &'a [u8]);

impl<'a> TwoParts<'a> {
    /// `tag_off`: without its tag.
    fn of(frame: &'a [u8], tag_off: bool) -> Self {
        let (addresses, rest) = frame.split_at(ADDRESS_BYTES.min(frame.len()));
        match tag_off {
            true => Self(addresses, rest.get(TAG_BYTES..).unwrap_or(&[])),
            false => Self(addresses, rest),
        }
    }

    fn len(&self) -> u32 {
        u32::try_from(self.0.len() + self.1.len()).unwrap_or(u32::MAX)
    }

    /// Whether the target's filter rules admit the frame as it is written.
    fn is_allowed(&self, flow: FlowHints, target: &mut RxQueue) -> bool {
        if target.filter.is_none() {
            return true;
        }
        let mut head = [0; HEADERS_MAX];
        let (addresses, rest) = head.split_at_mut(self.0.len());
        addresses.copy_from_slice(self.0);
        let known = rest.len().min(self.1.len());
        rest[..known].copy_from_slice(&self.1[..known]);
        let facts = Facts::of_flow(self.len() as usize, flow);
        target.allows(&head[..self.0.len() + known], facts)
    }
}

impl Bytes for TwoParts<'_> {
    fn copy_to(&mut self, memory: &virtqueue::MemoryMap, to: device::pair::Piece) {
        let first = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        let (now, later) = to.split(to.len.min(first));
        self.0.copy_to(memory, now);
        self.1.copy_to(memory, later);
    }
}
