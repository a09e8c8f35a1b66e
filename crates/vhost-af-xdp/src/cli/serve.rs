//! Options of `serve`, and the configuration that they describe.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use model::config::{Daemon, Port};
use program::log::LogArgs;

use crate::config::{Endpoint, PortConfig, ServeConfig, build, file};

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Read the ports from this file (TOML, docs/config.md) instead of the options; SIGHUP and `reload` read it again
    #[arg(long, value_name = "FILE", conflicts_with_all = Port::GROUPS.iter().copied())]
    config: Option<PathBuf>,
    /// Print the resulting configuration and whether it works on this host, and exit with 0 if it does, else with 1.
    /// Nothing is started or changed
    #[arg(long)]
    pub(crate) check: bool,
    /// Print whether it works on this host as JSON
    #[arg(long, requires = "check")]
    pub(crate) json: bool,
    #[command(flatten)]
    first: Port,
    /// One UMEM for all queue pairs with --memory copy, each with a slice of its own, registered once; --packet-memory
    /// is then their total [default: 6MiB, or 512KiB for each if that is more]. In copy mode only, and the
    /// kernel needs more memory than with a UMEM each: to save memory, a smaller --packet-memory alone is
    /// better
    #[arg(long, conflicts_with = "config")]
    shared_umem: bool,
    /// One more guest: keys of a port of the file, for instance socket-path=/run/b.sock,start-queue=1 (lists joined by
    /// `+` here); keys that are missing are taken from the options above. May be repeated
    #[arg(long, value_name = "KEY=VALUE,...", conflicts_with = "config")]
    port: Vec<String>,
    #[command(flatten)]
    daemon: Daemon,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

impl ServeArgs {
    /// The configuration that these options describe.
    /// Errors: one line, naming the option.
    pub(crate) fn into_config(self) -> anyhow::Result<ServeConfig> {
        if let Some(path) = &self.config {
            let (config, left_out) = file::at_start(path, &self.daemon)?;
            for wrong in left_out {
                tracing::error!("{wrong}; left out until a `reload` of a file that allows it");
            }
            return Ok(config);
        }
        if self.daemon.process.state.is_some() {
            bail!("--state needs --config FILE: without a file ports are fixed");
        }
        let first = &self.first.socket;
        let is_port = first.socket_path.is_some() || first.fd.is_some();
        let count = self.port.len() + usize::from(is_port);
        let mut ports = Vec::new();
        if is_port {
            ports.push(self.build(&self.first, count)?);
        }
        for text in &self.port {
            let port = self.first.with_words(text.split(','));
            let port = port.map_err(|mistake| anyhow::anyhow!(mistake.what));
            let port = port.and_then(|port| self.build(&port, count));
            ports.push(port.with_context(|| format!("--port {text}"))?);
        }
        let makes_one = |port: &PortConfig| matches!(port.endpoint, Endpoint::Server(_));
        if let Some(option) = build::access_option(first).filter(|_| !ports.iter().any(makes_one)) {
            bail!("--{option}: the daemon does not make this socket: leave it out with --client and --fd");
        }
        if ports.is_empty() {
            bail!("no socket: name one with --socket-path PATH, --fd FDNUM or --port socket-path=PATH");
        }
        if self.shared_umem {
            build::share(&mut ports, self.first.memory.packet_memory)?;
        }
        build::daemon(&self.daemon, ports)
    }

    fn build(&self, port: &Port, count: usize) -> anyhow::Result<PortConfig> {
        let mut port = port.clone();
        if self.shared_umem && port.memory.packet_memory != self.first.memory.packet_memory {
            bail!(
                "packet-memory: with --shared-umem it is for all ports together: give it once, as --packet-memory"
            );
        }
        if self.shared_umem {
            port.memory.packet_memory = None;
        }
        build::port(&port, count)
    }
}
