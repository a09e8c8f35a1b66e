//! GSO packets that leave unsegmented: the tap is played by a socket that keeps packets apart.

use std::os::fd::OwnedFd;
use std::time::Duration;

use device::pair::Direction;
use rustix::io::read;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::backend::to_nic::ON_ITS_WAY;
use crate::nic::tap::{SendTap, Tap};
use crate::policy::filter::{Filter, PortFilter, Rule};
use crate::tests::test_lanes::switch;
use crate::tests::test_siblings::Others;

const COPIES: Setup = Setup {
    direct: false,
    into_guest: false,
    packed: false,
    sends: WITH_METADATA,
    ring: 64,
    chunks: 40,
    each_kick: usize::MAX,
};

/// A lane with a tap, and what comes out of that.
fn world(setup: Setup) -> (World, OwnedFd) {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::NONBLOCK);
    let (kernel, tap) = socketpair(family, SocketType::SEQPACKET, flags, None).expect("sockets");
    let send_tap = SendTap {
        tap: Tap::new(tap),
        segments_udp: false,
    };
    (World::with_tap(setup, Some(send_tap)), kernel)
}

/// What was written to the tap next, with its virtio-net header.
fn next(kernel: &OwnedFd) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 70_000];
    let len = read(kernel, &mut bytes).ok()?;
    bytes.truncate(len);
    Some(bytes)
}

/// A frame of the same flow, with a partial checksum.
fn small(number: u32) -> Vec<u8> {
    let (header, frame) = gso_packet(10, 0, number);
    let [_, _, rest @ ..] = header;
    [&[1, 0], &rest[..], &[0, 0], &frame].concat()
}

fn large(payload_len: usize, number: u32) -> Vec<u8> {
    let (mut header, frame) = gso_packet(payload_len, 1000, number);
    // The longest that headers may be, as they are told the kernel: where the checksum begins, and 60 bytes of TCP.
    header[2] = 34 + 60;
    [&header[..], &[0, 0], &frame].concat()
}

/// The next packet is this one.
#[track_caller]
fn assert_next(kernel: &OwnedFd, packet: &[u8]) {
    let next = next(kernel).expect("a packet");
    assert!(next == packet, "another one, of {} bytes", next.len());
}

#[test]
fn packet_leaves_with_its_request_and_is_counted_as_its_segments() {
    let (mut world, kernel) = world(COPIES);
    let packet = large(20_000, 0);
    for cuts in [1, 2, 20] {
        world.add(&packet, cuts);
        world.finish();
        assert_next(&kernel, &packet);
    }
    assert!(world.wire().sent.is_empty());
    let counters = &world.counters;
    assert_eq!(counters.from_guest_super_frames.get(), 3);
    assert_eq!(counters.from_guest_super_frames_unsegmented.get(), 3);
    assert_eq!(counters.from_guest_frames.get(), 60);
    assert_eq!(counters.from_guest_bytes.get(), 60 * 1054);
}

#[test]
fn packet_in_too_many_pieces_for_a_write_is_cut() {
    let (mut world, kernel) = world(COPIES);
    world.send(20_000, 1000, 50);
    world.finish();
    world.assert_sent(true);
    assert!(next(&kernel).is_none());
    assert_eq!(world.counters.from_guest_super_frames_unsegmented.get(), 0);
}

#[test]
fn frames_that_were_put_before_are_taken_first() {
    // The kernel takes one at a time.
    let (mut world, kernel) = world(COPIES.with_ring(64, 1));
    for _ in 0..3 {
        world.send_plain(100);
    }
    world.add(&large(20_000, 0), 1);
    while world.wire().sent.len() < 3 {
        assert!(next(&kernel).is_none(), "{} have left", world.wire().sent.len());
        world.poll();
    }
    world.finish();
    assert_next(&kernel, &large(20_000, 0));
}

#[test]
fn flow_goes_on_by_the_tap_until_the_guest_pauses() {
    let (mut world, kernel) = world(COPIES);
    world.add(&large(20_000, 0), 1);
    world.add(&small(1), 1);
    world.finish();
    assert_next(&kernel, &large(20_000, 0));
    let header_and_frame = next(&kernel).expect("behind it");
    assert!(header_and_frame[HEADER as usize..] == small(1)[HEADER as usize..]);
    // However short its pauses are.
    world.poll();
    world.add(&small(2), 1);
    world.finish();
    assert!(next(&kernel).is_some());
    std::thread::sleep(ON_ITS_WAY + Duration::from_millis(50));
    world.poll();
    world.add(&small(3), 1);
    world.finish();
    assert!(next(&kernel).is_none());
    assert_eq!(world.wire().sent.len(), 1);
}

#[test]
fn what_the_tap_has_no_room_for_waits_with_all_behind_it() {
    let (mut world, kernel) = world(COPIES);
    let mut sent: u32 = 0;
    // As many as the socket takes, and one that it does not.
    while world.driver.in_flight() == 0 {
        world.add(&large(60_000, sent), 1);
        sent += 1;
        world.poll();
        while world.driver.take_used().is_some() {}
    }
    world.add(&small(sent), 1);
    for _ in 0..3 {
        world.poll();
        assert_eq!(
            world.lane.enable_notifications(&mut Others::default()),
            Work::SOON
        );
        world.lane.disable_notifications();
    }
    assert_eq!(world.driver.in_flight(), 2);
    for number in 0..sent {
        assert_next(&kernel, &large(60_000, number));
        world.poll();
    }
    let last = next(&kernel).expect("behind them");
    assert!(last[HEADER as usize..] == small(sent)[HEADER as usize..]);
    assert!(world.wire().sent.is_empty(), "nothing overtakes them");
}

#[test]
fn packet_is_lost_and_counted_while_the_link_is_down() {
    let (mut world, kernel) = world(COPIES);
    world.wire().link = LinkState::Down;
    world.add(&large(20_000, 0), 1);
    world.poll();
    assert!(next(&kernel).is_none());
    assert_eq!(world.counters.from_guest_interface_down.get(), 1);
    world.wire().link = LinkState::Up;
    world.add(&large(20_000, 1), 1);
    world.poll();
    assert_next(&kernel, &large(20_000, 1));
    let counters = &world.counters;
    assert_eq!(counters.from_guest_interface_down.get(), 1);
    assert_eq!(counters.from_guest_super_frames.get(), 1);
    assert_eq!(counters.from_guest_frames.get(), 20);
}

#[test]
fn without_its_other_end_packets_are_cut() {
    let (mut world, kernel) = world(COPIES);
    drop(kernel);
    world.send(20_000, 1000, 1);
    world.finish();
    world.assert_sent(true);
}

/// The frame that waited for the tap never reaches it: the pair is disabled, or new rules deny it.
#[test]
fn tap_that_was_full_does_not_keep_the_worker_awake() {
    for is_disabled in [true, false] {
        let (mut world, kernel) = world(COPIES);
        let mut sent: u32 = 0;
        while world.driver.in_flight() == 0 {
            world.add(&large(60_000, sent), 1);
            sent += 1;
            world.poll();
            while world.driver.take_used().is_some() {}
        }
        if is_disabled {
            switch(&mut *world.lane, Direction::FromGuest, false);
        } else {
            let deny = "direction=from-guest action=deny protocol=tcp";
            let filter = PortFilter::new(&Filter {
                rule: vec![deny.parse::<Rule>().expect("a rule")],
                ..Filter::default()
            });
            drop(world.lane.set_filter(filter.for_a_lane(0)));
            world.poll();
            while world.driver.take_used().is_some() {}
            assert_eq!(world.driver.in_flight(), 0);
        }
        while next(&kernel).is_some() {}
        let mut work = Work::Now;
        for _ in 0..3 {
            world.poll();
            work = world.lane.enable_notifications(&mut Others::default());
            world.lane.disable_notifications();
        }
        assert_eq!(work, Work::None, "disabled: {is_disabled}");
    }
}
