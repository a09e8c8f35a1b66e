//! A network: ports that reach each other by address, and an uplink that they share.
//!
//! It has queues of an interface, each with a lane ([`dataplane::uplink::uplink_lane`]), and the FDB
//! ([`dataplane::fdb`]). Both outlive guests, whose lanes are added and removed. A thread of its own watches the
//! interface, and informs the ports when its link state or MTU changes.

mod advertisement;
mod hints;
mod host;
mod learner;
mod learning;
mod naming;
mod remotes;
mod room;
mod seen;
mod tap;
mod underlay;
mod unsent;
mod uplink;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use anyhow::{Context, ensure};
use device::counters::PairCounters;
use packet::ethernet::Mac;
use program::backoff::Retry;
use rustix::event::{EventfdFlags, eventfd};
use steer::{mac_text, with_sources};
use steward_protocol::StationChange;
use xsk::NumaNode;

use self::advertisement::Advertisement;
use self::host::Host;
use self::learning::Learning;
use self::naming::Named;
use self::seen::Seen;
pub(crate) use self::seen::ShownLanes;
use self::underlay::Underlay;
use crate::config::{NetworkConfig, NicConfig, PortConfig, UplinkConfig};
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::interface_queue::InterfaceQueue;
use crate::nic::interfaces::Interfaces;
use crate::nic::lane_facts::LaneFacts;
use crate::nic::wakers::Wakers;
use dataplane::fdb::learned::Learned;
use dataplane::fdb::{Fdb, FdbKey, FdbPort, PortMark, PortNumber};
use dataplane::lane::role::Role;
use dataplane::policy::guard::SourceGuard;
use dataplane::worker::workers::{LaneAt, Workers};
use program::log_limit::LogLimit;

/// MTU of a network without an uplink, bytes.
const MTU: u32 = 1500;

/// The link state and MTU of a network's uplink, for its guests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NetworkLink {
    /// The uplink is up; true for a network without an uplink.
    pub(crate) up: bool,
    /// Bytes.
    pub(crate) mtu: u32,
}

/// A queue of the uplink that a worker serves.
struct Running {
    queue: InterfaceQueue,
    at: LaneAt,
    counters: Arc<PairCounters>,
    /// Dropped before the lane is stopped: the socket in it keeps the queue bound.
    facts: Arc<LaneFacts>,
}

/// The tap of the uplink, in tap mode, that workers serve.
struct RunningTap {
    /// Interface index of the device.
    index: u32,
    /// A lane for each of its queues.
    lanes: Vec<LaneAt>,
    facts: Arc<LaneFacts>,
}

#[derive(Default)]
struct State {
    uplink: Option<UplinkConfig>,
    /// One for each queue of the uplink.
    counters: Vec<Arc<PairCounters>>,
    interface: Option<Arc<Interface>>,
    /// The lane of each queue of the uplink; `None`: it could not be started.
    running: Vec<Option<Running>>,
    /// In tap mode, the tap that receives the uplink's frames; `None`: it could not be started.
    tap: Option<RunningTap>,
    /// One for each queue of the tap, for the largest number of queues that it has had.
    tap_counters: Vec<Arc<PairCounters>>,
    /// When lanes that do not run are retried.
    retry: Retry<u32>,
    /// When opening the missing interface is retried.
    opening: Retry<u32>,
    /// The lane of multicast frames.
    multicast: Option<LaneAt>,
    host: Host,
    underlay: Underlay,
    /// The port with each number.
    ports: Vec<Option<FdbPort>>,
    /// The last generation that a port got ([`FdbPort::generation`]).
    generations: u16,
    /// By port number: alive while the port's [`NetworkEnd`] or a lane of the port may exist.
    held: Vec<Weak<AtomicBool>>,
    learning: Learning,
    advertised: Advertisement,
    /// Learned addresses that were evicted.
    evicted: u64,
    eviction_lines: LogLimit,
    named: Named,
    /// Keys that may have another port at the steward than here.
    unsent: HashSet<FdbKey>,
    /// A thread checks learned addresses.
    learns: bool,
    /// Why no frames move over the uplink although they should.
    impaired: Option<String>,
    /// The interface's link; a larger MTU only after all queues suit it. `None`: there is no interface.
    link: Option<NetworkLink>,
    /// The uplink's last queue is being set up again, and guests' frames for it wait until then at most.
    uplink_until: Option<Instant>,
    /// A thread watches the uplink.
    watched: bool,
    /// The network was stopped.
    over: bool,
}

/// See the module's head.
pub(crate) struct Network {
    pub(crate) name: String,
    /// Its name as the owner of lanes.
    owner: Arc<str>,
    interfaces: Arc<Interfaces>,
    workers: Arc<Workers>,
    /// Counters of multicast frames from the uplink.
    pub(crate) group_counters: Arc<PairCounters>,
    wakers: Wakers,
    /// An eventfd: a guest uses an address that was not learned yet, or all have to be sent to the uplink again.
    news: Arc<OwnedFd>,
    state: Mutex<State>,
    seen: Mutex<Seen>,
    /// Held while hints are changed, or sent to lanes.
    hints: Mutex<()>,
}

/// A port's membership in a network.
#[derive(Clone)]
pub(crate) struct NetworkEnd {
    pub(crate) network: Arc<Network>,
    pub(crate) number: PortNumber,
    /// A lane serves its guest. As long as a clone exists, no other port gets the number.
    is_connected: Arc<AtomicBool>,
}

impl State {
    /// A number that no port has, nor a removed port that may still have lanes.
    fn free_number(&self) -> usize {
        let is_free = |&at: &usize| self.ports[at].is_none() && self.held[at].strong_count() == 0;
        let last = self.ports.len();
        (0..last).find(is_free).unwrap_or(last)
    }

    /// The generation of a port that is added, or gets other addresses. It wraps after 65,536; by then no frame with
    /// the mark of an earlier port is left.
    fn next_life(&mut self) -> u16 {
        self.generations = self.generations.wrapping_add(1);
        self.generations
    }

    /// Whether the uplink needs no thread.
    fn is_over(&self) -> bool {
        self.over || self.uplink.is_none()
    }

    /// Sets the uplink; its interface and queues are not open yet.
    fn reset_uplink(&mut self, uplink: Option<UplinkConfig>) {
        let queues = uplink.as_ref().map_or(0, |uplink| uplink.queues);
        self.counters = (0..queues).map(|_| Arc::default()).collect();
        self.tap_counters.clear();
        self.advertised.forget();
        self.running = (0..queues).map(|_| None).collect();
        self.underlay = Underlay::of(uplink.as_ref().and_then(|uplink| uplink.underlay.as_ref()));
        self.uplink = uplink;
    }
}

impl NetworkEnd {
    /// Learned addresses of the port, in order.
    pub(crate) fn learned(&self) -> Vec<FdbKey> {
        let shown = self.network.shown();
        let its = shown.learned.iter().filter(|(port, _)| *port == self.number);
        its.map(|&(_, key)| key).collect()
    }

    /// Records whether a lane serves its guest.
    pub(crate) fn set_connected(&self, is_connected: bool) {
        if self.is_connected.swap(is_connected, Relaxed) != is_connected {
            self.network.look_again();
        }
    }

    /// The role of a lane of the port.
    pub(crate) fn role(&self, pair: u16) -> Role {
        Role::Member {
            network: Arc::clone(&self.network.owner),
            port: self.number,
            pair,
        }
    }
}

impl Network {
    /// Opens the uplink, queues and all.
    /// Errors: why it cannot be opened, with the remedy.
    pub(crate) fn open(
        config: NetworkConfig,
        interfaces: Arc<Interfaces>,
        workers: Arc<Workers>,
    ) -> anyhow::Result<Arc<Self>> {
        let network = Self {
            owner: format!("network {}", config.name).into(),
            name: config.name,
            interfaces,
            workers,
            group_counters: Arc::default(),
            wakers: Wakers::new().context("no descriptor left")?,
            news: Arc::new(
                eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("no descriptor left")?,
            ),
            state: Mutex::default(),
            seen: Mutex::default(),
            hints: Mutex::default(),
        };
        let mut state = network.state();
        state.reset_uplink(config.uplink);
        network.open_uplink(&mut state)?;
        drop(state);
        Ok(Arc::new(network))
    }

    /// Removes the uplink, so that others can open its queues, before [`Self::have`] sets another one.
    pub(crate) fn release_uplink(&self) {
        let mut state = self.state();
        self.give_back(&mut state);
        state.reset_uplink(None);
    }

    /// Sets the uplink, and opens it. Frames between ports are not affected.
    /// Errors: why it cannot be opened; the uplink's thread retries, if there is one.
    pub(crate) fn have(&self, uplink: Option<UplinkConfig>) -> Result<(), InterfaceError> {
        let mut state = self.state();
        self.give_back(&mut state);
        state.reset_uplink(uplink);
        let taken_up = self.open_uplink(&mut state);
        let failed = taken_up.as_ref().err().map(with_sources);
        self.note(&mut state, failed.map_or(Ok(()), Err));
        taken_up
    }

    /// Adds a port.
    /// Errors: another port has its address, or the uplink's steward does not accept it.
    pub(crate) fn join(self: &Arc<Self>, port: &PortConfig, mac: Mac) -> anyhow::Result<NetworkEnd> {
        let mut port = fdb_port(port, mac, &self.news);
        let mut state = self.state();
        self.check_address(&state, &port, None)?;
        if port.learned.is_some() && !state.learns {
            self.watch_learning().context("cannot start a thread")?;
            state.learns = true;
        }
        let at = state.free_number();
        if at == state.ports.len() {
            state.ports.push(None);
            state.held.push(Weak::new());
        }
        let number = PortNumber(u16::try_from(at).unwrap_or(u16::MAX));
        port.generation = state.next_life();
        self.set_keys_of(&mut state, &port, number)?;
        let is_connected = Arc::new(AtomicBool::new(false));
        state.held[at] = Arc::downgrade(&is_connected);
        state.ports[at] = Some(port);
        self.set_fdb(&state);
        Ok(NetworkEnd {
            network: Arc::clone(self),
            number,
            is_connected,
        })
    }

    /// Changes the VLANs and options of a port; its lanes keep running.
    /// Errors: another port has its address there, or the uplink's steward does not accept it. Nothing changes then.
    pub(crate) fn change(&self, number: PortNumber, port: &PortConfig, mac: Mac) -> anyhow::Result<()> {
        let mut port = fdb_port(port, mac, &self.news);
        let mut state = self.state();
        self.check_address(&state, &port, Some(number))?;
        let at = usize::from(number.0);
        if let Some(Some(before)) = state.ports.get_mut(at) {
            // Learned addresses and flows stay.
            port.learned.clone_from(&before.learned);
            port.flows.clone_from(&before.flows);
            let noted = |port: &FdbPort| (port.mac, port.options.isolated);
            if noted(before) == noted(&port) && before.vlans == port.vlans {
                // The uplink need not be updated.
                port.generation = before.generation;
                *before = port;
                self.set_fdb(&state);
                return Ok(());
            }
        }
        // So that marked frames for an address that it no longer has are not delivered to it.
        port.generation = state.next_life();
        self.set_keys_of(&mut state, &port, number)?;
        let before = state.ports.get_mut(at).and_then(|before| before.replace(port));
        let before = before.map_or_else(Vec::new, |before| keys(&before, None));
        let learned = state.learning.keys().filter(|&(_, of)| of == number);
        let learned: Vec<_> = learned.map(|(key, _)| key).collect();
        self.sync_keys(&mut state, before.iter().map(key_of).chain(learned));
        state.named.hurry(Instant::now());
        self.set_fdb(&state);
        Ok(())
    }

    /// Errors: another port has one of these keys.
    fn check_address(&self, state: &State, port: &FdbPort, number: Option<PortNumber>) -> anyhow::Result<()> {
        let others = (0..).map(PortNumber).zip(&state.ports);
        let mut others = others.filter(|(other, _)| Some(*other) != number);
        let is_taken = |(_, other): (_, &Option<FdbPort>)| {
            (other.as_ref()).is_some_and(|other| other.mac == port.mac && other.vlans.overlap(&port.vlans))
        };
        ensure!(
            !others.any(is_taken),
            "mac {} is another port's of network {} in the same VLAN: give each its own",
            mac_text(port.mac),
            self.name
        );
        Ok(())
    }

    /// Removes a port. Its number stays in use as long as a clone of its [`NetworkEnd`] exists.
    pub(crate) fn leave(&self, number: PortNumber) {
        let mut state = self.state();
        let gone = state.ports.get_mut(usize::from(number.0)).and_then(Option::take);
        let learned = state.learning.leave(number);
        state.named.hurry(Instant::now());
        let its = gone.map_or_else(Vec::new, |gone| keys(&gone, None));
        self.sync_keys(&mut state, its.iter().map(key_of).chain(learned));
        self.set_fdb(&state);
    }

    /// The NUMA node of each of the uplink's queues, if the machine has several nodes.
    pub(crate) fn nodes(&self) -> Vec<Option<NumaNode>> {
        let uplink = self.shown().uplink;
        let interface = uplink.interface.upgrade();
        vec![interface.and_then(|interface| interface.link.node); uplink.lanes.len()]
    }

    /// Sends the FDB to the workers. Not after the network was stopped: another one may have its name.
    fn set_fdb(&self, state: &State) {
        if !state.over {
            self.workers.set_fdb(&self.owner, Some(&Arc::new(fdb(state))));
        }
    }
}

/// The changes for the XDP program that set the owner of a port's addresses; `whose`: `None` removes them.
fn keys(port: &FdbPort, whose: Option<PortNumber>) -> Vec<StationChange> {
    let vlans = port.vlans.all().iter();
    vlans
        .map(|&vlan| change(FdbKey::new(vlan, port.mac), whose.map(|number| port.mark(number))))
        .collect()
}

/// The change for one address; `mark`: of its new port, `None` removes it.
fn change(key: FdbKey, mark: Option<PortMark>) -> StationChange {
    let (vlan, mac) = (key.vlan(), key.mac());
    StationChange {
        station: steer::Station { vlan, mac },
        port: mark.map(|mark| mark.0),
    }
}

/// The mark of the port with this number, if there is one.
fn mark_of(ports: &[Option<FdbPort>], number: PortNumber) -> Option<PortMark> {
    let port = ports.get(usize::from(number.0))?.as_ref()?;
    Some(port.mark(number))
}

/// The address that a change is for.
fn key_of(change: &StationChange) -> FdbKey {
    FdbKey::new(change.station.vlan, change.station.mac)
}

/// The FDB with configured and learned addresses.
fn fdb(state: &State) -> Fdb {
    let fdb = configured(state).with_learned(state.learning.keys());
    state.underlay.add_remotes(fdb)
}

/// The FDB with the configured addresses only.
fn configured(state: &State) -> Fdb {
    let host = state.interface.as_ref().map(|interface| interface.link.mac);
    Fdb::new(state.ports.clone())
        .with_host(host)
        .with_reached(&state.host.macs)
        .with_behind(&state.host.behind)
        .with_uplink_until(state.uplink_until)
}

/// The FDB's entry of a port.
fn fdb_port(port: &PortConfig, mac: Mac, news: &Arc<OwnedFd>) -> FdbPort {
    let NicConfig::Network { vlans, options, .. } = &port.nic else {
        return FdbPort {
            mac,
            ..FdbPort::default()
        };
    };
    FdbPort {
        mac,
        vlans: vlans.clone(),
        options: *options,
        flows: (port.queues > 1).then(Arc::default),
        learned: options.learning.then(|| Arc::new(Learned::new(Arc::clone(news)))),
        source_guard: SourceGuard::of(&port.keys.guard).map(Arc::new),
        // Set by the caller.
        generation: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_free_when_its_port_and_its_lanes_are_gone() {
        let [stuck, gone] = [Arc::default(), Arc::default()];
        let mut state = State {
            ports: vec![None, Some(FdbPort::default())],
            held: vec![Arc::downgrade(&stuck), Arc::downgrade(&gone)],
            ..State::default()
        };
        drop(gone);
        assert_eq!(state.free_number(), 2, "0 may have lanes, 1 has a port");
        state.ports[1] = None;
        assert_eq!(state.free_number(), 1);
        drop(stuck);
        assert_eq!(state.free_number(), 0);
    }
}
