//! The host as one more receiver: its tap device is played by a socket that keeps frames apart.

use std::os::fd::OwnedFd;

use device::pair::Direction;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::host::tap_lane::TapLane;
use crate::lane::Work;
use crate::lane::limits::BATCH;
use crate::nic::tap::Tap;
use crate::tests::fairness_tests::with_offloads;
use crate::tests::test_lanes::switch;

pub(super) const HOST: Mac = [2, 0, 0, 0, 2, 0];
const BEFORE: usize = HEADER as usize;

/// Ports with 16 receive buffers each, and what the host reads and writes.
fn world(ports: u8) -> (World, OwnedFd, Arc<PairCounters>) {
    world_with(ports, true)
}

/// The same; `segments_udp`: the host's kernel cuts UDP packets.
fn world_with(ports: u8, segments_udp: bool) -> (World, OwnedFd, Arc<PairCounters>) {
    let known = (0..ports).map(fdb_port);
    let known: Vec<_> = known.collect();
    let mut world = World::of(known.clone()).posting(16);
    let (host, counters) = add_host(&mut world, known, segments_udp);
    (world, host, counters)
}

/// Adds the host to these ports' network.
pub(super) fn add_host(
    world: &mut World,
    known: Vec<FdbPort>,
    segments_udp: bool,
) -> (OwnedFd, Arc<PairCounters>) {
    let fdb = Fdb::new(known.into_iter().map(Some).collect()).with_reached(&[HOST]);
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::NONBLOCK);
    let (host, tap) = socketpair(family, SocketType::SEQPACKET, flags, None).expect("sockets");
    let counters = Arc::<PairCounters>::default();
    let lane = TapLane::new(Tap::new(tap), segments_udp, Arc::clone(&counters));
    let role = Role::Host {
        network: NETWORK.into(),
    };
    world.add_slot(Box::new(lane.expect("memory")), role);
    world.rebuild_forwarding();
    (host, counters)
}

/// What the host got, behind its headers.
pub(super) fn read(host: &OwnedFd) -> Vec<Vec<u8>> {
    let mut bytes = vec![0; 70_000];
    let next = || {
        let len = rustix::io::read(host, &mut bytes).ok().filter(|&len| len > 0)?;
        Some(bytes[BEFORE..len].to_vec())
    };
    std::iter::from_fn(next).collect()
}

/// Whether there is room for it.
pub(super) fn write(host: &OwnedFd, frame: &[u8]) -> bool {
    rustix::io::write(host, &[&[0; BEFORE][..], frame].concat()).is_ok()
}

/// UDP over IPv4 to the host, to be cut into so many datagrams, with its virtio-net header. Its sums are nobody's
/// matter here.
fn udp_packet(from: Mac, datagrams: u16, size: u16) -> ([u8; BEFORE], Vec<u8>) {
    let mut header = [0; BEFORE];
    // VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_UDP_L4.
    header[..10].copy_from_slice(&[1, 5, 42, 0, 0, 0, 34, 0, 6, 0]);
    header[4..6].copy_from_slice(&size.to_le_bytes());
    let len = 8 + datagrams * size;
    let mut ip = [0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    ip[2..4].copy_from_slice(&(20 + len).to_be_bytes());
    let mut udp = [0, 80, 0, 80, 0, 0, 0, 0];
    udp[4..6].copy_from_slice(&len.to_be_bytes());
    let payload = vec![7; (datagrams * size).into()];
    (header, [&HOST[..], &from, &[8, 0], &ip, &udp, &payload].concat())
}

#[test]
fn frames_behind_a_packet_that_a_host_does_not_cut_wait_until_it_has_all_of_it() {
    let (mut world, host, counters) = world_with(2, false);
    for port in [0, 1] {
        let sends = Offloads {
            csum: true,
            uso: true,
            ..Offloads::NONE
        };
        with_offloads(&mut world, port, sends);
    }
    // More datagrams than a budget has frames, and few enough that the sender has some left in its next.
    let (header, packet) = udp_packet(mac(0), 70, 500);
    world.ports[0].send_with(header, &packet);
    let behind = frame(HOST, mac(0), 60);
    world.ports[0].send(&behind);
    let other = frame(HOST, mac(1), 61);
    world.ports[1].send(&other);
    // The start of rounds changes now and then: a lane may be polled twice before the host's is.
    for at in [0, 0, 1] {
        world.lanes.poll(at);
    }
    let mut got = read(&host);
    for _ in 0..4 {
        world.poll();
        got.extend(read(&host));
    }
    let place = |wanted: &[u8]| got.iter().position(|frame| frame == wanted);
    // On a busy machine one of both may wait for longer than the host's lane has others wait.
    let lost = counters.to_guest_no_buffer.get() as usize;
    assert_eq!(got.len() + lost, 72);
    if lost == 0 {
        assert_eq!(place(&behind), Some(71), "the last one");
        assert_eq!(place(&other), Some(64), "it is another's");
    } else {
        assert!(
            place(&behind).is_none_or(|at| at == got.len() - 1),
            "the last one"
        );
    }
}

#[test]
fn order_is_kept_between_what_is_written_at_once_and_what_waits() {
    let (mut world, host, _) = world(2);
    let mut sent = Vec::new();
    for at in 0..20 {
        // Groups wait, as there are others to get them.
        let to = if at % 3 == 1 { BROADCAST } else { HOST };
        let frame = frame(to, mac(0), 60 + at);
        world.ports[0].send(&frame);
        sent.push(frame);
    }
    world.poll();
    world.poll();
    assert_eq!(read(&host), sent);
}

#[test]
fn frames_of_the_host_reach_ports_only() {
    let (mut world, host, counters) = world(2);
    for len in [14, 60, 1514] {
        let to_one = frame(mac(1), HOST, len);
        let to_all = frame(BROADCAST, HOST, len);
        assert!(write(&host, &to_one));
        assert!(write(&host, &to_all));
        assert!(write(&host, &frame(STRANGER, HOST, len)));
        assert!(write(&host, &frame(HOST, HOST, len)));
        world.poll();
        assert_eq!(world.ports[1].take(), [to_one, to_all.clone()]);
        assert_eq!(world.ports[0].take(), [to_all]);
    }
    assert!(read(&host).is_empty(), "nothing comes back to it");
    assert_eq!(counters.from_guest_no_station.get(), 6);
}

#[test]
fn host_reaches_a_guest_that_has_moved_by_the_lan_and_not_one_that_is_disabled() {
    let known: Vec<_> = (0..2).map(fdb_port).collect();
    let mut world = World::of(known.clone()).posting(16);
    let (host, counters) = add_host(&mut world, known, true);
    let mut uplink = world.add_sending_uplink();
    let sent = frame(mac(0), HOST, 60);
    let mut says = |world: &mut World| {
        world.rebuild_forwarding();
        assert!(write(&host, &sent));
        (0..4).for_each(|_| world.poll());
        [world.ports[0].take(), uplink.take()]
    };
    let (none, it) = (Vec::new, || vec![sent.clone()]);
    assert_eq!(says(&mut world), [it(), none()]);
    switch(&mut *world.lanes.slots[0].lane, Direction::ToGuest, false);
    assert_eq!(says(&mut world), [none(), none()]);
    assert_eq!(counters.from_guest_no_peer.get(), 1);
    world.lanes.slots.remove(0).lane.stop();
    assert_eq!(says(&mut world), [none(), it()]);
    assert_eq!(counters.from_guest_no_peer.get(), 1);
}

#[test]
fn frames_that_the_host_rejects_are_counted_and_delay_no_port() {
    let (mut world, host, counters) = world(2);
    drop(host);
    for _ in 0..5 {
        world.ports[0].send(&frame(HOST, mac(0), 60));
    }
    let last = frame(mac(1), mac(0), 60);
    world.ports[0].send(&last);
    world.poll();
    assert_eq!(world.ports[1].got(), [last]);
    assert_eq!(counters.to_guest_host_refused.get(), 5);
}

#[test]
fn each_frame_is_delivered_or_counted_when_the_way_to_the_host_stops() {
    let (mut world, host, counters) = world(2);
    let mut said = 0;
    while write(&host, &frame(mac(0), HOST, 60)) {
        said += 1;
    }
    // One poll: the guest has buffers for a part of it.
    world.lanes.poll(2);
    let heard = world.ports[0].got().len() as u64;
    // Of guests nothing is lost: it is written.
    for _ in 0..5 {
        world.ports[1].send(&frame(BROADCAST, mac(1), 61));
    }
    world.lanes.poll(1);
    world.lanes.slots.pop().expect("the host's").lane.stop();
    // That its end was closed with frames in it.
    let _ = rustix::net::sockopt::socket_error(&host);
    assert_eq!(read(&host).len(), 5);
    // A budget's. Unread frames stay with the device.
    let taken = BATCH as u64;
    assert!(said > taken && heard > 0, "{heard} of {said}");
    assert_eq!(counters.from_guest_queue_stopped.get(), taken - heard);
}

#[test]
fn host_frames_are_read_only_while_there_are_buffers() {
    let (mut world, host, _) = world(1);
    world.ports[0].post(112);
    let mut sent = 0;
    while write(&host, &frame(mac(0), HOST, 60)) {
        sent += 1;
    }
    assert!(sent > 128, "{sent}");
    world.poll();
    let first = world.ports[0].got().len();
    assert!(first > 0 && first <= 64, "{first} of {sent}");
}

/// It says something; in how many rounds that has come to the first port.
fn rounds_until_heard(world: &mut World, host: &OwnedFd) -> u32 {
    let said = frame(mac(0), HOST, 60);
    assert!(write(host, &said));
    for round in 1..100 {
        world.poll();
        match &world.ports[0].take()[..] {
            [] => {}
            heard => {
                assert_eq!(heard, [said]);
                return round;
            }
        }
    }
    panic!("not heard in a hundred rounds");
}

#[test]
fn host_that_is_quiet_is_asked_less_often_until_something_happens() {
    let (mut world, host, _) = world(1);
    let is_quiet = |world: &mut World| (0..1001).for_each(|_| world.poll());
    assert_eq!(rounds_until_heard(&mut world, &host), 1, "at first");
    is_quiet(&mut world);
    let rounds = rounds_until_heard(&mut world, &host);
    assert!((2..=8).contains(&rounds), "{rounds}");
    assert_eq!(
        rounds_until_heard(&mut world, &host),
        1,
        "after it said something"
    );
    is_quiet(&mut world);
    world.ports[0].send(&frame(HOST, mac(0), 60));
    world.poll();
    assert!(
        rounds_until_heard(&mut world, &host) <= 5,
        "after it got something"
    );
    is_quiet(&mut world);
    for slot in &mut world.lanes.slots {
        slot.lane.note_event();
    }
    assert_eq!(
        rounds_until_heard(&mut world, &host),
        1,
        "after its device told of frames"
    );
}

#[test]
fn host_without_frames_leaves_the_worker_asleep() {
    let (mut world, host, _) = world(1);
    let lane = world.lanes.slots.len() - 1;
    let enable_notifications = |world: &mut World| world.lanes.enable_notifications(lane);
    world.poll();
    assert_eq!(enable_notifications(&mut world), Some(Work::None), "at first");
    // One that nobody has a buffer for: what it waits for nobody tells of.
    (0..17).for_each(|_| assert!(write(&host, &frame(mac(0), HOST, 60))));
    world.poll();
    assert_eq!(
        enable_notifications(&mut world),
        Some(Work::SOON),
        "a frame waits"
    );
    assert_eq!(world.ports[0].got().len(), 16);
    world.ports[0].post(16);
    world.poll();
    world.poll();
    assert_eq!(world.ports[0].got().len(), 1);
    assert_eq!(
        enable_notifications(&mut world),
        Some(Work::None),
        "once it has gone"
    );
}

/// Who is root here can give the device what no stack sends.
#[test]
fn frame_of_the_host_that_ends_within_its_tag_is_dropped() {
    let (mut world, host, counters) = world(2);
    let known = (0..2).map(|port| Some(fdb_port_with(port, |port| port.vlans = Vlans::Access(256))));
    let fdb = Fdb::new(known.collect()).with_reached(&[HOST]);
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    world.rebuild_forwarding();
    for to in [mac(0), BROADCAST] {
        let whole = tagged(&frame(to, HOST, 60), 256);
        for len in 15..18 {
            assert!(write(&host, &whole[..len]));
        }
        assert!(write(&host, &whole));
    }
    world.poll();
    let wanted = [mac(0), BROADCAST].map(|to| frame(to, HOST, 60));
    assert_eq!(world.ports[0].got(), wanted);
    assert_eq!(world.ports[1].got(), wanted[1..]);
    assert_eq!(counters.from_guest_offload_malformed.get(), 2 * 3);
}
