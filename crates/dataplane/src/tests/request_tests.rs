//! What guests request of frames that they send, in each placement: a frame whose request cannot be met is dropped and
//! counted, and the next one is sent. Which requests are malformed is tested in `packet::segment`.

use device::counters::{Counter, PairCounters};
use device::offloads::Offloads;
use packet::checksum::{self, ChecksumAt};
use packet::ethernet::Mac;
use virtqueue::driver::Buffer;
use virtqueue::{GuestAddr, QueueFeatures};

use crate::nic::queue::{MOST_PIECES, Sends};
use crate::tests::fairness_tests::gso_packet;
use crate::tests::network_tests::frame;
use crate::tests::test_guest::HEADER;
use crate::tests::test_nic::{Over, PLACEMENTS, own_queue, sent};
use crate::tests::test_port::{Port, scribble};
use crate::tests::test_siblings::Others;
use model::config::Placement;

const MAC: Mac = [2, 0, 0, 0, 0, 1];
const TO: Mac = [2, 0, 0, 0, 0, 2];

type CounterOf = fn(&PairCounters) -> &Counter;

/// All placements, with segments that are copied and with segments that refer to their payload.
fn ways() -> impl Iterator<Item = Over> {
    let by_reference = Sends {
        most_pieces: MOST_PIECES,
        refers: true,
        ..Sends::PLAIN
    };
    let ways = PLACEMENTS.map(|placement| [(placement, Sends::PLAIN), (placement, by_reference)]);
    ways.into_iter().flatten().map(|(placement, sends)| Over {
        sends,
        ..Over::new(placement, 128)
    })
}

/// A TCP packet with its virtio-net header.
fn packet(payload: usize) -> ([u8; HEADER as usize], Vec<u8>) {
    let (asked, packet) = gso_packet(TO, MAC, payload, 1000);
    let mut header = [0; HEADER as usize];
    header[..asked.len()].copy_from_slice(&asked);
    (header, packet)
}

/// Requests for a packet with 3000 bytes of payload: bytes of its header at a place, and the counter.
fn impossible() -> Vec<(usize, Vec<u8>, CounterOf)> {
    let malformed: CounterOf = |counters| &counters.from_guest_offload_malformed;
    let too_long: CounterOf = |counters| &counters.from_guest_segment_too_long;
    let checksum_only = |start: u16, offset: u16| {
        let places = [start.to_le_bytes(), offset.to_le_bytes()].concat();
        [&[1, 0, 0, 0, 0, 0][..], &places].concat()
    };
    vec![
        // No bytes in a segment, and the size that Linux takes for none.
        (4, vec![0, 0], malformed),
        (4, vec![0xff, 0xff], malformed),
        // An unknown kind, UFO, all bits, ECN for UDP.
        (1, vec![2], malformed),
        (1, vec![3], malformed),
        (1, vec![0xff], malformed),
        (1, vec![0x85], malformed),
        // No checksum.
        (0, vec![0], malformed),
        (0, vec![0xfe], malformed),
        // Another IP, another transport.
        (1, vec![4], malformed),
        (1, vec![5], malformed),
        // The checksum from another place or stored at one, also behind the end.
        (6, vec![33, 0], malformed),
        (8, vec![6, 0], malformed),
        (6, vec![0xff, 0xff], malformed),
        (8, vec![0xff, 0xff], malformed),
        (4, 1465u16.to_le_bytes().to_vec(), too_long),
        (4, vec![0xfe, 0xff], too_long),
        (4, vec![1, 0], |counters| &counters.from_guest_too_many_segments),
        // A frame with a checksum.
        (0, checksum_only(3053, 0), malformed),
        (0, checksum_only(0xffff, 0xffff), malformed),
        (0, checksum_only(34, 16), |counters| &counters.from_guest_too_long),
    ]
}

#[test]
fn impossible_requests_are_dropped_and_counted_and_the_next_frame_is_sent() {
    let (good, bytes) = packet(3000);
    let of_requests = impossible().into_iter().map(|(at, changed, counter)| {
        let mut header = good;
        header[at..at + changed.len()].copy_from_slice(&changed);
        (header, bytes.clone(), counter)
    });
    // IP's length is short, padding, a fragment, a long TCP header, headers that end early, version 5.
    let spoilt: [fn(&mut Vec<u8>); 6] = [
        |frame| frame[17] -= 1,
        |frame| frame.push(0),
        |frame| frame[21] = 1,
        |frame| {
            frame.truncate(60);
            frame[46] = 0xf0;
        },
        |frame| frame.truncate(53),
        |frame| frame[14] = 0x55,
    ];
    let malformed: CounterOf = |counters| &counters.from_guest_offload_malformed;
    let of_frames = spoilt.iter().map(|spoil| {
        let mut frame = bytes.clone();
        spoil(&mut frame);
        (good, frame, malformed)
    });
    let too_long: CounterOf = |counters| &counters.from_guest_too_long;
    let of_lengths = [65_558, 67_000].map(|len| (good, frame(TO, MAC, len), too_long));
    let all: Vec<_> = of_requests.chain(of_frames).chain(of_lengths).collect();
    for over in ways() {
        let (mut guest, mut lane, wire) = own_queue(over, Offloads::all());
        for (at, (header, bytes, counter)) in all.iter().enumerate() {
            let before = counter(&guest.counters).get();
            guest.send_with(*header, bytes);
            let next = frame(TO, MAC, 60 + at);
            guest.send(&next);
            (0..4).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
            let case = format!("{:?}, {at}: {header:?}", over.placement);
            assert_eq!(counter(&guest.counters).get(), before + 1, "{case}");
            assert_eq!(sent(&wire), [next], "{case}");
            wire.lock().expect("no panic").sent.clear();
        }
    }
}

#[test]
fn requests_that_the_guest_has_not_accepted_are_dropped_and_counted() {
    let accepts = |csum, tso4| Offloads {
        csum,
        tso4,
        ..Offloads::NONE
    };
    let (header, packet) = packet(3000);
    for over in ways() {
        for (csum, tso4, dropped) in [
            (false, false, 4),
            (true, false, 4),
            (true, true, 3),
            (false, true, 4),
        ] {
            let (mut guest, mut lane, wire) = own_queue(over, accepts(csum, tso4));
            // TCP over IPv4, with ECN, over IPv6, UDP.
            for kind in [1, 0x81, 4, 5] {
                let mut header = header;
                header[1] = kind;
                guest.send_with(header, &packet);
            }
            (0..8).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
            let counters = &guest.counters;
            assert_eq!(counters.from_guest_offload_not_negotiated.get(), dropped);
            assert_eq!(counters.from_guest_offload_malformed.get(), 0);
            assert_eq!(
                sent(&wire).len() as u64,
                3 * (4 - dropped),
                "{:?}",
                over.placement
            );
        }
    }
}

#[test]
fn request_and_headers_that_change_while_they_are_read_make_no_frame_longer_than_it_may_be() {
    let (header, packet) = packet(20_000);
    let good = [&header[..], &packet].concat();
    let mut bad = good[..100].to_vec();
    (bad[1], bad[4], bad[5], bad[6], bad[8]) = (5, 0xff, 0xff, 0xff, 0xff);
    (bad[12 + 14], bad[12 + 17], bad[12 + 46]) = (0x4f, 0xff, 0xff);
    for over in ways() {
        let (mut guest, mut lane, wire) = own_queue(over, Offloads::all());
        let addr = guest.memory.put(&good);
        let scribbler = scribble(&guest, vec![(addr, bad.clone()), (addr, good[..100].to_vec())]);
        let mut poll = |guest: &mut crate::tests::test_port::Port| {
            let buffer = Buffer::readable(addr, good.len() as u32);
            guest.from_guest.add(&[buffer]).expect("room");
            guest.from_guest.publish();
            while guest.from_guest.take_used().is_none() {
                lane.poll(&mut Others::default()).expect("no fault");
            }
            std::mem::take(&mut wire.lock().expect("no panic").sent)
        };
        for _ in 0..500 {
            assert!(poll(&mut guest).iter().all(|(frame, _)| frame.len() <= 1518));
        }
        drop(scribbler);
        let _ = poll(&mut guest);
        assert_eq!(poll(&mut guest).len(), 20, "{:?}", over.placement);
    }
}

/// Which lies a ring can tell is tested in `virtqueue`.
#[test]
fn buffers_that_cannot_be_used_end_the_lane_with_the_reason() {
    let outside = GuestAddr(1 << 40);
    for over in ways() {
        for (is_sent, reason, buffer) in [
            (true, "outside-memory", Buffer::readable(outside, 100)),
            (
                true,
                "chain-shorter-than-header",
                Buffer::readable(GuestAddr(4096), 11),
            ),
            (
                true,
                "writable-in-transmit",
                Buffer::writable(GuestAddr(4096), 100),
            ),
            (false, "outside-memory", Buffer::writable(outside, 2048)),
            (
                false,
                "chain-shorter-than-header",
                Buffer::writable(GuestAddr(4096), 11),
            ),
            (
                false,
                "readable-in-receive",
                Buffer::readable(GuestAddr(4096), 2048),
            ),
        ] {
            let (mut guest, mut lane, wire) = own_queue(over, Offloads::NONE);
            let driver = if is_sent {
                &mut guest.from_guest
            } else {
                &mut guest.to_guest
            };
            driver.add(&[buffer]).expect("room");
            driver.publish();
            let mut polled = lane.poll(&mut Others::default());
            if !is_sent && over.placement != Placement::Direct {
                polled.expect("nothing is looked at");
                wire.lock().expect("no panic").arrive(&frame(MAC, TO, 60));
                polled = lane.poll(&mut Others::default());
            }
            let fault = polled.map(|_| ()).expect_err("a fault");
            assert_eq!(fault.name(), reason, "{:?}", over.placement);
        }
    }
}

/// The same frame over and over.
#[test]
fn buffer_that_is_available_many_times_at_once_is_sent_as_often() {
    for over in ways() {
        let (mut guest, mut lane, wire) = own_queue(over, Offloads::NONE);
        guest.send(&frame(TO, MAC, 60));
        let ring = guest.from_guest.split();
        (0..64).for_each(|at| ring.set_avail_entry(at, 0));
        ring.set_avail_idx(64);
        (0..8).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
        assert_eq!(sent(&wire), vec![frame(TO, MAC, 60); 64], "{:?}", over.placement);
    }
}

/// The largest queue that there is has 32,768 entries.
#[test]
fn queues_of_one_entry_and_of_the_most_move_frames() {
    for over in ways() {
        for (packed, entries) in [(false, 1), (false, 32_768), (true, 1), (true, 3), (true, 32_768)] {
            let features = QueueFeatures {
                packed,
                ..QueueFeatures::default()
            };
            let memory = over.memory(1 << 23);
            let (mut guest, pair) = Port::new(memory, entries, features, Offloads::all());
            let (mut lane, wire) = over.lane(pair, &guest.memory, &guest.counters);
            let case = format!("{:?}, packed: {packed}, {entries} entries", over.placement);
            let mut poll = || (0..4).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
            guest.post(1);
            for round in 0..5 {
                let (there, back) = (frame(TO, MAC, 60 + round), frame(MAC, TO, 1514 - round));
                guest.send(&there);
                poll();
                wire.lock().expect("no panic").arrive(&back);
                poll();
                assert_eq!((sent(&wire), guest.take()), (vec![there], vec![back]), "{case}");
                assert!(guest.from_guest.take_used().is_some(), "{case}");
                guest.send_gso(TO, MAC, 40_000, 1000);
                poll();
                assert_eq!(sent(&wire).len(), 1 + 40, "{case}");
                assert!(guest.from_guest.take_used().is_some(), "{case}");
                wire.lock().expect("no panic").sent.clear();
            }
        }
    }
}

#[test]
fn checksum_at_any_place_is_completed() {
    let plain = frame(TO, MAC, 1000);
    for over in ways() {
        let (mut guest, mut lane, wire) = own_queue(over, Offloads::all());
        let mut expected = Vec::new();
        for (start, offset) in [(0, 0), (14, 2), (15, 3), (34, 16), (900, 98), (998, 0)] {
            let mut header = [0; HEADER as usize];
            header[0] = 1;
            header[6..8].copy_from_slice(&u16::to_le_bytes(start));
            header[8..10].copy_from_slice(&u16::to_le_bytes(offset));
            guest.send_with(header, &plain);
            let mut completed = plain.clone();
            checksum::complete(&mut completed, ChecksumAt { start, offset }).expect("inside");
            expected.push(completed);
        }
        (0..4).for_each(|_| _ = lane.poll(&mut Others::default()).expect("no fault"));
        assert!(sent(&wire) == expected, "{:?}", over.placement);
        assert_eq!(guest.counters.from_guest_checksums.get(), 6);
    }
}
