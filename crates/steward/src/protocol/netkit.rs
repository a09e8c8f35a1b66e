//! A netkit to which the queue of a lease is leased in turn, so that a process in another network namespace has it.
//!
//! [`Request::Netkit`] is for a lease of one queue, of an interface whose driver has queue management. With it may come
//! the descriptor of a network namespace, into which the netkit goes. The answer has what it is, and a map (an XSKMAP
//! of one place) that frames of the queue are given to: whoever is to have them binds an AF_XDP socket to the netkit's
//! queue in zero-copy and puts it into place 0. The program and the map are the NIC's; no program runs on the netkit.
//!
//! [`Request::Netkit`]: super::Request::Netkit

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Malformed;
use super::field::{NAME_BYTES, field, interface_name, zero};

/// The netkit that a lessee wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetkitWanted {
    /// The lease's queue.
    pub queue: u32,
    /// What it is to be called in its network namespace.
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

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct NetkitBody {
    queue: u32,
    zero: u32,
    name: [u8; NAME_BYTES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct EndBody {
    ifindex: u32,
    queue: u32,
    name: [u8; NAME_BYTES],
}

const _: () = assert!(size_of::<NetkitBody>() == 24 && size_of::<EndBody>() == 24);

impl NetkitWanted {
    pub(super) fn body(&self) -> NetkitBody {
        NetkitBody {
            queue: self.queue,
            zero: 0,
            name: field(&self.name),
        }
    }

    pub(super) fn read(body: &NetkitBody) -> Result<Self, Malformed> {
        zero(body.zero.into())?;
        Ok(Self {
            queue: body.queue,
            name: interface_name(&body.name)?,
        })
    }
}

impl NetkitEnd {
    pub(super) fn body(&self) -> EndBody {
        EndBody {
            ifindex: self.ifindex,
            queue: self.queue,
            name: field(&self.name),
        }
    }

    pub(super) fn read(body: &EndBody) -> Result<Self, Malformed> {
        Ok(Self {
            name: interface_name(&body.name)?,
            ifindex: body.ifindex,
            queue: body.queue,
        })
    }
}
