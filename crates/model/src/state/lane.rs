//! One queue pair of a port, or one queue of an uplink.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A counter.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Counter")]
pub struct Named {
    /// Its name.
    pub name: String,
    /// Who counts: `lane` (the daemon), `socket` (XDP_STATISTICS), or `program` (the steering program).
    #[schemars(extend("enum" = ["lane", "socket", "program"]))]
    pub source: String,
    /// It counts lost frames.
    pub drop: bool,
    /// The count since the lane, socket or program started.
    pub value: u64,
}

/// One queue pair.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct LaneStatus {
    /// Number of the queue pair, from 0.
    pub pair: usize,
    /// NIC queue; none without an interface.
    pub queue: Option<u32>,
    /// A guest uses it.
    pub running: bool,
    /// The data path in use: `zero-copy`, `copy (native)`, `copy (skb)`, `cable`, `network`, `tap`, `null`.
    pub mode: Option<String>,
    /// Why faster data paths are not in use, in the order tried.
    pub fallbacks: Vec<String>,
    /// Frames may span several descriptors.
    pub multi_buffer: bool,
    /// Who completes checksums that the guest left out: `daemon`, `kernel (TX metadata)`, `NIC (TX metadata)`.
    pub checksums: Option<String>,
    /// Packet memory in the daemon, bytes.
    pub packet_bytes: u64,
    /// Kernel memory for it, bytes (estimated).
    pub kernel_bytes: u64,
    /// Number of sockets that share its UMEM (`--shared-umem`); none: the UMEM is its own.
    pub umem_sockets: Option<usize>,
    /// `hugetlb`, `transparent huge pages`, `4 KiB pages`, or `guest memory`.
    pub backing: Option<String>,
    /// NUMA node that most of the packet memory is on; none where there is one only, or that is not known.
    pub node: Option<u16>,
    /// Hints of the NIC before its frames; none without an interface, or if none are known or requested.
    #[serde(default)]
    pub hints: Option<HintsStatus>,
    /// All counters; the API shows them at /v1/counters.
    #[schemars(skip)]
    pub counters: Vec<Named>,
}

/// Hints of an interface, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HintsStatus {
    /// As configured: `auto`, `none`, or names.
    pub asked: String,
    /// What kernel and driver can provide, in the mode in which the program is attached.
    pub possible: Vec<String>,
    /// Hints that the program writes before frames of these queues.
    pub on: Vec<String>,
    /// Hints that were found before frames so far.
    pub seen: Vec<String>,
    /// Why a hint that is configured by name is not on.
    pub why: Option<String>,
}
