//! The configuration of a network.

use steer::Filter;
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
}

impl UplinkConfig {
    /// The queues to lease.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted {
            interface: self.at.name.clone(),
            start_queue: self.at.start_queue,
            queues: self.queues,
            mode: self.options.mode(false, self.at.mode),
            filter: Filter::default(),
            network: true,
        }
    }
}
