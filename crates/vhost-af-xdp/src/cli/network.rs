//! Keys of a network in a configuration file, and those of its ports.

use anyhow::bail;
use clap::{ArgAction, Args};
use steward::protocol::is_interface_name;

use super::hints::HintsArgs;
use super::memory::{of_a_pair, parse_packet_memory};
use super::values::{VlanList, parse_vlans};
use crate::config::{MemberVlans, NetworkConfig, NicConfig, Segments, UplinkConfig};
use crate::options::{BusyPollArgs, ModeArg, bind_request, mode_request};

/// Keys of a network's table.
#[derive(Debug, Clone, Args)]
pub(super) struct NetworkArgs {
    /// Network interface that all ports of the network share [default: none, they reach each other only]
    #[arg(long, value_name = "IFNAME")]
    uplink: Option<String>,
    /// First queue of the interface
    #[arg(long, value_name = "M", default_value_t = 0)]
    start_queue: u32,
    /// Queues of the interface: all that it spreads frames over (`ethtool -l`)
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u32,
    /// How frames come from the interface [default: auto]
    #[arg(long, value_enum)]
    mode: Option<ModeArg>,
    /// Never use the driver's zero-copy mode
    #[arg(long)]
    force_copy: bool,
    /// Use the driver's zero-copy mode, whatever is known of the driver, or fail
    #[arg(long, conflicts_with = "force_copy")]
    force_zero_copy: bool,
    /// How segments of guests' GSO packets leave
    #[arg(long, value_enum, default_value = "auto")]
    segments: Segments,
    /// Memory of the daemon for the frames of each queue, from 512KiB to 6MiB [default: 6MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_packet_memory)]
    packet_memory: Option<u64>,
    #[command(flatten)]
    hints: HintsArgs,
    #[command(flatten)]
    busy_poll: BusyPollArgs,
    /// Let the network reach the host over the uplink's own addresses
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true)]
    host: bool,
}

impl NetworkArgs {
    /// The configuration of the network of that name.
    /// Errors: one line, naming the key.
    pub(super) fn build(self, name: &str) -> anyhow::Result<NetworkConfig> {
        let uplink = match self.uplink {
            Some(uplink) if !is_interface_name(&uplink) => bail!(
                "uplink {uplink:?}: no interface can have this name: 1 to 15 bytes, no `/`, `:` or blank (`ip link` \
                 lists them)"
            ),
            Some(uplink) => Some(UplinkConfig {
                name: uplink,
                start_queue: self.start_queue,
                queues: self.queues,
                mode: mode_request(self.mode),
                bind: bind_request(self.force_copy, self.force_zero_copy),
                packet_bytes: of_a_pair(self.packet_memory)?,
                segments: self.segments,
                busy_poll: self.busy_poll.build(),
                hints: self.hints.build(),
                host: self.host,
            }),
            None => None,
        };
        Ok(NetworkConfig {
            name: name.to_owned(),
            uplink,
        })
    }
}

/// Keys of a port's table that say how it is part of a network.
#[derive(Debug, Clone, Args)]
pub(super) struct MemberArgs {
    /// Network that the port is part of: one that the file has a table for. With `vlan` its frames are of that VLAN,
    /// without a tag towards the guest. With `ifname` the port has queues of the uplink's interface for itself
    #[arg(long, value_name = "NAME", conflicts_with_all = ["cable", "null"])]
    network: Option<String>,
    /// VLANs of the network whose frames the guest gets and sends, with their tags, for instance 100,200-203
    #[arg(long, value_name = "LIST", value_parser = parse_vlans, conflicts_with = "vlan")]
    trunk: Option<VlanList>,
    /// Let the guest reach no other port of the network that is isolated, too
    #[arg(long)]
    isolated: bool,
    /// Give the guest copies of the frames of its VLANs that the network moves for others
    #[arg(long)]
    promiscuous: bool,
    /// Give the guest back what it sends to an address of its own port, or to a group, as a bridge in hairpin mode does
    #[arg(long)]
    hairpin: bool,
    /// Let the guest send what the two ends of a link tell each other, and switches may act on: spanning tree, LACP,
    /// 802.1X, LLDP
    #[arg(long)]
    link_control: bool,
    /// Let the guest send from further addresses, which are learned, for what is inside it or behind it: up to 64
    #[arg(long)]
    learning: bool,
}

impl MemberArgs {
    /// What the port goes to, if that is a network. `vlan`: what the port says by that key.
    /// Errors: one line, naming the key.
    pub(super) fn build(self, vlan: Option<&VlanList>) -> anyhow::Result<Option<NicConfig>> {
        let Some(name) = self.network else {
            let keys = [
                (self.trunk.is_some(), "trunk"),
                (self.isolated, "isolated"),
                (self.promiscuous, "promiscuous"),
                (self.hairpin, "hairpin"),
                (self.link_control, "link-control"),
                (self.learning, "learning"),
            ];
            match keys.iter().find(|(said, _)| *said) {
                Some((_, key)) => bail!("{key}: goes with network: name one"),
                None => return Ok(None),
            }
        };
        let vlans = match (self.trunk, vlan) {
            (Some(VlanList(mut trunk)), _) => {
                trunk.sort_unstable();
                trunk.dedup();
                if trunk.first() == Some(&0) {
                    bail!("trunk: VLAN 0 is none: give 1 to 4094");
                }
                MemberVlans::Trunk(trunk)
            }
            (None, Some(VlanList(vlans))) => match vlans[..] {
                [vlan] if vlan > 0 => MemberVlans::Access(vlan),
                _ => bail!("vlan: a port of a network is of one VLAN, 1 to 4094: for several give trunk"),
            },
            (None, None) => MemberVlans::Untagged,
        };
        Ok(Some(NicConfig::Network {
            name,
            vlans,
            isolated: self.isolated,
            promiscuous: self.promiscuous,
            hairpin: self.hairpin,
            link_control: self.link_control,
            learning: self.learning,
            own: None,
        }))
    }
}
