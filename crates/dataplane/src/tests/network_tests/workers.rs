//! A network whose lanes are on two workers.

use std::cell::RefCell;
use std::sync::atomic::Ordering::Relaxed;

use device::call::{Call, CallBlocked};
use device::pair::Fault;
use steer::HintSet;
use virtqueue::Chains;

use super::port_marks::offer;
use super::*;
use crate::fdb::learned::Learned;
use crate::lane::spread::{LaneWorker, SharedLane};
use crate::tests::no_allocation_tests::allocations;
use crate::worker::WorkerHandle;
use crate::worker::polling::Waits;

/// Messages to a worker.
#[derive(Default)]
struct Told(Mutex<Vec<&'static str>>);

impl LaneWorker for Told {
    fn wake(&self, _lane: LaneId) {
        self.0.lock().expect("no panic").push("wake");
    }

    fn blame(&self, _lane: LaneId, fault: Fault) {
        self.0.lock().expect("no panic").push(fault.name());
    }
}

impl Told {
    fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }
}

/// Two workers: the first has the first two of four ports and the uplink, if there is one; the second has the others.
pub(super) struct Workers(pub(super) [World; 2]);

/// Which worker has a port, and its place there.
fn place(port: usize) -> (usize, usize) {
    (port / 2, port % 2)
}

impl Workers {
    pub(super) fn new(known: Vec<FdbPort>, has_uplink: bool) -> Self {
        Self::hinted(known, has_uplink.then_some(HintSet::NONE))
    }

    /// The same with an uplink with these hints.
    pub(super) fn hinted(known: Vec<FdbPort>, uplink: Option<HintSet>) -> Self {
        let fdb = Arc::new(Fdb::new(known.into_iter().map(Some).collect()));
        let world = |number: u16| {
            let mut world = World {
                lanes: Lanes {
                    number: number.into(),
                    fdbs: [(NETWORK.into(), Arc::clone(&fdb))].into(),
                    ..Lanes::default()
                },
                ..World::default()
            };
            for port in [2 * number, 2 * number + 1] {
                world.add_pair(port, 0, Offloads::NONE);
            }
            world
        };
        let [first, second] = [world(0), world(1)];
        let first = match uplink {
            Some(hints) => first.with_uplink_of(256, |queue| offer(queue, hints)),
            None => first,
        };
        let mut workers = Self([first, second]);
        workers.spread();
        workers.poll();
        workers
    }

    /// Sends both workers the list of the network's lanes.
    pub(super) fn spread(&mut self) {
        self.spread_of(&[0, 1].map(|number| {
            let handle = WorkerHandle::start(number, None, Waits::default(), &Arc::default());
            let owner: Arc<dyn LaneWorker> = handle.expect("a thread").mail.clone();
            owner
        }));
    }

    fn spread_of(&mut self, owners: &[Arc<dyn LaneWorker>; 2]) {
        let lanes_of = |at: usize| -> Vec<_> {
            let slots = self.0[at].lanes.slots.iter();
            let shared =
                |slot: &Slot| SharedLane::of(&*slot.lane, (slot.id, &slot.role), Arc::clone(&owners[at]));
            slots.map(shared).collect()
        };
        for (world, lanes) in [lanes_of(1), lanes_of(0)].into_iter().enumerate() {
            self.0[world].lanes.remote = lanes;
            self.0[world].rebuild_forwarding();
        }
    }

    /// Ports without VLANs, with so many buffers each.
    fn plain(buffers: usize, has_uplink: bool) -> Self {
        let mut workers = Self::new((0..4).map(fdb_port).collect(), has_uplink);
        workers.post(buffers);
        workers
    }

    pub(super) fn post(&mut self, buffers: usize) {
        let worlds = self.0.iter_mut();
        worlds
            .flat_map(|world| &mut world.ports)
            .for_each(|port| port.post(buffers));
    }

    pub(super) fn port(&mut self, port: usize) -> &mut Port {
        let (world, at) = place(port);
        &mut self.0[world].ports[at]
    }

    /// Polls both until all frames have arrived.
    pub(super) fn poll(&mut self) {
        for _ in 0..4 {
            self.0.iter_mut().for_each(World::poll);
        }
    }
}

/// Between workers, and from the uplink to both.
#[test]
fn frames_between_workers_and_of_the_uplink_allocate_nothing() {
    let workers = RefCell::new(Workers::plain(64, true));
    let mut received = 0;
    let between = || {
        let mut workers = workers.borrow_mut();
        for to in 0..4 {
            received += workers.port(to.into()).take().len();
            while workers.port(to.into()).from_guest.take_used().is_some() {}
            workers.0[0].arrive(&frame(mac(to), STRANGER, 60));
            workers
                .port((to ^ 2).into())
                .send(&frame(mac(to), mac(to ^ 2), 1514));
        }
        workers.0[0].arrive(&frame(BROADCAST, STRANGER, 61));
    };
    let poll = || workers.borrow_mut().0.iter_mut().for_each(World::poll);
    assert_eq!(allocations(poll, between), 0);
    assert!(received > 500, "{received} frames moved");
}

#[test]
fn everybody_reaches_everybody_in_order() {
    let mut workers = Workers::plain(64, false);
    for len in [14, 60, 64, 65, 1514] {
        for from in 0..4 {
            let mut wanted = vec![Vec::new(); 4];
            for number in 0..9 {
                let to = number % 4;
                let sent = frame(
                    mac(to as u8),
                    mac(from as u8),
                    len + number * usize::from(len < 1000),
                );
                workers.port(from).send(&sent);
                if to != from {
                    wanted[to].push(sent);
                }
            }
            workers.poll();
            for (to, wanted) in wanted.iter().enumerate() {
                assert_eq!(workers.port(to).got(), *wanted, "{from} to {to}, {len}");
                workers.port(to).post(wanted.len());
            }
        }
    }
}

#[test]
fn multicast_reaches_all_workers_once_and_not_its_sender() {
    for has_uplink in [false, true] {
        let mut workers = Workers::plain(16, has_uplink);
        for from in 0..4 {
            let sent = frame(BROADCAST, mac(from as u8), 60);
            workers.port(from).send(&sent);
            workers.poll();
            for to in 0..4 {
                let got = workers.port(to).got();
                assert_eq!(got.len(), usize::from(to != from), "{from} to {to}");
            }
        }
    }
}

#[test]
fn frames_of_a_hairpin_port_come_back_once() {
    for has_uplink in [false, true] {
        let port = |at| fdb_port_with(at, |port| port.options.hairpin = true);
        let mut workers = Workers::new((0..4).map(port).collect(), has_uplink);
        workers.post(16);
        for from in 0..4 {
            let sent = [BROADCAST, mac(from as u8)].map(|to| frame(to, mac(from as u8), 60));
            sent.iter().for_each(|frame| _ = workers.port(from).send(frame));
            workers.poll();
            for to in 0..4 {
                let got = workers.port(to).got();
                let its = if to == from { &sent[..] } else { &sent[..1] };
                assert_eq!(got, its, "{from} to {to}");
            }
        }
    }
}

#[test]
fn all_get_what_the_uplink_of_one_worker_receives() {
    let mut workers = Workers::plain(16, true);
    for to in 0..4 {
        workers.0[0].arrive(&frame(mac(to), STRANGER, 60 + usize::from(to)));
    }
    let group = frame(BROADCAST, STRANGER, 80);
    workers.0[0].arrive(&group);
    workers.poll();
    for to in 0..4 {
        let own = frame(mac(to as u8), STRANGER, 60 + to);
        assert_eq!(workers.port(to).got(), [own, group.clone()], "{to}");
    }
}

#[test]
fn vlans_and_isolation_hold_between_workers() {
    let port = |at: u8, vlans, isolated| {
        fdb_port_with(at, |port| {
            port.vlans = vlans;
            port.options.isolated = isolated;
        })
    };
    let access = || Vlans::Access(100);
    let mut workers = Workers::new(
        vec![
            port(0, access(), true),
            port(1, Vlans::Untagged, false),
            port(2, access(), true),
            port(3, Vlans::Trunk(vec![100]), false),
        ],
        false,
    );
    workers.post(16);
    for to in [mac(2), mac(3), mac(1), BROADCAST] {
        workers.port(0).send(&frame(to, mac(0), 60));
    }
    workers.port(3).send(&tagged(&frame(mac(0), mac(3), 61), 100));
    workers.poll();
    assert_eq!(workers.port(0).got(), [frame(mac(0), mac(3), 61)]);
    assert!(workers.port(1).got().is_empty() && workers.port(2).got().is_empty());
    let wanted = [mac(3), BROADCAST].map(|to| tagged(&frame(to, mac(0), 60), 100));
    assert_eq!(workers.port(3).got(), wanted);
}

/// Four ports, of which all but the last are isolated, and the first learns addresses. `listens`: the third is
/// promiscuous.
fn isolated_ports(listens: bool) -> Vec<FdbPort> {
    let news = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
    let port = |at: u8| {
        fdb_port_with(at, |port| {
            port.options.isolated = at != 3;
            port.options.promiscuous = at == 2 && listens;
            port.learned = (at == 0).then(|| Arc::new(Learned::new(Arc::clone(&news))));
        })
    };
    (0..4).map(port).collect()
}

/// The FDB does not have the source address yet: the receiving worker must not need it to apply isolation.
#[test]
fn isolation_holds_between_workers_for_addresses_that_were_not_learned_yet() {
    let mut workers = Workers::new(isolated_ports(false), false);
    workers.post(16);
    let inner = [2, 0, 0, 0, 5, 1];
    let sent =
        [(BROADCAST, inner), (mac(3), inner), (BROADCAST, mac(0))].map(|(to, from)| frame(to, from, 60));
    sent.iter().for_each(|frame| _ = workers.port(0).send(frame));
    workers.poll();
    assert!(workers.port(1).got().is_empty(), "of the same worker");
    assert!(workers.port(2).got().is_empty());
    assert_eq!(workers.port(3).got(), sent);
}

#[test]
fn isolated_promiscuous_port_gets_no_frame_of_an_isolated_port_not_learned_yet() {
    for listens in [false, true] {
        let mut workers = Workers::new(isolated_ports(listens), false);
        workers.post(16);
        let inner = [2, 0, 0, 0, 5, 1];
        let sent = [mac(0), inner, mac(0), mac(0), inner].map(|from| frame(mac(3), from, 60));
        sent.iter().for_each(|frame| _ = workers.port(0).send(frame));
        workers.poll();
        assert!(workers.port(2).got().is_empty());
        assert_eq!(workers.port(3).got(), sent);
        assert_eq!(workers.port(0).counters.from_guest_isolated.get(), 0);
    }
}

#[test]
fn promiscuous_port_of_another_worker_hears_each_frame_once() {
    for listener in [1, 3] {
        let port = |at| fdb_port_with(at, |port| port.options.promiscuous = usize::from(at) == listener);
        let mut workers = Workers::new((0..4).map(port).collect(), true);
        workers.post(64);
        let mut heard = 0;
        for (from, to) in [(0, 1), (0, 2), (2, 0), (2, 3), (0, 3), (2, 1)] {
            workers.port(from).send(&frame(mac(to), mac(from as u8), 60));
            heard += 1;
            workers.poll();
        }
        for from in [0, 2] {
            workers.port(from).send(&frame(STRANGER, mac(from as u8), 60));
            heard += 1;
        }
        for to in 0..4 {
            workers.0[0].arrive(&frame(mac(to), STRANGER, 60));
            heard += 1;
        }
        workers.poll();
        assert_eq!(workers.port(listener).got().len(), heard, "{listener}");
    }
}

#[test]
fn guest_of_another_worker_without_buffers_makes_wait_for_a_while_and_loses_then() {
    let mut workers = Workers::plain(0, false);
    let send = |workers: &mut Workers| {
        workers.port(0).send(&frame(mac(2), mac(0), 60));
        (0..4).for_each(|_| workers.0[0].poll());
    };
    send(&mut workers);
    let counters = Arc::clone(&workers.port(0).counters);
    assert!(counters.from_guest_waits.get() > 0);
    std::thread::sleep(std::time::Duration::from_millis(20));
    send(&mut workers);
    assert!(workers.port(2).counters.to_guest_no_buffer.get() > 0);
    workers.port(2).post(8);
    send(&mut workers);
    assert_eq!(workers.port(2).got().len(), 1, "it takes frames again");
}

#[test]
fn gso_packet_comes_whole_where_the_guest_takes_it_and_cut_where_not() {
    for (offloads, buffers) in [(Offloads::all(), 4), (Offloads::NONE, 8)] {
        let mut workers = Workers::plain(16, false);
        for (port, offloads) in [(0, Offloads::all()), (2, offloads)] {
            let (world, at) = place(port);
            let slots = &mut workers.0[world].lanes.slots;
            slots[at]
                .lane
                .change_vrings(&mut |_, vring| vring.guest.offloads = offloads);
        }
        let packet = workers.port(0).send_gso(mac(2), mac(0), 8000, 1000);
        workers.poll();
        let got = workers.port(2).got();
        assert_eq!(got.len(), buffers);
        let len = got[0].len();
        let headers = 14 + 20 + 20;
        assert_eq!(got[0][headers..], packet[headers..len]);
        assert_eq!(got[0] == packet[..len], offloads.guest_tso4);
    }
}

/// The guest's own worker reports it, and no worker delivers to it any more.
#[test]
fn fault_of_a_guest_of_another_worker_is_reported_there() {
    let mut workers = Workers::plain(0, false);
    let port = workers.port(2);
    let addr = port.memory.ram.alloc(2048, 64).expect("memory");
    port.to_guest.add(&[Buffer::readable(addr, 2048)]).expect("room");
    port.to_guest.publish();
    for _ in 0..2 {
        workers.port(0).send(&frame(mac(2), mac(0), 60));
    }
    workers.poll();
    assert_eq!(workers.port(0).counters.from_guest_no_peer.get(), 2);
    assert!(!workers.0[1].lanes.slots[0].lane.receives());
}

/// Or a guest without buffers would make the other worker flood the guest's own with messages.
#[test]
fn worker_is_told_once_of_a_packet_that_waits_for_its_guest() {
    let mut workers = Workers::plain(0, false);
    let told = Arc::new(Told::default());
    workers.spread_of(&[Arc::<Told>::default(), told.clone()]);
    let slots = &mut workers.0[0].lanes.slots;
    slots[0]
        .lane
        .change_vrings(&mut |_, vring| vring.guest.offloads = Offloads::all());
    for round in 0..2 {
        workers.port(0).send_gso(mac(2), mac(0), 8000, 1000);
        for _ in 0..10 {
            workers.port(1).send(&frame(mac(2), mac(1), 60));
            workers.0[0].poll();
        }
        assert_eq!(told.take(), ["wake"], "{round}");
        // It finds no buffers either.
        workers.0[1].poll();
        workers.port(1).send(&frame(mac(2), mac(1), 60));
        workers.0[0].poll();
        assert!(told.take().is_empty(), "it knows");
        workers.port(2).post(64);
        for _ in 0..40 {
            workers.0[1].poll();
            workers.0[0].poll();
        }
        assert!(workers.port(2).got().len() >= 8);
        assert!(told.take().is_empty());
        let (world, at) = place(2);
        let mut rx = workers.0[world].lanes.slots[at]
            .lane
            .rx()
            .expect("a guest")
            .lock()
            .expect("it runs");
        // All buffers are used up again.
        let mut chains = Chains::default();
        rx.vring.pop_buffers(&mut chains, 64).expect("no fault");
        drop(rx);
    }
}

/// As its own worker may sleep, and does not see that.
#[test]
fn guest_whose_call_blocked_another_worker_is_reported_by_that() {
    let mut workers = Workers::plain(4, false);
    let blocked = CallBlocked::default();
    let (world, at) = place(2);
    workers.0[world].lanes.slots[at]
        .lane
        .change_vrings(&mut |_, vring| {
            vring.call = Call::new(None, Arc::clone(&blocked));
        });
    let told = Arc::new(Told::default());
    workers.spread_of(&[Arc::<Told>::default(), told.clone()]);
    let mut send = || {
        workers.port(0).send(&frame(mac(2), mac(0), 60));
        workers.0[0].poll();
    };
    send();
    assert!(told.take().is_empty());
    blocked.store(true, Relaxed);
    (0..3).for_each(|_| send());
    assert_eq!(told.take(), ["call-blocks"], "once");
    assert_eq!(workers.port(2).got().len(), 2);
    assert_eq!(workers.port(0).counters.from_guest_no_peer.get(), 2);
}

#[test]
fn frame_for_a_guest_that_has_moved_is_heard_once() {
    let port = |at| fdb_port_with(at, |port| port.options.promiscuous = at == 1);
    let mut workers = Workers::new((0..4).map(port).collect(), true);
    workers.post(8);
    workers.0[1].lanes.slots.remove(1).lane.stop();
    workers.spread();
    let sent = frame(mac(3), mac(2), 60);
    workers.port(2).send(&sent);
    workers.poll();
    assert_eq!(workers.port(1).got(), [sent]);
}
