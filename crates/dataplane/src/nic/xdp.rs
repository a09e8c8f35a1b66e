//! A NIC queue through an AF_XDP socket.
//!
//! In copy mode the kernel sends inside `sendto`, so [`XdpNic::kick`] takes as long as that. It repeats the call while
//! the kernel reports that its budget ran out (EAGAIN). The lane kicks again as long as descriptors are unsent, because
//! a driver may stop half-way and wait for another kick.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use device::meter::{self, KernelCall};
use xsk::{Frame, Kick, RxDesc, Socket, TxDesc, WakeError};

use crate::nic::queue::{LinkState, Nic};

/// Most `sendto` calls for one kick: enough for a batch at the kernel's default budget of 32 frames a call
/// (`TX_BATCH_SIZE`, net/xdp/xsk.c) and some older frames.
const MOST_CALLS: usize = 8;

/// See the module's head.
pub struct XdpNic {
    socket: Socket,
    /// Descriptors in the TX ring or the completion ring.
    unsent: usize,
    link: LinkState,
    /// Its drop undoes what has to be undone after the socket is closed. (The kernel itself removes the socket's entry
    /// in the program's map.)
    _guard: Box<dyn Send>,
}

impl XdpNic {
    /// Moves frames through `socket`, and drops `guard` when that is closed.
    pub fn new(socket: Socket, guard: impl Send + 'static) -> Self {
        Self {
            socket,
            unsent: 0,
            link: LinkState::Up,
            _guard: Box::new(guard),
        }
    }

    /// Whether the NIC moves frames by DMA from and to the UMEM.
    pub fn is_zero_copy(&self) -> bool {
        self.socket.mode() == xsk::Mode::ZeroCopy
    }

    /// The socket, for queries.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl Nic for XdpNic {
    #[inline]
    fn room_to_nic(&mut self) -> usize {
        self.socket.tx.free() as usize
    }

    #[inline]
    fn to_nic(&mut self, frames: impl ExactSizeIterator<Item = TxDesc>) {
        self.unsent += frames.len();
        let mut batch = self.socket.tx.reserve(frames.len() as u32);
        let mut given = 0;
        frames.for_each(|desc| {
            given += u64::from(!desc.more);
            batch.push(desc);
        });
        batch.submit();
        meter::count_delivered(given);
    }

    fn kick(&mut self) -> LinkState {
        if self.link == LinkState::Gone || (self.link == LinkState::Up && !self.socket.tx.needs_wakeup()) {
            return self.link;
        }
        self.link = LinkState::Up;
        for _ in 0..MOST_CALLS {
            match meter::call(KernelCall::Kick, || self.socket.kick_tx()) {
                Ok(Kick::Done | Kick::Busy) => break,
                Ok(Kick::Again) => {}
                // An unexpected error counts as an interface that is down: the next kick tries again.
                Err(WakeError::InterfaceDown | WakeError::Other(_)) => {
                    self.link = LinkState::Down;
                    break;
                }
                Err(WakeError::InterfaceGone) => {
                    self.link = LinkState::Gone;
                    self.unsent = 0;
                    break;
                }
            }
        }
        self.link
    }

    fn has_untaken(&mut self) -> bool {
        self.socket.tx.free() < self.socket.tx.size()
    }

    #[inline]
    fn unsent(&self) -> usize {
        self.unsent
    }

    #[inline]
    fn sent(&mut self, max: usize) -> impl Iterator<Item = Frame> + '_ {
        self.socket.completion.peek(max as u32)
    }

    #[inline]
    fn came_back(&mut self, frames: usize) {
        // `unsent` is 0 once the interface is gone.
        self.unsent = self.unsent.saturating_sub(frames);
    }

    #[inline]
    fn room_to_give(&mut self) -> usize {
        self.socket.fill.free() as usize
    }

    fn give(&mut self, frames: &mut Vec<Frame>, note: impl FnOnce(&[Frame])) {
        if !frames.is_empty() {
            let mut batch = self.socket.fill.reserve(frames.len() as u32);
            let room = batch.room() as usize;
            note(&frames[..room]);
            frames.drain(..room).for_each(|frame| batch.push(frame));
            batch.submit();
        }
        if self.socket.fill.needs_wakeup() {
            // An interface that is down or gone shows at the next transmit kick, or not at all.
            let _ = meter::call(KernelCall::Wake, || self.socket.wake_rx());
        }
    }

    #[inline]
    fn from_nic(&mut self, max: usize) -> impl ExactSizeIterator<Item = RxDesc> + '_ {
        self.received();
        self.socket.rx.peek(max as u32)
    }

    #[inline]
    fn received(&mut self) -> usize {
        if self.socket.busy_polls() && self.socket.rx.available() == 0 {
            // Makes the driver poll for frames. An interface that is down or gone shows at the next transmit kick, or
            // not at all.
            let _ = meter::call(KernelCall::Wake, || self.socket.wake_rx());
        }
        self.socket.rx.available() as usize
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn socket(&self) -> Option<Arc<OwnedFd>> {
        Some(self.socket.shared_fd())
    }

    fn has_edges(&self) -> bool {
        // poll(2) on a socket in zero-copy mode wakes its driver, which may wait for that (`xsk_poll`, net/xdp/xsk.c).
        !self.is_zero_copy() && !self.socket.busy_polls()
    }
}
