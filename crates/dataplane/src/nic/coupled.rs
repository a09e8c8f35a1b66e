//! A queue whose socket has a guest's memory as its UMEM.

use std::error::Error;

use super::queue::Sends;

/// A queue with a guest's memory.
pub struct Coupled<N> {
    /// Its rings.
    pub nic: N,
    /// What it does for frames that are sent.
    pub sends: Sends,
    /// Must be waited for after the socket is closed, before the daemon releases the guest's memory. `None` in copy
    /// mode: the kernel does not touch the memory of a closed socket.
    pub release: Option<Box<dyn Release>>,
}

impl<N> Coupled<N> {
    /// Without anything to wait for.
    pub fn new(nic: N, sends: Sends) -> Self {
        Self {
            nic,
            sends,
            release: None,
        }
    }
}

/// A queue whose driver reads or writes guest memory for a while after the socket was closed: the kernel takes the
/// memory from it an RCU grace period later, on a thread of its own (`xsk_destruct`, net/xdp/xsk.c;
/// `xp_release_deferred`, net/xdp/xsk_buff_pool.c).
pub trait Release: Send {
    /// Must be called before the socket is closed.
    fn begin(&self);

    /// Waits until the driver has released the memory. Every descriptor of the socket must be closed.
    ///
    /// # Errors
    /// It is not known whether it has.
    fn wait(self: Box<Self>) -> Result<(), Box<dyn Error>>;
}
