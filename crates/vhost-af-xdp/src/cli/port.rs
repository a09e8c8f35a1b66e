//! Options of one port: those of `serve`, and what its `--port` says otherwise.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use clap::builder::Resettable;
use clap::{Args, Command, FromArgMatches};
use steward::protocol::is_interface_name;

use super::access::AccessArgs;
use super::external::ExternalArgs;
use super::filter::FilterArgs;
use super::guard::GuardArgs;
use super::hints::HintsArgs;
use super::keys::{Keys, unknown_key};
use super::limits::LimitArgs;
use super::memory::{MemoryArgs, of_a_pair, parse_packet_memory};
use super::network::MemberArgs;
use super::values::{VlanList, parse_mac, parse_vlans};
use super::{keys, offer, offload, sentence};
use crate::config::{Endpoint, NicConfig, Placement, PortConfig, PortQueues, Segments};
use crate::nic::endpoint::COPY_BYTES;
use crate::options::{BusyPollArgs, ModeArg, bind_request, mode_request};
use crate::rates::{PortRates, Rates};

/// Options that hold for all ports.
#[derive(Debug, Clone, Args)]
pub(super) struct AllPortsArgs {
    /// No interface: frames are made and dropped in this process (to measure the virtqueue path)
    #[arg(long, conflicts_with_all = ["ifname", "cable"])]
    null: bool,
    /// Length of the frames that --null makes; 0: none
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    frame_size: u32,
    /// How frames come from the interface [default: auto]
    #[arg(long, value_enum)]
    mode: Option<ModeArg>,
    /// Never use the driver's zero-copy mode
    #[arg(long)]
    force_copy: bool,
    /// Use the driver's zero-copy mode, whatever is known of the driver, or fail
    #[arg(long, conflicts_with = "force_copy")]
    force_zero_copy: bool,
    /// How segments of the guest's GSO packets leave
    #[arg(long, value_enum, default_value = "auto")]
    segments: Segments,
    #[command(flatten)]
    hints: HintsArgs,
    #[command(flatten)]
    busy_poll: BusyPollArgs,
    /// One UMEM for all queue pairs with --memory copy, each with a slice of its own, registered once; --packet-memory
    /// is for all of them together then [default: 6MiB, or 512KiB for each if that is more]. In copy mode only, and the
    /// kernel takes more memory for it than for a UMEM each: where less memory is the aim --packet-memory alone is
    /// better
    #[arg(long)]
    pub(super) shared_umem: bool,
}

/// Options of one port; each is a key of `--port`, too.
#[derive(Debug, Clone, Args)]
pub(super) struct PortArgs {
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
    client: bool,
    /// Network interface that the frames go to and come from
    #[arg(long, value_name = "IFNAME")]
    ifname: Option<String>,
    /// Join two ports of this process: frames of one's guest go to the other's. Both name it
    #[arg(long, value_name = "NAME", conflicts_with = "ifname")]
    cable: Option<String>,
    /// Queue pairs, each on a queue of the interface
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// First queue of the interface
    #[arg(long, value_name = "M", default_value_t = 0)]
    start_queue: u32,
    #[command(flatten)]
    external: ExternalArgs,
    /// Where frames lie: memory of the daemon, or the guest's own RAM (pins all of it; no ballooning, no overcommit, no
    /// postcopy), for those that are sent or for all
    #[arg(long, value_enum, default_value = "copy")]
    memory: Placement,
    /// Memory of the daemon for the frames of each queue pair while it copies them both ways, from 512KiB to 6MiB: less
    /// is for many queues [default: 6MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_packet_memory)]
    pub(super) packet_memory: Option<u64>,
    #[command(flatten)]
    memory_rules: MemoryArgs,
    /// MAC address told to the guest, which then gets frames to this station and to groups only; others go to the host
    /// [default: made from socket and interface, the same each time, and all frames of the queues are the guest's]
    #[arg(long, value_parser = parse_mac)]
    mac: Option<[u8; 6]>,
    /// VLANs whose frames the guest gets, for instance 100,200-203; 0: untagged ones [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_vlans)]
    vlan: Option<VlanList>,
    #[command(flatten)]
    guard: GuardArgs,
    /// Work that the guest may leave to us, and we to it: all that --memory can do, none, only some of csum,
    /// tso4, tso6, ecn, uso, guest-csum, guest-tso4, guest-tso6, guest-ecn, guest-uso4, guest-uso6, or all but
    /// some: a `-` before each
    #[arg(long, value_name = "LIST", default_value = "all", allow_hyphen_values = true)]
    offload: String,
    /// Features that the guest is offered only where they are named here, because its VMM has to do its part: none,
    /// all, only some of ring-reset, access-platform, or all but some: a `-` before each. docs/vmm.md says which VMMs
    /// do
    #[arg(long, value_name = "LIST", default_value = "none", allow_hyphen_values = true)]
    offer: String,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    filter: FilterArgs,
}

/// Keys of a port's table in a file: there each port says all of it.
#[derive(Debug, Clone, Args)]
pub(super) struct PortTableArgs {
    #[command(flatten)]
    own: PortArgs,
    #[command(flatten)]
    all: AllPortsArgs,
    #[command(flatten)]
    member: MemberArgs,
}

impl PortTableArgs {
    /// All that a table may say: not --shared-umem, whose memory is cut for the ports of the start.
    pub(super) fn keys() -> Keys {
        Keys::of::<Self>().without("shared-umem")
    }

    /// The configuration of one of so many ports.
    /// Errors: one line, naming the key.
    pub(super) fn build(self, ports: usize) -> anyhow::Result<PortConfig> {
        self.own.check_access(&self.own.access)?;
        let network = self.member.build(self.own.vlan.as_ref())?;
        let own = &self.own;
        if network.is_none() && own.ifname.is_none() && own.cable.is_none() && !self.all.null {
            bail!(
                "no network and no interface: name one by network or ifname, or give cable, or null = true"
            );
        }
        self.own.build_for(network, &self.all, ports)
    }
}

impl PortArgs {
    /// These, but for what a `--port` says.
    /// Errors: one line, naming the key.
    pub(super) fn with(&self, text: &str) -> anyhow::Result<Self> {
        let command = as_keys();
        let keys: Vec<_> = command.get_arguments().filter_map(|arg| arg.get_long()).collect();
        let mut words = Vec::new();
        for pair in text.split(',') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, "on"));
            if !keys.contains(&key) {
                bail!(unknown_key(key, keys.into_iter()));
            }
            words.push(format!("--{key}={value}"));
        }
        let said = command
            .try_get_matches_from(words)
            .map_err(|error| anyhow!(sentence(&error)))?;
        let mut port = Self {
            socket_path: None,
            fd: None,
            ..self.clone()
        };
        if said.contains_id("ifname") || said.contains_id("cable") {
            (port.ifname, port.cable) = (None, None);
        }
        port.update_from_arg_matches(&said)?;
        port.check_access(&AccessArgs::from_arg_matches(&said)?)?;
        Ok(port)
    }

    /// Whether there is a socket for what was said of its access.
    fn check_access(&self, said: &AccessArgs) -> anyhow::Result<()> {
        let is_made = !self.client && self.fd.is_none();
        match said.given().filter(|_| !is_made) {
            Some(key) => bail!("{key}: the socket is not made here: leave it out with client and fd"),
            None => Ok(()),
        }
    }

    /// The configuration of one of so many ports.
    /// Errors: one line, naming the option.
    pub(super) fn build(self, all: &AllPortsArgs, ports: usize) -> anyhow::Result<PortConfig> {
        self.build_for(None, all, ports)
    }

    /// The same, where it may be one of a network.
    fn build_for(
        self,
        network: Option<NicConfig>,
        all: &AllPortsArgs,
        ports: usize,
    ) -> anyhow::Result<PortConfig> {
        let endpoint = self.endpoint()?;
        let is_member = network.is_some();
        let nic = self.nic(network, all)?;
        let placement = nic.placement(self.memory);
        // What is named must be possible (config.rs), `all` means what is.
        let offload = offload::parse(&self.offload, placement.offloads())
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("--offload {}", self.offload))?;
        let rates = self.rates(placement)?;
        Ok(PortConfig {
            name: endpoint.to_string().into(),
            access: self.access.build()?,
            endpoint,
            queues: self.queues,
            nic,
            external: self.external.build()?,
            placement,
            asked: self.memory,
            packet_bytes: match all.shared_umem {
                // Of a port that shares nothing; of others `share` says it, when all ports are known.
                true => COPY_BYTES,
                false => of_a_pair(self.packet_memory)?,
            },
            slices_from: None,
            memory: self.memory_rules.build(ports),
            rates,
            segments: all.segments,
            busy_poll: all.busy_poll.build(),
            hints: all.hints.build(),
            mac: self.mac,
            vlans: self.vlan.filter(|_| !is_member).unwrap_or_default().0,
            guard: self.guard.build()?,
            filter: self.filter.build(placement)?,
            offload,
            offer: offer::parse(&self.offer)
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("--offer {}", self.offer))?,
        })
    }

    /// Where the VMM is.
    fn endpoint(&self) -> anyhow::Result<Endpoint> {
        Ok(match (self.socket_path.clone(), self.fd) {
            (Some(path), None) if self.client => Endpoint::Client(path),
            (Some(path), None) => Endpoint::Server(path),
            (None, Some(_)) if self.client => bail!("client goes with socket-path, not with fd"),
            (None, Some(fd)) => Endpoint::Fd(fd),
            (Some(_), Some(_)) => bail!("socket-path and fd exclude each other: give one"),
            (None, None) => bail!("no socket-path and no fd: give one"),
        })
    }

    /// Where frames go to and come from, of one in this network, if it is.
    fn nic(&self, network: Option<NicConfig>, all: &AllPortsArgs) -> anyhow::Result<NicConfig> {
        let queues = self.queues_of_interface(all)?;
        Ok(match (network, queues, self.cable.clone()) {
            (Some(network), queues, _) => network.with_queues(queues),
            (_, None, Some(name)) => NicConfig::Cable { name },
            (_, Some(queues), _) => NicConfig::Interface(queues),
            (_, None, None) if all.null => NicConfig::Null {
                frame_bytes: all.frame_size,
            },
            (_, None, None) => {
                bail!("no interface: name one with --ifname NAME, or give --cable NAME or --null for none")
            }
        })
    }

    fn queues_of_interface(&self, all: &AllPortsArgs) -> anyhow::Result<Option<PortQueues>> {
        let Some(name) = self.ifname.clone() else {
            return Ok(None);
        };
        if !is_interface_name(&name) {
            bail!(
                "--ifname {name:?}: no interface can have this name: 1 to 15 bytes, no `/`, `:` or blank (`ip link` \
                 lists them)"
            );
        }
        Ok(Some(PortQueues {
            name,
            start_queue: self.start_queue,
            mode: mode_request(all.mode),
            bind: bind_request(all.force_copy, all.force_zero_copy),
        }))
    }

    /// Limits, of which those to the guest take somebody who can drop a frame.
    fn rates(&self, placement: Placement) -> anyhow::Result<PortRates> {
        let rates = self.limits.build()?;
        if placement == Placement::Direct && rates.to_guest != Rates::default() {
            bail!(
                "to-guest limits: with memory=direct a frame is in the guest's memory before anybody could drop it: use \
                 memory=send-direct or copy for them"
            );
        }
        Ok(rates)
    }
}

/// The options as keys of `--port`: nothing is set that is not said.
fn as_keys() -> Command {
    let command = PortArgs::augment_args_for_update(keys::without_program("--port"));
    keys::with_values(command).mut_args(|arg| arg.default_value(Resettable::Reset))
}
