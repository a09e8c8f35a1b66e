//! The command line of `vhost-af-xdp-dra`. Its manual page and its completions are made of it, too.

use std::path::PathBuf;

use clap::Parser;

use crate::log::LogArgs;

const EXAMPLES: &str = "\
Examples:
  On node worker-1, for the networks of one daemon:
    vhost-af-xdp-dra --node-name worker-1 --control /run/vhost-af-xdp-lan/control.sock \\
        --kubeconfig /etc/kubernetes/vhost-af-xdp-dra.conf
  The daemon must allow sockets in directories of claims, and should keep its ports when it restarts:
    [daemon]
    socket-directories = [\"/run/vhost-af-xdp-dra/*\"]
    state = \"/var/lib/vhost-af-xdp/added.toml\"

It needs no capability: write access to directories of kubelet and CDI, and to the daemon's control socket.
SIGTERM leaves all ports in place, and the next driver continues with them. docs/kubernetes.md is the guide.";

/// Gives ports of a daemon's networks to pods of Kubernetes, as kubelet's driver for Dynamic Resource Allocation.
#[derive(Debug, Clone, Parser)]
#[command(name = "vhost-af-xdp-dra", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Options {
    /// Name of this node in the cluster
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: String,
    /// Control socket of the daemon whose networks pods can use
    #[arg(long, value_name = "PATH")]
    pub control: PathBuf,
    /// Credentials for the cluster [default: those of the pod's service account]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Name of the driver in device classes, claims and slices
    #[arg(long, value_name = "NAME", default_value = "vhost-af-xdp.dev")]
    pub driver_name: String,
    /// Directory of kubelet, with `plugins` and `plugins_registry`
    #[arg(long, value_name = "PATH", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// Directory for CDI files, which tell the container runtime what to mount
    #[arg(long, value_name = "PATH", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Directory for the sockets, for this driver alone: it has a directory for each claim. The daemon must have it in
    /// `socket-directories`, with `/*`
    #[arg(long, value_name = "PATH", default_value = "/run/vhost-af-xdp-dra")]
    pub sockets_dir: PathBuf,
    /// Most ports that the cluster may allocate on each network
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ports: u16,
    /// Group of the sockets' directories, in which the daemon is: it creates the sockets there [default: none, the
    /// daemon is this user or root]
    #[arg(long, value_name = "GROUP")]
    pub directory_group: Option<String>,
    /// Permissions of a claim's directory, octal [default: 755, with --directory-group 775]
    #[arg(long, value_name = "MODE", value_parser = octal)]
    pub directory_mode: Option<u32>,
    /// SELinux label of a claim's directory, for instance system_u:object_r:container_file_t:s0 [default: as the kernel
    /// sets it]
    #[arg(long, value_name = "LABEL")]
    pub selinux_label: Option<String>,
    /// Owner of sockets whose claim names none [default: the daemon's user]
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<String>,
    /// Group of sockets whose claim names none [default: the daemon's]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Permissions of sockets whose claim names none, octal. Only pods of the claim see the socket
    #[arg(long, value_name = "MODE", default_value = "666")]
    pub socket_mode: String,
    /// The log
    #[command(flatten)]
    pub log: LogArgs,
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777);
    mode.ok_or_else(|| format!("{text:?} is not a mode: give octal digits such as 750"))
}
