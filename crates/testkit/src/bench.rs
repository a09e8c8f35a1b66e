//! `vhost-af-xdp bench` in a network namespace.

use crate::program::bench;
use crate::{NetNs, Running};

/// Starts it on an interface.
///
/// # Panics
/// If it does not start.
pub fn start_bench(netns: &NetNs, interface: &str, args: &[&str]) -> Running {
    let mut command = netns.command(bench());
    command.args(["--ifname", interface]).args(args);
    Running::start(command)
}
