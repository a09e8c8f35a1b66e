//! Netkits without a peer, to which queues of NICs are leased (Linux 7.1).
//!
//! # Theory of operation
//!
//! Such an interface has one queue of its own, and one more for each queue that a NIC leases to it (netdev netlink,
//! `queue-create`). There is no way to take a lease back but to delete the interface. Who has a lease only the NIC's
//! queue says, and only while the NIC is up; the netkit says nothing of it (`netdev_nl_queue_fill_lease`,
//! net/core/netdev-genl.c). So an interface is found again by the queue, in whatever network namespace it is then: the
//! kernel names that by a number of ours, which is enough to delete it there.
//!
//! Two interfaces cannot have one name, and which names there are in another namespace is known when it comes there. So
//! one is made here, under a name that nobody has, and called as it is meant to be as it moves.
#![cfg_attr(
    not(feature = "server"),
    allow(dead_code, reason = "netkits are made by the server only")
)]

use std::ffi::CString;
use std::io;

use netlink_bindings::netdev::{self, QueueType};
use netlink_bindings::rt_link::{self, Ifinfomsg, NetkitMode, NetkitPairing};
use netlink_bindings::traits::Pusher;
use netlink_bindings::utils::{finalize_nested_header, push_header, push_nested_header};
use netlink_socket2::NetlinkSocket;

use super::{Link, acknowledged, has_no_peer};
use crate::hardware::bound::{self, LeasedTo};

/// Of include/uapi/linux/if_link.h, where netlink-bindings has no word for the whole.
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_NETKIT_MODE: u16 = 5;
const IFLA_NETKIT_PAIRING: u16 = 10;
const KIND: &[u8; 8] = b"netkit\0\0";

/// Why there is no netkit with a leased queue.
#[derive(Debug, thiserror::Error)]
pub enum NetkitError {
    /// No such kind of interface.
    #[error("this kernel has no netkit (CONFIG_NETKIT, and Linux 7.1 for leases of queues): {0}")]
    NoKind(io::Error),
    /// It was made with a peer.
    #[error("this kernel makes netkits with a peer only: one that queues are leased to takes Linux 7.1")]
    NoPairing,
    /// The name is another interface's.
    #[error("there is an interface {0} already: ask for another name")]
    Taken(String),
    /// What the kernel says to it.
    #[error("cannot make a netkit: {0}")]
    Make(io::Error),
    /// No `queue-create`.
    #[error("this kernel leases no queues (Linux 7.1): {0}")]
    NoLeases(String),
    /// The driver has no queue management, or the interface no device.
    #[error(
        "its queues cannot be leased, which takes a driver with queue management (bnxt, fbnic, gve, mlx5): {0}"
    )]
    Driver(String),
    /// The queue is somebody's.
    #[error("the queue is taken by a process without a lease: choose another queue, or end its holder: {0}")]
    Busy(String),
    /// Another refusal of the lease.
    #[error("the queue cannot be leased: {0}")]
    Lease(String),
}

/// Makes one in the network namespace of this thread, down; its index. `mac`: its address, one that the kernel chooses
/// if none is said.
///
/// # Errors
/// [`NetkitError`].
pub fn make(name: &str, mtu: u32, mac: Option<[u8; 6]>) -> Result<u32, NetkitError> {
    let c_name = CString::new(name).map_err(|_| NetkitError::Make(io::ErrorKind::InvalidInput.into()))?;
    let mut request = rt_link::Request::new()
        .set_create()
        .set_excl()
        .op_newlink_do(&Ifinfomsg::default());
    let attributes = request.encode().push_ifname(&c_name).push_mtu(mtu);
    // Its own, and one that is leased to it.
    let attributes = attributes.push_num_rx_queues(2);
    let mut attributes = match mac {
        Some(mac) => attributes.push_address(&mac),
        None => attributes,
    };
    let bytes = attributes.as_vec_mut();
    let info = push_nested_header(bytes, IFLA_LINKINFO);
    push_header(bytes, IFLA_INFO_KIND, 7);
    bytes.extend(KIND);
    let data = push_nested_header(bytes, IFLA_INFO_DATA);
    for (attribute, value) in [
        (IFLA_NETKIT_MODE, NetkitMode::L2 as u32),
        (IFLA_NETKIT_PAIRING, NetkitPairing::Single as u32),
    ] {
        push_header(bytes, attribute, 4);
        bytes.extend(value.to_ne_bytes());
    }
    finalize_nested_header(bytes, data);
    finalize_nested_header(bytes, info);
    drop(attributes);
    acknowledged(&request).map_err(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => NetkitError::NoKind(error),
        Some(libc::EEXIST) => NetkitError::Taken(name.to_owned()),
        _ => NetkitError::Make(error),
    })?;
    // A kernel that does not know the pairing makes one with a peer.
    match Link::by_name(name) {
        Ok(link) if link.has_leased_only => Ok(link.index),
        _ => {
            let _ = remove_named(name);
            Err(NetkitError::NoPairing)
        }
    }
}

/// Leases a queue of a NIC to a netkit, both in the network namespace of this thread; the number of the netkit's queue.
///
/// # Errors
/// [`NetkitError`].
pub fn lease(netkit: u32, nic: u32, queue: u32) -> Result<u32, NetkitError> {
    let mut socket = NetlinkSocket::new();
    let mut request = netdev::Request::new().op_queue_create_do();
    let of_nic = request
        .encode()
        .push_ifindex(netkit)
        .push_type(QueueType::Rx as u32)
        .nested_lease()
        .push_ifindex(nic)
        .nested_queue();
    of_nic.push_id(queue).push_type(QueueType::Rx as u32);
    let lease = |text| NetkitError::Lease(text);
    let mut replies = socket
        .request(&request)
        .map_err(|error| lease(error.to_string()))?;
    let created = replies.recv_one().map_err(|error| {
        // With the sentence that the kernel has for it.
        let text = error.to_string();
        match io::Error::from(error).raw_os_error() {
            Some(libc::EOPNOTSUPP) => NetkitError::NoLeases(text),
            Some(libc::EBUSY) => NetkitError::Busy(text),
            Some(libc::EINVAL) => NetkitError::Driver(text),
            _ => lease(text),
        }
    })?;
    created.get_id().map_err(|error| lease(error.to_string()))
}

/// Deletes the interface of that name, in the network namespace of this thread, if it is there.
pub(crate) fn remove_named(name: &str) -> io::Result<()> {
    let mut request = rt_link::Request::new().op_dellink_do(&Ifinfomsg::default());
    request.encode().push_ifname(&CString::new(name)?);
    gone(acknowledged(&request))
}

/// Where a netkit is: its index, and the number by which this network namespace knows that one; none: it is here.
pub(crate) type Place = (u32, Option<i32>);

fn header(index: u32) -> Ifinfomsg {
    Ifinfomsg {
        ifi_index: i32::try_from(index).unwrap_or_default(),
        ..Ifinfomsg::default()
    }
}

/// Deletes the interface that is there, if any is. It is one without a peer: what else has come to that place is not
/// touched.
fn remove_at((index, namespace): Place) -> io::Result<()> {
    if name_at((index, namespace))?.is_none() {
        return Ok(());
    }
    let mut request = rt_link::Request::new().op_dellink_do(&header(index));
    if let Some(namespace) = namespace {
        request.encode().push_target_netnsid(namespace);
    }
    gone(acknowledged(&request))
}

/// Name of the netkit without a peer that is there, if one is.
pub(crate) fn name_at((index, namespace): Place) -> io::Result<Option<String>> {
    let mut socket = NetlinkSocket::new();
    let mut request = rt_link::Request::new().op_getlink_do(&header(index));
    if let Some(namespace) = namespace {
        request.encode().push_target_netnsid(namespace);
    }
    let mut replies = socket.request(&request)?;
    match replies.recv_one().map_err(io::Error::from) {
        Ok((_, attributes)) if has_no_peer(&attributes) => {
            let name = attributes.get_ifname().ok();
            Ok(name.map(|name| name.to_string_lossy().into_owned()))
        }
        Ok(_) => Ok(None),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// No such interface, or no namespace of that number any more (`rtnl_get_net_ns_capable`, net/core/rtnetlink.c).
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL))
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if is_gone(&error) => Ok(()),
        removed => removed,
    }
}

/// What is known of a netkit that is to go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trace<'a> {
    /// The name that it was made under, which is nobody else's.
    pub(crate) made_as: &'a str,
    /// Where it was last, and its name there, if it is known to have been there.
    pub(crate) last: Option<(Place, &'a str)>,
    /// The queue that is leased to it, by the index of its NIC.
    pub(crate) queue: (u32, u32),
}

impl Trace<'_> {
    /// Deletes the netkit, wherever it is, and looks whether it is gone. With its namespace it is, and with the NIC.
    /// Errors: the kernel's, or it cannot be said.
    pub(crate) fn remove(&self) -> io::Result<()> {
        remove_named(self.made_as)?;
        let (nic, queue) = self.queue;
        // Else by what was noted. It may have another name by now, so that nothing is found; then the NIC tells when it
        // is up again.
        if let Some((place, name)) = self.last
            && name_at(place)?.is_some_and(|now| now == name)
        {
            remove_at(place)?;
        }
        match bound::leased_to(nic, queue) {
            Ok(None) => Ok(()),
            Ok(Some(LeasedTo {
                ifindex, namespace, ..
            })) => {
                remove_at((ifindex, namespace))?;
                match bound::leased_to(nic, queue) {
                    Ok(Some(to)) => Err(io::Error::other(format!("the queue is leased yet ({to})"))),
                    Err(error) if !is_gone(&error) => Err(error),
                    _ => Ok(()),
                }
            }
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => match self.last {
                Some((place, _)) if name_at(place)?.is_none() => Ok(()),
                _ => Err(io::Error::other(
                    "the NIC is down, and the kernel says only of one that is up who has its queues",
                )),
            },
            Err(error) => Err(error),
        }
    }
}
