//! The kernel's half of a socket, played by a test: the rings are ordinary memory. It takes sent frames and completes
//! them; it receives none.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use super::{Facts, Socket};
use crate::config::Mode;
use crate::desc::{CompletionRing, Descriptor, FillRing, RxRing, TxRing};
use crate::ring::{Consumer, Heap, NEED_WAKEUP, Ordering, Producer, Shared};
use crate::umem::Umem;
use crate::units::{QueueId, RingSize};

/// See the module's head.
#[derive(Debug)]
pub struct TestKernel {
    /// Frames to send.
    pub tx: RxRing,
    /// Takes sent frames back.
    pub completion: FillRing,
    ring: Arc<Heap<Descriptor>>,
    /// Gets a datagram for each kick.
    kicks: OwnedFd,
}

impl Socket {
    /// A socket whose kernel a test plays, in copy mode. The kernel asks for no kicks.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn with_test_kernel(umem: &Umem, size: RingSize) -> io::Result<(Self, TestKernel)> {
        let (fd, kicks) = socketpair(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::NONBLOCK,
            None,
        )?;
        let (size, codec) = (size.get(), umem.codec());
        let (tx, rx) = (Heap::new(size), Heap::new(size));
        let (fill, completion) = (Heap::new(size), Heap::new(size));
        let kernel = TestKernel {
            tx: Consumer::new(Shared::heap(Arc::clone(&tx), size), codec),
            completion: Producer::new(Shared::heap(Arc::clone(&completion), size), codec),
            ring: Arc::clone(&tx),
            kicks,
        };
        let socket = Self {
            fill: FillRing::new(Shared::heap(fill, size), codec),
            completion: CompletionRing::new(Shared::heap(completion, size), codec),
            rx: RxRing::new(Shared::heap(rx, size), codec),
            tx: TxRing::new(Shared::heap(tx, size), codec),
            fd: Arc::new(fd),
            facts: Facts {
                umem: umem.clone(),
                ifindex: 0,
                queue: QueueId(0),
                mode: Mode::SkbCopy,
                multi_buffer: false,
            },
            busy_polls: false,
            fallbacks: Vec::new(),
        };
        Ok((socket, kernel))
    }
}

impl TestKernel {
    /// From now on it asks for kicks, as in copy mode.
    pub fn ask_for_kicks(&self) {
        self.ring.flags.store(NEED_WAKEUP, Ordering::Relaxed);
    }

    /// Kicks since the last call.
    pub fn kicks(&self) -> usize {
        let kick = || recv(&self.kicks, &mut [0_u8; 0][..], RecvFlags::DONTWAIT).ok();
        std::iter::from_fn(kick).count()
    }
}
