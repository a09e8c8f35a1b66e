//! Steps before a socket is bound: register its memory, create and map its rings, set the options that depend
//! on them. Each step is one system call, and its error identifies it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::xdp::{
    XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING,
    XdpMmapOffsets, XdpRingOffset, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, sockopt};

use crate::config::SocketConfig;
use crate::desc::{CompletionRing, Descriptor, FillRing, RxRing, TxRing};
use crate::error::OpenError;
use crate::ring::{Consumer, Producer, Shared};
use crate::sys::{self, Mapping, RingOffsets};
use crate::umem::Umem;
use crate::units::RingSize;

pub(crate) fn query(what: &'static str, errno: Errno) -> OpenError {
    OpenError::Query {
        what,
        source: errno.into(),
    }
}

/// Half of the memory that the skbs of a socket in copy mode may take; the kernel doubles it (`__sock_set_sndbuf`,
/// net/core/sock.c). Enough for a TX ring of 1024 frames in chunks of 4 KiB, each of which takes 8 KiB and its skb. The
/// default of 208 KiB is full with 92 frames of 1514 bytes: a NIC with late completions would get no more than that.
const SEND_BUFFER_BYTES: u32 = 8 << 20;

/// An AF_XDP socket that is neither set up nor bound, with room for a whole TX ring in its send buffer: for a process
/// that opens sockets for others ([`Unbound::from_fd`](crate::Unbound::from_fd)).
///
/// Without CAP_NET_ADMIN `net.core.wmem_max` limits the buffer.
///
/// # Errors
/// The error of socket(2).
pub fn new_socket() -> io::Result<OwnedFd> {
    let socket = sys::open_socket()?;
    let set = |name| sys::set_option(socket.as_fd(), libc::SOL_SOCKET, name, SEND_BUFFER_BYTES);
    set(libc::SO_SNDBUFFORCE).or_else(|_| set(libc::SO_SNDBUF))?;
    Ok(socket)
}

pub(crate) fn open_socket() -> Result<OwnedFd, OpenError> {
    new_socket().map_err(|source| OpenError::Create { source })
}

pub(crate) fn check_family(fd: BorrowedFd<'_>) -> Result<(), OpenError> {
    match sockopt::socket_domain(fd) {
        Ok(AddressFamily::XDP) => Ok(()),
        Ok(other) => Err(OpenError::NotXdp {
            domain: other.as_raw(),
        }),
        Err(_) => Err(OpenError::NotXdp { domain: 0 }),
    }
}

pub(crate) fn register(fd: BorrowedFd<'_>, umem: &Umem) -> Result<(), OpenError> {
    let registration = XdpUmemReg {
        addr: umem.address(),
        len: umem.len(),
        chunk_size: umem.chunk_size(),
        headroom: umem.headroom(),
        flags: XdpUmemRegFlags::from_bits_retain(umem.flags()),
        tx_metadata_len: umem.tx_metadata_len(),
    };
    sockopt::set_xdp_umem_reg(fd, registration).map_err(|errno| umem.refusal(&errno.into()))
}

pub(crate) fn size_rings(fd: BorrowedFd<'_>, config: &SocketConfig) -> Result<(), OpenError> {
    let refused = |ring, size: RingSize| {
        move |errno: Errno| OpenError::Ring {
            ring,
            entries: size.get(),
            source: errno.into(),
        }
    };
    let (fill, completion) = (config.fill, config.completion);
    sockopt::set_xdp_umem_fill_ring_size(fd, fill.get()).map_err(refused("fill", fill))?;
    sockopt::set_xdp_umem_completion_ring_size(fd, completion.get())
        .map_err(refused("completion", completion))?;
    if let Some(rx) = config.rx
        && !config.rx_is_made
    {
        sockopt::set_xdp_rx_ring_size(fd, rx.get()).map_err(refused("rx", rx))?;
    }
    if let Some(tx) = config.tx {
        sockopt::set_xdp_tx_ring_size(fd, tx.get()).map_err(refused("tx", tx))?;
    }
    Ok(())
}

pub(crate) fn set_tx_budget(fd: BorrowedFd<'_>, config: &SocketConfig) -> Result<(), OpenError> {
    let Some(budget) = config.max_tx_skb_budget else {
        return Ok(());
    };
    match sys::set_option(fd, libc::SOL_XDP, sys::XDP_MAX_TX_SKB_BUDGET, budget) {
        // A kernel before 6.18 has a fixed budget.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
        result => result.map_err(|source| {
            let tx_entries = config.tx.map_or(0, RingSize::get);
            OpenError::TxBudget {
                budget,
                tx_entries,
                source,
            }
        }),
    }
}

pub(crate) fn set_busy_poll(fd: BorrowedFd<'_>, config: &SocketConfig) -> Result<(), OpenError> {
    let Some(poll) = config.busy_poll else {
        // The opener of the socket may have enabled it. A kernel without this option never polls.
        let _ = sys::set_option(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL, 0);
        return Ok(());
    };
    let options = [
        (
            "SO_PREFER_BUSY_POLL",
            libc::SO_PREFER_BUSY_POLL,
            u32::from(poll.prefer),
        ),
        ("SO_BUSY_POLL", libc::SO_BUSY_POLL, poll.usecs),
        ("SO_BUSY_POLL_BUDGET", libc::SO_BUSY_POLL_BUDGET, poll.budget),
    ];
    for (option, name, value) in options {
        // The opener of the socket may have set it, with the privilege for it.
        if name == libc::SO_PREFER_BUSY_POLL
            && sys::option(fd, libc::SOL_SOCKET, name).is_ok_and(|set| set == value)
        {
            continue;
        }
        sys::set_option(fd, libc::SOL_SOCKET, name, value).map_err(|source| OpenError::BusyPoll {
            option,
            value,
            source,
        })?;
    }
    Ok(())
}

#[derive(Debug)]
pub(crate) struct Rings {
    pub(crate) fill: FillRing,
    pub(crate) completion: CompletionRing,
    pub(crate) rx: RxRing,
    pub(crate) tx: TxRing,
}

pub(crate) fn map_rings(
    fd: BorrowedFd<'_>,
    umem: &Umem,
    config: &SocketConfig,
    offsets: &XdpMmapOffsets,
) -> Result<Rings, OpenError> {
    let codec = umem.codec();
    let refused = |ring, size: RingSize| {
        let entries = size.get();
        move |source: Option<io::Error>| match source {
            Some(source) => OpenError::Ring {
                ring,
                entries,
                source,
            },
            None => OpenError::KernelTooOld,
        }
    };
    let fill = map_ring(fd, &offsets.fr, XDP_UMEM_PGOFF_FILL_RING, config.fill)
        .map_err(refused("fill", config.fill))?;
    let completion = map_ring(fd, &offsets.cr, XDP_UMEM_PGOFF_COMPLETION_RING, config.completion)
        .map_err(refused("completion", config.completion))?;
    let rx = match config.rx {
        None => Shared::absent(),
        Some(size) => map_ring(fd, &offsets.rx, XDP_PGOFF_RX_RING, size).map_err(|source| match source {
            // EINVAL: there is no such ring, or a smaller one (`xsk_mmap`, net/xdp/xsk.c). We created all others.
            Some(source) if config.rx_is_made && is_invalid(&source) => {
                OpenError::RxRingNotMade { entries: size.get() }
            }
            source => refused("rx", size)(source),
        })?,
    };
    let tx = match config.tx {
        None => Shared::absent(),
        Some(size) => map_ring(fd, &offsets.tx, XDP_PGOFF_TX_RING, size).map_err(refused("tx", size))?,
    };
    Ok(Rings {
        fill: Producer::new(fill, codec),
        completion: Consumer::new(completion, codec),
        rx: Consumer::new(rx, codec),
        tx: Producer::new(tx, codec),
    })
}

fn is_invalid(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

/// Entries of the rx ring that another process has created for a socket; `None` without one.
///
/// The kernel does not report how many there are, but refuses to map more pages than they take: of ever smaller
/// requests, the first success is the ring's own size. That is exact for rings of more than a page.
///
/// # Errors
/// [`OpenError::NotXdp`]; [`OpenError::RxRingTooSmall`] for a ring that might be smaller than its page;
/// [`OpenError::Query`].
pub fn made_rx_ring(fd: BorrowedFd<'_>) -> Result<Option<RingSize>, OpenError> {
    check_family(fd)?;
    let offsets = sockopt::xdp_mmap_offsets(fd).map_err(|error| query("XDP_MMAP_OFFSETS", error))?;
    let page_entries =
        u32::try_from(rustix::param::page_size() / size_of::<Descriptor>()).unwrap_or(RingSize::MAX);
    for size in RingSize::descending() {
        match map_ring::<Descriptor>(fd, &offsets.rx, XDP_PGOFF_RX_RING, size) {
            // A ring of half the entries would take the same number of pages.
            Ok(_) if size.get() < page_entries => {
                return Err(OpenError::RxRingTooSmall {
                    least_entries: RingSize::at_least(page_entries),
                });
            }
            Ok(_) => return Ok(Some(size)),
            Err(Some(error)) if is_invalid(&error) => {}
            Err(Some(source)) => {
                let what = "the rx ring";
                return Err(OpenError::Query { what, source });
            }
            Err(None) => return Err(OpenError::KernelTooOld),
        }
    }
    Ok(None)
}

/// Maps one ring; `Err(None)` if the kernel has no flags word in it.
fn map_ring<T: Copy + Default>(
    fd: BorrowedFd<'_>,
    offset: &XdpRingOffset,
    place: u64,
    size: RingSize,
) -> Result<Shared<T>, Option<io::Error>> {
    let parts = RingOffsets {
        producer: offset.producer,
        consumer: offset.consumer,
        flags: offset.flags.ok_or(None)?,
        slots: offset.desc,
    };
    let len = offset.desc + u64::from(size.get()) * size_of::<T>() as u64;
    let len = usize::try_from(len).map_err(|_| Some(io::ErrorKind::OutOfMemory.into()))?;
    let mapping = Mapping::new(fd, len, place).map_err(Some)?;
    Ok(Shared::mapped(mapping, &parts, size.get()))
}
