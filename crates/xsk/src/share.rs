//! Binding a socket over the UMEM of another one (`XDP_SHARED_UMEM`).
//!
//! # Theory of operation
//!
//! The memory is registered once, by the first socket. A further one is bound to another queue, of the same interface
//! or of any other, and names the first. It has rings of its own, all four, but no say: mode, need_wakeup and
//! multi-buffer are those of the first socket (`xp_assign_dev_shared`, `net/xdp/xsk_buff_pool.c`), and a bind that asks
//! for any of them is refused (`xsk_bind`, `net/xdp/xsk.c`). So what the caller asks for is compared here.
//!
//! The kernel needs the first socket at this moment only. It may be closed while others go on: the memory stays
//! registered until the last of them is gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::bind;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags as Flags, SocketAddrXdpWithSharedUmem};

use crate::bind::{self, Bound};
use crate::config::{AttachMode, BindRequest, Fallback, Mode, SocketConfig};
use crate::error::OpenError;
use crate::units::QueueId;

/// The socket that has registered the memory, as far as its sharers must know it.
#[derive(Debug)]
pub(crate) struct First {
    /// A copy, closed when the sharer is bound: as long as it is open the queue is not free.
    pub(crate) fd: OwnedFd,
    pub(crate) ifindex: u32,
    pub(crate) queue: QueueId,
    pub(crate) mode: Mode,
    pub(crate) multi_buffer: bool,
}

impl First {
    /// Whether a socket as `config` describes it can be bound over its memory.
    pub(crate) fn check(&self, config: &SocketConfig) -> Result<(), OpenError> {
        let SocketConfig { ifindex, queue, .. } = *config;
        if (ifindex, queue) == (self.ifindex, self.queue) {
            return Err(OpenError::SharedQueue { ifindex, queue });
        }
        let is_zero_copy = self.mode == Mode::ZeroCopy;
        match config.bind {
            BindRequest::ForceCopy if is_zero_copy => Err(self.other_mode("copy")),
            BindRequest::ForceZeroCopy if !is_zero_copy => Err(self.other_mode("zero-copy")),
            _ if is_zero_copy && config.attach == AttachMode::Skb => Err(OpenError::ZeroCopyNeedsNative),
            _ => Ok(()),
        }
    }

    fn other_mode(&self, asked: &'static str) -> OpenError {
        OpenError::SharedMode {
            asked,
            mode: self.mode,
        }
    }

    /// Binds `fd`; `may_ask` as in [`bind::bind_queue`].
    pub(crate) fn bind_sharer(
        &self,
        fd: BorrowedFd<'_>,
        config: &SocketConfig,
        may_ask: bool,
    ) -> Result<Bound, OpenError> {
        let address = SocketAddrXdpWithSharedUmem {
            addr: SocketAddrXdp::new(Flags::XDP_SHARED_UMEM, config.ifindex, config.queue.0),
            shared_umem_fd: self.fd.as_fd(),
        };
        match bind::in_time(config, || bind(fd, &address)) {
            Ok(()) => Ok(Bound {
                multi_buffer: self.multi_buffer,
                fallbacks: self.fallbacks(config),
            }),
            Err(Errno::BADF) => Err(OpenError::SharedGone),
            Err(errno) => Err(bind::refusal(config, self.mode == Mode::ZeroCopy, errno, may_ask)),
        }
    }

    fn fallbacks(&self, config: &SocketConfig) -> Vec<Fallback> {
        let differs = config.multi_buffer && !self.multi_buffer;
        let fallback = || Fallback {
            tried: "multi-buffer",
            errno: 0,
            reason: "the socket whose UMEM is shared has none".to_owned(),
        };
        differs.then(fallback).into_iter().collect()
    }
}
