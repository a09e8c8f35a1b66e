//! Ports of a network with a queue of the NIC for themselves: their frames to the LAN leave by it.

use std::os::fd::OwnedFd;

use device::pair::Direction;

use super::host::{HOST, add_host, read, write};
use super::workers::Workers;
use super::*;
use crate::tests::test_lanes::switch;
use crate::tests::test_nic::Over;
use model::config::Placement;

const PLACEMENTS: [Placement; 2] = [Placement::Copy, Placement::SendDirect];

/// Adds the lane of a port with a queue of its own; returns that queue's NIC.
fn add_own(
    world: &mut World,
    (number, pair_number): (u16, u16),
    over: Over,
    features: QueueFeatures,
    offloads: Offloads,
) -> Arc<Mutex<Wire>> {
    let (port, pair) = Port::new(over.memory(1 << 21), 256, features, offloads);
    let fdb = &world.lanes.fdbs[NETWORK];
    let vlans = &fdb.port(PortNumber(number)).expect("known").vlans;
    let untags = matches!(vlans, Vlans::Access(_));
    let memory = Memory {
        ram: Arc::clone(&port.memory.ram),
        map: Arc::clone(&port.memory.map),
    };
    let mut wire = None;
    world.add_port((number, pair_number), (port, pair), |pair, counters, of| {
        let (lane, its) = over.lane_of((pair, &memory, &counters), None, Some((of, untags)));
        wire = Some(its);
        lane
    });
    wire.expect("just now")
}

fn over(placement: Placement) -> Over {
    Over {
        fill: 256,
        ..Over::new(placement, 256)
    }
}

/// Three ports, of which the last has a queue of its own, an uplink and the host.
fn world(
    placement: Placement,
    features: QueueFeatures,
    vlans: [Vlans; 3],
) -> (World, Arc<Mutex<Wire>>, XdpWire, OwnedFd) {
    let known = (0..)
        .zip(vlans)
        .map(|(at, vlans)| fdb_port_with(at, |port| port.vlans = vlans));
    let known: Vec<_> = known.collect();
    let mut world = World::of(known[..2].to_vec()).with_uplink(256);
    let (host, _) = add_host(&mut world, known, true);
    let uplink = world.add_sending_uplink();
    let wire = add_own(&mut world, (2, 0), over(placement), features, Offloads::NONE);
    world.rebuild_forwarding();
    let mut world = world.posting(32);
    world.poll();
    (world, wire, uplink, host)
}

fn taken(wire: &Mutex<Wire>) -> Vec<Vec<u8>> {
    let mut wire = wire.lock().expect("no panic");
    wire.sent.drain(..).map(|(frame, _)| frame).collect()
}

fn poll(world: &mut World) {
    (0..4).for_each(|_| world.poll());
}

/// More frames than its ring has entries, so that each chain is returned, in the order of all.
#[test]
fn port_with_a_queue_of_its_own_reaches_everybody_and_everybody_it() {
    for placement in PLACEMENTS {
        for (packed, in_order) in [(false, false), (false, true), (true, false), (true, true)] {
            let features = QueueFeatures {
                packed,
                in_order,
                ..QueueFeatures::default()
            };
            let (mut world, wire, mut uplink, host) =
                world(placement, features, [0; 3].map(|_| Vlans::Untagged));
            for round in 0..60 {
                let len = [60, 64, 65, 590, 1514][round % 5];
                let piece = [2048, 100, 400][round % 3];
                let own = |to| frame(to, mac(2), len);
                let not_its = frame(mac(1), STRANGER, len);
                for sent in [
                    &own(STRANGER),
                    &own(mac(1)),
                    &not_its,
                    &own(HOST),
                    &own(BROADCAST),
                ] {
                    world.ports[2].send_in_pieces(sent, piece);
                }
                let to_it = |from| frame(mac(2), from, len);
                world.ports[1].send(&to_it(mac(1)));
                poll(&mut world);
                assert_eq!(taken(&wire), [own(STRANGER), own(BROADCAST)], "{placement:?}");
                assert!(uplink.take().is_empty(), "nothing by queues of the uplink");
                assert_eq!(world.ports[0].take(), [own(BROADCAST)]);
                assert_eq!(world.ports[1].take(), [own(mac(1)), own(BROADCAST)]);
                assert_eq!(read(&host), [own(HOST), own(BROADCAST)]);
                assert_eq!(world.ports[2].take(), [to_it(mac(1))]);
                // Whichever queue of the NIC receives it, and from the host.
                world.arrive(&to_it(STRANGER));
                wire.lock().expect("no panic").arrive(&to_it(STRANGER));
                assert!(write(&host, &to_it(HOST)));
                poll(&mut world);
                let mut got = world.ports[2].take();
                got.sort();
                assert_eq!(got, [to_it(STRANGER), to_it(STRANGER), to_it(HOST)]);
                for port in &mut world.ports {
                    while port.from_guest.take_used().is_some() {}
                    let most = usize::from(port.from_guest.size().get());
                    assert_eq!(port.from_guest.free_descriptors(), most, "all returned");
                }
            }
            assert_eq!(world.ports[2].counters.from_guest_source_address.get(), 60);
        }
    }
}

#[test]
fn queue_of_a_ports_own_sends_with_the_tag_of_its_vlan_and_the_guest_sees_none() {
    let (access, trunk) = (Vlans::Access(100), Vlans::Trunk(vec![100, 101]));
    for placement in PLACEMENTS {
        let vlans = [access.clone(), trunk.clone(), access.clone()];
        let (mut world, wire, mut uplink, _host) = world(placement, QueueFeatures::default(), vlans);
        for len in [60, 65, 1514] {
            let own = |to| frame(to, mac(2), len);
            for to in [mac(0), mac(1), STRANGER] {
                world.ports[2].send(&own(to));
            }
            let back = frame(mac(2), mac(1), len);
            world.ports[1].send(&tagged(&back, 100));
            poll(&mut world);
            assert_eq!(world.ports[0].take(), [own(mac(0))]);
            assert_eq!(world.ports[1].take(), [tagged(&own(mac(1)), 100)]);
            assert_eq!(taken(&wire), [tagged(&own(STRANGER), 100)]);
            assert_eq!(world.ports[2].take(), [back]);
            assert!(uplink.take().is_empty());
            // In no VLAN, in another one, in its own.
            let came = frame(mac(2), STRANGER, len);
            for frame in [&came, &tagged(&came, 101), &tagged(&came, 100)] {
                world.arrive(frame);
            }
            poll(&mut world);
            assert_eq!(world.ports[2].take(), [came]);
        }
    }
}

/// Whichever worker has the port, and which the uplink.
#[test]
fn multicast_and_announcements_of_a_port_with_a_queue_of_its_own_leave_once() {
    for placement in PLACEMENTS {
        for (has_uplink, worker) in [(true, 0), (true, 1), (false, 0)] {
            let mut workers = Workers::new((0..5).map(fdb_port).collect(), false);
            let mut uplink = has_uplink.then(|| workers.0[0].add_sending_uplink());
            let world = &mut workers.0[worker];
            let wire = add_own(
                world,
                (4, 0),
                over(placement),
                QueueFeatures::default(),
                Offloads::NONE,
            );
            workers.spread();
            workers.post(16);
            let (sent, announced) = (frame(BROADCAST, mac(4), 590), frame(BROADCAST, mac(4), 60));
            workers.0[worker].ports[2].send(&sent);
            workers.poll();
            let lane = workers.0[worker].lanes.slots.len() - 1;
            workers.0[worker].lanes.change(lane, |lane, siblings| {
                lane.inject(&announced, siblings);
            });
            workers.poll();
            let case = format!("{placement:?}, uplink: {has_uplink}, worker {worker}");
            assert_eq!(taken(&wire), [sent.clone(), announced.clone()], "{case}");
            let by_uplink = uplink.as_mut().map_or(Vec::new(), XdpWire::take);
            assert!(by_uplink.is_empty(), "{case}");
            for port in 0..4 {
                assert_eq!(
                    workers.port(port).got(),
                    [sent.clone(), announced.clone()],
                    "{case}: {port}"
                );
            }
        }
    }
}

/// Segments that the NIC has take places among the chains that are returned in order.
#[test]
fn frames_to_ports_wait_while_segments_take_all_places_among_the_chains_in_flight() {
    const PLACES: usize = 16;
    for to in [mac(0), mac(1)] {
        let known = [super::hairpin::hairpin(0), fdb_port(1)];
        let mut world = World::default();
        let fdb = Fdb::new(known.map(Some).into());
        world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
        let over = Over {
            ring: (PLACES, 0),
            pieces: PLACES,
            ..over(Placement::SendDirect)
        };
        let wire = add_own(
            &mut world,
            (0, 0),
            over,
            QueueFeatures::default(),
            Offloads::all(),
        );
        world.add_pair(1, 0, Offloads::NONE);
        world.rebuild_forwarding();
        let mut world = world.posting(16);
        world.ports[0].send_gso(STRANGER, mac(0), 1400, 100);
        (0..8).for_each(|_| _ = world.ports[0].send(&frame(to, mac(0), 60)));
        poll(&mut world);
        let got = |world: &mut World| world.ports.iter_mut().map(|port| port.got().len()).sum::<usize>();
        let first = got(&mut world);
        assert!(first < 3, "{first} at once");
        wire.lock().expect("no panic").each_kick = PLACES;
        poll(&mut world);
        assert_eq!(first + got(&mut world), 8);
        assert_eq!(taken(&wire).len(), 14);
    }
}

#[test]
fn frames_of_all_queues_reach_the_pairs_that_are_enabled() {
    for placement in PLACEMENTS {
        let mut world = World::default().with_uplink(64);
        let fdb = Fdb::new(vec![Some(fdb_port(0))]);
        world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
        let add = |world: &mut World, pair| {
            let features = QueueFeatures::default();
            add_own(world, (0, pair), over(placement), features, Offloads::NONE)
        };
        let wires = [0, 1].map(|pair| add(&mut world, pair));
        world.rebuild_forwarding();
        let mut world = world.posting(32);
        world.poll();
        for is_on in [true, false, true] {
            switch(&mut *world.lanes.slots[2].lane, Direction::ToGuest, is_on);
            world.rebuild_forwarding();
            let by = |queue| frame(mac(0), STRANGER, 60 + queue);
            for (queue, wire) in wires.iter().enumerate() {
                wire.lock().expect("no panic").arrive(&by(queue));
            }
            world.arrive(&by(2));
            poll(&mut world);
            let [first, second] = [0, 1].map(|pair: usize| world.ports[pair].take());
            // The flow decides which pair gets what the uplink received.
            assert!(first.contains(&by(0)));
            assert_eq!((second.contains(&by(1)), second.is_empty()), (is_on, !is_on));
            let mut all = [first, second].concat();
            all.sort_by_key(Vec::len);
            assert_eq!(all, [by(0), by(1), by(2)], "{placement:?}");
        }
    }
}
