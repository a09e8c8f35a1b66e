//! Worker threads: each owns lanes, polls them while there is work, and sleeps when there is none.
//!
//! Theory of operation. A worker polls all its lanes round robin. When no lane has moved a frame for the spin time, the
//! worker enables notifications (drivers are asked for kicks, with the re-check that makes a lost kick impossible) and
//! sleeps. If only one round of work followed each of the last [`SINGLE`] sleeps, it sleeps right after the next such
//! round, without another round that would find nothing. It sleeps in one ppoll(2): on the AF_XDP sockets and on an
//! epoll set of the kick eventfds, its mailbox and the other descriptors of lanes ([`Lane::event_fd`]). The set is
//! edge-triggered: an event only makes the worker check the lane, and eventfds are not read, so a counter that stays
//! above zero does not keep the worker awake.
//!
//! Sockets are not in the set, because a waiter on an AF_XDP socket makes the kernel go through a wake-up for every
//! sent frame (`sock_wfree` calls `sk_write_space`, net/core/sock.c); ppoll waits on them only while it runs, and
//! needs no system call for each. The exception is a guest's own socket in copy mode while NICs end most sleeps and few
//! frames move between two ([`OFTEN`], [`FEW`]): then a sleep is one system call. For the uplink of a network this was
//! measured to cost more.
//!
//! A guest may kick as often as it likes. After [`FUTILE_WAKES`] kicks without a frame the worker ignores its kicks for
//! [`IGNORE_KICKS`] and polls its lane once a millisecond, so that the other lanes get the worker's time.
//!
//! Control reaches a worker through its mailbox only ([`Command`]). The worker returns a removed lane whole, so that
//! another thread closes the sockets, which waits for the kernel.
//!
//! A worker may hang in guest memory (a file on a file system that has stopped answering), and cannot report that. So
//! it publishes its position ([`crate::worker::progress`]), which the watchdog reads.
//!
//! After a guest's fault its lane is not polled any more, and the fault is reported once through the lane's `on_fault`.
//! The other lanes are not affected.

pub(crate) mod moderation;
pub mod place;
pub mod polling;
pub mod progress;
pub(crate) mod readings;
pub(crate) mod sleep;
pub(crate) mod sleeping;
pub(crate) mod slots;
pub(crate) mod statistics;
pub(crate) mod worker_time;
pub mod workers;

use std::io;
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, Timespec, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};
use xsk::NumaNode;

use self::sleep::Rest;
use self::slots::{EVENT_FD, Lanes, Slot};
use crate::fdb::Fdb;
use crate::lane::new_lane::NewLane;
use crate::lane::role::Role;
use crate::lane::spread::{LaneWorker, LanesChange};
use crate::lane::{Lane, LaneId, Siblings};
use crate::worker::moderation::Moderation;
use crate::worker::place::WorkerPlace;
use crate::worker::polling::{Polling, Waits};
use crate::worker::progress::{Progress, Watcher};
use crate::worker::sleeping::Sleeping;
use crate::worker::statistics::{CHECKS_PER_TIMED, LaneCounted, Stopwatch, WorkerCounters};
use crate::worker::worker_time::Watch;
use device::meter;
use device::pair::Fault;

/// A lane may wake the worker this often without moving a frame. Chance alone (a frame that was found just before its
/// kick) does not reach this.
const FUTILE_WAKES: u32 = 32;
/// How long further kicks of such a lane are ignored.
const IGNORE_KICKS: Duration = Duration::from_millis(10);
/// Rounds between two checks for kicks of guests with idle lanes. At each check another lane also becomes the first of
/// the round. A prime, see [`CHECKS_PER_TIMED`].
const ROUNDS_PER_CHECK: u32 = 61;
/// Sockets in copy mode are in the epoll set once NICs ended this many more sleeps than all other causes.
const OFTEN: u8 = 16;
/// At most this many frames move between two of these sleeps: each frame that a socket in the set sends costs a
/// wake-up.
const FEW: usize = 16;
/// After this many sleeps in a row that were each followed by one round of work, the worker sleeps right after one
/// round, without an empty round: enabling notifications also checks for work.
const SINGLE: u32 = 4;
/// Most events that are read at once; the others are read the next time.
const EVENTS: usize = 16;
/// The timeout of a poll that does not wait.
const NO_TIME: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Something that control does to a running lane, on its worker's thread.
pub(crate) type Change = Box<dyn FnOnce(&mut dyn Lane, &mut dyn Siblings) + Send>;

/// A request of control to a worker.
pub(crate) enum Command {
    /// Poll this lane from now on, and count its work there.
    Add(LaneId, NewLane, Arc<LaneCounted>),
    /// Hand this lane back.
    Remove(LaneId, Sender<Option<Box<dyn Lane>>>),
    /// Change this lane, between two rounds. The answer: what other workers have to know ([`Slot::refresh`]).
    Change(LaneId, Change, Sender<Option<bool>>),
    /// The FDB of a network; `None`: the network is gone.
    Fdb(Arc<str>, Option<Arc<Fdb>>),
    /// A change of a network's lanes of other workers; answered once it is in effect.
    Spread(LanesChange, Sender<usize>),
    /// A lane of another worker has left frames in this lane that only this worker delivers.
    Wake(LaneId),
    /// A lane of another worker has found a fault of this lane's guest.
    Blame(LaneId, Fault),
    /// Run on these CPUs only.
    RunOn(CpuSet),
    /// End the thread.
    End,
}

/// Sends commands to a worker.
pub(crate) struct Mail {
    commands: Sender<Command>,
    /// Commands were sent since the worker last checked for some.
    posted: Arc<AtomicBool>,
    mailbox: OwnedFd,
}

impl Mail {
    /// Sends a command; the worker acts on it within a round.
    pub(crate) fn send(&self, command: Command) {
        // A worker ends only by Command::End. A command that follows that has no effect.
        let _ = self.commands.send(command);
        // Publishes the command; pairs with the swap in `read_mail`. If the worker saw the flag before the command, it
        // would not read the command until the next one is sent. A swap, since of several senders the worker reads the
        // flag of the last one only: a plain store of that one would end the release sequences of the others, and
        // publish only its own command.
        self.posted.swap(true, Ordering::Release);
        let _ = rustix::io::write(&self.mailbox, &1u64.to_ne_bytes());
    }
}

impl LaneWorker for Mail {
    fn wake(&self, lane: LaneId) {
        self.send(Command::Wake(lane));
    }

    fn blame(&self, lane: LaneId, fault: Fault) {
        self.send(Command::Blame(lane, fault));
    }
}

/// Control's end of a worker.
pub(crate) struct WorkerHandle {
    pub(crate) mail: Arc<Mail>,
    /// See [`WorkerCounters`].
    pub(crate) counters: Arc<WorkerCounters>,
    pub(crate) progress: Arc<Progress>,
    /// The watchdog has seen that it hangs: new lanes go to other workers. Only control threads set and read it;
    /// nothing is published through it.
    pub(crate) hangs: AtomicBool,
    /// Where it runs, once [`crate::worker::workers::Workers::settle`] has decided that.
    pub(crate) place: OnceLock<WorkerPlace>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

impl WorkerHandle {
    /// Starts a worker, pinned to `cpu` if one is named.
    pub(crate) fn start(
        index: usize,
        cpu: Option<usize>,
        waits: Waits,
        watcher: &Arc<Watcher>,
    ) -> io::Result<Self> {
        let (worker, mut handle) = Self::prepare(index, waits, watcher)?;
        let thread = std::thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(move || {
                if let Some(cpu) = cpu {
                    let mut only = CpuSet::new();
                    only.set(cpu);
                    run_on(&only);
                }
                sleep_precisely();
                worker.run();
            })?;
        handle.thread = Some(thread);
        Ok(handle)
    }

    /// A worker whose thread is not started yet, and its handle.
    fn prepare(index: usize, waits: Waits, watcher: &Arc<Watcher>) -> io::Result<(Worker, Self)> {
        let mailbox = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &mailbox,
            EventData::new_u64(0),
            EventFlags::IN | EventFlags::ET,
        )?;
        let (commands, inbox) = mpsc::channel();
        let posted = Arc::new(AtomicBool::new(false));
        let counters = Arc::new(WorkerCounters::default());
        let progress = Arc::new(Progress::new(Arc::clone(watcher)));
        let worker = Worker {
            inbox,
            posted: Arc::clone(&posted),
            epoll,
            spin: waits.spin,
            moderation: Moderation::new(waits.moderation, Instant::now()),
            counters: Arc::clone(&counters),
            progress: Arc::clone(&progress),
            lanes: Lanes {
                number: index,
                ..Lanes::default()
            },
            sleeping: Sleeping::default(),
            rotation: 1,
            moved: 0,
            nic_wakes: 0,
            is_woken: true,
            polled: Vec::new(),
        };
        let handle = Self {
            mail: Arc::new(Mail {
                commands,
                posted,
                mailbox,
            }),
            counters,
            progress,
            hangs: AtomicBool::new(false),
            place: OnceLock::new(),
            thread: None,
        };
        Ok((worker, handle))
    }

    /// The NUMA node that it runs on, where there are several and that is known.
    pub(crate) fn node(&self) -> Option<NumaNode> {
        self.place.get()?.node
    }

    /// Sends a command.
    pub(crate) fn send(&self, command: Command) {
        self.mail.send(command);
    }

    /// Takes a lane back; `None` if the worker does not have it.
    pub(crate) fn remove(&self, id: LaneId) -> Option<Box<dyn Lane>> {
        let (answer, answered) = mpsc::channel();
        self.send(Command::Remove(id, answer));
        answered.recv().ok().flatten()
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.send(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Restricts the calling thread to these CPUs.
fn run_on(cpus: &CpuSet) {
    if let Err(error) = sched_setaffinity(None, cpus) {
        tracing::warn!(
            ?cpus,
            %error,
            "the worker runs on any CPU: check --cpus, or those of the NIC's NUMA node, against the CPUs that exist"
        );
    }
}

/// Makes sleeps of the calling thread end on time. The default slack of Linux is 50 us, as long as a NIC takes to send.
fn sleep_precisely() {
    let _ = set_current_timer_slack(NonZeroU64::new(1));
}

struct Worker {
    inbox: Receiver<Command>,
    posted: Arc<AtomicBool>,
    epoll: OwnedFd,
    spin: Duration,
    moderation: Moderation,
    counters: Arc<WorkerCounters>,
    progress: Arc<Progress>,
    lanes: Lanes,
    sleeping: Sleeping,
    /// State of a linear congruential generator, which picks the lane that is polled first.
    rotation: u64,
    /// Frames that moved since it slept last.
    moved: usize,
    /// Sleeps that NICs ended, less those that anything else did: 0 to twice [`OFTEN`].
    nic_wakes: u8,
    /// Something other than its timeout ended the last sleep.
    is_woken: bool,
    /// Memory for the descriptors that a sleep polls; empty between sleeps.
    polled: Vec<PollFd<'static>>,
}

impl Worker {
    fn run(mut self) {
        let mut pace = Pace::new(self.spin);
        while self.read_mail() {
            self.round(&mut pace);
        }
    }

    /// Polls the lanes, and sleeps if no frame has moved for long enough.
    #[inline]
    fn round(&mut self, pace: &mut Pace) {
        pace.rounds = pace.rounds.wrapping_add(1);
        let is_timed = pace.rounds.is_multiple_of(ROUNDS_PER_CHECK) && self.look(pace);
        let moved = self.poll(is_timed.then(|| Stopwatch::start(Instant::now())));
        if moved {
            if meter::IS_KEPT {
                self.counters.busy_rounds.add(1);
                pace.watch.note_busy();
            }
            pace.end_pause(Instant::now);
            pace.busy_rounds = pace.busy_rounds.saturating_add(1);
            // Lanes in a pause have their notifications off: their remaining work would wait for the end of the pause.
            if !pace.expects_no_more() || !self.moderation.pause().is_zero() {
                self.sleeping.end(&mut self.lanes, &self.progress);
                return;
            }
        }
        std::hint::spin_loop();
        let now = Instant::now();
        if meter::IS_KEPT {
            match moved {
                true => pace.watch.look(now, &self.counters.time),
                false => {
                    self.counters.idle_rounds.add(1);
                    pace.watch.note_idle(now, &self.counters.time);
                }
            }
        }
        let since = *pace.idle_since.get_or_insert(now);
        if now.duration_since(since) < pace.polling.now {
            self.sleeping.end(&mut self.lanes, &self.progress);
            return;
        }
        self.counters.counted.publish(&mut pace.work);
        match self.rest(now, !moved) {
            Rest::Slept { asleep, woken } => {
                pace.watch.note_sleep(asleep, woken, &self.counters.time);
                pace.note_sleep(asleep);
                // After a timeout it only checks for work: if there is none the idle time goes on, and the worker
                // sleeps again without polling longer.
                if self.is_woken {
                    pace.end_pause(|| woken);
                }
            }
            Rest::HasWork => pace.note_more_work(moved),
        }
    }

    /// Work that is done once in [`ROUNDS_PER_CHECK`] rounds. Returns whether this round is timed.
    fn look(&mut self, pace: &mut Pace) -> bool {
        self.shift();
        if self.has_idle() {
            self.poll_events();
        }
        // A busy worker does not sleep, so sockets that send much would otherwise stay in the epoll set.
        if self.nic_wakes > 0 && self.moved > FEW {
            self.nic_wakes = 0;
            for &at in &self.lanes.awake {
                self.lanes.slots[at].unwatch_nic(&self.epoll);
            }
        }
        pace.looks = pace.looks.wrapping_add(1);
        let is_told = meter::IS_KEPT && pace.looks.is_multiple_of(CHECKS_PER_TIMED);
        if is_told {
            pace.watch.look(Instant::now(), &self.counters.time);
            self.counters.counted.publish(&mut pace.work);
        }
        is_told
    }

    /// Polls each lane that is not idle; returns whether a frame moved. A `stopwatch` measures the time of each lane.
    /// (A separate loop for timed rounds would be a second caller of the lanes, and make this one slower.)
    #[inline]
    fn poll(&mut self, mut stopwatch: Option<Stopwatch>) -> bool {
        let (mut moved, mut next) = (0, 0);
        let mut taken = meter::taken();
        // The list may change meanwhile: then a lane is polled one round later, or twice in one round.
        let round = self.lanes.awake.len();
        while next < round
            && let Some(&at) = self.lanes.awake.get(next)
        {
            next += 1;
            self.progress.take_up(self.lanes.slots[at].id);
            let Some(polled) = self.lanes.poll(at) else {
                continue;
            };
            moved += polled.frames;
            let counted = &self.lanes.slots[at].counted;
            let before = std::mem::replace(&mut taken, meter::taken());
            if taken != before {
                counted.frames.add(taken.wrapping_sub(before));
            }
            if let Some(stopwatch) = &mut stopwatch {
                stopwatch.lap(Instant::now(), counted, taken != before || polled.frames > 0);
            }
            if polled.left {
                self.lanes.rebuild_forwarding();
            }
        }
        self.moved = self.moved.saturating_add(moved);
        if moved > 0
            && let Some(stopwatch) = stopwatch
        {
            stopwatch.stop(&self.counters.counted);
        }
        moved > 0
    }

    /// Collects the lanes to poll.
    fn count_awake(&mut self) {
        self.lanes.awake.clear();
        let awake = self
            .lanes
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| !slot.is_idle);
        self.lanes.awake.extend(awake.map(|(at, _)| at));
    }

    /// Makes a random lane the first one of the round, since the first one gets most of a scarce resource: room in a
    /// ring that several lanes fill. (Strict rotation would not be fair: it may fall into step with the ring.) Uplinks
    /// stay in front, so that the lanes after them use the room that they free.
    fn shift(&mut self) {
        let mut uplinks = 0;
        for at in 0..self.lanes.awake.len() {
            let role = &self.lanes.slots[self.lanes.awake[at]].role;
            if matches!(role, Role::Uplink { .. } | Role::Underlay { .. }) {
                self.lanes.awake[uplinks..=at].rotate_right(1);
                uplinks += 1;
            }
        }
        let others = &mut self.lanes.awake[uplinks..];
        // Knuth's generator (The Art of Computer Programming 2, 3.3.4): its upper bits are as good as random.
        self.rotation = (self.rotation.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1);
        let by = (self.rotation >> 33) as usize;
        others.rotate_left(by.checked_rem(others.len()).unwrap_or(0));
    }

    /// Whether some lanes are idle.
    fn has_idle(&self) -> bool {
        self.lanes.awake.len() < self.lanes.slots.len()
    }

    /// Checks for kicks of guests with idle lanes, while other lanes are busy.
    #[cold]
    fn poll_events(&mut self) {
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        // An event of the mailbox may be consumed here: the worker checks for commands in each round, and before it
        // sleeps.
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&NO_TIME)) {
            self.wake(events);
        }
    }

    /// Wakes the lanes of guests that kicked.
    fn wake(&mut self, events: &[Event]) {
        for event in events {
            let number = event.data.u64();
            if let Some(at) = self.place_of(LaneId(number & !EVENT_FD)) {
                let slot = &mut self.lanes.slots[at];
                if number & EVENT_FD != 0 {
                    slot.lane.note_event();
                }
                self.progress.take_up(slot.id);
                if slot.wake() {
                    self.lanes.awake.push(at);
                }
            }
        }
    }

    /// The index of a lane.
    fn place_of(&self, id: LaneId) -> Option<usize> {
        self.lanes.slots.binary_search_by_key(&id, |slot| slot.id).ok()
    }

    /// Executes commands; false after the last one.
    #[inline]
    fn read_mail(&mut self) -> bool {
        // Most rounds find nothing, and reading the channel itself would cost each a full fence. The flag is only a
        // hint here, read again in each round.
        if !self.posted.load(Ordering::Relaxed) {
            return true;
        }
        // Observes what was sent before the flag was set. Cleared before the channel is read: a command that arrives
        // during the reading sets it again.
        self.posted.swap(false, Ordering::Acquire);
        self.act_on_commands()
    }

    /// Rebuilds the forwarding state once for many commands: no frame moves between them.
    #[cold]
    fn act_on_commands(&mut self) -> bool {
        let (mut is_stale, mut answers) = (false, Vec::new());
        let goes_on = loop {
            match self.inbox.try_recv() {
                Ok(Command::Add(id, lane, counted)) => {
                    self.add(id, lane, counted);
                    is_stale = true;
                }
                Ok(Command::Remove(id, answer)) => {
                    let lane = self.place_of(id).map(|at| self.remove(at));
                    is_stale = true;
                    let _ = answer.send(lane);
                }
                Ok(Command::Change(id, change, done)) => {
                    self.progress.take_up(id);
                    let mut news = None;
                    if let Some(at) = self.place_of(id) {
                        if std::mem::take(&mut is_stale) {
                            // The change may send a frame.
                            self.lanes.rebuild_forwarding();
                        }
                        if self.lanes.slots[at].wake() {
                            self.lanes.awake.push(at);
                        }
                        self.lanes.slots[at].unwatch_nic(&self.epoll);
                        let others_left = self.lanes.change(at, change);
                        news = self.lanes.slots[at].refresh();
                        is_stale = news.is_some() || others_left;
                    }
                    let _ = done.send(news);
                }
                Ok(Command::Fdb(network, fdb)) => {
                    match fdb {
                        Some(fdb) => self.lanes.fdbs.insert(network, fdb),
                        None => self.lanes.fdbs.remove(&network),
                    };
                    is_stale = true;
                }
                Ok(Command::Spread(change, done)) => {
                    self.lanes.change_remote(change);
                    is_stale = true;
                    answers.push(done);
                }
                Ok(Command::Wake(id)) => {
                    if let Some(at) = self.place_of(id)
                        && self.lanes.slots[at].wake()
                    {
                        self.lanes.awake.push(at);
                    }
                }
                Ok(Command::Blame(id, fault)) => {
                    if let Some(at) = self.place_of(id) {
                        self.lanes.slots[at].fail(fault);
                        is_stale = true;
                    }
                }
                Ok(Command::RunOn(cpus)) => run_on(&cpus),
                Ok(Command::End) | Err(TryRecvError::Disconnected) => break false,
                Err(TryRecvError::Empty) => break true,
            }
        };
        if is_stale {
            self.lanes.rebuild_forwarding();
            self.shift();
        }
        let number = self.lanes.number;
        answers.into_iter().for_each(|done| _ = done.send(number));
        goes_on
    }

    fn add(&mut self, id: LaneId, mut new: NewLane, counted: Arc<LaneCounted>) {
        self.progress.take_up(id);
        new.lane.disable_notifications();
        let mut slot = Slot::new(id, new);
        slot.counted = counted;
        slot.watch_fds(&self.epoll);
        let Lanes { slots, awake, .. } = &mut self.lanes;
        debug_assert!(
            slots.last().is_none_or(|last| last.id < id),
            "place_of needs lanes sorted by id"
        );
        awake.push(slots.len());
        slots.push(slot);
    }

    /// Removes the lane at an index: those of later lanes change.
    fn remove(&mut self, at: usize) -> Box<dyn Lane> {
        self.sleeping.forget(&mut self.lanes, &self.progress);
        let mut slot = self.lanes.slots.remove(at);
        slot.check_calls();
        slot.unwatch_fds(&self.epoll);
        slot.unwatch_nic(&self.epoll);
        self.count_awake();
        slot.lane
    }
}

/// The times and counts of a worker's rounds, on which it decides when to sleep and what to measure.
struct Pace {
    rounds: u32,
    /// Since when no frame has moved.
    idle_since: Option<Instant>,
    /// The worker has slept since `idle_since`.
    slept: bool,
    /// Rounds that moved frames since it slept last.
    busy_rounds: u32,
    /// Sleeps in a row that each followed exactly one such round.
    single_rounds: u32,
    polling: Polling,
    watch: Watch,
    /// Work of its thread at the last publication.
    work: meter::Work,
    /// Calls of [`Worker::look`] so far.
    looks: u32,
}

impl Pace {
    /// For the calling thread; `spin`: the longest polling.
    fn new(spin: Duration) -> Self {
        Self {
            rounds: 0,
            idle_since: None,
            slept: false,
            busy_rounds: 0,
            single_rounds: 0,
            polling: Polling::new(spin),
            watch: Watch::new(Instant::now()),
            work: meter::read(),
            looks: 0,
        }
    }

    /// Whether the round that moved frames was the last one before the next sleep, most likely.
    #[inline]
    fn expects_no_more(&self) -> bool {
        self.busy_rounds == 1 && self.single_rounds >= SINGLE && self.polling.now.is_zero()
    }

    /// Lanes still had work when the worker was about to sleep. `is_next`: that was right after a round that moved
    /// frames, so there was no idle time.
    fn note_more_work(&mut self, is_next: bool) {
        self.single_rounds = 0;
        if is_next {
            self.idle_since = None;
        } else {
            self.slept = true;
            self.end_pause(Instant::now);
        }
    }

    /// The worker has slept for this long. If that is hardly any time, another round would have found the work.
    fn note_sleep(&mut self, asleep: Duration) {
        self.slept = true;
        match std::mem::take(&mut self.busy_rounds) {
            0 => {}
            1 if asleep >= Polling::LEAST => self.single_rounds = self.single_rounds.saturating_add(1),
            _ => self.single_rounds = 0,
        }
    }

    /// The idle time ended at that time: work arrived, or may have.
    #[inline]
    fn end_pause(&mut self, at: impl FnOnce() -> Instant) {
        if let Some(since) = self.idle_since.take() {
            match std::mem::take(&mut self.slept) {
                true => self.polling.adapt(at().saturating_duration_since(since)),
                false => self.polling.hit(),
            }
        }
    }
}

#[cfg(feature = "fuzzing")]
pub(crate) mod rounds;

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
