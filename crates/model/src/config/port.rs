//! Ports: each is the network device of one guest.

use std::path::PathBuf;

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prefix::Prefixes;
use super::rule::{Action, Direction, Rule, rules};
use super::table::{Mistake, Table, options};
use super::values::{
    Account, Burst, Fds, FileKinds, Mac, Mode, Placement, Rate, Segments, Size, Vlans, Words,
};

options! {
    /// A port: the options of `serve`, `--port`, `[port.NAME]` of a file, and the body of the API.
    Port {
        /// The vhost-user socket.
        socket: Socket,
        /// The network interface, or a cable or null device instead.
        interface: Interface,
        /// How the queues are used.
        attachment: Attachment,
        /// Busy polling.
        polling: Polling,
        /// Another program's XDP program, map and sockets.
        external: External,
        /// Where frames are stored.
        memory: Memory,
        /// The network that the port belongs to.
        member: Membership,
        /// Options of the port in that network.
        options: MemberOptions,
        /// What the guest may send.
        guard: Guard,
        /// What the guest is offered.
        offers: Offers,
        /// How much it may send and receive.
        limits: Limits,
        /// Filter rules.
        filter: Filter,
    }

    fn keeps(&self, key: &str) -> bool {
        // The lease fixes the VLANs of a port with its own queues; a learning port has addresses in its old VLANs.
        let keeps_vlans = self.options.learning || self.interface.ifname.is_some() || self.member.network.is_none();
        keeps_vlans && ["vlan", "trunk"].contains(&key)
    }
}

impl Port {
    /// A port with the keys of these words; all others, except `socket-path` and `fd`, are copied from `self`.
    ///
    /// # Errors
    /// A word is no key, or its value is not possible.
    pub fn with_words<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Result<Self, Mistake> {
        let words = Self::keys_of_words(words)?;
        let has = |key: &str| words.contains_key(key);
        let mut keys = self.keys();
        keys.retain(|key, _| !(has(key) || ["socket-path", "fd"].contains(&key.as_str())));
        if has("ifname") || has("cable") {
            keys.retain(|key, _| !["ifname", "cable", "null"].contains(&key.as_str()));
        }
        keys.extend(Self::read(words.clone())?.keys());
        if keys.contains_key("fd") || keys.contains_key("client") {
            // The daemon does not create this socket: owner, group and mode from `self` do not apply to it.
            keys.retain(|key, _| {
                has(key) || !["socket-owner", "socket-group", "socket-mode"].contains(&key.as_str())
            });
        }
        Self::read(keys)
    }
}

/// The vhost-user socket of a port.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Socket {
    /// vhost-user socket to listen on (with --client: to connect to)
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,
    /// Inherited descriptor instead of a path: a listening socket, or a connected one
    #[arg(long, value_name = "FDNUM", conflicts_with = "socket_path")]
    pub fd: Option<i32>,
    /// Owner of the socket, name or number; only root can name others [default: the user that starts the daemon]
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<Account>,
    /// Group that may connect to the socket, name or number [default: none]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<Account>,
    /// Permissions of the socket, octal: writers may connect [default: 600, with --socket-group 660]
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<String>,
    /// Connect to the VMM, which listens, and again after a disconnect
    #[arg(long)]
    pub client: bool,
}

/// What a port's frames go to and come from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Interface {
    /// Network interface that the frames go to and come from
    #[arg(long, value_name = "IFNAME")]
    pub ifname: Option<String>,
    /// Join two ports of this daemon, both with this NAME: each guest receives the frames of the other
    #[arg(long, value_name = "NAME", conflicts_with = "ifname")]
    pub cable: Option<String>,
    /// No interface: frames are made and dropped in this process (to measure the virtqueue path)
    #[arg(long, conflicts_with_all = ["ifname", "cable"])]
    pub null: bool,
    /// Length of the frames that --null makes; 0: none [default: 64]
    #[arg(long, value_name = "BYTES")]
    pub frame_size: Option<u32>,
    /// Queue pairs, each on a queue of the interface [default: 1]
    #[arg(long, value_name = "N")]
    pub queues: Option<u16>,
    /// MAC address of the guest; the VMM must use the same. The guest then receives only frames to it and multicast;
    /// others go to the host [default: made from socket and interface, the same each time, and all frames of the queues
    /// are the guest's]
    #[arg(long)]
    pub mac: Option<Mac>,
    /// VLANs whose frames the guest receives, for instance 100,200-203; 0: untagged ones [default: all]
    #[arg(long, value_name = "LIST")]
    #[schemars(extend("x-live" = true))]
    pub vlan: Option<Vlans>,
}

/// How the queues of an interface are used, by a port alone or by a network.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Attachment {
    /// First queue of the interface [default: 0]
    #[arg(long, value_name = "M")]
    pub start_queue: Option<u32>,
    /// How frames reach and leave the interface [default: auto]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Never use the driver's zero-copy mode
    #[arg(long)]
    pub force_copy: bool,
    /// Use the driver's zero-copy mode even if it is known to be bad, or fail
    #[arg(long, conflicts_with = "force_copy")]
    pub force_zero_copy: bool,
    /// How GSO packets of guests are segmented [default: auto]
    #[arg(long, value_enum)]
    pub segments: Option<Segments>,
    /// NIC metadata to read with frames: some of hash, vlan, timestamp, mark; none; or auto: the VLAN tag alone,
    /// where ports have VLANs and the driver strips and reports tags. In native mode, if the driver has them;
    /// docs/hints.md [default: auto]
    #[arg(long, value_name = "LIST")]
    #[schemars(extend("x-live" = true))]
    pub hints: Option<Words>,
}

/// Busy polling of AF_XDP sockets.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Polling {
    /// Run the driver's poll function from system calls, on the worker's CPU (SO_BUSY_POLL,
    /// SO_PREFER_BUSY_POLL); 0: off, any other number: on [default: 0]
    #[arg(long, value_name = "MICROSECONDS")]
    pub busy_poll_us: Option<u32>,
    /// Frames that one busy poll may handle (SO_BUSY_POLL_BUDGET) [default: 64]
    #[arg(long, value_name = "FRAMES")]
    pub busy_poll_budget: Option<u16>,
}

/// Another program's XDP program, map and sockets: names and rules are those of QEMU's `-netdev af-xdp` (qapi/net.json,
/// since 10.1); `map-fd` and `afxdp-plugin` are additions of this daemon.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct External {
    /// Load no XDP program, use the attached one: needs --sock-fds, --map-path or --map-fd, and --memory copy
    #[arg(long)]
    pub inhibit: bool,
    /// AF_XDP sockets, unbound, that another program opened and put into the XDP program's map: inherited descriptors
    /// in the order of the queues
    #[arg(long, value_name = "FD:FD...")]
    pub sock_fds: Option<Fds>,
    /// Put sockets into the XSKMAP pinned at this path
    #[arg(long, value_name = "PATH")]
    pub map_path: Option<PathBuf>,
    /// Put sockets into the XSKMAP of this inherited descriptor
    #[arg(long, value_name = "FD")]
    pub map_fd: Option<i32>,
    /// Index in the map of the first queue's socket [default: 0]
    #[arg(long, value_name = "N")]
    pub map_start_index: Option<u32>,
    /// Get the interface's XSKMAP from the AF_XDP plugin for Kubernetes at this socket, and load no XDP
    /// program
    #[arg(long, value_name = "PATH")]
    pub afxdp_plugin: Option<PathBuf>,
    /// Name of the structure that the XDP program writes as metadata before frames. It is described by the types (BTF)
    /// of a program that uses the map [default: none is read]
    #[arg(long, value_name = "STRUCT")]
    pub map_layout: Option<String>,
}

/// Where frames are stored, and what memory of a guest is accepted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Memory {
    /// Where frames are: copy: in daemon memory; send-direct: sent ones in guest RAM; direct: all in guest RAM. The
    /// last two pin all guest RAM: no ballooning, overcommit or postcopy [default: copy]
    #[arg(long, value_enum)]
    pub memory: Option<Placement>,
    /// Memory of the daemon for the frames of each queue pair while it copies them both ways, from 512KiB to 6MiB: less
    /// is for many queues [default: 6MiB]
    #[arg(long, value_name = "SIZE")]
    pub packet_memory: Option<Size>,
    /// Limit of the guest's memory, for instance 32GiB [default: what the machine has, with swap]
    #[arg(long, value_name = "SIZE", value_parser = Size::of_guest)]
    #[serde(deserialize_with = "guest_memory")]
    pub max_memory: Option<Size>,
    /// File types accepted as guest memory. With `any` VMMs on a file system that does not answer (FUSE, NFS) can hang
    /// workers and all their guests [default: shared]
    #[arg(long, value_enum)]
    pub memory_files: Option<FileKinds>,
}

/// Reads a size of guest memory and checks its lower bound.
fn guest_memory<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Size>, D::Error> {
    let size: Option<Size> = Deserialize::deserialize(from)?;
    if let Some(Size(bytes)) = size {
        Size::of_guest(&bytes.to_string()).map_err(serde::de::Error::custom)?;
    }
    Ok(size)
}

/// The network that a port belongs to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Membership {
    /// Network of the port: a `[network.NAME]` of the file. With `vlan` the port is in that VLAN,
    /// and the guest sees no tags. With `ifname` the port has queues of the uplink's interface for itself
    #[arg(long, value_name = "NAME", hide = true, conflicts_with_all = ["cable", "null"])]
    pub network: Option<String>,
    /// VLANs of the network whose frames the guest receives and sends, with their tags, for instance 100,200-203
    #[arg(long, value_name = "LIST", hide = true, conflicts_with = "vlan")]
    #[schemars(extend("x-live" = true))]
    pub trunk: Option<Vlans>,
}

/// What a port of a network may do there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct MemberOptions {
    /// The guest reaches no other isolated port of the network
    #[arg(long, hide = true)]
    #[schemars(extend("x-live" = true))]
    pub isolated: bool,
    /// The guest receives copies of all frames that the network forwards in its VLANs
    #[arg(long, hide = true)]
    #[schemars(extend("x-live" = true))]
    pub promiscuous: bool,
    /// The guest receives frames that it sends to its own port or to multicast, as with a bridge in hairpin mode
    #[arg(long, hide = true)]
    #[schemars(extend("x-live" = true))]
    pub hairpin: bool,
    /// The guest receives no broadcast and multicast frames, even if the port is promiscuous. It needs static ARP
    /// and neighbour entries
    #[arg(long, hide = true)]
    #[schemars(extend("x-live" = true))]
    pub unicast_only: bool,
    /// The guest may send link control frames, which switches may act on: spanning tree, LACP, 802.1X, LLDP
    #[arg(long, hide = true)]
    #[schemars(extend("x-live" = true))]
    pub link_control: bool,
    /// The guest may also send from up to 64 further MAC addresses, for instance of guests or a bridge inside it; the
    /// daemon learns them
    #[arg(long, hide = true)]
    pub learning: bool,
}

/// What a guest may send: source addresses that are not its own are rejected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Guard {
    /// The guest may send only from the address of --mac and in the VLANs of --vlan. Always on for guests of a network
    #[arg(long)]
    #[schemars(extend("x-live" = true))]
    pub guard: bool,
    /// IP addresses and networks of the guest, for instance 192.0.2.10,2001:db8:1::/64: the guest may send ARP, IPv4,
    /// IPv6 and neighbour discovery from these only, no other protocols, no router advertisements and no DHCP server
    /// answers [default: any source and protocol]
    #[arg(long, value_name = "LIST")]
    #[schemars(extend("x-live" = true))]
    pub ips: Option<Prefixes>,
    /// With --ips: the guest may send router advertisements and redirects
    #[arg(long)]
    #[schemars(extend("x-live" = true, "x-words" = "as a router, too"))]
    pub router: bool,
    /// With --ips: the guest may answer as a DHCP server
    #[arg(long)]
    #[schemars(extend("x-live" = true, "x-words" = "as a DHCP server, too"))]
    pub dhcp_server: bool,
}

/// What a guest is offered.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Offers {
    /// Offloads between guest and daemon: all that --memory allows, none, only some of csum, tso4, tso6, ecn, uso,
    /// guest-csum, guest-tso4, guest-tso6, guest-ecn, guest-uso4, guest-uso6, or all but some: a `-` before each
    /// [default: all]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub offload: Option<Words>,
    /// Features offered only if named here, because the VMM must support them, too: none, all, only
    /// some of ring-reset, access-platform, or all but some: a `-` before each; docs/vmm.md lists the VMMs that do
    /// [default: none]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub offer: Option<Words>,
}

/// How much a guest may send and receive.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Limits {
    /// Most bits a second that the guest may send, for instance 100M: the excess waits. Bits of Ethernet frames
    /// without FCS; a GSO packet counts as the frames that it is segmented into [default: no limit]
    #[arg(long, value_name = "RATE")]
    #[schemars(extend("x-live" = true))]
    pub from_guest_bits: Option<Rate>,
    /// Bits that may pass at once, beyond --from-guest-bits [default: 50 ms of the limit, at least 524288]
    #[arg(long, value_name = "BURST")]
    #[schemars(extend("x-live" = true))]
    pub from_guest_bits_burst: Option<Burst>,
    /// Most frames a second that the guest may send, for instance 100k: the excess waits [default: no limit]
    #[arg(long, value_name = "RATE")]
    #[schemars(extend("x-live" = true))]
    pub from_guest_packets: Option<Rate>,
    /// Frames that may pass at once, beyond --from-guest-packets [default: 50 ms of the limit, at least 16]
    #[arg(long, value_name = "BURST")]
    #[schemars(extend("x-live" = true))]
    pub from_guest_packets_burst: Option<Burst>,
    /// Most bits a second that the guest receives: the excess is dropped [default: no limit]
    #[arg(long, value_name = "RATE")]
    #[schemars(extend("x-live" = true))]
    pub to_guest_bits: Option<Rate>,
    /// Bits that may pass at once, beyond --to-guest-bits [default: 200 ms of the limit, at least 524288]
    #[arg(long, value_name = "BURST")]
    #[schemars(extend("x-live" = true))]
    pub to_guest_bits_burst: Option<Burst>,
    /// Most frames a second that the guest receives: the excess is dropped [default: no limit]
    #[arg(long, value_name = "RATE")]
    #[schemars(extend("x-live" = true))]
    pub to_guest_packets: Option<Rate>,
    /// Frames that may pass at once, beyond --to-guest-packets [default: 200 ms of the limit, at least 16]
    #[arg(long, value_name = "BURST")]
    #[schemars(extend("x-live" = true))]
    pub to_guest_packets_burst: Option<Burst>,
}

/// Which frames the guest may send and receive: one list of rules, of which the first that matches a frame decides,
/// and a default for each direction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "kebab-case", default)]
pub struct Filter {
    /// Filter rules, the first match decides, as words, with `;` between two rules, for instance
    /// "direction=to-guest action=allow protocol=tcp destination-ports=22"; docs/filter.md lists the words
    #[arg(long, value_name = "RULES", value_delimiter = ';')]
    #[serde(deserialize_with = "rules")]
    #[schemars(extend("x-live" = true))]
    pub rule: Vec<Rule>,
    /// Action for frames from the guest that no rule matches, allow or deny [default: allow; deny, if there are
    /// rules from-guest]
    #[arg(long, value_name = "ACTION")]
    #[schemars(extend("x-live" = true))]
    pub from_guest_default: Option<Action>,
    /// Action for frames to the guest that no rule matches [default: allow; deny, if there are rules to-guest]
    #[arg(long, value_name = "ACTION")]
    #[schemars(extend("x-live" = true))]
    pub to_guest_default: Option<Action>,
}

impl Filter {
    /// What happens to frames that no rule matches. If no default is set, it is as with security groups: without rules
    /// all frames pass, with rules none.
    #[must_use]
    pub fn default_for(&self, direction: Direction) -> Action {
        let has_rules = self.rule.iter().any(|rule| rule.direction == direction);
        let follows = if has_rules { Action::Deny } else { Action::Allow };
        self.set_default(direction).unwrap_or(follows)
    }

    /// The default that is set.
    #[must_use]
    pub fn set_default(&self, direction: Direction) -> Option<Action> {
        match direction {
            Direction::FromGuest => self.from_guest_default,
            Direction::ToGuest => self.to_guest_default,
        }
    }
}
