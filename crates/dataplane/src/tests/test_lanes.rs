//! Lanes of guests for tests.

use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::QueuePair;

use crate::backend::own_queue::CopyQueue;
use crate::direct::send_direct::SendDirectQueue;
use crate::direct::{DirectMemory, DirectQueue};
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
    let own = CopyQueue::new(&pair, queue, false, &counters);
    PortLane::alone(pair, counters, own)
}

/// The same in send-direct placement.
pub(crate) fn send_direct_lane<N: Nic>(
    mut pair: QueuePair,
    queue: Coupled<N>,
    memory: DirectMemory,
    counters: Arc<PairCounters>,
) -> PortLane<SendDirectQueue<N>> {
    let own = SendDirectQueue::new(&mut pair, queue, memory, (false, &counters));
    PortLane::alone(pair, counters, own)
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
