//! Which NIC queues outlive the lanes that they are lent to.

use device::counters::PairCounters;

use super::endpoint::NicQueue;
use super::null::NullNic;
use super::queue::Nic;
use super::xdp::XdpNic;
use crate::lane::shared::Shared;

/// A kind of NIC queue that lanes borrow.
pub trait Lent: Nic + Sized {
    /// Takes the queue of a stopped lane; returns it if it outlives the lane. Otherwise counts its frames as lost.
    fn give_back(queue: NicQueue<Self>, counters: &PairCounters) -> Option<NicQueue<XdpNic>>;
    /// The queue, if it is an AF_XDP socket's: only such a queue can be an uplink, which sends for several guests.
    fn uplink(_queue: &Shared<NicQueue<Self>>) -> Option<&Shared<NicQueue<XdpNic>>> {
        None
    }
}

impl Lent for XdpNic {
    fn give_back(queue: NicQueue<Self>, _counters: &PairCounters) -> Option<NicQueue<Self>> {
        Some(queue)
    }

    fn uplink(queue: &Shared<NicQueue<Self>>) -> Option<&Shared<NicQueue<Self>>> {
        Some(queue)
    }
}

impl Lent for NullNic {
    fn give_back(mut queue: NicQueue<Self>, counters: &PairCounters) -> Option<NicQueue<XdpNic>> {
        queue.discard(counters);
        None
    }
}
