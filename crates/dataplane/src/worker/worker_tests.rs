//! See [`super`].

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicUsize;

use virtqueue::driver::Buffer;
use virtqueue::{GuestAddr, Journal, QueueFeatures};

use super::*;
use crate::fdb::PortNumber;
use crate::fdb::forwarding::Forwarding;
use crate::guest::rx_queue::RxQueue;
use crate::lane::role::Role;
use crate::lane::shared::Shared;
use crate::lane::spread::SharedLane;
use crate::lane::{Stopped, Work};
use crate::port_lane::PortLane;
use crate::tests::no_allocation_tests::{ROUNDS, allocations};
use crate::tests::test_guest::Memory;
use crate::tests::test_lanes::kicks;
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::Fault;

/// The lane of a pair of a port's, whose guest has these in its transmit queue.
fn lane(pair: u16, enabled: bool, sends: &[Buffer]) -> NewLane {
    lane_that_counts(pair, enabled, sends, Arc::default())
}

fn lane_that_counts(pair: u16, enabled: bool, sends: &[Buffer], counters: Arc<PairCounters>) -> NewLane {
    let memory = Memory::new(1 << 20, 0);
    let vring = || memory.vring(64, QueueFeatures::default(), Journal::None);
    let ((from_guest, mut driver), (to_guest, _)) = (vring(), vring());
    if !sends.is_empty() {
        driver.add(sends).expect("room in the ring");
        driver.publish();
    }
    let mut side = memory.side(from_guest, to_guest, Offloads::NONE);
    for vring in [&mut side.from_guest, &mut side.to_guest] {
        let kick = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        (vring.kick, vring.enabled) = (Some(kick), enabled);
    }
    NewLane {
        lane: Box::new(PortLane::of_cable(side, counters)),
        role: Role::Pair {
            port: "test".into(),
            pair,
        },
        node: None,
        on_fault: Box::new(|_| ()),
    }
}

/// What a worker's thread would have, and the other end of it.
fn worker() -> (Worker, WorkerHandle) {
    WorkerHandle::prepare(0, Waits::default(), &Arc::default()).expect("a worker")
}

#[test]
fn lane_of_a_guest_that_did_wrong_takes_no_frames_of_others() {
    let (mut worker, _handle) = worker();
    worker.add(LaneId(1), lane(1, false, &[]), Arc::default());
    worker.lanes.rebuild_forwarding();
    let wrong = lane(0, true, &[Buffer::writable(GuestAddr(0), 100)]);
    worker.add(LaneId(2), wrong, Arc::default());
    worker.lanes.rebuild_forwarding();
    assert_eq!(worker.lanes.slots[0].target, Some(1), "of a pair that is off");
    assert!(!worker.poll(None));
    assert!(
        worker.lanes.slots[1].on_fault.is_none(),
        "it is told to send a buffer to be written"
    );
    assert_eq!(worker.lanes.slots[0].target, None);
}

/// A VMM may change its call eventfd as often as it likes: that must not cost all workers.
#[test]
fn other_workers_have_to_know_only_of_changes_that_they_see() {
    let (mut worker, handle) = worker();
    worker.add(LaneId(1), lane(0, true, &[]), Arc::default());
    let mut change = |change: Change| {
        let (done, changed) = mpsc::channel();
        handle.send(Command::Change(LaneId(1), change, done));
        assert!(worker.read_mail());
        changed.recv().expect("an answer")
    };
    assert_eq!(change(Box::new(|_, _| ())), None);
    assert_eq!(change(Box::new(|lane, _| lane.set_frame_limit(9000))), None);
    for enabled in [false, true] {
        let change = change(Box::new(move |lane, _| {
            lane.change_vrings(&mut |_, vring| vring.enabled = enabled);
        }));
        assert_eq!(change, Some(enabled));
    }
}

/// A lane that counts what a worker asks of it.
#[derive(Default)]
struct Counting {
    asked: Arc<AtomicUsize>,
    given: Arc<AtomicUsize>,
}

impl Counting {
    fn note(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }
}

impl Lane for Counting {
    fn poll(&mut self, _siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        self.note();
        Ok(0)
    }

    fn enable_notifications(&mut self, _siblings: &mut dyn Siblings) -> Work {
        self.note();
        Work::None
    }

    fn disable_notifications(&mut self) {
        self.note();
    }

    fn receives(&self) -> bool {
        self.note();
        true
    }

    fn rx(&self) -> Option<&Shared<RxQueue>> {
        self.note();
        None
    }

    fn set_forwarding(&mut self, _forwarding: &Arc<Forwarding>) {
        self.given.fetch_add(1, Ordering::Relaxed);
    }

    fn stop(self: Box<Self>) -> Stopped {
        Stopped::default()
    }
}

/// The others get the new forwarding state, and that is all: so a thousand of them cost hardly more than ten.
#[test]
fn lane_that_is_added_or_changed_neither_wakes_nor_asks_the_other_lanes_of_its_network() {
    let (mut worker, handle) = worker();
    let (asked, given) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let member = |port: u16, lane: Box<dyn Lane>| NewLane {
        lane,
        role: Role::Member {
            network: "lan".into(),
            port: PortNumber(port),
            pair: 0,
        },
        node: None,
        on_fault: Box::new(|_| ()),
    };
    let add = |port: u16, lane: Box<dyn Lane>| {
        let id = LaneId(u64::from(port));
        handle.send(Command::Add(id, member(port, lane), Arc::default()));
    };
    for port in 0..100 {
        let (asked, given) = (Arc::clone(&asked), Arc::clone(&given));
        add(port, Box::new(Counting { asked, given }));
    }
    assert!(worker.read_mail());
    assert_eq!(given.load(Ordering::Relaxed), 100, "once for all commands");
    (0..1000).for_each(|_| _ = worker.poll(None));
    assert!(worker.lanes.awake.is_empty());
    let before = asked.load(Ordering::Relaxed);
    add(100, lane(0, true, &[]).lane);
    assert!(worker.read_mail());
    assert_eq!(worker.lanes.awake, [100]);
    assert_eq!(given.load(Ordering::Relaxed), 200);
    let change = |change: Change| handle.send(Command::Change(LaneId(100), change, mpsc::channel().0));
    change(Box::new(|lane, _| lane.set_frame_limit(9000)));
    assert!(worker.read_mail());
    assert_eq!(given.load(Ordering::Relaxed), 200, "nothing that others see");
    change(Box::new(|lane, _| {
        lane.change_vrings(&mut |_, vring| vring.enabled = false);
    }));
    assert!(worker.read_mail());
    assert_eq!(given.load(Ordering::Relaxed), 300);
    assert_eq!(asked.load(Ordering::Relaxed), before);
}

/// Allocations for each lane would make a guest that connects to a network with a thousand others cost far more than the
/// tenth. Lists that grow allocate a few times more.
#[test]
fn forwarding_state_of_many_lanes_takes_hardly_more_allocations_than_that_of_few() {
    let rebuild = |ports: u16| {
        let (mut worker, _handle) = worker();
        for port in 0..ports {
            let role = Role::Member {
                network: "lan".into(),
                port: PortNumber(port),
                pair: 0,
            };
            let new = NewLane {
                lane: Box::new(Counting::default()),
                role,
                node: None,
                on_fault: Box::new(|_| ()),
            };
            worker.add(LaneId(port.into()), new, Arc::default());
        }
        allocations(|| worker.lanes.rebuild_forwarding(), || {}) / (ROUNDS as u64 / 2)
    };
    let [few, many] = [10, 1000].map(rebuild);
    assert!(many < few + 20, "{few} with 10 lanes, {many} with 1,000");
}

#[test]
fn nothing_of_lanes_and_networks_that_are_gone_stays_with_any_worker() {
    let (mut worker, handle) = worker();
    let send = |command| handle.send(command);
    let role = Role::Member {
        network: "lan".into(),
        port: PortNumber(0),
        pair: 0,
    };
    send(Command::Fdb("lan".into(), Some(Arc::default())));
    let new = lane(0, true, &[]);
    let mail: Arc<dyn LaneWorker> = Arc::clone(&handle.mail) as _;
    let remote = SharedLane::of(&*new.lane, (LaneId(2), &role), mail);
    send(Command::Add(LaneId(1), NewLane { role, ..new }, Arc::default()));
    let changes = [
        LanesChange::Add(remote),
        LanesChange::Remove(LaneId(2)),
        LanesChange::Refresh(LaneId(2), true),
    ];
    for change in changes {
        send(Command::Spread(change, mpsc::channel().0));
    }
    send(Command::Remove(LaneId(1), mpsc::channel().0));
    send(Command::Wake(LaneId(1)));
    send(Command::Blame(LaneId(1), Fault::CallBlocks));
    send(Command::Fdb("lan".into(), None));
    assert!(worker.read_mail());
    let lanes = &worker.lanes;
    let left = [
        lanes.slots.len(),
        lanes.awake.len(),
        lanes.fdbs.len(),
        lanes.remote.len(),
    ];
    assert_eq!(left, [0; 4]);
}

/// While others are busy the worker does not begin to listen to it again, which it does before it sleeps.
#[test]
fn guest_that_is_not_listened_to_is_looked_at_for_as_long() {
    let (mut worker, _handle) = worker();
    let role = Role::Member {
        network: "lan".into(),
        port: PortNumber(0),
        pair: 0,
    };
    let new = NewLane {
        role,
        ..lane(0, true, &[])
    };
    worker.add(LaneId(1), new, Arc::default());
    worker.lanes.rebuild_forwarding();
    worker.lanes.slots[0].futile = FUTILE_WAKES;
    let kick = |worker: &Worker| {
        let kick = &kicks(&*worker.lanes.slots[0].lane)[0];
        rustix::io::write(kick, &1u64.to_ne_bytes()).expect("room");
    };
    kick(&worker);
    worker.wait(Some(&Timespec::default()));
    assert!(worker.lanes.slots[0].muted_until.is_some());
    let idle = |worker: &mut Worker| (0..1000).for_each(|_| _ = worker.poll(None));
    idle(&mut worker);
    assert!(!worker.has_idle(), "its next kick would wake nobody");
    worker.lanes.slots[0].muted_until = Some(Instant::now());
    worker.watch_again();
    idle(&mut worker);
    assert!(worker.has_idle());
    kick(&worker);
    worker.poll_events();
    assert!(!worker.has_idle());
}

#[test]
fn each_lane_is_the_first_one_behind_the_uplink_as_often_as_others() {
    let (mut worker, _handle) = worker();
    for id in 0..4 {
        let role = match id {
            2 => Role::Uplink {
                network: "lan".into(),
                queue: 0,
            },
            _ => lane(0, true, &[]).role,
        };
        let new = NewLane {
            role,
            ..lane(0, true, &[])
        };
        worker.add(LaneId(id), new, Arc::default());
        worker.lanes.rebuild_forwarding();
    }
    // Each second one, too.
    let mut firsts = [[0; 4]; 2];
    for shift in 0..3000 {
        worker.shift();
        assert_eq!(worker.lanes.awake[0], 2);
        firsts[shift % 2][worker.lanes.awake[1]] += 1;
    }
    let [others, uplink]: [Vec<_>; 2] = [&[0, 1, 3][..], &[2]].map(|lanes| {
        let lanes = lanes.iter().flat_map(|&lane| firsts.map(|counts| counts[lane]));
        lanes.collect()
    });
    assert!(
        others.iter().all(|count| (400..600).contains(count)),
        "{firsts:?}"
    );
    assert_eq!(uplink, [0, 0]);
}

#[test]
fn lanes_of_a_cable_give_to_the_same_pair_of_the_other_end_or_where_that_is_off_to_its_first() {
    let (mut worker, _handle) = worker();
    for (id, (end, pair)) in (0..).zip([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]) {
        let cable = "c".into();
        let role = Role::PatchPort { cable, end, pair };
        let enabled = (end, pair) != (1, 2);
        let lane = lane(pair, enabled, &[]);
        worker.add(LaneId(id), NewLane { role, ..lane }, Arc::default());
        worker.lanes.rebuild_forwarding();
    }
    let targets: Vec<_> = worker.lanes.slots.iter().map(|slot| slot.target).collect();
    assert_eq!(targets, [3, 4, 3, 0, 1, 2].map(Some));
}

/// Who listens to a guest's kicks again looks whether there were some, and is told of the mailbox, too: once.
#[test]
fn command_is_not_slept_through_that_comes_when_a_guest_is_listened_to_again() {
    let (mut worker, handle) = worker();
    worker.add(LaneId(1), lane(0, true, &[]), Arc::default());
    worker.lanes.rebuild_forwarding();
    worker.lanes.slots[0].muted_until = Some(Instant::now());
    // It has read its mail, and is about to rest.
    let (rested, rests) = mpsc::channel();
    let (answer, _answered) = mpsc::channel();
    handle.send(Command::Change(LaneId(1), Box::new(|_, _| ()), answer));
    std::thread::spawn(move || {
        worker.rest(Instant::now(), true);
        let _ = rested.send(());
    });
    rests
        .recv_timeout(Duration::from_secs(10))
        .expect("it does not sleep");
}

/// Its guest is not asked for kicks for a while, but those of others are, and theirs end the sleep.
#[test]
fn busy_lane_pauses_while_others_wake_the_worker() {
    let waits = Waits {
        moderation: Duration::from_secs(4 * 3600),
        ..Waits::default()
    };
    let (mut worker, handle) = WorkerHandle::prepare(0, waits, &Arc::default()).expect("a worker");
    let counters = Arc::new(PairCounters::default());
    let busy = lane_that_counts(0, true, &[], Arc::clone(&counters));
    worker.add(LaneId(1), busy, Arc::default());
    worker.lanes.rebuild_forwarding();
    worker.add(LaneId(2), lane(0, true, &[]), Arc::default());
    worker.lanes.rebuild_forwarding();
    // A window, in which that was carried at any speed of this test.
    std::thread::sleep(Duration::from_millis(10));
    counters.from_guest_bytes.add(1 << 60);
    let kick = &kicks(&*worker.lanes.slots[1].lane)[0];
    rustix::io::write(kick, &1u64.to_ne_bytes()).expect("room");
    let again = kick.try_clone().expect("descriptors");
    let (rested, rests) = mpsc::channel();
    std::thread::spawn(move || {
        worker.rest(Instant::now(), true);
        let is_let_alone = [0, 1].map(|at: usize| worker.lanes.slots[at].share.is_let_alone());
        // Armed since, it sleeps like any other, though it has moved no frame.
        worker.lanes.slots[0].is_idle = true;
        worker.count_awake();
        rustix::io::write(&again, &1u64.to_ne_bytes()).expect("room");
        worker.rest(Instant::now(), true);
        let _ = rested.send(is_let_alone);
    });
    let is_let_alone = rests.recv_timeout(Duration::from_secs(10)).expect("it wakes");
    assert_eq!(is_let_alone, [true, false]);
    let counters = &handle.counters;
    assert_eq!((counters.sleeps.get(), counters.pauses.get()), (2, 1));
}

/// A lane of frames that a NIC never completes.
struct Sending;

impl Lane for Sending {
    fn poll(&mut self, _siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        Ok(0)
    }

    fn enable_notifications(&mut self, _siblings: &mut dyn Siblings) -> Work {
        Work::after(Some(Duration::from_micros(8)))
    }

    fn stop(self: Box<Self>) -> Stopped {
        Stopped {
            pair: None,
            queue: None,
        }
    }
}

#[test]
fn worker_that_awaits_completions_does_not_poll_between_its_looks() {
    let (mut worker, handle) = worker();
    let new = NewLane {
        lane: Box::new(Sending),
        ..lane(0, true, &[])
    };
    worker.add(LaneId(1), new, Arc::default());
    worker.lanes.rebuild_forwarding();
    let mut pace = Pace::new(Duration::from_millis(20));
    while handle.counters.sleeps.get() == 0 {
        worker.round(&mut pace);
    }
    (0..5).for_each(|_| worker.round(&mut pace));
    assert_eq!(handle.counters.sleeps.get(), 6);
}

/// Waits for frames of a "NIC": a descriptor that is readable when there are some.
struct NicLane {
    nic: OwnedFd,
    awaits: bool,
}

impl Lane for NicLane {
    fn poll(&mut self, _siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        Ok(0)
    }

    fn enable_notifications(&mut self, _siblings: &mut dyn Siblings) -> Work {
        Work::None
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        Some(self.nic.as_fd())
    }

    fn awaits_nic(&self) -> bool {
        self.awaits
    }

    fn has_edges(&self) -> bool {
        true
    }

    fn stop(self: Box<Self>) -> Stopped {
        unreachable!("the test does not stop it")
    }
}

/// A worker that its NICs wake for few frames has their sockets in its epoll set, and only while they are awaited.
#[test]
fn frames_end_the_sleep_of_a_worker_that_polls_sockets_or_has_them_in_its_set() {
    let (mut worker, _handle) = worker();
    let nic = |awaits| {
        let nic = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let bell = nic.try_clone().expect("descriptors");
        let lane = Box::new(NicLane { nic, awaits });
        let new = NewLane {
            lane,
            ..self::lane(0, true, &[])
        };
        (new, bell)
    };
    let ((awaited, bell), (other, other_bell)) = (nic(true), nic(false));
    worker.add(LaneId(1), awaited, Arc::default());
    worker.lanes.rebuild_forwarding();
    worker.add(LaneId(2), other, Arc::default());
    worker.lanes.rebuild_forwarding();
    let ring = |bell: &OwnedFd| _ = rustix::io::write(bell, &1u64.to_ne_bytes()).expect("room");
    let is_quiet = |worker: &Worker| {
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        let told = epoll::wait(&worker.epoll, &mut events, Some(&NO_TIME));
        told.expect("events").0.is_empty()
    };
    // Frames end the sleep while the socket is polled, and while it is in the set.
    for sleep in 1..=40 {
        ring(&bell);
        worker.moved = 1;
        worker.wait(None);
        let is_watched = worker.lanes.slots[0].polled_nic().is_none();
        assert_eq!(is_watched, sleep > 16, "sleep {sleep}");
        // As a socket is empty when it was read.
        let _ = rustix::io::read(&bell, &mut [0; 8]);
    }
    // The second lane does not await frames.
    ring(&other_bell);
    assert!(is_quiet(&worker));
    // Many frames at once: it is polled again.
    worker.moved = FEW + 1;
    ring(&bell);
    worker.wait(None);
    assert!(worker.lanes.slots[0].polled_nic().is_some());
    ring(&bell);
    assert!(is_quiet(&worker), "it was taken out of the set");
    // The same without a sleep.
    for _ in 0..=16 {
        ring(&bell);
        worker.wait(None);
    }
    assert!(worker.lanes.slots[0].polled_nic().is_none());
    worker.moved = FEW + 1;
    worker.look(&mut Pace::new(Duration::ZERO));
    assert!(worker.lanes.slots[0].polled_nic().is_some());
}

/// A worker that its guest wakes polls the socket of its NIC: in the set it would cost a wake-up for each frame sent.
#[test]
fn nic_of_a_guest_that_sends_is_not_in_the_epoll_set() {
    let (mut worker, _handle) = worker();
    let nic = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
    let new = NewLane {
        lane: Box::new(NicLane { nic, awaits: true }),
        ..lane(0, true, &[])
    };
    worker.add(LaneId(1), new, Arc::default());
    worker.lanes.rebuild_forwarding();
    for _ in 0..40 {
        worker.moved = 1;
        worker.wait(Some(&NO_TIME));
        assert!(worker.lanes.slots[0].polled_nic().is_some());
    }
}

/// A lane of a network, whose descriptor reports frames; its polls are counted.
struct EventLane {
    bell: OwnedFd,
    has_frame: bool,
    polls: Arc<std::sync::atomic::AtomicUsize>,
}

impl Lane for EventLane {
    fn poll(&mut self, _siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        Ok(std::mem::take(&mut self.has_frame).into())
    }

    fn enable_notifications(&mut self, _siblings: &mut dyn Siblings) -> Work {
        Work::None
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.bell.as_fd())
    }

    fn note_event(&mut self) {
        self.has_frame = true;
    }

    fn stop(self: Box<Self>) -> Stopped {
        unreachable!("the test does not stop it")
    }
}

/// Three of them; the last one's role is one that polls for ever.
struct ThreeLanes {
    worker: Worker,
    handle: WorkerHandle,
    bells: Vec<OwnedFd>,
    polls: Vec<Arc<std::sync::atomic::AtomicUsize>>,
}

impl ThreeLanes {
    /// The worker stays awake after a sleep.
    fn stay_awake(&mut self) {
        let Worker {
            sleeping,
            lanes,
            progress,
            ..
        } = &mut self.worker;
        sleeping.end(lanes, progress);
    }

    fn new() -> Self {
        let (mut worker, handle) = worker();
        let network: Arc<str> = "lan".into();
        let (mut bells, mut polls) = (Vec::new(), Vec::new());
        for number in 0..3 {
            let bell = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
            bells.push(bell.try_clone().expect("descriptors"));
            polls.push(Arc::default());
            let event_lane = EventLane {
                bell,
                has_frame: false,
                polls: Arc::clone(&polls[usize::from(number)]),
            };
            let role = match number {
                2 => Role::Multicast {
                    network: Arc::clone(&network),
                },
                _ => Role::Member {
                    network: Arc::clone(&network),
                    port: PortNumber(number),
                    pair: 0,
                },
            };
            let new = NewLane {
                lane: Box::new(event_lane),
                role,
                ..lane(0, true, &[])
            };
            worker.add(LaneId(u64::from(number) + 1), new, Arc::default());
            worker.lanes.rebuild_forwarding();
        }
        Self {
            worker,
            handle,
            bells,
            polls,
        }
    }

    fn ring(&self, lane: usize) {
        rustix::io::write(&self.bells[lane], &1u64.to_ne_bytes()).expect("room");
    }

    /// Polls of each since the last call.
    fn polls(&self) -> Vec<usize> {
        let polls = self.polls.iter();
        polls.map(|polls| polls.swap(0, Ordering::Relaxed)).collect()
    }
}

#[test]
fn after_a_sleep_lanes_with_work_are_polled_and_all_if_the_worker_stays_awake() {
    let mut three = ThreeLanes::new();
    three.ring(1);
    three.worker.rest(Instant::now(), true);
    assert_eq!(three.worker.lanes.awake, [1]);
    assert!(three.worker.poll(None));
    assert_eq!(three.polls(), [0, 1, 0]);
    // It does not sleep: a worker that polls hears no events.
    let mut pace = Pace::new(Duration::from_secs(3600));
    three.worker.round(&mut pace);
    three.polls();
    three.worker.round(&mut pace);
    assert_eq!(three.polls(), [1, 1, 1]);
}

#[test]
fn lane_asleep_for_long_becomes_idle_if_it_may() {
    let mut three = ThreeLanes::new();
    for _ in 0..600 {
        three.ring(1);
        three.worker.rest(Instant::now(), true);
        three.worker.poll(None);
    }
    let sleeping: Vec<_> = three
        .worker
        .lanes
        .slots
        .iter()
        .map(|slot| slot.asleep_since.is_some())
        .collect();
    assert_eq!(sleeping, [false, false, true]);
    assert!(
        three.worker.lanes.slots[0].is_idle
            && three.worker.lanes.slots[2].is_idle
            && !three.worker.lanes.slots[1].is_idle
    );
    three.stay_awake();
    assert_eq!(three.worker.lanes.awake, [1, 2]);
    // Its event is heard nevertheless.
    three.ring(0);
    three.worker.rest(Instant::now(), true);
    assert_eq!(three.worker.lanes.awake, [0]);
}

/// All lanes wake each time the worker stays awake. If that reset the count of sleeps, each guest that connects would
/// cause polls of hundreds of others.
#[test]
fn sleeps_count_until_a_lane_becomes_idle_even_if_it_wakes_without_work_in_between() {
    let mut three = ThreeLanes::new();
    for _ in 0..60 {
        for _ in 0..5 {
            three.ring(1);
            three.worker.rest(Instant::now(), true);
            three.worker.poll(None);
        }
        three.stay_awake();
        three.worker.poll(None);
    }
    three.polls();
    three.worker.poll(None);
    assert_eq!(three.polls(), [0, 1, 1], "the third may not become idle");
}

#[test]
fn worker_with_single_rounds_between_sleeps_looks_for_no_more_work() {
    let mut three = ThreeLanes::new();
    let mut pace = Pace::new(Duration::ZERO);
    let counted = |three: &ThreeLanes| {
        let counters = &three.handle.counters;
        [&counters.busy_rounds, &counters.idle_rounds, &counters.sleeps].map(device::counters::Counter::get)
    };
    three.ring(0);
    three.worker.round(&mut pace);
    assert_eq!(counted(&three), [0, 1, 1]);
    pace.single_rounds = SINGLE;
    three.ring(1);
    three.worker.round(&mut pace);
    assert_eq!(counted(&three), [1, 1, 2], "it slept after a round of work");
    pace.single_rounds = SINGLE - 1;
    three.worker.round(&mut pace);
    assert_eq!(counted(&three), [2, 1, 2]);
}

#[test]
fn single_rounds_are_expected_where_sleeps_between_them_are_long() {
    let mut pace = Pace::new(Duration::ZERO);
    let mut sleeps = |rounds: &[u32], asleep: Duration| {
        for &busy in rounds {
            pace.busy_rounds = busy;
            pace.note_sleep(asleep);
        }
        pace.busy_rounds = 1;
        pace.expects_no_more()
    };
    assert!(!sleeps(&[1; 3], Polling::LEAST));
    assert!(sleeps(&[1, 0], Polling::LEAST));
    assert!(!sleeps(&[2, 1, 1, 1], Polling::LEAST));
    assert!(sleeps(&[1], Polling::LEAST));
    assert!(!sleeps(&[1], Duration::from_micros(1)));
}

/// A guest at a cable kicks all the time, posts no buffers, and the other guest's frame waits for it.
#[test]
fn kicks_of_a_guest_that_takes_no_frames_of_a_cable_are_ignored() {
    let (mut worker, _handle) = worker();
    let frame = [Buffer::readable(GuestAddr(0x80000), 100)];
    for (end, sends) in [(0, &frame[..]), (1, &[])] {
        let role = Role::PatchPort {
            cable: "cable".into(),
            end,
            pair: 0,
        };
        let new = NewLane {
            role,
            ..lane(0, true, sends)
        };
        worker.add(LaneId(end as u64), new, Arc::default());
        worker.lanes.rebuild_forwarding();
    }
    for _ in 0..200 {
        let kick = &kicks(&*worker.lanes.slots[1].lane)[1];
        rustix::io::write(kick, &1u64.to_ne_bytes()).expect("room");
        worker.wait(Some(&Timespec::default()));
        worker.poll(None);
    }
    assert!(worker.lanes.slots[1].muted_until.is_some());
}

#[test]
fn sleep_of_a_worker_with_many_nics_allocates_nothing() {
    let (mut worker, _handle) = worker();
    for id in 0..20 {
        let nic = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let new = NewLane {
            lane: Box::new(NicLane { nic, awaits: true }),
            ..lane(0, true, &[])
        };
        worker.add(LaneId(id), new, Arc::default());
        worker.lanes.rebuild_forwarding();
    }
    let made = allocations(|| _ = worker.wait(Some(&NO_TIME)), || {});
    assert_eq!(made, 0);
}
