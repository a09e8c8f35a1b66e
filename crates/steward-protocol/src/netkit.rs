//! A netkit to which the queue of a lease is leased in turn, so that a process in another network namespace has it.
//!
//! [`Request::Netkit`] is for a lease of one queue, of an interface whose driver has queue management. With it may
//! come the descriptor of a network namespace, into which the netkit goes. The answer describes the netkit and comes
//! with a map (an XSKMAP with one entry) to which the program redirects frames of the queue: the process that
//! receives them binds an AF_XDP socket to the netkit's queue in zero-copy mode and puts it into entry 0. The program
//! and the map are the NIC's; no program runs on the netkit.
//!
//! [`Request::Netkit`]: super::Request::Netkit

use super::wire::{BeforeZeros, Name, wire};

/// The netkit that a lessee wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetkitWanted {
    /// The lease's queue.
    pub queue: u32,
    /// Its name in its network namespace.
    pub name: String,
}

/// A netkit with its leased queue. The map comes along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetkitEnd {
    /// Its name.
    pub name: String,
    /// Its index in its network namespace.
    pub ifindex: u32,
    /// Number of the netkit's queue that the NIC's is leased to.
    pub queue: u32,
}

wire!(NetkitWanted {
    queue: BeforeZeros(4),
    name: Name
});
wire!(NetkitEnd {
    ifindex,
    queue,
    name: Name
});
