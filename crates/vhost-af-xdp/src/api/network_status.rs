//! Reads the state of a network.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use common::drivers;
use model::state::{HostStatus, NetworkStatus, UnderlayStatus};
use steer::mac_text;

use super::lane_status::{self, all_of};
use crate::network::{Network, RemoteCounts, ShownHost, ShownUnderlay};
use crate::nic::interface::Interface;
use crate::port::Port;

fn read_host(shown: &ShownHost) -> HostStatus {
    let facts = shown.lane.as_ref().and_then(Weak::upgrade);
    HostStatus {
        interface: shown.interface.clone(),
        macs: shown.macs.iter().map(|&mac| mac_text(mac)).collect(),
        bridge: shown.bridge.clone(),
        impaired: shown.impaired.clone(),
        queue: lane_status::read(0, None, &shown.counters, facts.as_deref(), None),
    }
}

fn read_underlay(shown: &ShownUnderlay) -> UnderlayStatus {
    // Held for a moment only: a socket in there keeps its queue bound.
    let interface = shown.interface.as_ref().and_then(Weak::upgrade);
    let interface = interface.as_deref();
    let queues = (shown.first..).zip(&shown.counters).zip(&shown.lanes);
    let queues = queues.enumerate().map(|(at, ((queue, counters), facts))| {
        let facts = facts.upgrade();
        let mut lane = lane_status::read(at, Some(queue), counters, facts.as_deref(), interface);
        // A decapsulated frame cannot be passed to the host any more.
        let of_program = lane.counters.iter_mut();
        of_program.for_each(|counter| counter.drop |= counter.name == "no_socket");
        lane
    });
    let count = |count: fn(&RemoteCounts) -> &AtomicUsize| {
        let remotes = shown.remotes.as_ref();
        remotes.map_or(0, |counts| count(counts).load(Relaxed))
    };
    UnderlayStatus {
        interface: interface.map_or_else(|| shown.name.clone(), Interface::name),
        attached: interface
            .and_then(|interface| interface.steering.attached())
            .map(|mode| mode.to_string()),
        addresses: count(|counts| &counts.addresses),
        vteps: count(|counts| &counts.vteps),
        resolved: count(|counts| &counts.resolved),
        left_out: count(|counts| &counts.left_out),
        impaired: shown.impaired.clone(),
        queues: queues.collect(),
    }
}

/// Reads the state of a network; `ports`: all ports of the daemon.
pub(crate) fn read(network: &Network, ports: &[Arc<Port>]) -> NetworkStatus {
    let shown = network.shown();
    let name = network.name.as_str();
    let members = ports
        .iter()
        .filter(|port| port.config.nic.network() == Some(name));
    // Held for a moment only: a socket in there keeps its queue bound.
    let interface = shown.interface.as_ref().and_then(Weak::upgrade);
    let interface = interface.as_deref();
    let mut numbers = shown.uplink.as_ref().map(|uplink| uplink.wanted().range());
    let queues = shown.counters.iter().enumerate().map(|(at, counters)| {
        // A tap has no queue number.
        let queue = numbers.as_mut().and_then(Iterator::next);
        let facts = shown.lanes.get(at).and_then(Weak::upgrade);
        lane_status::read(at, queue, counters, facts.as_deref(), interface)
    });
    let host = shown.host.as_ref().map(read_host);
    NetworkStatus {
        name: name.to_owned(),
        uplink: match interface {
            // Its present name: it may have been renamed.
            Some(interface) => Some(interface.name()),
            None => shown.uplink.map(|uplink| uplink.at.name),
        },
        attached: interface
            .and_then(|interface| interface.steering.attached())
            .map(|mode| mode.to_string()),
        steering_note: interface
            .map(|interface| interface.steering.report().note)
            .filter(|note| !note.is_empty()),
        driver: interface.map(|interface| drivers::said_of(&interface.link.driver)),
        up: shown.link.up,
        mtu: shown.link.mtu,
        impaired: shown.impaired,
        ports: members.map(|port| port.name().to_owned()).collect(),
        learned_evicted: shown.evicted,
        advertised: shown.advertised,
        not_advertised: shown.not_advertised,
        queues: queues.collect(),
        underlay: shown.underlay.as_ref().map(read_underlay),
        groups: all_of(&network.group_counters).collect(),
        host,
        source: None,
        configuration: None,
    }
}
