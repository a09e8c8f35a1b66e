//! Delivers frames of the embedding program to a guest's receive queue, with the negotiated virtio-net header.
//!
//! For programs that embed the device and have frames as bytes. The daemon uses other code, for frames in a
//! UMEM, which copies headers as little as possible.

use virtqueue::{Buffer, Chain, Chains};

use crate::counters::PairCounters;
use crate::hash::Report;
use crate::pair::{Cursor, Fault, HASH_HEADER_BYTES, Vring};

/// Maximum number of chains taken at a time, and so the maximum for one frame.
const BATCH: usize = 64;

/// A frame for the guest.
#[derive(Debug, Clone, Copy)]
pub struct Incoming<'a> {
    /// The frame, from its Ethernet header on.
    pub frame: &'a [u8],
    /// The virtio-net header up to `num_buffers`: zeros, unless an offload for the guest was negotiated.
    pub offload: [u8; 10],
    /// Its hash report, if that was negotiated.
    pub report: Report,
}

impl<'a> Incoming<'a> {
    /// A plain frame, with this hash report.
    #[must_use]
    pub fn plain(frame: &'a [u8], report: Report) -> Self {
        Self {
            frame,
            offload: [0; 10],
            report,
        }
    }

    fn header(&self, buffers: u16) -> [u8; HASH_HEADER_BYTES as usize] {
        let mut header = [0; HASH_HEADER_BYTES as usize];
        header[..10].copy_from_slice(&self.offload);
        header[10..12].copy_from_slice(&buffers.to_le_bytes());
        header[12..].copy_from_slice(&self.report.bytes());
        header
    }
}

/// Popped chains, and how many of them are used.
struct Hand<'a> {
    chains: &'a Chains,
    next: usize,
}

impl Vring {
    /// Delivers these frames to the guest, and calls it once. Returns how many are done: the rest must wait
    /// for buffers. A frame that can never fit is dropped and counted.
    ///
    /// # Errors
    /// The guest's fault.
    pub fn deliver(
        &mut self,
        frames: &[Incoming],
        chains: &mut Chains,
        counters: &PairCounters,
    ) -> Result<usize, Fault> {
        if !self.enabled {
            return Ok(0);
        }
        let most = BATCH.min(self.queue.size().get().into());
        self.pop_buffers(chains, most)?;
        let mut hand = Hand { chains, next: 0 };
        let (mut done, mut delivered) = (0, 0);
        for incoming in frames {
            let wanted = incoming.frame.len() + self.guest.header_bytes as usize;
            match hand.chains_for(wanted, self.guest.mergeable, most) {
                Room::Chains(count) => {
                    self.write(&hand.chains.chains[hand.next..][..count], hand.chains, incoming);
                    hand.next += count;
                    delivered += 1;
                    counters.to_guest_bytes.add(incoming.frame.len() as u64);
                }
                Room::Never => counters.to_guest_buffer_too_small.add(1),
                Room::Later => {
                    counters.to_guest_waits.add(1);
                    break;
                }
            }
            done += 1;
        }
        let unused = hand.chains.slots(hand.next);
        self.queue.unpop(unused);
        counters.to_guest_frames.add(delivered);
        self.publish(counters);
        Ok(done)
    }

    /// Writes header and frame into these chains, which have room for them.
    fn write(&mut self, over: &[Chain], chains: &Chains, incoming: &Incoming) {
        // At most BATCH.
        #[allow(clippy::cast_possible_truncation)]
        let header = incoming.header(over.len() as u16);
        let mut parts = [&header[..self.guest.header_bytes as usize], incoming.frame];
        for chain in over {
            let mut written = 0;
            for part in &mut parts {
                written = self.fill(chains.buffers(chain), written, part);
            }
            self.queue.push_used(chain.id, written);
        }
    }

    /// Writes as much of `part` as fits after the first `from` bytes, and cuts it off; returns the new `from`.
    fn fill(&self, buffers: &[Buffer], from: u32, part: &mut &[u8]) -> u32 {
        let mut written = from;
        for piece in Cursor::after(buffers, from).pieces(buffers) {
            let (now, later) = part.split_at(part.len().min(piece.len as usize));
            if now.is_empty() {
                break;
            }
            // Inside the map, as checked when the descriptor was read.
            let _ = self.guest.memory.copy_to_guest(piece.offset, now);
            let len = now.len() as u32;
            self.log_write(piece.offset, len);
            written += len;
            *part = later;
        }
        written
    }
}

/// Whether a frame fits.
enum Room {
    /// It fits into this many chains.
    Chains(usize),
    /// It may fit when there are more buffers.
    Later,
    /// It does not fit, even with more buffers.
    Never,
}

impl Hand<'_> {
    /// The chains for `wanted` bytes of header and frame. At most `batch` chains were requested by `pop`.
    fn chains_for(&self, wanted: usize, mergeable: bool, batch: usize) -> Room {
        let rest = &self.chains.chains[self.next..];
        let most = if mergeable { rest.len() } else { rest.len().min(1) };
        let mut left = wanted;
        for (at, chain) in rest[..most].iter().enumerate() {
            if chain.writable_bytes as usize >= left {
                return Room::Chains(at + 1);
            }
            left -= chain.writable_bytes as usize;
        }
        let in_vain = if mergeable { rest.len() == batch } else { most == 1 };
        if in_vain { Room::Never } else { Room::Later }
    }
}
