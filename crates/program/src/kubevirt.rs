//! The command line of `vhost-af-xdp-kubevirt`. Its manual page and its completions are made of it, too.

use std::path::PathBuf;

use clap::Parser;

use crate::log::LogArgs;

/// Connects VMs of KubeVirt to the vhost-user sockets of their resource claims.
///
/// It is the sidecar of a network binding plugin: KubeVirt starts it with each VM that has an interface with this
/// binding, and calls it before the VM starts. It adds a vhost-user interface to the domain for each of them.
/// docs/kubernetes.md is the guide.
#[derive(Debug, Clone, Parser)]
#[command(name = "vhost-af-xdp-kubevirt", version, max_term_width = 100)]
pub struct Options {
    /// Name of the binding in KubeVirt's configuration
    #[arg(
        long,
        value_name = "NAME",
        env = "VHOST_AF_XDP_BINDING",
        default_value = "vhost-af-xdp"
    )]
    pub binding: String,
    /// Name of the DRA driver
    #[arg(
        long,
        value_name = "NAME",
        env = "VHOST_AF_XDP_DRIVER",
        default_value = "vhost-af-xdp.dev"
    )]
    pub driver_name: String,
    /// Directory where virt-launcher finds the sockets of hooks
    #[arg(long, value_name = "PATH", default_value = "/var/run/kubevirt-hooks")]
    pub hooks_dir: PathBuf,
    /// Directory where Kubernetes mounts metadata of devices
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/var/run/kubernetes.io/dra-device-attributes"
    )]
    pub metadata_dir: PathBuf,
    /// The log
    #[command(flatten)]
    pub log: LogArgs,
}
