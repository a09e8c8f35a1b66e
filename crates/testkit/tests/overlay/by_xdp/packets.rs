//! Packets that arrive at the underlay from servers that are not listed. Which ones are decapsulated, left to the kernel or
//! dropped is tested in crate `steer` (`tests/tunnel.rs`).

use super::*;
use testkit::assert_soon;
use testkit::frame::assert_same;

/// A packet from host 1 to host 0 with this frame in it, and what sends it.
fn to_first(world: &World, inner: &[u8]) -> (PacketPort, Vec<u8>) {
    let [to, from, ..] = &world.overlay.hosts[..] else {
        panic!("two hosts");
    };
    let local = to.address().parse().expect("an address");
    let packet = [
        &to.nic_mac()[..],
        &from.nic_mac(),
        &vxlan(local, 100, inner)[12..],
    ]
    .concat();
    (world.overlay.wire_to(0), packet)
}

#[test]
fn packets_of_servers_that_are_not_listed_are_dropped_by_option() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let inner = frame(mac(0), mac(1), 100, 1);
    let (wire, known) = to_first(&world, &inner);
    let mut unknown = known.clone();
    unknown[29] = 77;
    sum_ipv4(&mut unknown);
    let reload = |world: &World, drops: bool| {
        let text = world.overlay.hosts[0].file(&[(0, ""), (MOVER, "")]);
        let of = format!("underlay = \"{NIC}\"\n");
        let with = format!("{of}drop-unknown-senders = {drops}\n");
        world.daemons[0].reload_with(&text.replace(&of, &with));
    };
    let dropped = |world: &World| world.daemons[0].counter("unknown_sender");
    let assert_drops = |world: &World| {
        let before = dropped(world);
        wire.send(&unknown);
        wire.send(&known);
        assert_soon!(dropped(world) == before + 1, "{:#}", world.daemons[0].status());
    };
    reload(&world, true);
    for kills in [false, true] {
        if kills {
            world.daemons[0].end_steward(Signal::KILL);
            world.daemons[0].restart_lessor(&world.overlay.hosts[0].netns);
        }
        world.await_ways(true);
        assert_drops(&world);
        assert_same(&world.stations[0].received(), &inner);
        let host = &world.overlay.hosts[0];
        let entry = format!("{} dev {VXLAN} dst 10.9.0.77", text([0; 6]));
        host.bridge(&format!("fdb append {entry}"));
        world.await_followed(0);
        wire.send(&unknown);
        assert_same(&world.stations[0].received(), &inner);
        world.overlay.hosts[0].bridge(&format!("fdb del {entry}"));
        world.await_followed(0);
    }
    // Nothing of it is counted twice or arrives.
    assert_drops(&world);
    assert_same(&world.stations[0].received(), &inner);
    let before = dropped(&world);
    reload(&world, false);
    world.await_ways(true);
    wire.send(&unknown);
    assert_same(&world.stations[0].received(), &inner);
    assert_eq!(dropped(&world), before);
}
