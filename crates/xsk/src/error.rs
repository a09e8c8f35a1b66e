//! Why a socket did not open. Each message names the value and the remedy.

use std::io;
use std::time::Duration;

use crate::config::Mode;
use crate::names::name_of;
use crate::units::{QueueId, RingSize};

/// Why a socket did not open.
///
/// `ifindex`, `queue` and the `entries` of a `ring` are the requested ones; `queues` is how many the
/// interface has. `address` and `len_bytes` are of the UMEM's memory in this process; `chunk_bytes`,
/// `headroom_bytes` and `tx_metadata_bytes` are the UMEM's. `budget` is in frames, `value` the requested
/// value of `option`, `asked` the requested mode. `what` is the queried property, `reason` the refusal in
/// words, `waited` the time of the attempts. `source` is the kernel's error.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum OpenError {
    /// The kernel refused an AF_XDP socket.
    #[error("no AF_XDP socket: {source}; it needs CAP_NET_RAW and a kernel with CONFIG_XDP_SOCKETS")]
    Create { source: io::Error },
    /// The descriptor passed in is no AF_XDP socket.
    #[error("the descriptor passed in is no AF_XDP socket (its domain is {domain}, not 44)")]
    NotXdp {
        /// Its address family; 0 if it is no socket at all.
        domain: u16,
    },
    /// The socket has a UMEM or is bound already.
    #[error("the AF_XDP socket passed in is in use already (it has a UMEM); pass a fresh one")]
    InUse,
    /// Neither rx nor tx ring was requested.
    #[error("an AF_XDP socket needs an rx ring, a tx ring, or both")]
    NoRings,
    /// The kernel has no ring flags.
    #[error("the kernel is too old for AF_XDP with need_wakeup: Linux 5.4 is needed")]
    KernelTooOld,
    /// ENOBUFS: the memory exceeds RLIMIT_MEMLOCK.
    #[error(
        "locking the UMEM's {needed_bytes} bytes exceeds RLIMIT_MEMLOCK ({limit}, of all sockets of this user \
         together): raise it (`ulimit -l {needed_kib}`, systemd: LimitMEMLOCK={needed_bytes}) or grant CAP_IPC_LOCK",
        limit = limit_text(*limit_bytes), needed_kib = needed_bytes.div_ceil(1024)
    )]
    MemoryLock {
        /// What this UMEM alone needs.
        needed_bytes: u64,
        /// The limit, for all sockets of this user together; `None` if there is none.
        limit_bytes: Option<u64>,
    },
    /// ENOMEM: the memory has a hole, or the machine is out of memory.
    #[error(
        "the UMEM's {len_bytes} bytes at {address:#x} cannot all be pinned (ENOMEM): the mapping has a hole (an \
         unmapped or PROT_NONE page), or memory is short"
    )]
    MemoryHole { address: u64, len_bytes: u64 },
    /// EFAULT: the memory cannot be pinned.
    #[error(
        "the UMEM's memory at {address:#x} cannot be pinned (EFAULT): it is unmapped, read-only, or a shared mapping \
         of a file on disk; use anonymous memory, a memfd or hugetlbfs"
    )]
    MemoryKind { address: u64 },
    /// Another refusal of the UMEM.
    #[error(
        "the kernel refuses a UMEM of {len_bytes} bytes, chunk size {chunk_bytes}, headroom {headroom_bytes}, TX \
         metadata {tx_metadata_bytes}: {source}"
    )]
    Umem {
        len_bytes: u64,
        chunk_bytes: u32,
        headroom_bytes: u32,
        tx_metadata_bytes: u32,
        source: io::Error,
    },
    /// A ring could not be created or mapped.
    #[error("no {ring} ring of {entries} entries: {source}")]
    Ring {
        ring: &'static str,
        entries: u32,
        source: io::Error,
    },
    /// The rx ring that should exist already does not, or is smaller.
    #[error(
        "the AF_XDP socket passed in has no rx ring of {entries} entries: who opens it makes the ring (XDP_RX_RING) \
         before the socket is put into a map"
    )]
    RxRingNotMade { entries: u32 },
    /// The rx ring made by another process is too small to determine its size.
    #[error(
        "the AF_XDP socket passed in has an rx ring of fewer than {least_entries} entries: make it with \
         {least_entries} or more (XDP_RX_RING)"
    )]
    RxRingTooSmall {
        /// Entries for which the size can be determined.
        least_entries: RingSize,
    },
    /// EACCES for `XDP_MAX_TX_SKB_BUDGET`.
    #[error(
        "TX budget {budget} refused: {source}; it must be at least 32 and at most the tx ring's {tx_entries} entries"
    )]
    TxBudget {
        budget: u32,
        /// The tx ring's size; 0 if there is none.
        tx_entries: u32,
        source: io::Error,
    },
    /// A busy-poll option was refused.
    #[error(
        "busy polling takes CAP_NET_ADMIN or, with a steward, as many frames of `busy-poll` in its policy: \
         {option}={value} refused: {source}"
    )]
    BusyPoll {
        option: &'static str,
        value: u32,
        source: io::Error,
    },
    /// ENODEV.
    #[error("there is no network interface with index {ifindex} in this network namespace")]
    NoInterface { ifindex: u32 },
    /// ENETDOWN.
    #[error("{} is down, or its driver's queues are: `ip link set … up`", name_of(*.ifindex))]
    InterfaceDown { ifindex: u32 },
    /// The queue does not exist.
    #[error(
        "queue {queue} does not exist: {} has {queues} queue(s), counted from 0; choose a lower one or add channels \
         (`ethtool -L`)", name_of(*.ifindex)
    )]
    NoQueue {
        ifindex: u32,
        queue: QueueId,
        queues: u32,
    },
    /// EBUSY, still after the retries.
    #[error(
        "queue {queue} of {} is held by another AF_XDP socket or io_uring zcrx (EBUSY after {} ms): close that, or \
         choose another queue", name_of(*.ifindex), waited.as_millis()
    )]
    Busy {
        ifindex: u32,
        queue: QueueId,
        waited: Duration,
    },
    /// Zero-copy was forced with a program in skb mode.
    #[error("zero-copy needs the XDP program attached natively, it is attached in skb mode")]
    ZeroCopyNeedsNative,
    /// Zero-copy was forced and is refused.
    #[error("queue {queue} of {} cannot do zero-copy, do not force it: {reason}", name_of(*.ifindex))]
    ZeroCopyRefused {
        ifindex: u32,
        queue: QueueId,
        reason: String,
        #[source]
        source: io::Error,
    },
    /// A sharer needs a queue without fill and completion ring, but the first socket's are on this one.
    #[error(
        "queue {queue} of {} has the socket whose UMEM is to be shared: a sharer has fill and completion ring of its \
         own, choose another queue or interface for it", name_of(*.ifindex)
    )]
    SharedQueue { ifindex: u32, queue: QueueId },
    /// Another mode was requested than that of the first socket, which a sharer always gets.
    #[error("{asked} was requested, but a socket that shares a UMEM is bound as the first one: {mode}")]
    SharedMode {
        asked: &'static str,
        /// The mode of the first socket.
        mode: Mode,
    },
    /// EBADF.
    #[error(
        "the socket whose UMEM is to be shared is not bound any more, its interface is gone: open another first"
    )]
    SharedGone,
    /// Another refusal of the bind.
    #[error("binding to queue {queue} of {} failed: {source}", name_of(*.ifindex))]
    Bind {
        ifindex: u32,
        queue: QueueId,
        source: io::Error,
    },
    /// A query to the socket failed.
    #[error("reading {what} of the socket failed: {source}")]
    Query { what: &'static str, source: io::Error },
}

fn limit_text(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}
