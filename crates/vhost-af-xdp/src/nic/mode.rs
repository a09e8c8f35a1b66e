//! What a queue pair's data path is, and why it is not a better one. The only place that has the words for it: the
//! log, `status` and its JSON all take them from here.

use std::fmt;

use super::binding::NoZeroCopy;

/// The data path that is really in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataPath {
    /// To another port of this process.
    Cable,
    /// Frames are made and dropped in this process.
    Null,
    /// An AF_XDP socket.
    Socket(xsk::Mode),
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cable => f.write_str("cable"),
            Self::Null => f.write_str("null"),
            Self::Socket(mode) => mode.fmt(f),
        }
    }
}

/// Why a data path is not a better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// Zero-copy was not asked for.
    NoZeroCopy(NoZeroCopy),
    /// The program could not be attached natively; the reason as the daemon or the steward that attached it says it.
    NotNative(String),
    /// The kernel refused what was tried first; in its words.
    Refused(String),
    /// Native mode takes segmentation from a veth's other end (veth_xdp_set, drivers/net/veth.c); generic XDP does not.
    SkbOnVeth,
    /// Direct placement, but the guest uses fewer pairs than there are queues.
    PairsOff,
    /// Direct placement, as soon as guest memory is registered.
    NotDirectYet,
    /// Direct placement was tried, and this is what came of it.
    DirectRefused(String),
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoZeroCopy(reason) => write!(f, "zero-copy not used: {reason}"),
            Self::NotNative(reason) => write!(f, "native not used: {reason}"),
            Self::Refused(what) => f.write_str(what),
            Self::SkbOnVeth => f.write_str(
                "skb mode on a veth: GSO packets of senders on its other end are dropped (too_long) until \
                 `ethtool -K PEER tso off gso off` there",
            ),
            Self::PairsOff => f.write_str(
                "direct not used: the guest has switched queue pairs off, so frames of all queues go to the first",
            ),
            Self::NotDirectYet => {
                f.write_str("not direct yet: guest memory is being registered with the kernel")
            }
            Self::DirectRefused(why) => write!(f, "direct not used: {why}"),
        }
    }
}

/// Who completes the checksums of frames from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksums {
    /// We do, in the frame's own chunk.
    Daemon,
    /// The kernel, asked by TX metadata: it passes the wish on to the interface, or sums where that cannot (copy
    /// modes).
    Kernel,
    /// The NIC, asked by TX metadata.
    Nic,
}

impl fmt::Display for Checksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Daemon => "daemon",
            Self::Kernel => "kernel (TX metadata)",
            Self::Nic => "NIC (TX metadata)",
        })
    }
}
