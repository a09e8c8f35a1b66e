//! Where frames of a network go from one worker: the FDB, the lanes of this worker, and the links to other workers.
//!
//! A worker rebuilds it each time its lanes change, and sets it on all lanes of the network
//! ([`crate::lane::Lane::set_forwarding`]).

use std::sync::Arc;

use crate::fdb::flows::{Flow, Flows};
use crate::fdb::vlans::Vlans;
use crate::fdb::{Destination, Fdb, FdbKey, FdbPort, PortNumber};
use crate::lane::lane_id::{LaneId, SlotAt};
use crate::lane::spread::Spread;

/// See the module's head.
#[derive(Default, Clone)]
pub struct Forwarding {
    /// Addresses of ports.
    pub(crate) fdb: Arc<Fdb>,
    /// By port number: the lanes of its pairs that receive, in the order of the pairs.
    guests: Vec<Vec<LaneRef>>,
    /// Ports that receive.
    present: Vec<PortNumber>,
    /// Those of `present` that get copies of frames for other ports.
    promiscuous: Vec<PortNumber>,
    /// Filter rules decide which frames some ports get.
    pub(crate) is_filtered: bool,
    /// Lanes of queues of the uplink.
    pub(crate) uplinks: Vec<SlotAt>,
    /// Lane of the tap to the host.
    pub(crate) host: Option<LaneRef>,
    /// Which workers have the network's lanes.
    spread: Arc<Spread>,
    /// Links to other workers. Each counts as a port; their numbers follow those of the FDB's ports.
    links: Vec<FdbPort>,
    /// Ports of other workers, with the links to those.
    pub(crate) remote: Vec<(PortNumber, LaneRef)>,
    /// The links to workers through whose uplink and host frames leave, where this worker has none.
    pub(crate) ways_out: [Option<LaneRef>; 2],
}

/// A lane of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneRef {
    pub(crate) at: SlotAt,
    /// Distinguishes a lane from the next one of the same pair.
    pub(crate) id: LaneId,
    pub(crate) pair: u16,
    pub(crate) is_link: bool,
}

impl Forwarding {
    pub(crate) fn new(fdb: Arc<Fdb>) -> Self {
        Self {
            fdb,
            ..Self::default()
        }
    }

    /// Adds a lane of a port, which receives. The caller adds lanes in the order of their pairs.
    pub(crate) fn add(&mut self, port: PortNumber, guest: LaneRef) {
        let at = usize::from(port.0);
        if self.guests.len() <= at {
            self.guests.resize(at + 1, Vec::new());
        }
        if self.guests[at].is_empty() {
            self.present.push(port);
            if self.fdb.port(port).is_some_and(|port| port.options.promiscuous) {
                self.promiscuous.push(port);
            }
        }
        self.guests[at].push(guest);
    }

    /// Sets which workers have the network's lanes.
    pub(crate) fn among(self, spread: &Arc<Spread>) -> Self {
        let spread = Arc::clone(spread);
        Self { spread, ..self }
    }

    /// The state for frames from the host: they do not return to it.
    pub(crate) fn without_host(&self) -> Self {
        let [uplink, _] = self.ways_out;
        Self {
            host: None,
            ways_out: [uplink, None],
            ..self.clone()
        }
    }

    /// The state for frames from the uplink's tap: they neither return to the uplink, nor go to the host, to which the
    /// kernel delivers them.
    pub(crate) fn without_ways_out(&self) -> Self {
        Self {
            uplinks: Vec::new(),
            host: None,
            ways_out: [None; 2],
            ..self.clone()
        }
    }

    /// Whether frames can leave through the uplink, of this worker or of another one.
    pub(crate) fn has_uplink(&self) -> bool {
        let [uplink, _] = self.ways_out;
        !self.uplinks.is_empty() || uplink.is_some()
    }

    /// Whether frames of this worker reach the uplink by a link only. Multicast takes that link in any case.
    pub(crate) fn reaches_uplink_by_link(&self) -> bool {
        let [uplink, _] = self.ways_out;
        self.uplinks.is_empty() && uplink.is_some()
    }

    /// Whether a port has no guest on any worker.
    pub(crate) fn is_absent(&self, port: PortNumber) -> bool {
        self.lanes(port).is_empty() && !self.spread.ports.contains_key(&port)
    }

    /// Whether a port with a guest on some worker has this address: a multicast frame from outside with that source is
    /// the guest's own, and the other ports have it already. A port without a guest has moved to another host, and its
    /// frames arrive once.
    pub(crate) fn has_guest(&self, key: FdbKey) -> bool {
        let found = self.fdb.find(key);
        matches!(found, Destination::Port(port) if !self.is_absent(port))
    }

    /// Adds a link to another worker, which has these ports.
    pub(crate) fn add_link(&mut self, link: LaneRef, ports: impl Iterator<Item = PortNumber>) {
        let ports: Vec<_> = ports.filter(|&port| self.lanes(port).is_empty()).collect();
        let listens = |port: &PortNumber| self.fdb.port(*port).is_some_and(|port| port.options.promiscuous);
        let is_heard = ports.iter().any(listens);
        let number = self.fdb.end() + self.links.len();
        let Ok(number) = u16::try_from(number).map(PortNumber) else {
            return;
        };
        self.links.push(FdbPort {
            vlans: Vlans::All,
            ..FdbPort::default()
        });
        for port in ports {
            let at = usize::from(port.0);
            if self.guests.len() <= at {
                self.guests.resize(at + 1, Vec::new());
            }
            self.guests[at].push(link);
            self.remote.push((port, link));
        }
        self.add(number, link);
        if is_heard {
            self.promiscuous.push(number);
        }
    }

    /// The properties of a port, or of a link, which counts as one.
    #[inline]
    pub(crate) fn port(&self, port: PortNumber) -> Option<&FdbPort> {
        let link = || self.links.get(usize::from(port.0).checked_sub(self.fdb.end())?);
        self.fdb.port(port).or_else(link)
    }

    /// The lanes of a port that receive; for a port of another worker, the link to that.
    #[inline]
    pub(crate) fn lanes(&self, port: PortNumber) -> &[LaneRef] {
        self.guests.get(usize::from(port.0)).map_or(&[], Vec::as_slice)
    }

    /// Which of a port's lanes takes frames of a flow; `None`: it has none.
    #[inline]
    pub(crate) fn lane_for(&self, port: PortNumber, flow: Flow) -> Option<LaneRef> {
        let lanes = self.lanes(port);
        let pair = self.flows(port).and_then(|flows| flows.find(flow));
        let noted = pair.and_then(|pair| lanes.iter().find(|lane| lane.pair == pair));
        noted.or_else(|| lanes.get(flow.spread(lanes.len()))).copied()
    }

    /// Which pair the guest of a port uses for which flow, if it has several pairs.
    #[inline]
    pub(crate) fn flows(&self, port: PortNumber) -> Option<&Flows> {
        self.fdb.port(port)?.flows.as_deref()
    }

    /// The lane of the uplink's queue through which a flow leaves.
    #[inline]
    pub(crate) fn uplink(&self, flow: usize) -> Option<SlotAt> {
        let at = flow.checked_rem(self.uplinks.len())?;
        self.uplinks.get(at).copied()
    }

    /// The first lane of each port that receives.
    pub(crate) fn ports(&self) -> impl Iterator<Item = (PortNumber, LaneRef)> + Clone {
        self.first_lanes(&self.present)
    }

    fn first_lanes(&self, ports: &[PortNumber]) -> impl Iterator<Item = (PortNumber, LaneRef)> + Clone {
        ports
            .iter()
            .filter_map(|&port| Some((port, *self.lanes(port).first()?)))
    }

    /// The first lane of each port that receives multicast frames of a VLAN (0: none). `from`: the port that sends
    /// them; `None`: the uplink or the host.
    pub(crate) fn ports_of(
        &self,
        vlan: u16,
        from: Option<PortNumber>,
    ) -> impl Iterator<Item = (PortNumber, LaneRef)> + Clone {
        let ports = self.of_vlan(&self.present, vlan, from);
        ports.filter(|&(port, _)| !self.port(port).is_some_and(|port| port.options.unicast_only))
    }

    /// Whether some port gets copies of frames for others.
    #[inline]
    pub(crate) fn has_promiscuous(&self) -> bool {
        !self.promiscuous.is_empty()
    }

    /// The promiscuous ports that get copies of a frame to the port `to`, or to none. `way`: the lane that gets the
    /// frame itself; if it is a link, listeners behind that get their copies there.
    pub(crate) fn listeners(
        &self,
        vlan: u16,
        from: Option<PortNumber>,
        to: Option<PortNumber>,
        way: Option<LaneRef>,
    ) -> impl Iterator<Item = (PortNumber, LaneRef)> + Clone {
        let listeners = self.of_vlan(&self.promiscuous, vlan, from);
        listeners.filter(move |&(port, guest)| to != Some(port) && Some(guest) != way)
    }

    fn of_vlan(
        &self,
        ports: &[PortNumber],
        vlan: u16,
        from: Option<PortNumber>,
    ) -> impl Iterator<Item = (PortNumber, LaneRef)> + Clone {
        let sender = from.and_then(|from| self.fdb.port(from));
        let is_isolated = sender.is_some_and(|sender| sender.options.isolated);
        self.first_lanes(ports).filter(move |&(port, _)| {
            let known = self.port(port);
            let takes =
                known.is_some_and(|port| port.vlans.carries(vlan) && !(is_isolated && port.options.isolated));
            takes && from != Some(port)
        })
    }

    /// Whether a port gets frames of its VLANs with a tag.
    #[inline]
    pub(crate) fn is_tagged(&self, port: PortNumber) -> bool {
        let is_remote = || self.lanes(port).first().is_some_and(|guest| guest.is_link);
        self.port(port).is_some_and(|port| port.vlans.is_tagged()) || is_remote()
    }
}
