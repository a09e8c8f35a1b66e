//! The command line. Options that QEMU's `-netdev af-xdp` has, too, have the same names.

pub(crate) mod ask;
pub(crate) mod capture;
pub(crate) mod complete;
pub(crate) mod mark;
pub(crate) mod netkit;
mod serve;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use client::top::{TOP_KEYS, TopArgs};
use common::complete::CompleteArgs;

use self::ask::{EVENTS_EXAMPLES, EventsArgs, NETWORK_EXAMPLES, NetworkCommand, PORT_EXAMPLES, PortCommand};
use self::capture::{CAPTURE_EXAMPLES, CaptureArgs};
use self::mark::{MARK_EXAMPLES, MarkCommand};
use self::netkit::{NETKIT_EXAMPLES, NetkitArgs};
use crate::check::{CHECK_EXAMPLES, CheckArgs};
use crate::supervision::helper::HelperArgs;

pub(crate) use self::serve::ServeArgs;

const EXAMPLES: &str = "\
Examples:
  One guest on queue 0 of eth1:
    vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1
  Its RAM as packet memory, two queue pairs on queues 4 and 5:
    vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1 --queues 2 --start-queue 4 \\
        --memory direct
  Two guests in one process:
    vhost-af-xdp serve --ifname eth1 --port socket-path=/run/a.sock \\
        --port socket-path=/run/b.sock,start-queue=1
  Two guests connected to each other only:
    vhost-af-xdp serve --cable x --port socket-path=/run/a.sock --port socket-path=/run/b.sock
  The VMM is the server (QEMU: -chardev socket,path=/run/vm1.sock,server=on):
    vhost-af-xdp serve --socket-path /run/vm1.sock --client --ifname eth1
  Without privileges, by a lease of vhost-af-xdp-steward:
    vhost-af-xdp serve --socket-path /tmp/vm1.sock --ifname eth1 \\
        --steward /run/vhost-af-xdp/steward.sock
  Check a configuration file:
    vhost-af-xdp serve --config /etc/vhost-af-xdp/vhost-af-xdp.toml --check
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
    /// Show running daemons: a line for each network and port with rates and drops, and what is wrong
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Show ports, queues and workers live in the terminal: bits, frames and drops a second (runs vhost-af-xdp-top)
    #[command(after_help = TOP_KEYS)]
    Top(TopArgs),
    /// Show the load of workers of running daemons: time, frames, cycles a frame, shares of ports
    #[command(after_help = WORKERS_EXAMPLES)]
    Workers(WorkersArgs),
    /// Capture headers of frames from and to the guest of a port, as pcapng for tcpdump and wireshark
    #[command(after_help = CAPTURE_EXAMPLES)]
    Capture(CaptureArgs),
    /// Reload the files of running daemons; ports without changes are not affected
    #[command(after_help = RELOAD_EXAMPLES)]
    Reload(ReloadArgs),
    /// List, add, change and remove ports of a running daemon
    #[command(subcommand, after_help = PORT_EXAMPLES, disable_help_subcommand = true)]
    Port(PortCommand),
    /// List, add, change and remove networks of a running daemon
    #[command(subcommand, after_help = NETWORK_EXAMPLES, disable_help_subcommand = true)]
    Network(NetworkCommand),
    /// Print events of a running daemon as they occur
    #[command(after_help = EVENTS_EXAMPLES)]
    Events(EventsArgs),
    /// Mark flows in the XDP program of an interface, for filter rules of ports
    #[command(subcommand, after_help = MARK_EXAMPLES)]
    Mark(MarkCommand),
    /// Lease a NIC queue to a netkit device in another network namespace, for as long as this command runs
    #[command(after_help = NETKIT_EXAMPLES)]
    Netkit(NetkitArgs),
    /// Show who holds which NIC queue of this host: NAPI, interrupt, sockets, leases, rules, daemons
    #[command(after_help = QUEUES_EXAMPLES)]
    Queues(QueuesArgs),
    /// Report what an interface, its driver and this kernel provide, and what to type; nothing is started
    #[command(after_help = CHECK_EXAMPLES)]
    Check(CheckArgs),
    /// Run vhost-af-xdp-bench, which measures raw AF_XDP sockets on an interface, and TCP messages
    #[command(disable_help_flag = true)]
    Bench {
        /// Options of the program, see `vhost-af-xdp-bench --help`
        #[arg(value_name = "OPTION", trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
    /// Helper process of `serve` outside its sandbox
    #[command(hide = true)]
    Helper(HelperArgs),
    /// Completions for shells
    #[command(hide = true)]
    Complete(CompleteArgs),
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Show this port or network in full: options, modes, counters, drops
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Control socket of one daemon [default: all that are found]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Show all daemons, ports and networks in full
    #[arg(long, conflicts_with = "name")]
    pub(crate) all: bool,
    /// Print JSON, with everything: one document for all daemons, or one for NAME
    #[arg(long, conflicts_with = "all")]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WorkersArgs {
    /// Control socket of one daemon [default: all that are found]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Print JSON, one document for all daemons
    #[arg(long, conflicts_with = "watch")]
    pub(crate) json: bool,
    /// Repeat, each time with the activity since the last output
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_pause)]
    pub(crate) watch: Option<u64>,
    /// Reset these statistics, and print nothing; counters of `status` and metrics are kept
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    pub(crate) reset: bool,
}

const WORKERS_EXAMPLES: &str = "\
Examples:
  What workers have done since they started, or since the last reset:
    vhost-af-xdp workers
  What they do each second, until Ctrl-C:
    vhost-af-xdp workers --watch
  What they do in ten seconds:
    vhost-af-xdp workers --reset && sleep 10 && vhost-af-xdp workers
  Ports that take more than a quarter of a worker:
    vhost-af-xdp workers --json | jq '.[].workers[].lanes[] | select(.time.percent > 25) | .port'";

#[derive(Debug, Args)]
pub(crate) struct ReloadArgs {
    /// Control socket of one daemon [default: all that are found and have a file]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

const RELOAD_EXAMPLES: &str = "\
Examples:
  Check the file, then reload it:
    vhost-af-xdp serve --config /etc/vhost-af-xdp/vhost-af-xdp.toml --check && vhost-af-xdp reload";

const STATUS_EXAMPLES: &str = "\
Examples:
  Every daemon (of this user; for root, of all users):
    vhost-af-xdp status
  One port with all its counters:
    vhost-af-xdp status vm1
  Ports that are impaired, with the reason:
    vhost-af-xdp status --json | jq '.[].ports[] | select(.impaired) | .endpoint, .impaired'";

const QUEUES_EXAMPLES: &str = "\
Examples:
  Every queue of every interface in this network namespace:
    vhost-af-xdp queues
  Rates of the queues of one interface, each second until Ctrl-C:
    vhost-af-xdp queues eth1 --watch";

#[derive(Debug, Args)]
pub(crate) struct QueuesArgs {
    /// Only queues of this interface
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
    /// Repeat, with rates instead of counts
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_pause)]
    pub(crate) watch: Option<u64>,
}

/// Seconds between two outputs.
fn parse_pause(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    seconds.ok_or_else(|| "1 to 86400 seconds between tables".to_owned())
}

#[cfg(test)]
pub(crate) mod tests;
