//! Binding a socket over the UMEM of another one (`XDP_SHARED_UMEM`).
//!
//! # Theory of operation
//!
//! The memory is registered once, by the first socket. A further one is bound to another queue, of the same interface
//! or of any other, and names the first. It has rings of its own, all four, but no choice: mode, need_wakeup and
//! multi-buffer are those of the first socket (`xp_assign_dev_shared`, `net/xdp/xsk_buff_pool.c`), and a bind with any
//! of these flags is refused (`xsk_bind`, `net/xdp/xsk.c`). So the caller's request is compared here.
//!
//! The kernel needs the first socket at this moment only. It may be closed while others continue: the memory stays
//! registered until the last of them is closed. So any socket that is bound over the memory can be the *first* of a
//! further one, and a program that opens such sockets now and then keeps a [`Lender`] of each, which keeps none open.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags as Flags, SocketAddrXdpWithSharedUmem};
use rustix::net::{bind, sockopt};

use crate::bind::{self, Bound};
use crate::config::{AttachMode, BindRequest, Fallback, Mode, SocketConfig};
use crate::error::OpenError;
use crate::umem::Umem;
use crate::units::QueueId;

/// What a socket is bound to, and how.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) umem: Umem,
    pub(crate) ifindex: u32,
    pub(crate) queue: QueueId,
    pub(crate) mode: Mode,
    pub(crate) multi_buffer: bool,
}

/// A socket whose memory can be shared for as long as it is open.
#[derive(Clone, Debug)]
pub struct Lender {
    pub(crate) fd: Weak<OwnedFd>,
    pub(crate) facts: Facts,
}

impl Lender {
    /// The socket, to bind another over its memory; `None`: it is closed.
    pub fn first(&self) -> Option<First> {
        Some(First {
            fd: self.fd.upgrade()?,
            facts: self.facts.clone(),
        })
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        self.fd.strong_count() > 0
    }
}

/// A socket over whose memory another one is bound, with the facts for that. While the value exists, the first one's
/// queue does not become free.
#[derive(Debug)]
pub struct First {
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) facts: Facts,
}

impl AsFd for First {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl First {
    /// The kernel's unique number of the socket (`SO_COOKIE`).
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn cookie(&self) -> std::io::Result<u64> {
        Ok(sockopt::socket_cookie(&self.fd)?)
    }

    /// Whether a socket as `config` describes it can be bound over its memory.
    pub(crate) fn check(&self, config: &SocketConfig) -> Result<(), OpenError> {
        let SocketConfig { ifindex, queue, .. } = *config;
        if (ifindex, queue) == (self.facts.ifindex, self.facts.queue) {
            return Err(OpenError::SharedQueue { ifindex, queue });
        }
        let is_zero_copy = self.facts.mode == Mode::ZeroCopy;
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
            mode: self.facts.mode,
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
            Ok(()) => Ok(self.bound(config)),
            Err(errno) => Err(self.refusal(config, errno, may_ask)),
        }
    }

    /// What a sharer is that was bound.
    pub(crate) fn bound(&self, config: &SocketConfig) -> Bound {
        Bound {
            multi_buffer: self.facts.multi_buffer,
            fallbacks: self.fallbacks(config),
        }
    }

    /// What the kernel's answer to a sharer's bind means.
    pub(crate) fn refusal(&self, config: &SocketConfig, errno: Errno, may_ask: bool) -> OpenError {
        match errno {
            Errno::BADF => OpenError::SharedGone,
            errno => bind::refusal(config, self.facts.mode == Mode::ZeroCopy, errno, may_ask),
        }
    }

    fn fallbacks(&self, config: &SocketConfig) -> Vec<Fallback> {
        let differs = config.multi_buffer && !self.facts.multi_buffer;
        let fallback = || Fallback {
            tried: "multi-buffer",
            errno: 0,
            reason: "the socket whose UMEM is shared has none".to_owned(),
        };
        differs.then(fallback).into_iter().collect()
    }
}
