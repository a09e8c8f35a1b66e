//! The command line of `vhost-af-xdp-steward`. Its manual page and its completions are made of it, too.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::log::LogArgs;

/// Default path of the policy.
pub const DEFAULT_POLICY: &str = "/etc/vhost-af-xdp/steward.toml";
/// Default path of the steward's socket.
pub const DEFAULT_SOCKET: &str = "/run/vhost-af-xdp/steward.sock";

const EXAMPLES: &str = "\
Examples:
  Serve leases by the policy in /etc/vhost-af-xdp/steward.toml:
    vhost-af-xdp-steward
  Check a policy, and change nothing:
    vhost-af-xdp-steward --policy steward.toml --check
  A policy: user vhost may lease queues 0 to 3 of eth1, with up to 1 GiB of memory for packets:
    [[allow]]
    user = \"vhost\"
    interface = \"eth1\"
    queues = \"0-3\"
    memlock = \"1 GiB\"
  Then, as user vhost, without any capability:
    vhost-af-xdp serve --steward /run/vhost-af-xdp/steward.sock \\
        --socket-path /tmp/vm1.sock --ifname eth1
  Remove all that a steward has left behind, and exit:
    vhost-af-xdp-steward --take-back

SIGTERM and even SIGKILL leave programs and leases in place: frames flow, and the next steward
takes them over. On SIGINT it removes everything and exits. SIGHUP reloads the policy.
It needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_IPC_LOCK and CAP_SETUID.";

/// Leases NIC queues to processes without privileges, by a policy.
#[derive(Debug, Parser)]
#[command(name = "vhost-af-xdp-steward", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Options {
    /// Policy file; must not be writable by others
    #[arg(long, value_name = "PATH", default_value = DEFAULT_POLICY)]
    pub policy: PathBuf,
    /// Where lessees connect; everybody may, the policy decides. A socket passed by systemd comes first
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// Print the parsed policy with warnings about likely mistakes, and exit
    #[arg(long, conflicts_with = "take_back")]
    pub check: bool,
    /// Where leases are recorded, so that a restart does not end them; for this user alone [default:
    /// $RUNTIME_DIRECTORY, else /run/vhost-af-xdp-steward]
    #[arg(long, value_name = "PATH")]
    pub state: Option<PathBuf>,
    /// Where programs are pinned, so that a restart does not end them; on a bpffs [default: /sys/fs/bpf/vhost-af-xdp]
    #[arg(long, value_name = "PATH")]
    pub pins: Option<PathBuf>,
    /// How long after a restart queues are kept for lessees that have not come back, seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub grace: Duration,
    /// How long program and header split stay on an interface without leases, seconds: a NIC may lose its link for a
    /// moment each time they change
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub linger: Duration,
    /// Remove everything that a steward has left behind, and exit; needs no policy file
    #[arg(long)]
    pub take_back: bool,
    /// The log
    #[command(flatten)]
    pub log: LogArgs,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a number of seconds from 0 to 86400");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    (0.0..=86_400.0)
        .contains(&seconds)
        .then(|| Duration::from_secs_f64(seconds))
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Help is wrapped at 100 columns: an example that is longer could not be typed in as it is shown.
    #[test]
    fn examples_of_help_are_shown_as_they_are_typed_in() {
        for line in EXAMPLES.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}
