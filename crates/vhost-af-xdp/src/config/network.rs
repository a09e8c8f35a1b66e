//! The configuration of a network.

use steer::{Filter, ModeRequest};
use steward_protocol::Wanted;

use super::port::{InterfaceQueues, QueueOptions};

/// Ports that reach each other by address, and their shared uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetworkConfig {
    pub(crate) name: String,
    /// `None`: only the guests reach each other.
    pub(crate) uplink: Option<UplinkConfig>,
}

/// Queues of an interface for a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UplinkConfig {
    pub(crate) at: InterfaceQueues,
    /// Number of queues.
    pub(crate) queues: u32,
    /// How they are used. Guests share them, so frames are copied.
    pub(crate) options: QueueOptions,
    /// The network reaches the host's own stack, too.
    pub(crate) host: bool,
    /// Queues of the interface that carries the uplink's packets; `None`: the kernel encapsulates.
    pub(crate) underlay: Option<UnderlayConfig>,
}

/// Queues of an interface for packets of the tunnel device that is a network's uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnderlayConfig {
    pub(crate) at: InterfaceQueues,
    /// Number of queues.
    pub(crate) queues: u32,
    /// How they are used.
    pub(crate) options: QueueOptions,
    /// Packets for the device from senders that its forwarding database does not list are dropped.
    pub(crate) drops_unknown: bool,
}

impl UnderlayConfig {
    /// The queues to lease.
    pub(crate) fn wanted(&self) -> Wanted {
        wanted(&self.at, self.queues, self.at.mode)
    }
}

impl UplinkConfig {
    /// The queues to lease.
    pub(crate) fn wanted(&self) -> Wanted {
        wanted(&self.at, self.queues, self.options.mode(false, self.at.mode))
    }

    /// How the queues are used whose frames have hints of the NIC: those of the underlay, if there is one.
    pub(crate) fn options_with_hints(&mut self) -> &mut QueueOptions {
        match &mut self.underlay {
            Some(underlay) => &mut underlay.options,
            None => &mut self.options,
        }
    }

    /// The queues to lease in all: also those of the underlay.
    pub(crate) fn all_wanted(&self) -> impl Iterator<Item = Wanted> {
        let underlay = self.underlay.iter().map(UnderlayConfig::wanted);
        std::iter::once(self.wanted()).chain(underlay)
    }
}

fn wanted(at: &InterfaceQueues, queues: u32, mode: ModeRequest) -> Wanted {
    Wanted {
        interface: at.name.clone(),
        start_queue: at.start_queue,
        queues,
        mode,
        filter: Filter::default(),
        network: true,
    }
}
