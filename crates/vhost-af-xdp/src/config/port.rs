//! A port, as it was asked for.

use std::path::PathBuf;
use std::sync::Arc;

use device::features::OnRequest;
use device::offloads::Offloads;
use model::config::{FileKinds, MemberOptions, Placement, Port};
use steer::ModeRequest;
use steward::protocol::Wanted;
use xsk::{BindRequest, BusyPoll};

use super::hints::HintsConfig;
use crate::listener::Access;
use crate::nic::endpoint::to_send_only;
use crate::switch::guard::{Guard, SourceGuard};
use model::rates::PortRates;

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

/// The offloads that a placement can do. Frames that lie in the guest's buffers already cannot be joined: all buffers of
/// a frame but the last must be filled to the end (VirtIO 1.3, 5.1.6.4.1).
pub(super) fn offloads_of(placement: Placement) -> Offloads {
    match placement {
        Placement::Copy | Placement::SendDirect => Offloads::all(),
        Placement::Direct => Offloads::all().without(Offloads::coalescing()),
    }
}

/// What a port's frames go to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NicConfig {
    /// Queues of an interface.
    Interface(PortQueues),
    /// Another port of this process.
    Cable {
        /// What both call it.
        name: String,
    },
    /// A network of this process.
    Network {
        name: String,
        vlans: MemberVlans,
        /// What it may do there.
        options: MemberOptions,
        /// Queues of the uplink's interface that are its alone.
        own: Option<PortQueues>,
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

/// Queues `start_queue..` of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortQueues {
    /// The interface.
    pub(crate) name: String,
    /// The first queue, for the first queue pair.
    pub(crate) start_queue: u32,
    /// How to attach the steering program.
    pub(crate) mode: ModeRequest,
    /// Zero-copy or copy, where the user says.
    pub(crate) bind: BindRequest,
}

/// The mode that is asked for, where something else that is asked for may be had only with AF_XDP.
pub(super) fn mode_where(has_only_xdp: bool, mode: ModeRequest) -> ModeRequest {
    match mode {
        ModeRequest::Auto if has_only_xdp => ModeRequest::Xdp,
        mode => mode,
    }
}

/// Whether one of these can be had only with AF_XDP.
pub(super) fn asks_for_xdp(bind: BindRequest, hints: HintsConfig, busy_poll: Option<BusyPoll>) -> bool {
    bind != BindRequest::Auto || !hints.named().is_empty() || busy_poll.is_some()
}

impl NicConfig {
    /// Queues that are the port's alone.
    pub(crate) fn queues(&self) -> Option<&PortQueues> {
        match self {
            Self::Interface(queues) => Some(queues),
            Self::Network { own, .. } => own.as_ref(),
            Self::Cable { .. } | Self::Null { .. } => None,
        }
    }

    /// The placement that a port gets which asks for one. Direct placement has the guest's receive buffers with the
    /// NIC, all of them, in their order, where what other ports of a network send would have to overtake them; so a
    /// port of a network sends from guest memory, and receives by a copy.
    pub(crate) fn placement(&self, asked: Placement) -> Placement {
        match (self, asked) {
            (Self::Network { own: Some(_), .. }, Placement::Direct) => Placement::SendDirect,
            _ => asked,
        }
    }

    /// Whether the guest has the frames of its one VLAN without their tag.
    pub(crate) fn untags(&self) -> bool {
        let Self::Network { vlans, .. } = self else {
            return false;
        };
        matches!(vlans, MemberVlans::Access(_))
    }

    /// The cable's name, if it is one.
    pub(crate) fn cable(&self) -> Option<&str> {
        match self {
            Self::Cable { name } => Some(name),
            _ => None,
        }
    }

    /// VLANs of a network in which it has its address, 0: none.
    pub(crate) fn stations(&self) -> &[u16] {
        match self {
            Self::Network { vlans, .. } => match vlans {
                MemberVlans::Untagged => &[0],
                MemberVlans::Access(vlan) => std::slice::from_ref(vlan),
                MemberVlans::Trunk(vlans) => vlans,
            },
            Self::Interface(_) | Self::Cable { .. } | Self::Null { .. } => &[],
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

/// Where its queues are, as `status` has it.
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

/// What somebody else made for a port's queues, who also has his own XDP program there: `--inhibit` and what belongs to
/// it. `layout` is the name of the structure that the program leaves before frames, if it leaves one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExternalProgram {
    /// Nothing: program and sockets are ours, or the steward's.
    None,
    /// AF_XDP sockets by descriptor, one a queue, in the order of the queues, each in its map.
    Sockets(Vec<i32>),
    /// A socket map by descriptor, and the place in it of the first queue's socket.
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
    /// The AF_XDP device plugin for Kubernetes, which listens there, gives the map.
    Plugin { path: PathBuf, layout: Option<String> },
}

/// A descriptor that is to be inherited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inherited {
    /// The option, or key, that names it.
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

/// What memory a port takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRules {
    /// Most of a guest's, bytes.
    pub(crate) most_bytes: u64,
    pub(crate) files: FileKinds,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PortConfig {
    /// As it was configured.
    pub(crate) keys: Arc<Port>,
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
    pub(crate) placement: Placement,
    /// `--memory`: what it is instead is said in the status.
    pub(crate) asked: Placement,
    /// Packet memory of each queue pair while it copies, bytes.
    pub(crate) packet_bytes: u32,
    /// That is a slice of memory which several ports share (`--shared-umem`): the number of its first pair's. `None`:
    /// each pair has a UMEM of its own.
    pub(crate) slices_from: Option<u32>,
    /// What memory is taken of a VMM.
    pub(crate) memory: MemoryRules,
    /// How segments leave.
    pub(crate) segments: super::Segments,
    /// Whether system calls poll the driver.
    pub(crate) busy_poll: Option<BusyPoll>,
    /// What the NIC is to tell of frames.
    pub(crate) hints: HintsConfig,
    /// MAC address told to the guest; `None`: made from the endpoint and the interface.
    pub(crate) mac: Option<[u8; 6]>,
    /// VLANs whose frames the guest gets; none: all.
    pub(crate) vlans: Vec<u16>,
    /// Offloads offered to the guest.
    pub(crate) offload: Offloads,
    /// Features offered because somebody asked for them.
    pub(crate) offer: OnRequest,
    /// How much the guest may send and get, at first.
    pub(crate) rates: PortRates,
}

impl PortConfig {
    /// The descriptors that are to be inherited for this port.
    pub(crate) fn descriptors(&self) -> Vec<Inherited> {
        let mut descriptors = self.external.descriptors();
        if let Endpoint::Fd(fd) = self.endpoint {
            descriptors.push(Inherited { option: "fd", fd });
        }
        descriptors
    }

    /// What is to be leased, and which frames of it; `None` without an interface.
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
            mode: self.mode(queues),
            filter: steer::Filter {
                macs: self.mac.into_iter().collect(),
                vlans,
            },
            network: false,
        })
    }

    /// The mode that is asked for.
    fn mode(&self, queues: &PortQueues) -> ModeRequest {
        let has_only_xdp = self.nic.network().is_some()
            || self.placement.has_guest_ram()
            || self.has_external_program()
            || asks_for_xdp(queues.bind, self.hints, self.busy_poll);
        mode_where(has_only_xdp, queues.mode)
    }

    /// Memory that is locked for its queues while it copies, bytes.
    pub(crate) fn copy_bytes(&self) -> u64 {
        let bytes = |queues: &PortQueues| match queues.mode {
            ModeRequest::Tap => to_send_only(self.packet_bytes),
            _ => self.packet_bytes,
        };
        u64::from(self.queues) * u64::from(self.nic.queues().map_or(0, bytes))
    }

    /// By what its guest's frames are judged, where no network does that.
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

    /// Offloads that are possible and not offered, by name.
    pub(crate) fn offloads_off(&self) -> Vec<&'static str> {
        offloads_of(self.placement).without(self.offload).names()
    }

    /// Whether its queues can have their memory in one UMEM with those of other ports; all others have their own.
    pub(crate) fn can_share(&self) -> bool {
        self.placement == Placement::Copy && matches!(self.nic, NicConfig::Interface(_))
    }

    /// Whether it comes with sockets or a map of somebody else's.
    pub(crate) fn has_external_program(&self) -> bool {
        self.external != ExternalProgram::None
    }

    /// Whether its AF_XDP sockets are made by this process.
    pub(crate) fn opens_sockets(&self) -> bool {
        self.has_external_program() && !matches!(self.external, ExternalProgram::Sockets(_))
    }
}
