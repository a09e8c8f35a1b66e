//! All workers of the process, for control: which worker has which lanes, and their statistics.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use common::cycles::CycleRate;
use xsk::NumaNode;

use crate::fdb::Fdb;
use crate::lane::new_lane::NewLane;
use crate::lane::role::{Affinity, Role};
use crate::lane::spread::{LanesChange, SharedLane};
use crate::lane::{Lane, LaneId, Siblings};
use crate::worker::place::WorkerPlace;
use crate::worker::polling::Waits;
use crate::worker::progress::{Activity, Watcher};
use crate::worker::readings::{self, LaneList};
use crate::worker::statistics::WorkerCounters;
use crate::worker::{Command, WorkerHandle};
use common::lock::Locked;
use model::state::{Reading, WorkerReading};

/// How long to wait for the answer of a worker before it is checked whether it hangs.
const HANGS: Duration = Duration::from_millis(100);

/// All workers of the process; spreads lanes over them.
pub struct Workers {
    handles: Vec<WorkerHandle>,
    roster: Mutex<Roster>,
    /// Lets the thread that checks whether workers hang sleep while all of them do.
    pub watcher: Arc<Watcher>,
    cycles: CycleRate,
}

/// The lanes of all workers.
struct Roster {
    /// By worker: how many lanes it has.
    loads: Vec<usize>,
    lanes: HashMap<LaneId, Entry>,
    /// Statistics of all lanes.
    listed: LaneList,
    /// By worker: its statistics at the last reset.
    before: Vec<Reading>,
    /// ID of the next lane.
    next_id: LaneId,
}

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
}

/// Receives the numbers of workers that have applied a [`LanesChange`].
struct Answers {
    done: mpsc::Receiver<usize>,
    /// The lane's worker, which gets none.
    own: usize,
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
                listed: LaneList::default(),
                before: vec![Reading::default(); handles.len()],
                next_id: LaneId(1),
            }),
            handles,
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
        let affinity = lane.role.affinity(lane.lane.receives());
        let mut roster = self.roster.locked();
        // With the lock, so that a worker gets its lanes in the order of their numbers.
        let id = roster.next_id;
        roster.next_id.0 += 1;
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
        roster.loads[worker] += 1;
        let entry = Entry {
            owner: Arc::clone(owner),
            worker,
            affinity,
            role: lane.role.clone(),
        };
        let is_of_network = lane.role.network().is_some();
        let counted = roster.listed.add(id, worker, owner, &entry.role);
        roster.lanes.insert(id, entry);
        let mail = Arc::clone(&self.handles[worker].mail);
        let shared = SharedLane::of(&*lane.lane, (id, &lane.role), mail);
        self.handles[worker].send(Command::Add(id, lane, counted));
        let answers = self.send_spread(is_of_network, worker, &LanesChange::Add(shared));
        drop(roster);
        self.wait(answers);
        LaneAt { worker, id }
    }

    /// Sends the change of a lane of a network to all workers but `own`, the lane's. The caller holds the roster's lock, so
    /// that all get changes in one order.
    fn send_spread(&self, is_of_network: bool, own: usize, change: &LanesChange) -> Answers {
        let (sender, done) = mpsc::channel();
        if is_of_network {
            let others = self.handles.iter().enumerate().filter(|(at, _)| *at != own);
            for (_, handle) in others {
                handle.send(Command::Spread(change.clone(), sender.clone()));
            }
        }
        Answers { done, own }
    }

    /// Waits until all workers have answered, except for those that hang.
    fn wait(&self, Answers { done, own }: Answers) {
        let mut answered = BTreeSet::from([own]);
        loop {
            match done.recv_timeout(HANGS) {
                Ok(worker) => _ = answered.insert(worker),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let mut others = (0..self.handles.len()).filter(|worker| !answered.contains(worker));
                    if others.all(|worker| self.handles[worker].hangs.load(Relaxed)) {
                        return;
                    }
                }
            }
        }
    }

    /// Removes a lane from its worker, and returns it.
    pub fn remove(&self, at: LaneAt) -> Option<Box<dyn Lane>> {
        let lane = self.handles[at.worker].remove(at.id);
        let mut roster = self.roster.locked();
        roster.loads[at.worker] = roster.loads[at.worker].saturating_sub(1);
        let gone = roster.lanes.remove(&at.id);
        roster.listed.remove(at.id);
        let is_of_network = gone.is_some_and(|gone| gone.role.network().is_some());
        let answers = self.send_spread(is_of_network, at.worker, &LanesChange::Remove(at.id));
        drop(roster);
        self.wait(answers);
        lane
    }

    /// The owner of a lane, and the owners of lanes that it may deliver to.
    pub fn owners(&self, id: LaneId) -> Vec<Arc<str>> {
        let roster = self.roster.locked();
        let affinity = roster.lanes.get(&id).and_then(|lane| lane.affinity.as_ref());
        // The lanes of a network deliver to each other.
        let network = roster.lanes.get(&id).and_then(|lane| lane.role.network());
        let is_meant = |at: &LaneId, lane: &Entry| {
            *at == id
                || (affinity.is_some() && lane.affinity.as_ref() == affinity)
                || (network.is_some() && lane.role.network() == network)
        };
        let lanes = roster.lanes.iter().filter(|(at, lane)| is_meant(at, lane));
        let owners: BTreeSet<_> = lanes.map(|(_, lane)| Arc::clone(&lane.owner)).collect();
        owners.into_iter().collect()
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
        // Most changes are none of the other workers' business, and a VMM may cause many.
        let Ok(Some(receives)) = changed.recv() else {
            return;
        };
        let roster = self.roster.locked();
        let lane = roster.lanes.get(&at.id);
        let is_of_network = lane.is_some_and(|lane| lane.role.network().is_some());
        let answers = self.send_spread(is_of_network, at.worker, &LanesChange::Refresh(at.id, receives));
        drop(roster);
        self.wait(answers);
    }

    /// Sends the FDB of a network to all workers; `None`: the network is gone.
    pub fn set_fdb(&self, network: &Arc<str>, fdb: Option<&Arc<Fdb>>) {
        for handle in &self.handles {
            handle.send(Command::Fdb(Arc::clone(network), fdb.cloned()));
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
