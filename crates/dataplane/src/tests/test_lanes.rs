//! Lanes of guests for tests.

#[cfg(test)]
use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::counters::PairCounters;
#[cfg(test)]
use device::pair::Direction;
use device::pair::QueuePair;

use crate::backend::own_queue::CopyQueue;
use crate::backend::receiver::Receiver;
use crate::direct::{DirectMemory, DirectQueue};
#[cfg(test)]
use crate::fdb::PortNumber;
#[cfg(test)]
use crate::lane::Lane;
use crate::nic::coupled::Coupled;
use crate::nic::endpoint::NicQueue;
use crate::nic::lent::Lent;
use crate::nic::queue::Nic;
use crate::port_lane::PortLane;

/// A guest outside of networks, with this queue in copy placement.
pub(crate) fn copy_lane<N: Lent>(
    pair: QueuePair,
    queue: NicQueue<N>,
    counters: Arc<PairCounters>,
) -> PortLane<CopyQueue<N>> {
    let own = CopyQueue::new(&pair.to_guest, queue, false, &counters);
    PortLane::alone(pair, counters, own)
}

/// The same in send-direct placement.
pub(crate) fn send_direct_lane<N: Nic>(
    mut pair: QueuePair,
    queue: Coupled<N>,
    memory: DirectMemory,
    counters: Arc<PairCounters>,
) -> PortLane<DirectQueue<N, Receiver>> {
    let own = DirectQueue::send_only(&mut pair, queue, memory, (false, &counters));
    PortLane::alone(pair, counters, own)
}

/// A guest of a network's port, or outside of networks, in copy placement. Its port, and whether its tags are taken off.
#[cfg(test)]
pub(crate) fn copy_lane_of<N: Lent + 'static>(
    pair: QueuePair,
    queue: NicQueue<N>,
    counters: Arc<PairCounters>,
    port: Option<((PortNumber, u16), bool)>,
) -> Box<dyn Lane> {
    let Some((port, untags)) = port else {
        return Box::new(copy_lane(pair, queue, counters));
    };
    let own = CopyQueue::new(&pair.to_guest, queue, untags, &counters);
    Box::new(PortLane::with_queue(pair, counters, port, own))
}

/// The same in send-direct placement.
#[cfg(test)]
pub(crate) fn send_direct_lane_of<N: Nic + 'static>(
    mut pair: QueuePair,
    (queue, memory): (Coupled<N>, DirectMemory),
    counters: Arc<PairCounters>,
    port: Option<((PortNumber, u16), bool)>,
) -> Box<dyn Lane> {
    let Some((port, untags)) = port else {
        return Box::new(send_direct_lane(pair, queue, memory, counters));
    };
    let own = DirectQueue::send_only(&mut pair, queue, memory, (untags, &counters));
    Box::new(PortLane::with_queue(pair, counters, port, own))
}

/// The same in direct placement.
pub(crate) fn direct_lane<N: Nic>(
    mut pair: QueuePair,
    queue: Coupled<N>,
    memory: DirectMemory,
    counters: Arc<PairCounters>,
) -> PortLane<DirectQueue<N>> {
    let own = DirectQueue::new(&mut pair, queue, memory, &counters);
    PortLane::alone(pair, counters, own)
}

/// Switches a queue of a guest on or off.
#[cfg(test)]
pub(crate) fn switch(lane: &mut dyn Lane, direction: Direction, is_on: bool) {
    lane.change_vrings(&mut |of, vring| {
        if of == direction {
            vring.enabled = is_on;
        }
    });
}

/// The kick eventfds of a guest: of the transmit queue, and of the receive queue.
#[cfg(test)]
pub(crate) fn kicks(lane: &dyn Lane) -> Vec<OwnedFd> {
    let mut kicks = Vec::new();
    lane.kicks(&mut |kick| kicks.push(kick.try_clone_to_owned().expect("descriptors")));
    kicks
}
