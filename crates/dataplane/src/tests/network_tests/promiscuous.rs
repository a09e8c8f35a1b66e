//! Ports that get copies of frames for others.

use super::*;

/// Ports of these VLANs, with 16 receive buffers each; the last one listens.
fn heard(vlans: &[Vlans]) -> World {
    let port = |(at, vlans_of): (usize, &Vlans)| {
        fdb_port_with(at as u8, |port| {
            port.vlans = vlans_of.clone();
            port.options.promiscuous = at == vlans.len() - 1;
        })
    };
    World::of(vlans.iter().enumerate().map(port).collect()).posting(16)
}

#[test]
fn promiscuous_port_hears_all_that_moves_once() {
    let mut world = heard(&[Vlans::Untagged, Vlans::Untagged, Vlans::Untagged]).with_uplink(256);
    world.poll();
    let sent = [
        frame(mac(1), mac(0), 1514),
        // Its own.
        frame(mac(2), mac(0), 60),
        frame(BROADCAST, mac(0), 61),
        frame(STRANGER, mac(0), 62),
    ];
    sent.iter().for_each(|frame| _ = world.ports[0].send(frame));
    world.ports[2].send(&frame(mac(1), mac(2), 63));
    world.poll();
    assert_eq!(world.ports[2].got(), sent);
    assert_eq!(world.ports[1].got().len(), 3);
    let came = [
        frame(mac(1), STRANGER, 64),
        frame(mac(2), STRANGER, 65),
        frame(BROADCAST, STRANGER, 66),
    ];
    came.iter().for_each(|frame| world.arrive(frame));
    world.poll();
    let mut got = world.ports[2].got();
    got.sort_by_key(Vec::len);
    assert_eq!(got, came);
    assert_eq!(world.ports[1].got(), [came[0].clone(), came[2].clone()]);
}

#[test]
fn promiscuous_port_hears_its_vlans_only_and_with_its_tags() {
    let access = Vlans::Access(100);
    let trunk = Vlans::Trunk(vec![100]);
    let other = Vlans::Access(101);
    let mut world = heard(&[access.clone(), access, other.clone(), other, trunk]).with_uplink(256);
    world.poll();
    let sent = frame(mac(1), mac(0), 60);
    world.ports[0].send(&sent);
    world.ports[2].send(&frame(mac(3), mac(2), 60));
    world.poll();
    assert_eq!(world.ports[4].got(), [tagged(&sent, 100)]);
    let came = tagged(&frame(mac(1), STRANGER, 60), 100);
    world.arrive(&came);
    world.arrive(&tagged(&frame(mac(3), STRANGER, 60), 101));
    world.poll();
    assert_eq!(world.ports[4].got(), [came]);
    assert_eq!(world.ports[1].got(), [sent, frame(mac(1), STRANGER, 60)]);
}

#[test]
fn what_may_not_be_sent_is_not_heard() {
    let mut world = heard(&[Vlans::Untagged, Vlans::Untagged, Vlans::Untagged]);
    world.ports[0].send(&frame(mac(1), STRANGER, 60));
    world.poll();
    assert!(world.ports[2].got().is_empty());
}

#[test]
fn promiscuous_port_without_buffers_delays_no_port() {
    let mut world = heard(&[Vlans::Untagged, Vlans::Untagged, Vlans::Untagged]);
    for round in 0..3 {
        for _ in 0..10 {
            world.ports[0].send(&frame(mac(1), mac(0), 60));
        }
        world.poll();
        assert_eq!(world.ports[1].got().len(), 10, "{round}");
        world.ports[1].post(10);
    }
    assert_eq!(world.ports[2].got().len(), 16);
    assert_eq!(world.ports[2].counters.to_guest_no_buffer.get(), 30 - 16);
    assert_eq!(world.ports[0].counters.from_guest_waits.get(), 0);
}

#[test]
fn packet_that_a_listener_gets_cut_holds_up_copies_of_the_same_sender_only() {
    let port = |at: u8| fdb_port_with(at, |port| port.options.promiscuous = at == 3);
    let sends = Offloads {
        csum: true,
        tso4: true,
        ..Offloads::NONE
    };
    let mut world = World::offering((0..4).map(port).collect(), sends);
    world.ports[2].post(120);
    world.ports[3].post(120);
    // More segments than a budget has frames.
    world.ports[0].send_gso(mac(2), mac(0), 100 * 600, 600);
    let other = frame(mac(2), mac(1), 60);
    world.ports[1].send(&other);
    world.poll();
    for at in [2, 3] {
        let got = world.ports[at].got();
        assert_eq!((got.len(), &got[64]), (101, &other), "{at}");
        assert_eq!(world.ports[at].counters.to_guest_no_buffer.get(), 0);
    }
}
