//! What a hostile guest of a network tries, and what the others notice of it.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::policy::guard::{Addresses, SourceGuard};
use crate::tests::fairness_tests::{gso_packet, with_offloads};
use crate::tests::test_port::forge;

/// A frame to a port with the tag of a VLAN, cut off after so many bytes.
fn cut_off(to: Mac, vlan: u16, len: usize) -> Vec<u8> {
    let mut frame = tagged(&frame(to, mac(0), 60), vlan);
    frame.truncate(len);
    frame
}

#[test]
fn frame_that_ends_within_its_tag_is_dropped() {
    // The first byte of the tag's second half alone says a VLAN.
    let mut world = World::of_vlans(&[Vlans::Trunk(vec![256, 512]), Vlans::Access(256)]);
    for to in [mac(1), BROADCAST] {
        for len in 14..18 {
            world.ports[0].send(&cut_off(to, 256, len));
        }
        world.ports[0].send(&cut_off(to, 256, 18));
    }
    world.poll();
    let whole = |to: Mac| [&to[..], &mac(0), &[0x88, 0xb5]].concat();
    assert_eq!(world.ports[1].got(), [whole(mac(1)), whole(BROADCAST)]);
    // Those that have nothing of the VLAN's number are of none.
    let counters = &world.ports[0].counters;
    assert_eq!(counters.from_guest_offload_malformed.get(), 2 * 3);
    assert_eq!(counters.from_guest_vlan.get(), 2);
}

/// A switch whose port gets a bridge's message from a host may close that port, and one that is asked to pause does:
/// for all guests.
#[test]
fn link_control_frames_of_guests_are_dropped() {
    let vlans = [
        Vlans::Untagged,
        Vlans::Untagged,
        Vlans::Access(100),
        Vlans::Trunk(vec![100]),
    ];
    let mut world = World::of_vlans(&vlans);
    let reserved = |last: u8| [0x01, 0x80, 0xc2, 0, 0, last];
    let pause = |to: Mac, from: Mac| {
        let mut pause = frame(to, from, 60);
        pause[12..14].copy_from_slice(&[0x88, 0x08]);
        pause
    };
    for last in 0..16 {
        world.ports[0].send(&frame(reserved(last), mac(0), 60));
        world.ports[2].send(&frame(reserved(last), mac(2), 60));
        world.ports[3].send(&tagged(&frame(reserved(last), mac(3), 60), 100));
        world.poll();
    }
    for to in [mac(1), STRANGER, BROADCAST] {
        world.ports[0].send(&pause(to, mac(0)));
        world.ports[0].send(&tagged(&pause(to, mac(0)), 0));
        world.ports[3].send(&tagged(&pause(to, mac(3)), 100));
    }
    // The next ones are like any group.
    let others = [reserved(16), [0x01, 0x80, 0xc2, 0, 1, 0]].map(|to| frame(to, mac(0), 60));
    others.iter().for_each(|frame| _ = world.ports[0].send(frame));
    world.poll();
    assert_eq!(world.ports[1].got(), others);
    assert!(world.ports[2].got().is_empty() && world.ports[3].got().is_empty());
    let refused = [0, 2, 3].map(|port: usize| world.ports[port].counters.from_guest_link_control.get());
    assert_eq!(refused, [16 + 6, 16, 16 + 3]);
}

#[test]
fn link_control_option_allows_all_but_pause_frames() {
    let port = |at: u8, vlans| {
        fdb_port_with(at, |port| {
            port.vlans = vlans;
            port.options.link_control = at < 2;
        })
    };
    let known = vec![
        port(0, Vlans::Untagged),
        port(1, Vlans::Access(100)),
        port(2, Vlans::Untagged),
        port(3, Vlans::Trunk(vec![100])),
    ];
    let mut world = World::of(known).posting(16);
    let reserved = |last: u8, from: u8| frame([0x01, 0x80, 0xc2, 0, 0, last], mac(from), 60);
    for last in 0..16 {
        for from in 0..3 {
            world.ports[usize::from(from)].send(&reserved(last, from));
        }
        world.poll();
    }
    let mut pause = reserved(14, 0);
    pause[12..14].copy_from_slice(&[0x88, 0x08]);
    world.ports[0].send(&pause);
    world.poll();
    let said = |from: u8| {
        (0..16)
            .filter(|&last| last != 1)
            .map(move |last| reserved(last, from))
    };
    assert_eq!(world.ports[2].got(), said(0).collect::<Vec<_>>());
    let of_vlan: Vec<_> = said(1).map(|frame| tagged(&frame, 100)).collect();
    assert_eq!(world.ports[3].got(), of_vlan);
    let refused = [0, 1, 2].map(|port: usize| world.ports[port].counters.from_guest_link_control.get());
    assert_eq!(refused, [2, 1, 16]);
}

/// Where a tag is taken off, a place within it would become one outside the frame.
#[test]
fn checksum_of_the_addresses_is_nothing_to_ask_for_in_a_vlan() {
    let port = |at: u8, vlans| fdb_port_with(at, |port| port.vlans = vlans);
    let known = vec![port(0, Vlans::Trunk(vec![100])), port(1, Vlans::Access(100))];
    let mut world = World::offering(known, Offloads::all());
    world.ports[1].post(4);
    let sent = cut_off(mac(1), 100, 64);
    for start in [0u16, 2, 17, 18] {
        let mut header = [0; HEADER as usize];
        header[0] = 1;
        header[6..8].copy_from_slice(&start.to_le_bytes());
        header[8..10].copy_from_slice(&(62 - start).to_le_bytes());
        world.ports[0].send_with(header, &sent);
    }
    world.poll();
    assert_eq!(world.ports[0].counters.from_guest_offload_malformed.get(), 3);
    assert_eq!(world.ports[1].got().len(), 1);
}

/// Two ports, of which the first may use one IPv4 address; and a datagram of its guest.
fn guarded(offloads: Offloads) -> (World, Vec<u8>) {
    let guard = SourceGuard {
        addresses: Addresses::new(&["192.0.2.10".parse().expect("valid")]),
        ..SourceGuard::default()
    };
    let first = fdb_port_with(0, |port| port.source_guard = Some(Arc::new(guard)));
    let world = World::offering(vec![first, fdb_port(1)], offloads);
    let own = Ipv4Addr::new(192, 0, 2, 10).to_bits();
    (world.posting(16), filter::udp(mac(1), mac(0), own, 53))
}

#[test]
fn checksum_is_stored_in_no_byte_that_was_checked() {
    let (mut world, datagram) = guarded(Offloads::all());
    let asking = |start: u8, offset: u8| [1, 0, 0, 0, 0, 0, start, 0, offset, 0, 0, 0];
    // The Ethernet header's address and type, both IPv4 addresses, the ports.
    for field in [6, 10, 12, 26, 28, 30, 34, 36] {
        world.ports[0].send_with(asking(0, field), &datagram);
    }
    // A port without addresses: source address and VLAN.
    for field in [6, 8, 10, 11, 12, 13] {
        world.ports[1].send_with(asking(0, field), &frame(mac(0), mac(1), 60));
    }
    world.ports[0].send_with(asking(34, 6), &datagram);
    world.poll();
    let refused = [0, 1].map(|port: usize| world.ports[port].counters.from_guest_checksum_in_headers.get());
    assert_eq!(refused, [8, 6]);
    assert!(world.ports[0].got().is_empty());
    assert_eq!(world.ports[1].got(), [datagram]);
}

#[test]
fn header_that_changes_meanwhile_is_passed_on_as_it_was_checked() {
    let (mut world, honest) = guarded(Offloads::NONE);
    let bytes = [&[0; HEADER as usize][..], &honest].concat();
    let addr = world.ports[0].memory.put(&bytes);
    let _forger = forge(&world.ports[0], addr, [mac(0), mac(1)]);
    let (mut count, begun) = (0, Instant::now());
    let counters = Arc::clone(&world.ports[0].counters);
    let refused = || {
        let by_mac = counters.from_guest_source_address.get();
        by_mac.min(counters.from_guest_ip_source.get())
    };
    while count < 500 || refused() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{count} passed on");
        let guest = &mut world.ports[0].from_guest;
        while guest.take_used().is_some() {}
        for _ in 0..16 {
            let buffer = Buffer::readable(addr, bytes.len() as u32);
            guest.add(&[buffer]).expect("room");
        }
        guest.publish();
        world.poll();
        let got = world.ports[1].take();
        assert!(
            got.iter().all(|frame| *frame == honest),
            "one that was not checked"
        );
        count += got.len();
    }
}

/// A frame to a group is copied for each: a flood of them takes no more of the worker than one of other frames.
#[test]
fn multicast_copies_count_for_the_budget_of_their_sender() {
    let mut world = World::new(&[0; 33]);
    for _ in 0..64 {
        world.ports[0].send(&frame(BROADCAST, mac(0), 60));
    }
    world.poll();
    let sent = world.ports[0].counters.from_guest_frames.get();
    assert_eq!(sent, 2, "of 32 copies each, in a turn of 64");
    for _ in 0..200 {
        world.poll();
    }
    assert_eq!(world.ports[0].counters.from_guest_frames.get(), 64);
}

/// One that gives a buffer now and then holds up who sends to it no longer than one that gives none.
#[test]
fn guest_with_few_buffers_does_not_hold_up_frames_to_others_for_long() {
    let mut others = 0;
    // One for it before each of the other's.
    let mut world = World::new(&[0, 0, 200]);
    for _ in 0..100 {
        world.ports[0].send(&frame(mac(1), mac(0), 60));
        world.ports[0].send(&frame(mac(2), mac(0), 60));
    }
    for _ in 0..20 {
        world.ports[1].post(1);
        let (begun, mut rounds) = (Instant::now(), 0);
        // So many, too: this thread may wait for a CPU meanwhile.
        while rounds < 100 || begun.elapsed() < Duration::from_millis(4) {
            world.poll();
            rounds += 1;
        }
        world.ports[1].got();
        others += world.ports[2].got().len();
    }
    assert_eq!(others, 100);
}

/// Of a frame in pieces all are taken, or none.
#[test]
fn frame_in_pieces_is_whole_though_its_guest_has_no_room_for_more() {
    let mut world = World::new(&[0]).with_uplink(256);
    world.poll();
    // It may have 64 chunks.
    for _ in 0..63 {
        world.arrive(&frame(mac(0), STRANGER, 60));
    }
    let long = frame(mac(0), STRANGER, 1200);
    world.arrive_in_pieces(&long);
    world.poll();
    world.arrive(&frame(mac(0), STRANGER, 61));
    world.poll();
    world.ports[0].post(64);
    world.poll();
    let got = world.ports[0].got();
    assert_eq!(got.len(), 64);
    assert!(got[63] == long);
    // What came when there was no room is lost.
    assert_eq!(world.ports[0].counters.to_guest_no_buffer.get(), 1);
}

#[test]
fn frame_in_pieces_may_be_longer_when_all_of_the_uplink_may() {
    let mut world = World::new(&[4]).with_uplink(64);
    world.poll();
    let long = frame(mac(0), STRANGER, 2000);
    for (limit, given) in [(1518, 0), (2018, 1), (1518, 0)] {
        let uplink = world.lanes.slots.last_mut().expect("an uplink");
        uplink.lane.set_frame_limit(limit);
        world.arrive_in_pieces(&long);
        world.poll();
        let got = world.ports[0].got();
        assert!(got == vec![long.clone(); given], "{limit}: {} frames", got.len());
    }
    assert_eq!(world.ports[0].counters.to_guest_in_pieces.get(), 2);
}

/// Others come and go while its pieces do.
#[test]
fn frame_in_pieces_is_whole_though_another_port_leaves_meanwhile() {
    let mut world = World::new(&[0, 8]).with_uplink(64);
    world.poll();
    let long = frame(mac(1), STRANGER, 1200);
    world.arrive_piece(&long[..600], true);
    world.poll();
    world.lanes.slots.remove(0).lane.stop();
    world.rebuild_forwarding();
    world.poll();
    world.arrive_piece(&long[600..], false);
    let next = frame(mac(1), STRANGER, 60);
    world.arrive(&next);
    world.poll();
    assert!(world.ports[1].got() == [long, next]);
}

/// It says where a guest is: of each VLAN of the port, and of nobody else.
#[test]
fn announcement_is_in_the_vlans_of_its_port_and_of_its_own_address() {
    let (access, trunk) = (Vlans::Access(100), Vlans::Trunk(vec![100, 101]));
    let mut world = World::of_vlans(&[access.clone(), access, trunk, Vlans::Access(101), Vlans::Untagged]);
    let announce = |world: &mut World, port: usize, frame: &[u8]| {
        world.lanes.change(port, |lane, siblings| {
            lane.inject(frame, siblings);
        });
        (0..5).map(|port| world.ports[port].got()).collect::<Vec<_>>()
    };
    let own = |port| frame(BROADCAST, mac(port), 60);
    let [none, bare] = [vec![], vec![own(0)]];
    let got = announce(&mut world, 0, &own(0));
    let with_tag = vec![tagged(&own(0), 100)];
    assert_eq!(got, [none.clone(), bare, with_tag, none.clone(), none.clone()]);
    let got = announce(&mut world, 2, &own(2));
    let bare = vec![own(2)];
    assert_eq!(
        got,
        [bare.clone(), bare.clone(), none.clone(), bare, none.clone()]
    );
    assert_eq!(announce(&mut world, 0, &own(1)), vec![none; 5]);
    assert_eq!(world.ports[0].counters.from_guest_source_address.get(), 1);
}

/// A frame that a guest gets asks for nothing that is not in it. `takes`: the guest accepts all offloads.
fn assert_sane((header, frame): &([u8; 10], Vec<u8>), takes: bool) {
    let word = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (headers, size, start, offset) = (word(2), word(4), word(6), word(8));
    let len = frame.len();
    assert!(takes || *header == [0; 10], "{header:?}");
    assert!(len >= 14 && header[0] <= 1, "{header:?}");
    assert!(header[0] == 0 || start + offset + 2 <= len, "{header:?} of {len}");
    if header[1] == 0 {
        assert!(len <= 1518, "{len} bytes");
        return;
    }
    assert!(
        matches!(header[1] & 0x7f, 1 | 4 | 5) && header[0] == 1,
        "{header:?}"
    );
    assert!(
        size > 0 && headers > start && headers <= len && len <= 65_557,
        "{header:?} of {len}"
    );
    assert!(headers + size.min(len - headers) <= 1518 && (len - headers).div_ceil(size) <= 2048);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// For a guest that takes packets whole, and for one for which they are cut.
    #[test]
    fn packets_with_any_request_come_as_what_they_are_or_not_at_all(
        payload in prop::sample::select(vec![0, 1, 100, 2000, 20_001, 60_000]),
        size in prop::sample::select(vec![0, 1, 48, 1000, 1448, 9000, 65_535]),
        of_header in prop::collection::vec((0..10usize, any::<u8>()), 0..3),
        of_frame in prop::collection::vec((12..60usize, any::<u8>()), 0..2),
        piece in prop::sample::select(vec![19, 200, 70_000]),
    ) {
        for takes in [false, true] {
            let mut world = World::offering(vec![fdb_port(0), fdb_port(1)], Offloads::all());
            let accepted = Offloads { csum: true, ..Offloads::NONE };
            with_offloads(&mut world, 1, if takes { Offloads::all() } else { accepted });
            world.ports[1].post(200);
            let (asked, mut frame) = gso_packet(mac(1), mac(0), payload, size);
            let mut bytes = asked.to_vec();
            of_header.iter().for_each(|&(at, byte)| bytes[at] = byte);
            for &(at, byte) in &of_frame {
                if let Some(changed) = frame.get_mut(at) {
                    *changed = byte;
                }
            }
            let piece = piece.max((frame.len() + 12).div_ceil(200));
            world.ports[0].send_all_in_pieces(&[&bytes[..], &[0, 0], &frame].concat(), piece);
            let last = super::frame(mac(1), mac(0), 61);
            world.ports[0].send(&last);
            let mut got = Vec::new();
            for _ in 0..40 {
                world.poll();
                got.extend(world.ports[1].take_merged());
            }
            got.iter().for_each(|got| assert_sane(got, takes));
            prop_assert_eq!(got.last(), Some(&([0; 10], last)));
        }
    }
}
