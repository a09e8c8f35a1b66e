//! Names on this host, for the completion of command lines.

use common::complete::Names;

use crate::cli::complete::keys;
use client::connection::statuses;
use client::directories::find_all;
use model::state::Status;

/// See [`Names`]. Asks the daemons whose control sockets this user may use.
pub(crate) struct OfThisHost;

fn daemons() -> Vec<Status> {
    statuses(&find_all())
}

impl Names for OfThisHost {
    fn ports(&self) -> Vec<String> {
        let ports = daemons().into_iter().flat_map(|daemon| daemon.ports);
        ports.map(|port| port.name).collect()
    }

    fn networks(&self) -> Vec<String> {
        let networks = daemons().into_iter().flat_map(|daemon| daemon.networks);
        networks.map(|network| network.name).collect()
    }

    fn keys(&self, id: &str) -> Option<clap::Command> {
        keys(id)
    }
}
