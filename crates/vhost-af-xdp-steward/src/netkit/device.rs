//! Netkits without a peer, to which queues of NICs are leased (Linux 7.1).
//!
//! # Theory of operation
//!
//! Such an interface has one queue of its own, and one more for each queue that a NIC leases to it (netdev netlink,
//! `queue-create`). Only deleting the interface ends a lease. The kernel reports the owner of a lease for the NIC's
//! queue only, and only while the NIC is up, not for the netkit (`netdev_nl_queue_fill_lease`,
//! net/core/netdev-genl.c). So an interface is found again by the queue, in any network namespace: the kernel
//! identifies that by a number of the steward's namespace, which is enough to delete the interface there.
//!
//! Names of interfaces are unique in a namespace, and the names in another namespace are not known before the
//! interface is there. So it is made in the steward's namespace, under a name that no interface has, and renamed as
//! it moves. The first name stays as its alias: where the NIC does not report the owner of its queue, only an
//! interface with that alias is deleted. Indices, numbers of namespaces and names are reused, and could be those of
//! another program's interface.
use std::ffi::{CStr, CString};
use std::io;

use netlink_bindings::netdev::{self, QueueType};
use netlink_bindings::rt_link::{self, Ifinfomsg, IterableLinkAttrs, NetkitMode, NetkitPairing, OpGetlinkDo};
use netlink_socket2::NetlinkSocket;

use host::links::{Link, has_no_peer, header_of};
use host::nic::bound::{self, LeasedTo};
use steward::netlink::{acknowledged, message_of};
use steward_protocol::{Reason, Refusal};

/// Makes one in the network namespace of this thread, down; its index. `mac`: its address, one that the kernel chooses
/// if none is said.
///
/// # Errors
/// The name is taken or impossible, or the kernel has no netkit.
pub fn make(name: &str, mtu: u32, mac: Option<[u8; 6]>) -> Result<u32, Refusal> {
    let not_made = |error: io::Error| Reason::Kernel.because(format!("cannot make a netkit: {error}"));
    let c_name = CString::new(name).map_err(|error| not_made(error.into()))?;
    let mut request = rt_link::Request::new()
        .set_create()
        .set_excl()
        .op_newlink_do(&Ifinfomsg::default());
    let attributes = request.encode().push_ifname(&c_name).push_mtu(mtu);
    // Its own, and one that is leased to it.
    let attributes = attributes.push_num_rx_queues(2);
    let attributes = match mac {
        Some(mac) => attributes.push_address(&mac),
        None => attributes,
    };
    let netkit = attributes.nested_linkinfo().nested_data_netkit();
    let netkit = netkit.push_mode(NetkitMode::L2 as u32);
    drop(netkit.push_pairing(NetkitPairing::Single as u32));
    acknowledged(&request).map_err(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Reason::Kernel.because(format!(
            "this kernel has no netkit (CONFIG_NETKIT, and Linux 7.1 for leases of queues): {error}"
        )),
        Some(libc::EEXIST) => Reason::Kernel.because(format!(
            "there is an interface {name} already: ask for another name"
        )),
        _ => not_made(error),
    })?;
    let marked = match Link::by_name(name) {
        Ok(link) if link.has_leased_only => {
            let marked = mark(link.index, &c_name).map(|()| link.index);
            marked.map_err(not_made)
        }
        // A kernel that does not know the pairing makes one with a peer.
        _ => Reason::Kernel.refuse(
            "this kernel makes netkits with a peer only: one that queues are leased to takes Linux 7.1",
        ),
    };
    marked.inspect_err(|_| {
        let _ = remove_named(name);
    })
}

/// Sets its alias, which cannot be set when it is made.
fn mark(index: u32, alias: &CStr) -> io::Result<()> {
    let mut request = rt_link::Request::new().op_setlink_do(&header_of(index));
    request.encode().push_ifalias(alias);
    acknowledged(&request)
}

/// Leases a queue of a NIC to a netkit, both in the network namespace of this thread.
/// Errors: why it cannot.
pub(super) fn lease(netkit: u32, nic: &Link, queue: u32) -> Result<(), Refusal> {
    let mut socket = NetlinkSocket::new();
    let mut request = netdev::Request::new().op_queue_create_do();
    let of_nic = request
        .encode()
        .push_ifindex(netkit)
        .push_type(QueueType::Rx as u32)
        .nested_lease()
        .push_ifindex(nic.index)
        .nested_queue();
    of_nic.push_id(queue).push_type(QueueType::Rx as u32);
    let name = &nic.name;
    let refused = |text: String| {
        Reason::Kernel.because(format!(
            "queue {queue} of {name}: the queue cannot be leased: {text}"
        ))
    };
    let mut replies = socket
        .request(&request)
        .map_err(|error| refused(error.to_string()))?;
    let leased = replies.recv_one().map(drop);
    leased.map_err(|error| {
        // With the sentence that the kernel has for it.
        let text = error.to_string();
        match io::Error::from(error).raw_os_error() {
            Some(libc::EOPNOTSUPP) => {
                Reason::Kernel.because(format!("this kernel leases no queues (Linux 7.1): {text}"))
            }
            Some(libc::EBUSY) => Reason::Taken.because(format!(
                "queue {queue} of {name}: the queue is taken by a socket (of the lease itself, or of a process without \
                 one) or by another netkit: close it, or choose another queue: {text}"
            )),
            Some(libc::EINVAL) => Reason::Nic.because(format!(
                "{name}: its queues cannot be leased, which takes a driver with queue management (bnxt, fbnic, gve, \
                 mlx5): {text}"
            )),
            _ => refused(text),
        }
    })
}

/// Deletes the netkit of that name, in the network namespace of this thread. Returns whether it existed.
fn remove_named(name: &str) -> io::Result<bool> {
    let name = CString::new(name)?;
    let mut request = rt_link::Request::new().op_getlink_do(&header_of(0));
    request.encode().push_ifname(&name);
    if !is_there(&request, is_netkit)? {
        return Ok(false);
    }
    let mut request = rt_link::Request::new().op_dellink_do(&header_of(0));
    request.encode().push_ifname(&name);
    gone(acknowledged(&request)).map(|()| true)
}

fn is_netkit(attributes: &IterableLinkAttrs<'_>) -> bool {
    let kind = attributes.get_linkinfo().and_then(|info| info.get_kind());
    kind.is_ok_and(|kind| kind == c"netkit")
}

/// Where a netkit is: its index, and the number by which this network namespace knows that one; none: it is here.
pub(super) type Place = (u32, Option<i32>);

/// The message that moves a netkit to the network namespace whose descriptor its last four bytes are to be, names it,
/// and sets it up.
pub(super) fn moving(index: u32, name: &str) -> io::Result<Vec<u8>> {
    let up = libc::IFF_UP.cast_unsigned();
    let header = Ifinfomsg {
        ifi_flags: up,
        ifi_change: up,
        ..header_of(index)
    };
    let mut request = rt_link::Request::new().op_setlink_do(&header);
    let attributes = request.encode().push_ifname(&CString::new(name)?);
    drop(attributes.push_net_ns_fd(0));
    Ok(message_of(&request))
}

/// Deletes the netkit without a peer that is there, if it has that alias, or whatever it has if none is said; whether
/// it was there.
fn remove_at((index, namespace): Place, alias: Option<&str>) -> io::Result<bool> {
    let is_meant = |attributes: &IterableLinkAttrs<'_>| {
        let has = |alias: &str| {
            let has = attributes.get_ifalias();
            has.is_ok_and(|has| has.to_bytes() == alias.as_bytes())
        };
        has_no_peer(attributes) && alias.is_none_or(has)
    };
    let mut request = rt_link::Request::new().op_getlink_do(&header_of(index));
    if let Some(namespace) = namespace {
        request.encode().push_target_netnsid(namespace);
    }
    if !is_there(&request, is_meant)? {
        return Ok(false);
    }
    let mut request = rt_link::Request::new().op_dellink_do(&header_of(index));
    if let Some(namespace) = namespace {
        request.encode().push_target_netnsid(namespace);
    }
    gone(acknowledged(&request)).map(|()| true)
}

/// Whether the interface that is asked for is there, and is what is meant.
fn is_there(
    request: &OpGetlinkDo<'_>,
    is_meant: impl FnOnce(&IterableLinkAttrs<'_>) -> bool,
) -> io::Result<bool> {
    let mut socket = NetlinkSocket::new();
    let mut replies = socket.request(request)?;
    match replies.recv_one().map_err(io::Error::from) {
        Ok((_, attributes)) => Ok(is_meant(&attributes)),
        Err(error) if is_gone(&error) => Ok(false),
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

/// The owner of a NIC's queue, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueOwner {
    /// It is leased to this queue.
    To(LeasedTo),
    /// It is not leased.
    Nobody,
    /// Unknown: the NIC is down.
    Down,
    /// There is no such NIC here: it was deleted, or moved away.
    NoNic,
}

impl QueueOwner {
    fn of(leased: io::Result<Option<LeasedTo>>) -> io::Result<Self> {
        match leased {
            Ok(Some(to)) => Ok(Self::To(to)),
            Ok(None) => Ok(Self::Nobody),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(Self::Down),
                // The latter for index 0 (policy of `ifindex`, Documentation/netlink/specs/netdev.yaml).
                Some(libc::ENODEV | libc::ERANGE) => Ok(Self::NoNic),
                _ => Err(error),
            },
        }
    }
}

/// Everything that is known of a netkit that has to be removed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trace<'a> {
    /// The name that it was made under, which no other interface has, and its alias since.
    pub(super) made_as: &'a str,
    /// Where it was last, if it is known to have been there.
    pub(super) last: Option<Place>,
    /// The queue that is leased to it, by the index of its NIC.
    pub(super) queue: (u32, u32),
}

impl Trace<'_> {
    /// Deletes the netkit, wherever it is, and looks whether it is gone. With its namespace it is, and with the NIC.
    /// Errors: the kernel's, or it cannot be said.
    pub(super) fn remove(&self) -> io::Result<()> {
        if remove_named(self.made_as)? {
            return Ok(());
        }
        match self.ask()? {
            QueueOwner::To(LeasedTo {
                ifindex, namespace, ..
            }) => {
                remove_at((ifindex, namespace), None)?;
                match self.ask()? {
                    QueueOwner::To(to) => Err(io::Error::other(format!("the queue is leased yet ({to})"))),
                    QueueOwner::Down => Err(down()),
                    QueueOwner::Nobody | QueueOwner::NoNic => Ok(()),
                }
            }
            QueueOwner::Nobody => Ok(()),
            QueueOwner::Down => match self.remove_last()? {
                true => Ok(()),
                // It may be elsewhere, or have lost its alias.
                false => Err(down()),
            },
            QueueOwner::NoNic => self.remove_last().map(drop),
        }
    }

    fn ask(&self) -> io::Result<QueueOwner> {
        let (nic, queue) = self.queue;
        QueueOwner::of(bound::leased_to(nic, queue))
    }

    /// Deletes it where it was last; whether it was there.
    fn remove_last(&self) -> io::Result<bool> {
        self.last
            .map_or(Ok(false), |place| remove_at(place, Some(self.made_as)))
    }
}

fn down() -> io::Error {
    io::Error::other("the NIC is down, and the kernel reports owners of queues only if it is up")
}

#[cfg(test)]
mod tests {
    use testkit::netns::NetNs;

    use super::*;

    #[test]
    fn message_for_the_child_ends_with_the_descriptor_of_the_namespace() {
        let message = moving(7, "nk0").expect("a name");
        let words: Vec<u32> = message
            .chunks_exact(4)
            .map(|word| u32::from_ne_bytes(word.try_into().expect("four")))
            .collect();
        let name = u32::from_ne_bytes(*b"nk0\0");
        let attribute = |kind: u32| kind << 16 | 8;
        assert_eq!(message.len(), 48);
        // Length, RTM_SETLINK with NLM_F_REQUEST and NLM_F_ACK; index, flags, those that change; IFLA_IFNAME, IFLA_NET_NS_FD.
        let head = [48, 5 << 16 | 19, 1, 0];
        let link = [0, 7, 1, 1];
        assert_eq!(
            words,
            [&head[..], &link, &[attribute(3), name, attribute(28), 0]].concat()
        );
    }

    #[test]
    fn incomplete_answer_about_a_queue_does_not_mean_that_its_netkit_is_gone() {
        testkit::require!(Root);
        let ns = NetNs::new("owner");
        ns.ip(&["link", "add", "nic0", "type", "veth", "peer", "name", "wire0"]);
        let index = ns.index_of("nic0");
        let trace = |nic| Trace {
            made_as: "vaxk00000000",
            last: Some((i32::MAX.cast_unsigned(), None)),
            queue: (nic, 0),
        };
        let owner = |nic| ns.enter(move || trace(nic).ask().expect("it says"));
        let removed = |nic| ns.enter(move || trace(nic).remove().map_err(|error| error.to_string()));
        assert_eq!(owner(index), QueueOwner::Down);
        assert!(removed(index).is_err_and(|why| why.contains("is down")));
        ns.ip(&["link", "set", "nic0", "up"]);
        assert_eq!((owner(index), removed(index)), (QueueOwner::Nobody, Ok(())));
        ns.ip(&["link", "del", "nic0"]);
        for gone in [index, 0] {
            assert_eq!((owner(gone), removed(gone)), (QueueOwner::NoNic, Ok(())));
        }
    }

    #[test]
    fn interface_of_another_kind_with_a_name_of_ours_stays() {
        testkit::require!(Root);
        let ns = NetNs::new("named");
        let made_as = "vaxk00000001";
        ns.ip(&["link", "add", made_as, "type", "veth", "peer", "name", "wire0"]);
        let removed = ns.enter(|| remove_named(made_as).expect("it says"));
        assert!(!removed);
        let index = ns.index_of(made_as);
        assert!(!ns.enter(move || remove_at((index, None), None).expect("it says")));
        assert_eq!(ns.index_of(made_as), index);
    }
}
