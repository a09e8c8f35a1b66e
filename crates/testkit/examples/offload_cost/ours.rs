//! Our side.

use std::hint::black_box;

use packet::HEADERS_MAX;
use packet::checksum::{self, Sum};
use packet::coalesce::{Batch, Position, Rules};
use packet::segment::{Gso, Plan, Request};
use packet::verify::{Verdict, verify};

use testkit::GsoPacket;

use crate::Work;

/// GSO packets that take turns: more than the first-level cache holds, as those of a guest that fills its ring.
const FRAMES: usize = 16;
/// Chunks that take turns, as in a UMEM.
const CHUNKS: usize = 512;

/// Segmentation, with copying and checksums or without.
pub(crate) fn segment(size: usize, copy: bool) -> Work {
    let gso_packet = super::gso_packet(size);
    let gso = gso(&gso_packet, size);
    let frames = vec![gso_packet.bytes(); FRAMES];
    let chunk_len = (gso_packet.header_len() + size).next_power_of_two();
    let mut chunks = vec![0u8; chunk_len * CHUNKS];
    let (mut turn, mut chunk) = (0, 0);
    let measured = move || {
        let frame = &frames[turn % FRAMES];
        turn += 1;
        // The daemon's first step is a private copy of the headers, too.
        let mut headers = [0; HEADERS_MAX];
        headers.copy_from_slice(&frame[..HEADERS_MAX]);
        let plan = Plan::new(&headers, frame.len() as u32, gso).expect("a good GSO packet");
        let header_len = plan.header_len();
        for index in 0..plan.segments() {
            let out = &mut chunks[chunk % CHUNKS * chunk_len..][..chunk_len];
            chunk += 1;
            let payload = plan.payload(index);
            plan.write_header(index, out);
            if copy {
                let payload = &frame[payload.start as usize..payload.end as usize];
                let len = header_len + payload.len();
                out[header_len..len].copy_from_slice(payload);
                checksum::complete(&mut out[..len], plan.checksum_at()).expect("in the header");
            } else {
                black_box(payload);
            }
            black_box(out);
        }
    };
    let what = if copy {
        "plan, headers, payload copied, checksums"
    } else {
        "plan, headers"
    };
    work(
        gso_packet.payload_len / size,
        gso_packet.payload_len,
        what,
        measured,
    )
}

/// Coalescing of a batch that is one GSO packet's segments, with verified or with partial checksums.
pub(crate) fn coalesce(size: usize, verified: bool) -> Work {
    let gso_packet = super::gso_packet(size);
    let mut segments = cut(&gso_packet, size, verified);
    // The batch in hand is the most that coalescing takes; the rest of a GSO packet of many segments is left out.
    segments.truncate(packet::coalesce::MOST_FRAMES);
    let (count, bytes) = (segments.len(), segments.len() * size);
    let mut sets = vec![segments; FRAMES];
    let rules = Rules {
        tcp4: true,
        tcp6: true,
        ecn: true,
        udp4: true,
        udp6: true,
    };
    let (mut batch, mut turn) = (Batch::new(rules), 0);
    let measured = move || {
        let set = &mut sets[turn % FRAMES];
        turn += 1;
        batch.clear();
        for frame in set.iter() {
            let added = batch.add(
                &frame[..frame.len().min(HEADERS_MAX)],
                frame.len() as u32,
                |layers| {
                    let sum = || Sum::of(&frame[usize::from(layers.transport)..layers.ip_len_end as usize]);
                    let verdict = verify(frame, layers, !verified, sum);
                    assert_ne!(verdict, Verdict::Unknown);
                    verdict
                },
            );
            assert!(added);
        }
        let mut position = Position::default();
        let run = batch.run(&position, u32::MAX).expect("at least one");
        assert_eq!(run.frames(), count, "they are merged");
        batch.advance(&mut position, &run);
        batch.members(&run).for_each(|member| {
            black_box(member);
        });
        // A copy: the set is needed again.
        let mut headers = [0; HEADERS_MAX];
        headers.copy_from_slice(&set[run.first()][..HEADERS_MAX]);
        batch.rewrite(&run, &mut headers);
        black_box((batch.header(&run), &headers));
    };
    let what = if verified {
        "headers compared, checksums verified"
    } else {
        "headers compared, checksums partial"
    };
    work(count, bytes, what, measured)
}

/// The segments, their checksums complete or partial.
fn cut(gso_packet: &GsoPacket, size: usize, complete: bool) -> Vec<Vec<u8>> {
    let (frame, gso) = (gso_packet.bytes(), gso(gso_packet, size));
    let plan = Plan::new(&frame, frame.len() as u32, gso).expect("a good GSO packet");
    let cut_one = |index| {
        let payload = plan.payload(index);
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        segment.extend(&frame[payload.start as usize..payload.end as usize]);
        if complete {
            checksum::complete(&mut segment, plan.checksum_at()).expect("in the header");
        }
        segment
    };
    (0..plan.segments()).map(cut_one).collect()
}

fn gso(gso_packet: &GsoPacket, size: usize) -> Gso {
    let request = Request::from_header(&gso_packet.request(size as u16)).expect("a good request");
    request.gso.expect("asked for")
}

/// Sums of `size` bytes.
pub(crate) fn checksum(size: usize, simd: bool) -> Work {
    let bytes: Vec<u8> = (0..size).map(|at| at as u8).collect();
    let sum = if simd { Sum::of } else { Sum::of_portable };
    // Enough of them at a time that the clock does not count.
    let times = (1 << 16) / size + 1;
    let measured = move || {
        for _ in 0..times {
            black_box(sum(black_box(&bytes)).fold());
        }
    };
    work(times, times * size, "sums of the same bytes", measured)
}

fn work(units: usize, bytes: usize, what: &str, measured: impl FnMut() + 'static) -> Work {
    Work {
        measured: Box::new(measured),
        taken_off: None,
        units,
        bytes,
        what: format!("ours: {what}"),
    }
}
