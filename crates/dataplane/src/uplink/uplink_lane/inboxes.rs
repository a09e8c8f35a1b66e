//! Inboxes of an uplink's queue: in each, frames wait for one guest's buffers. Renewed when the network's lanes change.

use std::collections::VecDeque;
use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::Vring;
use xsk::{Frame, RxDesc, Umem};

use super::UplinkLane;
use super::inbox_index::{InboxIndex, Route};
use crate::backend::arrivals::{Arrivals, Origin};
use crate::fdb::forwarding::{Forwarding, LaneRef};
use crate::fdb::{PortNumber, SHARED_PORTS};
use crate::frame::checksums::PrivateLook;
use crate::lane::Siblings;
use crate::lane::lane_id::LaneId;
use crate::lane::limits::BATCH;
use crate::nic::endpoint::NicQueue;
use crate::nic::lent::Lent;
use crate::policy::rate_limit::RateLimit;

/// Frames that wait for a guest's buffers.
pub(super) struct Inbox {
    pub(super) port: PortNumber,
    pub(super) guest: LaneRef,
    pub(super) arrivals: Arrivals,
    /// Pieces that `arrivals` has taken out of `waiting`.
    pub(super) received: Vec<RxDesc>,
    pub(super) waiting: VecDeque<RxDesc>,
    /// Looks for partial checksums in multicast frames.
    pub(super) look: Option<PrivateLook>,
    /// Rate limit of what the guest gets.
    pub(super) limit: Option<Arc<RateLimit>>,
    /// Filter rules decide which frames it gets.
    pub(super) is_filtered: bool,
}

impl Inbox {
    fn new(port: PortNumber, guest: LaneRef, vring: &Vring, origin: Origin) -> Self {
        Self {
            port,
            guest,
            arrivals: Arrivals::from(origin, vring),
            received: Vec::with_capacity(BATCH),
            waiting: VecDeque::with_capacity(BATCH),
            look: PrivateLook::of(vring, origin.partial_checksums),
            limit: None,
            is_filtered: false,
        }
    }

    /// How many chunks wait.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.received.len() + self.waiting.len()
    }

    /// Delivers waiting frames, as far as the guest has buffers; returns how many.
    pub(super) fn deliver(
        &mut self,
        umem: &Umem,
        empty: &mut Vec<Frame>,
        siblings: &mut dyn Siblings,
    ) -> usize {
        let delivered = siblings.deliver_to(self.guest.at, |guest| {
            let (mut delivery, ..) = guest.begin(self.len())?;
            let frames = (&mut self.waiting, &mut self.received);
            self.arrivals
                .deliver_waiting(frames, umem, empty, &mut delivery)?;
            Ok(delivery.finish())
        });
        delivered.unwrap_or(0)
    }

    /// Drops the waiting frames.
    pub(super) fn empty(&mut self, empty: &mut Vec<Frame>, counters: &PairCounters) {
        let pieces = self.received.drain(..).chain(self.waiting.drain(..));
        for piece in pieces {
            counters.to_guest_queue_stopped.add(u64::from(!piece.more));
            empty.push(piece.frame);
        }
    }
}

/// The inboxes of a port, and what is known of it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Inboxes {
    pub(super) index: InboxIndex,
    /// [`FdbPort::generation`](crate::fdb::FdbPort::generation) of the port.
    pub(super) generation: u16,
    /// The guest gets the frames of its VLAN without their tag.
    pub(super) untags: bool,
}

impl Inboxes {
    /// The inboxes of a port, at these indices.
    fn of(forwarding: &Forwarding, port: PortNumber, index: InboxIndex) -> Self {
        let known = forwarding.fdb.port(port);
        Self {
            index,
            generation: known.map_or(0, |port| port.generation),
            untags: !forwarding.is_tagged(port) && known.is_some_and(|port| port.vlans.untags()),
        }
    }
}

impl<N: Lent> UplinkLane<N> {
    /// Makes inboxes for the present lanes of the network; frames in inboxes of former lanes are lost.
    #[cold]
    pub(super) fn renew_inboxes(&mut self, queue: &mut NicQueue<N>, siblings: &mut dyn Siblings) {
        self.is_stale = false;
        self.choices.forget();
        let unfinished = match self.route {
            Some(Route::Inbox(at)) => self.inboxes.get(at).map(|inbox| inbox.guest.id),
            _ => None,
        };
        let networks: Vec<_> = self
            .networks()
            .map(|(number, its)| (number, Arc::clone(its)))
            .collect();
        let is_shared = self.sharing.is_some();
        self.inbox_of.clear();
        let mut at = 0;
        for (share, forwarding) in networks {
            let lanes = |(port, _)| forwarding.lanes(port).iter().map(move |&guest| (port, guest));
            let ports = forwarding
                .ports()
                .filter(|(port, _)| !is_shared || port.0 < SHARED_PORTS);
            for (known, guest) in ports.flat_map(lanes) {
                let port = PortNumber(share * SHARED_PORTS + known.0);
                if self.renew_inbox(at, (port, guest), queue, siblings) {
                    let its = self.inboxes_of(port);
                    *its = Inboxes::of(&forwarding, known, its.index.and(at));
                    at += 1;
                }
            }
        }
        self.drop_inboxes(at, self.inboxes.len(), queue);
        let filled = self
            .inboxes
            .iter()
            .enumerate()
            .filter(|(_, inbox)| inbox.len() > 0);
        self.filled = filled.map(|(at, _)| at).collect();
        self.waiting = self.inboxes.iter().map(Inbox::len).sum();
        self.go_on_with(queue, unfinished);
    }

    /// Makes the inbox at this index that of a lane; false: the lane takes no frames any more. Lanes keep their order, so
    /// inboxes before a known one are those of former lanes. A lane that is as it was is not asked: that would wake it.
    fn renew_inbox(
        &mut self,
        at: usize,
        (port, guest): (PortNumber, LaneRef),
        queue: &mut NicQueue<N>,
        siblings: &mut dyn Siblings,
    ) -> bool {
        let mut later = self.inboxes[at..].iter();
        let known = later.position(|inbox| inbox.guest.id == guest.id);
        self.drop_inboxes(at, at + known.unwrap_or(0), queue);
        if known.is_none() || self.inboxes[at].guest.changes != guest.changes {
            let Some(target) = siblings.guest(guest.at) else {
                return false;
            };
            if known.is_none() {
                let inbox = Inbox::new(port, guest, &target.vring, self.origin);
                self.inboxes.insert(at, inbox);
            }
            let inbox = &mut self.inboxes[at];
            inbox.limit.clone_from(&target.limit);
            inbox.is_filtered = target.filter.is_some();
        }
        let inbox = &mut self.inboxes[at];
        (inbox.port, inbox.guest) = (port, guest);
        true
    }

    /// Removes the inboxes of former lanes at these indices.
    fn drop_inboxes(&mut self, from: usize, to: usize, queue: &mut NicQueue<N>) {
        for mut inbox in self.inboxes.drain(from..to) {
            inbox.empty(&mut queue.empty, &self.counters);
        }
    }

    fn inboxes_of(&mut self, port: PortNumber) -> &mut Inboxes {
        let at = usize::from(port.0);
        if self.inbox_of.len() <= at {
            self.inbox_of.resize(at + 1, Inboxes::default());
        }
        &mut self.inbox_of[at]
    }

    /// Routes further pieces of the current frame to that lane's inbox, if there still is one; otherwise the frame is
    /// lost.
    fn go_on_with(&mut self, queue: &mut NicQueue<N>, lane: Option<LaneId>) {
        if !matches!(self.route, Some(Route::Inbox(_))) {
            return;
        }
        let at = self.inboxes.iter().position(|inbox| Some(inbox.guest.id) == lane);
        self.route = Some(at.map_or(Route::Dropped, Route::Inbox));
        if at.is_none() {
            self.tear(queue);
        }
    }
}
