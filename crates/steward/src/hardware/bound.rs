//! What is bound to a receive queue, as the kernel tells: memory of io_uring, of a device, of an AF_XDP socket, or a
//! lease of the queue to a virtual interface. Never who has it.
//!
//! By the netlink family `netdev` (Documentation/netlink/specs/netdev.yaml).

use std::io;

use netlink_bindings::netdev::{self, QueueType};
use netlink_socket2::NetlinkSocket;

/// What is bound to a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Memory of io_uring zero-copy receive.
    IoUring,
    /// An AF_XDP socket.
    Xsk,
    /// Memory of a device.
    DmaBuf,
    /// A queue of a virtual interface, such as a netkit (Linux 7.1); the index of that in its network namespace.
    Lease(u32),
}

impl Bound {
    /// As `queues` shows it.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::IoUring => "io_uring (zero-copy receive)".to_owned(),
            Self::Xsk => "an AF_XDP socket".to_owned(),
            Self::DmaBuf => "memory of a device (dma-buf)".to_owned(),
            Self::Lease(index) => format!("a virtual interface (queue lease, index {index})"),
        }
    }
}

/// What is bound to a receive queue, if anything is. A queue that is not there has nothing.
///
/// # Errors
/// The kernel's.
pub fn to(ifindex: u32, queue: u32) -> io::Result<Option<Bound>> {
    let mut socket = NetlinkSocket::new();
    let mut request = netdev::Request::new().op_queue_get_do();
    request
        .encode()
        .push_ifindex(ifindex)
        .push_type(QueueType::Rx as u32)
        .push_id(queue);
    let mut replies = socket.request(&request)?;
    let attributes = match replies.recv_one().map_err(io::Error::from) {
        Err(error) if is_missing(&error) => return Ok(None),
        answered => answered?,
    };
    Ok(if attributes.get_io_uring().is_ok() {
        Some(Bound::IoUring)
    } else if attributes.get_dmabuf().is_ok() {
        Some(Bound::DmaBuf)
    } else if attributes.get_xsk().is_ok() {
        Some(Bound::Xsk)
    } else {
        let lease = attributes.get_lease();
        lease
            .ok()
            .map(|lease| Bound::Lease(lease.get_ifindex().unwrap_or(0)))
    })
}

/// No such interface, none that is up, or no such queue (`netdev_nl_queue_get_doit`, net/core/netdev-genl.c).
fn is_missing(error: &io::Error) -> bool {
    let codes = [libc::ENODEV, libc::ENOENT, libc::EINVAL];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}
