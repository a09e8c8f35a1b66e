//! The virtio-net header and the chain that it comes in, as the daemon judges them.
//!
//! Invariants: only a chain that is readable throughout, long enough, within the limit and without offloads that were
//! not accepted becomes a frame; the frame is exactly the bytes that follow the header, however descriptors cut them;
//! no segment of a GSO packet is longer than the limit.

use std::sync::Arc;

use dataplane::fuzzing::{Headers, Verdict};
use packet::checksum::ChecksumAt;
use virtqueue::driver::{Buffer, GuestRam, QueueDriver};
use virtqueue::{Chains, GuestAddr, MemoryMap, Queue, QueueFeatures, QueueStart, TrustedFiles};

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    legacy: bool,
    /// CSUM, HOST_TSO4, HOST_TSO6, HOST_ECN, HOST_USO.
    accepted: [bool; 5],
    frame_limit: u16,
    frames: Vec<Frame>,
}

#[derive(arbitrary::Arbitrary, Debug)]
struct Frame {
    header: [u8; 12],
    /// A header that asks for something is the rarer one.
    with_header: bool,
    len: u16,
    /// Lengths of descriptors; the last takes the rest.
    cuts: Vec<u8>,
    indirect: bool,
    /// The device may write to this one.
    writable: Option<u8>,
}

const SIZE: u16 = 64;
const AREA: u64 = 1 << 17;

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 18)]).expect("memory"));
    let features = QueueFeatures {
        indirect: true,
        ..QueueFeatures::default()
    };
    let mut driver = QueueDriver::for_device(&ram, SIZE.into(), features);
    let memory =
        Arc::new(MemoryMap::new(ram.regions().expect("descriptors"), 0, &TrustedFiles).expect("mapped"));
    let rings = driver.rings(&memory);
    let queue = Queue::new(&memory, rings, features, QueueStart::default()).expect("a good ring");
    let header = if input.legacy { 10 } else { 12 };
    let limit = u32::from(input.frame_limit);
    let mut headers = Headers::new(&memory, queue, header, limit);
    let accepted = Accepted(input.accepted);
    headers.accept(accepted.features());
    let area = ram.alloc(AREA, 64).expect("room");
    let mut chains = Chains::for_queue(driver.size(), 64);
    for frame in input.frames.iter().take(16) {
        let bytes = frame.bytes(header as usize);
        ram.write(area, &bytes);
        let buffers = frame.buffers(area, bytes.len());
        let added = if frame.indirect {
            driver.add_indirect(&buffers)
        } else {
            driver.add(&buffers)
        };
        if added.is_none() {
            break;
        }
        driver.publish();
        let Ok(1) = headers.queue().pop(&mut chains, 64) else {
            // Writable before readable: the ring's own fault.
            assert!(frame.writable.is_some(), "a good chain was refused");
            return;
        };
        let chain = chains.chains[0];
        let wanted = frame.expected(&bytes, (header as usize, limit), accepted);
        assert_eq!(headers.check(&chain, chains.buffers(&chain)), wanted, "{frame:?}");
        headers.queue().push_used(chain.id, 0);
        headers.queue().publish();
        driver.take_used();
    }
}

#[derive(Clone, Copy)]
struct Accepted([bool; 5]);

impl Accepted {
    fn features(self) -> u64 {
        const BITS: [u32; 5] = [0, 11, 12, 13, 56];
        let bits = BITS.into_iter().zip(self.0);
        bits.map(|(bit, has)| u64::from(has) << bit).sum()
    }

    /// Whether this kind of GSO packet may come.
    fn has(self, gso_type: u8) -> bool {
        let [csum, tso4, tso6, ecn, uso] = self.0;
        let kind = match gso_type & 0x7f {
            1 => tso4,
            4 => tso6,
            5 => uso && gso_type & 0x80 == 0,
            _ => false,
        };
        csum && kind && (ecn || gso_type & 0x80 == 0)
    }
}

impl Frame {
    fn bytes(&self, header: usize) -> Vec<u8> {
        let len = usize::from(self.len).max(1);
        let mut bytes: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
        let header = if self.with_header { self.header } else { [0; 12] }[..header.min(len)].to_vec();
        bytes[..header.len()].copy_from_slice(&header);
        bytes
    }

    fn buffers(&self, area: GuestAddr, len: usize) -> Vec<Buffer> {
        let mut at = 0;
        let mut buffers = Vec::new();
        for cut in self.cuts.iter().take(usize::from(SIZE) - 1) {
            let piece = usize::from(*cut).clamp(1, len - at);
            if at + piece == len {
                break;
            }
            buffers.push((at, piece));
            at += piece;
        }
        buffers.push((at, len - at));
        let make = |(i, &(at, len)): (usize, &(usize, usize))| Buffer {
            addr: area.checked_add(at as u64).expect("inside"),
            len: len as u32,
            writable: self.writable.map(usize::from) == Some(i),
        };
        buffers.iter().enumerate().map(make).collect()
    }

    /// What the rules say (VirtIO 1.3, 5.1.6.2).
    fn expected(&self, bytes: &[u8], (header, limit): (usize, u32), accepted: Accepted) -> Verdict {
        let pieces = self.buffers(GuestAddr(0), bytes.len());
        if pieces.iter().any(|buffer| buffer.writable) {
            return Verdict::Fault("writable-in-transmit");
        }
        if bytes.len() < header {
            return Verdict::Fault("chain-shorter-than-header");
        }
        let frame = bytes[header..].to_vec();
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let (needs_csum, gso_type, size) = (bytes[0] & 1 != 0, bytes[1], word(4));
        let at = ChecksumAt {
            start: word(6),
            offset: word(8),
        };
        let inside = usize::from(at.start) + usize::from(at.offset) + 2 <= frame.len();
        let fits = |most: usize| (14..=most).contains(&frame.len());
        match (needs_csum, gso_type) {
            (false, 0) if fits(limit as usize) => Verdict::Frame(frame),
            (true, 0) if accepted.0[0] && inside && fits(limit as usize) => Verdict::Checksum(frame, at),
            (true, kind) if accepted.has(kind) && size > 0 && inside && fits(65_557) => {
                Verdict::Cut(frame, size)
            }
            _ => Verdict::Drop,
        }
    }
}
