//! Sinks without a network: what the guest sends is counted, or given back to it, and frames for it are made here.

use std::collections::VecDeque;

use super::{FromGuest, LONGEST_FRAME, Sink, SinkCounts, SinkError, ToGuest};
use crate::layout::{NUMBER_AT, PATTERN_AT};

/// Most frames that wait for the guest in an [`Echo`]; what comes beyond is dropped.
const MOST_WAITING: usize = 1024;

/// Takes and counts. Makes so many frames for the guest, numbered.
pub struct Null {
    template: Vec<u8>,
    frames: u64,
    counts: SinkCounts,
    scratch: Box<[u8; LONGEST_FRAME]>,
}

impl Null {
    /// Makes `frames` frames of `frame_bytes` for the guest.
    #[must_use]
    pub fn new(frames: u64, frame_bytes: usize) -> Self {
        Self {
            template: template(frame_bytes.clamp(PATTERN_AT, LONGEST_FRAME)),
            frames,
            counts: SinkCounts::default(),
            scratch: Box::new([0; LONGEST_FRAME]),
        }
    }
}

/// A frame as the guest wants it: to everybody, with an EtherType for experiments, number 0.
fn template(len: usize) -> Vec<u8> {
    let head = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 9, 0x88, 0xb5];
    // Cut to a byte: the pattern is that.
    #[allow(clippy::cast_possible_truncation)]
    let pattern = |at| (at * 7 + 1) as u8;
    head.into_iter()
        .chain([0; PATTERN_AT - NUMBER_AT])
        .chain((PATTERN_AT..len).map(pattern))
        .collect()
}

impl Sink for Null {
    fn put(&mut self, frame: &FromGuest<'_>) {
        // Copied, as any real sink would have to.
        let len = frame.copy_into(&mut self.scratch[..]);
        self.counts.from_guest_frames += 1;
        self.counts.from_guest_bytes += len as u64;
    }

    fn take(&mut self, frames: &mut ToGuest) -> Result<(), SinkError> {
        while self.counts.to_guest_frames < self.frames {
            let number = self.counts.to_guest_frames.to_le_bytes();
            let added = frames.push(self.template.len(), |bytes| {
                bytes.copy_from_slice(&self.template);
                bytes[NUMBER_AT..PATTERN_AT].copy_from_slice(&number);
            });
            if !added {
                break;
            }
            self.counts.to_guest_frames += 1;
        }
        Ok(())
    }

    fn counts(&self) -> SinkCounts {
        self.counts
    }
}

/// Gives each frame back to the guest.
#[derive(Default)]
pub struct Echo {
    waiting: VecDeque<Vec<u8>>,
    /// Vectors to be used again.
    spare: Vec<Vec<u8>>,
    counts: SinkCounts,
}

impl Sink for Echo {
    fn put(&mut self, frame: &FromGuest<'_>) {
        self.counts.from_guest_frames += 1;
        self.counts.from_guest_bytes += frame.len() as u64;
        if self.waiting.len() == MOST_WAITING {
            self.counts.dropped += 1;
            return;
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.resize(frame.len(), 0);
        frame.copy_into(&mut copy);
        self.waiting.push_back(copy);
    }

    fn take(&mut self, frames: &mut ToGuest) -> Result<(), SinkError> {
        while frames.room() > 0
            && let Some(frame) = self.waiting.pop_front()
        {
            frames.push(frame.len(), |bytes| bytes.copy_from_slice(&frame));
            self.counts.to_guest_frames += 1;
            self.spare.push(frame);
        }
        Ok(())
    }

    fn discard(&mut self) -> usize {
        let count = self.waiting.len();
        self.waiting.clear();
        count
    }

    fn counts(&self) -> SinkCounts {
        self.counts
    }
}
