//! A guest for tests of lanes: it sends frames, and receives some into buffers that it posts.

use std::sync::Arc;

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
    /// Addresses of its posted receive buffers, in the order in which they are used.
    pub(crate) buffers: Vec<GuestAddr>,
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
            buffers: Vec::new(),
        };
        (port, pair)
    }

    pub(crate) fn post(&mut self, buffers: usize) {
        let addrs = (0..buffers).map(|_| self.memory.ram.alloc(2048, 64).expect("memory is left"));
        let addrs: Vec<_> = addrs.collect();
        self.post_at(&addrs);
    }

    fn post_at(&mut self, addrs: &[GuestAddr]) {
        for &addr in addrs {
            self.to_guest.add(&[Buffer::writable(addr, 2048)]).expect("room");
        }
        self.buffers.extend(addrs);
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
        let bytes = [&[0; HEADER as usize][..], frame].concat();
        let addr = self.memory.put(&bytes).get();
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
        let before = self.buffers.clone();
        let taken = self.got();
        self.post_at(&before[..taken.len()]);
        taken
    }

    /// Frames that it has received, in order.
    pub(crate) fn got(&mut self) -> Vec<Vec<u8>> {
        let got = self.got_with_headers().into_iter();
        got.map(|mut bytes| bytes.split_off(HEADER as usize)).collect()
    }

    /// The same behind their virtio-net headers.
    pub(crate) fn got_with_headers(&mut self) -> Vec<Vec<u8>> {
        let used = std::iter::from_fn(|| self.to_guest.take_used());
        let ram = &self.memory.ram;
        used.map(|used| ram.read_vec(self.buffers.remove(0), used.len as usize))
            .collect()
    }
}
