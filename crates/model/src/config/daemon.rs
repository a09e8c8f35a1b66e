//! Options of the daemon as a whole.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::table::{Table, options};
use super::values::{Account, Cpus, Words};

options! {
    /// Options of the daemon: those of the command line, and `[daemon]` of a file.
    Daemon {
        /// Threads, sockets and confinement.
        process: Process,
        /// HTTP sockets.
        api: Api,
    }
}

impl Daemon {
    /// These options; where one is not set, that of `other`.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let mut keys = other.keys();
        keys.extend(self.keys());
        // Cannot fail: both were read from such keys.
        Self::read(keys).unwrap_or_default()
    }
}

/// Threads, sockets and confinement of the daemon.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Process {
    /// Worker threads [default: one for each queue pair, at most one for two CPUs, or one for each of --cpus]
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// CPUs to pin workers to, for instance 2,3 or 4-7
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<Cpus>,
    /// Most microseconds that a worker polls without work before it sleeps; fewer after long pauses [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    pub spin_us: Option<u64>,
    /// Most microseconds that frames of busy guests are delayed, so that more move at once; 0: never
    /// [default: 800]
    #[arg(long, value_name = "MICROSECONDS")]
    pub moderation_us: Option<u64>,
    /// Lease queues from the steward at this socket, instead of opening them: the daemon needs no privileges.
    /// The steward's policy limits the memory that may be pinned
    #[arg(long, value_name = "PATH")]
    pub steward: Option<PathBuf>,
    /// Seconds to wait for an answer of the steward [default: 10]
    #[arg(long, value_name = "SECONDS", hide = true)]
    pub steward_timeout: Option<u64>,
    /// Control socket for `status`, `port`, `reload` and others; `none`: no socket [default: PID.sock in
    /// /run/vhost-af-xdp, for other users than root in $XDG_RUNTIME_DIR/vhost-af-xdp, /run/user/UID/vhost-af-xdp or
    /// /tmp/vhost-af-xdp-UID]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Run as this user, a name, UID or UID:GID, once sockets are bound [default: nobody, if started by
    /// root]
    #[arg(long, value_name = "USER")]
    pub user: Option<Account>,
    /// Sandbox layers: all, off, only some of user, mounts, network, capabilities, files, calls, or all but
    /// some: a `-` before each [default: all]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub sandbox: Option<Words>,
    /// File that saves networks and ports added at run time for the next start of the daemon [default: they
    /// end with the daemon]
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// End the daemon when no VMM has been connected for so many seconds [default: never]
    #[arg(long, value_name = "SECONDS")]
    pub idle_timeout: Option<NonZeroU32>,
    /// Directories allowed for sockets of ports that are added later, besides those of the ports that the
    /// daemon starts with; with `/*` at the end: all directories in that directory
    #[arg(skip)]
    pub socket_directories: Vec<PathBuf>,
}

/// HTTP sockets, and who may connect to them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Api {
    /// Serve HTTP on this Unix socket: status, ports, counters, events, metrics (docs/api.md)
    #[arg(long, value_name = "PATH")]
    pub api: Option<PathBuf>,
    /// Owner of the sockets of --api and --api-read-only [default: the user that starts the daemon]
    #[arg(long, value_name = "USER")]
    pub api_owner: Option<Account>,
    /// Group that may connect to the socket of --api [default: none]
    #[arg(long, value_name = "GROUP")]
    pub api_group: Option<Account>,
    /// Permissions of the socket of --api, octal [default: 600, with --api-group 660]
    #[arg(long, value_name = "MODE")]
    pub api_mode: Option<String>,
    /// Serve read-only HTTP on another Unix socket, for monitoring
    #[arg(long, value_name = "PATH")]
    pub api_read_only: Option<PathBuf>,
    /// Group that may connect to the socket of --api-read-only [default: none]
    #[arg(long, value_name = "GROUP")]
    pub api_read_only_group: Option<Account>,
    /// Permissions of the socket of --api-read-only, octal [default: 600, with --api-read-only-group 660]
    #[arg(long, value_name = "MODE")]
    pub api_read_only_mode: Option<String>,
    /// Serve only /metrics by TCP, without a password, to all clients that can connect, for instance
    /// 127.0.0.1:9419
    #[arg(long, value_name = "ADDRESS:PORT")]
    #[schemars(with = "Option<String>")]
    pub metrics: Option<SocketAddr>,
}
