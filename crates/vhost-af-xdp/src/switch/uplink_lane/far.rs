//! Frames for ports of another worker: in the inbox of the link there, each with its note.
//!
//! All ports of a worker have one inbox: what came first goes first, and nobody's frames are many enough to keep
//! others' away from the link. A run of frames that is given as one has the first one's note. That is everybody's, as
//! they are of one flow; but a program may mark each frame as it likes, so frames with another mark wait for the next
//! batch.

use std::collections::VecDeque;

use acl::FlowHints;
use xsk::RxDesc;
use xsk::metadata::Hints;

use super::UplinkLane;
use super::place::Route;
use crate::nic::lent::Lent;
use crate::switch::arrivals::Beside;
use crate::switch::lane::Network;
use crate::switch::limits::BATCH;
use crate::switch::link_note::LinkNote;
use crate::switch::table::PortNote;
use crate::switch::to_guest::Delivery;

/// Notes of the frames of an inbox.
pub(super) struct FarNotes {
    /// Of those that wait, in their order.
    waiting: VecDeque<LinkNote>,
    /// Of those that the arrivals have in hand, by their numbers there.
    in_hand: Vec<LinkNote>,
}

impl Default for FarNotes {
    fn default() -> Self {
        Self {
            waiting: VecDeque::with_capacity(BATCH),
            in_hand: Vec::with_capacity(BATCH),
        }
    }
}

impl FarNotes {
    /// The inbox is emptied.
    pub(super) fn empty(&mut self) {
        self.waiting.clear();
        self.in_hand.clear();
    }
}

impl Beside for FarNotes {
    fn may_join(&self) -> bool {
        match (self.in_hand.first(), self.waiting.front()) {
            (Some(first), Some(next)) => first.flow.mark() == next.flow.mark(),
            _ => true,
        }
    }

    fn join(&mut self, is_one: bool) {
        let note = self.waiting.pop_front();
        self.in_hand
            .extend(is_one.then(|| note.unwrap_or(LinkNote::NOTHING)));
    }

    fn tell(&self, number: usize, delivery: &mut Delivery<'_>) {
        delivery.about(|| self.in_hand.get(number).copied().unwrap_or(LinkNote::NOTHING));
    }

    fn clear(&mut self) {
        self.in_hand.clear();
    }
}

impl<N: Lent> UplinkLane<N> {
    /// Takes a piece in that goes to the inbox of a link; where further ones of its frame go.
    pub(super) fn sort_far(
        &mut self,
        at: usize,
        piece: RxDesc,
        hints: &Hints,
        network: &mut dyn Network,
    ) -> Route {
        if self.route.is_none() {
            if self.waiting_with(at) >= self.room() {
                return self.lose(at, piece, network);
            }
            self.note = self.note_of(hints);
        }
        let (route, more) = (Route::Far(at), piece.more);
        self.put(piece, route);
        if let Some(far) = &mut self.inboxes[at].far
            && !more
        {
            far.waiting.push_back(self.note);
        }
        route
    }

    /// What is known of the frame in hand, whose port was found.
    fn note_of(&self, hints: &Hints) -> LinkNote {
        let flow = FlowHints::of(hints);
        let to = self.found.and_then(|port| {
            let its = self.inbox_of.get(usize::from(port.0))?;
            Some(PortNote::new(port, its.life))
        });
        to.map_or(LinkNote::NOTHING.with(flow), |to| LinkNote::of_arrival(to, flow))
    }
}
