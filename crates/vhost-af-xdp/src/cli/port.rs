//! Options of one port: those of `serve`, and what its `--port` says otherwise.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use clap::ValueEnum;
use steer::ModeRequest;
use steward::protocol::is_interface_name;

use super::access::AccessArgs;
use super::bring::BringArgs;
use super::memory::MemoryArgs;
use super::offload;
use super::values::{VlanList, on_off, parse_mac, parse_vlans};
use crate::config::{Endpoint, NicConfig, Placement, PortConfig, Segments};

/// See the module's head.
pub(super) struct PortOptions {
    pub(super) socket_path: Option<PathBuf>,
    pub(super) fd: Option<i32>,
    pub(super) access: AccessArgs,
    pub(super) client: bool,
    pub(super) ifname: Option<String>,
    pub(super) cable: Option<String>,
    pub(super) null: bool,
    pub(super) frame_size: u32,
    pub(super) queues: u16,
    pub(super) start_queue: u32,
    pub(super) mode: ModeRequest,
    pub(super) force_copy: bool,
    pub(super) memory: Placement,
    pub(super) memory_rules: MemoryArgs,
    pub(super) segments: Segments,
    pub(super) mac: Option<[u8; 6]>,
    pub(super) vlans: VlanList,
    pub(super) offload: String,
    pub(super) bring: BringArgs,
}

impl PortOptions {
    /// Takes what a `--port` says.
    ///
    /// # Errors
    /// One line, naming the key.
    pub(super) fn apply(&mut self, text: &str) -> anyhow::Result<()> {
        let mut own_access = None;
        for pair in text.split(',') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, "on"));
            let number = |what| anyhow!("{key}={value}: {what}");
            match key {
                "socket-path" => self.socket_path = Some(value.into()),
                "fd" => self.fd = Some(value.parse().map_err(|_| number("a descriptor number"))?),
                "client" => self.client = on_off(value).ok_or_else(|| number("on or off"))?,
                "ifname" => (self.ifname, self.cable, self.null) = (Some(value.to_owned()), None, false),
                "cable" => (self.ifname, self.cable, self.null) = (None, Some(value.to_owned()), false),
                "queues" => self.queues = value.parse().map_err(|_| number("1 to 128"))?,
                "start-queue" => self.start_queue = value.parse().map_err(|_| number("a queue number"))?,
                "memory" => {
                    self.memory = Placement::from_str(value, false).map_err(|_| number("copy or direct"))?;
                }
                "mac" => self.mac = Some(parse_mac(value).map_err(anyhow::Error::msg)?),
                "vlan" => self.vlans = parse_vlans(&value.replace('+', ",")).map_err(anyhow::Error::msg)?,
                "offload" => value.clone_into(&mut self.offload),
                _ if self.access.apply(key, value) => own_access = Some(key),
                _ if self.memory_rules.apply(key, value)? || self.bring.apply(key, value)? => {}
                _ => bail!(
                    "unknown key {key:?}: one of socket-path, fd, client, ifname, cable, queues, start-queue, memory, mac, vlan, offload, {}, {}, {}",
                    AccessArgs::KEYS,
                    MemoryArgs::KEYS,
                    BringArgs::KEYS
                ),
            }
        }
        if let Some(key) = own_access.filter(|_| self.client || self.fd.is_some()) {
            bail!("{key}: the socket is not made here: leave it out with client and fd");
        }
        Ok(())
    }

    /// For one of so many ports.
    ///
    /// # Errors
    /// One line, naming the option.
    pub(super) fn build(self, ports: usize) -> anyhow::Result<PortConfig> {
        let endpoint = match (self.socket_path, self.fd) {
            (Some(path), None) if self.client => Endpoint::Client(path),
            (Some(path), None) => Endpoint::Server(path),
            (None, Some(_)) if self.client => bail!("client goes with socket-path, not with fd"),
            (None, Some(fd)) => Endpoint::Fd(fd),
            (Some(_), Some(_)) => bail!("socket-path and fd exclude each other: give one"),
            (None, None) => bail!("no socket-path and no fd: give one"),
        };
        let nic = match (self.ifname, self.cable, self.null) {
            (None, Some(name), _) => NicConfig::Cable { name },
            (Some(name), ..) if !is_interface_name(&name) => bail!(
                "--ifname {name:?}: no interface can have this name: 1 to 15 bytes, no `/`, `:` or blank (`ip link` lists them)"
            ),
            (Some(name), ..) => NicConfig::Interface {
                name,
                start_queue: self.start_queue,
                mode: self.mode,
                force_copy: self.force_copy,
            },
            (None, None, true) => NicConfig::Null {
                frame_bytes: self.frame_size,
            },
            (None, None, false) => {
                bail!("no interface: name one with --ifname NAME, or give --cable NAME or --null for none")
            }
        };
        // What is named must be possible (config.rs), `all` means what is.
        let offload = offload::parse(&self.offload, self.memory.offloads())
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("--offload {}", self.offload))?;
        Ok(PortConfig {
            access: self.access.build()?,
            endpoint,
            queues: self.queues,
            nic,
            bring: self.bring.build()?,
            placement: self.memory,
            memory: self.memory_rules.build(ports),
            segments: self.segments,
            mac: self.mac,
            vlans: self.vlans.0,
            offload,
        })
    }
}
