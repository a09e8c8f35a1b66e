//! Lanes of a network beside each other, as a worker has them.

mod alike;
mod filter;
mod hairpin;
mod host;
mod learning;
mod multicast;
mod own_queue;
mod pairs;
mod port_marks;
mod promiscuous;
mod reach;
mod renewal;
mod service_tags;
mod threads;
mod tunnels;
mod underlay;
mod workers;

use std::sync::{Arc, Mutex, MutexGuard};

use packet::ethernet::Mac;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::QueueFeatures;
use virtqueue::driver::Buffer;

use crate::backend::arrivals::Origin;
use crate::fdb::vlans::Vlans;
use crate::fdb::{Fdb, FdbPort, PortNumber};
use crate::lane::new_lane::NewLane;
use crate::lane::role::Role;
use crate::lane::{Lane, LaneId};
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::Sends;
use crate::policy::rate_limit::PortLimits;
use crate::port_lane::PortLane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::{TestNic, Wire, own_memory, queue};
use crate::tests::test_port::Port;
use crate::tests::test_xdp::XdpWire;
use crate::uplink::uplink_lane::UplinkLane;
use crate::worker::slots::{Lanes, Slot};
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::QueuePair;
use model::rates::{PortRates, Rate, Rates};

#[path = "network_attacks_tests.rs"]
mod attacks;

const NETWORK: &str = "lan";
pub(crate) const BROADCAST: Mac = [0xff; 6];
pub(crate) const STRANGER: Mac = [2, 0, 0, 0, 1, 0];

#[derive(Default)]
pub(crate) struct World {
    pub(crate) ports: Vec<Port>,
    pub(crate) lanes: Lanes,
    /// Of the uplink, if there is one.
    pub(crate) wire: Option<Arc<Mutex<Wire>>>,
    uplink: Arc<PairCounters>,
}

pub(crate) fn mac(port: u8) -> Mac {
    [2, 0, 0, 0, 0, port]
}

/// A port with the address of that number.
pub(crate) fn fdb_port(port: u8) -> FdbPort {
    fdb_port_with(port, |_| ())
}

/// The same with what `set` changes.
pub(crate) fn fdb_port_with(port: u8, set: impl FnOnce(&mut FdbPort)) -> FdbPort {
    let mut port = FdbPort {
        mac: mac(port),
        ..FdbPort::default()
    };
    set(&mut port);
    port
}

pub(crate) fn frame(to: Mac, from: Mac, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &[0x88, 0xb5]].concat();
    frame.extend((0..len.saturating_sub(14)).map(|at| at as u8));
    frame
}

impl World {
    /// Ports with so many receive buffers each.
    pub(crate) fn new(ports: &[usize]) -> Self {
        let known = (0..ports.len() as u8).map(fdb_port);
        let mut world = Self::of(known.collect());
        for (port, &buffers) in world.ports.iter_mut().zip(ports) {
            port.post(buffers);
        }
        world
    }

    /// Ports that take part in these VLANs, with 16 receive buffers each.
    fn of_vlans(vlans: &[Vlans]) -> Self {
        let known = (0..)
            .zip(vlans)
            .map(|(port, vlans)| fdb_port_with(port, |port| port.vlans = vlans.clone()));
        Self::of(known.collect()).posting(16)
    }

    /// These ports, without buffers.
    fn of(known: Vec<FdbPort>) -> Self {
        Self::offering(known, Offloads::NONE)
    }

    /// The same with offloads that their guests have accepted.
    pub(crate) fn offering(known: Vec<FdbPort>, offloads: Offloads) -> Self {
        let mut world = Self::default();
        let ports = known.len() as u16;
        let fdb = Fdb::new(known.into_iter().map(Some).collect());
        world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
        (0..ports).for_each(|number| world.add_pair(number, 0, offloads));
        world.rebuild_forwarding();
        world
    }

    /// Posts so many receive buffers for each port.
    pub(crate) fn posting(mut self, buffers: usize) -> Self {
        self.ports.iter_mut().for_each(|port| port.post(buffers));
        self
    }

    fn add_pair(&mut self, number: u16, pair_number: u16, offloads: Offloads) {
        self.add_lane((number, pair_number), offloads, |pair, counters, of| {
            Box::new(PortLane::new(pair, counters, of))
        });
    }

    fn add_lane(
        &mut self,
        (number, pair_number): (u16, u16),
        offloads: Offloads,
        lane: impl FnOnce(QueuePair, Arc<PairCounters>, (PortNumber, u16)) -> Box<dyn Lane>,
    ) {
        let (port, pair) = Port::new(Memory::new(1 << 20, 0), 256, QueueFeatures::default(), offloads);
        self.add_port((number, pair_number), (port, pair), lane);
    }

    fn add_port(
        &mut self,
        (number, pair_number): (u16, u16),
        (port, mut pair): (Port, QueuePair),
        lane: impl FnOnce(QueuePair, Arc<PairCounters>, (PortNumber, u16)) -> Box<dyn Lane>,
    ) {
        for vring in [&mut pair.from_guest, &mut pair.to_guest] {
            vring.kick = Some(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        }
        let lane = lane(
            pair,
            Arc::clone(&port.counters),
            (PortNumber(number), pair_number),
        );
        let role = Role::Member {
            network: NETWORK.into(),
            port: PortNumber(number),
            pair: pair_number,
        };
        self.add_slot(lane, role);
        self.ports.push(port);
    }

    fn add_slot(&mut self, lane: Box<dyn Lane>, role: Role) {
        let new = NewLane {
            lane,
            role,
            node: None,
            on_fault: Box::new(|_| ()),
        };
        self.lanes.slots.push(Slot::new(
            LaneId((self.lanes.number * 100 + self.lanes.slots.len()) as u64),
            new,
        ));
    }

    /// An uplink whose NIC has so many chunks, half of them to receive into.
    pub(crate) fn with_uplink(self, chunks: usize) -> Self {
        self.with_uplink_of(chunks, |_| ())
    }

    /// The same, of a queue of which that is said before.
    fn with_uplink_of(self, chunks: usize, say: impl FnOnce(&mut NicQueue<TestNic>)) -> Self {
        self.with_uplink_from(false, chunks, say)
    }

    /// The same. `partial_checksums`: frames may come from a stack on the same machine.
    fn with_uplink_from(
        mut self,
        partial_checksums: bool,
        chunks: usize,
        say: impl FnOnce(&mut NicQueue<TestNic>),
    ) -> Self {
        let umem = own_memory(chunks);
        let mut wire = Wire::new(umem.clone(), chunks, chunks);
        wire.fill = chunks;
        let wire = Arc::new(Mutex::new(wire));
        let mut queue = queue(TestNic(Arc::clone(&wire)), umem, chunks / 2, Sends::PLAIN);
        say(&mut queue);
        let origin = Origin {
            frame_limit: 1518,
            partial_checksums,
        };
        let lane = UplinkLane::new(queue, origin, Arc::clone(&self.uplink));
        let role = Role::Uplink {
            network: NETWORK.into(),
            queue: 0,
        };
        self.add_slot(Box::new(lane), role);
        self.wire = Some(wire);
        self.rebuild_forwarding();
        self
    }

    /// Adds another queue of the uplink, which only sends; returns what it sends.
    pub(crate) fn add_sending_uplink(&mut self) -> XdpWire {
        let (queue, wire) = XdpWire::queue(64, Sends::PLAIN);
        let origin = Origin {
            frame_limit: 1518,
            partial_checksums: false,
        };
        let lane = UplinkLane::new(queue, origin, Arc::clone(&self.uplink));
        let role = Role::Uplink {
            network: NETWORK.into(),
            queue: 1,
        };
        self.add_slot(Box::new(lane), role);
        self.rebuild_forwarding();
        wire
    }

    /// After a change of lanes or of their guests.
    pub(crate) fn rebuild_forwarding(&mut self) {
        self.lanes.slots.iter_mut().for_each(|slot| _ = slot.refresh());
        self.lanes.rebuild_forwarding();
    }

    pub(crate) fn poll(&mut self) {
        for at in 0..self.lanes.slots.len() {
            let polled = self.lanes.poll(at);
            if polled.is_some_and(|polled| polled.left) {
                self.rebuild_forwarding();
            }
        }
    }

    /// The NIC receives a frame.
    pub(crate) fn arrive(&mut self, frame: &[u8]) {
        self.wire().arrive(frame);
    }

    /// The NIC of the uplink.
    pub(crate) fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.as_ref().expect("an uplink").lock().expect("no panic")
    }

    /// Chunks that the NIC has to receive into.
    pub(crate) fn given(&self) -> usize {
        self.wire().given.len()
    }

    /// The same by two descriptors.
    fn arrive_in_pieces(&mut self, frame: &[u8]) {
        let (first, last) = frame.split_at(frame.len() / 2);
        self.arrive_piece(first, true);
        self.arrive_piece(last, false);
    }

    /// A piece of a frame, of which more follow.
    fn arrive_piece(&mut self, piece: &[u8], more: bool) {
        self.arrive(piece);
        self.wire().received.back_mut().expect("just now").more = more;
    }
}

#[test]
fn frame_reaches_only_the_port_with_its_address() {
    let mut world = World::new(&[4, 4, 4]);
    for len in [14, 60, 64, 65, 1514] {
        let sent = frame(mac(2), mac(0), len);
        world.ports[0].send(&sent);
        world.poll();
        assert_eq!(world.ports[2].got(), [sent]);
        world.ports[2].post(1);
    }
    assert!(world.ports[0].got().is_empty());
    assert!(world.ports[1].got().is_empty());
    assert_eq!(world.ports[0].counters.from_guest_frames.get(), 5);
}

#[test]
fn order_is_kept_with_any_destinations() {
    let mut world = World::new(&[32, 32, 32]);
    let mut wanted = [Vec::new(), Vec::new(), Vec::new()];
    for at in 0..30 {
        let to = 1 + at % 7 % 2;
        let sent = frame(mac(to as u8), mac(0), 60 + at);
        world.ports[0].send(&sent);
        wanted[to].push(sent);
    }
    world.poll();
    for to in [1, 2] {
        assert_eq!(world.ports[to].got(), wanted[to]);
    }
}

#[test]
fn multicast_reaches_all_but_its_sender() {
    let mut world = World::new(&[4, 4, 0, 4]);
    let sent = frame(BROADCAST, mac(0), 60);
    world.ports[0].send(&sent);
    world.poll();
    assert!(world.ports[0].got().is_empty());
    for port in [1, 3] {
        assert_eq!(world.ports[port].got(), std::slice::from_ref(&sent));
    }
    // One without a buffer loses it, and holds nobody up.
    assert_eq!(world.ports[2].counters.to_guest_no_buffer.get(), 1);
    assert_eq!(
        world.ports[0].from_guest.take_used().map(|used| used.len),
        Some(0)
    );
}

#[test]
fn what_a_port_may_not_send_is_counted_and_goes_nowhere() {
    let mut world = World::new(&[4, 4]);
    let tagged = |vlan: u16| {
        let mut frame = frame(mac(1), mac(0), 64);
        frame.splice(12..12, [0x81, 0x00, (vlan >> 8) as u8, vlan as u8]);
        frame
    };
    let spoofed = frame(mac(1), mac(1), 60);
    for frame in [
        spoofed,
        frame(mac(1), STRANGER, 60),
        frame(mac(1), BROADCAST, 60),
        tagged(7),
    ] {
        world.ports[0].send(&frame);
    }
    world.ports[0].send(&frame(STRANGER, mac(0), 60));
    // A tag that says a priority only.
    let priority = tagged(5 << 13);
    world.ports[0].send(&priority);
    world.poll();
    assert_eq!(world.ports[1].got(), [priority]);
    let counters = &world.ports[0].counters;
    assert_eq!(counters.from_guest_source_address.get(), 3);
    assert_eq!(counters.from_guest_vlan.get(), 1);
    assert_eq!(counters.from_guest_no_station.get(), 1);
}

#[test]
fn frames_wait_for_a_guest_that_takes_some_and_are_lost_for_one_that_does_not() {
    let mut world = World::new(&[0, 1, 8]);
    for _ in 0..2 {
        world.ports[0].send(&frame(mac(1), mac(0), 60));
    }
    world.ports[0].send(&frame(mac(2), mac(0), 60));
    world.poll();
    assert_eq!((world.ports[1].got().len(), world.ports[2].got().len()), (1, 0));
    world.ports[1].post(1);
    world.poll();
    assert_eq!((world.ports[1].got().len(), world.ports[2].got().len()), (1, 1));
    world.ports[0].send(&frame(mac(1), mac(0), 60));
    world.ports[0].send(&frame(mac(2), mac(0), 60));
    world.poll();
    std::thread::sleep(std::time::Duration::from_millis(20));
    world.poll();
    assert_eq!((world.ports[1].got().len(), world.ports[2].got().len()), (0, 1));
    assert_eq!(world.ports[1].counters.to_guest_no_buffer.get(), 1);
}

#[test]
fn guest_that_did_wrong_leaves_and_the_others_go_on() {
    let mut world = World::new(&[4, 0, 4]);
    // A buffer that is to be read where it should be written.
    let addr = world.ports[1].memory.ram.alloc(2048, 64).expect("memory");
    world.ports[1]
        .to_guest
        .add(&[Buffer::readable(addr, 2048)])
        .expect("room");
    world.ports[1].to_guest.publish();
    world.ports[0].send(&frame(mac(1), mac(0), 60));
    world.ports[0].send(&frame(mac(2), mac(0), 60));
    world.poll();
    world.poll();
    assert!(!world.lanes.slots[1].is_in_rounds());
    assert_eq!(world.ports[2].got().len(), 1);
    assert_eq!(world.ports[0].counters.from_guest_no_peer.get(), 1);
}

#[test]
fn uplink_delivers_unicast_to_one_port_and_multicast_to_all() {
    let mut world = World::new(&[64, 64, 64]).with_uplink(256);
    world.poll();
    let mut wanted = [Vec::new(), Vec::new(), Vec::new()];
    for at in 0..40 {
        let to = at % 3;
        let frame = frame(mac(to as u8), STRANGER, 60 + at * 30);
        world.arrive(&frame);
        wanted[to].push(frame);
    }
    world.poll();
    world.arrive(&frame(STRANGER, STRANGER, 60));
    let group = frame(BROADCAST, STRANGER, 60);
    world.arrive(&group);
    world.poll();
    for (port, wanted) in world.ports.iter_mut().zip(&mut wanted) {
        wanted.push(group.clone());
        assert_eq!(port.got(), *wanted);
    }
    assert_eq!(world.uplink.to_guest_no_port.get(), 1);
    assert_eq!(world.given(), 128, "all chunks are with the NIC again");
}

#[test]
fn slow_guest_does_not_take_the_chunks_of_the_others() {
    let mut world = World::new(&[0, 64]).with_uplink(256);
    world.poll();
    for _ in 0..4 {
        for _ in 0..40 {
            world.arrive(&frame(mac(0), STRANGER, 60));
        }
        world.arrive(&frame(mac(1), STRANGER, 60));
        world.poll();
        assert_eq!(world.ports[1].got().len(), 1);
    }
    // Half of 128 chunks: twice what is left of three quarters of them.
    let lost = world.ports[0].counters.to_guest_no_buffer.get();
    assert_eq!(lost, 160 - 64);
    world.ports[0].post(64);
    world.poll();
    assert_eq!(world.ports[0].got().len(), 64);
    assert_eq!(world.given(), 128, "all chunks are with the NIC again");
}

#[test]
fn what_waits_for_a_guest_that_leaves_goes_back_to_the_nic() {
    let mut world = World::new(&[0, 4]).with_uplink(64);
    world.poll();
    for _ in 0..3 {
        world.arrive(&frame(mac(0), STRANGER, 60));
    }
    world.poll();
    assert_eq!(world.given(), 29);
    world.lanes.slots.remove(0).lane.stop();
    world.rebuild_forwarding();
    world.poll();
    assert_eq!(world.uplink.to_guest_queue_stopped.get(), 3);
    assert_eq!(world.given(), 32);
}

fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame.splice(12..12, [0x81, 0x00, (vlan >> 8) as u8, vlan as u8]);
    frame
}

#[test]
fn ports_of_a_vlan_reach_each_other_each_with_the_tag_that_it_has() {
    let access = Vlans::Access(100);
    let trunk = Vlans::Trunk(vec![100, 101]);
    let mut world = World::of_vlans(&[access.clone(), access, trunk, Vlans::Access(101), Vlans::Untagged]);
    for len in [14, 60, 63, 64, 65, 68, 69, 1514] {
        let bare = |to, from| frame(mac(to), mac(from), len);
        for to in [1, 2, 3, 4] {
            world.ports[0].send(&bare(to, 0));
        }
        world.ports[2].send(&tagged(&bare(0, 2), 100));
        world.ports[2].send(&tagged(&bare(3, 2), 101));
        world.poll();
        assert_eq!(world.ports[0].got(), [bare(0, 2)], "{len}");
        assert_eq!(world.ports[1].got(), [bare(1, 0)], "{len}");
        assert_eq!(world.ports[2].got(), [tagged(&bare(2, 0), 100)], "{len}");
        assert_eq!(world.ports[3].got(), [bare(3, 2)], "{len}");
        assert!(world.ports[4].got().is_empty());
    }
    // In the other VLANs nobody has these addresses.
    assert_eq!(world.ports[0].counters.from_guest_no_station.get(), 16);
}

#[test]
fn multicast_stays_in_its_vlan() {
    let access = Vlans::Access(100);
    let mut world = World::of_vlans(&[
        access.clone(),
        access,
        Vlans::Trunk(vec![100]),
        Vlans::Trunk(vec![101]),
        Vlans::Untagged,
    ]);
    let sent = frame(BROADCAST, mac(0), 60);
    world.ports[0].send(&sent);
    world.poll();
    assert_eq!(world.ports[1].got(), std::slice::from_ref(&sent));
    assert_eq!(world.ports[2].got(), [tagged(&sent, 100)]);
    for port in [0, 3, 4] {
        assert!(world.ports[port].got().is_empty(), "{port}");
    }
}

#[test]
fn uplink_has_tags_and_ports_have_those_that_they_are_for() {
    let mut world =
        World::of_vlans(&[Vlans::Access(100), Vlans::Trunk(vec![100]), Vlans::Untagged]).with_uplink(64);
    world.poll();
    let to = |port| frame(mac(port), STRANGER, 60);
    let group = frame(BROADCAST, STRANGER, 60);
    for frame in [
        to(0),
        to(1),
        to(2),
        tagged(&to(0), 100),
        tagged(&to(1), 100),
        tagged(&to(2), 100),
    ] {
        world.arrive(&frame);
    }
    for vlan in [100, 101] {
        world.arrive(&tagged(&group, vlan));
    }
    world.arrive(&group);
    world.poll();
    world.poll();
    assert_eq!(world.ports[0].got(), [to(0), group.clone()]);
    assert_eq!(world.ports[1].got(), [tagged(&to(1), 100), tagged(&group, 100)]);
    assert_eq!(world.ports[2].got(), [to(2), group]);
    assert_eq!(world.uplink.to_guest_no_port.get(), 3);
}

#[test]
fn isolated_ports_do_not_reach_each_other() {
    let port = |at: u8| fdb_port_with(at, |port| port.options.isolated = at < 2);
    let mut world = World::of(vec![port(0), port(1), port(2)]).posting(8);
    for to in [mac(1), mac(2), BROADCAST] {
        world.ports[0].send(&frame(to, mac(0), 60));
    }
    world.poll();
    assert!(world.ports[1].got().is_empty());
    assert_eq!(world.ports[2].got().len(), 2);
    assert_eq!(world.ports[0].counters.from_guest_isolated.get(), 1);
}

#[test]
fn idle_guest_is_not_polled_until_frames_arrive_for_it() {
    let mut world = World::new(&[8, 8]);
    for _ in 0..1000 {
        world.ports[0].send(&frame(mac(0), mac(0), 60));
        world.poll();
        while world.ports[0].from_guest.take_used().is_some() {}
    }
    assert!(world.lanes.slots[1].is_idle && !world.lanes.slots[0].is_idle);
    world.ports[0].send(&frame(mac(1), mac(0), 60));
    world.poll();
    assert!(!world.lanes.slots[1].is_idle);
    assert_eq!(world.ports[1].got().len(), 1);
}

/// It would wake their lanes: so of a thousand idle guests none costs anything when another one comes.
#[test]
fn uplink_asks_only_guests_that_are_new_or_have_changed() {
    let mut world = World::new(&[8; 10]).with_uplink(256);
    let uplink = 10;
    let asked = |world: &mut World| {
        world.lanes.awake.clear();
        world.lanes.slots[..uplink]
            .iter_mut()
            .for_each(|slot| slot.is_idle = true);
        world.rebuild_forwarding();
        world.lanes.poll(uplink);
        std::mem::take(&mut world.lanes.awake)
    };
    assert_eq!(asked(&mut world).len(), 10);
    assert!(asked(&mut world).is_empty());
    world.add_pair(10, 0, Offloads::NONE);
    world.lanes.slots[11].is_idle = true;
    assert_eq!(asked(&mut world), [11]);
    let limits = PortLimits::new(PortRates {
        to_guest: Rates {
            bits: Some(Rate {
                per_second: 1,
                burst: 1,
            }),
            packets: None,
        },
        ..PortRates::default()
    });
    world.lanes.slots[3].lane.set_limits(&limits);
    assert_eq!(asked(&mut world), [3]);
}

/// That others look for its buffers does not count.
#[test]
fn kicks_of_a_guest_are_futile_until_it_sends_or_gets_a_frame() {
    let mut world = World::new(&[8, 0]);
    let send = |world: &mut World| {
        world.ports[0].send(&frame(mac(1), mac(0), 60));
        world.poll();
        world.lanes.enable_notifications(0);
    };
    let wakes = |world: &mut World| world.lanes.slots[1].note_wake();
    assert_eq!(wakes(&mut world), 1);
    send(&mut world);
    assert_eq!(wakes(&mut world), 2);
    world.ports[1].post(8);
    send(&mut world);
    assert!(!world.ports[1].got().is_empty());
    assert_eq!(wakes(&mut world), 1);
}
