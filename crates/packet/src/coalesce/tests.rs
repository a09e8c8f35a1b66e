//! Each rule by an example, and properties of any frames.

mod properties;
mod reference;
mod rules;

use super::*;
use crate::HEADERS_MAX;
use crate::checksum::ChecksumAt;
use crate::segment::{Gso, GsoKind, Plan, Request};
use reference::*;

const ALL: Rules = Rules {
    tcp4: true,
    tcp6: true,
    ecn: true,
    udp4: true,
    udp6: true,
};

const ACK: u8 = 1 << 4;

impl Spec {
    /// The segment after this one, with as much payload.
    fn next(&self) -> Self {
        Self {
            id: self.id.wrapping_add(1),
            seq: self.seq.wrapping_add(self.payload.len() as u32),
            payload: self
                .payload
                .iter()
                .map(|byte| byte.wrapping_mul(3).wrapping_add(1))
                .collect(),
            ..self.clone()
        }
    }
}

fn coalesced(frames: &[Vec<u8>]) -> Vec<Delivered> {
    deliver(&batch_of(ALL, frames), frames, |_| u32::MAX)
}

fn coalesced_specs(specs: &[Spec]) -> Vec<Delivered> {
    coalesced(&specs.iter().map(Spec::frame).collect::<Vec<_>>())
}

/// The header of a frame that is delivered without a batch, if it may be.
fn header_alone(rules: Rules, frame: &[u8]) -> Option<NetHeader> {
    let headers = &frame[..frame.len().min(HEADERS_MAX)];
    let judged = |layers: &Layers| Some(judge(frame, layers));
    let header = Batch::new(rules).header_alone(headers, frame.len() as u32, judged);
    header.map(NetHeader::from)
}

/// Numbers of the frames in each delivered unit.
fn units(specs: &[Spec]) -> Vec<Vec<usize>> {
    coalesced_specs(specs)
        .into_iter()
        .map(|unit| unit.members)
        .collect()
}
