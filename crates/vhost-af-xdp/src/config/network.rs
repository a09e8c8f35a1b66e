//! The configuration of a network.

use steer::{Filter, ModeRequest};
use steward_protocol::Wanted;
use xsk::{BindRequest, BusyPoll};

use super::Segments;
use super::hints::HintsConfig;
use super::port::{asks_for_xdp, mode_where};

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
    /// The interface.
    pub(crate) name: String,
    pub(crate) start_queue: u32,
    /// Number of queues.
    pub(crate) queues: u32,
    /// How to attach the steering program.
    pub(crate) mode: ModeRequest,
    /// Zero-copy or copy, if configured.
    pub(crate) bind: BindRequest,
    /// Packet memory of each queue, bytes.
    pub(crate) packet_bytes: u32,
    /// How segments are sent.
    pub(crate) segments: Segments,
    /// Busy polling, if configured.
    pub(crate) busy_poll: Option<BusyPoll>,
    /// Hints of the NIC for received frames.
    pub(crate) hints: HintsConfig,
    /// The network reaches the host's own stack, too.
    pub(crate) host: bool,
}

impl UplinkConfig {
    /// The queues to lease.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted {
            interface: self.name.clone(),
            start_queue: self.start_queue,
            queues: self.queues,
            mode: mode_where(asks_for_xdp(self.bind, self.hints, self.busy_poll), self.mode),
            filter: Filter::default(),
            network: true,
        }
    }
}
