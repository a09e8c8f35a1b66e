//! What `status` tells of a network.

use std::fmt::Write as _;
use std::sync::{Arc, Weak};

use common::drivers;
use serde::{Deserialize, Serialize};
use steer::mac_text;
use steward::protocol::BEHIND_MAX;

use super::lane_status::{LaneStatus, Named};
use crate::network::{Network, ShownBridge, ShownHost};
use crate::port::Port;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct NetworkStatus {
    pub(crate) name: String,
    /// Interface that its ports share; none: they reach each other only.
    pub(crate) uplink: Option<String>,
    /// How the steering program is attached: `native`, `skb`, or `tap`: not at all, and frames come by a tap; none without
    /// an uplink, or a program on it.
    pub(crate) attached: Option<String>,
    /// What its holder should know of how frames come to its queues.
    #[serde(default)]
    pub(crate) steering_note: Option<String>,
    /// What is known of the uplink's driver.
    pub(crate) driver: Option<String>,
    /// Frames can leave; without an uplink always.
    pub(crate) up: bool,
    /// MTU told to its guests, bytes.
    pub(crate) mtu: u32,
    /// Why no frames move over the uplink although they should.
    pub(crate) impaired: Option<String>,
    /// Names of its ports.
    pub(crate) ports: Vec<String>,
    /// Learned addresses that were evicted: others needed their room.
    #[serde(default)]
    pub(crate) learned_evicted: u64,
    /// Queues of the uplink.
    pub(crate) queues: Vec<LaneStatus>,
    /// What is counted of frames to groups that came by the uplink.
    pub(crate) groups: Vec<Named>,
    /// What is counted of frames from worker to worker, all links together.
    pub(crate) links: Vec<Named>,
    /// None without an uplink, or with `host = false`.
    pub(crate) host: Option<HostStatus>,
}

/// The host, as one more receiver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct HostStatus {
    /// The tap device that joins it with the network; none: it is not reached.
    pub(crate) interface: Option<String>,
    /// Its addresses.
    pub(crate) macs: Vec<String>,
    /// The bridge that the uplink is part of; none: it is of none.
    #[serde(default)]
    pub(crate) bridge: Option<BridgeStatus>,
    /// Why it is not reached.
    pub(crate) impaired: Option<String>,
    /// That device's queue.
    pub(crate) queue: LaneStatus,
}

/// A bridge that the uplink is part of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BridgeStatus {
    pub(crate) name: String,
    /// Addresses at its other ports, which are reached through the host.
    pub(crate) behind: usize,
    /// Addresses at its other ports that are not reached: there are too many.
    pub(crate) left_out: u32,
}

impl BridgeStatus {
    fn read(shown: &ShownBridge) -> Self {
        let ShownBridge {
            name,
            behind,
            left_out,
        } = shown.clone();
        Self {
            name,
            behind,
            left_out,
        }
    }

    fn render(&self) -> String {
        let Self { name, behind, .. } = self;
        let left_out = match self.left_out {
            0 => String::new(),
            more => format!(", {more} are not, beyond {BEHIND_MAX} (`bridge fdb show br {name}`)"),
        };
        format!(
            "uplink is a port of bridge {name}: {behind} addresses at its other ports are reached{left_out}"
        )
    }
}

impl HostStatus {
    fn read(shown: &ShownHost) -> Self {
        let facts = shown.lane.as_ref().and_then(Weak::upgrade);
        Self {
            interface: shown.interface.clone(),
            macs: shown.macs.iter().map(|&mac| mac_text(mac)).collect(),
            bridge: shown.bridge.as_ref().map(BridgeStatus::read),
            impaired: shown.impaired.clone(),
            queue: LaneStatus::read(0, None, &shown.counters, facts.as_deref(), None),
        }
    }

    fn render(&self) -> String {
        match (&self.impaired, &self.interface) {
            (Some(why), _) => format!("host not reached: {why}"),
            (None, Some(interface)) => {
                format!("host reached at {}, by {interface}", self.macs.join(", "))
            }
            (None, None) => "host not reached yet".to_owned(),
        }
    }
}

impl NetworkStatus {
    /// Of one of these ports'.
    pub(crate) fn read(network: &Network, ports: &[Arc<Port>]) -> Self {
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
            // A tap has none.
            let queue = numbers.as_mut().and_then(Iterator::next);
            let facts = shown.lanes.get(at).and_then(Weak::upgrade);
            LaneStatus::read(at, queue, counters, facts.as_deref(), interface)
        });
        let host = shown.host.as_ref().map(HostStatus::read);
        Self {
            name: name.to_owned(),
            uplink: match interface {
                // By its name now.
                Some(interface) => Some(interface.name()),
                None => shown.uplink.map(|uplink| uplink.name),
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
            queues: queues.collect(),
            groups: Named::all_of(&network.group_counters).collect(),
            links: Named::sum_of(&network.link_counters()),
            host,
        }
    }

    /// As a person reads it; its queues are shown by somebody else.
    pub(super) fn render(&self, text: &mut String) {
        let state = match (&self.impaired, self.up) {
            (Some(why), _) => format!("impaired: {why}"),
            (None, true) => "up".to_owned(),
            (None, false) => "its uplink is down".to_owned(),
        };
        let uplink = match (&self.uplink, &self.attached) {
            (None, _) => "no uplink".to_owned(),
            (Some(uplink), Some(mode)) => format!("uplink {uplink} (program attached {mode})"),
            (Some(uplink), None) => format!("uplink {uplink} (no program attached)"),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\nnetwork {}: {state}", self.name);
        let _ = writeln!(
            text,
            "  {uplink}, mtu {}, ports: {}",
            self.mtu,
            self.ports.join(", ")
        );
        if let Some(driver) = &self.driver {
            let _ = writeln!(text, "  driver {driver}");
        }
        if let Some(note) = &self.steering_note {
            let _ = writeln!(text, "  {note}");
        }
        if self.learned_evicted > 0 {
            let _ = writeln!(text, "  {} learned addresses were evicted", self.learned_evicted);
        }
        if let Some(host) = &self.host {
            let _ = writeln!(text, "  {}", host.render());
            if let Some(bridge) = &host.bridge {
                let _ = writeln!(text, "  {}", bridge.render());
            }
        }
    }
}
