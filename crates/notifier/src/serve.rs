//! A queue of a device: how it is served, how it is notified, and why not by an eventfd.

use std::io;

use rustix::io::Errno;

use crate::address::NotifyAddress;

/// The device's side of a queue. It has one owner at a time: it is never called by two threads at once.
pub trait Serve: Send {
    /// Looks at the queue and serves its chains: after each notification, and once after each transition that leaves
    /// the queue with this process. Other threads wait for it, so it returns after a bounded number of chains. The
    /// thread of the [`Notifiers`](crate::notifiers::Notifiers) looks at the reported rest after other queues, without
    /// another notification.
    ///
    /// The queue's lock is held: it must not call the [`Notifiers`](crate::notifiers::Notifiers) that it belongs to.
    /// Nor must a thread call them while it holds a lock that `look` takes, such as the device's: both would deadlock.
    ///
    /// If it panics it is not called again, see [`QueueStatus::broken`](crate::notifiers::QueueStatus::broken).
    fn look(&mut self) -> Left;
}

/// Whether a look has left anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Left {
    /// The queue is empty, and the driver notifies the next chain.
    Nothing,
    /// There may be more: look again.
    Something,
}

/// How a queue is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum By {
    /// Always by an exit, and its vCPU looks at the queue.
    Exit,
    /// By an eventfd, and the thread looks at the queue. By exits where the bus has no room.
    Eventfd,
}

impl By {
    pub(crate) fn of(eventfd: bool) -> Self {
        if eventfd { Self::Eventfd } else { Self::Exit }
    }
}

/// Why a queue has no eventfd.
#[derive(Debug, thiserror::Error)]
#[error(
    "queue {queue} is notified by exits: no eventfd could be bound to {address}; {}",
    remedy(source)
)]
pub struct BindError {
    /// Index of the queue.
    pub queue: u16,
    /// Where it is notified.
    pub address: NotifyAddress,
    /// The error of the bus, such as `ENOSPC`.
    #[source]
    pub source: io::Error,
}

/// What can be done about it.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC) => "the bus has no room: give the VM fewer devices or queues",
        Some(Errno::MFILE | Errno::NFILE) => "raise the limit of open files",
        Some(Errno::EXIST) => "another queue has that address: give devices addresses of their own",
        _ => "check whether this kernel has ioeventfds for such an address (KVM_CAP_IOEVENTFD)",
    }
}
