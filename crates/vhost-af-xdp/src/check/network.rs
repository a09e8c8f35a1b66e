//! What a network with this interface as its uplink gets: queues that many guests share.

use serde::Serialize;
use steer::HintSet;
use steward_protocol::STATIONS_MAX;

use super::facts::Facts;
use super::holders::port_line;
use super::placements::PlacementReport;
use crate::api::queues::{Holder, named};

/// For a network on all queues of the interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct NetworkReport {
    /// Mode as `status` will show it for each queue; none: it is not possible.
    mode: Option<String>,
    /// The number of queues that the interface spreads frames over: the network needs all of them.
    queues: u32,
    /// Queues among these that are in use.
    taken_queues: Vec<u32>,
    /// The network that uses some of them.
    there: Option<String>,
    /// Most addresses of guests, each in a VLAN.
    most_stations: usize,
    /// What the host keeps of the interface.
    host: &'static str,
    /// The bridge that the interface is a port of.
    bridge: Option<String>,
}

/// The host keeps the interface.
const HOST: &str = "it keeps the interface, its addresses, and frames for no guest; guests and it reach each other by \
                    these addresses (host = false: they do not)";

impl Facts {
    /// What a network gets. Frames are copied, so the mode is that of `copy`, the report for copy placement.
    /// `None`: guests cannot be reached through the interface.
    pub(super) fn network(&self, copy: &PlacementReport) -> Option<NetworkReport> {
        if self.loopback || self.link.has_leased_only {
            return None;
        }
        let free = self.free_queues();
        let taken = (0..self.link.rx_queues).filter(|queue| !free.contains(queue));
        Some(NetworkReport {
            mode: copy.mode.clone(),
            queues: self.link.rx_queues,
            taken_queues: taken.collect(),
            there: self
                .network_there()
                .and_then(|(holder, _)| holder.network.clone()),
            most_stations: STATIONS_MAX,
            host: HOST,
            bridge: self.bridge.clone(),
        })
    }

    /// The lines of a configuration file for a network, and the command that starts it.
    pub(super) fn network_lines(&self, copy: &PlacementReport) -> Vec<String> {
        if let Some((holder, queues)) = self.network_there() {
            return self.lines_of_one_more(holder, &queues);
        }
        let mut lines = Vec::new();
        let holders = self.holders();
        if !holders.is_empty() {
            lines.push(format!(
                "# {}: frames for its guests that come there would be the host's, so the network has to have them",
                holders.join("; ")
            ));
        }
        let (name, queues) = (&self.link.name, self.link.rx_queues);
        lines.extend([
            "# /etc/vhost-af-xdp/lan.toml:".to_owned(),
            "[network.lan]".to_owned(),
            format!("uplink = \"{name}\""),
            format!("queues = {queues}"),
        ]);
        let other = match copy.mode.as_deref() {
            Some("zero-copy") => None,
            Some("tap") => {
                Some("xdp\": if small frames to guests matter more than streams, of guests or the host")
            }
            _ => Some("tap\": if streams, of guests or the host, matter more than small frames"),
        };
        lines.extend(other.map(|other| format!("# mode = \"{other} (docs/hardware.md)")));
        lines.extend([
            "# and [port.vm1] with network, socket-path and mac for each guest (docs/networks.md); then"
                .to_owned(),
            match self.steward && !self.lacking.is_empty() {
                true => "systemctl start vhost-af-xdp-network@lan".to_owned(),
                false => "vhost-af-xdp serve --config /etc/vhost-af-xdp/lan.toml".to_owned(),
            },
        ]);
        lines
    }
}

impl Facts {
    /// The lines for one more guest of a network that uses these queues: its ports share them, so none need be free.
    fn lines_of_one_more(&self, holder: &Holder, queues: &[u32]) -> Vec<String> {
        let (name, pid) = (holder.network.as_deref().unwrap_or_default(), holder.pid);
        let mut lines = vec![
            format!(
                "# network {name} of process {pid} has {}: a further guest is a port of it, and takes no queue",
                named(queues)
            ),
            port_line(holder, &[("network", name), ("mac", "MAC")]),
        ];
        let lacks: Vec<u32> = (0..self.link.rx_queues)
            .filter(|queue| !queues.contains(queue))
            .collect();
        if !lacks.is_empty() {
            lines.push(format!(
                "# {} not its own: if the NIC spreads over them, frames for its guests that come there are the host's",
                match lacks.len() {
                    1 => format!("{} is", named(&lacks)),
                    _ => format!("{} are", named(&lacks)),
                }
            ));
        }
        lines
    }
}

impl Facts {
    /// Whether the driver reports the VLAN tags that it removes.
    pub(super) fn reports_tags(&self) -> bool {
        let native = self.driver.as_ref().is_none_or(|driver| driver.native);
        native && self.hints.is_some_and(|hints| hints.has(HintSet::VLAN))
    }
}
