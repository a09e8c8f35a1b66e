//! All workers of the process, for control: which worker has which lanes, and their statistics.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use common::cycles::CycleRate;
use device::counters::PairCounters;
use xsk::NumaNode;

use crate::fdb::Fdb;
use crate::lane::new_lane::NewLane;
use crate::lane::role::{Affinity, Role};
use crate::lane::spread::Spread;
use crate::lane::{Lane, LaneId, Siblings};
use crate::link::Link;
use crate::link::inner_queue::InnerQueueError;
use crate::worker::place::WorkerPlace;
use crate::worker::polling::Waits;
use crate::worker::progress::{Activity, Watcher};
use crate::worker::readings::{self, LaneList};
use crate::worker::slots::receives;
use crate::worker::statistics::WorkerCounters;
use crate::worker::{Command, WorkerHandle};
use common::lock::Locked;
use model::state::{Reading, WorkerReading};

/// All workers of the process; spreads lanes over them.
pub struct Workers {
    handles: Vec<WorkerHandle>,
    roster: Mutex<Roster>,
    /// ID of the next lane. Nothing is published through it.
    next_id: AtomicU64,
    /// Lets the thread that checks whether workers hang sleep while all of them do.
    pub watcher: Arc<Watcher>,
    cycles: CycleRate,
}

/// The lanes of all workers.
struct Roster {
    /// By worker: how many lanes it has, links not counted.
    loads: Vec<usize>,
    lanes: HashMap<LaneId, Entry>,
    /// The links between workers: the two ends of each.
    links: HashMap<Between, [LaneAt; 2]>,
    /// Their counters, and those of removed links.
    link_counters: HashMap<Between, [Arc<PairCounters>; 2]>,
    /// Statistics of all lanes, links included.
    listed: LaneList,
    /// By worker: its statistics at the last reset.
    before: Vec<Reading>,
}

/// A link: its network, the sending worker, and the receiving one.
type Between = (Arc<str>, usize, usize);

/// A lane, and the worker that has it.
#[derive(Debug, Clone, Copy)]
pub struct LaneAt {
    /// The worker's number.
    pub worker: usize,
    id: LaneId,
}

/// What control knows of a lane.
struct Entry {
    owner: Arc<str>,
    worker: usize,
    /// See [`Role::affinity`].
    affinity: Option<Affinity>,
    role: Role,
}

impl Roster {
    /// The worker that has lanes with this affinity, if there are any.
    fn worker_of(&self, affinity: &Affinity) -> Option<usize> {
        let mut lanes = self.lanes.values();
        lanes
            .find(|lane| lane.affinity.as_ref() == Some(affinity))
            .map(|lane| lane.worker)
    }

    /// Lanes of a network.
    fn of_network(&self, network: &Arc<str>) -> impl Iterator<Item = &Entry> {
        let lanes = self.lanes.values();
        lanes.filter(move |lane| lane.role.network() == Some(network))
    }

    /// Which workers have the network's ports, the queues of its uplink, and its tap to the host.
    fn spread(&self, network: &Arc<str>) -> Spread {
        let mut spread = Spread::default();
        for lane in self.of_network(network) {
            match &lane.role {
                Role::Member { port, .. } => _ = spread.ports.insert(*port, lane.worker),
                Role::Uplink { .. } => _ = spread.exits[0].insert(lane.worker),
                Role::Host { .. } => _ = spread.exits[1].insert(lane.worker),
                _ => {}
            }
        }
        spread
    }
}

/// What can be seen of a worker from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// How many rounds it made, plus how many times it slept.
    pub rounds: u64,
    /// What it was doing.
    pub activity: Activity,
}

impl Workers {
    /// Starts `count` workers (at least one), pinned round robin to `cpus` if there are any.
    pub fn start(count: usize, cpus: &[usize], waits: Waits) -> io::Result<Self> {
        let cpu = |index: usize| cpus.get(index % cpus.len().max(1)).copied();
        let watcher = Arc::default();
        let handles: Vec<_> = (0..count.max(1))
            .map(|index| WorkerHandle::start(index, cpu(index), waits, &watcher))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            roster: Mutex::new(Roster {
                loads: vec![0; handles.len()],
                lanes: HashMap::new(),
                links: HashMap::new(),
                link_counters: HashMap::new(),
                listed: LaneList::default(),
                before: vec![Reading::default(); handles.len()],
            }),
            handles,
            next_id: AtomicU64::new(1),
            watcher,
            cycles: CycleRate::begin(),
        })
    }

    /// Sets the CPUs of each worker; to be called once.
    pub fn settle(&self, places: &[WorkerPlace]) {
        for (handle, place) in self.handles.iter().zip(places) {
            let _ = handle.place.set(*place);
            if let Some(cpus) = place.cpus {
                handle.send(Command::RunOn(cpus));
            }
        }
    }

    /// By worker: its NUMA node, where there are several nodes.
    pub fn nodes(&self) -> impl Iterator<Item = Option<NumaNode>> {
        self.handles.iter().map(WorkerHandle::node)
    }

    /// Adds a lane of `owner` to the worker that has lanes with the same affinity. Otherwise it prefers workers that do
    /// not hang, then those on the NUMA node of the lane's NIC, then the one with the fewest lanes.
    pub fn add(&self, lane: NewLane, owner: &Arc<str>) -> LaneAt {
        let id = self.next_id();
        let affinity = lane.role.affinity(receives(&*lane.lane));
        let mut roster = self.roster.locked();
        let by_load = |&worker: &usize| {
            let handle = &self.handles[worker];
            let is_remote = lane.node.is_some() && handle.node() != lane.node;
            (handle.hangs.load(Relaxed), is_remote, roster.loads[worker])
        };
        let worker = affinity
            .as_ref()
            .and_then(|affinity| roster.worker_of(affinity))
            .or_else(|| (0..self.handles.len()).min_by_key(by_load))
            .unwrap_or(0);
        let worker = match lane.role.network() {
            Some(network) => self.link(&mut roster, network, worker),
            None => worker,
        };
        roster.loads[worker] += 1;
        let entry = Entry {
            owner: Arc::clone(owner),
            worker,
            affinity,
            role: lane.role.clone(),
        };
        let network = lane.role.network().cloned();
        let counted = roster.listed.add(id, worker, owner, &entry.role);
        roster.lanes.insert(id, entry);
        self.handles[worker].send(Command::Add(id, lane, counted));
        self.tell_spread(&roster, network.as_ref());
        LaneAt { worker, id }
    }

    fn next_id(&self) -> LaneId {
        LaneId(self.next_id.fetch_add(1, Relaxed))
    }

    /// Sends all workers the [`Spread`] of a network.
    fn tell_spread(&self, roster: &Roster, network: Option<&Arc<str>>) {
        if let (Some(network), 2..) = (network, self.handles.len()) {
            let spread = Arc::new(roster.spread(network));
            for handle in &self.handles {
                handle.send(Command::Spread(Arc::clone(network), Arc::clone(&spread)));
            }
        }
    }

    /// Links a worker with all others that have lanes of a network. Returns the worker, or, if linking fails, another
    /// one that has lanes of the network.
    fn link(&self, roster: &mut Roster, network: &Arc<str>, worker: usize) -> usize {
        let others: BTreeSet<_> = roster.of_network(network).map(|lane| lane.worker).collect();
        if others.contains(&worker) {
            return worker;
        }
        for &other in &others {
            for (from, to) in [(worker, other), (other, worker)] {
                let key = (Arc::clone(network), from, to);
                if roster.links.contains_key(&key) {
                    continue;
                }
                let counters = roster.link_counters.entry(key.clone()).or_default().clone();
                match self.new_link(&key, counters, &mut roster.listed) {
                    Ok(ends) => _ = roster.links.insert(key, ends),
                    Err(error) => {
                        tracing::warn!(
                            %network,
                            "cannot link workers, so the lane shares another one's: {}",
                            steer::with_sources(&error)
                        );
                        return other;
                    }
                }
            }
        }
        worker
    }

    fn new_link(
        &self,
        (network, from, to): &Between,
        counters: [Arc<PairCounters>; 2],
        listed: &mut LaneList,
    ) -> Result<[LaneAt; 2], InnerQueueError> {
        let Link { giving, taking } = Link::new(counters)?;
        let network = || Arc::clone(network);
        let ends: [(usize, Box<dyn Lane>, Role); 2] = [
            (
                *to,
                Box::new(taking),
                Role::LinkFrom {
                    network: network(),
                    worker: *from,
                },
            ),
            (
                *from,
                Box::new(giving),
                Role::LinkTo {
                    network: network(),
                    worker: *to,
                },
            ),
        ];
        Ok(ends.map(|(worker, lane, role)| {
            let id = self.next_id();
            let lane = NewLane {
                lane,
                role,
                node: None,
                // No guest's fault: the daemon has both ends.
                on_fault: Box::new(|fault| tracing::error!(?fault, "a link between workers ended")),
            };
            let counted = listed.add(id, worker, "", &lane.role);
            self.handles[worker].send(Command::Add(id, lane, counted));
            LaneAt { worker, id }
        }))
    }

    /// Removes a lane from its worker, and returns it.
    pub fn remove(&self, at: LaneAt) -> Option<Box<dyn Lane>> {
        let lane = self.handles[at.worker].remove(at.id);
        let mut roster = self.roster.locked();
        roster.loads[at.worker] = roster.loads[at.worker].saturating_sub(1);
        let gone = roster.lanes.remove(&at.id);
        roster.listed.remove(at.id);
        let network = gone.and_then(|gone| gone.role.network().cloned());
        self.tell_spread(&roster, network.as_ref());
        let links: Vec<_> = match network {
            Some(network) if roster.of_network(&network).next().is_none() => {
                let its = roster.links.extract_if(|(of, ..), _| *of == network);
                its.flat_map(|(_, ends)| ends).collect()
            }
            _ => Vec::new(),
        };
        links.iter().for_each(|end| roster.listed.remove(end.id));
        drop(roster);
        for end in links {
            drop(self.handles[end.worker].remove(end.id).map(Lane::stop));
        }
        lane
    }

    /// The owner of a lane, and the owners of lanes that it may deliver to.
    pub fn owners(&self, id: LaneId) -> Vec<Arc<str>> {
        let roster = self.roster.locked();
        let affinity = roster.lanes.get(&id).and_then(|lane| lane.affinity.as_ref());
        // A network's lanes on one worker deliver to each other, and a link delivers to all lanes of its worker.
        let link = || {
            let mut links = roster.links.iter();
            links.find_map(|((network, ..), ends)| {
                let end = ends.iter().find(|end| end.id == id)?;
                Some((network, end.worker))
            })
        };
        let lane = roster.lanes.get(&id);
        let network = lane
            .and_then(|lane| Some((lane.role.network()?, lane.worker)))
            .or_else(link);
        let is_meant = |at: &LaneId, lane: &Entry| {
            let its = lane.role.network().map(|network| (network, lane.worker));
            *at == id
                || (affinity.is_some() && lane.affinity.as_ref() == affinity)
                || (network.is_some() && its == network)
        };
        let lanes = roster.lanes.iter().filter(|(at, lane)| is_meant(at, lane));
        let owners: BTreeSet<_> = lanes.map(|(_, lane)| Arc::clone(&lane.owner)).collect();
        owners.into_iter().collect()
    }

    /// Counters of the links between workers, also of removed ones, of a network.
    pub fn link_counters(&self, network: &str) -> Vec<Arc<PairCounters>> {
        let roster = self.roster.locked();
        let its = roster
            .link_counters
            .iter()
            .filter(|((of, ..), _)| **of == *network);
        its.flat_map(|(_, counters)| counters.clone()).collect()
    }

    /// The threads of the workers.
    pub fn threads(&self) -> impl Iterator<Item = &JoinHandle<()>> {
        self.handles.iter().filter_map(|handle| handle.thread.as_ref())
    }

    /// By worker: what the watchdog compares from time to time.
    pub fn observe(&self) -> impl Iterator<Item = Observation> {
        self.handles.iter().map(|handle| {
            let counters = &handle.counters;
            let rounds = [&counters.busy_rounds, &counters.idle_rounds, &counters.sleeps];
            Observation {
                rounds: rounds
                    .iter()
                    .fold(0, |sum, counter| sum.wrapping_add(counter.get())),
                activity: handle.progress.activity(),
            }
        })
    }

    /// Records whether a worker hangs: new lanes avoid it then.
    pub fn note_hang(&self, worker: usize, hangs: bool) {
        self.handles[worker].hangs.store(hangs, Relaxed);
    }

    /// Changes a running lane; the change is in effect when this returns.
    pub fn change(&self, at: LaneAt, change: impl FnOnce(&mut dyn Lane, &mut dyn Siblings) + Send + 'static) {
        let (done, changed) = mpsc::channel();
        self.handles[at.worker].send(Command::Change(at.id, Box::new(change), done));
        let _ = changed.recv();
    }

    /// Sends the FDB of a network to all workers.
    pub fn set_fdb(&self, network: &Arc<str>, fdb: &Arc<Fdb>) {
        for handle in &self.handles {
            handle.send(Command::Fdb(Arc::clone(network), Arc::clone(fdb)));
        }
    }

    /// By worker: its statistics, and those of its lanes.
    pub fn readings(&self) -> Vec<WorkerReading> {
        let roster = self.roster.locked();
        let workers = self.counters().zip(&roster.before).enumerate();
        let readings = workers.map(|(worker, (counters, before))| WorkerReading {
            total: readings::read(counters),
            before: *before,
            lanes: roster.listed.of(worker),
        });
        readings.collect()
    }

    /// Resets statistics. Counters of workers only grow, so their present values are stored and subtracted later.
    pub fn reset_statistics(&self) {
        let mut roster = self.roster.locked();
        roster.before = self.counters().map(readings::read).collect();
        roster.listed.reset();
    }

    /// CPU cycles per microsecond; see [`CycleRate`].
    pub fn cycles_per_us(&self) -> Option<f64> {
        self.cycles.per_us()
    }

    /// What each worker has counted.
    pub fn counters(&self) -> impl Iterator<Item = &WorkerCounters> {
        self.handles.iter().map(|handle| &*handle.counters)
    }
}
