//! Networks.

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::port::Polling;
use super::table::table;
use super::values::{Mode, Segments, Size, Words};

/// A network: ports that reach each other by address, and the uplink that they share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema, Args)]
pub struct Network {
    /// Queues of the uplink.
    #[serde(flatten)]
    #[command(flatten)]
    pub uplink: Uplink,
    /// Busy polling.
    #[serde(flatten)]
    #[command(flatten)]
    pub polling: Polling,
}

table!(Network { uplink, polling });

/// Queues of an interface that the ports of a network share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Uplink {
    /// Network interface that all ports of the network share [default: none, they reach each other only]
    #[arg(long, value_name = "IFNAME")]
    pub uplink: Option<String>,
    /// First queue of the interface [default: 0]
    #[arg(long, value_name = "M")]
    pub start_queue: Option<u32>,
    /// Queues of the uplink. Set it to all that receive frames (`ethtool -l`), or guests lose frames [default: 1]
    #[arg(long, value_name = "N")]
    pub queues: Option<u32>,
    /// How frames come from and go to the interface [default: auto]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Never use the driver's zero-copy mode
    #[arg(long)]
    pub force_copy: bool,
    /// Use the driver's zero-copy mode, whatever is known of the driver, or fail
    #[arg(long, conflicts_with = "force_copy")]
    pub force_zero_copy: bool,
    /// How segments of guests' GSO packets leave [default: auto]
    #[arg(long, value_enum)]
    pub segments: Option<Segments>,
    /// Memory of the daemon for the frames of each queue, from 512KiB to 6MiB [default: 6MiB]
    #[arg(long, value_name = "SIZE")]
    pub packet_memory: Option<Size>,
    /// Hints of the NIC that come with frames: some of hash, vlan, timestamp, mark; none; or auto [default: auto]
    #[arg(long, value_name = "LIST")]
    #[schemars(extend("x-live" = true))]
    pub hints: Option<Words>,
    /// Let the network reach the host over the uplink's own addresses [default: true]
    #[arg(long, value_name = "BOOL")]
    pub host: Option<bool>,
}
