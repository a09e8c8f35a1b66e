//! A network: ports that reach each other by address, and an uplink that they share.
//!
//! It has queues of an interface, each in the hands of a lane of the switch ([`crate::switch::uplink_lane`]), and the
//! table of who has which address ([`crate::switch::table`]). Both outlive guests: lanes of ports come and go beside
//! them. A thread of its own watches the interface, and tells the ports what their guests have to know of it.

mod host;
mod learner;
mod learning;

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use device::counters::PairCounters;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use steer::{mac_text, with_sources};
use steward::protocol::StationChange;
use xsk::NumaNode;

use self::host::Host;
pub(crate) use self::host::ShownHost;
use self::learning::Learning;
use crate::config::{MemberVlans, NetworkConfig, NicConfig, PortConfig, UplinkConfig};
use crate::nic::binding::L2_BYTES;
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use crate::nic::interface_queue::InterfaceQueue;
use crate::nic::interfaces::Interfaces;
use crate::port::journal::{JOURNAL, Of, What};
use crate::port::lane_facts::LaneFacts;
use crate::port::wakers::Wakers;
use crate::switch::arrivals::Origin;
use crate::switch::ethernet::Mac;
use crate::switch::groups_lane::GroupsLane;
use crate::switch::learned::Learned;
use crate::switch::new_lane::NewLane;
use crate::switch::role::Role;
use crate::switch::table::{PortNumber, Station, Table, TablePort};
use crate::switch::uplink_lane::UplinkLane;
use crate::switch::vlans::Vlans;
use crate::switch::workers::{LaneAt, Workers};

/// MTU of a network without an uplink, bytes.
const MTU: u32 = 1500;
/// How often an interface is looked at of which nobody tells.
const RETRY: Duration = Duration::from_secs(1);
/// How long others may have an interface still that is given back.
const GIVING_BACK: Duration = Duration::from_secs(2);
/// Between two looks whether they have.
const LOOK: Duration = Duration::from_millis(1);
/// How long a steward is asked for what the program counted.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);

/// Why a port cannot be of a network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error("mac {mac} is another port's of network {network} in the same VLAN: give each its own")]
    Address { mac: String, network: String },
    #[error(transparent)]
    Uplink(#[from] InterfaceError),
    #[error("no descriptor left")]
    Descriptor(#[source] io::Error),
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// What the guests have to know of a network's uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NetworkLink {
    /// Frames can leave; without an uplink always.
    pub(crate) up: bool,
    /// Bytes.
    pub(crate) mtu: u32,
}

/// A queue of the uplink in the hands of a worker.
struct Running {
    queue: InterfaceQueue,
    at: LaneAt,
    counters: Arc<PairCounters>,
    /// Dropped before the lane is stopped: the socket in it keeps the queue bound.
    facts: Arc<LaneFacts>,
}

/// What is seen of a network from outside.
pub(crate) struct ShownNetwork {
    pub(crate) uplink: Option<UplinkConfig>,
    /// Of each queue of the uplink.
    pub(crate) counters: Vec<Arc<PairCounters>>,
    pub(crate) link: NetworkLink,
    /// Why no frames move over the uplink although they should.
    pub(crate) impaired: Option<String>,
    pub(crate) interface: Option<Weak<Interface>>,
    /// Of each queue of the uplink that runs.
    pub(crate) lanes: Vec<Weak<LaneFacts>>,
    /// Where it is to be reached.
    pub(crate) host: Option<ShownHost>,
}

#[derive(Default)]
struct State {
    uplink: Option<UplinkConfig>,
    /// Of each queue of the uplink.
    counters: Vec<Arc<PairCounters>>,
    interface: Option<Arc<Interface>>,
    running: Vec<Running>,
    /// The lane of frames to groups.
    groups: Option<LaneAt>,
    host: Host,
    /// By number.
    ports: Vec<Option<TablePort>>,
    learning: Learning,
    /// A thread looks at what is learned.
    learns: bool,
    /// Why no frames move over the uplink although they should.
    impaired: Option<String>,
    /// The interface's, as far as the queues are set up for it.
    link: Option<NetworkLink>,
    /// A thread watches the uplink.
    watched: bool,
    /// It ends.
    over: bool,
}

/// See the module's head.
pub(crate) struct Network {
    /// As it is called.
    pub(crate) name: String,
    /// As its lanes' owner is called.
    owner: Arc<str>,
    interfaces: Arc<Interfaces>,
    workers: Arc<Workers>,
    /// Of frames to groups that came by it.
    pub(crate) group_counters: Arc<PairCounters>,
    wakers: Wakers,
    /// An eventfd: a port's guest uses an address that was not learned yet.
    news: Arc<OwnedFd>,
    state: Mutex<State>,
}

/// A port's end of a network.
#[derive(Clone)]
pub(crate) struct NetworkEnd {
    pub(crate) network: Arc<Network>,
    pub(crate) number: PortNumber,
}

impl State {
    /// Nobody has to look at an uplink.
    fn is_over(&self) -> bool {
        self.over || self.uplink.is_none()
    }

    /// There is nothing yet of what it has from now on.
    fn be_given(&mut self, uplink: Option<UplinkConfig>) {
        let queues = uplink.as_ref().map_or(0, |uplink| uplink.queues);
        self.counters = (0..queues).map(|_| Arc::default()).collect();
        self.uplink = uplink;
    }
}

impl NetworkEnd {
    /// What a lane of the port's is to others.
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
    /// Errors: what will not work later either, naming the remedy.
    pub(crate) fn open(
        config: NetworkConfig,
        interfaces: Arc<Interfaces>,
        workers: Arc<Workers>,
    ) -> Result<Arc<Self>, NetworkError> {
        let network = Self {
            owner: format!("network {}", config.name).into(),
            name: config.name,
            interfaces,
            workers,
            group_counters: Arc::default(),
            wakers: Wakers::new().map_err(NetworkError::Descriptor)?,
            news: Arc::new(
                eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                    .map_err(|error| NetworkError::Descriptor(error.into()))?,
            ),
            state: Mutex::default(),
        };
        let mut state = network.state();
        state.be_given(config.uplink);
        network.take_up(&mut state)?;
        drop(state);
        Ok(Arc::new(network))
    }

    /// Gives an uplink back that is another from now on, so that others can have its queues.
    pub(crate) fn let_go(&self) {
        let mut state = self.state();
        self.give_back(&mut state);
        state.be_given(None);
    }

    /// Has this uplink from now on. Ports, and what their guests send each other, are not concerned.
    /// Errors: what it lacks; it is tried again where somebody watches.
    pub(crate) fn have(&self, uplink: Option<UplinkConfig>) -> Result<(), InterfaceError> {
        let mut state = self.state();
        self.give_back(&mut state);
        state.be_given(uplink);
        let taken_up = self.take_up(&mut state);
        let failed = taken_up.as_ref().err().map(|error| with_sources(error));
        self.note(&mut state, failed.map_or(Ok(()), Err));
        taken_up
    }

    /// A port begins.
    /// Errors: another one has its address; or what the uplink lacks.
    pub(crate) fn join(self: &Arc<Self>, port: &PortConfig, mac: Mac) -> Result<NetworkEnd, NetworkError> {
        let port = table_port(port, mac, &self.news);
        let mut state = self.state();
        self.check_address(&state, &port, None)?;
        let free = state.ports.iter().position(Option::is_none);
        let at = free.unwrap_or(state.ports.len());
        if at == state.ports.len() {
            state.ports.push(None);
        }
        let number = PortNumber(u16::try_from(at).unwrap_or(u16::MAX));
        if port.learned.is_some() && !std::mem::replace(&mut state.learns, true) {
            self.watch_learning().map_err(NetworkError::Thread)?;
        }
        if let Some(interface) = &state.interface {
            interface.steering.set_stations(&stations(&port, Some(number)))?;
        }
        state.ports[at] = Some(port);
        self.tell_table(&state);
        Ok(NetworkEnd {
            network: Arc::clone(self),
            number,
        })
    }

    /// A port is of other VLANs, or isolated, or not any more; what is under way goes on.
    /// Errors: another one has its address there; or what the uplink lacks. Nothing changes then.
    pub(crate) fn change(&self, number: PortNumber, port: &PortConfig, mac: Mac) -> Result<(), NetworkError> {
        let mut port = table_port(port, mac, &self.news);
        let mut state = self.state();
        self.check_address(&state, &port, Some(number))?;
        let at = usize::from(number.0);
        if let Some(Some(before)) = state.ports.get(at) {
            // What was learned of it stays.
            port.learned.clone_from(&before.learned);
            port.flows.clone_from(&before.flows);
        }
        let before = state
            .ports
            .get_mut(at)
            .and_then(|before| before.replace(port.clone()));
        if let Some(interface) = &state.interface {
            let changes = stations(&port, Some(number));
            if let Err(error) = interface.steering.set_stations(&changes) {
                state.ports[at] = before;
                return Err(error.into());
            }
            let now: HashSet<_> = changes.iter().map(|change| change.station).collect();
            let mut gone = before.map_or_else(Vec::new, |before| stations(&before, None));
            gone.retain(|change| !now.contains(&change.station));
            if let Err(error) = interface.steering.set_stations(&gone) {
                tracing::warn!(network = %self.name, "an address stays with the uplink: {}", with_sources(&error));
            }
        }
        self.tell_table(&state);
        Ok(())
    }

    /// Errors: another port than that of this number has a station of these.
    fn check_address(
        &self,
        state: &State,
        port: &TablePort,
        number: Option<PortNumber>,
    ) -> Result<(), NetworkError> {
        let others = (0..).map(PortNumber).zip(&state.ports);
        let mut others = others.filter(|(other, _)| Some(*other) != number);
        let is_taken = |(_, other): (_, &Option<TablePort>)| {
            (other.as_ref()).is_some_and(|other| other.mac == port.mac && other.vlans.overlap(&port.vlans))
        };
        match others.any(is_taken) {
            false => Ok(()),
            true => Err(NetworkError::Address {
                mac: mac_text(port.mac),
                network: self.name.clone(),
            }),
        }
    }

    /// A port ends.
    pub(crate) fn leave(&self, number: PortNumber) {
        let mut state = self.state();
        let gone = state.ports.get_mut(usize::from(number.0)).and_then(Option::take);
        let learned = state.learning.leave(number);
        if let (Some(gone), Some(interface)) = (gone, &state.interface)
            && let learned = learned.into_iter().map(|station| change(station, None))
            && let changes = stations(&gone, None).into_iter().chain(learned).collect::<Vec<_>>()
            // A steward that is away keeps them: their frames find nobody here.
            && let Err(error) = interface.steering.set_stations(&changes)
        {
            tracing::warn!(
                network = self.name,
                "a port's address stays with the uplink: {}",
                with_sources(&error)
            );
        }
        self.tell_table(&state);
    }

    /// What guests have to know of the uplink.
    pub(crate) fn link(&self) -> NetworkLink {
        let state = self.state();
        match (state.link, &state.uplink) {
            (Some(link), _) => link,
            (None, uplink) => NetworkLink {
                up: uplink.is_none(),
                mtu: MTU,
            },
        }
    }

    /// What is counted of frames from worker to worker.
    pub(crate) fn link_counters(&self) -> Vec<Arc<PairCounters>> {
        self.workers.link_counters(&self.owner)
    }

    /// What others see of it.
    pub(crate) fn shown(&self) -> ShownNetwork {
        let link = self.link();
        let state = self.state();
        ShownNetwork {
            uplink: state.uplink.clone(),
            counters: state.counters.clone(),
            link,
            impaired: state.impaired.clone(),
            interface: state.interface.as_ref().map(Arc::downgrade),
            lanes: state
                .running
                .iter()
                .map(|running| Arc::downgrade(&running.facts))
                .collect(),
            host: state
                .uplink
                .as_ref()
                .filter(|uplink| uplink.host)
                .map(|_| state.host.shown()),
        }
    }

    /// NUMA nodes of the uplink's queues, where there are several.
    pub(crate) fn nodes(&self) -> Vec<Option<NumaNode>> {
        let state = self.state();
        let interface = state.interface.as_ref();
        vec![interface.and_then(|interface| interface.link.node); state.counters.len()]
    }

    /// Watches the uplink on a thread of its own, if there is one and nobody does, and calls `changed` when guests have
    /// to know of something.
    pub(crate) fn watch(self: &Arc<Self>, changed: impl Fn() + Send + 'static) -> io::Result<()> {
        {
            let mut state = self.state();
            if state.uplink.is_none() || std::mem::replace(&mut state.watched, true) {
                return Ok(());
            }
        }
        let network = Arc::clone(self);
        let body = move || {
            let mut known = network.link();
            loop {
                let Some(watched) = network.look() else {
                    if network.is_left() {
                        break;
                    }
                    continue;
                };
                let link = network.link();
                let before = std::mem::replace(&mut known, link);
                if before.up != link.up {
                    let what = if link.up { What::LinkUp } else { What::LinkDown };
                    JOURNAL.tell(Of::Network(&network.name), what, None);
                }
                if before != link {
                    changed();
                }
                network.await_change(watched.as_deref());
            }
        };
        std::thread::Builder::new()
            .name("uplink".to_owned())
            .spawn(body)?;
        Ok(())
    }

    /// Asks for what the program counted; the receiver's end tells that it is known.
    pub(crate) fn ask_for_sample(&self) -> Option<Receiver<()>> {
        self.state().uplink.as_ref()?;
        Some(self.wakers.ask_for_sample())
    }

    /// Waits until it is time to look at the uplink, and serves those who want samples meanwhile.
    fn await_change(&self, watched: Option<&Interface>) {
        let deadline = Instant::now() + RETRY;
        let lease = watched.and_then(|interface| interface.steering.watch());
        loop {
            let mut fds = vec![
                PollFd::new(&self.wakers.sample, PollFlags::IN),
                PollFd::new(&self.wakers.retry, PollFlags::IN),
            ];
            fds.extend(lease.map(|lease| PollFd::from_borrowed_fd(lease, PollFlags::IN)));
            let left = deadline.saturating_duration_since(Instant::now());
            let ready = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
            let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let (sample, look) = (is_ready(&fds[0]), fds[1..].iter().any(is_ready));
            if sample {
                self.wakers.sample.clear();
                let asked = self.wakers.take_asked();
                let uplink = self.state().uplink.clone();
                if let (Some(_), Some(uplink), Some(interface)) = (&asked, uplink, watched) {
                    let (until, range) = (Instant::now() + SAMPLE_TIMEOUT, uplink.wanted().range());
                    interface.steering.sample(&interface.link, range, until);
                }
            }
            if look || ready == Ok(0) || Instant::now() >= deadline {
                self.wakers.retry.clear();
                return;
            }
        }
    }

    /// Takes the queues back; nothing is set up any more.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        state.over = true;
        self.give_back(&mut state);
    }

    /// Looks at the interface again: it may be gone, back, down, or have another MTU. `None`: nobody has to look any
    /// more; else the interface that is there.
    pub(crate) fn look(&self) -> Option<Option<Arc<Interface>>> {
        let mut state = self.state();
        if state.is_over() {
            return None;
        }
        match state
            .interface
            .clone()
            .map(|interface| (interface.look(), interface))
        {
            Some((Ok(link), interface)) if !interface.steering.is_away() => {
                let other_mtu = link.mtu != interface.mtu();
                interface.take_note(&link);
                state.link = Some(link_of(&interface, link.up));
                if other_mtu {
                    tracing::info!(
                        network = self.name,
                        mtu = link.mtu,
                        "MTU changed, queues are set up anew"
                    );
                    self.stop_lanes(&mut state);
                }
                if state.running.is_empty() {
                    let started = self.start_lanes(&mut state, &interface);
                    self.note(&mut state, started);
                }
                self.look_at_host(&mut state, &interface);
            }
            Some((Ok(_), _)) => {}
            Some((Err(lost), interface)) => {
                drop(interface);
                self.lose_interface(&mut state);
                self.note(&mut state, Err(with_sources(&lost)));
                self.take_up_again(&mut state);
            }
            None => self.take_up_again(&mut state),
        }
        Some(state.interface.clone())
    }

    /// Gives the interface back; others can have its queues when this returns.
    fn give_back(&self, state: &mut State) {
        let interface = state.interface.as_ref().map(Arc::downgrade);
        self.lose_interface(state);
        // Who watches it, and who asks for its state, have it for a moment still; with the last of them the lease ends.
        self.wakers.retry();
        let deadline = Instant::now() + GIVING_BACK;
        while interface
            .as_ref()
            .is_some_and(|interface| interface.strong_count() > 0)
        {
            if Instant::now() >= deadline {
                tracing::warn!(
                    network = self.name,
                    "its queues are in use still, and may stay leased a while"
                );
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Gives all up that there is of an interface.
    fn lose_interface(&self, state: &mut State) {
        self.lose_host(state);
        self.stop_lanes(state);
        state.link = None;
        if let Some(interface) = state.interface.take() {
            interface.close_queues();
        }
    }

    /// Whoever watched the uplink may end, for there is none.
    fn is_left(&self) -> bool {
        let mut state = self.state();
        state.watched = !state.is_over();
        !state.watched
    }

    fn take_up_again(&self, state: &mut State) {
        let taken_up = self.take_up(state);
        if taken_up.is_ok() && state.interface.is_some() {
            tracing::info!(network = self.name, "uplink is back");
        }
        self.note(state, taken_up.map_err(|error| with_sources(&error)));
    }

    /// Opens the uplink's interface, and lets its queues run.
    fn take_up(&self, state: &mut State) -> Result<(), InterfaceError> {
        let Some(uplink) = &state.uplink else {
            return Ok(());
        };
        let interface = self.interfaces.open(&uplink.wanted(), uplink.into())?;
        let is_up = interface.look().is_ok_and(|link| link.up);
        state.link = Some(link_of(&interface, is_up));
        let ports = (0..).map(PortNumber).zip(&state.ports);
        let known = ports.filter_map(|(number, port)| Some(stations(port.as_ref()?, Some(number))));
        interface
            .steering
            .set_stations(&known.flatten().collect::<Vec<_>>())?;
        state.learning.forget();
        let started = self.start_lanes(state, &interface);
        state.interface = Some(Arc::clone(&interface));
        started?;
        self.look_at_host(state, &interface);
        Ok(())
    }

    fn start_lanes(&self, state: &mut State, interface: &Arc<Interface>) -> Result<(), InterfaceError> {
        let State {
            uplink: Some(uplink),
            counters,
            running,
            groups: of_groups,
            ..
        } = state
        else {
            return Ok(());
        };
        if let Some(groups) = interface.steering.groups()? {
            let counters = Arc::clone(&self.group_counters);
            let lane = NewLane {
                lane: Box::new(GroupsLane::new(
                    groups,
                    interface.link.partial_checksums,
                    counters,
                )),
                role: Role::Groups {
                    network: Arc::clone(&self.owner),
                },
                node: interface.link.node,
                on_fault: Box::new(|_| ()),
            };
            *of_groups = Some(self.workers.add(lane, &self.owner));
        }
        for (number, counters) in (uplink.start_queue..).zip(&*counters) {
            let role = Role::Uplink {
                network: Arc::clone(&self.owner),
                queue: number,
            };
            running.push(self.run_queue(interface, number, counters, role)?);
        }
        Ok(())
    }

    /// Lets a queue run in a lane of that role.
    fn run_queue(
        &self,
        interface: &Arc<Interface>,
        number: u32,
        counters: &Arc<PairCounters>,
        role: Role,
    ) -> Result<Running, InterfaceError> {
        let origin = Origin {
            frame_limit: interface.frame_limit(),
            partial_checksums: interface.link.partial_checksums,
        };
        let queue = InterfaceQueue::new(interface, number);
        queue.open_until(Instant::now() + RETRY * 5)?;
        let nic = queue.lend(counters)?;
        // Guests leave checksums to us, whoever of them does.
        let mut facts = LaneFacts::new(&nic.umem, nic.umem.len(), nic.backing.clone(), true);
        if let Err(error) = facts.describe(interface, None, &nic.nic, nic.sends) {
            queue.give_back(nic, counters);
            return Err(InterfaceError::Duplicate(error));
        }
        let lane = NewLane {
            lane: Box::new(UplinkLane::new(nic, origin, Arc::clone(counters))),
            role,
            node: interface.link.node,
            // It has no guest that could do wrong.
            on_fault: Box::new(|_| ()),
        };
        Ok(Running {
            queue,
            at: self.workers.add(lane, &self.owner),
            counters: Arc::clone(counters),
            facts: Arc::new(facts),
        })
    }

    fn stop_lanes(&self, state: &mut State) {
        if let Some(at) = state.groups.take() {
            drop(self.workers.remove(at));
        }
        for running in state.running.drain(..) {
            self.stop_queue(running);
        }
    }

    fn stop_queue(&self, running: Running) {
        let Running {
            queue,
            at,
            counters,
            facts,
        } = running;
        drop(facts);
        let nic = self.workers.remove(at).and_then(|lane| lane.stop().queue);
        if let Some(nic) = nic {
            queue.give_back(nic, &counters);
        }
    }

    /// Takes note of what came of setting the queues up; said when it is another thing than before.
    fn note(&self, state: &mut State, done: Result<(), impl ToString>) {
        let why = done.err().map(|error| error.to_string());
        if why == state.impaired {
            return;
        }
        if let Some(why) = &why {
            tracing::warn!(network = self.name, "no uplink: {why}");
        }
        let what = if why.is_some() {
            What::Impaired
        } else {
            What::Recovered
        };
        JOURNAL.tell(Of::Network(&self.name), what, why.clone());
        state.impaired = why;
    }

    fn tell_table(&self, state: &State) {
        let table = configured(state).with_learned(state.learning.stations());
        self.workers.tell_table(&self.owner, &Arc::new(table));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn link_of(interface: &Interface, up: bool) -> NetworkLink {
    NetworkLink {
        up,
        mtu: interface.frame_limit().saturating_sub(L2_BYTES),
    }
}

/// What the program has to know of a port's addresses: whose they are, or that they are nobody's.
fn stations(port: &TablePort, whose: Option<PortNumber>) -> Vec<StationChange> {
    let vlans = port.vlans.all().iter();
    vlans
        .map(|&vlan| change(Station::new(vlan, port.mac), whose))
        .collect()
}

/// The same of one address.
fn change(station: Station, whose: Option<PortNumber>) -> StationChange {
    let (vlan, mac) = (station.vlan(), station.mac());
    StationChange {
        station: steer::Station { vlan, mac },
        port: whose.map(|number| number.0.into()),
    }
}

/// Who has which address by configuration.
fn configured(state: &State) -> Table {
    let host = state.interface.as_ref().map(|interface| interface.link.mac);
    Table::new(state.ports.clone())
        .with_host(host)
        .with_reached(&state.host.macs)
}

/// A port as the table has it.
fn table_port(port: &PortConfig, mac: Mac, news: &Arc<OwnedFd>) -> TablePort {
    let lock = port.guard.lock().map(Arc::new);
    let NicConfig::Network {
        vlans,
        isolated,
        promiscuous,
        learning,
        ..
    } = &port.nic
    else {
        return TablePort {
            mac,
            ..TablePort::default()
        };
    };
    TablePort {
        mac,
        vlans: match vlans {
            MemberVlans::Untagged => Vlans::Untagged,
            MemberVlans::Access(vlan) => Vlans::Access(*vlan),
            MemberVlans::Trunk(vlans) => Vlans::Trunk(vlans.clone()),
        },
        isolated: *isolated,
        promiscuous: *promiscuous,
        flows: (port.queues > 1).then(Arc::default),
        learned: learning.then(|| Arc::new(Learned::new(Arc::clone(news)))),
        lock,
    }
}
