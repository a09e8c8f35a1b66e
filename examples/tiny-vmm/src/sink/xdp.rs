//! A network interface, by an AF_XDP socket on its first queue.
//!
//! Frames are copied between guest memory and the UMEM, a batch at a time, and the kernel is called once a batch.
//!
//! An interface that is down is none to begin with. While it is down later frames of the guest's are dropped and
//! counted, as by a network whose cable is out: for a guest that waited instead somebody would have to ask again and
//! again. What the kernel had not taken before leaves when it is up again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use steer::{AttachError, Mode, ModeRequest, Program, QueueConf, QueueError};
use xsk::{
    AttachMode, BindRequest, Frame, FramePool, Kick, MemoryError, OpenError, OwnMemory, QueueId, RingSize,
    Socket, SocketConfig, TxDesc, Umem, UmemError, WakeError,
};

use super::{BATCH, FromGuest, LONGEST_FRAME, Sink, SinkCounts, SinkError, ToGuest};

const CHUNK_BYTES: u32 = 2048;
/// Entries of each ring, and chunks for each direction.
const RING: u32 = 2048;
const QUEUE: u32 = 0;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// No such interface.
    #[error("there is no interface {name}: `ip link`")]
    Interface {
        /// Its name.
        name: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The XDP program.
    #[error("cannot attach the XDP program")]
    Attach(#[from] AttachError),
    /// Memory for frames.
    #[error("cannot make memory for frames")]
    Memory(#[from] MemoryError),
    /// Its division.
    #[error("cannot make a UMEM")]
    Umem(#[from] UmemError),
    /// The socket.
    #[error("cannot open the AF_XDP socket")]
    Open(#[from] Box<OpenError>),
    /// Nothing would leave it, and nothing come.
    #[error("{name} is down: `ip link set {name} up`")]
    Down {
        /// Name of the interface.
        name: String,
    },
    /// The program does not take it.
    #[error("cannot steer frames into the AF_XDP socket")]
    Steer(#[from] QueueError),
}

/// A socket and what belongs to it.
pub struct Xdp {
    socket: Socket,
    umem: Umem,
    pool: FramePool,
    /// Put, and not yet handed to the kernel.
    batch: Vec<TxDesc>,
    /// Received and copied, on their way back to the pool; empty between calls, kept for its memory.
    copied: Vec<Frame>,
    counts: SinkCounts,
    /// Handed to the kernel, and not come back.
    sending: u32,
    /// The kernel did not take all of it.
    is_pending: bool,
    /// The interface was down when the kernel was called last.
    is_down: bool,
    /// Frames of the queue come to the socket for as long as this lives.
    _program: Program,
}

impl Xdp {
    /// On the interface of that name, which is up, in the calling thread's network namespace. All frames of its first
    /// queue come here; none reaches the host.
    ///
    /// # Errors
    /// [`XdpError`].
    pub fn open(name: &str) -> Result<Self, XdpError> {
        let index = || netdevice::name_to_index(socket(AddressFamily::INET, SocketType::DGRAM, None)?, name);
        let ifindex = index().map_err(|source| XdpError::Interface {
            name: name.to_owned(),
            source: source.into(),
        })?;
        let program = Program::attach(ifindex, ModeRequest::Auto, false)?;
        let memory = OwnMemory::new((2 * RING * CHUNK_BYTES) as usize)?;
        let umem = Umem::aligned(Arc::new(memory), CHUNK_BYTES, 0)?;
        let mut pool: FramePool = umem.all_frames()?.collect();
        let mut socket = Socket::open(&umem, &config(ifindex, program.mode())).map_err(Box::new)?;
        // There is nothing to send; the kernel looks at the interface before.
        if let Err(WakeError::InterfaceDown) = socket.kick_tx() {
            return Err(XdpError::Down {
                name: name.to_owned(),
            });
        }
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
            copied: Vec::with_capacity(BATCH),
            counts: SinkCounts::default(),
            sending: 0,
            is_pending: false,
            is_down: false,
            _program: program,
        })
    }

    fn take_back_sent(&mut self) {
        let completed = self.socket.completion.peek(u32::MAX);
        // As many as were given to the kernel, at most.
        self.sending = self.sending.saturating_sub(completed.len() as u32);
        self.pool.extend(completed);
    }

    /// The kernel sends within the kick, in copy mode, as many as its budget allows.
    fn kick(&mut self) -> Result<(), SinkError> {
        (self.is_pending, self.is_down) = (false, false);
        if self.sending > 0 && self.socket.tx.needs_wakeup() {
            match self.socket.kick_tx() {
                Ok(kick) => self.is_pending = kick != Kick::Done,
                // Not pending: somebody would ask again and again.
                Err(WakeError::InterfaceDown) => self.is_down = true,
                Err(error) => return Err(error.into()),
            }
        }
        self.take_back_sent();
        Ok(())
    }
}

fn config(ifindex: u32, mode: Mode) -> SocketConfig {
    SocketConfig {
        attach: match mode {
            Mode::Native => AttachMode::Native,
            Mode::Skb | Mode::Tap => AttachMode::Skb,
        },
        bind: BindRequest::ForceCopy,
        rx: Some(RingSize::at_least(RING)),
        tx: Some(RingSize::at_least(RING)),
        fill: RingSize::at_least(RING),
        completion: RingSize::at_least(RING),
        max_tx_skb_budget: Some(RING),
        ..SocketConfig::new(ifindex, QueueId(QUEUE))
    }
}

impl Sink for Xdp {
    fn room(&mut self) -> usize {
        if self.is_down {
            // Is it still? Any other error the next flush will say.
            let _ = self.kick();
        }
        if self.is_down {
            return BATCH;
        }
        if self.pool.len() < BATCH {
            self.take_back_sent();
        }
        (self.pool.len()).min(BATCH - self.batch.len())
    }

    fn put(&mut self, frame: &FromGuest<'_>) {
        if self.is_down {
            self.counts.dropped += 1;
            return;
        }
        let Some(chunk) = self.pool.take() else {
            self.counts.dropped += 1;
            return;
        };
        // A chunk of the pool is in the UMEM, and the longest frame fits one.
        let _ = frame.copy_to_umem(&self.umem, chunk.offset());
        self.batch.push(TxDesc::whole(chunk, frame.len() as u32));
        self.counts.from_guest_frames += 1;
        self.counts.from_guest_bytes += frame.len() as u64;
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        let mut sending = self.socket.tx.reserve(self.batch.len() as u32);
        let room = (sending.room() as usize).min(self.batch.len());
        for desc in self.batch.drain(..room) {
            sending.push(desc);
        }
        self.sending += sending.submit();
        self.kick()
    }

    fn is_pending(&self) -> bool {
        self.is_pending || !self.batch.is_empty()
    }

    fn take(&mut self, frames: &mut ToGuest) -> Result<(), SinkError> {
        // No more than fit: what is received beyond waits in the ring.
        let received = self.socket.rx.peek(frames.room() as u32);
        if received.len() == 0 {
            return Ok(());
        }
        for desc in received {
            let added = frames.push(desc.len as usize, |bytes| {
                // A received frame is in the UMEM.
                let _ = self.umem.read(desc.data, bytes);
            });
            if added {
                self.counts.to_guest_frames += 1;
            } else {
                self.counts.dropped += 1;
            }
            self.copied.push(desc.frame);
        }
        self.pool.extend(self.copied.drain(..));
        self.socket.fill.refill(&mut self.pool, RING);
        if self.socket.fill.needs_wakeup() {
            match self.socket.wake_rx() {
                // Of an interface that is down nothing comes. It is asked again with what comes next.
                Ok(_) | Err(WakeError::InterfaceDown) => (),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn discard(&mut self) -> usize {
        let received = self.socket.rx.peek(RING);
        let count = received.len();
        self.pool.extend(received.map(|desc| desc.frame));
        self.socket.fill.refill(&mut self.pool, RING);
        if self.socket.fill.needs_wakeup() {
            // What is the matter the next call will say.
            let _ = self.socket.wake_rx();
        }
        count
    }

    fn readable(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn counts(&self) -> SinkCounts {
        self.counts
    }
}
