//! What a queue pair is attached to: the other end of its frames.

use std::sync::Arc;
use std::time::Instant;

use common::binding::L2_BYTES;
use xsk::NumaNode;

use crate::config::Placement;
use crate::network::NetworkEnd;
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::interface_queue::InterfaceQueue;
use dataplane::lane::role::Role;

/// MTU of the null NIC and of a cable.
pub(crate) const NULL_MTU: u32 = 1500;

/// A port's end of a cable between two ports.
#[derive(Debug, Clone)]
pub(crate) struct PatchPort {
    /// Name of the cable.
    pub(crate) cable: Arc<str>,
    /// Which end: 0 or 1.
    pub(crate) end: usize,
}

/// A network and a queue, see [`Attachment::Member`].
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) end: NetworkEnd,
    pub(crate) queue: InterfaceQueue,
    /// The guest gets the frames of its VLAN without their tag.
    pub(crate) untags: bool,
    /// The configured placement (`--memory`).
    pub(crate) asked: Placement,
}

/// What a queue pair is attached to.
#[derive(Clone)]
pub(crate) enum Attachment {
    Queue(InterfaceQueue),
    /// An end of a cable to another port.
    Patch(PatchPort),
    /// A network.
    Network(NetworkEnd),
    /// A network, and a queue of its uplink's interface that is the pair's alone.
    Member(Member),
    /// A null NIC that makes frames of `frame_bytes`.
    Null {
        frame_bytes: u32,
    },
}

impl Attachment {
    /// The queue, if it is one of an interface.
    pub(crate) fn queue(&self) -> Option<&InterfaceQueue> {
        match self {
            Self::Queue(queue) | Self::Member(Member { queue, .. }) => Some(queue),
            Self::Patch(_) | Self::Network(_) | Self::Null { .. } => None,
        }
    }

    /// Its interface, if it has one.
    fn interface(&self) -> Option<&Interface> {
        self.queue().map(|queue| &*queue.interface)
    }

    /// The NUMA node of its NIC, if the machine has several nodes.
    pub(crate) fn node(&self) -> Option<NumaNode> {
        self.interface()?.link.node
    }

    /// Opens its queue, if it has one, and in tap mode the tap; waits for a busy queue until `deadline`.
    /// Errors: [`InterfaceError`].
    pub(crate) fn open_until(&self, deadline: Instant) -> Result<(), InterfaceError> {
        let Some(queue) = self.queue() else { return Ok(()) };
        if queue.interface.is_by_tap() {
            match queue.interface.open_tap() {
                // The steward got too many requests: the tap is requested again when there is a guest.
                Err(error) if error.is_refusal() && !error.is_lasting_refusal() => {}
                opened => _ = opened?,
            }
        }
        queue.open_until(deadline)
    }

    /// Whether frames may come from a stack on the same machine, which leaves checksums unfinished.
    pub(crate) fn partial_checksums(&self) -> bool {
        // For frames from a network's uplink, the uplink's lane decides that.
        self.interface()
            .is_some_and(|interface| interface.link.partial_checksums)
    }

    /// The role of a lane of a pair. `port`: the port's name.
    pub(crate) fn role(&self, port: &Arc<str>, pair: u16) -> Role {
        match self {
            Self::Patch(PatchPort { cable, end }) => Role::PatchPort {
                cable: Arc::clone(cable),
                end: *end,
                pair,
            },
            Self::Network(end) | Self::Member(Member { end, .. }) => end.role(pair),
            Self::Queue(_) | Self::Null { .. } => Role::Pair {
                port: Arc::clone(port),
                pair,
            },
        }
    }

    /// Longest frame that it carries, bytes.
    pub(crate) fn frame_limit(&self) -> u32 {
        match self {
            Self::Queue(queue) | Self::Member(Member { queue, .. }) => queue.interface.frame_limit(),
            Self::Network(end) => end.network.link().mtu.saturating_add(L2_BYTES),
            Self::Patch(_) | Self::Null { .. } => NULL_MTU + L2_BYTES,
        }
    }
}
