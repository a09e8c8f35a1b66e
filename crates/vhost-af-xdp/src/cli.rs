//! The command line. Options that QEMU's `-netdev af-xdp` has carry its names.

mod access;
mod bring;
mod memory;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use steer::{LAST_VLAN, ModeRequest};

use self::access::AccessArgs;
use self::bring::BringArgs;
use self::memory::MemoryArgs;
use crate::bench::BenchArgs;
use crate::control::config::{Endpoint, NicConfig, Placement, PortConfig, Segments, ServeConfig};
use crate::control::control_socket;
use crate::control::keeper::KeeperArgs;
use crate::data::offloads::Offloads;
use crate::sandbox::{Layers, User};

const EXAMPLES: &str = "\
Examples:
  One guest on queue 0 of eth1:
    vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1
  Its RAM as packet memory, two queue pairs on queues 4 and 5:
    vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1 --queues 2 --start-queue 4 --memory direct
  Two guests in one process:
    vhost-af-xdp serve --ifname eth1 --port socket-path=/run/a.sock --port socket-path=/run/b.sock,start-queue=1
  Two guests, and nothing else, on one wire:
    vhost-af-xdp serve --cable x --port socket-path=/run/a.sock --port socket-path=/run/b.sock
  The VMM is the server (QEMU: -chardev socket,path=/run/vm1.sock,server=on):
    vhost-af-xdp serve --socket-path /run/vm1.sock --client --ifname eth1
  Without privileges, by a lease of vhost-af-xdp-steward:
    vhost-af-xdp serve --socket-path /tmp/vm1.sock --ifname eth1 --steward /run/vhost-af-xdp/steward.sock
  No UDP segmentation:
    vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1 --offload -uso

The VMM must share its memory: QEMU with -object memory-backend-memfd,id=m,size=SIZE,share=on
-machine memory-backend=m; libvirt with <memoryBacking><access mode='shared'/></memoryBacking>.";

/// virtio-net over vhost-user, moved through AF_XDP sockets.
#[derive(Debug, Parser)]
#[command(name = "vhost-af-xdp", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// Print the kind of device as JSON and exit (QEMU's vhost-user backend conventions)
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve guests
    #[command(after_help = EXAMPLES)]
    Serve(Box<ServeArgs>),
    /// Show what running daemons do: modes, queues, counters, drops by reason
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Show who holds which NIC queue of this host: NAPI, interrupt, sockets, leases, rules, daemons
    #[command(after_help = QUEUES_EXAMPLES)]
    Queues(QueuesArgs),
    /// Measure raw AF_XDP sockets on an interface
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// What `serve` starts for what its sandbox keeps from it
    #[command(hide = true)]
    Keeper(KeeperArgs),
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Control socket of one daemon [default: all that are found]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Print JSON, one document for all daemons
    #[arg(long)]
    pub(crate) json: bool,
}

const STATUS_EXAMPLES: &str = "\
Examples:
  Every daemon (of this user; for root, of all users):
    vhost-af-xdp status
  Ports where no frames move although they should, with the reason:
    vhost-af-xdp status --json | jq '.[].ports[] | select(.impaired) | .endpoint, .impaired'";

const BENCH_EXAMPLES: &str = "\
Examples:
  What comes in at queue 0 of eth1:
    vhost-af-xdp bench rxdrop --ifname eth1 --duration 5
  What can be sent:
    vhost-af-xdp bench txonly --ifname eth1 --size 1514 --mode skb --json";

const QUEUES_EXAMPLES: &str = "\
Examples:
  Every queue of every interface in this network namespace:
    vhost-af-xdp queues
  Rates of one interface's, each second until Ctrl-C:
    vhost-af-xdp queues eth1 --watch";

#[derive(Debug, Args)]
pub(crate) struct QueuesArgs {
    /// Only this interface's
    #[arg(value_name = "IFNAME")]
    pub(crate) interface: Option<String>,
    /// Control socket of the one daemon to ask [default: all that are found]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Socket of the steward to ask for leases [default: /run/vhost-af-xdp/steward.sock, if one is there]
    #[arg(long, value_name = "PATH")]
    pub(crate) steward: Option<PathBuf>,
    /// Print JSON
    #[arg(long, conflicts_with = "watch")]
    pub(crate) json: bool,
    /// Show them again and again, with rates instead of counts
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_pause)]
    pub(crate) watch: Option<u64>,
}

/// Prints help where help was asked for; else what is wrong with the command line, in one line.
pub(crate) fn explain(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let said: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let said = said.join(" ");
    eprintln!(
        "vhost-af-xdp: {}; `vhost-af-xdp help` explains",
        said.trim_start_matches("error: ")
    );
    ExitCode::from(2)
}

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
    socket_path: Option<PathBuf>,
    /// Inherited descriptor instead of a path: a listening socket, or a connected one
    #[arg(long, value_name = "FDNUM", conflicts_with = "socket_path")]
    fd: Option<i32>,
    #[command(flatten)]
    access: AccessArgs,
    /// Connect to the VMM, which listens, and again after a disconnect
    #[arg(long)]
    client: bool,
    /// Network interface that the frames go to and come from
    #[arg(long, value_name = "NAME")]
    ifname: Option<String>,
    /// Join two ports of this process: frames of one's guest go to the other's. Both name it
    #[arg(long, value_name = "NAME", conflicts_with = "ifname")]
    cable: Option<String>,
    /// No interface: frames are made and dropped in this process (to measure the virtqueue path)
    #[arg(long, conflicts_with_all = ["ifname", "cable"])]
    null: bool,
    /// Length of the frames that --null makes; 0: none
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    frame_size: u32,
    /// Queue pairs, each on a queue of the interface
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// First queue of the interface
    #[arg(long, value_name = "M", default_value_t = 0)]
    start_queue: u32,
    /// How to attach the XDP program [default: native, skb where the driver cannot]
    #[arg(long, value_enum)]
    mode: Option<ModeArg>,
    /// Never use the driver's zero-copy mode
    #[arg(long)]
    force_copy: bool,
    #[command(flatten)]
    bring: BringArgs,
    /// Where frames lie: memory of the daemon, or the guest's own RAM (pins all of it; no
    /// ballooning, no overcommit, no postcopy)
    #[arg(long, value_enum, default_value = "copy")]
    memory: Placement,
    #[command(flatten)]
    memory_rules: MemoryArgs,
    /// How segments of the guest's super-frames leave
    #[arg(long, value_enum, default_value = "auto")]
    segments: Segments,
    /// MAC address told to the guest, which then gets frames to this station and to groups only; others go to the host
    /// [default: made from socket and interface, the same each time, and all frames of the queues are the guest's]
    #[arg(long, value_parser = parse_mac)]
    mac: Option<[u8; 6]>,
    /// VLANs whose frames the guest gets, for instance 100,200-203; 0: untagged ones [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_vlans)]
    vlan: Option<VlanList>,
    /// Work that the guest may leave to us, and we to it: all that --memory can do, none, only some of csum,
    /// tso4, tso6, ecn, uso, guest-csum, guest-tso4, guest-tso6, guest-ecn, guest-uso4, guest-uso6, or all but
    /// some: a `-` before each
    #[arg(long, value_name = "LIST", default_value = "all", allow_hyphen_values = true)]
    offload: String,
    /// A further guest: KEY=VALUE pairs of socket-path, fd, client, ifname, cable, queues, start-queue, memory,
    /// max-memory, memory-files, mac, vlan, offload (lists joined by `+` here), and of --inhibit and its companions; what is missing comes from the options
    /// above. May be repeated
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
    /// no privilege is needed then. Packet memory counts as locked memory
    #[arg(long, value_name = "PATH")]
    steward: Option<PathBuf>,
    /// Where `status` finds this daemon; `none` for nowhere [default: PID.sock in /run/vhost-af-xdp, for other users
    /// than root in $XDG_RUNTIME_DIR/vhost-af-xdp, /run/user/UID/vhost-af-xdp or /tmp/vhost-af-xdp-UID]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// User to become, a name, or UID or UID:GID in numbers, once sockets are bound [default: nobody, if started by root]
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// What confines this process: all, off, only some of user, mounts, network, capabilities, files, calls, or all but
    /// some: a `-` before each
    #[arg(long, value_name = "LIST", default_value = "all", allow_hyphen_values = true)]
    sandbox: String,
    /// Try something forbidden from within the sandbox, say what came of it, and end
    #[arg(long, hide = true)]
    sandbox_attempt: Option<String>,
}

/// VLANs by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VlanList(Vec<u16>);

/// CPUs by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CpuList(Vec<usize>);

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
            None => control_socket::default_path(),
            Some(path) if path.as_os_str() == "none" => None,
            Some(path) => Some(path),
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
            control,
            layers,
            user: self.user.as_deref().map(User::parse).transpose()?,
            attempt: self.sandbox_attempt,
        })
    }
}

/// The options of one port.
struct PortOptions {
    socket_path: Option<PathBuf>,
    fd: Option<i32>,
    access: AccessArgs,
    client: bool,
    ifname: Option<String>,
    cable: Option<String>,
    null: bool,
    frame_size: u32,
    queues: u16,
    start_queue: u32,
    mode: ModeRequest,
    force_copy: bool,
    memory: Placement,
    memory_rules: MemoryArgs,
    segments: Segments,
    mac: Option<[u8; 6]>,
    vlans: VlanList,
    offload: String,
    bring: BringArgs,
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

impl PortOptions {
    fn apply(&mut self, text: &str) -> anyhow::Result<()> {
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
    fn build(self, ports: usize) -> anyhow::Result<PortConfig> {
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
        let offload = Offloads::parse(&self.offload, self.memory.offloads())
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

fn parse_pause(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    seconds.ok_or_else(|| "1 to 86400 seconds between tables".to_owned())
}

fn on_off(value: &str) -> Option<bool> {
    match value {
        "on" | "true" | "1" => Some(true),
        "off" | "false" | "0" => Some(false),
        _ => None,
    }
}

fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2))
        .collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    let mac =
        mac.ok_or_else(|| format!("{text:?} is not a MAC address: six hex bytes such as 02:00:00:00:00:01"))?;
    if mac[0] & 1 != 0 {
        return Err(format!(
            "{text} is a multicast address: the first byte must be even"
        ));
    }
    Ok(mac)
}

/// Refuses CPUs that this process may not run on.
fn check_cpus(cpus: &[usize]) -> anyhow::Result<()> {
    let allowed = rustix::thread::sched_getaffinity(None).context("cannot read the CPU affinity")?;
    match cpus.iter().find(|&&cpu| !allowed.is_set(cpu)) {
        None => Ok(()),
        Some(cpu) => {
            let may: Vec<String> = (0..1024)
                .filter(|&cpu| allowed.is_set(cpu))
                .map(|cpu| cpu.to_string())
                .collect();
            bail!(
                "--cpus: CPU {cpu} is not there or not allowed: this process may use {}",
                may.join(",")
            )
        }
    }
}

fn parse_vlans(text: &str) -> Result<VlanList, String> {
    let wrong = || {
        format!(
            "{text:?} is not a list of VLANs: numbers and ranges such as 100,200-203, of 0 (untagged) to {LAST_VLAN}"
        )
    };
    let mut vlans = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u16 = first.parse().map_err(|_| wrong())?;
        let last: u16 = last.parse().map_err(|_| wrong())?;
        if first > last || last > LAST_VLAN {
            return Err(wrong());
        }
        vlans.extend(first..=last);
    }
    vlans.sort_unstable();
    vlans.dedup();
    Ok(VlanList(vlans))
}

fn parse_cpus(text: &str) -> Result<CpuList, String> {
    let wrong = || format!("{text:?} is not a list of CPUs: numbers and ranges such as 2,4-7");
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.parse().map_err(|_| wrong())?;
        let last: usize = last.parse().map_err(|_| wrong())?;
        // The kernel's own limit of CPUs in a set (CPU_SETSIZE).
        if first > last || last >= 1024 {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    Ok(CpuList(cpus))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(arguments: &[&str]) -> anyhow::Result<ServeConfig> {
        let arguments = ["vhost-af-xdp", "serve"].iter().chain(arguments);
        match Cli::try_parse_from(arguments)?.command {
            Some(Command::Serve(args)) => args.into_config(),
            _ => bail!("not serve"),
        }
    }

    #[test]
    fn ports_inherit_what_they_do_not_say() {
        let config = serve(&[
            "--ifname=eth1",
            "--memory=direct",
            "--port=socket-path=/a",
            "--port=socket-path=/b,start-queue=1,memory=copy",
        ])
        .expect("valid");
        assert_eq!(config.ports.len(), 2);
        assert_eq!(config.ports[0].placement, Placement::Direct);
        assert_eq!(config.ports[1].placement, Placement::Copy);
        assert!(
            matches!(&config.ports[1].nic, NicConfig::Interface { name, start_queue: 1, .. } if name == "eth1")
        );
    }

    #[test]
    fn missing_interface_names_the_remedy() {
        let error = serve(&["--socket-path=/a"]).expect_err("no interface");
        assert!(error.to_string().contains("--ifname NAME"), "{error}");
    }

    #[test]
    fn offloads_are_chosen_a_port_within_what_its_memory_can_do() {
        let config = serve(&[
            "--ifname=eth1",
            "--offload=all,-uso",
            "--port=socket-path=/a",
            "--port=socket-path=/b,start-queue=1,offload=tso4+guest-csum",
            "--port=socket-path=/c,start-queue=2,memory=direct",
        ])
        .expect("valid");
        config.check().expect("within");
        let names = |port: usize| config.ports[port].offload.names();
        assert!(names(0).contains(&"guest-tso4") && !names(0).contains(&"uso"));
        assert_eq!(names(1), ["csum", "tso4", "guest-csum"]);
        assert!(names(2).contains(&"tso4") && !names(2).contains(&"guest-tso4"));
    }

    #[test]
    fn what_a_minus_takes_away_is_off_and_nothing_else() {
        let config = serve(&[
            "--ifname=eth1",
            "--sandbox",
            "-files",
            "--offload=-uso",
            "--port=socket-path=/a",
            "--port=socket-path=/b,start-queue=1,memory=direct,offload=-ecn+-csum",
        ])
        .expect("valid");
        config.check().expect("within");
        assert_eq!(config.layers.off(), ["files"]);
        let off = |port: usize| config.ports[port].offloads_off();
        assert_eq!(off(0), ["uso"]);
        assert_eq!(off(1), ["csum", "tso4", "tso6", "ecn", "uso"]);
    }

    #[test]
    fn offload_that_direct_memory_cannot_do_is_refused_by_name() {
        let config = serve(&[
            "--ifname=eth1",
            "--memory=direct",
            "--offload=guest-tso4",
            "--socket-path=/a",
        ]);
        let error = config.expect("words").check().expect_err("not in direct");
        assert!(error.to_string().contains("guest-tso4"), "{error}");
        assert!(serve(&["--ifname=eth1", "--offload=ufo", "--socket-path=/a"]).is_err());
    }

    #[test]
    fn tables_without_a_pause_are_refused() {
        for (argument, accepted) in [
            ("--watch=0", false),
            ("--watch=86401", false),
            ("--watch", true),
            ("--watch=5", true),
        ] {
            let read = Cli::try_parse_from(["vhost-af-xdp", "queues", argument]);
            assert_eq!(read.is_ok(), accepted, "{argument}");
        }
    }

    #[test]
    fn access_is_for_sockets_that_are_made_here() {
        let config = serve(&[
            "--null",
            "--socket-group=root",
            "--port=socket-path=/a",
            "--port=socket-path=/b,socket-mode=600,socket-owner=7",
            "--port=socket-path=/c,client",
        ])
        .expect("valid");
        let access = |port: usize| config.ports[port].access;
        assert_eq!(
            (access(0).group, access(0).mode, access(0).owner),
            (Some(0), 0o660, None)
        );
        assert_eq!(
            (access(1).group, access(1).mode, access(1).owner),
            (Some(0), 0o600, Some(7))
        );
        for arguments in [
            ["--null", "--socket-mode=660", "--socket-path=/a", "--client"].as_slice(),
            &["--null", "--socket-mode=660", "--fd=7"],
            &["--null", "--port=socket-path=/a,client,socket-group=root"],
        ] {
            let error = serve(arguments).expect_err("nothing to give");
            assert!(format!("{error:#}").contains("not made here"), "{error:#}");
        }
    }

    #[test]
    fn cable_has_two_ends() {
        let ends = |ports: &[&str]| serve(&[&["--cable=x"], ports].concat()).expect("words").check();
        ends(&["--port=socket-path=/a", "--port=socket-path=/b"]).expect("two");
        let error = ends(&["--port=socket-path=/a", "--port=socket-path=/b,ifname=eth1"]).expect_err("one");
        assert!(error.to_string().contains("cable x: 1 port(s)"), "{error}");
    }

    #[test]
    fn unknown_port_key_is_refused() {
        let error = serve(&["--null", "--port=socket-path=/a,colour=red"]).expect_err("unknown key");
        assert!(format!("{error:#}").contains("colour"), "{error:#}");
    }

    #[test]
    fn cpu_lists_are_read_as_ranges() {
        assert_eq!(parse_cpus("0,2-4").expect("valid").0, [0, 2, 3, 4]);
        assert!(parse_cpus("4-2").is_err());
        assert!(parse_cpus("x").is_err());
    }

    #[test]
    fn mac_and_vlans_say_which_frames_a_port_takes() {
        let config = serve(&[
            "--ifname=eth1",
            "--vlan=7",
            "--port=socket-path=/a,mac=02:00:00:00:00:0a,vlan=0+200-202+201",
            "--port=socket-path=/b,start-queue=1",
        ])
        .expect("valid");
        config.check().expect("an interface");
        let filter = |port: usize| config.ports[port].wanted().expect("an interface").filter;
        assert_eq!(filter(0).macs, [[2, 0, 0, 0, 0, 10]]);
        assert_eq!(filter(0).vlans, [0, 200, 201, 202]);
        assert!(filter(1).macs.is_empty() && filter(1).vlans == [7]);
        for (list, words) in [
            ("4095", "0 (untagged) to 4094"),
            ("3-1", "ranges"),
            ("x", "ranges"),
        ] {
            let error = serve(&["--ifname=eth1", "--socket-path=/a", "--vlan", list]).expect_err(list);
            assert!(error.to_string().contains(words), "{error}");
        }
        let check = |args: &[&str]| {
            serve(args)
                .expect("words")
                .check()
                .expect_err("refused")
                .to_string()
        };
        assert!(check(&["--null", "--socket-path=/a", "--vlan=1"]).contains("--ifname"));
        assert!(check(&["--ifname=eth1", "--socket-path=/a", "--vlan=1-17"]).contains("17 VLANs"));
    }

    #[test]
    fn multicast_mac_is_refused() {
        assert!(parse_mac("01:00:00:00:00:00").is_err());
        assert_eq!(parse_mac("02:00:00:00:00:0a").expect("valid")[5], 10);
    }
}
