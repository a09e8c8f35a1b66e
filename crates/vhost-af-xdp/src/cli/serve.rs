//! Options of `serve`, and the configuration that they mean together.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use steward::log::LogArgs;

use super::daemon::DaemonArgs;
use super::file;
use super::memory;
use super::port::{AllPortsArgs, PortArgs};
use crate::config::{Endpoint, PortConfig, ServeConfig};

/// Options that say something of ports: a file has all of that.
pub(super) const OF_PORTS: [&str; 51] = [
    "port",
    "socket_path",
    "fd",
    "socket_owner",
    "socket_group",
    "socket_mode",
    "client",
    "ifname",
    "cable",
    "queues",
    "start_queue",
    "inhibit",
    "sock_fds",
    "map_path",
    "map_fd",
    "map_start_index",
    "map_layout",
    "afxdp_plugin",
    "memory",
    "packet_memory",
    "max_memory",
    "memory_files",
    "mac",
    "vlan",
    "guard",
    "ips",
    "router",
    "dhcp_server",
    "offload",
    "offer",
    "from_guest_bits",
    "from_guest_bits_burst",
    "from_guest_packets",
    "from_guest_packets_burst",
    "to_guest_bits",
    "to_guest_bits_burst",
    "to_guest_packets",
    "to_guest_packets_burst",
    "rule",
    "from_guest_default",
    "to_guest_default",
    "null",
    "frame_size",
    "mode",
    "force_copy",
    "force_zero_copy",
    "segments",
    "shared_umem",
    "busy_poll_us",
    "busy_poll_budget",
    "hints",
];

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Read the ports from this file (TOML, docs/config.md) instead of the options; SIGHUP and `reload` read it again
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_PORTS)]
    config: Option<PathBuf>,
    /// Print how the file is understood, and exit
    #[arg(long)]
    pub(crate) check: bool,
    #[command(flatten)]
    first: PortArgs,
    #[command(flatten)]
    all: AllPortsArgs,
    /// A further guest: KEY=VALUE pairs of socket-path, fd, client, ifname, cable, queues, start-queue, memory,
    /// packet-memory, max-memory, memory-files, mac, vlan, guard, ips, router, dhcp-server, offload, offer (lists
    /// joined by `+` here), the limits, the rules (lists of ports joined by `+`), and of --inhibit and its companions;
    /// what is missing comes from the options above. May be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    port: Vec<String>,
    #[command(flatten)]
    daemon: DaemonArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

impl ServeArgs {
    /// The configuration that these options mean.
    /// Errors: one line, naming the option.
    pub(crate) fn into_config(self) -> anyhow::Result<ServeConfig> {
        if let Some(path) = &self.config {
            return Ok(file::configured(file::read(path)?, self.daemon)?);
        }
        if self.check {
            bail!("--check goes with --config FILE: it shows how a file is understood");
        }
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
        self.daemon.build(ports)
    }
}
