//! A network: its uplink, and the host as one more receiver.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use serde_json::{Map, Value};

use super::{LaneStatus, Named, Source};
use crate::config::Network;

/// One network.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct NetworkStatus {
    /// Its name.
    pub name: String,
    /// Interface that its ports share; none: its ports reach only each other.
    pub uplink: Option<String>,
    /// How the steering program is attached: `native`, `skb`, or `tap` (no program, frames arrive by a tap); none
    /// without an uplink, or a program on it.
    pub attached: Option<String>,
    /// Why guests lose frames, or why the NIC does not steer frames to its queues more precisely.
    #[serde(default)]
    pub steering_note: Option<String>,
    /// What is known of the uplink's driver.
    pub driver: Option<String>,
    /// The link is up; always true without an uplink.
    pub up: bool,
    /// MTU that its guests are offered, bytes.
    pub mtu: u32,
    /// Why no frames move over the uplink although they should.
    pub impaired: Option<String>,
    /// Names of its ports.
    pub ports: Vec<String>,
    /// Learned addresses that were evicted to make room for others.
    #[serde(default)]
    pub learned_evicted: u64,
    /// If the uplink is a tunnel: MAC addresses of guests that are advertised to other hosts.
    #[serde(default)]
    pub advertised: usize,
    /// Why addresses of guests are not advertised to other hosts.
    #[serde(default)]
    pub not_advertised: Option<String>,
    /// Queues of the uplink.
    pub queues: Vec<LaneStatus>,
    /// The underlay of the uplink; none without one.
    #[serde(default)]
    pub underlay: Option<UnderlayStatus>,
    /// Counters of multicast and broadcast frames from the uplink.
    #[schemars(skip)]
    pub groups: Vec<Named>,
    /// How the host is reached; none without an uplink, or with `host = false`.
    pub host: Option<HostStatus>,
    /// Where its configuration is from; null without a file.
    #[serde(default)]
    pub source: Option<Source>,
    /// Its configuration; null without a file.
    #[serde(default)]
    #[schemars(with = "Option<Network>")]
    pub configuration: Option<Map<String, Value>>,
}

/// Queues of the interface that carries the packets of the uplink, a vxlan or geneve device.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct UnderlayStatus {
    /// The interface.
    pub interface: String,
    /// How the steering program is attached there; none: it is not.
    pub attached: Option<String>,
    /// Addresses on other hosts that the daemon encapsulates frames to; 0 although `vteps`
    /// is not: all addresses that no port here has (Geneve).
    pub addresses: usize,
    /// The hosts (VTEPs) that have them.
    pub vteps: usize,
    /// Those whose next hop is resolved: the kernel encapsulates frames to the others.
    pub resolved: usize,
    /// Addresses that there was no room for: the kernel encapsulates frames to them.
    pub left_out: usize,
    /// Why it is not used: the kernel encapsulates and decapsulates all frames.
    pub impaired: Option<String>,
    /// Its queues.
    pub queues: Vec<LaneStatus>,
}

impl NetworkStatus {
    /// Queues of the uplink, the underlay and the tap to the host, with the word for each.
    pub fn lanes(&self) -> impl Iterator<Item = (&'static str, &LaneStatus)> {
        let uplink = self.queues.iter().map(|lane| ("uplink", lane));
        let underlay = self.underlay.iter().flat_map(|underlay| &underlay.queues);
        let host = self.host.iter().map(|host| ("host", &host.queue));
        uplink.chain(underlay.map(|lane| ("underlay", lane))).chain(host)
    }

    /// Its queues of an interface.
    #[must_use]
    pub fn queues_of(&self, interface: &str) -> &[LaneStatus] {
        let underlay = self.underlay.as_ref();
        match underlay.filter(|underlay| underlay.interface == interface) {
            Some(underlay) => &underlay.queues,
            None if self.uplink.as_deref() == Some(interface) => &self.queues,
            None => &[],
        }
    }
}

/// The host, as one more receiver.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct HostStatus {
    /// The tap device that connects it to the network; none: it is not reached.
    pub interface: Option<String>,
    /// Its addresses.
    pub macs: Vec<String>,
    /// The bridge that the uplink is a port of, if it is one.
    #[serde(default)]
    pub bridge: Option<BridgeStatus>,
    /// Why it is not reached.
    pub impaired: Option<String>,
    /// The queue of the tap device.
    pub queue: LaneStatus,
}

/// A bridge that the uplink is a port of.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct BridgeStatus {
    /// Its name.
    pub name: String,
    /// Addresses at its other ports, which are reached through the host.
    pub behind: usize,
    /// Addresses at its other ports that are not reached: there are too many.
    pub left_out: u32,
}
