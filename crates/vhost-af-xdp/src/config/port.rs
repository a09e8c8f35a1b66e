//! The configuration of a port.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use derive_more::Display;
use device::features::OnRequest;
use device::offloads::Offloads;
use model::config::{FileKinds, MemberOptions, Placement, Port, Segments};
use steer::ModeRequest;
use steward_protocol::Wanted;
use xsk::{BindRequest, BusyPoll};

use super::MemberVlans;
use super::hints::HintsConfig;
use crate::listener::Access;
use dataplane::nic::endpoint::to_send_only;
use dataplane::policy::guard::{Guard, SourceGuard};
use model::rates::PortRates;

/// How a port and its VMM connect.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Display)]
pub(crate) enum Endpoint {
    /// The daemon listens at this path.
    #[display("{}", _0.display())]
    Server(PathBuf),
    /// The VMM listens at this path; the daemon connects, and again after a disconnect.
    #[display("{} (client)", _0.display())]
    Client(PathBuf),
    /// An inherited descriptor: a listener or a connected socket.
    #[display("fd {_0}")]
    Fd(i32),
}

impl Endpoint {
    /// The path of its socket, if it has one.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Server(path) | Self::Client(path) => Some(path),
            Self::Fd(_) => None,
        }
    }
}

/// The offloads that a placement can do. Frames that a NIC wrote into the guest's buffers cannot be coalesced: all
/// buffers of a packet but the last must be filled to the end (VirtIO 1.3, 5.1.6.4.1).
pub(super) fn offloads_of(placement: Placement) -> Offloads {
    match placement {
        Placement::Copy | Placement::SendDirect => Offloads::all(),
        Placement::Direct => Offloads::all().without(Offloads::coalescing()),
    }
}

/// Where a port's frames are sent to and received from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NicConfig {
    /// Queues of an interface.
    Interface(InterfaceQueues),
    /// Another port of this process.
    Cable {
        /// The name that both ports give.
        name: String,
    },
    /// A network of this process.
    Network {
        name: String,
        vlans: MemberVlans,
        /// What it may do in the network.
        options: MemberOptions,
        /// Queues of the uplink's interface for this port alone.
        own: Option<InterfaceQueues>,
    },
    /// No other end: frames are made and dropped in this process.
    Null {
        /// Length of the frames made, bytes.
        frame_bytes: u32,
    },
}

/// Queues `start_queue..` of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InterfaceQueues {
    /// The interface.
    pub(crate) name: String,
    /// The first queue, for the first queue pair.
    pub(crate) start_queue: u32,
    /// How to attach the steering program.
    pub(crate) mode: ModeRequest,
}

/// How a port or an uplink uses its queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueOptions {
    /// Zero-copy or copy, if configured.
    pub(crate) bind: BindRequest,
    /// A queue may copy even if this is direct.
    pub(crate) placement: Placement,
    /// Packet memory of each queue while it copies, bytes.
    pub(crate) packet_bytes: u32,
    /// How segments are sent.
    pub(crate) segments: Segments,
    /// Busy polling, if configured.
    pub(crate) busy_poll: Option<BusyPoll>,
    /// Hints of the NIC for received frames.
    pub(crate) hints: HintsConfig,
    /// The packet memory is a slice of memory that several ports share (`--shared-umem`): the index of its first
    /// queue's slice. `None`: each queue has its own UMEM.
    pub(crate) slices_from: Option<u32>,
}

impl QueueOptions {
    /// The mode to lease queues with: `auto` becomes `xdp` if an option needs AF_XDP.
    pub(super) fn mode(&self, needs_xdp: bool, mode: ModeRequest) -> ModeRequest {
        let has_option =
            self.bind != BindRequest::Auto || !self.hints.named().is_empty() || self.busy_poll.is_some();
        match mode {
            ModeRequest::Auto if needs_xdp || has_option => ModeRequest::Xdp,
            mode => mode,
        }
    }
}

impl NicConfig {
    /// Queues for this port alone.
    pub(crate) fn queues(&self) -> Option<&InterfaceQueues> {
        match self {
            Self::Interface(queues) => Some(queues),
            Self::Network { own, .. } => own.as_ref(),
            Self::Cable { .. } | Self::Null { .. } => None,
        }
    }

    /// The placement of a port that requests `asked`. With direct placement the NIC holds all receive buffers of the
    /// guest, in their order, and frames from other ports of a network would have to overtake them. So a port of a
    /// network with a queue of its own sends from guest memory, but copies what it receives.
    pub(crate) fn placement(&self, asked: Placement) -> Placement {
        match (self, asked) {
            (Self::Network { own: Some(_), .. }, Placement::Direct) => Placement::SendDirect,
            _ => asked,
        }
    }

    /// Whether the guest receives the frames of its one VLAN without their tag.
    pub(crate) fn untags(&self) -> bool {
        let Self::Network { vlans, .. } = self else {
            return false;
        };
        matches!(vlans, MemberVlans::Access(_))
    }

    /// The cable's name, if the port has one.
    pub(crate) fn cable(&self) -> Option<&str> {
        match self {
            Self::Cable { name } => Some(name),
            _ => None,
        }
    }

    /// VLANs of the network in which the port has its address; 0: untagged.
    pub(crate) fn stations(&self) -> &[u16] {
        match self {
            Self::Network { vlans, .. } => vlans.all(),
            Self::Interface(_) | Self::Cable { .. } | Self::Null { .. } => &[],
        }
    }

    /// The network's name, if the port is in one.
    pub(crate) fn network(&self) -> Option<&str> {
        match self {
            Self::Network { name, .. } => Some(name),
            _ => None,
        }
    }
}

/// The interface, cable or network, as `status` shows it.
impl std::fmt::Display for NicConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Interface(queues)
            | Self::Network {
                own: Some(queues), ..
            } => f.write_str(&queues.name),
            Self::Cable { name } => write!(f, "cable {name}"),
            Self::Network { name, own: None, .. } => write!(f, "network {name}"),
            Self::Null { .. } => f.write_str("null"),
        }
    }
}

/// Queues of another program, which has its own XDP program there: `--inhibit` and its options. `layout` is the name of
/// the structure that the program leaves before frames, if it leaves one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExternalProgram {
    /// None: program and sockets are the daemon's, or the steward's.
    None,
    /// AF_XDP sockets by descriptor, one for each queue, in the order of the queues; the program's map has them.
    Sockets(Vec<i32>),
    /// A socket map by descriptor, and the index of the first queue's socket in it.
    Map {
        fd: i32,
        first: u32,
        layout: Option<String>,
    },
    /// A socket map that is pinned in a bpffs.
    PinnedMap {
        path: PathBuf,
        first: u32,
        layout: Option<String>,
    },
    /// The AF_XDP device plugin for Kubernetes, which listens at this path, passes the map.
    Plugin { path: PathBuf, layout: Option<String> },
}

/// A descriptor that the daemon must have inherited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inherited {
    /// The option or key that names it.
    pub(crate) option: &'static str,
    pub(crate) fd: i32,
}

impl ExternalProgram {
    /// The structure that the program leaves before frames.
    pub(crate) fn layout(&self) -> Option<&str> {
        match self {
            Self::None | Self::Sockets(_) => None,
            Self::Map { layout, .. } | Self::PinnedMap { layout, .. } | Self::Plugin { layout, .. } => {
                layout.as_deref()
            }
        }
    }

    fn descriptors(&self) -> Vec<Inherited> {
        let (option, fds) = match self {
            Self::Sockets(numbers) => ("sock-fds", numbers.as_slice()),
            Self::Map { fd, .. } => ("map-fd", std::slice::from_ref(fd)),
            Self::None | Self::PinnedMap { .. } | Self::Plugin { .. } => return Vec::new(),
        };
        fds.iter().map(|&fd| Inherited { option, fd }).collect()
    }
}

/// Limits of the guest memory that a port accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRules {
    /// Most memory of a guest, bytes.
    pub(crate) most_bytes: u64,
    pub(crate) files: FileKinds,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PortConfig {
    /// The options that this was built from.
    pub(crate) keys: Arc<Port>,
    /// Name in the log and in `status`: that of the file, else the endpoint.
    pub(crate) name: Arc<str>,
    /// Access to its socket, if the daemon creates it.
    pub(crate) access: Access,
    /// How the VMM connects.
    pub(crate) endpoint: Endpoint,
    /// Queue pairs offered.
    pub(crate) queues: u16,
    /// Where frames are sent to and received from.
    pub(crate) nic: NicConfig,
    /// Queues of another program, if any.
    pub(crate) external: ExternalProgram,
    /// How it uses queues.
    pub(crate) options: QueueOptions,
    /// `--memory` as requested; if `options.placement` differs, `status` says why.
    pub(crate) asked: Placement,
    /// Limits of the guest memory.
    pub(crate) memory: MemoryRules,
    /// MAC address that the guest reads; `None`: made from the endpoint and the interface.
    pub(crate) mac: Option<[u8; 6]>,
    /// VLANs whose frames the guest receives; empty: all.
    pub(crate) vlans: Vec<u16>,
    /// Offloads offered to the guest.
    pub(crate) offload: Offloads,
    /// Features that are only offered on request (`--offer`).
    pub(crate) offer: OnRequest,
    /// Rate limits at the start.
    pub(crate) rates: PortRates,
}

impl PortConfig {
    /// Descriptors that the daemon must have inherited for this port.
    pub(crate) fn descriptors(&self) -> Vec<Inherited> {
        let mut descriptors = self.external.descriptors();
        if let Endpoint::Fd(fd) = self.endpoint {
            descriptors.push(Inherited { option: "fd", fd });
        }
        descriptors
    }

    /// The queues to lease, and which frames they receive; `None` without an interface.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        let queues = self.nic.queues()?;
        let vlans = match self.nic {
            NicConfig::Network { .. } => self.nic.stations().to_vec(),
            _ => self.vlans.clone(),
        };
        Some(Wanted {
            interface: queues.name.clone(),
            start_queue: queues.start_queue,
            queues: self.queues.into(),
            mode: self.options.mode(self.has_only_xdp(), queues.mode),
            filter: steer::Filter {
                macs: self.mac.into_iter().collect(),
                vlans,
            },
            network: false,
        })
    }

    /// Whether its queues need AF_XDP, whatever their options are.
    fn has_only_xdp(&self) -> bool {
        self.nic.network().is_some() || self.options.placement.has_guest_ram() || self.has_external_program()
    }

    /// Memory that is locked for its queues while it copies, bytes.
    pub(crate) fn copy_bytes(&self) -> u64 {
        let bytes = |queues: &InterfaceQueues| match queues.mode {
            ModeRequest::Tap => to_send_only(self.options.packet_bytes),
            _ => self.options.packet_bytes,
        };
        u64::from(self.queues) * u64::from(self.nic.queues().map_or(0, bytes))
    }

    /// The guard for its guest's frames; `None`: not configured, or the port is in a network, which has guards itself.
    pub(crate) fn guard(&self) -> Option<Guard> {
        let source_guard = SourceGuard::of(&self.keys.guard);
        let mac = self.mac.filter(|_| self.nic.network().is_none());
        mac.filter(|_| self.keys.guard.guard || source_guard.is_some())
            .map(|mac| Guard {
                mac,
                vlans: self.vlans.clone(),
                source_guard,
            })
    }

    /// Hints requested for its frames.
    pub(crate) fn hints(&self) -> HintsConfig {
        match self.options.placement {
            Placement::Copy if self.external.layout().is_some() => HintsConfig::OfProgram,
            Placement::Copy => self.options.hints,
            // The virtio-net header takes their place.
            Placement::SendDirect | Placement::Direct => HintsConfig::NONE,
        }
    }

    /// Offloads that are possible but not offered, by name.
    pub(crate) fn offloads_off(&self) -> Vec<&'static str> {
        offloads_of(self.options.placement).without(self.offload).names()
    }

    /// Whether its queues can have their packet memory in a UMEM that ports share.
    pub(crate) fn can_share(&self) -> bool {
        self.options.placement == Placement::Copy && matches!(self.nic, NicConfig::Interface(_))
    }

    /// Whether it uses sockets or a map of another program.
    pub(crate) fn has_external_program(&self) -> bool {
        self.external != ExternalProgram::None
    }

    /// Whether the daemon itself opens its AF_XDP sockets.
    pub(crate) fn opens_sockets(&self) -> bool {
        self.has_external_program() && !matches!(self.external, ExternalProgram::Sockets(_))
    }
}
