//! An AF_XDP socket on queue 0 of a pair, whose buffers are compared byte by byte.

use std::os::fd::AsFd;
use std::sync::Arc;

use steer::{Mode, Program};
use testkit::wait;
use xsk::metadata::forget;
use xsk::{
    AttachMode, Frame, FramePool, OwnMemory, QueueId, RxDesc, Socket, SocketConfig, Umem, UmemOffset,
    XDP_PACKET_HEADROOM,
};

use super::{Pair, bare};

const CHUNK: u32 = 2048;
/// The content of a chunk before a frame is received.
pub(crate) const UNTOUCHED: u8 = 0xa5;
/// Bytes checked before the frame: room for the longest header and some.
pub(crate) const BEFORE: usize = 32;

/// Where a received frame starts in a chunk.
fn frame_start(chunk: &Frame) -> UmemOffset {
    UmemOffset::new(chunk.offset().get() + u64::from(XDP_PACKET_HEADROOM))
}

pub(crate) struct Receiver {
    pub(crate) socket: Socket,
    pub(crate) umem: Umem,
    pub(crate) pool: FramePool,
    reads_hints: bool,
}

impl Receiver {
    pub(crate) fn open(pair: &Pair, program: &Program) -> Self {
        Self::open_for(pair.ifindex(), program, false)
    }

    /// One whose queue the program gives frames.
    pub(crate) fn of_queue_0(pair: &Pair, program: &Program) -> Self {
        let receiver = Self::open(pair, program);
        let socket = receiver.socket.as_fd();
        program.enable_queue(0, socket, bare(1514)).expect("queue 0");
        receiver
    }

    /// The next frame, of which that many bytes are before it; its chunk is posted again.
    pub(crate) fn take(&mut self, before: usize) -> (Vec<u8>, Vec<u8>) {
        let desc = self.next();
        let data = desc.data.get();
        let taken = (
            self.bytes(data - before as u64, before),
            self.bytes(data, desc.len as usize),
        );
        self.pool.put(desc.frame);
        self.post();
        taken
    }

    /// Old metadata in a chunk is erased before the kernel gets it.
    pub(crate) fn reading_hints(pair: &Pair, program: &Program) -> Self {
        Self::open_for(pair.ifindex(), program, true)
    }

    /// A receiver on queue 0 of any interface.
    pub(crate) fn open_for(ifindex: u32, program: &Program, reads_hints: bool) -> Self {
        let memory = OwnMemory::new(64 * CHUNK as usize).expect("128 KiB");
        let umem = Umem::aligned(Arc::new(memory), CHUNK, 0).expect("valid chunks");
        let mut config = SocketConfig::new(ifindex, QueueId(0));
        config.tx = None;
        config.bind_timeout = wait::SOON;
        config.attach = match program.mode() {
            Mode::Native => AttachMode::Native,
            Mode::Skb | Mode::Tap => AttachMode::Skb,
        };
        let socket = Socket::open(&umem, &config).expect("veth takes a socket");
        let pool = umem.all_frames().expect("first time").collect();
        let mut receiver = Self {
            socket,
            umem,
            pool,
            reads_hints,
        };
        receiver.post();
        receiver
    }

    /// Marks the free chunks and gives them to the kernel.
    pub(crate) fn post(&mut self) {
        let mut fresh = FramePool::default();
        while let Some(frame) = self.pool.take() {
            self.umem
                .write(frame.offset(), &[UNTOUCHED; CHUNK as usize])
                .expect("inside");
            if self.reads_hints {
                forget(&self.umem, frame_start(&frame));
            }
            fresh.put(frame);
        }
        self.pool = fresh;
        self.socket.fill.refill(&mut self.pool, 64);
    }

    pub(crate) fn next(&mut self) -> RxDesc {
        wait::until_some(wait::SOON, || self.socket.rx.peek(1).next())
            .unwrap_or_else(|| panic!("no frame came: {:?}", self.socket.statistics()))
    }

    pub(crate) fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.umem.read(UmemOffset::new(at), &mut bytes).expect("inside");
        bytes
    }
}
