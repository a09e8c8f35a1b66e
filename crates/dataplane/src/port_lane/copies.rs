//! Multicast and announcements: frames for several ports.

use std::sync::Arc;

use device::counters::PairCounters;
use packet::ethernet::{self, ADDRESS_BYTES};

use super::PortLane;
use super::exits::Sent;
use crate::backend::own_queue::OwnQueue;
use crate::guest::copies::write_announcement;
use crate::guest::from_guest::Budget;
use crate::guest::guest_frame::GuestFrame;
use crate::guest::passing::{Passed, Passing};
use crate::lane::shared::{Busy, patiently};
use crate::lane::{Siblings, SlotAt};

/// Passes a copy of a frame to one of several guests, or drops the copy if that guest has no buffer now. Charges the work
/// besides the copy.
pub(super) fn pass_copy(
    siblings: &mut dyn Siblings,
    at: SlotAt,
    frame: GuestFrame<'_>,
    from: &PairCounters,
    budget: &mut Budget,
) {
    siblings.deliver_to(at, |guest| {
        let mut passing = Passing::begin(guest, 1)?;
        match passing.pass(frame, from)? {
            Passed::Segmented(frames) => budget.charge_segments(frames),
            Passed::Later => passing.lose(),
            Passed::Yes | Passed::Dropped => {}
        }
        budget.charge_look_ups(passing.take_work());
        passing.finish();
        Ok(())
    });
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
        for &vlan in own.vlans.all() {
            let tagged = ethernet::tagged(frame, vlan);
            match O::IS_THERE {
                true => self.own.inject(&tagged, &self.counters),
                false => {
                    let mut send = || self.with_uplink(siblings, |sink| sink.inject(&tagged));
                    let _ = patiently(|| match send() {
                        Sent::Busy => Err(Busy),
                        Sent::NoQueue | Sent::Done => Ok(()),
                    });
                }
            }
            let ports = forwarding.ports_of(vlan, Some(self.number));
            let ports = ports.map(|(port, guest)| (guest, forwarding.is_tagged(port)));
            let host = forwarding.host.map(|host| (host, true));
            for (guest, is_tagged) in host.into_iter().chain(ports) {
                let shown = if is_tagged { &tagged[..] } else { frame };
                write_announcement(siblings, guest.at, shown);
            }
        }
    }
}
