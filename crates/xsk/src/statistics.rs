//! The kernel's counters of a socket.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::sockopt;

/// `struct xdp_statistics`, `include/uapi/linux/if_xdp.h`: frames and descriptors since the socket was opened.
///
/// The last three are 0 on kernels before 5.9.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Received frames that were dropped, for instance as too long for a chunk; in copy mode also for lack of a chunk.
    pub rx_dropped: u64,
    /// Fill ring entries outside the UMEM; each frame is lost.
    pub rx_invalid_descs: u64,
    /// Tx descriptors that were invalid, or belonged to a frame of too many pieces; see [`TxDesc`](crate::TxDesc).
    pub tx_invalid_descs: u64,
    /// Received frames dropped because the rx ring was full.
    pub rx_ring_full: u64,
    /// Times that the kernel or the driver needed a chunk and the fill ring was empty.
    pub rx_fill_ring_empty_descs: u64,
    /// Times that the kernel found the tx ring empty when it polled for frames to send. No loss.
    pub tx_ring_empty_descs: u64,
}

impl Statistics {
    /// The counters of the socket behind `fd`, which may be a duplicate descriptor.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let raw = sockopt::xdp_statistics(fd)?;
        Ok(Self {
            rx_dropped: raw.rx_dropped,
            rx_invalid_descs: raw.rx_invalid_descs,
            tx_invalid_descs: raw.tx_invalid_descs,
            rx_ring_full: raw.rx_ring_full.unwrap_or(0),
            rx_fill_ring_empty_descs: raw.rx_fill_ring_empty_descs.unwrap_or(0),
            tx_ring_empty_descs: raw.tx_ring_empty_descs.unwrap_or(0),
        })
    }

    /// Every counter with its name.
    pub fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("rx_dropped", self.rx_dropped),
            ("rx_ring_full", self.rx_ring_full),
            ("rx_fill_ring_empty_descs", self.rx_fill_ring_empty_descs),
            ("rx_invalid_descs", self.rx_invalid_descs),
            ("tx_invalid_descs", self.tx_invalid_descs),
            ("tx_ring_empty_descs", self.tx_ring_empty_descs),
        ]
    }
}
