//! Coalescing: any frames from the network, whole flows with what a fuzzer does to them.
//!
//! Invariants: every frame is delivered once; those of one flow in their order, and what belongs to no flow in its
//! place; a frame that is delivered alone is as it came; a GSO packet fits the room that there was, and cut again by
//! `packet::segment` it is the frames that it was made of, but for what merging gives up (timestamps, ids with "don't
//! fragment", which segment had PSH and FIN).

use packet::coalesce::{MOST_FRAMES, Rules};
use reference::{Spec, batch_of, check, deliver, write_sums};

#[path = "../../crates/packet/src/coalesce/tests/reference.rs"]
mod reference;

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
    let steps = input.frames.iter().take(MOST_FRAMES);
    let frames: Vec<_> = steps
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
    let room = |turn: usize| u32::from(input.rooms[turn % 4]);
    let delivered = deliver(&batch_of(rules, &frames), &frames, room);
    check(&delivered, &frames, room);
}

/// Of `sent`, the flow's sequence number and id, a frame is made, and they go on.
fn make(step: &Step, sent: &mut (u32, u16)) -> Vec<u8> {
    let [v6, udp, tagged, stamped] = [0, 1, 2, 3].map(|bit| step.flow & 1 << bit != 0);
    let spec = Spec {
        v6,
        udp,
        vlan: tagged.then_some(7),
        ports: (u16::from(step.flow >> 4), 9),
        seq: sent.0,
        id: sent.1,
        flags: 0x10 | step.flags,
        stamps: stamped.then_some((1, 1)),
        payload: vec![step.payload ^ sent.0 as u8; usize::from(step.payload)],
        ..Spec::default()
    };
    let mut frame = spec.frame();
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
        *sent = (
            sent.0.wrapping_add(u32::from(step.payload)),
            sent.1.wrapping_add(1),
        );
    }
    frame
}

fn change(frame: &mut [u8], at: u8, add: u8) {
    if let Some(byte) = frame.get_mut(usize::from(at)) {
        *byte = byte.wrapping_add(add);
    }
}
