//! The underlay of a network whose uplink is a tunnel device (VXLAN, Geneve): queues of the NIC that carries its packets.
//!
//! The uplink, in tap mode, can carry every frame: the kernel encapsulates. With an underlay most frames take a shorter way:
//! the XDP program on the NIC decapsulates packets with unicast frames for guests, and workers encapsulate frames of guests
//! whose VTEP the kernel knows ([`super::remotes`]). Without it, and for other frames, the uplink is used.
//!
//! The thread that watches the uplink watches the underlay, too.
//!
//! **Networks that name the same queues share them**: sockets of a queue have one fill ring. The network that opens the
//! underlay owns its lease and its lanes; the others have a number there, by which program and lanes tell their frames
//! ([`Shared`]). When the owner closes it, the others do, too, and the first that opens it again is the next owner.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::anyhow;
use device::counters::PairCounters;
use program::backoff::{Backoff, Retry};
use steer::{Station, mac_text, with_sources};
use steward_protocol::{SHARES_MAX, StationChange, Wanted};

use super::remotes::{Follower, RemoteCounts};
use super::seen::ShownLanes;
use super::{Network, Running, State, change, keys, mark_of};
use crate::config::UnderlayConfig;
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::steering::Steering;
use common::lock::Locked;
use dataplane::fdb::{Fdb, PortMark, PortNumber, UnderlayOf};
use dataplane::lane::role::Role;
use host::links::routes::TableChanges;
use model::state::UnderlayStatus;

/// Underlays that are open. Locked while one is opened, so that others join it.
static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());
/// The networks that have shared an underlay of another one: their numbers there are 1, 2… A number is not given to another
/// network: frames may be on their way, and a network may not know yet that an underlay is another one.
static NUMBERS: Mutex<Vec<Arc<str>>> = Mutex::new(Vec::new());

/// An underlay that is open, for other networks.
struct Open {
    wanted: Wanted,
    underlay: UnderlayOf,
    lanes: ShownLanes,
}

/// The underlay of another network, which this one uses, too.
struct Shared {
    underlay: UnderlayOf,
    /// From 1 on.
    number: u16,
    lanes: ShownLanes,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct Underlay {
    /// If the network is its owner.
    pub(super) interface: Option<Arc<Interface>>,
    /// If another one is.
    shared: Option<Shared>,
    /// One for each queue.
    pub(super) counters: Vec<Arc<PairCounters>>,
    /// The lane of each queue; `None`: it could not be started.
    pub(super) running: Vec<Option<Running>>,
    /// The stations that its steward has, with their marks, and those that it has refused.
    stations: BTreeMap<Station, u32>,
    refused: BTreeMap<Station, u32>,
    /// When refused ones are tried again.
    refused_retry: Backoff,
    pub(super) follower: Option<Follower>,
    retry: Retry<u32>,
    /// Why it is not used.
    pub(super) impaired: Option<String>,
}

impl Open {
    fn is_of(&self, interface: &Arc<Interface>) -> bool {
        std::ptr::eq(self.lanes.interface.as_ptr(), Arc::as_ptr(interface))
    }
}

impl Underlay {
    /// With queues that are not open yet.
    pub(super) fn of(config: Option<&UnderlayConfig>) -> Self {
        let queues = config.map_or(0, |config| config.queues);
        Self {
            counters: (0..queues).map(|_| Arc::default()).collect(),
            running: (0..queues).map(|_| None).collect(),
            ..Self::default()
        }
    }

    /// The interface, while it is open.
    pub(super) fn open_interface(&self) -> Option<Arc<Interface>> {
        let shared = || self.shared.as_ref()?.lanes.interface.upgrade();
        self.interface.clone().or_else(shared)
    }

    /// The network's number among those that share the underlay.
    fn number(&self) -> u16 {
        self.shared.as_ref().map_or(0, |shared| shared.number)
    }

    /// Adds the addresses of other hosts, if frames to them can leave.
    pub(super) fn add_remotes(&self, fdb: Fdb) -> Fdb {
        let shared = self.shared.as_ref();
        let fdb = fdb.sharing(shared.map(|shared| (shared.underlay.clone(), shared.number)));
        match &self.follower {
            Some(follower) if shared.is_some() || self.running.iter().any(Option::is_some) => {
                fdb.with_remotes(Arc::clone(&follower.remotes), Arc::clone(&follower.published))
            }
            _ => fdb,
        }
    }

    /// Its state, without what is read from its interface and lanes.
    pub(super) fn status(&self, config: &UnderlayConfig) -> UnderlayStatus {
        let follower = self.follower.as_ref();
        let counts = follower.map_or_else(RemoteCounts::default, |follower| follower.counts);
        UnderlayStatus {
            interface: config.at.name.clone(),
            addresses: counts.addresses,
            vteps: counts.vteps,
            resolved: counts.resolved,
            left_out: counts.left_out,
            impaired: self.impaired.clone(),
            ..UnderlayStatus::default()
        }
    }

    /// Its lanes, or those of the network that owns it.
    pub(super) fn lanes(&self, config: &UnderlayConfig) -> ShownLanes {
        match &self.shared {
            Some(shared) => shared.lanes.clone(),
            None => {
                let interface = self.interface.as_ref();
                ShownLanes::of(interface, config.at.start_queue, &self.counters, &self.running)
            }
        }
    }
}

impl Network {
    /// Opens the underlay if it is not open yet or any more, and sends its steward the present stations.
    pub(super) fn look_at_underlay(&self, state: &mut State, uplink: &Interface) {
        let Some(config) = state.uplink.as_ref().and_then(|uplink| uplink.underlay.clone()) else {
            return;
        };
        let now = Instant::now();
        if state.underlay.shared.is_some() && state.underlay.open_interface().is_none() {
            // Its owner has closed it.
            self.close_underlay(state);
            state.underlay.retry.hurry(now);
        }
        if let Some(interface) = state.underlay.open_interface() {
            match interface.look() {
                Ok(link) if link.mtu == interface.mtu() && link.mac == interface.link.mac => {}
                // It is opened again below. The uplink carries all frames meanwhile.
                Ok(_) => {
                    self.close_underlay(state);
                    state.underlay.retry.hurry(now);
                }
                Err(lost) => self.lose_underlay(state, lost.as_ref()),
            }
        }
        let interface = state.underlay.open_interface();
        let lease = interface.as_ref().map(|interface| &interface.steering);
        let changes = lease.map_or(0, Steering::changes);
        let is_whole = lease.is_some() && state.underlay.impaired.is_none();
        if lease.is_some_and(Steering::is_away) || uplink.steering.is_away() {
            return;
        }
        if state.underlay.retry.is_due(changes, is_whole, now) {
            let opened = self.open_underlay(state, &config, uplink);
            state.underlay.retry.record(opened.is_ok(), now);
            match opened {
                Ok(()) => self.note_underlay(state, None),
                Err(error) => self.lose_underlay(state, &error),
            }
            self.set_fdb(state);
        }
        if let Err(error) = self.set_underlay_stations(state)
            && !error.is_away()
        {
            self.lose_underlay(state, &error);
        }
    }

    /// Opens what is not open of the underlay. Sets the tunnel again in any case: the tunnel device may be another one.
    fn open_underlay(
        &self,
        state: &mut State,
        config: &UnderlayConfig,
        uplink: &Interface,
    ) -> Result<(), InterfaceError> {
        let (mut open, name) = (OPEN.locked(), uplink.name());
        open.retain(|open| open.lanes.interface.strong_count() > 0);
        let interface = match state.underlay.open_interface() {
            Some(interface) => interface,
            None => match open.iter().find(|open| open.wanted == config.wanted()) {
                Some(open) => self.share_underlay(state, open)?,
                // No `warn_of_losses`: the kernel decapsulates frames at other queues.
                None => {
                    let interface = self.interfaces.open(&config.wanted(), config.options)?;
                    state.underlay.interface = Some(Arc::clone(&interface));
                    interface
                }
            },
        };
        let number = state.underlay.number();
        if !state.underlay.stations.is_empty() {
            // Removes those that are gone. The others are sent again below: the steward may have taken some back.
            self.set_underlay_stations(state)?;
            state.underlay.stations.clear();
        }
        let sockets = interface
            .steering
            .ask(|lease| lease.tunnel(number.into(), &name).map(Some))?;
        // Queues of an underlay are never of a foreign program.
        let sockets = sockets.ok_or(InterfaceError::InUse)?;
        let follower = Follower::begin(sockets, &name, &interface.link, config.drops_unknown);
        let follower = follower.map_err(|why| anyhow!("cannot read where {name} sends frames: {why}"))?;
        if follower.is_geneve() {
            // The steward may have read another route before this one was followed.
            interface
                .steering
                .ask(|lease| lease.tunnel(number.into(), &name).map(Some))?;
        }
        let drops_unknown = follower.drops_for().is_some();
        state.underlay.follower = Some(follower);
        send_vtep_changes(&mut state.underlay)?;
        if drops_unknown {
            interface
                .steering
                .ask(|lease| lease.drop_unknown(number.into()))?;
        }
        self.set_underlay_stations(state)?;
        if state.underlay.shared.is_some() {
            return Ok(());
        }
        let underlay = UnderlayOf {
            network: Arc::clone(&self.owner),
            interface: interface.link.index,
        };
        for at in 0..state.underlay.running.len() {
            if state.underlay.running[at].is_none() {
                let number = config.at.start_queue + at as u32;
                let role = Role::Underlay {
                    underlay: underlay.clone(),
                    queue: number,
                };
                let counters = Arc::clone(&state.underlay.counters[at]);
                state.underlay.running[at] = Some(self.run_queue(&interface, number, &counters, role)?);
            }
        }
        open.retain(|open| !open.is_of(&interface));
        open.push(Open {
            wanted: config.wanted(),
            underlay,
            lanes: state.underlay.lanes(config),
        });
        Ok(())
    }

    /// Uses the underlay of another network.
    fn share_underlay(&self, state: &mut State, open: &Open) -> Result<Arc<Interface>, InterfaceError> {
        let mut numbers = NUMBERS.locked();
        if !numbers.contains(&self.owner) && numbers.len() < SHARES_MAX as usize {
            numbers.push(Arc::clone(&self.owner));
        }
        let number = (1..).zip(&*numbers).find(|(_, owner)| **owner == self.owner);
        let number = number.map(|(number, _)| number);
        let interface = open.lanes.interface.upgrade();
        // One with another MTU is closed soon.
        let interface =
            interface.filter(|interface| interface.look().is_ok_and(|link| link.mtu == interface.mtu()));
        let (Some(interface), Some(number)) = (interface, number) else {
            return Err(InterfaceError::InUse);
        };
        tracing::info!(
            network = self.name,
            "the underlay is shared with {}",
            open.underlay.network
        );
        state.underlay.shared = Some(Shared {
            underlay: open.underlay.clone(),
            number,
            lanes: open.lanes.clone(),
        });
        Ok(interface)
    }

    /// Sends the underlay's steward the stations that it does not have, and removes others. Until then the kernel
    /// delivers their frames by the uplink.
    fn set_underlay_stations(&self, state: &mut State) -> Result<(), InterfaceError> {
        let Some(interface) = state.underlay.open_interface() else {
            return Ok(());
        };
        let (number, now) = (state.underlay.number(), Instant::now());
        let wanted = stations(state, number);
        let set = |changes: &[StationChange]| interface.steering.set_tunnel_stations(number.into(), changes);
        if state.underlay.refused_retry.is_due(now) {
            state.underlay.refused.clear();
        }
        let (sent, refused) = (&state.underlay.stations, &state.underlay.refused);
        let gone = sent.keys().filter(|station| !wanted.contains_key(station));
        let gone = gone.map(|&station| StationChange { station, port: None });
        let new = wanted
            .iter()
            .filter(|&(station, mark)| ![sent.get(station), refused.get(station)].contains(&Some(mark)));
        let new = new.map(|(&station, &mark)| StationChange {
            station,
            port: Some(mark),
        });
        let changes: Vec<_> = gone.chain(new).collect();
        if changes.is_empty() {
            return Ok(());
        }
        match set(&changes) {
            // The policy may not allow an address that a guest has learned: that must not stop the others.
            Err(error) if error.is_refusal() => {
                for change in &changes {
                    match set(std::slice::from_ref(change)) {
                        Err(error) if error.is_refusal() => {
                            let (station, mac) = (change.station, mac_text(change.station.mac));
                            let why = with_sources(&error);
                            tracing::debug!(network = self.name, mac, "its frames take the uplink: {why}");
                            state
                                .underlay
                                .refused
                                .extend(change.port.map(|mark| (station, mark)));
                            state.underlay.refused_retry.failed(now);
                        }
                        set => set?,
                    }
                }
            }
            set => set?,
        }
        let refused = &state.underlay.refused;
        let is_accepted = |station: &Station, mark: &mut u32| refused.get(station) != Some(mark);
        state.underlay.stations = wanted;
        state.underlay.stations.retain(is_accepted);
        Ok(())
    }

    /// Applies changes of the kernel's tables; returns what becomes readable with the next one, and when this is due
    /// without one.
    pub(super) fn follow_tables(&self) -> (Option<Arc<TableChanges>>, Option<Instant>) {
        let mut state = self.state();
        let Some(follower) = &mut state.underlay.follower else {
            return (None, None);
        };
        let has_other_vteps = follower.follow();
        let is_outdated = std::mem::take(&mut follower.is_outdated);
        let followed = (Some(Arc::clone(&follower.changes)), follower.due());
        if has_other_vteps {
            self.set_fdb(&state);
        }
        let sent = send_vtep_changes(&mut state.underlay);
        if let Err(error) = &sent {
            tracing::debug!(network = self.name, "{}", with_sources(error));
        }
        if sent.is_err() || is_outdated {
            // All are set again.
            state.underlay.retry.hurry(Instant::now());
        }
        followed
    }

    /// Stops the underlay's lanes, and gives its queues back.
    pub(super) fn close_underlay(&self, state: &mut State) {
        let underlay = &mut state.underlay;
        let was_open = underlay.interface.is_some() || underlay.shared.is_some();
        if let Some(shared) = underlay.shared.take() {
            // The kernel decapsulates frames to these now. If the steward cannot be asked, they are lost.
            let gone = underlay.stations.keys();
            let gone: Vec<_> = gone
                .map(|&station| StationChange { station, port: None })
                .collect();
            if let Some(interface) = shared.lanes.interface.upgrade() {
                let (steering, number) = (&interface.steering, shared.number.into());
                let _ = steering.set_tunnel_stations(number, &gone);
                // Packets of unknown senders are the kernel's again.
                if let Some(device) = underlay.follower.as_ref().and_then(Follower::drops_for) {
                    let _ = steering.ask(|lease| lease.tunnel(number, device).map(Some));
                }
            }
        }
        underlay.follower = None;
        underlay.stations.clear();
        underlay.refused.clear();
        let running: Vec<_> = underlay.running.iter_mut().filter_map(Option::take).collect();
        let interface = underlay.interface.take();
        if let Some(own) = &interface {
            OPEN.locked().retain(|open| !open.is_of(own));
        }
        if was_open {
            // No more frames for the lanes.
            self.set_fdb(state);
        }
        for running in running {
            self.stop_queue(running);
        }
        if let Some(interface) = interface {
            interface.close_queues();
        }
    }

    /// Leaves all frames to the uplink.
    fn lose_underlay(&self, state: &mut State, why: &dyn Error) {
        self.close_underlay(state);
        self.note_underlay(state, Some(with_sources(why)));
    }

    /// Stores why the underlay is not used; logs a change.
    fn note_underlay(&self, state: &mut State, why: Option<String>) {
        let texts = [
            "the underlay is not used, the kernel encapsulates",
            "the underlay is used",
        ];
        if self.store_reason(&mut state.underlay.impaired, why, texts) {
            let why = state.underlay.impaired.as_ref();
            self.record_impaired(why.map(|why| format!("the underlay is not used: {why}")));
        }
    }
}

/// Sends the steward the changed VTEPs.
fn send_vtep_changes(underlay: &mut Underlay) -> Result<(), InterfaceError> {
    let number = underlay.number().into();
    let Some((interface, follower)) = underlay.open_interface().zip(underlay.follower.as_mut()) else {
        return Ok(());
    };
    let changes = follower.take_vtep_changes();
    match changes.is_empty() {
        true => Ok(()),
        false => interface
            .steering
            .ask(|lease| lease.change_vteps(number, &changes)),
    }
}

/// Configured and learned stations of all ports, with their marks at an underlay where the network has this number.
fn stations(state: &State, number: u16) -> BTreeMap<Station, u32> {
    let ports = (0..).map(PortNumber).zip(&state.ports);
    let configured = ports.filter_map(|(number, port)| Some(keys(port.as_ref()?, Some(number))));
    let learned = state.learning.keys();
    let learned = learned.map(|(key, port)| change(key, mark_of(&state.ports, port)));
    let all = configured.flatten().chain(learned);
    all.filter_map(|change| {
        let mark = PortMark(change.port?).of_network(number)?;
        Some((change.station, mark.0))
    })
    .collect()
}
