//! The command line of `netkit`.

use std::path::PathBuf;

use clap::Args;
use model::config::{Mac, Vlans};
use program::steward::DEFAULT_SOCKET;
use steer::Filter;

pub(crate) const NETKIT_EXAMPLES: &str = "\
Examples:
  Queue 3 of eth1 as pod0 in the network namespace pod, with the frames to one address:
    vhost-af-xdp netkit eth1 3 pod0 --netns /run/netns/pod --mac 52:54:00:00:00:01 \\
        --pin /sys/fs/bpf/pod0
  Serve a guest by that netkit:
    nsenter --net=/run/netns/pod vhost-af-xdp serve --socket-path /run/pod.sock --ifname pod0 \\
        --start-queue 1 --inhibit --map-path /sys/fs/bpf/pod0
  What the queue is leased to:
    vhost-af-xdp queues eth1

The steward's policy must have `netkit = true` in the lease's rule. It needs Linux 7.1, and a NIC
whose driver has queue management and zero-copy for AF_XDP: gve, mlx5. The netkit exists until
it ends (SIGTERM, Ctrl-C).";

/// A netkit, and the frames that its queue receives.
#[derive(Debug, Args)]
pub(crate) struct NetkitArgs {
    /// The NIC
    #[arg(value_name = "IFNAME")]
    pub(crate) interface: String,
    /// Its queue
    #[arg(value_name = "QUEUE")]
    pub(crate) queue: u32,
    /// Name of the netkit
    #[arg(value_name = "NETKIT")]
    pub(crate) name: String,
    /// File of the target network namespace: /run/netns/NAME, /proc/PID/ns/net [default: the
    /// steward's, for root only]
    #[arg(long, value_name = "FILE")]
    pub(crate) netns: Option<PathBuf>,
    /// Pin the map that takes its socket there, on a bpffs; removed at the end
    #[arg(long, value_name = "PATH")]
    pub(crate) pin: Option<PathBuf>,
    /// Only frames to this address and multicast; the netkit gets it, too, and the NIC's filter if the policy names
    /// it [default: all frames of the queue]
    #[arg(long, value_name = "MAC")]
    mac: Option<Mac>,
    /// Only frames of these VLANs: 100,200-203; 0: those without one
    #[arg(long, value_name = "LIST")]
    vlan: Option<Vlans>,
    /// The steward's socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) steward: PathBuf,
}

impl NetkitArgs {
    /// The frames that the queue receives.
    pub(crate) fn filter(&self) -> Filter {
        Filter {
            macs: self.mac.into_iter().map(|mac| mac.0).collect(),
            vlans: self.vlan.clone().map_or_else(Vec::new, |list| list.0),
        }
    }
}
