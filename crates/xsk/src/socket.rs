//! An AF_XDP socket: UMEM, rings and queue connected, from open to close.
//!
//! # Theory of operation
//!
//! Opening follows the order that the kernel requires: register the UMEM, size the rings, set the options
//! that depend on them, map them, bind (`bind.rs`). After a failure, Drop undoes all earlier steps.
//!
//! A queue is free again about 20 ms after its socket has neither a descriptor nor a mapping. Because of the
//! order of the fields the rings unmap first, then the descriptor closes, then the memory may be freed.

#[cfg(feature = "test-kernel")]
#[path = "test_kernel.rs"]
pub(crate) mod test_kernel;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::xdp::XdpOptionsFlags;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

use crate::bind::{Bound, bind_queue, try_all};
use crate::config::{AttachMode, Fallback, Mode, SocketConfig};
use crate::desc::{CompletionRing, FillRing, RxRing, TxRing};
use crate::error::OpenError;
use crate::setup::{
    Rings, check_family, map_rings, open_socket, query, register, set_busy_poll, set_tx_budget, size_rings,
};
use crate::share::{Facts, First, Lender};
use crate::statistics::Statistics;
use crate::umem::Umem;
use crate::units::QueueId;

/// A socket bound to one queue of one interface. Dropping it frees the queue.
///
/// It is `Send`: one thread at a time owns it, with its rings.
#[derive(Debug)]
pub struct Socket {
    /// Free frames for the kernel.
    pub fill: FillRing,
    /// Sent frames, returned by the kernel.
    pub completion: CompletionRing,
    /// Received frames.
    pub rx: RxRing,
    /// Frames to send.
    pub tx: TxRing,
    /// Shared while another socket is bound over its memory ([`Lender`]), or a thread waits for frames.
    fd: Arc<OwnedFd>,
    facts: Facts,
    busy_polls: bool,
    fallbacks: Vec<Fallback>,
}

/// Result of a kick of the tx ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kick {
    /// The kernel has taken all frames that it found.
    Done,
    /// There are more frames, kick again (EAGAIN: the budget of one call is used up, or the completion ring
    /// or send buffer is full and completions must be taken first).
    Again,
    /// The device or the memory is exhausted for now (EBUSY, ENOBUFS). EBUSY also means that a frame was dropped,
    /// for instance one longer than the MTU; it is completed nevertheless. The rest stays in the ring: kick later.
    Busy,
}

/// Why the kernel cannot be woken.
#[derive(Debug, thiserror::Error)]
pub enum WakeError {
    /// ENETDOWN: the interface is down. It may come back.
    #[error("the interface is down")]
    InterfaceDown,
    /// ENXIO: the socket is not bound any more, its interface was deleted. Only a new socket helps.
    #[error("the interface is gone")]
    InterfaceGone,
    /// Anything else.
    #[error("waking the kernel failed: {0}")]
    Other(#[source] io::Error),
}

impl Socket {
    /// Opens a socket and binds it. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// [`OpenError`], each with the value and the remedy; everything is undone.
    pub fn open(umem: &Umem, config: &SocketConfig) -> Result<Self, OpenError> {
        Unbound::open(umem, config)?.bind()
    }

    /// Binds a socket that a more privileged process has opened. It must be as `socket(AF_XDP, SOCK_RAW, 0)`
    /// returns it, except for an rx ring with [`rx_is_made`](SocketConfig::rx_is_made).
    ///
    /// # Errors
    /// As [`Socket::open`], and [`OpenError::NotXdp`] or [`OpenError::InUse`] for a descriptor that does not serve.
    pub fn from_fd(fd: OwnedFd, umem: &Umem, config: &SocketConfig) -> Result<Self, OpenError> {
        Unbound::from_fd(fd, umem, config)?.bind()
    }

    /// Uses a socket that a more privileged process prepares and binds: with this memory registered and all
    /// four rings of the sizes in `config`. `bind` asks that process to bind it, with flags of `struct
    /// sockaddr_xdp`, and returns the socket, or the kernel's error: it is called for each attempt, from best
    /// to plainest, until one succeeds. While the queue is busy that process waits.
    ///
    /// # Errors
    /// As [`Socket::open`]; those of `bind` unchanged. ([`Umem::refusal`] explains why memory was not registered.)
    pub fn bound_by<E: From<OpenError>>(
        umem: &Umem,
        config: &SocketConfig,
        mut bind: impl FnMut(u16) -> Result<io::Result<OwnedFd>, E>,
    ) -> Result<Self, E> {
        let mut socket = None;
        let bound = try_all::<E>(config, false, |flags| {
            let result = bind(flags.bits())?;
            Ok(result
                .map(|fd| socket = Some(fd))
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)))
        })?;
        let fd = socket.ok_or(OpenError::NotXdp { domain: 0 })?;
        Ok(Unbound::registered(fd, umem, config)?.finish(bound)?)
    }

    /// Opens another socket over the UMEM of this one, on another queue of this or any interface
    /// (`XDP_SHARED_UMEM`, Linux 5.10), and binds it. Needs CAP_NET_RAW.
    ///
    /// Frames may be passed between all these sockets; a frame is in one ring of one socket at a time. The
    /// memory is registered, and counted against RLIMIT_MEMLOCK, once. But for each queue the kernel keeps
    /// 136 bytes for every chunk of it (`xp_create_and_assign_umem`, `net/xdp/xsk_buff_pool.c`). The new
    /// socket is bound as this one: `bind` and `multi_buffer` of `config` cannot request anything else,
    /// `need_wakeup` is ignored. It may outlive this one.
    ///
    /// # Errors
    /// As [`Socket::open`], [`OpenError::SharedQueue`], [`OpenError::SharedMode`], [`OpenError::SharedGone`].
    pub fn share(&self, config: &SocketConfig) -> Result<Self, OpenError> {
        Unbound::share(self, config)?.bind()
    }

    /// A handle by which later sockets can share its memory; it does not keep this socket open.
    pub fn lender(&self) -> Lender {
        Lender {
            fd: Arc::downgrade(&self.fd),
            facts: self.facts.clone(),
        }
    }

    /// As [`Socket::share`], with a socket that a more privileged process prepares, with all four rings of
    /// the sizes in `config`, and binds over the memory of `first`: `bind` asks that process to bind it, and
    /// returns the socket, or the kernel's error.
    ///
    /// # Errors
    /// As [`Socket::share`]; those of `bind` unchanged.
    pub fn shared_by<E: From<OpenError>>(
        first: &First,
        config: &SocketConfig,
        bind: impl FnOnce() -> Result<io::Result<OwnedFd>, E>,
    ) -> Result<Self, E> {
        first.check(config)?;
        let fd = bind()?.map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            first.refusal(config, errno, false)
        })?;
        Ok(Unbound::registered(fd, &first.facts.umem, config)?.finish(first.bound(config))?)
    }

    fn first(&self) -> First {
        First {
            fd: Arc::clone(&self.fd),
            facts: self.facts.clone(),
        }
    }

    /// Makes the kernel send the frames in the tx ring (`sendto` with MSG_DONTWAIT).
    ///
    /// In copy mode the kernel sends within this call, up to 32 frames or
    /// [`max_tx_skb_budget`](SocketConfig::max_tx_skb_budget).
    ///
    /// In zero-copy mode, with busy polling preferred, that call does not wake the driver but polls the
    /// receive queue (`xsk_no_wakeup`, `net/xdp/xsk.c`), and a transmit queue with a NAPI of its own would
    /// never send. So this also calls poll(2), which always wakes the driver (`xsk_poll`).
    ///
    /// # Errors
    /// [`WakeError`] if the interface is down or gone.
    #[inline]
    pub fn kick_tx(&self) -> Result<Kick, WakeError> {
        let sent = kick_result(send(&self.fd, &[], SendFlags::DONTWAIT).err());
        if self.busy_polls && self.facts.mode == Mode::ZeroCopy {
            let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
            // Only the wake-up matters, not the result.
            let _ = poll(&mut fds, Some(&Timespec::default()));
        }
        sent
    }

    /// Tells the kernel that there are frames in the fill ring again (`recvfrom` with MSG_DONTWAIT); with
    /// busy polling it also polls the device.
    ///
    /// # Errors
    /// [`WakeError`] if the interface is down or gone.
    #[inline]
    pub fn wake_rx(&self) -> Result<Kick, WakeError> {
        let mut nothing = [0_u8; 0];
        kick_result(recv(&self.fd, &mut nothing, RecvFlags::DONTWAIT).err())
    }

    /// The data path in use.
    #[inline]
    pub fn mode(&self) -> Mode {
        self.facts.mode
    }

    /// Whether frames may span chunks.
    #[inline]
    pub fn multi_buffer(&self) -> bool {
        self.facts.multi_buffer
    }

    /// Whether a system call polls the device ([`BusyPoll`](crate::BusyPoll)): then call [`Socket::wake_rx`]
    /// whenever there is nothing to receive, even if `needs_wakeup` is false.
    #[inline]
    pub fn busy_polls(&self) -> bool {
        self.busy_polls
    }

    /// The refused attempts, in order; empty if the first attempt worked.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// The UMEM that it was opened with.
    #[inline]
    pub fn umem(&self) -> &Umem {
        &self.facts.umem
    }

    /// The kernel's counters of this socket (`XDP_STATISTICS`).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn statistics(&self) -> io::Result<Statistics> {
        Statistics::read(self.as_fd())
    }
}

/// A socket that has its memory and its rings, but no queue yet.
///
/// Registering memory takes long (every page is faulted in and pinned), binding does not: to move a queue from one
/// memory to another, prepare the new socket while the old one still works, drop the old one, and bind.
#[derive(Debug)]
pub struct Unbound {
    rings: Rings,
    fd: OwnedFd,
    umem: Umem,
    config: SocketConfig,
    /// Opened here, not by a more privileged process.
    ours: bool,
    /// The socket that has registered the UMEM, if this one has not.
    first: Option<First>,
}

impl Unbound {
    /// The queue that it will be bound to.
    pub fn queue(&self) -> QueueId {
        self.config.queue
    }

    /// The UMEM that is registered with it.
    pub fn umem(&self) -> &Umem {
        &self.umem
    }

    /// Opens a socket, registers the UMEM and maps the rings. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// As [`Socket::open`].
    pub fn open(umem: &Umem, config: &SocketConfig) -> Result<Self, OpenError> {
        Ok(Self {
            ours: true,
            ..Self::from_fd(open_socket()?, umem, config)?
        })
    }

    /// As [`Unbound::open`], with a socket that another process has opened.
    ///
    /// # Errors
    /// As [`Socket::from_fd`].
    pub fn from_fd(fd: OwnedFd, umem: &Umem, config: &SocketConfig) -> Result<Self, OpenError> {
        Self::prepared(fd, umem, config, None)
    }

    /// A socket that another process has opened, with this memory registered and all four rings created as in `config`.
    ///
    /// # Errors
    /// As [`Socket::from_fd`].
    pub fn registered(fd: OwnedFd, umem: &Umem, config: &SocketConfig) -> Result<Self, OpenError> {
        check_family(fd.as_fd())?;
        set_tx_budget(fd.as_fd(), config)?;
        set_busy_poll(fd.as_fd(), config)?;
        Self::mapped(fd, umem, config, None)
    }

    /// As [`Socket::share`], not yet bound. Until it is bound or dropped, the queue of `socket` does not become free.
    ///
    /// # Errors
    /// As [`Socket::share`].
    pub fn share(socket: &Socket, config: &SocketConfig) -> Result<Self, OpenError> {
        Ok(Self {
            ours: true,
            ..Self::share_from_fd(open_socket()?, socket, config)?
        })
    }

    /// As [`Unbound::share`], with a socket that another process has opened.
    ///
    /// # Errors
    /// As [`Socket::share`], and [`OpenError::NotXdp`] for a descriptor that does not serve.
    pub fn share_from_fd(fd: OwnedFd, socket: &Socket, config: &SocketConfig) -> Result<Self, OpenError> {
        let first = socket.first();
        first.check(config)?;
        Self::prepared(fd, &socket.facts.umem, config, Some(first))
    }

    fn prepared(
        fd: OwnedFd,
        umem: &Umem,
        config: &SocketConfig,
        first: Option<First>,
    ) -> Result<Self, OpenError> {
        if config.rx.is_none() && config.tx.is_none() {
            return Err(OpenError::NoRings);
        }
        check_family(fd.as_fd())?;
        if first.is_none() {
            register(fd.as_fd(), umem)?;
        }
        size_rings(fd.as_fd(), config)?;
        set_tx_budget(fd.as_fd(), config)?;
        set_busy_poll(fd.as_fd(), config)?;
        Self::mapped(fd, umem, config, first)
    }

    fn mapped(
        fd: OwnedFd,
        umem: &Umem,
        config: &SocketConfig,
        first: Option<First>,
    ) -> Result<Self, OpenError> {
        let offsets = sockopt::xdp_mmap_offsets(&fd).map_err(|error| query("XDP_MMAP_OFFSETS", error))?;
        Ok(Self {
            rings: map_rings(fd.as_fd(), umem, config, &offsets)?,
            fd,
            umem: umem.clone(),
            config: config.clone(),
            ours: false,
            first,
        })
    }

    /// Binds it to its queue.
    ///
    /// # Errors
    /// As [`Socket::open`].
    pub fn bind(self) -> Result<Socket, OpenError> {
        let fd = self.fd.as_fd();
        let bound = match &self.first {
            Some(first) => first.bind_sharer(fd, &self.config, self.ours),
            None => bind_queue(fd, &self.config, self.ours),
        }?;
        self.finish(bound)
    }

    fn finish(self, bound: Bound) -> Result<Socket, OpenError> {
        let options = sockopt::xdp_options(&self.fd).map_err(|error| query("XDP_OPTIONS", error))?;
        let mode = match self.config.attach {
            _ if options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY) => Mode::ZeroCopy,
            AttachMode::Native => Mode::NativeCopy,
            AttachMode::Skb => Mode::SkbCopy,
        };
        let Rings {
            fill,
            completion,
            rx,
            tx,
        } = self.rings;
        Ok(Socket {
            fill,
            completion,
            rx,
            tx,
            fd: Arc::new(self.fd),
            facts: Facts {
                umem: self.umem,
                ifindex: self.config.ifindex,
                queue: self.config.queue,
                mode,
                multi_buffer: bound.multi_buffer,
            },
            busy_polls: self.config.busy_poll.is_some_and(|poll| poll.usecs > 0),
            fallbacks: bound.fallbacks,
        })
    }
}

impl Socket {
    /// Its descriptor, for a thread that waits for frames while another one uses the rings.
    pub fn shared_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[inline]
fn kick_result(errno: Option<Errno>) -> Result<Kick, WakeError> {
    match errno {
        None => Ok(Kick::Done),
        Some(Errno::AGAIN | Errno::INTR) => Ok(Kick::Again),
        Some(Errno::BUSY | Errno::NOBUFS) => Ok(Kick::Busy),
        Some(Errno::NETDOWN) => Err(WakeError::InterfaceDown),
        Some(Errno::NXIO | Errno::NODEV) => Err(WakeError::InterfaceGone),
        Some(errno) => Err(WakeError::Other(errno.into())),
    }
}
