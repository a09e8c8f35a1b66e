//! Ports with several pairs: which of them gets a frame.

use super::*;
use crate::tests::test_lanes::switch;
use device::pair::Direction;

/// Two ports: the first has so many pairs, the second one; each with 64 receive buffers. Pairs come first, in order.
fn world(pairs: u16) -> World {
    let port = |at: u8| fdb_port_with(at, |port| port.flows = (at == 0).then(Arc::default));
    let mut world = World::default();
    let fdb = Fdb::new(vec![Some(port(0)), Some(port(1))]);
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    (0..pairs).for_each(|pair| world.add_pair(0, pair, Offloads::NONE));
    world.add_pair(1, 0, Offloads::NONE);
    world.rebuild_forwarding();
    world.ports.iter_mut().for_each(|port| port.post(64));
    world
}

/// A UDP packet between a port of the first and one of another host, forth or back.
fn packet(target: Mac, port: u16, back: bool) -> Vec<u8> {
    let ends = [(mac(0), 1, port), (target, 2, 9)];
    let [(from_mac, from, from_port), (to_mac, to, to_port)] = match back {
        false => ends,
        true => [ends[1], ends[0]],
    };
    let ip = [
        0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, from, 10, 0, 0, to,
    ];
    let ports = [from_port.to_be_bytes(), to_port.to_be_bytes()].concat();
    let mut bytes = [&to_mac[..], &from_mac, &[8, 0], &ip, &ports].concat();
    bytes.resize(60, port as u8);
    bytes
}

/// Frames that each pair of the first port got.
fn got(world: &mut World, pairs: usize) -> Vec<Vec<Vec<u8>>> {
    world.ports[..pairs].iter_mut().map(Port::got).collect()
}

#[test]
fn flow_comes_back_by_the_pair_that_sent_it_from_a_port_and_from_the_uplink() {
    for pairs in [2, 4] {
        let mut world = world(pairs).with_uplink(256);
        world.poll();
        let sends = |flow: u16| usize::from(flow * 7 % pairs);
        let mut wanted = vec![Vec::new(); usize::from(pairs)];
        for flow in 0..20 {
            world.ports[sends(flow)].send(&packet(mac(1), flow, false));
            world.ports[sends(flow)].send(&packet(STRANGER, 100 + flow, false));
        }
        world.poll();
        for flow in 0..20 {
            let (siblings, far) = (packet(mac(1), flow, true), packet(STRANGER, 100 + flow, true));
            world.ports[usize::from(pairs)].send(&siblings);
            world.arrive(&far);
            wanted[sends(flow)].extend([siblings, far]);
        }
        world.poll();
        let mut got = got(&mut world, pairs.into());
        got.iter_mut().chain(&mut wanted).for_each(|frames| frames.sort());
        assert_eq!(got, wanted);
    }
}

#[test]
fn flow_that_moves_to_another_pair_is_followed_and_one_that_is_off_is_not() {
    let mut world = world(2);
    for pair in [1, 0, 1] {
        world.ports[pair].send(&packet(mac(1), 5, false));
        world.poll();
        world.ports[2].send(&packet(mac(1), 5, true));
        world.poll();
        let of_pairs: Vec<_> = got(&mut world, 2).iter().map(Vec::len).collect();
        assert_eq!(of_pairs, [1 - pair, pair]);
    }
    switch(&mut *world.lanes.slots[1].lane, Direction::ToGuest, false);
    world.rebuild_forwarding();
    world.ports[2].send(&packet(mac(1), 5, true));
    world.poll();
    assert_eq!(world.ports[0].got().len(), 1);
}

#[test]
fn flows_that_were_not_sent_are_spread_and_each_keeps_its_order() {
    let mut world = world(4).with_uplink(256);
    world.poll();
    for round in 0..3 {
        for flow in 0..10 {
            let mut frame = packet(STRANGER, flow, true);
            frame[59] = round;
            world.arrive(&frame);
            let mut frame = packet(mac(1), 100 + flow, true);
            frame[59] = round;
            world.ports[4].send(&frame);
        }
        world.poll();
    }
    let got = got(&mut world, 4);
    assert!(got.iter().filter(|frames| !frames.is_empty()).count() > 2);
    assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 60);
    for frames in got {
        for flow in (0..10).chain(100..110) {
            let of_flow = frames.iter().filter(|frame| frame[37] == flow);
            let rounds: Vec<_> = of_flow.map(|frame| frame[59]).collect();
            assert!(rounds.is_empty() || rounds == [0, 1, 2], "{rounds:?}");
        }
    }
}

#[test]
fn multicast_goes_to_one_pair() {
    let mut world = world(3).with_uplink(64);
    world.poll();
    world.arrive(&frame(BROADCAST, STRANGER, 60));
    world.ports[3].send(&frame(BROADCAST, mac(1), 60));
    world.poll();
    let of_pairs: Vec<_> = got(&mut world, 3).iter().map(Vec::len).collect();
    assert_eq!(of_pairs, [2, 0, 0]);
}

#[test]
fn pairs_of_a_slow_guest_have_no_more_chunks_together_than_one_has() {
    for pairs in [1, 4] {
        let mut world = world(pairs).with_uplink(256);
        world.poll();
        let sent = 50 * 30;
        for flow in 0..sent {
            world.arrive(&packet(STRANGER, flow, true));
            if flow % 30 == 29 {
                world.poll();
            }
        }
        let counters = world.ports.iter().map(|port| &port.counters);
        let lost: u64 = counters.map(|counters| counters.to_guest_no_buffer.get()).sum();
        let got: usize = world.ports.iter_mut().map(|port| port.got().len()).sum();
        let waiting = usize::from(sent) - lost as usize - got;
        // Half of 128.
        assert!((48..=64).contains(&waiting), "{waiting}");
    }
}
