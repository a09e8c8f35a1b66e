//! A guest for tests of lanes: it sends frames, and receives some into buffers that it posts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use packet::ethernet::Mac;
use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{GuestAddr, Journal, QueueFeatures};

use crate::tests::fairness_tests::gso_packet;
use crate::tests::test_guest::{HEADER, Memory};
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::QueuePair;

/// A port with its guest.
pub(crate) struct Port {
    pub(crate) memory: Memory,
    pub(crate) from_guest: QueueDriver,
    pub(crate) to_guest: QueueDriver,
    pub(crate) counters: Arc<PairCounters>,
    /// Its posted chains of receive buffers, in the order in which they are used.
    posted: Vec<Vec<Buffer>>,
}

impl Port {
    /// A guest with that memory and queues of `size` entries, and the device's half of these.
    pub(crate) fn new(
        memory: Memory,
        size: u32,
        features: QueueFeatures,
        offloads: Offloads,
    ) -> (Self, QueuePair) {
        let vring = || memory.vring(size, features, Journal::None);
        let ((from, from_guest), (to, to_guest)) = (vring(), vring());
        let pair = memory.side(from, to, offloads);
        let port = Self {
            memory,
            from_guest,
            to_guest,
            counters: Arc::default(),
            posted: Vec::new(),
        };
        (port, pair)
    }

    pub(crate) fn post(&mut self, buffers: usize) {
        self.post_chains(buffers, &[2048]);
    }

    /// Posts so many chains of buffers of these lengths.
    pub(crate) fn post_chains(&mut self, chains: usize, lengths: &[u32]) {
        let buffer = |&len: &u32| {
            let addr = self.memory.ram.alloc(len.into(), 64).expect("memory is left");
            Buffer::writable(addr, len)
        };
        let chains: Vec<_> = (0..chains)
            .map(|_| lengths.iter().map(buffer).collect())
            .collect();
        self.post_again(chains);
    }

    fn post_again(&mut self, chains: Vec<Vec<Buffer>>) {
        for chain in &chains {
            self.to_guest.add(chain).expect("room");
        }
        self.posted.extend(chains);
        self.to_guest.publish();
    }

    /// Sends a frame; returns whether the driver would kick.
    pub(crate) fn send(&mut self, frame: &[u8]) -> bool {
        self.send_with([0; HEADER as usize], frame)
    }

    /// The same with a virtio-net header.
    pub(crate) fn send_with(&mut self, header: [u8; HEADER as usize], frame: &[u8]) -> bool {
        let bytes = [&header[..], frame].concat();
        let addr = self.memory.put(&bytes);
        self.from_guest
            .add(&[Buffer::readable(addr, bytes.len() as u32)])
            .expect("room");
        self.from_guest.publish()
    }

    /// Sends a frame behind an empty header, in descriptors of `piece` bytes.
    pub(crate) fn send_in_pieces(&mut self, frame: &[u8], piece: usize) {
        self.send_all_in_pieces(&[&[0; HEADER as usize][..], frame].concat(), piece);
    }

    /// The same of bytes that begin with a header.
    pub(crate) fn send_all_in_pieces(&mut self, bytes: &[u8], piece: usize) {
        let addr = self.memory.put(bytes).get();
        let descriptor = |at: usize| {
            let len = piece.min(bytes.len() - at);
            Buffer::readable(GuestAddr(addr + at as u64), len as u32)
        };
        let descriptors: Vec<_> = (0..bytes.len()).step_by(piece).map(descriptor).collect();
        self.from_guest.add(&descriptors).expect("room");
        self.from_guest.publish();
    }

    /// Sends a TCP packet with so many bytes of payload, to be segmented by `size`; returns the packet.
    pub(crate) fn send_gso(&mut self, to: Mac, from: Mac, payload: usize, size: u16) -> Vec<u8> {
        let (asked, packet) = gso_packet(to, from, payload, size);
        let mut header = [0; HEADER as usize];
        header[..asked.len()].copy_from_slice(&asked);
        self.send_with(header, &packet);
        packet
    }

    /// Frames that it has received; their buffers are posted again.
    pub(crate) fn take(&mut self) -> Vec<Vec<u8>> {
        let mut before = self.posted.clone();
        let taken = self.got();
        before.truncate(taken.len());
        self.post_again(before);
        taken
    }

    /// Frames that it has received, in order.
    pub(crate) fn got(&mut self) -> Vec<Vec<u8>> {
        let got = self.got_with_headers().into_iter();
        got.map(|mut bytes| bytes.split_off(HEADER as usize)).collect()
    }

    /// The same, each with the first ten bytes of its header, and out of as many chains as it took; these are posted
    /// again.
    pub(crate) fn take_merged(&mut self) -> Vec<([u8; 10], Vec<u8>)> {
        let (mut before, parts) = (self.posted.clone(), self.got_with_headers());
        before.truncate(parts.len());
        let is_full = |(chain, part): (&Vec<Buffer>, &Vec<u8>)| {
            let bytes: u32 = chain.iter().map(|buffer| buffer.len).sum();
            part.len() == bytes as usize
        };
        let mut full = before
            .iter()
            .zip(&parts)
            .map(is_full)
            .collect::<Vec<_>>()
            .into_iter();
        self.post_again(before);
        let (mut got, mut left) = (Vec::<([u8; 10], Vec<u8>)>::new(), 0);
        // Direct placement returns the chain of a frame that did not fit with nothing in it.
        for mut bytes in parts {
            let is_full = full.next().expect("one for each");
            if bytes.is_empty() {
                continue;
            }
            match got.last_mut().filter(|_| left > 0) {
                Some((_, frame)) => frame.extend(bytes),
                None => {
                    left = u16::from_le_bytes([bytes[10], bytes[11]]);
                    let frame = bytes.split_off(HEADER as usize);
                    got.push((bytes[..10].try_into().expect("ten bytes"), frame));
                }
            }
            left -= 1;
            assert!(left == 0 || is_full, "all chains but the last are full");
        }
        got
    }

    /// The same behind their virtio-net headers.
    pub(crate) fn got_with_headers(&mut self) -> Vec<Vec<u8>> {
        let mut got = Vec::new();
        while let Some(used) = self.to_guest.take_used() {
            let ram = &self.memory.ram;
            let chain = self.posted.remove(0).into_iter();
            let mut bytes: Vec<u8> = chain
                .flat_map(|buffer| ram.read_vec(buffer.addr, buffer.len as usize))
                .collect();
            bytes.truncate(used.len as usize);
            got.push(bytes);
        }
        got
    }
}

/// A thread of the guest that writes to its memory all the time. Ends when this is dropped.
pub(crate) struct Scribbler {
    goes_on: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.goes_on.store(false, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Writes these bytes at these addresses, over and over.
pub(crate) fn scribble(guest: &Port, writes: Vec<(GuestAddr, Vec<u8>)>) -> Scribbler {
    let (goes_on, ram) = (Arc::new(AtomicBool::new(true)), Arc::clone(&guest.memory.ram));
    let is_wanted = Arc::clone(&goes_on);
    let thread = std::thread::spawn(move || {
        while is_wanted.load(Ordering::Relaxed) {
            writes.iter().for_each(|(addr, bytes)| ram.write(*addr, bytes));
        }
    });
    let thread = Some(thread);
    Scribbler { goes_on, thread }
}

/// The same, of source addresses of the frame at this address: one of the MAC addresses, and 10 or 11 as the last byte
/// of the IPv4 address.
pub(crate) fn forge(guest: &Port, addr: GuestAddr, macs: [Mac; 2]) -> Scribbler {
    let at = |offset: u64| addr.checked_add(u64::from(HEADER) + offset).expect("inside");
    let sources = [(0, 10), (1, 11), (0, 11), (1, 10)];
    let writes = sources.map(|(mac, ip)| [(at(6), macs[mac].to_vec()), (at(29), vec![ip])]);
    scribble(guest, writes.concat())
}
