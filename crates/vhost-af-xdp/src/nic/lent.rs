//! Which NIC queues outlive the lanes that they are lent to.

use device::counters::PairCounters;

use super::endpoint::NicQueue;
use super::null::NullNic;
use super::queue::Nic;
use super::xdp::XdpNic;

/// A kind of NIC queue that lanes borrow.
pub(crate) trait Lent: Nic + Sized {
    /// A lane is stopped; its queue, if that goes on without it. Frames of one that does not are counted as lost.
    fn give_back(queue: NicQueue<Self>, counters: &PairCounters) -> Option<NicQueue<XdpNic>>;
    /// As what frames of several guests are sent by, if it is that.
    fn uplink(_queue: &mut NicQueue<Self>) -> Option<&mut NicQueue<XdpNic>> {
        None
    }
}

impl Lent for XdpNic {
    fn give_back(queue: NicQueue<Self>, _counters: &PairCounters) -> Option<NicQueue<Self>> {
        Some(queue)
    }

    fn uplink(queue: &mut NicQueue<Self>) -> Option<&mut NicQueue<Self>> {
        Some(queue)
    }
}

impl Lent for NullNic {
    fn give_back(mut queue: NicQueue<Self>, counters: &PairCounters) -> Option<NicQueue<XdpNic>> {
        queue.discard(counters);
        None
    }
}
