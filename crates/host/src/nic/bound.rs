//! The user of a receive queue, as the kernel reports it: memory of io_uring, of a device, of an AF_XDP socket, or a
//! lease of the queue to a virtual interface. The kernel never reports the process.
//!
//! By the netlink family `netdev` (Documentation/netlink/specs/netdev.yaml).

use std::fmt;
use std::io;

use netlink_bindings::netdev::{self, QueueType};
use netlink_socket2::NetlinkSocket;

/// The user of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Memory of io_uring zero-copy receive.
    IoUring,
    /// An AF_XDP socket.
    Xsk,
    /// Memory of a device.
    DmaBuf,
    /// A queue of a virtual interface, such as a netkit (Linux 7.1).
    Lease(LeasedTo),
}

/// The queue that a NIC's queue is leased to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedTo {
    /// Index of the interface in its network namespace.
    pub ifindex: u32,
    /// Number of its queue.
    pub queue: u32,
    /// The number of that namespace in the namespace of the request; none: it is the same.
    pub namespace: Option<i32>,
}

impl LeasedTo {
    /// The lease as the kernel reports it for a NIC's queue; `None` if the report is incomplete.
    #[must_use]
    pub fn of(lease: &netdev::IterableLease<'_>) -> Option<Self> {
        Some(Self {
            ifindex: lease.get_ifindex().ok()?,
            queue: lease.get_queue().and_then(|queue| queue.get_id()).ok()?,
            namespace: lease.get_netns_id().ok(),
        })
    }
}

impl fmt::Display for LeasedTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}, queue {}", self.ifindex, self.queue)?;
        self.namespace
            .map_or(Ok(()), |number| write!(f, ", network namespace {number}"))
    }
}

impl Bound {
    /// The text for `queues`.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::IoUring => "io_uring (zero-copy receive)".to_owned(),
            Self::Xsk => "an AF_XDP socket".to_owned(),
            Self::DmaBuf => "memory of a device (dma-buf)".to_owned(),
            Self::Lease(to) => format!("a virtual interface (queue lease: {to})"),
        }
    }
}

/// The user of a receive queue, if it has one. A queue that does not exist has none.
///
/// # Errors
/// An error of the kernel.
pub fn to(ifindex: u32, queue: u32) -> io::Result<Option<Bound>> {
    match ask(ifindex, queue) {
        Err(error) if is_missing(&error) => Ok(None),
        answered => answered,
    }
}

/// Whether memory of io_uring may be bound to a receive queue. It stays bound while the interface is down, but the
/// kernel reports no queues then.
///
/// # Errors
/// An error of the kernel.
pub fn may_be_to_io_uring(ifindex: u32, queue: u32) -> io::Result<bool> {
    match ask(ifindex, queue) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(true),
        Err(error) if is_missing(&error) => Ok(false),
        answered => Ok(answered? == Some(Bound::IoUring)),
    }
}

/// The queue that a NIC's queue is leased to, if it is.
///
/// # Errors
/// The kernel's: `ENOENT` while the NIC is down, of which it tells nothing then, `ENODEV` if there is none.
pub fn leased_to(ifindex: u32, queue: u32) -> io::Result<Option<LeasedTo>> {
    match ask(ifindex, queue) {
        // The NIC has fewer queues now; a leased queue cannot be removed (`ethtool -L`).
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        Err(error) => Err(error),
        Ok(Some(Bound::Lease(to))) => Ok(Some(to)),
        Ok(_) => Ok(None),
    }
}

/// Whether an AF_XDP socket has a receive queue of a NIC, or the one that it is leased to.
///
/// # Errors
/// An error of the kernel.
pub fn has_socket(ifindex: u32, queue: u32) -> io::Result<bool> {
    ask_for(ifindex, queue, |attributes| attributes.get_xsk().is_ok())
}

fn ask(ifindex: u32, queue: u32) -> io::Result<Option<Bound>> {
    ask_for(ifindex, queue, bound)
}

fn ask_for<T>(ifindex: u32, queue: u32, read: impl FnOnce(&netdev::IterableQueue<'_>) -> T) -> io::Result<T> {
    let mut socket = NetlinkSocket::new();
    let mut request = netdev::Request::new().op_queue_get_do();
    request
        .encode()
        .push_ifindex(ifindex)
        .push_type(QueueType::Rx as u32)
        .push_id(queue);
    let mut replies = socket.request(&request)?;
    let attributes = replies.recv_one().map_err(io::Error::from)?;
    Ok(read(&attributes))
}

fn bound(attributes: &netdev::IterableQueue<'_>) -> Option<Bound> {
    // First, as a socket or memory of a leased queue belongs to the lessee.
    if let Ok(lease) = attributes.get_lease() {
        LeasedTo::of(&lease).map(Bound::Lease)
    } else if attributes.get_io_uring().is_ok() {
        Some(Bound::IoUring)
    } else if attributes.get_dmabuf().is_ok() {
        Some(Bound::DmaBuf)
    } else if attributes.get_xsk().is_ok() {
        Some(Bound::Xsk)
    } else {
        None
    }
}

/// No such interface, none that is up, or no such queue (`netdev_nl_queue_get_doit`, net/core/netdev-genl.c).
fn is_missing(error: &io::Error) -> bool {
    let codes = [libc::ENODEV, libc::ENOENT, libc::EINVAL];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use testkit::netns::NetNs;

    use super::*;

    #[test]
    fn queue_of_an_interface_that_is_down_may_have_memory_and_one_that_is_not_there_has_none() {
        testkit::require!(Root);
        let ns = NetNs::new("bound");
        ns.ip(&["link", "add", "nic0", "type", "veth", "peer", "name", "wire0"]);
        let index = ns.index_of("nic0");
        let bound = |queue| ns.enter(move || may_be_to_io_uring(index, queue).expect("it tells"));
        assert!(bound(0));
        assert_eq!(ns.enter(move || to(index, 0)).expect("it tells"), None);
        ns.ip(&["link", "set", "nic0", "up"]);
        assert!(!bound(0) && !bound(1_000));
        ns.ip(&["link", "del", "nic0"]);
        assert!(!bound(0));
    }
}
