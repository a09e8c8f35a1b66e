//! A network interface, by an AF_XDP socket on its first queue.
//!
//! The kernel is called once for a batch of the guest's frames.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use steer::{Mode, ModeRequest, Program, QueueConf};
use xsk::{
    AttachMode, BindRequest, FramePool, Kick, OwnMemory, QueueId, RingSize, Socket, SocketConfig, TxDesc,
    Umem,
};

use super::{BATCH, LONGEST_FRAME, Sink};

const CHUNK_BYTES: u32 = 2048;
/// Entries of each ring, and chunks for each direction.
const RING: u32 = RingSize::DEFAULT.get();
const QUEUE: u32 = 0;

/// The socket, its memory, and the XDP program that feeds it for as long as this lives.
pub struct Xdp {
    socket: Socket,
    umem: Umem,
    pool: FramePool,
    /// Put, and not yet passed to the kernel.
    batch: Vec<TxDesc>,
    _program: Program,
}

impl Xdp {
    /// Opens the interface of that name, which is up, in the calling thread's network namespace. All frames of its
    /// first queue come here; none reaches the host.
    ///
    /// # Errors
    /// There is no such interface, it is down, or privileges are missing.
    pub fn open(name: &str) -> Result<Self> {
        let index = || netdevice::name_to_index(socket(AddressFamily::INET, SocketType::DGRAM, None)?, name);
        let ifindex = index().with_context(|| format!("there is no interface {name}: see `ip link`"))?;
        let program = Program::attach(ifindex, ModeRequest::Auto, false)?;
        let memory = OwnMemory::new((2 * RING * CHUNK_BYTES) as usize)?;
        let umem = Umem::aligned(Arc::new(memory), CHUNK_BYTES, 0)?;
        let mut pool: FramePool = umem.all_frames()?.collect();
        let config = SocketConfig {
            attach: match program.mode() {
                Mode::Native => AttachMode::Native,
                Mode::Skb | Mode::Tap => AttachMode::Skb,
            },
            bind: BindRequest::ForceCopy,
            max_tx_skb_budget: Some(RING),
            ..SocketConfig::new(ifindex, QueueId(QUEUE))
        };
        let mut socket = Socket::open(&umem, &config)?;
        // There is nothing to send: the kernel only checks the interface.
        let checked = socket.kick_tx();
        checked.with_context(|| format!("{name} does not work: try `ip link set {name} up`"))?;
        socket.fill.refill(&mut pool, RING);
        let conf = QueueConf {
            virtio_header: None,
            frame_limit: umem.max_frame_bytes().min(LONGEST_FRAME as u32),
            hints: false,
        };
        program.enable_queue(QUEUE, socket.as_fd(), conf)?;
        Ok(Self {
            socket,
            umem,
            pool,
            batch: Vec::with_capacity(BATCH),
            _program: program,
        })
    }
}

impl Sink for Xdp {
    fn room(&mut self) -> usize {
        if self.pool.len() < BATCH {
            self.pool.extend(self.socket.completion.peek(u32::MAX));
        }
        self.pool.len().min(BATCH - self.batch.len())
    }

    fn put(&mut self, frame: &[u8]) -> bool {
        let Some(chunk) = self.pool.take() else {
            return false;
        };
        // A chunk of the pool is in the UMEM, and the longest frame fits one.
        let _ = self.umem.write(chunk.offset(), frame);
        self.batch.push(TxDesc::whole(chunk, frame.len() as u32));
        true
    }

    fn flush(&mut self) -> Result<bool> {
        let mut sending = self.socket.tx.reserve(self.batch.len() as u32);
        let room = (sending.room() as usize).min(self.batch.len());
        for desc in self.batch.drain(..room) {
            sending.push(desc);
        }
        sending.submit();
        let mut is_done = true;
        if self.socket.tx.needs_wakeup() {
            // In copy mode the kernel sends within the call, as many frames as its budget allows.
            is_done = self.socket.kick_tx()? == Kick::Done;
        }
        self.pool.extend(self.socket.completion.peek(u32::MAX));
        Ok(is_done && self.batch.is_empty())
    }

    fn take(&mut self, frame: &mut Vec<u8>) -> Result<bool> {
        let Some(desc) = self.socket.rx.peek(1).next() else {
            return Ok(false);
        };
        frame.resize(desc.len as usize, 0);
        // A received frame is in the UMEM.
        let _ = self.umem.read(desc.data, frame);
        self.pool.put(desc.frame);
        self.socket.fill.refill(&mut self.pool, RING);
        if self.socket.fill.needs_wakeup() {
            self.socket.wake_rx()?;
        }
        Ok(true)
    }

    fn readable(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}
