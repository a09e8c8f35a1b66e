//! Taps by which GSO packets leave unsegmented. What is written to a tap leaves by the interface of the lease and reaches
//! no other process. The device is removed when its descriptor is closed or the lease ends.

use crate::common;

use std::fs::File;
use std::io::{ErrorKind, Write};

use common::hostile::assert_serves;
use common::{World, lessee, refusal, take, wanted};
use rustix::process::Signal;
use steward_client::Lease;
use steward_protocol::{Reason, SendTapEnd};
use testkit::stalled::StuckWrite;
use testkit::{NetNs, VethPair, assert_soon, frame, require, wait};

/// A lease of all queues of the interface, and a tap for its first one.
fn lease_and_tap(world: &World, queues: u32) -> (Lease, SendTapEnd, File) {
    let lease = take(&world.socket(), &wanted(0, queues)).expect("allowed");
    let (end, tap) = tap_of(&lease, 0);
    (lease, end, tap)
}

fn tap_of(lease: &Lease, queue: u32) -> (SendTapEnd, File) {
    let (end, tap) = lease.send_tap(queue, false).expect("allowed").expect("known");
    (end, File::from(tap))
}

/// Behind a virtio-net header that asks for nothing.
fn send(mut tap: &File, frame: &[u8]) -> std::io::Result<usize> {
    tap.write(&[&[0; 12], frame].concat())
}

#[track_caller]
fn assert_leaves(world: &World, tap: &File, seed: u8) {
    let sent = frame::plain(200, seed);
    send(tap, &sent).expect("the device is up");
    assert_eq!(world.wire.receive(wait::SOON), Some(sent));
}

fn links(world: &World) -> String {
    world.veth.near.output_of("ip", &["-o", "link"])
}

#[track_caller]
fn assert_nothing_left(world: &World) {
    let is_left = || links(world).contains("vaxs");
    assert_soon!(!is_left(), "{}", links(world));
}

#[test]
fn written_frames_leave_by_the_interface_until_descriptor_or_lease_end() {
    require!(Root);
    let world = World::new();
    let (lease, end, tap) = lease_and_tap(&world, 2);
    assert_leaves(&world, &tap, 1);
    let (other, tap_of_other) = tap_of(&lease, 1);
    assert_ne!(end.interface, other.interface);
    assert_leaves(&world, &tap_of_other, 2);
    assert_leaves(&world, &tap, 3);
    // One for each queue.
    common::assert_refused_with(lease.send_tap(0, false), "close its descriptor first");
    assert_leaves(&world, &tap, 4);
    drop((tap, tap_of_other));
    assert_soon!(!links(&world).contains("vaxs"), "{}", links(&world));
    let (next, tap_of_next) = tap_of(&lease, 0);
    assert_eq!(next, end);
    assert_leaves(&world, &tap_of_next, 5);
    // It goes with the lease, also if its descriptor stays.
    drop(lease);
    assert_nothing_left(&world);
    assert!(send(&tap_of_next, &frame::plain(200, 6)).is_err(), "gone");
    assert_eq!(world.wire.receive(wait::QUIET), None);
}

#[test]
fn host_gets_nothing_of_it_whomever_it_is_for() {
    require!(Root);
    let world = World::with(1, common::POLICY);
    let (_lease, end, tap) = lease_and_tap(&world, 1);
    let address_of = |interface: &str| {
        let report = world
            .veth
            .near
            .with_sysfs(&format!("cat /sys/class/net/{interface}/address"));
        steer::mac_bytes(report.trim()).expect("an address")
    };
    // What the host's stack would take: IPv4 without options, from 192.0.2.9 to 192.0.2.1, which is the host's.
    let sent_to = |mac: [u8; 6]| {
        let mut sent = frame::plain(100, 1);
        sent[..6].copy_from_slice(&mac);
        sent[12..34].copy_from_slice(&[
            8, 0, 0x45, 0, 0, 86, 0, 0, 0, 0, 64, 1, 0xf6, 0x9c, 192, 0, 2, 9, 192, 0, 2, 1,
        ]);
        sent
    };
    world
        .veth
        .near
        .ip(&["addr", "add", "192.0.2.1/24", "dev", VethPair::NIC]);
    let received = || {
        world
            .veth
            .near
            .output_of("nstat", &["-asz", "IpInReceives", "Ip6InReceives"])
    };
    let before = received();
    for mac in [address_of(&end.interface), address_of(VethPair::NIC), [0xff; 6]] {
        let sent = sent_to(mac);
        send(&tap, &sent).expect("the device is up");
        assert_eq!(world.wire.receive(wait::SOON), Some(sent));
    }
    assert_eq!(received(), before);
    // It would be seen.
    let mut from_the_wire = sent_to(address_of(VethPair::NIC));
    from_the_wire[6] = 0x02;
    world.wire.send(&from_the_wire);
    assert_soon!(received() != before);
}

#[test]
fn only_queues_of_the_lease_have_one_and_where_it_is_wanted_only_with_tso() {
    require!(Root);
    let world = World::new();
    let (lease, end, tap) = lease_and_tap(&world, 1);
    let refused = refusal(lease.send_tap(1, false));
    assert_eq!(refused.reason, Reason::Lease, "{refused}");
    drop(tap);
    let is_gone = || !links(&world).contains("vaxs");
    assert_soon!(is_gone(), "{}", links(&world));
    let with_tso = || lease.send_tap(0, true).expect("allowed");
    assert_eq!(with_tso().map(|(end, _)| end), Some(end));
    assert_soon!(is_gone(), "{}", links(&world));
    world.veth.carry_no_gso_packets();
    assert!(with_tso().is_none());
}

/// Whatever its lessee does to the device, it is removed when the lease ends.
#[test]
fn lessee_that_turns_hostile_keeps_nothing() {
    require!(Root);
    let world = World::new();
    let (lease, _, tap) = lease_and_tap(&world, 1);
    // TUNSETPERSIST, TUNSETOWNER, TUNSETGROUP, TUNSETOFFLOAD.
    for (number, value) in [(203, 1), (204, 1234), (206, 1234), (208, 0)] {
        lessee::tun_ioctl(&tap, number, value).expect("its own device");
    }
    for header in [[0xff; 12], [1, 1, 0xff, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]] {
        let frame = [&header[..], &frame::plain(200, 1)].concat();
        let refused = (&tap).write(&frame).map_err(|error| error.kind());
        assert_eq!(refused, Err(ErrorKind::InvalidInput), "{header:?}");
    }
    drop(tap);
    assert!(links(&world).contains("vaxs"), "it is persistent");
    drop(lease);
    assert_nothing_left(&world);
}

/// The kernel is not done with removing a device before that, and others notice nothing of it.
#[test]
fn write_that_never_ends_holds_up_neither_others_nor_the_end_of_the_steward() {
    require!(Root, Fuse);
    let mut world = World::new();
    let (lease, _, tap) = lease_and_tap(&world, 1);
    let _stuck = StuckWrite::begin(&tap);
    assert_serves(&world);
    drop(lease);
    assert_serves(&world);
    assert_nothing_left(&world);
    let (_lease, _, tap) = lease_and_tap(&world, 1);
    assert_leaves(&world, &tap, 1);
    let _stuck = StuckWrite::begin(&tap);
    world.end_steward(Signal::TERM);
}

#[test]
fn device_goes_with_the_lease_also_where_the_interface_is_away() {
    require!(Root);
    let world = World::new();
    let (lease, _, tap) = lease_and_tap(&world, 1);
    let elsewhere = NetNs::new("elsewhere");
    let to = |from: &NetNs, to: &NetNs| from.ip(&["link", "set", VethPair::NIC, "netns", to.name()]);
    to(&world.veth.near, &elsewhere);
    drop(lease);
    assert_nothing_left(&world);
    to(&elsewhere, &world.veth.near);
    world.veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    assert!(send(&tap, &frame::plain(200, 1)).is_err(), "gone");
}

#[test]
fn tap_continues_without_a_steward_and_leftovers_are_removed() {
    require!(Root);
    let mut world = World::kept_for(common::POLICY, "60");
    let (lease, _, tap) = lease_and_tap(&world, 1);
    for signal in [Signal::TERM, Signal::KILL] {
        world.end_steward(signal);
        assert_leaves(&world, &tap, 1);
        world.restart();
        world.await_that(|| lease.take_changes().is_ok() && !lease.is_away());
        assert_leaves(&world, &tap, 2);
    }
    // The steward dies, and then a lessee that has made its device persistent.
    lessee::tun_ioctl(&tap, 203, 1).expect("its own");
    world.end_steward(Signal::KILL);
    drop((lease, tap));
    assert!(links(&world).contains("vaxs"), "it is persistent");
    world.grace = "0";
    world.restart();
    assert_nothing_left(&world);
}
