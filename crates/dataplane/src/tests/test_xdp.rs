//! Queues of AF_XDP sockets whose kernel the test plays.

use std::sync::Arc;

use common::binding::TX_METADATA_BYTES;
use xsk::{OwnMemory, RingSize, RxDesc, Socket, TestKernel, Umem, UmemOffset};

use crate::nic::endpoint::{Chunks, NicQueue};
use crate::nic::queue::Sends;
use crate::nic::xdp::XdpNic;

/// The kernel's half of a queue.
pub(crate) struct XdpWire {
    umem: Umem,
    pub(crate) kernel: TestKernel,
}

impl XdpWire {
    /// A queue with so many chunks of 2048 bytes to send, and entries of its rings.
    pub(crate) fn queue(chunks: usize, sends: Sends) -> (NicQueue<XdpNic>, Self) {
        let memory = OwnMemory::new(chunks * 2048).expect("memory");
        let metadata = if sends.checksum { TX_METADATA_BYTES } else { 0 };
        let umem = Umem::aligned(Arc::new(memory), 2048, 0).and_then(|umem| umem.with_tx_metadata(metadata));
        let umem = umem.expect("good");
        let size = RingSize::at_least(chunks as u32);
        let (socket, kernel) = Socket::with_test_kernel(&umem, size).expect("descriptors");
        let chunks = Chunks {
            pool: umem.all_frames().expect("ours").take(chunks).collect(),
            first: UmemOffset::new(0),
            umem: umem.clone(),
            to_receive: 0,
            backing: String::new(),
        };
        let queue = NicQueue::new(XdpNic::new(socket, ()), chunks, sends);
        (queue, Self { umem, kernel })
    }

    /// Sends what is in the ring; calls `read` with each piece.
    pub(crate) fn send(&mut self, mut read: impl FnMut(&Umem, &RxDesc)) -> usize {
        let TestKernel { tx, completion, .. } = &mut self.kernel;
        let sent = tx.peek(u32::MAX);
        let mut done = completion.reserve(sent.len() as u32);
        for piece in sent {
            read(&self.umem, &piece);
            done.push(piece.frame);
        }
        done.submit() as usize
    }

    /// The same, with the bytes of each piece, and whether more follow of its frame.
    #[cfg(test)]
    pub(crate) fn send_pieces(&mut self, mut take: impl FnMut(Vec<u8>, bool)) {
        self.send(|umem, desc| {
            let mut bytes = vec![0; desc.len as usize];
            umem.read(desc.data, &mut bytes).expect("inside");
            take(bytes, desc.more);
        });
    }

    /// Sends the frames in the ring; returns them.
    #[cfg(test)]
    pub(crate) fn take(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        self.send_pieces(|bytes, _| frames.push(bytes));
        frames
    }
}
