//! Names that shells complete, as this host has them now.

use common::complete::Names;

use crate::cli::complete::keys;
use client::connection::statuses;
use client::directories::find_all;
use model::state::Status;

/// See [`Names`]. Daemons are asked by their control sockets, those that this user may ask.
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
