//! `vhost-af-xdp-kubevirt`: a network binding plugin of KubeVirt. It connects a VM to the ports of its resource claims.
//!
//! Theory of operation. KubeVirt starts the program as a sidecar in the pod of a VM that has an interface with this
//! binding, and gives it the claims of these interfaces' networks (VEP 183; kubevirt/kubevirt pull request 18741). Before
//! virt-launcher defines the domain in libvirt, it calls the sidecar by gRPC on a socket in a directory that both have
//! ([`service`]). The sidecar reads from the VirtualMachineInstance which interfaces are its own and which claims they use
//! ([`vmi`]), from the metadata of the claims' devices where the sockets are ([`metadata`]), and adds interfaces to the
//! domain's XML ([`domain`]). It neither opens the vhost-user sockets nor moves frames, and needs no privilege.

mod domain;
mod metadata;
mod service;
mod vmi;

use std::process::ExitCode;

use clap::Parser as _;
use program::kubevirt::Options;

fn main() -> ExitCode {
    let options = Options::parse();
    options.log.start("info");
    program::log::exit("vhost-af-xdp-kubevirt", service::run(options))
}
