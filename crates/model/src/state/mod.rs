//! The state of a daemon: one tree for `status`, `workers`, `queues`, the lists of ports and networks, the API and
//! metrics. The daemon fills it when a client asks ([`Status`]); nothing in it is computed for each frame.

pub mod documents;
mod lane;
mod network;
mod rules;
mod traffic;
mod work;
mod workers;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::lane::{HintsStatus, LaneStatus, Named};
pub use self::network::{BridgeStatus, HostStatus, NetworkStatus, UnderlayStatus};
pub use self::rules::{DirectionStatus, RulesStatus};
pub use self::traffic::Traffic;
pub use self::work::{
    BATCH_SIZES, CacheReading, CallsReading, KERNEL_CALLS, LaneName, LaneReading, Reading, WorkerReading,
};
pub use self::workers::{
    Batches, Frames, Iterations, Kernel, LaneShare, Share, Size, Times, WorkerDocument, WorkersDocument,
};
use crate::config::{Placement, Policy, Port};
use crate::rates::PortRates;

/// The whole daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// Process ID.
    pub pid: u32,
    /// Version of the daemon.
    pub version: String,
    /// CPU time of all threads so far, microseconds.
    pub cpu_us: u64,
    /// What confines the process.
    pub sandbox: Sandbox,
    /// The configuration file of its ports; none without one.
    pub configuration: Option<Configuration>,
    /// Socket of its HTTP API, if it has one.
    #[serde(default)]
    pub api: Option<PathBuf>,
    /// Its workers, by number.
    pub workers: Vec<WorkerStatus>,
    /// Statistics of the workers, by number.
    #[serde(default)]
    pub work: Vec<WorkerReading>,
    /// CPU cycles (of the time stamp counter) in a microsecond; none if unknown.
    #[serde(default)]
    pub cycles_per_us: Option<f64>,
    /// Its networks.
    pub networks: Vec<NetworkStatus>,
    /// Its ports.
    pub ports: Vec<PortStatus>,
}

impl Status {
    /// How long the daemon has run, on its own clock.
    #[must_use]
    pub fn age(&self) -> Duration {
        Duration::from_nanos(
            self.work
                .iter()
                .map(|worker| worker.total.age_ns)
                .max()
                .unwrap_or(0),
        )
    }
}

/// One port.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct PortStatus {
    /// Its name in the configuration file; without a file the path of its socket.
    pub name: String,
    /// Socket.
    pub endpoint: String,
    /// Network that the port is part of.
    pub network: Option<String>,
    /// Interface, `cable NAME`, `network NAME` or `null`.
    pub nic: String,
    /// How the steering program is attached: `native` or `skb`; none without an interface, or a program on it.
    pub attached: Option<String>,
    /// How frames are steered to its queues: `queue` (all that the NIC puts there), `program` (of these, the frames of
    /// `macs` and `vlans`), `n-tuple rules` or `n-tuple rules, RSS context` (the NIC also steers these to the queues);
    /// none without an interface.
    pub steered: Option<String>,
    /// Why the NIC does not steer more precisely, or why steering is impaired, as the steward reports it.
    pub steering_note: Option<String>,
    /// What is known of the interface's driver; none without an interface.
    pub driver: Option<String>,
    /// NUMA node of the interface; none where there is one only, or that is not known.
    pub node: Option<u16>,
    /// Of the frames that arrive at its own queues, the guest receives those to these addresses; empty: all.
    pub macs: Vec<String>,
    /// Of these frames, the guest receives those of these VLANs; empty: all.
    pub vlans: Vec<u16>,
    /// What decides which frames the guest may send and receive, besides `macs` and `vlans`.
    #[serde(flatten)]
    pub rules: Policy,
    /// Where frames are stored.
    #[schemars(with = "Placement")]
    pub memory: String,
    /// MAC address that the guest is offered.
    pub mac: String,
    /// Further addresses, which were learned.
    #[serde(default)]
    pub learned: Vec<LearnedStation>,
    /// MTU that the guest is offered, bytes.
    pub mtu: u16,
    /// A VMM is connected.
    pub connected: bool,
    /// Process ID of the VMM.
    pub peer: Option<i32>,
    /// Virtio features that the guest acknowledged.
    pub features: String,
    /// Offloads that are offered, by name.
    pub offload_offered: Vec<String>,
    /// Those of the offered ones that the guest accepted.
    pub offload: Vec<String>,
    /// Connections so far.
    pub sessions: u64,
    /// Why no frames move although they should.
    pub impaired: Option<String>,
    /// The operation that keeps the port busy, and for how long; all fields but the counters are older.
    pub busy: Option<String>,
    /// A VMM that connected while another one was connected, and was rejected.
    pub turned_away: Option<String>,
    /// How much the guest may send and receive.
    pub limits: PortRates,
    /// How the last session ended; null before one ended.
    pub last_closed: Option<Closed>,
    /// Where its configuration is from; null without a file.
    #[serde(default)]
    pub source: Option<Source>,
    /// Its configuration; null without a file.
    #[serde(default)]
    #[schemars(with = "Option<Port>")]
    pub configuration: Option<Map<String, Value>>,
    /// Its queue pairs.
    pub lanes: Vec<LaneStatus>,
}

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Closed {
    /// Stable name of the reason.
    pub reason: String,
    /// A sentence.
    pub detail: String,
}

/// One worker thread.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct WorkerStatus {
    /// Rounds that moved frames.
    pub busy_rounds: u64,
    /// Rounds that did not.
    pub idle_rounds: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Nanoseconds in rounds that moved frames.
    pub busy_ns: u64,
    /// Nanoseconds in rounds that did not, and falling asleep.
    pub idle_ns: u64,
    /// Nanoseconds asleep, until now.
    pub asleep_ns: u64,
    /// Set while the worker hangs: for how long, and in which port; on a cable it may be either of the two ports.
    pub hangs: Option<String>,
    /// NUMA node that it runs on, where there are several.
    pub node: Option<u16>,
}

/// A learned address of a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LearnedStation {
    /// The MAC address.
    pub mac: String,
    /// Its VLAN; 0: none.
    pub vlan: u16,
}

impl fmt::Display for LearnedStation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vlan {
            0 => f.write_str(&self.mac),
            vlan => write!(f, "{} (VLAN {vlan})", self.mac),
        }
    }
}

/// What confines the process, each in words.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Sandbox {
    /// User and group of the process, in numbers.
    pub user: String,
    /// `empty`, or the visible directories, or what confines them, or why all are visible.
    pub mounts: String,
    /// `empty`, or what confines network access, or why nothing does.
    pub network: String,
    /// `none`, or those that are left.
    pub capabilities: String,
    /// What landlock does.
    pub files: String,
    /// What seccomp does.
    pub calls: String,
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "user {}, mounts {}, network {}, capabilities {}, files {}, system calls {}",
            self.user, self.mounts, self.network, self.capabilities, self.files, self.calls
        )
    }
}

/// The configuration file.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Configuration {
    /// The file.
    pub path: PathBuf,
    /// When the daemon read the contents that are in force, seconds since 1970.
    pub read_at: u64,
    /// Errors when the daemon last read the file or applied it.
    pub failed: Vec<String>,
}

/// Where the configuration of a port or network is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum Source {
    /// The configuration file.
    File,
    /// A client of the API or of the control socket.
    Api,
}
