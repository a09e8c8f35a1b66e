//! Networks.

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::port::{Attachment, Polling};
use super::table::options;
use super::values::Size;

options! {
    /// A network: ports that reach each other by address, and the uplink that they share.
    Network {
        /// Queues of the uplink.
        uplink: Uplink,
        /// How queues of the uplink are used.
        attachment: Attachment,
        /// Busy polling.
        polling: Polling,
    }
}

/// Queues of an interface that the ports of a network share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Uplink {
    /// Network interface that all ports of the network share [default: none, they reach each other only]
    #[arg(long, value_name = "IFNAME")]
    pub uplink: Option<String>,
    /// Number of uplink queues. Set it to all that receive frames (`ethtool -l`), or guests lose frames [default: 1]
    #[arg(long, value_name = "N")]
    pub queues: Option<u32>,
    /// Memory of the daemon for the frames of each queue, from 512KiB to 6MiB [default: 6MiB]
    #[arg(long, value_name = "SIZE")]
    pub packet_memory: Option<Size>,
    /// Allow guests and host to reach each other over the uplink [default: true]
    #[arg(long, value_name = "BOOL")]
    pub host: Option<bool>,
    /// Interface that carries the packets of the uplink, a vxlan or geneve device. The daemon encapsulates and
    /// decapsulates most frames there by AF_XDP, the kernel the others; docs/overlay.md [default: none, the kernel does
    /// all]
    #[arg(long, value_name = "IFNAME", requires = "uplink")]
    pub underlay: Option<String>,
    /// Number of queues of the underlay. Use all that receive frames (`ethtool -l`): the kernel decapsulates what arrives
    /// at others [default: 1]
    #[arg(long, value_name = "N", requires = "underlay")]
    pub underlay_queues: Option<u32>,
    /// First queue of the underlay [default: 0]
    #[arg(long, value_name = "M", requires = "underlay")]
    pub underlay_start_queue: Option<u32>,
    /// Drop packets of the uplink, a vxlan device, that arrive at queues of the underlay from senders which the device does
    /// not send to; without effect on a geneve device; docs/overlay.md [default: false, the kernel takes them]
    #[arg(long, requires = "underlay")]
    pub drop_unknown_senders: bool,
}
