//! Names that shells complete, as this host has them now.

use std::fs;

use crate::api::control_socket::{ask_all, find_all};
use crate::api::status::Status;
use crate::cli::complete::Names;

/// See [`Names`]. Daemons are asked by their control sockets, those that this user may ask.
pub(crate) struct OfThisHost;

fn daemons() -> Vec<Status> {
    ask_all(&find_all())
}

impl Names for OfThisHost {
    fn interfaces(&self) -> Vec<String> {
        // Of this network namespace, however old the mount of /sys is.
        let list = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
        let name = |line: &str| Some(line.rsplit_once(':')?.0.trim().to_owned());
        list.lines().filter_map(name).collect()
    }

    fn ports(&self) -> Vec<String> {
        let ports = daemons().into_iter().flat_map(|daemon| daemon.ports);
        ports.map(|port| port.name).collect()
    }

    fn networks(&self) -> Vec<String> {
        let networks = daemons().into_iter().flat_map(|daemon| daemon.networks);
        networks.map(|network| network.name).collect()
    }
}
