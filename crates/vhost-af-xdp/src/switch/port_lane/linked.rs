//! Frames that came by a link from another worker, or from the host: where they go here.

use device::pair::Fault;

use super::{From, PortLane};
use crate::switch::ethernet::{self, Head, LOOK_BYTES};
use crate::switch::from_guest::Turn;
use crate::switch::link_note::{LinkNote, NotedSender};
use crate::switch::members::Members;
use crate::switch::own_queue::OwnQueue;
use crate::switch::table::{Destination, PortNumber, Station, TablePort};
use crate::switch::vlans::Vlans;

impl<O: OwnQueue> PortLane<O> {
    /// Looks at the chains of the turn. Whether they may be sent was decided where they came from.
    /// Errors: never of a guest: both ends are ours.
    #[cold]
    pub(super) fn judge_trusted(&mut self, turn: &Turn) -> Result<(), Fault> {
        self.judged = 0;
        let all = TablePort {
            vlans: Vlans::All,
            ..TablePort::default()
        };
        let mut work = turn.anew();
        for (chain, of_chain) in self.sender.chains().chains.iter().zip(&mut self.chains) {
            if !work.takes_more() {
                break;
            }
            let buffers = self.sender.chains().buffers(chain);
            of_chain.is_sent =
                self.pair
                    .judge_into(chain, buffers, None, &self.counters, &mut of_chain.sending)?;
            if of_chain.is_sent {
                of_chain.read_head(&self.pair, buffers, (&all, self.members.is_filtered));
                work.tally.add(of_chain.sending.len);
                let bytes = of_chain.head.first_chunk().copied().unwrap_or_default();
                let Head { from, tags, .. } = ethernet::head(&bytes);
                let vlan = tags.vlan();
                if vlan != 0 && !of_chain.may_be_retagged(tags) {
                    self.counters.drop_malformed(of_chain.not_retagged());
                    of_chain.is_sent = false;
                }
                let notes = self.notes.as_deref();
                let note = notes.map_or(LinkNote::NOTHING, |notes| notes.read(buffers.first()));
                (of_chain.source, of_chain.to) = ends(&self.members, self.from, note, &bytes);
                of_chain.flow_hints = note.flow;
                (of_chain.vlan, of_chain.is_tagged) = (vlan, vlan != 0);
                let is_to_group = of_chain.to == Destination::Group && self.from == From::Tap;
                if is_to_group && self.members.has_guest(Station::new(vlan, from)) {
                    self.counters.returned_frames.add(1);
                    of_chain.is_sent = false;
                }
            }
            work.note(buffers.len());
            self.judged += 1;
        }
        Ok(())
    }
}

/// Which port sent a frame, if one did, and where the frame goes: by what is noted of it, or else by its addresses.
fn ends(
    members: &Members,
    from: From,
    note: LinkNote,
    bytes: &[u8; LOOK_BYTES],
) -> (Option<PortNumber>, Destination) {
    let table = &members.table;
    let sender = note.sender(table);
    let source = match sender {
        NotedSender::Is(source) => source,
        // It may have been changed. Who else has its address now did not send this.
        NotedSender::Other(number) => source_of(members, from, bytes).filter(|&source| source == number),
        NotedSender::Unsaid => source_of(members, from, bytes),
    };
    let to = match (sender, note.destination(table)) {
        // Whether one is isolated from the other was seen where it came from, and both are what they were then.
        (NotedSender::Is(_), Some(to)) => to,
        // A port sent it, and nobody knows which: others that are isolated must not hear it if that one is.
        (NotedSender::Other(_), _) if source.is_none() => Destination::Nobody,
        _ => {
            let Head { to, tags, .. } = ethernet::head(bytes);
            let to = Station::new(tags.vlan(), to);
            match source.and_then(|source| table.port(source)) {
                Some(source) => table.find_for(source, to),
                None => table.find(to),
            }
        }
    };
    match to {
        // What came by an uplink goes out by none. The host has no way out here.
        Destination::Unknown | Destination::Host if source.is_none() && from == From::Link => {
            (source, Destination::Nobody)
        }
        to => (source, to),
    }
}

/// The port that sent a frame, by the address that it is from.
fn source_of(members: &Members, from: From, bytes: &[u8; LOOK_BYTES]) -> Option<PortNumber> {
    let Head { from: mac, tags, .. } = ethernet::head(bytes);
    match members.table.find(Station::new(tags.vlan(), mac)) {
        // Of one without a guest here it came by the LAN, and does not go there again.
        Destination::Port(port) if from == From::Link && !members.is_absent(port) => Some(port),
        _ => None,
    }
}
