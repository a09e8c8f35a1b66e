//! Copies of a guest's frames for promiscuous ports.

use std::ops::Range;

use super::PortLane;
use super::copies::pass_copy;
use super::judged::with_tag;
use crate::switch::from_guest::Turn;
use crate::switch::lane::Network;
use crate::switch::own_queue::OwnQueue;
use crate::switch::table::Destination;

impl<O: OwnQueue> PortLane<O> {
    /// Passes copies of frames that are done to those who listen. Groups go to all anyway, and what was not let through
    /// to nobody. A frame that has no destination here goes to them, too: one of them may bridge to it.
    #[cold]
    pub(super) fn mirror(&self, done: Range<usize>, network: &mut dyn Network, turn: &mut Turn) {
        for at in done {
            let judged = &self.chains[at];
            let [to_uplink, to_host] = self.members.ways_out;
            // By a queue of its own it does not go there.
            let to_uplink = to_uplink.filter(|_| !O::IS_THERE);
            let (to, way) = match judged.to {
                Destination::Port(port) if port == self.number && !self.is_hairpin() => continue,
                // Without a guest here it left.
                Destination::Port(port) => {
                    let guest = self.members.lanes(port).first().copied();
                    (Some(port), guest.or(to_uplink))
                }
                Destination::Unknown => (None, to_uplink),
                Destination::Host => (None, to_host),
                Destination::Group | Destination::Nobody => continue,
            };
            let chain = self.sender.chains().chains[at];
            let buffers = self.sender.chains().buffers(&chain);
            let Some(frame) = judged.frame(&self.pair, buffers) else {
                continue;
            };
            let mut copies = 0;
            let note = self.note(at).with(judged.flow_hints);
            for (port, guest) in self.members.listeners(judged.vlan, self.source(at), to, way) {
                copies += 1;
                let passed = with_tag(judged, frame, self.members.is_tagged(port), |frame| {
                    pass_copy(network, guest.at, (frame, note), &self.uncounted)
                });
                match passed {
                    Ok(work) => turn.note_look_ups(work),
                    Err(fault) => network.blame(guest.at, fault),
                }
            }
            turn.note_copies(copies, frame.sending.len);
        }
    }
}
