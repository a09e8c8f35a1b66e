//! What a network gives whose uplink is this interface: queues that many guests share.

use serde::Serialize;
use steer::HintSet;
use steward::hardware::Tags;
use steward::protocol::STATIONS_MAX;

use super::expected::Expected;
use super::held::{named, port_line};
use super::netkit;
use super::seen::Seen;
use crate::api::queues::Holder;

/// Of a network on all queues of the interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct NetworkReport {
    /// As `status` will say it of each queue; none: it is refused.
    mode: Option<String>,
    /// Why it is not in a better one.
    pub(super) why_not_more: Vec<String>,
    /// As many as the interface spreads frames over: each of them has to be the network's.
    queues: u32,
    /// Of these, those that somebody has.
    taken_queues: Vec<u32>,
    /// By whom, in words.
    taken_by: Vec<String>,
    /// The one that has queues of it.
    there: Option<String>,
    #[serde(skip)]
    is_loopback: bool,
    /// It is a netkit without a peer.
    #[serde(skip)]
    is_netkit: bool,
    /// Addresses of guests, each in a VLAN, that there can be.
    most_stations: usize,
    /// What guests can be told apart by, and what happens to tags.
    vlans: String,
    /// What the host has of the interface beside it.
    host: &'static str,
    /// The bridge that the interface is a port of.
    bridge: Option<String>,
}

/// The host keeps the interface.
const HOST: &str = "it keeps the interface, its addresses, and what is for no guest; guests and it reach each other by \
                    these addresses (host = false: they do not)";

impl Seen {
    /// What a network gets. Frames are copied, as `copy` among the placements says.
    pub(super) fn network(&self, copy: &Expected) -> NetworkReport {
        let free = self.free_queues();
        let taken = (0..self.link.rx_queues).filter(|queue| !free.contains(queue));
        NetworkReport {
            mode: copy.mode.clone(),
            why_not_more: copy.why_not_more.clone(),
            queues: self.link.rx_queues,
            taken_queues: taken.collect(),
            taken_by: self.held(),
            there: self
                .network_there()
                .and_then(|(holder, _)| holder.network.clone()),
            is_loopback: self.loopback,
            is_netkit: self.link.has_leased_only,
            most_stations: STATIONS_MAX,
            vlans: self.vlans(),
            host: HOST,
            bridge: self.bridge.clone(),
        }
    }

    /// The lines of a file that make one, and what starts it.
    pub(super) fn network_lines(&self, network: &NetworkReport) -> Vec<String> {
        if let Some((holder, queues)) = self.network_there() {
            return self.lines_of_one_more(holder, &queues);
        }
        let mut lines = Vec::new();
        if !network.taken_by.is_empty() {
            lines.push(format!(
                "# {}: frames for its guests that come there would be the host's, so the network has to have them",
                network.taken_by.join("; ")
            ));
        }
        let (name, queues) = (&self.link.name, network.queues);
        lines.extend([
            "# /etc/vhost-af-xdp/lan.toml:".to_owned(),
            "[network.lan]".to_owned(),
            format!("uplink = \"{name}\""),
            format!("queues = {queues}"),
        ]);
        let other = match network.mode.as_deref() {
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

impl Seen {
    /// The same where one is there, with these queues: its ports share them, so none has to be free.
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

impl Seen {
    /// Whether the driver tells a program of VLAN tags that it takes off.
    pub(super) fn tells_tags(&self) -> bool {
        let native = self.driver.as_ref().is_none_or(|driver| driver.native);
        native && self.hints.is_some_and(|hints| hints.has(HintSet::VLAN))
    }

    fn vlans(&self) -> String {
        match self.tags {
            Tags::There => "told apart, tags stay in the frame".to_owned(),
            Tags::AsSent => {
                "told apart by tags that the far end puts into the frame: `txvlan off` there".to_owned()
            }
            Tags::TakenOff if self.tells_tags() => {
                "told apart in native mode, where the driver tells of the tags that it takes off".to_owned()
            }
            Tags::TakenOff => format!(
                "the driver takes tags off: ports with VLANs are refused, others get frames of any VLAN: `ethtool -K \
                 {} rxvlan off`",
                self.link.name
            ),
            Tags::Lost => {
                "the kernel takes tags off before XDP: ports with VLANs are refused: use the interface below"
                    .to_owned()
            }
        }
    }
}

impl NetworkReport {
    /// As a person reads it.
    pub(super) fn line(&self) -> String {
        if self.is_loopback {
            return "none: no LAN and no guest is behind it".to_owned();
        }
        if self.is_netkit {
            return format!("none: {}", netkit::REFUSED);
        }
        let there = match &self.there {
            Some(name) => format!("{name} is there, "),
            None => String::new(),
        };
        let mode = self.mode.as_deref().unwrap_or("refused");
        let taken = match self.taken_by.is_empty() || self.there.is_some() {
            true => String::new(),
            false => format!(" ({})", self.taken_by.join("; ")),
        };
        let bridge = self.bridge.as_ref().map_or_else(String::new, |name| {
            format!("; a port of bridge {name}: what is at its other ports is reached through the host")
        });
        format!(
            "{there}{mode} on {} queue(s){taken}, {} addresses; VLANs: {}; host: {}{bridge}",
            self.queues, self.most_stations, self.vlans, self.host
        )
    }
}
