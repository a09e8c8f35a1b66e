//! Frames for ports of another worker: they wait in the inbox of the link to it, each with its mark.
//!
//! All ports of a worker share one inbox, first in, first out; no port has so many frames that others' cannot use the
//! link. A merged run of frames has the mark of its first frame, which applies to all of them, since they belong to one
//! flow. But a program may mark each frame differently, so frames with another flow mark wait for the next batch.

use std::collections::VecDeque;

use acl::FlowHints;
use xsk::RxDesc;
use xsk::metadata::Hints;

use super::UplinkLane;
use super::inbox_index::Route;
use crate::backend::arrivals::Extras;
use crate::fdb::PortMark;
use crate::guest::to_guest::Delivery;
use crate::lane::Siblings;
use crate::lane::limits::BATCH;
use crate::link::cross_worker_mark::CrossWorkerMark;
use crate::nic::lent::Lent;

/// Marks of the frames of an inbox.
pub(super) struct LinkMarks {
    /// Those of waiting frames, in order.
    waiting: VecDeque<CrossWorkerMark>,
    /// Those of the frames in the batch of [`Arrivals`](crate::backend::arrivals::Arrivals), by number.
    in_hand: Vec<CrossWorkerMark>,
}

impl Default for LinkMarks {
    fn default() -> Self {
        Self {
            waiting: VecDeque::with_capacity(BATCH),
            in_hand: Vec::with_capacity(BATCH),
        }
    }
}

impl LinkMarks {
    /// Drops all marks: the inbox is emptied.
    pub(super) fn empty(&mut self) {
        self.waiting.clear();
        self.in_hand.clear();
    }
}

impl Extras for LinkMarks {
    fn may_merge(&self) -> bool {
        match (self.in_hand.first(), self.waiting.front()) {
            (Some(first), Some(next)) => first.flow.mark() == next.flow.mark(),
            _ => true,
        }
    }

    fn push(&mut self, is_one: bool) {
        let mark = self.waiting.pop_front();
        self.in_hand
            .extend(is_one.then(|| mark.unwrap_or(CrossWorkerMark::EMPTY)));
    }

    fn apply(&self, number: usize, delivery: &mut Delivery<'_>) {
        delivery.about(|| {
            self.in_hand
                .get(number)
                .copied()
                .unwrap_or(CrossWorkerMark::EMPTY)
        });
    }

    fn clear(&mut self) {
        self.in_hand.clear();
    }
}

impl<N: Lent> UplinkLane<N> {
    /// Puts a piece into the inbox of a link; returns the route of further pieces of its frame.
    pub(super) fn sort_to_link(
        &mut self,
        at: usize,
        piece: RxDesc,
        hints: &Hints,
        siblings: &mut dyn Siblings,
    ) -> Route {
        if self.route.is_none() {
            if self.waiting_with(at) >= self.room() {
                return self.lose(at, piece, siblings);
            }
            self.mark = self.mark_of(hints);
        }
        let (route, more) = (Route::Link(at), piece.more);
        self.put(piece, route);
        if let Some(marks) = &mut self.inboxes[at].link_marks
            && !more
        {
            marks.waiting.push_back(self.mark);
        }
        route
    }

    /// The mark of the current frame, whose port was found.
    fn mark_of(&self, hints: &Hints) -> CrossWorkerMark {
        let flow = FlowHints::of(hints);
        let to = self.found.and_then(|port| {
            let its = self.inbox_of.get(usize::from(port.0))?;
            Some(PortMark::new(port, its.generation))
        });
        to.map_or(CrossWorkerMark::EMPTY.with(flow), |to| {
            CrossWorkerMark::of_arrival(to, flow)
        })
    }
}
