//! Networks.

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::port::{Attachment, Polling};
use super::table::table;
use super::values::Size;

/// A network: ports that reach each other by address, and the uplink that they share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema, Args)]
pub struct Network {
    /// Queues of the uplink.
    #[serde(flatten)]
    #[command(flatten)]
    pub uplink: Uplink,
    /// How queues of the uplink are used.
    #[serde(flatten)]
    #[command(flatten)]
    pub attachment: Attachment,
    /// Busy polling.
    #[serde(flatten)]
    #[command(flatten)]
    pub polling: Polling,
}

table!(Network {
    uplink,
    attachment,
    polling
});

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
}
