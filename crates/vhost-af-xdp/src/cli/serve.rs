//! Options of `serve`, and the configuration that they mean together.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use steer::ModeRequest;

use super::access::AccessArgs;
use super::bring::BringArgs;
use super::memory::MemoryArgs;
use super::port::PortOptions;
use super::values::{CpuList, VlanList, check_cpus, parse_cpus, parse_mac, parse_vlans};
use crate::config::{Control, Endpoint, Placement, PortConfig, Segments, ServeConfig};
use crate::sandbox::{Layers, User};

/// How the steering program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// In the driver
    Native,
    /// In the stack, after the driver; works with every driver
    Skb,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// vhost-user socket to listen on (with --client: to connect to)
    #[arg(long, value_name = "PATH")]
    pub(super) socket_path: Option<PathBuf>,
    /// Inherited descriptor instead of a path: a listening socket, or a connected one
    #[arg(long, value_name = "FDNUM", conflicts_with = "socket_path")]
    pub(super) fd: Option<i32>,
    #[command(flatten)]
    pub(super) access: AccessArgs,
    /// Connect to the VMM, which listens, and again after a disconnect
    #[arg(long)]
    pub(super) client: bool,
    /// Network interface that the frames go to and come from
    #[arg(long, value_name = "NAME")]
    pub(super) ifname: Option<String>,
    /// Join two ports of this process: frames of one's guest go to the other's. Both name it
    #[arg(long, value_name = "NAME", conflicts_with = "ifname")]
    pub(super) cable: Option<String>,
    /// No interface: frames are made and dropped in this process (to measure the virtqueue path)
    #[arg(long, conflicts_with_all = ["ifname", "cable"])]
    pub(super) null: bool,
    /// Length of the frames that --null makes; 0: none
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    pub(super) frame_size: u32,
    /// Queue pairs, each on a queue of the interface
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) queues: u16,
    /// First queue of the interface
    #[arg(long, value_name = "M", default_value_t = 0)]
    pub(super) start_queue: u32,
    /// How to attach the XDP program [default: native, skb where the driver cannot]
    #[arg(long, value_enum)]
    pub(super) mode: Option<ModeArg>,
    /// Never use the driver's zero-copy mode
    #[arg(long)]
    pub(super) force_copy: bool,
    #[command(flatten)]
    pub(super) bring: BringArgs,
    /// Where frames lie: memory of the daemon, or the guest's own RAM (pins all of it; no
    /// ballooning, no overcommit, no postcopy)
    #[arg(long, value_enum, default_value = "copy")]
    pub(super) memory: Placement,
    #[command(flatten)]
    pub(super) memory_rules: MemoryArgs,
    /// How segments of the guest's GSO packets leave
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) segments: Segments,
    /// MAC address told to the guest, which then gets frames to this station and to groups only; others go to the host
    /// [default: made from socket and interface, the same each time, and all frames of the queues are the guest's]
    #[arg(long, value_parser = parse_mac)]
    pub(super) mac: Option<[u8; 6]>,
    /// VLANs whose frames the guest gets, for instance 100,200-203; 0: untagged ones [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_vlans)]
    pub(super) vlan: Option<VlanList>,
    /// Work that the guest may leave to us, and we to it: all that --memory can do, none, only some of csum,
    /// tso4, tso6, ecn, uso, guest-csum, guest-tso4, guest-tso6, guest-ecn, guest-uso4, guest-uso6, or all but
    /// some: a `-` before each
    #[arg(long, value_name = "LIST", default_value = "all", allow_hyphen_values = true)]
    pub(super) offload: String,
    /// A further guest: KEY=VALUE pairs of socket-path, fd, client, ifname, cable, queues, start-queue, memory,
    /// max-memory, memory-files, mac, vlan, offload (lists joined by `+` here), and of --inhibit and its companions; what is missing comes from the options
    /// above. May be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(super) port: Vec<String>,
    /// Worker threads [default: one a queue pair, at most one a CPU]
    #[arg(long, value_name = "N")]
    pub(super) workers: Option<usize>,
    /// CPUs to pin workers to, for instance 2,3 or 4-7
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    pub(super) cpus: Option<CpuList>,
    /// How long a worker polls without work before it sleeps, at most: less while pauses are longer
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    pub(super) spin_us: u64,
    /// Lease queues from the steward that listens there, instead of making programs and sockets:
    /// no privilege is needed then. Packet memory counts as locked memory
    #[arg(long, value_name = "PATH")]
    pub(super) steward: Option<PathBuf>,
    /// How long a steward may take for an answer
    #[arg(long, value_name = "SECONDS", default_value_t = 10, hide = true)]
    pub(super) steward_timeout: u64,
    /// Where `status` finds this daemon; `none` for nowhere [default: PID.sock in /run/vhost-af-xdp, for other users
    /// than root in $XDG_RUNTIME_DIR/vhost-af-xdp, /run/user/UID/vhost-af-xdp or /tmp/vhost-af-xdp-UID]
    #[arg(long, value_name = "PATH")]
    pub(super) control: Option<PathBuf>,
    /// User to become, a name, or UID or UID:GID in numbers, once sockets are bound [default: nobody, if started by root]
    #[arg(long, value_name = "USER")]
    pub(super) user: Option<String>,
    /// What confines this process: all, off, only some of user, mounts, network, capabilities, files, calls, or all but
    /// some: a `-` before each
    #[arg(long, value_name = "LIST", default_value = "all", allow_hyphen_values = true)]
    pub(super) sandbox: String,
    /// Try something forbidden from within the sandbox, say what came of it, and end
    #[arg(long, hide = true)]
    pub(super) sandbox_attempt: Option<String>,
}

impl ServeArgs {
    /// The configuration that these options mean.
    ///
    /// # Errors
    /// One line, naming the option.
    pub(crate) fn into_config(self) -> anyhow::Result<ServeConfig> {
        let mut ports = Vec::new();
        let of_its_own = self.socket_path.is_some() || self.fd.is_some();
        let count = self.port.len() + usize::from(of_its_own);
        if of_its_own {
            ports.push(PortOptions::from(&self).build(count)?);
        }
        for text in &self.port {
            let mut options = PortOptions::from(&self);
            (options.socket_path, options.fd) = (None, None);
            options.apply(text).with_context(|| format!("--port {text}"))?;
            ports.push(options.build(count).with_context(|| format!("--port {text}"))?);
        }
        let makes_one = |port: &PortConfig| matches!(port.endpoint, Endpoint::Server(_));
        if let Some(option) = self.access.given().filter(|_| !ports.iter().any(makes_one)) {
            bail!("--{option}: the socket is not made here: leave it out with --client and --fd");
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
        if let Some(user) = self.user.as_deref().filter(|_| !layers.user) {
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
            layers,
            user: self.user.as_deref().map(User::parse).transpose()?,
            attempt: self.sandbox_attempt,
        })
    }
}

impl From<&ServeArgs> for PortOptions {
    fn from(args: &ServeArgs) -> Self {
        Self {
            socket_path: args.socket_path.clone(),
            fd: args.fd,
            access: args.access.clone(),
            client: args.client,
            ifname: args.ifname.clone(),
            cable: args.cable.clone(),
            null: args.null,
            frame_size: args.frame_size,
            queues: args.queues,
            start_queue: args.start_queue,
            mode: match args.mode {
                None => ModeRequest::Auto,
                Some(ModeArg::Native) => ModeRequest::Native,
                Some(ModeArg::Skb) => ModeRequest::Skb,
            },
            force_copy: args.force_copy,
            memory: args.memory,
            memory_rules: args.memory_rules.clone(),
            segments: args.segments,
            mac: args.mac,
            vlans: args.vlan.clone().unwrap_or_default(),
            offload: args.offload.clone(),
            bring: args.bring.clone(),
        }
    }
}
