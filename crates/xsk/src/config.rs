//! The requested configuration of a socket, and its result.

use std::time::Duration;

use crate::units::{QueueId, RingSize};
use derive_more::Display;

/// The data path to request from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BindRequest {
    /// Zero-copy if the device supports it and the program is attached natively, else copy.
    #[default]
    Auto,
    /// Copy (`XDP_COPY`), even where zero-copy would work.
    ForceCopy,
    /// Zero-copy (`XDP_ZEROCOPY`), or fail.
    ForceZeroCopy,
}

/// How the XDP program of the interface is attached. Set by the caller; the socket cannot query it.
///
/// Zero-copy is tried only with `Native`: igb accepts a zero-copy bind with a program in skb mode, and then never
/// completes a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachMode {
    /// In the driver (`XDP_FLAGS_DRV_MODE`).
    #[default]
    Native,
    /// In the network stack (`XDP_FLAGS_SKB_MODE`), also called generic.
    Skb,
}

/// The data path in use, by `XDP_OPTIONS` and [`AttachMode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub enum Mode {
    /// The device reads and writes the UMEM.
    #[display("zero-copy")]
    ZeroCopy,
    /// The kernel copies, at the driver's XDP hook.
    #[display("copy (native)")]
    NativeCopy,
    /// The kernel copies, from and to socket buffers.
    #[display("copy (skb)")]
    SkbCopy,
}

/// Busy polling of a socket (`Documentation/networking/napi.rst`, "Busy polling"): system calls on it run the driver's
/// poll function, on the caller's CPU.
///
/// `usecs` needs no privilege; `budget` and `prefer` need CAP_NET_ADMIN to be raised or switched on
/// (`sk_setsockopt`, `net/core/sock.c`). A privileged process that opens the socket for another one may set
/// them before. If no NAPI serves the queue (a program in skb mode) there is nothing to poll. The socket gets
/// its NAPI id with its first frame, in zero-copy mode with the bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyPoll {
    /// How long a system call may poll the device, in µs (`SO_BUSY_POLL`). Calls on AF_XDP sockets do not
    /// wait, so any value but 0 means one poll per call, and 0 none.
    pub usecs: u32,
    /// How many frames one poll may handle (`SO_BUSY_POLL_BUDGET`, Linux 5.11).
    pub budget: u32,
    /// Whether to keep the device's interrupts off while the caller polls (`SO_PREFER_BUSY_POLL`, Linux 5.11).
    pub prefer: bool,
}

/// The configuration of a socket. Make one with [`SocketConfig::new`] and change the fields that differ.
#[derive(Clone, Debug)]
pub struct SocketConfig {
    /// The interface's index.
    pub ifindex: u32,
    /// The interface's queue.
    pub queue: QueueId,
    /// How the XDP program is attached.
    pub attach: AttachMode,
    /// The data path to request.
    pub bind: BindRequest,
    /// Entries of the rx ring; `None` for a socket that only sends.
    pub rx: Option<RingSize>,
    /// The rx ring exists already, with that many entries: the process that opened the socket created it,
    /// because an XSKMAP accepts no socket without one (Linux 7.1), and a socket cannot create a second. See
    /// [`made_rx_ring`](crate::made_rx_ring).
    pub rx_is_made: bool,
    /// Entries of the tx ring; `None` for a socket that only receives.
    pub tx: Option<RingSize>,
    /// Entries of the fill ring.
    pub fill: RingSize,
    /// Entries of the completion ring.
    pub completion: RingSize,
    /// Whether the kernel reports when it must be woken (`XDP_USE_NEED_WAKEUP`), instead of always being called.
    pub need_wakeup: bool,
    /// Whether frames may span chunks (`XDP_USE_SG`, Linux 6.6). If it is refused the socket opens without
    /// it, a [`Fallback`] has the reason, and [`Socket::multi_buffer`](crate::Socket::multi_buffer) is false.
    pub multi_buffer: bool,
    /// Frames that one kick may send in copy mode (`XDP_MAX_TX_SKB_BUDGET`, Linux 6.18; before that 32, and the option
    /// is ignored).
    pub max_tx_skb_budget: Option<u32>,
    /// Busy polling; `None` leaves the system's setting.
    pub busy_poll: Option<BusyPoll>,
    /// How long to retry a bind that fails with EBUSY: the kernel frees a queue some 20 ms after its socket is closed.
    pub bind_timeout: Duration,
}

impl SocketConfig {
    /// Four rings of [`RingSize::DEFAULT`] entries on one queue, best available data path, natively attached program.
    pub fn new(ifindex: u32, queue: QueueId) -> Self {
        Self {
            ifindex,
            queue,
            attach: AttachMode::default(),
            bind: BindRequest::default(),
            rx: Some(RingSize::DEFAULT),
            rx_is_made: false,
            tx: Some(RingSize::DEFAULT),
            fill: RingSize::DEFAULT,
            completion: RingSize::DEFAULT,
            need_wakeup: true,
            multi_buffer: false,
            max_tx_skb_budget: None,
            busy_poll: None,
            bind_timeout: Duration::from_millis(100),
        }
    }
}

/// A better mode that was tried first and refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tried} not used: {reason}")]
pub struct Fallback {
    /// What was tried.
    pub tried: &'static str,
    /// The kernel's errno; 0 if there was no call.
    pub errno: i32,
    /// The cause, in words.
    pub reason: String,
}
