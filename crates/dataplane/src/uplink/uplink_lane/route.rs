//! Where a frame that arrived at the uplink's queue goes: by the mark that the program left before it, or else by its
//! address.

use packet::SHORT_HEAD;
use packet::ethernet::{self, Head, LOOK_BYTES};
use xsk::RxDesc;
use xsk::metadata::{Hash, Hints, Tag};

use super::UplinkLane;
use super::inbox_index::{InboxIndex, Route};
use super::inboxes::Inboxes;
use crate::fdb::flows::{Flow, Flows};
use crate::fdb::{Destination, FdbKey, PortMark, PortNumber, SHARED_PORTS};
use crate::frame::bytes::read_start;
use crate::frame::retag::{put_tag_back, untag};
use crate::nic::endpoint::NicQueue;
use crate::nic::lent::Lent;

impl<N: Lent> UplinkLane<N> {
    /// The route of a frame, by its first piece and its metadata. Removes the tag for a port without tags, and inserts
    /// it again for one with tags.
    #[inline]
    pub(super) fn route_of(&mut self, queue: &mut NicQueue<N>, piece: &mut RxDesc, hints: &Hints) -> Route {
        if let Some((port, _)) = hints.port.and_then(|mark| self.marked(PortMark(mark))) {
            return self.to_port(queue, port, piece, hints);
        }
        let mut bytes = [0; LOOK_BYTES];
        if read_start(&queue.umem, piece, &mut bytes).is_empty() {
            return Route::NoPort;
        }
        if let Some(Tag { proto, tci }) = hints.tag {
            bytes = ethernet::with_tag(&bytes, (proto, tci));
        }
        let Head { to, tags, .. } = ethernet::head(&bytes);
        // A frame without a mark belongs to the only network of the queue.
        let (share, forwarding) = match (&self.sharing, hints.port) {
            (None, _) => (0, &self.forwarding),
            (Some(sharing), None) if sharing.is_empty() => (0, &self.forwarding),
            (Some(_), None) => return Route::NoPort,
            (Some(_), Some(mark)) => {
                let share = PortMark(mark).parts().0.0 / SHARED_PORTS;
                match self.network(share) {
                    Some(forwarding) => (share, forwarding),
                    None => return Route::NoPort,
                }
            }
        };
        match forwarding.fdb.find(FdbKey::new(tags.vlan(), to)) {
            Destination::Multicast => {
                if let Some(tag) = hints.tag {
                    put_tag_back(&queue.umem, piece, tag, &self.counters);
                }
                Route::Multicast
            }
            // Frames for the host arrive at the uplink, too, but not in this socket.
            Destination::Host | Destination::Remote(_) | Destination::Unknown | Destination::Isolated => {
                Route::NoPort
            }
            Destination::Port(port) => {
                self.to_port(queue, PortNumber(share * SHARED_PORTS + port.0), piece, hints)
            }
        }
    }

    /// The port of a mark and its inboxes, if its generation still matches and it has a guest.
    #[inline]
    pub(super) fn marked(&self, mark: PortMark) -> Option<(PortNumber, &Inboxes)> {
        let (port, generation) = mark.parts();
        let its = self.inbox_of.get(usize::from(port.0))?;
        (its.index != InboxIndex::None && its.generation == generation).then_some((port, its))
    }

    #[inline]
    fn to_port(
        &mut self,
        queue: &mut NicQueue<N>,
        port: PortNumber,
        piece: &mut RxDesc,
        hints: &Hints,
    ) -> Route {
        self.found = Some(port);
        let Some(&its) = self.inbox_of.get(usize::from(port.0)) else {
            return Route::NoPort;
        };
        let route = match its.index {
            InboxIndex::One(at) => Route::Inbox(at),
            InboxIndex::Several { first, count } => {
                Route::Inbox(self.inbox_for(queue, port, (first, count), piece, hints.hash))
            }
            InboxIndex::None => return Route::NoPort,
        };
        match (its.untags, hints.tag) {
            (false, None) | (true, Some(_)) => {}
            (false, Some(tag)) => put_tag_back(&queue.umem, piece, tag, &self.counters),
            (true, None) => untag(&queue.umem, piece),
        }
        route
    }

    /// Which inbox of a port takes a frame: that of its flow. The flow is identified by the NIC's hash if that covers
    /// the ports, too, or else by the frame's first piece.
    fn inbox_for(
        &mut self,
        queue: &mut NicQueue<N>,
        port: PortNumber,
        (first, count): (usize, usize),
        piece: &RxDesc,
        hash: Option<Hash>,
    ) -> usize {
        let flows = self.known_by(port).and_then(|(of, port)| of.flows(port));
        let changes = flows.map_or(0, Flows::changes);
        let hash = hash.filter(|hash| hash.is_of_ports()).map(|hash| hash.value);
        if let Some(at) = hash.and_then(|hash| self.choices.find((port, hash), changes)) {
            return at;
        }
        let mut head = [0; SHORT_HEAD];
        read_start(&queue.umem, piece, &mut head);
        let known = self.known_by(port);
        let guest = known.and_then(|(of, port)| of.lane_for(port, Flow::of(&head)));
        let mut its_places = first..first + count;
        let found = its_places.find(|&at| Some(self.inboxes[at].guest) == guest);
        let at = found.unwrap_or(first);
        if let Some(hash) = hash {
            self.choices.note((port, hash), changes, at);
        }
        at
    }
}
