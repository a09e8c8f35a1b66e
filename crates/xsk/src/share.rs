//! Binds a socket to a queue over the UMEM of another socket (`XDP_SHARED_UMEM`).
//!
//! # Theory of operation
//!
//! The memory is registered once, by the first socket. A sharer is bound to another queue, of the same interface or of
//! any other, by the first's descriptor. It has its own rings, but cannot choose: mode, need_wakeup and multi-buffer
//! are those of the first socket (`xp_assign_dev_shared`, `net/xdp/xsk_buff_pool.c`), and a bind with any of these
//! flags is refused (`xsk_bind`, `net/xdp/xsk.c`). So the caller's request is compared with the first socket's here.
//!
//! The kernel needs the first socket only at this moment. It may be closed while others continue: the memory stays
//! registered until the last of them is closed. So any socket bound over the memory can be the *first* of another
//! one. A program that opens such sockets later keeps a [`Lender`] of each, which does not keep it open.

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
    /// The socket, to bind another over its memory; `None` if it is closed.
    pub fn first(&self) -> Option<First> {
        Some(First {
            fd: self.fd.upgrade()?,
            facts: self.facts.clone(),
        })
    }

    /// Whether the socket is open.
    pub fn is_open(&self) -> bool {
        self.fd.strong_count() > 0
    }
}

/// A socket whose memory another one will share, and its properties. While the value exists, its queue does
/// not become free.
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
    /// The kernel's error.
    pub fn cookie(&self) -> std::io::Result<u64> {
        Ok(sockopt::socket_cookie(&self.fd)?)
    }

    /// Checks that a socket with `config` can be bound over its memory.
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

    /// The result for a sharer that was bound.
    pub(crate) fn bound(&self, config: &SocketConfig) -> Bound {
        Bound {
            multi_buffer: self.facts.multi_buffer,
            fallbacks: self.fallbacks(config),
        }
    }

    /// The error for the errno of a sharer's bind.
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
