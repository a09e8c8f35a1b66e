//! What a queue pair's frames go to.

use std::sync::Arc;

use xsk::NumaNode;

use crate::nic::binding::L2_BYTES;
use crate::nic::interface_queue::InterfaceQueue;

/// MTU of the null NIC and of a cable.
pub(crate) const NULL_MTU: u32 = 1500;

/// One end of a cable between two ports, as a port has it.
#[derive(Debug, Clone)]
pub(crate) struct CableEnd {
    /// Its name.
    pub(crate) cable: Arc<str>,
    /// Which end: 0 or 1.
    pub(crate) end: usize,
}

/// The far side of a queue pair.
#[derive(Clone)]
pub(crate) enum FarSide {
    Queue(InterfaceQueue),
    /// An end of a cable to another port.
    Cable,
    /// A null NIC that makes frames of so many bytes.
    Null {
        frame_bytes: u32,
    },
}

impl FarSide {
    /// The queue, if it is one of an interface.
    pub(crate) fn queue(&self) -> Option<&InterfaceQueue> {
        match self {
            Self::Queue(queue) => Some(queue),
            Self::Cable | Self::Null { .. } => None,
        }
    }

    /// The NUMA node of its NIC, where there are several.
    pub(crate) fn node(&self) -> Option<NumaNode> {
        self.queue()?.interface.link.node
    }

    /// Whether frames may come from a stack on the same machine, which leaves checksums unfinished.
    pub(crate) fn partial_checksums(&self) -> bool {
        self.queue()
            .is_some_and(|queue| queue.interface.link.partial_checksums)
    }

    /// Longest frame there is, bytes.
    pub(crate) fn frame_limit(&self) -> u32 {
        self.queue()
            .map_or(NULL_MTU + L2_BYTES, |queue| queue.interface.frame_limit())
    }
}
