//! Options of `serve`, and the configuration that they mean together.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;

use super::api::ApiArgs;
use super::memory;
use super::port::{AllPortsArgs, PortArgs};
use super::values::{CpuList, check_cpus, parse_cpus};
use crate::config::{Control, Endpoint, PortConfig, ServeConfig};
use crate::sandbox::{Layer, Layers, User};

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    first: PortArgs,
    #[command(flatten)]
    all: AllPortsArgs,
    /// A further guest: KEY=VALUE pairs of socket-path, fd, client, ifname, cable, queues, start-queue, memory,
    /// packet-memory, max-memory, memory-files, mac, vlan, offload, offer (lists joined by `+` here), and of --inhibit
    /// and its companions; what is missing comes from the options above. May be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    port: Vec<String>,
    /// Worker threads [default: one a queue pair, at most one a CPU]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// CPUs to pin workers to, for instance 2,3 or 4-7
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    cpus: Option<CpuList>,
    /// How long a worker polls without work before it sleeps, at most: less while pauses are longer
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    spin_us: u64,
    /// Lease queues from the steward that listens there, instead of making programs and sockets:
    /// no privilege is needed then. How much memory may be pinned its policy says
    #[arg(long, value_name = "PATH")]
    steward: Option<PathBuf>,
    /// How long a steward may take for an answer
    #[arg(long, value_name = "SECONDS", default_value_t = 10, hide = true)]
    steward_timeout: u64,
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
    /// some: a `-` before each
    #[arg(long, value_name = "LIST", default_value = "all", allow_hyphen_values = true)]
    sandbox: String,
}

impl ServeArgs {
    /// The configuration that these options mean.
    /// Errors: one line, naming the option.
    pub(crate) fn into_config(self) -> anyhow::Result<ServeConfig> {
        let mut ports = Vec::new();
        let is_port = self.first.socket_path.is_some() || self.first.fd.is_some();
        let count = self.port.len() + usize::from(is_port);
        let together = self.first.packet_memory;
        for text in &self.port {
            let port = self.first.with(text).and_then(|port| {
                if self.all.shared_umem && port.packet_memory != together {
                    bail!(
                        "packet-memory: with --shared-umem it is for all ports together: say it once, with \
                         --packet-memory"
                    );
                }
                port.build(&self.all, count)
            });
            ports.push(port.with_context(|| format!("--port {text}"))?);
        }
        let access = self.first.access.given();
        if is_port {
            ports.insert(0, self.first.build(&self.all, count)?);
        }
        let makes_one = |port: &PortConfig| matches!(port.endpoint, Endpoint::Server(_));
        if let Some(option) = access.filter(|_| !ports.iter().any(makes_one)) {
            bail!("--{option}: the socket is not made here: leave it out with --client and --fd");
        }
        if self.all.shared_umem && !ports.is_empty() {
            memory::share(&mut ports, together)?;
        }
        if ports.is_empty() {
            bail!("no socket: name one with --socket-path PATH, --fd FDNUM or --port socket-path=PATH");
        }
        let pairs: usize = ports.iter().map(|port| usize::from(port.queues)).sum();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = self.workers.unwrap_or_else(|| pairs.clamp(1, cpus));
        if !(1..=256).contains(&workers) {
            bail!("--workers {workers}: 1 to 256 threads");
        }
        let control = match self.control {
            None => Control::Usual,
            Some(path) if path.as_os_str() == "none" => Control::Nowhere,
            Some(path) => Control::At(path),
        };
        let layers = Layers::parse(&self.sandbox)?;
        if let Some(user) = self.user.as_deref().filter(|_| !layers.has(Layer::User)) {
            bail!(
                "--user {user} with --sandbox {}, which leaves the user as it is: add `user` there",
                self.sandbox
            );
        }
        let cpus = self.cpus.map_or_else(Vec::new, |list| list.0);
        check_cpus(&cpus)?;
        Ok(ServeConfig {
            ports,
            workers,
            cpus,
            spin: Duration::from_micros(self.spin_us),
            steward: self.steward,
            steward_timeout: Duration::from_secs(self.steward_timeout),
            control,
            api: self.api.into_config()?,
            layers,
            user: self.user.as_deref().map(User::parse).transpose()?,
        })
    }
}
