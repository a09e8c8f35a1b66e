//! Reads the state of a network.

use std::sync::Arc;

use common::drivers;
use model::state::NetworkStatus;

use super::lane_status::{self, all_of};
use crate::network::Network;
use crate::nic::interface::Interface;
use crate::port::Port;

/// Reads the state of a network; `ports`: all ports of the daemon.
pub(crate) fn read(network: &Network, ports: &[Arc<Port>]) -> NetworkStatus {
    let shown = network.shown();
    let members = ports
        .iter()
        .filter(|port| port.config.nic.network() == Some(network.name.as_str()));
    let mut status = shown.status;
    status.name.clone_from(&network.name);
    status.ports = members.map(|port| port.name().to_owned()).collect();
    status.groups = all_of(&network.group_counters).collect();
    // Held for a moment only: a socket in there keeps its queue bound.
    let interface = shown.uplink.interface.upgrade();
    status.queues = lane_status::read_all(&shown.uplink, interface.as_deref());
    if let Some(interface) = interface {
        // Its present name: it may have been renamed.
        status.uplink = Some(interface.name());
        status.attached = attached(&interface);
        status.steering_note = Some(interface.steering.report().note).filter(|note| !note.is_empty());
        status.driver = Some(drivers::said_of(&interface.link.driver));
    }
    if let Some(underlay) = &mut status.underlay {
        let interface = shown.underlay.interface.upgrade();
        underlay.queues = lane_status::read_all(&shown.underlay, interface.as_deref());
        for counter in underlay.queues.iter_mut().flat_map(|lane| &mut lane.counters) {
            // A decapsulated frame cannot be passed to the host any more.
            counter.drop |= counter.name == "no_socket";
        }
        if let Some(interface) = interface {
            underlay.interface = interface.name();
            underlay.attached = attached(&interface);
        }
    }
    if let Some(host) = &mut status.host {
        let queues = lane_status::read_all(&shown.host, None);
        host.queue = queues.into_iter().next().unwrap_or_default();
    }
    status
}

fn attached(interface: &Interface) -> Option<String> {
    interface.steering.attached().map(|mode| mode.to_string())
}
