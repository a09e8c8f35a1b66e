//! Options of the daemon as a whole: those of the command line, and what `[daemon]` of a file says where they do not.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::Args;

use super::api::ApiArgs;
use super::values::{CpuList, check_cpus, parse_cpus};
use crate::config::{Control, PortConfig, ServeConfig};
use crate::sandbox::{Layer, Layers, User};
use crate::switch::polling::Waits;

/// How long a worker polls without work before it sleeps, microseconds.
const SPIN_US: u64 = 50;
/// How long it lets frames of busy guests gather, microseconds.
const MODERATION_US: u64 = 800;
/// As long as that at most: a millisecond is what a frame waits that nothing tells of.
const MOST_MODERATION_US: u64 = 1000;
/// How long a steward may take, seconds.
const STEWARD_TIMEOUT: u64 = 10;

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DaemonArgs {
    /// Worker threads [default: one a queue pair, at most one for two CPUs, or one for each of --cpus]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// CPUs to pin workers to, for instance 2,3 or 4-7
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    cpus: Option<CpuList>,
    /// How long a worker polls without work before it sleeps, at most: less while pauses are longer
    /// [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    spin_us: Option<u64>,
    /// How long a worker lets frames of guests that send or get much gather before it looks again, at most, and where
    /// that brings more through, as NICs do with their interrupts; 0: never [default: 800]
    #[arg(long, value_name = "MICROSECONDS")]
    moderation_us: Option<u64>,
    /// Lease queues from the steward that listens there, instead of making programs and sockets:
    /// no privilege is needed then. How much memory may be pinned its policy says
    #[arg(long, value_name = "PATH")]
    steward: Option<PathBuf>,
    /// How long a steward may take for an answer
    #[arg(long, value_name = "SECONDS", hide = true)]
    steward_timeout: Option<u64>,
    /// Where `status` finds this daemon; `none` for nowhere [default: PID.sock in /run/vhost-af-xdp, for other users
    /// than root in $XDG_RUNTIME_DIR/vhost-af-xdp, /run/user/UID/vhost-af-xdp or /tmp/vhost-af-xdp-UID]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    #[command(flatten)]
    api: ApiArgs,
    /// User to become, a name, or UID or UID:GID in numbers, once sockets are bound [default: nobody, if started by
    /// root]
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// What confines this process: all, off, only some of user, mounts, network, capabilities, files, calls, or all but
    /// some: a `-` before each [default: all]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    sandbox: Option<String>,
}

impl DaemonArgs {
    /// These, and what they do not say as the others have it.
    pub(super) fn or(self, others: Self) -> Self {
        Self {
            workers: self.workers.or(others.workers),
            cpus: self.cpus.or(others.cpus),
            spin_us: self.spin_us.or(others.spin_us),
            moderation_us: self.moderation_us.or(others.moderation_us),
            steward: self.steward.or(others.steward),
            steward_timeout: self.steward_timeout.or(others.steward_timeout),
            control: self.control.or(others.control),
            api: self.api.or(others.api),
            user: self.user.or(others.user),
            sandbox: self.sandbox.or(others.sandbox),
        }
    }

    /// What they mean together, for these ports.
    /// Errors: one line, naming the option.
    pub(super) fn build(self, ports: Vec<PortConfig>) -> anyhow::Result<ServeConfig> {
        let cpus = self.cpus.map_or_else(Vec::new, |list| list.0);
        check_cpus(&cpus)?;
        let pairs: usize = ports.iter().map(|port| usize::from(port.queues)).sum();
        let usable = match cpus.len() {
            // The other half is for guests: where they have all CPUs, further workers take from them what they add.
            0 => std::thread::available_parallelism().map_or(1, |all| usize::from(all).div_ceil(2)),
            named => named,
        };
        let workers = self.workers.unwrap_or_else(|| pairs.clamp(1, usable));
        if !(1..=256).contains(&workers) {
            bail!("--workers {workers}: 1 to 256 threads");
        }
        let moderation_us = self.moderation_us.unwrap_or(MODERATION_US);
        if moderation_us > MOST_MODERATION_US {
            bail!("--moderation-us {moderation_us}: {MOST_MODERATION_US} at most, and 0 for never");
        }
        let control = match self.control {
            None => Control::Usual,
            Some(path) if path.as_os_str() == "none" => Control::Nowhere,
            Some(path) => Control::At(path),
        };
        let sandbox = self.sandbox.as_deref().unwrap_or("all");
        let layers = Layers::parse(sandbox)?;
        if let Some(user) = self.user.as_deref().filter(|_| !layers.has(Layer::User)) {
            bail!("--user {user} with --sandbox {sandbox}, which leaves the user as it is: add `user` there");
        }
        Ok(ServeConfig {
            file: None,
            ports,
            networks: Vec::new(),
            workers,
            cpus,
            waits: Waits {
                spin: Duration::from_micros(self.spin_us.unwrap_or(SPIN_US)),
                moderation: Duration::from_micros(moderation_us),
            },
            steward: self.steward,
            steward_timeout: Duration::from_secs(self.steward_timeout.unwrap_or(STEWARD_TIMEOUT)),
            control,
            api: self.api.into_config()?,
            layers,
            user: self.user.as_deref().map(User::parse).transpose()?,
        })
    }
}
