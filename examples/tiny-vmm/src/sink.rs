//! Where frames of the guest go, and where frames for it come from.

pub mod null;
pub mod xdp;

use std::os::fd::BorrowedFd;

/// Maximum number of frames that are moved at a time. Half a ring: the guest fills the other half meanwhile.
pub const BATCH: usize = 128;
/// Longest frame, bytes: an Ethernet frame with a VLAN tag.
pub const LONGEST_FRAME: usize = 1518;

/// Moves frames out of the VM, and into it. One thread at a time calls it.
pub trait Sink: Send {
    /// How many frames may be put now.
    fn room(&mut self) -> usize {
        BATCH
    }
    /// Takes a frame of the guest. `false`: it is dropped.
    fn put(&mut self, frame: &[u8]) -> bool;
    /// Sends what was put, once a batch. `false`: something is left, for another call.
    ///
    /// # Errors
    /// The network is gone.
    fn flush(&mut self) -> anyhow::Result<bool> {
        Ok(true)
    }
    /// Replaces `frame` by the next one for the guest. `false`: there is none.
    ///
    /// # Errors
    /// The network is gone.
    fn take(&mut self, _frame: &mut Vec<u8>) -> anyhow::Result<bool> {
        Ok(false)
    }
    /// Becomes readable when frames for the guest arrive; `None`: they arrive only when one was put.
    fn readable(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
