//! What `serve` was asked for, checked: ports and workers.

pub(crate) mod file;
mod guard;
pub(crate) mod live;

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use steer::{Filter, ModeRequest, mac_text};
use steward::policy::Queues;
use steward::protocol::{ENTRIES_MAX, STATIONS_MAX, Wanted};
use xsk::{BindRequest, BusyPoll};

use self::file::ConfigFile;
pub(crate) use self::guard::{GuardConfig, is_guard};
use crate::listener::Access;
use crate::rates::PortRates;
use crate::sandbox::{Layers, User};
use device::features::OnRequest;
use device::offloads::Offloads;

/// Where a port and its VMM connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// We listen at this path.
    Server(PathBuf),
    /// The VMM listens at this path; we connect, and again after a disconnect.
    Client(PathBuf),
    /// A descriptor that we inherited: a listener or a connected socket.
    Fd(i32),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Server(path) => write!(f, "{}", path.display()),
            Self::Client(path) => write!(f, "{} (client)", path.display()),
            Self::Fd(fd) => write!(f, "fd {fd}"),
        }
    }
}

/// Where frames lie while they are with the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Placement {
    /// In memory of the daemon; each frame is copied once
    Copy,
    /// In the guest's RAM, which is pinned, when they are sent; in memory of the daemon, and copied once, when received
    SendDirect,
    /// In the guest's RAM, which is pinned; no copy in user space
    Direct,
}

/// How the segments of a guest's GSO packet leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Segments {
    /// By reference where the NIC reads frames itself (zero-copy), built whole where the kernel copies them
    Auto,
    /// Headers apart from the payload, which lies in the guest's memory (direct, send-direct) or in one copy of the GSO
    /// packet's (copy), where socket and driver take frames in several pieces
    ByReference,
    /// Each in one piece in memory of ours
    Whole,
}

impl Segments {
    /// Whether they refer to their payload, on a socket that is zero-copy or not.
    pub(crate) fn refer(self, zero_copy: bool) -> bool {
        match self {
            Self::Auto => zero_copy,
            Self::ByReference => true,
            Self::Whole => false,
        }
    }
}

impl Placement {
    /// Guest RAM is registered with the NIC's queues.
    pub(crate) fn has_guest_ram(self) -> bool {
        matches!(self, Self::SendDirect | Self::Direct)
    }

    /// The offloads that it can do. Frames that lie in the guest's buffers already cannot be joined: all buffers
    /// of a frame but the last must be filled to the end (VirtIO 1.3, 5.1.6.4.1).
    pub(crate) fn offloads(self) -> Offloads {
        match self {
            Self::Copy | Self::SendDirect => Offloads::all(),
            Self::Direct => Offloads::all().without(Offloads::coalescing()),
        }
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Copy => "copy",
            Self::SendDirect => "send-direct",
            Self::Direct => "direct",
        })
    }
}

/// What a port's frames go to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NicConfig {
    /// Queues `start_queue..` of an interface.
    Interface {
        name: String,
        /// The first queue, for the first queue pair.
        start_queue: u32,
        /// How to attach the steering program.
        mode: ModeRequest,
        /// Zero-copy or copy, where the user says.
        bind: BindRequest,
    },
    /// Another port of this process.
    Cable {
        /// What both call it.
        name: String,
    },
    /// A network of this process.
    Network {
        name: String,
        vlans: MemberVlans,
        /// It reaches no other port that is isolated, too.
        isolated: bool,
        /// It gets copies of frames that are for others.
        promiscuous: bool,
        /// It may have further addresses, which are learned from what its guest sends.
        learning: bool,
    },
    /// None: frames are made and dropped in this process.
    Null {
        /// Length of the frames made, bytes.
        frame_bytes: u32,
    },
}

/// VLANs of a port of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemberVlans {
    /// None: frames have no tag.
    Untagged,
    /// One, without a tag towards the guest.
    Access(u16),
    /// These, in ascending order, with their tags.
    Trunk(Vec<u16>),
}

impl NicConfig {
    /// The cable's name, if it is one.
    pub(crate) fn cable(&self) -> Option<&str> {
        match self {
            Self::Cable { name } => Some(name),
            _ => None,
        }
    }

    /// VLANs of a network in which it has its address, 0: none.
    fn stations(&self) -> &[u16] {
        match self {
            Self::Network { vlans, .. } => match vlans {
                MemberVlans::Untagged => &[0],
                MemberVlans::Access(vlan) => std::slice::from_ref(vlan),
                MemberVlans::Trunk(vlans) => vlans,
            },
            Self::Interface { .. } | Self::Cable { .. } | Self::Null { .. } => &[],
        }
    }

    /// The network's name, if it is one.
    pub(crate) fn network(&self) -> Option<&str> {
        match self {
            Self::Network { name, .. } => Some(name),
            _ => None,
        }
    }
}

impl std::fmt::Display for NicConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Interface { name, .. } => f.write_str(name),
            Self::Cable { name } => write!(f, "cable {name}"),
            Self::Network { name, .. } => write!(f, "network {name}"),
            Self::Null { .. } => f.write_str("null"),
        }
    }
}

/// What somebody else made for a port's queues, who also has his own XDP program there: `--inhibit` and what belongs to
/// it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExternalProgram {
    /// Nothing: program and sockets are ours, or the steward's.
    None,
    /// AF_XDP sockets by descriptor, one a queue, in the order of the queues, each in its map.
    Sockets(Vec<i32>),
    /// A socket map by descriptor, and the place in it of the first queue's socket.
    Map { fd: i32, first: u32 },
    /// A socket map that is pinned in a bpffs.
    PinnedMap { path: PathBuf, first: u32 },
    /// The AF_XDP device plugin for Kubernetes, which listens there, gives the map.
    Plugin(PathBuf),
}

/// A descriptor that is to be inherited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inherited {
    /// The option that names it.
    pub(crate) option: &'static str,
    pub(crate) fd: i32,
}

impl ExternalProgram {
    fn descriptors(&self) -> Vec<Inherited> {
        let (option, fds) = match self {
            Self::Sockets(numbers) => ("--sock-fds", numbers.as_slice()),
            Self::Map { fd, .. } => ("--map-fd", std::slice::from_ref(fd)),
            Self::None | Self::PinnedMap { .. } | Self::Plugin(_) => return Vec::new(),
        };
        fds.iter().map(|&fd| Inherited { option, fd }).collect()
    }
}

/// Which files are taken as memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FileKinds {
    /// Of memfd, tmpfs and hugetlbfs
    Shared,
    /// Of any file system
    Any,
}

/// What memory a port takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRules {
    /// Most of a guest's, bytes.
    pub(crate) most_bytes: u64,
    pub(crate) files: FileKinds,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortConfig {
    /// As log and `status` have it: what the file calls it, else where the VMM is.
    pub(crate) name: Arc<str>,
    /// Who may connect to its socket, if that is made here.
    pub(crate) access: Access,
    /// Where the VMM is.
    pub(crate) endpoint: Endpoint,
    /// Queue pairs offered.
    pub(crate) queues: u16,
    /// The other side.
    pub(crate) nic: NicConfig,
    /// What somebody else made for it.
    pub(crate) external: ExternalProgram,
    /// `--memory`.
    pub(crate) placement: Placement,
    /// Packet memory of each queue pair while it copies, bytes.
    pub(crate) packet_bytes: u32,
    /// That is a slice of memory which several ports share (`--shared-umem`): the number of its first pair's. `None`:
    /// each pair has a UMEM of its own.
    pub(crate) slices_from: Option<u32>,
    /// What memory is taken of a VMM.
    pub(crate) memory: MemoryRules,
    /// How segments leave.
    pub(crate) segments: Segments,
    /// Whether system calls poll the driver.
    pub(crate) busy_poll: Option<BusyPoll>,
    /// MAC address told to the guest; `None`: made from the endpoint and the interface.
    pub(crate) mac: Option<[u8; 6]>,
    /// VLANs whose frames the guest gets; none: all.
    pub(crate) vlans: Vec<u16>,
    /// What it may send.
    pub(crate) guard: GuardConfig,
    /// Offloads offered to the guest.
    pub(crate) offload: Offloads,
    /// Features offered because somebody asked for them.
    pub(crate) offer: OnRequest,
    /// How much the guest may send and get, at first.
    pub(crate) rates: PortRates,
}

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
            mode: self.mode,
            filter: Filter::default(),
            network: true,
        }
    }
}

/// Where `status` finds a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Control {
    Nowhere,
    /// Where it looks for daemons by itself.
    Usual,
    /// Where `--control` says.
    At(PathBuf),
}

/// Everything `serve` runs.
#[derive(Debug, Clone)]
pub(crate) struct ServeConfig {
    /// The file that the ports are of, if it is one.
    pub(crate) file: Option<ConfigFile>,
    /// The ports; without a file at least one.
    pub(crate) ports: Vec<PortConfig>,
    /// Networks that ports name.
    pub(crate) networks: Vec<NetworkConfig>,
    /// Worker threads.
    pub(crate) workers: usize,
    /// CPUs to pin them to, round robin; empty: none.
    pub(crate) cpus: Vec<usize>,
    /// How long a worker polls without work before it sleeps.
    pub(crate) spin: Duration,
    /// Where the steward listens that queues are leased from; `None`: from a private one
    /// ([`keeper`](crate::guard::keeper)).
    pub(crate) steward: Option<PathBuf>,
    /// How long a steward is waited for.
    pub(crate) steward_timeout: Duration,
    /// Where `status` finds us.
    pub(crate) control: Control,
    /// Where HTTP is answered.
    pub(crate) api: ApiConfig,
    /// What the process is confined by.
    pub(crate) layers: Layers,
    /// Whom it becomes; `None`: it stays who it is, or becomes nobody if that is root.
    pub(crate) user: Option<User>,
}

/// Where HTTP is answered ([`process`](crate::api::process)).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ApiConfig {
    /// Socket of those who may ask everything.
    pub(crate) all: Option<(PathBuf, Access)>,
    /// Socket of those who may only look.
    pub(crate) read_only: Option<(PathBuf, Access)>,
    /// Where metrics alone are had by TCP.
    pub(crate) metrics: Option<SocketAddr>,
}

/// Most bytes of guest memory of all ports together: each may be mapped twice while its table changes, and a process
/// has 128 TiB of address space (x86-64 and arm64 with tables of four levels).
pub(crate) const MOST_BYTES: u64 = 48 << 40;

/// Most queue pairs of a port: what the steering program has room for.
pub(crate) const MOST_QUEUES: u16 = 128;

/// Values that do not go together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("--queues {0}: a port has 1 to {MOST_QUEUES} queue pairs")]
    Queues(u16),
    #[error("queue {queue} of {name} is asked for by two ports: give them disjoint ranges with start-queue")]
    SharedQueue { name: String, queue: u32 },
    #[error("{0} is asked for by two ports: each needs a socket of its own")]
    SharedEndpoint(Endpoint),
    #[error("interface {0} is asked for with different modes: a program is attached once, choose one mode")]
    TwoModes(String),
    #[error("socket path {0:?} is {len} bytes long: a Unix socket path has at most 107: choose a shorter \
             one", len = .0.as_os_str().len())]
    LongPath(PathBuf),
    #[error("--offload {0}: memory=direct receives each frame where it stays, use memory=copy for these")]
    Offload(Offloads),
    #[error(
        "--max-memory: the ports may have {bytes} bytes together, a process has room for {MOST_BYTES}: say less, or \
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
        "--force-zero-copy with memory=direct: whether that can be depends on the guest that comes. Leave the option out \
         (zero-copy is used where it can be, and `status` says why not where it is not), or use memory=send-direct \
         or copy"
    )]
    ForcedDirect,
    #[error(
        "--shared-umem and --force-zero-copy exclude each other: all queues are as the first that is opened, and not \
         every interface may have zero-copy; leave one out"
    )]
    SharedZeroCopy,
    #[error(
        "--shared-umem and --inhibit exclude each other: what somebody else made is bound to memory of its own; leave \
         one out"
    )]
    SharedExternal,
    #[error(
        "--force-zero-copy and --mode skb exclude each other: zero-copy takes a native program, leave one out"
    )]
    ForcedSkb,
    #[error("--vlan: only frames of an interface are looked at, give --ifname NAME")]
    Vlans,
    #[error("--vlan: {0} VLANs, a port has {ENTRIES_MAX} at most: give fewer, or none for all")]
    ManyVlans(usize),
    #[error("--inhibit needs an interface: name it with --ifname")]
    ExternalWithoutInterface,
    #[error(
        "--inhibit with memory=direct or send-direct: another's program writes no virtio-net header, and its queues \
         are bound to memory of ours once; use memory=copy"
    )]
    ExternalDirect,
    #[error(
        "--inhibit and --vlan exclude each other: which frames come is up to the XDP program that is there"
    )]
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
    #[error("network {0:?}: there is none of that name: begin it with a line `[network.{0}]`")]
    NoNetwork(String),
    #[error(
        "network: its ports share its queues, and frames of queues that are shared are copied: use memory = \"copy\""
    )]
    NetworkDirect,
    #[error("inhibit goes with ifname: a port of a network has no queues of its own")]
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
    #[error("guard and ips go by the guest's address: name it by mac, the same one as its VMM does")]
    Guard,
    #[error("frame-size {0}: the null NIC makes frames of 14 to 1514 bytes, or with 0 none")]
    FrameBytes(u32),
}

/// A configuration that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub(crate) struct Wrong {
    /// The port, by its place, if it is one's; of two the later one.
    pub(crate) port: Option<usize>,
    pub(crate) error: ConfigError,
}

impl ServeConfig {
    /// Where VMMs are met, as far as that has a path.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let path = |port: &PortConfig| match &port.endpoint {
            Endpoint::Server(path) | Endpoint::Client(path) => Some(path.clone()),
            Endpoint::Fd(_) => None,
        };
        self.ports.iter().filter_map(path).collect()
    }

    /// What is to be leased, port by port.
    pub(crate) fn queues(&self) -> Vec<Queues> {
        let leased = self.ports.iter().filter(|port| !port.has_external_program());
        let uplinks = self.networks.iter().filter_map(|network| network.uplink.as_ref());
        let wanted = leased.filter_map(PortConfig::wanted);
        wanted
            .chain(uplinks.map(UplinkConfig::wanted))
            .map(|wanted| Queues {
                interface: wanted.interface,
                first: wanted.start_queue,
                count: wanted.queues,
            })
            .collect()
    }

    /// Where sockets may be made later on: beside those of the ports that there are, and where the file says.
    pub(crate) fn socket_directories(&self) -> Vec<PathBuf> {
        let parent = |port: &PortConfig| match &port.endpoint {
            Endpoint::Server(path) => path.parent().map(Path::to_owned),
            Endpoint::Client(_) | Endpoint::Fd(_) => None,
        };
        let named = self.file.iter().flat_map(|file| file.directories.clone());
        let all: BTreeSet<PathBuf> = self.ports.iter().filter_map(parent).chain(named).collect();
        all.into_iter().collect()
    }

    /// Frames that one poll of the driver may handle, if any port's sockets are to poll it.
    pub(crate) fn busy_poll_budget(&self) -> Option<u16> {
        let budgets = self.ports.iter().filter_map(|port| port.busy_poll);
        budgets
            .map(|poll| poll.budget.try_into().unwrap_or(u16::MAX))
            .max()
    }

    /// Checks what can be checked without the kernel.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        let most = self.ports.iter().map(|port| port.memory.most_bytes);
        let bytes = most.fold(0, u64::saturating_add);
        if bytes > MOST_BYTES {
            let error = ConfigError::MaxMemory { bytes };
            return Err(Wrong { port: None, error });
        }
        let uplinks: Vec<_> = self
            .networks
            .iter()
            .filter_map(|network| network.uplink.as_ref())
            .collect();
        for (at, uplink) in uplinks.iter().enumerate() {
            for other in &uplinks[..at] {
                let apart = check_apart(&uplink.wanted(), &other.wanted());
                apart.map_err(|error| Wrong { port: None, error })?;
            }
        }
        let mut descriptors = HashSet::new();
        for at in 0..self.ports.len() {
            let checked = self.check_port(at, &mut descriptors);
            checked.map_err(|error| Wrong {
                port: Some(at),
                error,
            })?;
        }
        Ok(())
    }

    /// Checks a port by itself and beside those before it, whose descriptors these are.
    fn check_port(&self, at: usize, descriptors: &mut HashSet<i32>) -> Result<(), ConfigError> {
        let port = &self.ports[at];
        port.check()?;
        if port.has_external_program() && self.steward.is_some() {
            return Err(ConfigError::ExternalAndSteward);
        }
        for Inherited { fd, .. } in port.descriptors() {
            if !descriptors.insert(fd) {
                return Err(ConfigError::SharedDescriptor(fd));
            }
        }
        for other in &self.ports[..at] {
            port.check_beside(other)?;
        }
        if let Some(name) = port.nic.network() {
            let network = self.networks.iter().find(|network| network.name == name);
            let network = network.ok_or_else(|| ConfigError::NoNetwork(name.to_owned()))?;
            let all = self.ports.iter().filter(|port| port.nic.network() == Some(name));
            let stations = all.map(|port| port.nic.stations().len()).sum();
            if network.uplink.is_some() && stations > STATIONS_MAX {
                let name = name.to_owned();
                return Err(ConfigError::ManyStations { name, stations });
            }
        }
        for uplink in self.networks.iter().filter_map(|network| network.uplink.as_ref()) {
            if let Some(wanted) = port.wanted() {
                check_apart(&wanted, &uplink.wanted())?;
            }
        }
        if let Some(name) = port.nic.cable() {
            let ends = self.ports.iter().filter(|port| port.nic.cable() == Some(name));
            let (name, ends) = (name.to_owned(), ends.count());
            if ends != 2 {
                return Err(ConfigError::Cable { name, ends });
            }
        }
        Ok(())
    }
}

impl PortConfig {
    /// The descriptors that are to be inherited for this port.
    pub(crate) fn descriptors(&self) -> Vec<Inherited> {
        let mut descriptors = self.external.descriptors();
        if let Endpoint::Fd(fd) = self.endpoint {
            descriptors.push(Inherited { option: "--fd", fd });
        }
        descriptors
    }

    /// What is to be leased, and which frames of it; `None` without an interface.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        let NicConfig::Interface {
            name,
            start_queue,
            mode,
            ..
        } = &self.nic
        else {
            return None;
        };
        Some(Wanted {
            interface: name.clone(),
            start_queue: *start_queue,
            queues: self.queues.into(),
            mode: *mode,
            filter: Filter {
                macs: self.mac.into_iter().collect(),
                vlans: self.vlans.clone(),
            },
            network: false,
        })
    }

    /// Memory that is locked for its queues while it copies, bytes.
    pub(crate) fn copy_bytes(&self) -> u64 {
        match self.nic {
            NicConfig::Interface { .. } => u64::from(self.queues) * u64::from(self.packet_bytes),
            NicConfig::Cable { .. } | NicConfig::Network { .. } | NicConfig::Null { .. } => 0,
        }
    }

    /// Offloads that are possible and not offered, by name.
    pub(crate) fn offloads_off(&self) -> Vec<&'static str> {
        self.placement.offloads().without(self.offload).names()
    }

    fn check(&self) -> Result<(), ConfigError> {
        if !(1..=MOST_QUEUES).contains(&self.queues) {
            return Err(ConfigError::Queues(self.queues));
        }
        let cannot = self.offload.without(self.placement.offloads());
        if cannot != Offloads::NONE {
            return Err(ConfigError::Offload(cannot));
        }
        if let (true, Some(name)) = (self.placement.has_guest_ram(), self.nic.cable()) {
            return Err(ConfigError::CableDirect(name.to_owned()));
        }
        if self.nic.network().is_some() {
            if self.placement.has_guest_ram() {
                return Err(ConfigError::NetworkDirect);
            }
            if self.has_external_program() {
                return Err(ConfigError::NetworkExternal);
            }
        }
        if self.guard != GuardConfig::default() && self.mac.is_none() {
            return Err(ConfigError::Guard);
        }
        self.check_bind()?;
        self.check_shared()?;
        if !self.vlans.is_empty() && !matches!(self.nic, NicConfig::Interface { .. }) {
            return Err(ConfigError::Vlans);
        }
        if self.vlans.len() > ENTRIES_MAX {
            return Err(ConfigError::ManyVlans(self.vlans.len()));
        }
        self.check_external()?;
        if let NicConfig::Null { frame_bytes } = self.nic
            && frame_bytes != 0
            && !(14..=1514).contains(&frame_bytes)
        {
            return Err(ConfigError::FrameBytes(frame_bytes));
        }
        match &self.endpoint {
            Endpoint::Server(path) | Endpoint::Client(path) if path.as_os_str().len() > 107 => {
                Err(ConfigError::LongPath(path.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Whether its queues can have their memory in one UMEM with those of other ports; all others have their own.
    pub(crate) fn can_share(&self) -> bool {
        self.placement == Placement::Copy && matches!(self.nic, NicConfig::Interface { .. })
    }

    fn check_shared(&self) -> Result<(), ConfigError> {
        match self.nic {
            _ if self.slices_from.is_none() => Ok(()),
            _ if self.has_external_program() => Err(ConfigError::SharedExternal),
            NicConfig::Interface {
                bind: BindRequest::ForceZeroCopy,
                ..
            } => Err(ConfigError::SharedZeroCopy),
            _ => Ok(()),
        }
    }

    fn check_bind(&self) -> Result<(), ConfigError> {
        match self.nic {
            NicConfig::Interface {
                bind: BindRequest::ForceZeroCopy,
                mode: ModeRequest::Skb,
                ..
            } => Err(ConfigError::ForcedSkb),
            NicConfig::Interface {
                bind: BindRequest::ForceZeroCopy,
                ..
            } if self.placement == Placement::Direct => Err(ConfigError::ForcedDirect),
            _ => Ok(()),
        }
    }

    /// Whether it comes with sockets or a map of somebody else's.
    pub(crate) fn has_external_program(&self) -> bool {
        self.external != ExternalProgram::None
    }

    /// Whether its AF_XDP sockets are made by this process.
    pub(crate) fn opens_sockets(&self) -> bool {
        self.has_external_program() && !matches!(self.external, ExternalProgram::Sockets(_))
    }

    fn check_external(&self) -> Result<(), ConfigError> {
        if self.external == ExternalProgram::None {
            return Ok(());
        }
        if !matches!(self.nic, NicConfig::Interface { .. }) {
            return Err(ConfigError::ExternalWithoutInterface);
        }
        if self.placement.has_guest_ram() {
            return Err(ConfigError::ExternalDirect);
        }
        if !self.vlans.is_empty() {
            return Err(ConfigError::ExternalVlans);
        }
        match &self.external {
            ExternalProgram::Sockets(fds) if fds.len() != usize::from(self.queues) => {
                Err(ConfigError::SocketCount {
                    fds: fds.len(),
                    queues: self.queues,
                })
            }
            _ => Ok(()),
        }
    }

    fn check_beside(&self, other: &Self) -> Result<(), ConfigError> {
        if self.endpoint == other.endpoint {
            return Err(ConfigError::SharedEndpoint(self.endpoint.clone()));
        }
        if let (Some(mac), Some(network)) = (self.mac, self.nic.network())
            && (other.mac, other.nic.network()) == (self.mac, self.nic.network())
            && let Some(&vlan) = self
                .nic
                .stations()
                .iter()
                .find(|vlan| other.nic.stations().contains(vlan))
        {
            return Err(ConfigError::SharedAddress {
                mac: mac_text(mac),
                port: other.name.to_string(),
                network: network.to_owned(),
                vlan: match vlan {
                    0 => String::new(),
                    vlan => format!(" in VLAN {vlan}"),
                },
            });
        }
        match (self.wanted(), other.wanted()) {
            (Some(wanted), Some(others)) => check_apart(&wanted, &others),
            _ => Ok(()),
        }
    }
}

/// Whether two leases can be had at a time.
fn check_apart(wanted: &Wanted, others: &Wanted) -> Result<(), ConfigError> {
    let name = wanted.interface.clone();
    if name != others.interface {
        return Ok(());
    }
    if wanted.mode != others.mode {
        return Err(ConfigError::TwoModes(name));
    }
    let queue = wanted.start_queue.max(others.start_queue);
    let end = |wanted: &Wanted| wanted.start_queue.saturating_add(wanted.queues);
    match queue < end(wanted).min(end(others)) {
        true => Err(ConfigError::SharedQueue { name, queue }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::endpoint::COPY_BYTES;

    fn port(path: &str, start_queue: u32, queues: u16) -> PortConfig {
        PortConfig {
            name: path.into(),
            access: Access::OWN,
            endpoint: Endpoint::Server(path.into()),
            queues,
            nic: NicConfig::Interface {
                name: "eth0".into(),
                start_queue,
                mode: ModeRequest::Auto,
                bind: BindRequest::Auto,
            },
            external: ExternalProgram::None,
            placement: Placement::Copy,
            memory: MemoryRules {
                most_bytes: 1 << 30,
                files: FileKinds::Shared,
            },
            segments: Segments::Auto,
            busy_poll: None,
            mac: None,
            vlans: Vec::new(),
            guard: GuardConfig::default(),
            packet_bytes: COPY_BYTES,
            slices_from: None,
            offload: Offloads::NONE,
            offer: OnRequest::NONE,
            rates: PortRates::UNLIMITED,
        }
    }

    fn serve(ports: Vec<PortConfig>) -> ServeConfig {
        ServeConfig {
            file: None,
            ports,
            workers: 1,
            cpus: Vec::new(),
            spin: Duration::ZERO,
            steward: None,
            steward_timeout: Duration::from_secs(1),
            control: Control::Nowhere,
            api: ApiConfig::default(),
            networks: Vec::new(),
            layers: Layers::parse("off").expect("a word"),
            user: None,
        }
    }

    #[test]
    fn disjoint_queues_of_one_interface_are_accepted() {
        serve(vec![port("/a", 0, 2), port("/b", 2, 1)])
            .check()
            .expect("disjoint");
    }

    #[test]
    fn overlapping_queues_are_refused_by_name() {
        let error = serve(vec![port("/a", 0, 3), port("/b", 2, 1)])
            .check()
            .expect_err("overlap");
        assert!(error.to_string().contains("queue 2 of eth0"), "{error}");
    }

    #[test]
    fn one_socket_for_two_ports_is_refused() {
        assert!(serve(vec![port("/a", 0, 1), port("/a", 1, 1)]).check().is_err());
    }

    #[test]
    fn path_of_108_bytes_is_refused() {
        assert!(serve(vec![port(&"x".repeat(107), 0, 1)]).check().is_ok());
        assert!(serve(vec![port(&"x".repeat(108), 0, 1)]).check().is_err());
    }
}
