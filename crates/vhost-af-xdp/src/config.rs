//! What `serve` was asked for, checked: ports and workers.

pub(crate) mod build;
mod check;
mod error;
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
use steward::policy::Queues;

pub(crate) use self::error::{Owner, Wrong};
pub(crate) use self::hints::HintsConfig;
pub(crate) use self::network::{NetworkConfig, UplinkConfig};
pub(crate) use self::port::{
    Endpoint, ExternalProgram, Inherited, MemberVlans, MemoryRules, NicConfig, PortConfig, PortQueues,
};
use crate::listener::Access;
use crate::switch::polling::Waits;
use program::sandbox::{Layers, User};

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
    /// Options of the daemon, of the command line and of the file.
    pub(crate) keys: Daemon,
    /// Those of the command line, beside a file.
    pub(crate) options: Daemon,
    /// The ports; without a file at least one.
    pub(crate) ports: Vec<PortConfig>,
    /// Networks that ports name.
    pub(crate) networks: Vec<NetworkConfig>,
    /// Worker threads.
    pub(crate) workers: usize,
    /// CPUs to pin them to, round robin; empty: none.
    pub(crate) cpus: Vec<usize>,
    /// What a worker does that has no work, before it sleeps.
    pub(crate) waits: Waits,
    /// Where the steward listens that queues are leased from; `None`: from a private one
    /// ([`helper`](crate::supervision::helper)).
    pub(crate) steward: Option<PathBuf>,
    /// How long a steward is waited for.
    pub(crate) steward_timeout: Duration,
    /// Where `status` finds us.
    pub(crate) control: Control,
    /// Where HTTP is answered.
    pub(crate) api: ApiConfig,
    /// Where ports are kept that are added at run time.
    pub(crate) state: Option<PathBuf>,
    /// What the process is confined by.
    pub(crate) layers: Layers,
    /// Whom it becomes; `None`: it stays who it is, or becomes nobody if that is root.
    pub(crate) user: Option<User>,
}

/// Where HTTP is answered ([`process`](crate::api::gateway)).
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

    /// Whether clients can change ports while the daemon runs.
    pub(crate) fn can_change(&self) -> bool {
        self.api.all.is_some() || self.control != Control::Nowhere
    }

    /// Whether a port was added at run time, by an earlier daemon.
    pub(crate) fn is_added_port(&self, name: &str) -> bool {
        let mut added = self.file.iter().flat_map(|file| &file.added.ports);
        added.any(|port| port.name == name)
    }

    /// Where sockets may be made later on.
    pub(crate) fn socket_directories(&self) -> Vec<PathBuf> {
        socket_directories(&self.ports, self.file.as_ref())
            .into_iter()
            .collect()
    }

    /// Frames that one poll of the driver may handle, if any port's sockets are to poll it.
    pub(crate) fn busy_poll_budget(&self) -> Option<u16> {
        let budgets = self.ports.iter().filter_map(|port| port.busy_poll);
        budgets
            .map(|poll| poll.budget.try_into().unwrap_or(u16::MAX))
            .max()
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
