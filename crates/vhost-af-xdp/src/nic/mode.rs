//! The data path of a queue pair, and why it is not a better one. The log, `status` and its JSON all use the texts that
//! are defined here.

use common::binding::NoZeroCopy;
use common::drivers::NOT_POLLED;
use derive_more::Display;
use host::links::DriverSends;

use crate::config::Placement;

/// The data path that is really in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub(crate) enum DataPath {
    /// To another port of this process.
    #[display("cable")]
    Cable,
    /// To a network of this process.
    #[display("network")]
    Network,
    /// To the host, by a tap device.
    #[display("tap")]
    Tap,
    /// Frames are made and dropped in this process.
    #[display("null")]
    Null,
    /// An AF_XDP socket.
    Socket(xsk::Mode),
}

/// Why a data path is not a better one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fallback {
    #[error("zero-copy not used: {0}")]
    NoZeroCopy(NoZeroCopy),
    /// The reason, from the steward or helper that attached the program.
    #[error("native not used: {0}")]
    NotNative(String),
    /// The daemon chose it; the steward's reason.
    #[error("tap mode is used: {0} (mode=xdp for an XDP program)")]
    ByTap(String),
    #[error("tap mode not used: {0}")]
    NotByTap(String),
    /// What was tried first, and the kernel's error.
    #[error("{0}")]
    Refused(String),
    /// Native mode takes segmentation from a veth's other end (veth_xdp_set, drivers/net/veth.c); generic XDP does not.
    #[error(
        "skb mode on a veth: GSO packets of senders on its other end are dropped (too_long): \
         `ethtool -K PEER tso off gso off` there"
    )]
    SkbOnVeth,
    /// The requested placement is not used; so for the next three.
    #[error("{0} not used: the guest does not use all queue pairs, so frames of all queues go to the first")]
    PairsOff(Placement),
    #[error("{0} not used: the guest has reset a queue of this pair, and not started it again yet")]
    QueueReset(Placement),
    #[error("not {0} yet: guest memory is being registered with the kernel")]
    NotYet(Placement),
    #[error("{0} not used: {1}")]
    PlacementRefused(Placement, String),
    /// For example because its driver has no multiqueue, as in firmware.
    #[error("the guest has not set up all queue pairs: frames for the others go to the first")]
    NotSetUp,
    /// For a port of a network with a queue of its own: it gets send-direct placement instead, see config/port.rs.
    #[error("direct not used: frames of other ports are received by a copy")]
    SendsOnly,
    #[error("{NOT_POLLED}")]
    NotPolled,
    /// There is no tap to send them unsegmented; the steward's reason.
    #[error("the daemon segments GSO packets from the guest: {0}")]
    DaemonSegments(String),
    /// Frames lack some hints that were requested by name; the steward's reason.
    #[error("hints: {0}")]
    NoHints(String),
}

/// Which side completes the checksums of frames from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub(crate) enum Checksums {
    /// The daemon, in the frame's own chunk.
    #[display("daemon")]
    Daemon,
    /// The kernel, by TX metadata: it passes the request on to the interface, or sums where that cannot (copy modes).
    #[display("kernel (TX metadata)")]
    Kernel,
    /// The NIC, by TX metadata.
    #[display("NIC (TX metadata)")]
    Nic,
}

impl Checksums {
    /// For a socket in zero-copy mode or not. `metadata`: the kernel supports TX metadata; `driver`: what the driver
    /// supports in zero-copy mode.
    ///
    /// Where the kernel copies, it makes a socket buffer of each frame, and fulfils the metadata's request as any
    /// sender's, on any device (`xsk_build_skb`, net/xdp/xsk.c; `validate_xmit_skb`, net/core/dev.c). But before 6.18
    /// the kernel ignores it for devices that take buffers without a linear part (virtio_net), and it cannot be
    /// queried which ones do. So besides drivers that support metadata only veth is trusted.
    pub(crate) fn completed(metadata: bool, driver: DriverSends, is_veth: bool, zero_copy: bool) -> Self {
        let asked = metadata && (driver.checksum || (is_veth && !zero_copy));
        match (asked, zero_copy) {
            (false, _) => Self::Daemon,
            (true, false) => Self::Kernel,
            (true, true) => Self::Nic,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_that_is_not_used_is_the_one_that_was_asked_for() {
        for (placement, name) in [
            (Placement::Direct, "direct"),
            (Placement::SendDirect, "send-direct"),
        ] {
            for fallback in [
                Fallback::PairsOff(placement),
                Fallback::QueueReset(placement),
                Fallback::PlacementRefused(placement, "no memory".into()),
            ] {
                let said = fallback.to_string();
                assert!(said.starts_with(&format!("{name} not used: ")), "{said}");
            }
            let said = Fallback::NotYet(placement).to_string();
            assert!(said.starts_with(&format!("not {name} yet: ")), "{said}");
        }
    }
}
