//! Multicast and announcements: frames for several ports.

use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::Fault;
use packet::ethernet::{self, ADDRESS_BYTES};

use super::PortLane;
use crate::backend::own_queue::OwnQueue;
use crate::fdb::Destination;
use crate::guest::copies::write_copy;
use crate::guest::guest_frame::GuestFrame;
use crate::guest::passing::{Passed, Passing};
use crate::guest::to_guest::NO_OFFLOAD;
use crate::lane::{Siblings, SlotAt};
use crate::link::cross_worker_mark::CrossWorkerMark;

/// Passes a copy of a frame to one of several guests, or drops the copy if that guest has no buffer now. `mark`: for
/// another worker. Returns the work besides the copy, in frames.
/// Errors: that guest's fault.
pub(super) fn pass_copy(
    siblings: &mut dyn Siblings,
    at: SlotAt,
    (frame, mark): (GuestFrame<'_>, CrossWorkerMark),
    from: &PairCounters,
) -> Result<u64, Fault> {
    let Some(target) = siblings.guest(at) else {
        return Ok(0);
    };
    let mut work = 0;
    if let Some(mut passing) = Passing::begin(target, 1)? {
        passing.about(|| mark);
        if passing.pass(frame, from)? == Passed::Later {
            passing.lose();
        }
        work = passing.take_work();
        passing.finish();
    }
    Ok(work)
}

impl<O: OwnQueue> PortLane<O> {
    /// Sends an announcement of the daemon in each of the port's VLANs, if its source is the port's address.
    pub(super) fn announce(&mut self, frame: &[u8], siblings: &mut dyn Siblings) {
        let forwarding = Arc::clone(&self.forwarding);
        let own = forwarding.fdb.port(self.number);
        let Some(own) = own.filter(|own| frame.get(6..ADDRESS_BYTES) == Some(&own.mac)) else {
            self.counters.from_guest_source_address.add(1);
            return;
        };
        let mark = CrossWorkerMark::new(Destination::Multicast, Some(self.number), &forwarding.fdb);
        for &vlan in own.vlans.all() {
            let tagged = ethernet::tagged(frame, vlan);
            if O::IS_THERE && !forwarding.reaches_uplink_by_link() {
                self.own.inject(&tagged, &self.counters);
            } else if let Some(mut sink) = self.sink(siblings) {
                sink.inject(&tagged);
            }
            let ports = forwarding.ports_of(vlan, Some(self.number));
            let ports = ports.map(|(port, guest)| (guest, forwarding.is_tagged(port)));
            let host = forwarding.host.map(|host| (host, true));
            for (guest, is_tagged) in host.into_iter().chain(ports) {
                let shown = if is_tagged { &tagged[..] } else { frame };
                let len = u32::try_from(shown.len()).unwrap_or(u32::MAX);
                if let Some(mut target) = siblings.guest(guest.at)
                    && target.allows_once(shown)
                    && let Err(fault) = write_copy(target, (len, mark), NO_OFFLOAD, &mut { shown })
                {
                    siblings.blame(guest.at, fault);
                }
            }
        }
    }
}
