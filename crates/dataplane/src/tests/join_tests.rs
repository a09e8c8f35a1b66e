//! Segments that a NIC received, joined for a guest that accepts GSO packets: through a network's uplink, and through a
//! queue of the guest's own. Which frames may be joined is tested in `packet::coalesce`.

use packet::checksum;
use packet::segment::{Plan, Request};
use virtqueue::QueueFeatures;

use crate::tests::fairness_tests::gso_packet;
use crate::tests::network_tests::{STRANGER, World, fdb_port, mac};
use crate::tests::test_guest::HEADER;
use crate::tests::test_nic::Over;
use crate::tests::test_port::Port;
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use model::config::Placement;

/// A frame that a guest got, behind the first ten bytes of its virtio-net header.
type Delivered = ([u8; 10], Vec<u8>);

/// Payload of a segment.
const SIZE: u16 = 300;

/// Frames that arrive: segments of a GSO packet, between them one of another flow, and two of its flow that are spoiled.
/// How they are delivered to a guest that accepts GSO packets.
fn arrivals() -> (Vec<Vec<u8>>, Vec<Delivered>) {
    let (header, whole) = gso_packet(mac(0), STRANGER, 4 * usize::from(SIZE), SIZE);
    let gso = Request::from_header(&header)
        .expect("good")
        .gso
        .expect("asked for");
    let plan = Plan::new(&whole, whole.len() as u32, gso).expect("good");
    let cut = |index| {
        let payload = plan.payload(index);
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        segment.extend(&whole[payload.start as usize..payload.end as usize]);
        checksum::complete(&mut segment, plan.checksum_at()).expect("inside");
        segment
    };
    let segments: Vec<_> = (0..plan.segments()).map(cut).collect();
    let mut other = segments[0].clone();
    other[34] ^= 1;
    // Its checksum is wrong now, and so is that of the last one: both are delivered unchanged, without flags.
    let mut wrong = segments[3].clone();
    wrong[60] ^= 1;
    let frames = [
        &segments[..2],
        std::slice::from_ref(&other),
        &segments[2..],
        &[wrong.clone()],
    ]
    .concat();
    (frames, vec![(header, whole), ([0; 10], other), ([0; 10], wrong)])
}

fn taken(port: &mut Port) -> Vec<Delivered> {
    let of = |bytes: Vec<u8>| {
        let (header, frame) = bytes.split_at(HEADER as usize);
        (header[..10].try_into().expect("ten bytes"), frame.to_vec())
    };
    port.got_with_headers().into_iter().map(of).collect()
}

/// What a guest gets of these frames by an own queue.
fn by_own_queue(frames: &[Vec<u8>], offloads: Offloads) -> Vec<Delivered> {
    let over = Over::new(Placement::Copy, 64);
    let (mut guest, pair) = Port::new(over.memory(1 << 20), 64, QueueFeatures::default(), offloads);
    guest.post(16);
    let (mut lane, wire) = over.lane(pair, &guest.memory, &guest.counters);
    for frame in frames {
        wire.lock().expect("no panic").arrive(frame);
    }
    lane.poll(&mut Others::default()).expect("no fault");
    taken(&mut guest)
}

/// The same by a network.
fn by_uplink(frames: &[Vec<u8>], offloads: Offloads) -> Vec<Delivered> {
    let mut world = World::offering(vec![fdb_port(0)], offloads).with_uplink(64);
    world.ports[0].post(16);
    world.poll();
    frames.iter().for_each(|frame| world.arrive(frame));
    world.poll();
    taken(&mut world.ports[0])
}

#[test]
fn segments_are_joined_for_a_guest_that_accepts_gso_packets_only() {
    let (frames, joined) = arrivals();
    for way in [by_own_queue, by_uplink] {
        assert_eq!(way(&frames, Offloads::all()), joined);
        let plain = way(&frames, Offloads::NONE).into_iter().map(|(_, frame)| frame);
        assert_eq!(plain.collect::<Vec<_>>(), frames);
    }
}
