//! The checked configuration of `serve`: ports, networks and workers.

pub(crate) mod build;
mod check;
pub(crate) mod file;
mod hints;
mod network;
mod offload;
mod port;
pub(crate) mod state;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::config::{ConfigFile, Daemon};
pub(crate) use model::config::{FileKinds, Placement, Segments};
use serde::{Deserialize, Serialize};

pub(crate) use self::check::{Owner, Taken};
pub(crate) use self::hints::HintsConfig;
pub(crate) use self::network::{NetworkConfig, UnderlayConfig, UplinkConfig};
pub(crate) use self::port::{
    Endpoint, ExternalProgram, Inherited, InterfaceQueues, MemoryRules, NicConfig, PortConfig, QueueOptions,
};
use crate::listener::Access;
pub(crate) use dataplane::fdb::vlans::Vlans as MemberVlans;
use dataplane::worker::polling::Waits;
use program::sandbox::{Layers, User};

/// Where `status` finds a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Control {
    None,
    /// The default path, where `status` finds it without an option.
    Default,
    /// The path of `--control`.
    Path(PathBuf),
}

/// Everything `serve` runs.
#[derive(Debug, Clone)]
pub(crate) struct ServeConfig {
    /// The configuration file, if there is one.
    pub(crate) file: Option<ConfigFile>,
    /// Options of the daemon, from the command line and the file.
    pub(crate) keys: Daemon,
    /// Options of the command line, if there is a file.
    pub(crate) options: Daemon,
    /// The ports; without a file at least one.
    pub(crate) ports: Vec<PortConfig>,
    /// What the ports of a file have.
    pub(crate) taken: Taken,
    /// Networks that ports name.
    pub(crate) networks: Vec<NetworkConfig>,
    /// Worker threads.
    pub(crate) workers: usize,
    /// CPUs to pin them to, round robin; empty: none.
    pub(crate) cpus: Vec<usize>,
    /// How long an idle worker polls before it sleeps, and how long it lets frames of busy guests gather.
    pub(crate) waits: Waits,
    /// The socket of the steward that leases queues; `None`: a private one
    /// ([`helper`](crate::supervision::helper)).
    pub(crate) steward: Option<PathBuf>,
    /// How long the daemon waits for a steward.
    pub(crate) steward_timeout: Duration,
    /// The control socket.
    pub(crate) control: Control,
    /// Sockets of the HTTP server.
    pub(crate) api: ApiConfig,
    /// The file that keeps networks and ports added at run time.
    pub(crate) state: Option<PathBuf>,
    /// Layers of the sandbox.
    pub(crate) layers: Layers,
    /// The user that the daemon becomes; `None`: it keeps its user, or becomes `nobody` if that is root.
    pub(crate) user: Option<User>,
}

/// Sockets of the HTTP server ([`gateway`](crate::api::gateway)).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ApiConfig {
    /// Socket with full access.
    pub(crate) all: Option<(PathBuf, Access)>,
    /// Socket with read access.
    pub(crate) read_only: Option<(PathBuf, Access)>,
    /// TCP address for metrics alone.
    pub(crate) metrics: Option<SocketAddr>,
}

/// Most bytes of guest memory of all ports together: each may be mapped twice while its table changes, and a process
/// has 128 TiB of address space (x86-64 and arm64 with tables of four levels).
pub(crate) const MOST_BYTES: u64 = 48 << 40;

/// Most queue pairs of a port: the steering program has room for no more.
pub(crate) const MOST_QUEUES: u16 = 128;

/// A range of queues of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Queues {
    pub(crate) interface: String,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl ServeConfig {
    /// Paths of the vhost-user sockets.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let paths = self.ports.iter().filter_map(|port| port.endpoint.path());
        paths.map(Path::to_owned).collect()
    }

    /// The queues to lease: of each port, then of each uplink.
    pub(crate) fn queues(&self) -> Vec<Queues> {
        let leased = self.ports.iter().filter(|port| !port.has_external_program());
        let uplinks = self.networks.iter().filter_map(|network| network.uplink.as_ref());
        let wanted = leased.filter_map(PortConfig::wanted);
        wanted
            .chain(uplinks.flat_map(UplinkConfig::all_wanted))
            .map(|wanted| Queues {
                interface: wanted.interface,
                first: wanted.start_queue,
                count: wanted.queues,
            })
            .collect()
    }

    /// Whether clients can change ports while the daemon runs.
    pub(crate) fn can_change(&self) -> bool {
        self.api.all.is_some() || self.control != Control::None
    }

    /// Whether a port was added at run time, by an earlier daemon.
    pub(crate) fn is_added_port(&self, name: &str) -> bool {
        let mut added = self.file.iter().flat_map(|file| &file.added.ports);
        added.any(|port| port.name == name)
    }

    /// Directories in which sockets may be created later.
    pub(crate) fn socket_directories(&self) -> Vec<PathBuf> {
        socket_directories(&self.ports, self.file.as_ref())
            .into_iter()
            .collect()
    }

    /// The largest budget (frames) of busy polling of any port; `None`: no port busy-polls.
    pub(crate) fn busy_poll_budget(&self) -> Option<u16> {
        let budgets = self.ports.iter().filter_map(|port| port.options.busy_poll);
        budgets
            .map(|poll| poll.budget.try_into().unwrap_or(u16::MAX))
            .max()
    }
}

/// A directory of `socket-directories` without `/*`.
pub(crate) fn listed(directory: &Path) -> &Path {
    match directory.parent() {
        Some(parent) if directory.ends_with("*") => parent,
        _ => directory,
    }
}

/// Whether a directory of `socket-directories` allows a socket: in it, or with `/*` in a directory there.
pub(crate) fn allows(directory: &Path, socket: &Path) -> bool {
    let (listed, parent) = (listed(directory), socket.parent());
    match listed == directory {
        true => parent == Some(listed),
        false => parent.and_then(Path::parent) == Some(listed),
    }
}

/// Directories of the sockets of these ports, and those that the file names.
fn socket_directories(ports: &[PortConfig], file: Option<&ConfigFile>) -> BTreeSet<PathBuf> {
    let parent = |port: &PortConfig| match &port.endpoint {
        Endpoint::Server(path) => path.parent().map(Path::to_owned),
        Endpoint::Client(_) | Endpoint::Fd(_) => None,
    };
    let named = file
        .iter()
        .flat_map(|file| &file.daemon.value.process.socket_directories);
    ports.iter().filter_map(parent).chain(named.cloned()).collect()
}
