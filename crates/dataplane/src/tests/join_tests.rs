//! Segments that a NIC received, joined for a guest that accepts GSO packets: through a network's uplink, and through a
//! queue of the guest's own. Which frames may be joined is tested in `packet::coalesce`. And the buffers that they, and
//! frames, are written to.

use packet::checksum;
use packet::segment::{Plan, Request};
use virtqueue::QueueFeatures;

use crate::tests::fairness_tests::gso_packet;
use crate::tests::network_tests::{STRANGER, World, fdb_port, frame, mac};
use crate::tests::test_guest::HEADER;
use crate::tests::test_nic::{Over, PLACEMENTS};
use crate::tests::test_port::Port;
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use model::config::Placement;

/// A frame that a guest got, behind the first ten bytes of its virtio-net header.
type Delivered = ([u8; 10], Vec<u8>);

/// Payload of a segment.
const SIZE: u16 = 300;

/// A TCP packet with so many segments of these bytes, its header, and its segments with whole checksums.
fn packet(segments: usize, size: u16) -> ([u8; 10], Vec<u8>, Vec<Vec<u8>>) {
    let (header, whole) = gso_packet(mac(0), STRANGER, segments * usize::from(size), size);
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
    let frames = (0..plan.segments()).map(cut).collect();
    (header, whole, frames)
}

/// Frames that arrive: segments of a GSO packet, between them one of another flow, and two of its flow that are spoiled.
/// How they are delivered to a guest that accepts GSO packets.
fn arrivals() -> (Vec<Vec<u8>>, Vec<Delivered>) {
    let (header, whole, segments) = packet(4, SIZE);
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
    guest.take_merged()
}

/// The same by a network.
fn by_uplink(frames: &[Vec<u8>], offloads: Offloads) -> Vec<Delivered> {
    let mut world = World::offering(vec![fdb_port(0)], offloads).with_uplink(64);
    world.ports[0].post(16);
    world.poll();
    frames.iter().for_each(|frame| world.arrive(frame));
    world.poll();
    world.ports[0].take_merged()
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

/// A guest with so many chains of buffers of these lengths, which are posted again once they are used.
struct Chained {
    placement: Placement,
    packed: bool,
    offloads: Offloads,
    lengths: &'static [u32],
    count: usize,
    mergeable: bool,
    /// Frames that arrive at once.
    burst: usize,
}

impl Chained {
    /// What it gets of these frames, and how many were too long for their chain.
    fn gets(&self, frames: &[Vec<u8>]) -> (Vec<Delivered>, u64) {
        let over = Over {
            fill: 128,
            ..Over::new(self.placement, 128)
        };
        let features = QueueFeatures {
            packed: self.packed,
            ..QueueFeatures::default()
        };
        let (mut guest, mut pair) = Port::new(over.memory(1 << 22), 256, features, self.offloads);
        pair.to_guest.guest.mergeable = self.mergeable;
        let (mut lane, wire) = over.lane(pair, &guest.memory, &guest.counters);
        guest.post_chains(self.count, self.lengths);
        let (mut got, mut frames) = (Vec::new(), frames.chunks(self.burst));
        for _ in 0..100 {
            lane.poll(&mut Others::default()).expect("no fault");
            for frame in frames.next().into_iter().flatten() {
                wire.lock().expect("no panic").arrive(frame);
            }
            lane.poll(&mut Others::default()).expect("no fault");
            got.extend(guest.take_merged());
        }
        (got, guest.counters.to_guest_buffer_too_small.get())
    }
}

/// A guest that accepts all offloads, in copy placement.
fn joins(lengths: &'static [u32]) -> Chained {
    Chained {
        placement: Placement::Copy,
        packed: false,
        offloads: Offloads::all(),
        lengths,
        count: 8,
        mergeable: true,
        burst: 64,
    }
}

/// Whatever the packets are: the stream is complete and in order, and each header is right.
#[test]
fn segments_are_joined_as_far_as_there_are_buffers() {
    const MSS: u16 = 1448;
    let (_, whole, segments) = packet(40, MSS);
    let headers = whole.len() - 40 * usize::from(MSS);
    for (lengths, count) in [(&[200], 60), (&[1536], 5), (&[4096], 3), (&[1536], 1)] {
        let mut stream: Vec<u8> = Vec::new();
        let guest = Chained {
            lengths,
            count,
            ..joins(&[])
        };
        for (header, frame) in guest.gets(&segments).0 {
            let sequence = u32::from_be_bytes(frame[38..42].try_into().expect("four bytes"));
            let first = u32::from_be_bytes(whole[38..42].try_into().expect("four bytes"));
            assert_eq!(sequence.wrapping_sub(first) as usize, stream.len());
            let size = u16::from_le_bytes([header[4], header[5]]);
            let is_joined = frame.len() - headers > MSS.into();
            // A partial checksum of TCP over IPv4, or one that was verified.
            let expected = if is_joined { (1, 1, MSS) } else { (2, 0, 0) };
            assert_eq!((header[0], header[1], size), expected);
            let chains = (frame.len() + HEADER as usize).div_ceil(lengths[0] as usize);
            assert!(chains <= count);
            assert_eq!(
                u16::from_be_bytes([frame[16], frame[17]]) as usize,
                frame.len() - 14
            );
            stream.extend(&frame[headers..]);
        }
        assert!(stream == whole[headers..], "{count} buffers of {lengths:?} bytes");
    }
}

#[test]
fn packet_is_joined_in_one_chain_without_mergeable_buffers() {
    for lengths in [&[65_562][..], &[12, 65_550], &[4096; 17]] {
        for segments in [2, 40] {
            let (header, whole, frames) = packet(segments, 1448);
            let guest = Chained {
                mergeable: false,
                ..joins(lengths)
            };
            assert!(guest.gets(&frames).0 == [(header, whole)], "{lengths:?}");
        }
    }
}

#[test]
fn frames_fill_merged_buffers_and_chains_in_each_placement() {
    let frames =
        [14, 60, 187, 188, 189, 287, 288, 289, 388, 389, 588, 1514].map(|len| frame(mac(0), STRANGER, len));
    for (placement, packed) in PLACEMENTS.into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let guest = Chained {
            placement,
            packed,
            offloads: Offloads::NONE,
            count: 16,
            burst: 1,
            ..joins(&[])
        };
        let ways: [(&[u32], bool); 4] = [
            (&[200], true),
            (&[12, 2000], false),
            (&[1, 11, 1, 2000], false),
            (&[300, 300, 2000], false),
        ];
        for (lengths, mergeable) in ways {
            let chained = Chained {
                lengths,
                mergeable,
                ..guest
            };
            let got = chained.gets(&frames).0.into_iter().map(|(_, frame)| frame);
            assert!(got.eq(frames.iter().cloned()), "{placement:?} {lengths:?}");
        }
        // The second one is longer than the buffer.
        let small = Chained {
            lengths: &[512],
            mergeable: false,
            ..guest
        };
        let frames = [500, 501, 499].map(|len| frame(mac(0), STRANGER, len));
        let (got, too_small) = small.gets(&frames);
        let got: Vec<_> = got.into_iter().map(|(_, frame)| frame).collect();
        assert_eq!(
            (&got[..], too_small),
            (&[frames[0].clone(), frames[2].clone()][..], 1),
            "{placement:?}"
        );
    }
}
