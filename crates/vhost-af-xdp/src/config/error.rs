//! Errors of options that exclude each other or are out of range.

use std::path::PathBuf;

use device::offloads::Offloads;
use steer::HintSet;
use steward::protocol::{ENTRIES_MAX, STATIONS_MAX};

use super::port::Endpoint;
use super::{MOST_BYTES, MOST_QUEUES, Placement};

/// Options that exclude each other, or a value that is out of range.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("--queues {0}: a port has 1 to {MOST_QUEUES} queue pairs")]
    Queues(u16),
    #[error("--queues {0}: an uplink has 1 to {MOST_QUEUES} queues")]
    UplinkQueues(u32),
    #[error(
        "queue {queue} of {name} is asked for by {other}, too: give them disjoint ranges with start-queue"
    )]
    SharedQueue {
        name: String,
        queue: u32,
        /// `port vm1`, or `network lan`.
        other: String,
    },
    #[error("{0} is asked for by two ports: each needs a socket of its own")]
    SharedEndpoint(Endpoint),
    #[error(
        "socket-path = {0:?}: the daemon itself uses this path (control, api, steward or a file): choose another"
    )]
    OwnPath(PathBuf),
    #[error("interface {0} is asked for with different modes: a program is attached once, choose one mode")]
    TwoModes(String),
    #[error("socket path {0:?} is {len} bytes long: a Unix socket path has at most 107: choose a shorter \
             one", len = .0.as_os_str().len())]
    LongPath(PathBuf),
    #[error("{0:?} has control characters: choose a name or path without")]
    ControlCharacters(String),
    #[error("--offload {0}: memory=direct receives each frame where it stays, use memory=copy for these")]
    Offload(Offloads),
    #[error(
        "--max-memory: the ports may have {bytes} bytes together, a process has room for {MOST_BYTES}: set less, or \
         use more processes"
    )]
    MaxMemory { bytes: u64 },
    #[error("cable {name}: {ends} port(s) name it, a cable joins two: give cable={name} to two ports")]
    Cable { name: String, ends: usize },
    #[error(
        "cable {0}: its guests have no queue of an interface that could read their memory, use memory=copy"
    )]
    CableDirect(String),
    #[error(
        "--force-zero-copy with memory=direct: zero-copy depends on the guest. Leave the option out \
         (zero-copy is used where possible, else `status` shows why not), or use memory=send-direct \
         or copy"
    )]
    ForcedDirect,
    #[error(
        "--shared-umem and --force-zero-copy exclude each other: all queues are as the first that is opened, and not \
         every interface may have zero-copy; leave one out"
    )]
    SharedZeroCopy,
    #[error(
        "--shared-umem and --inhibit exclude each other: foreign sockets are bound to memory of their own; leave \
         one out"
    )]
    SharedExternal,
    #[error("--force-zero-copy excludes --mode skb and tap: zero-copy takes a native program, leave one out")]
    ZeroCopyNeedsNative,
    #[error(
        "--hints {0} with memory={1}: frames are in the guest's memory, where the virtio-net header takes the place \
         of hints: use memory=copy for them, or leave hints out"
    )]
    HintsDirect(HintSet, Placement),
    #[error("--hints {0} and --inhibit exclude each other: the foreign XDP program defines the metadata")]
    HintsExternal(HintSet),
    #[error(
        "--hints {0} exclude --mode skb and tap: drivers report hints in native mode only; leave one out"
    )]
    HintsNeedNative(HintSet),
    #[error("--mode tap excludes {0}: frames pass by a tap device, and no queue is bound; leave one out")]
    TapExcludes(&'static str),
    #[error("--vlan: needs the frames of an interface: set --ifname NAME")]
    Vlans,
    #[error("--vlan: {0} VLANs, a port has {ENTRIES_MAX} at most: give fewer, or none for all")]
    ManyVlans(usize),
    #[error("--inhibit needs an interface: name it with --ifname")]
    ExternalWithoutInterface,
    #[error(
        "--inhibit with memory=direct or send-direct: a foreign program writes no virtio-net header; its queues \
         are bound once, to daemon memory; use memory=copy"
    )]
    ExternalDirect,
    #[error("--inhibit and --vlan exclude each other: the foreign XDP program selects the frames")]
    ExternalVlans,
    #[error(
        "--inhibit and --steward exclude each other: the steward has a program of its own, leave one out"
    )]
    ExternalAndSteward,
    #[error(
        "--sock-fds names {fds} descriptor(s) for {queues} queue pair(s): one each, in the order of the queues"
    )]
    SocketCount { fds: usize, queues: u16 },
    #[error("descriptor {0} is named twice: each socket or map needs one of its own")]
    SharedDescriptor(i32),
    #[error("network {name:?}: there is none of that name: {}", missing_network(.name, .near.as_deref()))]
    NoNetwork {
        name: String,
        /// The most similar name.
        near: Option<String>,
    },
    #[error(
        "memory: ports of a network share its queues, and frames of queues that are shared are copied: use memory = \
         \"copy\", or name a queue of its own with ifname and start-queue"
    )]
    NetworkDirect,
    #[error(
        "network with ifname: a port's own queue receives by address: set mac, the same that its \
         VMM has"
    )]
    NetworkMac,
    #[error(
        "ifname {name}: the uplink of network {network} is {uplink}, and a port's own queues must be of that one: \
         name it, or leave ifname out"
    )]
    NetworkInterface {
        name: String,
        network: String,
        uplink: String,
    },
    #[error("inhibit: a network cannot have foreign queues: leave network or inhibit out")]
    NetworkExternal,
    #[error(
        "network {name}: its ports have {stations} addresses, each in as many VLANs as it has; an uplink can have \
         {STATIONS_MAX}: use several"
    )]
    ManyStations { name: String, stations: usize },
    #[error("mac {mac}: port {port} of network {network} has this address{vlan}, too: give each its own")]
    SharedAddress {
        mac: String,
        port: String,
        network: String,
        vlan: String,
    },
    #[error("guard and ips need the guest's address: set mac to the one that the VMM uses")]
    Guard,
    #[error("frame-size {0}: the null NIC makes frames of 14 to 1514 bytes, or with 0 none")]
    FrameBytes(u32),
}

fn missing_network(name: &str, near: Option<&str>) -> String {
    match near {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("name one that the file has, or add it there with a line `[network.{name}]`"),
    }
}

/// What an error concerns; if it concerns two ports or networks, the later one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owner {
    Daemon,
    /// A network, by its index.
    Network(usize),
    /// A port, by its index.
    Port(usize),
}

/// An error of a configuration, and the table that it is in.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub(crate) struct Wrong {
    pub(crate) owner: Owner,
    pub(crate) error: ConfigError,
}
