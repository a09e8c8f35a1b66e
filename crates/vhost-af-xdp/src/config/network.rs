//! A network, as it was asked for.

use steer::{Filter, ModeRequest};
use steward::protocol::Wanted;
use xsk::{BindRequest, BusyPoll};

use super::Segments;
use super::hints::HintsConfig;
use super::port::{asks_for_xdp, mode_where};

/// Ports that reach each other by address, and what they share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetworkConfig {
    pub(crate) name: String,
    /// None: guests among themselves.
    pub(crate) uplink: Option<UplinkConfig>,
}

/// Queues of an interface that a network has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UplinkConfig {
    /// The interface.
    pub(crate) name: String,
    pub(crate) start_queue: u32,
    /// How many.
    pub(crate) queues: u32,
    /// How to attach the steering program.
    pub(crate) mode: ModeRequest,
    /// Zero-copy or copy, where the user says.
    pub(crate) bind: BindRequest,
    /// Packet memory of each queue, bytes.
    pub(crate) packet_bytes: u32,
    /// How segments leave.
    pub(crate) segments: Segments,
    /// Whether system calls poll the driver.
    pub(crate) busy_poll: Option<BusyPoll>,
    /// What the NIC is to tell of frames.
    pub(crate) hints: HintsConfig,
    /// The network reaches the host, too.
    pub(crate) host: bool,
}

impl UplinkConfig {
    /// What is to be leased.
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
