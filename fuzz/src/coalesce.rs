//! Coalescing: any frames from the network, whole flows with what a fuzzer does to them.
//!
//! Invariants: every frame is delivered once; those of one flow in their order, and what belongs to no flow in its
//! place; a frame that is delivered alone is as it came; a GSO packet fits the room that there was, and cut again by
//! `packet::segment` it is the frames that it was made of, but for what merging gives up (timestamps, ids with "don't
//! fragment", which segment had PSH and FIN).

use packet::HEADERS_MAX;
use packet::checksum::{self, Sum};
use packet::coalesce::{Batch, MOST_FRAMES, Position, Rules, Run};
use packet::layers::{Ip, Layers, Transport, parse};
use packet::segment::{Plan, Request};
use packet::tunnel;
use packet::verify::{self, Verdict};

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    rules: [bool; 5],
    rooms: [u16; 4],
    frames: Vec<Step>,
}

/// The next segment of a flow, changed.
#[derive(arbitrary::Arbitrary, Debug)]
struct Step {
    /// Low bits: version, transport, tag, timestamps; the others: which port.
    flow: u8,
    payload: u8,
    /// Low bits of TCP's flags; ACK is set.
    flags: u8,
    partial: bool,
    /// Where, and what is added there, before checksums are written.
    edits: Vec<(u8, u8)>,
    /// The same afterwards.
    breaks: Option<(u8, u8)>,
    padding: u8,
    /// The flow goes on as if this one had not been sent.
    lost: bool,
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let mut sent = [(1u32, 1u16); 256];
    let mut frames: Vec<_> = input.frames.iter().take(MOST_FRAMES).collect();
    let frames: Vec<Vec<u8>> = frames
        .drain(..)
        .map(|step| make(step, &mut sent[usize::from(step.flow)]))
        .collect();
    let [tcp4, tcp6, ecn, udp4, udp6] = input.rules;
    let rules = Rules {
        tcp4,
        tcp6,
        ecn,
        udp4,
        udp6,
    };
    let mut batch = Batch::new(rules);
    for frame in &frames {
        let headers = &frame[..frame.len().min(HEADERS_MAX)];
        assert!(batch.add(headers, frame.len() as u32, |layers| judge(frame, layers)));
    }
    let (mut position, mut order) = (Position::default(), Vec::new());
    let mut turn = 0;
    while let Some(run) = batch.run(&position, u32::from(input.rooms[turn % 4])) {
        check(&batch, &run, &frames, u32::from(input.rooms[turn % 4]));
        order.extend(batch.members(&run).map(|(number, _)| number));
        batch.advance(&mut position, &run);
        turn += 1;
    }
    check_order(&order, &frames);
}

fn judge(frame: &[u8], layers: &Layers) -> Verdict {
    if let Some((inner, _)) = tunnel::unfinished(frame, layers) {
        assert!(inner.at.field() + 2 <= inner.end as usize && inner.end as usize <= frame.len());
    }
    let transport = &frame[usize::from(layers.transport)..layers.ip_len_end as usize];
    verify::verify(frame, layers, true, || Sum::of(transport))
}

/// What is delivered as one.
fn check(batch: &Batch, run: &Run, frames: &[Vec<u8>], room: u32) {
    let mut first = frames[run.first()].clone();
    batch.rewrite(run, &mut first);
    let mut bytes = Vec::new();
    for (number, range) in batch.members(run) {
        let frame = if number == run.first() {
            &first
        } else {
            &frames[number]
        };
        bytes.extend(&frame[range.start as usize..range.end as usize]);
    }
    assert_eq!(bytes.len(), run.bytes() as usize);
    let header = batch.header(run);
    if run.frames() == 1 {
        assert_eq!(bytes, frames[run.first()]);
        assert_eq!(header[1..6], [0; 5]);
        return;
    }
    assert!(run.bytes() <= room);
    let request = Request::from_header(&header).expect("a good header");
    let gso = request.gso.expect("a GSO packet");
    let plan = Plan::new(&bytes, bytes.len() as u32, gso).expect("a good GSO packet");
    assert_eq!(
        (plan.segments() as usize, request.csum),
        (run.frames(), Some(plan.checksum_at()))
    );
    let layers = parse(&bytes, bytes.len() as u32).expect("was planned");
    for (index, (number, _)) in (0..).zip(batch.members(run)) {
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        let payload = plan.payload(index);
        segment.extend(&bytes[payload.start as usize..payload.end as usize]);
        assert_eq!(
            without_what_is_given_up(&segment, &layers),
            without_what_is_given_up(&frames[number], &layers),
            "frame {number}"
        );
    }
}

/// Nothing lost or repeated, nothing overtaken in its flow.
fn check_order(order: &[usize], frames: &[Vec<u8>]) {
    let flows: Vec<_> = frames.iter().map(|frame| flow_of(frame)).collect();
    for (at, &number) in order.iter().enumerate() {
        for &later in &order[at..] {
            let apart = flows[number].is_some() && flows[later].is_some() && flows[number] != flows[later];
            assert!(number <= later || apart, "{later} was overtaken by {number}");
        }
    }
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..frames.len()).collect::<Vec<_>>());
}

fn flow_of(frame: &[u8]) -> Option<Vec<u8>> {
    let layers = parse(frame, frame.len() as u32)?;
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    let addresses = match layers.version {
        Ip::V4 => &frame[ip + 12..ip + 20],
        Ip::V6 => &frame[ip + 8..ip + 40],
    };
    let protocol = [layers.transport_kind.protocol()];
    Some([addresses, &protocol, &frame[transport..transport + 4]].concat())
}

/// Of `sent`, the flow's sequence number and id, a frame is made, and they go on.
fn make(step: &Step, sent: &mut (u32, u16)) -> Vec<u8> {
    let [v6, udp, tagged, stamped] = [0, 1, 2, 3].map(|bit| step.flow & 1 << bit != 0);
    let payload = vec![step.payload ^ sent.0 as u8; usize::from(step.payload)];
    let mut frame = vec![2; 12];
    if tagged {
        frame.extend([0x81, 0, 0, 7]);
    }
    frame.extend(if v6 { [0x86, 0xdd] } else { [8, 0] });
    let transport = transport_header(step, *sent, udp, stamped);
    let len = (transport.len() + payload.len()) as u16;
    let protocol = if udp { 17 } else { 6 };
    if v6 {
        frame.extend([0x60, 0, 0, 0, (len >> 8) as u8, len as u8, protocol, 64]);
        frame.extend([0xfd; 32]);
    } else {
        let total = (len + 20).to_be_bytes();
        let id = sent.1.to_be_bytes();
        frame.extend([
            0x45, 0, total[0], total[1], id[0], id[1], 0x40, 0, 64, protocol, 0, 0,
        ]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    }
    frame.extend(transport);
    frame.extend(&payload);
    for &(at, add) in &step.edits {
        change(&mut frame, at, add);
    }
    write_sums(&mut frame, step.partial);
    if let Some((at, add)) = step.breaks {
        change(&mut frame, at, add);
    }
    frame.extend(vec![
        0;
        usize::from(step.padding % 8)
            * usize::from(step.padding > 200)
    ]);
    if !step.lost {
        *sent = (sent.0.wrapping_add(payload.len() as u32), sent.1.wrapping_add(1));
    }
    frame
}

fn transport_header(step: &Step, (sequence, _): (u32, u16), udp: bool, stamped: bool) -> Vec<u8> {
    let mut header = vec![0, step.flow >> 4, 0, 9];
    if udp {
        header.extend((8 + u16::from(step.payload)).to_be_bytes());
        header.extend([0; 2]);
        return header;
    }
    header.extend(sequence.to_be_bytes());
    header.extend([
        0,
        0,
        0,
        5,
        if stamped { 0x80 } else { 0x50 },
        0x10 | step.flags,
        1,
        0,
        0,
        0,
        0,
        0,
    ]);
    if stamped {
        header.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1]);
    }
    header
}

fn change(frame: &mut [u8], at: u8, add: u8) {
    if let Some(byte) = frame.get_mut(usize::from(at)) {
        *byte = byte.wrapping_add(add);
    }
}

/// Checksums of IPv4's header and of the transport, the latter partial or whole.
fn write_sums(frame: &mut [u8], partial: bool) {
    let Some(layers) = parse(frame, frame.len() as u32) else {
        return;
    };
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    if layers.version == Ip::V4 {
        let end = ip + usize::from(frame[ip] & 15) * 4;
        frame[ip + 10..ip + 12].fill(0);
        let sum = Sum::of(&frame[ip..end]).complement();
        frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
    }
    let offset = layers.transport_kind.checksum_offset();
    let pseudo = verify::pseudo(frame, &layers).fold();
    let at = transport + usize::from(offset);
    frame[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
    if !partial {
        let end = layers.ip_len_end as usize;
        checksum::complete(&mut frame[..end], layers.checksum_at()).expect("inside");
    }
}

/// A segment that compares with another: see the module's head.
fn without_what_is_given_up(frame: &[u8], layers: &Layers) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    if layers.version == Ip::V4 && frame[ip + 6] & 0x40 != 0 {
        frame[ip + 4..ip + 6].fill(0);
    }
    if layers.transport_kind == Transport::Tcp {
        frame[transport + 13] &= !9;
        blank_stamps(&mut frame[transport + 20..usize::from(layers.payload)]);
    }
    write_sums(&mut frame, false);
    frame
}

fn blank_stamps(options: &mut [u8]) {
    let mut at = 0;
    while let Some(&kind) = options.get(at) {
        let len = usize::from(*options.get(at + 1).unwrap_or(&0));
        match kind {
            0 => return,
            1 => at += 1,
            8 if len == 10 && at + 10 <= options.len() => return options[at + 2..at + 10].fill(0),
            _ => at += len.max(2),
        }
    }
}
