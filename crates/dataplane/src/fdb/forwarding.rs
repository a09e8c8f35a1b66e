//! Where frames of a network go from one worker: the FDB, and the lanes of this worker and of others.
//!
//! A worker rebuilds it when lanes of the network begin, end, or begin or cease to receive, and sets it on all its lanes
//! of the network ([`crate::lane::Lane::set_forwarding`]). Its variants share the tables of ports.

use std::sync::Arc;

use crate::fdb::flows::{Flow, Flows};
use crate::fdb::{Destination, Fdb, FdbKey, PortNumber};
use crate::lane::lane_id::{LaneId, SlotAt};

/// See the module's head.
#[derive(Default, Clone)]
pub struct Forwarding {
    /// Addresses of ports.
    pub(crate) fdb: Arc<Fdb>,
    /// By port number.
    ports: Arc<[PortLanes]>,
    /// Lanes of pairs that receive, in the order of ports and pairs.
    lanes: Arc<[LaneRef]>,
    /// Ports that receive.
    present: Arc<[PortNumber]>,
    /// Those of `present` that get copies of frames for other ports.
    promiscuous: Arc<[PortNumber]>,
    /// Lanes of queues of the uplink: those of this worker, or those of all others if it has none.
    pub(crate) uplinks: Vec<SlotAt>,
    /// The same of the underlay.
    pub(crate) underlays: Vec<SlotAt>,
    /// Lane of the tap to the host.
    pub(crate) host: Option<LaneRef>,
    /// Lane of the uplink's tap, in tap mode.
    pub(crate) wire: Option<LaneRef>,
}

/// The lanes of a port.
#[derive(Clone, Copy, Default)]
struct PortLanes {
    /// Index of the first one that receives.
    first: u32,
    /// How many receive.
    count: u16,
    /// It has a guest, on any worker, that may be disabled.
    is_attached: bool,
}

/// A lane of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneRef {
    pub(crate) at: SlotAt,
    /// Distinguishes a lane from the next one of the same pair.
    pub(crate) id: LaneId,
    pub(crate) pair: u16,
    /// It is on another worker.
    pub(crate) is_remote: bool,
    /// Changes whenever the guest begins or ceases to receive, or gets other rules or another limit.
    pub(crate) changes: u32,
}

impl Forwarding {
    /// With these lanes of ports, in the order of ports and pairs, and whether each receives.
    pub(crate) fn new(fdb: Arc<Fdb>, members: &[(PortNumber, LaneRef, bool)]) -> Self {
        let last = members.last().map(|(port, ..)| usize::from(port.0));
        let mut ports = vec![PortLanes::default(); last.map_or(0, |last| last + 1)];
        let mut lanes = Vec::with_capacity(members.len());
        let mut present = Vec::with_capacity(members.len());
        for &(port, lane, receives) in members {
            let its = &mut ports[usize::from(port.0)];
            its.is_attached = true;
            if receives {
                if its.count == 0 {
                    present.push(port);
                    its.first = u32::try_from(lanes.len()).unwrap_or(u32::MAX);
                }
                its.count += 1;
                lanes.push(lane);
            }
        }
        let is_promiscuous =
            |port: &&PortNumber| fdb.port(**port).is_some_and(|port| port.options.promiscuous);
        Self {
            ports: ports.into(),
            lanes: lanes.into(),
            promiscuous: present.iter().filter(is_promiscuous).copied().collect(),
            present: present.into(),
            fdb,
            ..Self::default()
        }
    }

    /// The state for frames from the host: they do not return to it, and the kernel encapsulates them.
    pub(crate) fn without_host(&self) -> Self {
        Self {
            underlays: Vec::new(),
            host: None,
            ..self.clone()
        }
    }

    /// The state for frames from the uplink's tap: they neither return to the uplink, nor go to the host, to which the
    /// kernel delivers them.
    pub(crate) fn without_ways_out(&self) -> Self {
        Self {
            uplinks: Vec::new(),
            underlays: Vec::new(),
            host: None,
            ..self.clone()
        }
    }

    /// Whether a port has no guest on any worker.
    pub(crate) fn is_absent(&self, port: PortNumber) -> bool {
        let its = self.ports.get(usize::from(port.0));
        its.is_none_or(|its| !its.is_attached)
    }

    /// Whether a port with a guest on some worker has this address: a multicast frame from outside with that source is
    /// the guest's own, and the other ports have it already. A port without a guest has moved to another host, and its
    /// frames arrive once.
    pub(crate) fn has_guest(&self, key: FdbKey) -> bool {
        let found = self.fdb.find(key);
        matches!(found, Destination::Port(port) if !self.is_absent(port))
    }

    /// The lanes of a port that receive.
    #[inline]
    pub(crate) fn lanes(&self, port: PortNumber) -> &[LaneRef] {
        let its = self.ports.get(usize::from(port.0)).copied().unwrap_or_default();
        let first = its.first as usize;
        &self.lanes[first..first + usize::from(its.count)]
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

    /// The same for the underlay.
    #[inline]
    pub(crate) fn underlay(&self, flow: usize) -> Option<SlotAt> {
        let at = flow.checked_rem(self.underlays.len())?;
        self.underlays.get(at).copied()
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
        ports.filter(|&(port, _)| !self.fdb.port(port).is_some_and(|port| port.options.unicast_only))
    }

    /// Whether some port gets copies of frames for others.
    #[inline]
    pub(crate) fn has_promiscuous(&self) -> bool {
        !self.promiscuous.is_empty()
    }

    /// The promiscuous ports that get copies of a frame to the port `to`, or to none.
    pub(crate) fn listeners(
        &self,
        vlan: u16,
        from: Option<PortNumber>,
        to: Option<PortNumber>,
    ) -> impl Iterator<Item = (PortNumber, LaneRef)> + Clone {
        let listeners = self.of_vlan(&self.promiscuous, vlan, from);
        listeners.filter(move |&(port, _)| to != Some(port))
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
            let known = self.fdb.port(port);
            let takes =
                known.is_some_and(|port| port.vlans.carries(vlan) && !(is_isolated && port.options.isolated));
            takes && from != Some(port)
        })
    }

    /// Whether a port gets frames of its VLANs with a tag.
    #[inline]
    pub(crate) fn is_tagged(&self, port: PortNumber) -> bool {
        self.fdb.port(port).is_some_and(|port| port.vlans.is_tagged())
    }
}
