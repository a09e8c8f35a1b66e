//! Netkits for leases: the queue of a lease is leased in turn to an interface that a process in another network
//! namespace uses.
//!
//! # Theory of operation
//!
//! The lease has a policy rule, program, filter and NIC rules like all others. The difference is the socket: the
//! steward does not bind it; a process binds one to the netkit, and so to the NIC. So the lessee gets a map with one
//! entry, to which only frames of this queue go ([`steer::OwnMap`]). No lessee gets the map of all sockets: a process
//! that can write there can block queues of others.
//!
//! ```text
//!   saved     before anything is made
//!   made      in the steward's network namespace, under a temporary name; the queue is leased to it
//!   settled   by a child: in the namespace that came along, named, up; then the program gives the frames to the map
//!   ended     with the lease, or the next steward: the program forgets the map, the netkit is deleted
//! ```
//!
//! A netkit and its lease survive the steward. A netkit ends with its namespace: then the lessee is notified at the
//! next check of the interface, and the lease stays until the lessee ends it, or requests a netkit again.

pub mod device;
mod moving;
mod queue;

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use host::nic::bound;
use host::nic::tags::blind;
use rustix::io::Errno;
use steer::{Mode, mac_text};
use steward::capabilities::ChildWork;
use steward::server::Netkits;
use steward::server::file::may_crash;
use steward::server::job::{Job, Outcome, Pending, lost};
use steward::server::limits::DeviceChange;
use steward::server::{Answered, Held, Interface, Journal, Reply, Server, no_lease};
use steward_protocol::{Answer, NetkitWanted, Reason, Refusal, Step};

use self::moving::NO_NAMESPACE;
use self::queue::SavedNetkit;

/// First part of the name of a netkit until it is in its network namespace; eight digits follow.
const MADE_AS: &str = "vaxk";

/// See the module's head.
#[derive(Debug)]
pub struct Devices;

impl Netkits for Devices {
    /// The message may carry the descriptor of a network namespace.
    fn begin(&self, server: &mut Server, number: u64, wanted: &NetkitWanted) -> Result<Pending, Refusal> {
        let (held, _) = server.lessee_mut(number)?;
        if held.wanted.queues != 1 || held.wanted.network {
            return Reason::Lease.refuse(
                "a netkit has one queue, of a lease that is of this one alone and of no network: take a lease \
                 of one queue",
            );
        }
        check_name(&wanted.name)?;
        let (mac, queue) = (address_of(held)?, wanted.queue);
        let uid = server.peer(number).ok_or_else(no_lease)?.uid;
        let (_, interface) = server.lessee_mut(number)?;
        let job = if is_there(interface, wanted)? {
            let connection = server.socket(number).ok_or_else(no_lease)?;
            Job::discard(connection)
        } else {
            let name = interface.link.name.clone();
            // This, too, takes the lock that all interfaces share (RTNL).
            server.take_units(DeviceChange::NicSetUp, &name, uid)?;
            let (_, interface) = server.lessee_mut(number)?;
            let ifindex = make(interface, wanted, mac)?;
            let connection = server.socket(number).ok_or_else(no_lease)?;
            let moved = device::moving(ifindex, &wanted.name)
                .map_err(|error| Reason::Kernel.because(error.to_string()))
                .and_then(|mut message| {
                    Job::begin(ChildWork::Interface, &[connection], || {
                        moving::settle(connection, uid, &mut message)
                    })
                });
            if moved.is_err() {
                queue::drop_netkit(server.lessee_mut(number)?.1, queue);
            }
            moved
        };
        Ok(Pending::new(job?, move |server, number, outcome| {
            conclude(server, number, queue, outcome)
        }))
    }

    fn adopt(&self, interface: &mut Interface, queue: u32) {
        queue::adopt(interface, queue);
    }

    fn queues(&self, interface: &Interface) -> BTreeSet<u32> {
        queue::queues(interface)
    }

    fn lost(&self, interface: &Interface, queue: u32) -> String {
        let saved = queue::saved(interface, queue).ok().flatten();
        let name = saved.map_or_else(String::new, |saved| saved.name);
        format!(
            "netkit {name} is gone, which had the queue: its network namespace has ended, or somebody deleted it: ask \
             for one again, or end the lease, and take another"
        )
    }

    fn remove(&self, interface: &Interface, queue: u32, is_new: bool) -> Result<(), String> {
        queue::remove(interface, queue, is_new)
    }

    fn remove_strays(&self, journal: &Journal, is_known: &dyn Fn(u64) -> bool) {
        queue::remove_strays(journal, is_known);
    }
}

/// Whether the requested netkit exists already. Errors: a netkit of another name has the queue.
fn is_there(interface: &mut Interface, wanted: &NetkitWanted) -> Result<bool, Refusal> {
    let (queue, name) = (wanted.queue, interface.link.name.clone());
    match queue::current(interface, queue) {
        None => Ok(false),
        Some(its_name) if its_name == wanted.name => Ok(true),
        Some(its_name) => Reason::Taken.refuse(format!(
            "queue {queue} of {name} has the netkit {its_name} already: ask for that name, or end the lease and take \
             another one"
        )),
    }
}

/// Makes a netkit for a queue, in the steward's namespace under a temporary name, and leases the queue to it. Returns
/// its index. `mac`: its address; `None`: the kernel chooses one.
fn make(interface: &mut Interface, wanted: &NetkitWanted, mac: Option<[u8; 6]>) -> Result<u32, Refusal> {
    let (link, queue) = (interface.link.clone(), wanted.queue);
    let name = &link.name;
    check(interface, queue)?;
    if interface.netkit_queues.contains(&queue) {
        // Retry a deletion that may have failed before.
        queue::drop_netkit(interface, queue);
    }
    if interface.netkit_queues.contains(&queue) {
        return Reason::Taken.refuse(format!(
            "the netkit that had queue {queue} of {name} before is not deleted yet: try again"
        ));
    }
    let number = program::random().map_err(|error| Reason::Kernel.because(error.to_string()))?;
    let made_as = format!("{MADE_AS}{:08x}", u32::from_ne_bytes(number));
    let saved = SavedNetkit::new(interface, queue, &made_as, &wanted.name).save(interface);
    saved.map_err(|error| {
        Reason::Kernel.because(format!(
            "a netkit is not made without a note, which cannot be written: {error} (--state)"
        ))
    })?;
    may_crash("netkit-saved");
    let made = device::make(&made_as, link.mtu, mac).and_then(|index| {
        may_crash("netkit-made");
        device::lease(index, &link, queue).map(|()| index)
    });
    may_crash("netkit-leased");
    made.inspect_err(|_| queue::drop_netkit(interface, queue))
}

/// Checks whether a netkit of this queue would receive frames.
fn check(interface: &Interface, queue: u32) -> Result<(), Refusal> {
    let name = &interface.link.name;
    let (reason, text) = if queue::entry(interface, queue).path().is_err() {
        let text = "a netkit is not made without a note, and this steward keeps none: start it with --state";
        (Reason::Kernel, text.to_owned())
    } else if interface.program()?.mode() == Mode::Skb {
        let text = format!(
            "a netkit's socket gets frames of the driver only, and the program of {name} is attached in skb mode: \
             take the lease in native mode, if the driver has it"
        );
        (Reason::Program, text)
    } else if !interface.sends.zero_copy {
        let text = format!(
            "the driver of {name} ({}) has no zero-copy for AF_XDP, without which no frame comes to a netkit's \
             socket: use a NIC that has it, and queue management (gve, mlx5)",
            interface.link.driver
        );
        (Reason::Nic, text)
    } else if interface.is_blind(queue) {
        (Reason::Impaired, blind(name))
    } else if !interface.link.up {
        let text = format!(
            "{name} is down, and then the kernel does not report the owner of a queue: `ip link set {name} up`"
        );
        (Reason::Impaired, text)
    } else {
        return Ok(());
    };
    reason.refuse(text)
}

/// Called when the child that moves a netkit has ended.
fn conclude(server: &mut Server, number: u64, queue: u32, outcome: Outcome) -> Answered {
    let (_, interface) = server.lessee_mut(number)?;
    if interface.own_map(queue).is_none() {
        let settled = match outcome {
            Outcome::Done(_) => settle(interface, queue).map_err(|text| Reason::Kernel.because(text)),
            Outcome::Failed { step, errno } => Err(failed(step, errno)),
            Outcome::Lost => Err(lost()),
        };
        settled.inspect_err(|_| queue::drop_netkit(interface, queue))?;
        let name = interface.link.name.clone();
        let (pid, uid) = server.peer(number).map_or((0, 0), |peer| (peer.pid, peer.uid));
        if server.may_log_lease(uid) {
            tracing::info!(pid, interface = name, queue, "a netkit has the queue");
        }
    }
    let (_, interface) = server.lessee_mut(number)?;
    let saved = queue::saved(interface, queue).map_err(|text| Reason::Kernel.because(text))?;
    let saved = saved.ok_or_else(no_lease)?;
    let map = interface.own_map(queue).ok_or_else(no_lease)?;
    let map = map.as_fd().try_clone_to_owned();
    let map = map.map_err(|error| Reason::Kernel.because(error.to_string()))?;
    // The lessee may have been notified that its previous netkit is gone.
    server.notify(number);
    Ok(Reply::with(Answer::Netkit(saved.end()), vec![map]))
}

/// The netkit is in its namespace: saves where, and redirects the queue's frames to the socket in its map.
fn settle(interface: &mut Interface, queue: u32) -> Result<(), String> {
    may_crash("netkit-moved");
    let gone = format!(
        "the netkit for queue {queue} of {} is gone already",
        interface.link.name
    );
    let found = bound::leased_to(interface.link.index, queue).map_err(|error| error.to_string())?;
    let (Some(found), Some(mut saved)) = (found, queue::saved(interface, queue)?) else {
        return Err(gone);
    };
    (saved.ifindex, saved.its_queue) = (found.ifindex, found.queue);
    saved.namespace = found.namespace;
    saved.save(interface).map_err(|error| error.to_string())?;
    queue::give_map(interface, queue)?;
    may_crash("netkit-settled");
    Ok(())
}

/// Rejects a name with %: the kernel may replace it by a number (`dev_alloc_name`, net/core/dev.c).
fn check_name(name: &str) -> Result<(), Refusal> {
    if !name.contains('%') {
        return Ok(());
    }
    Reason::NotAllowed.refuse(format!(
        "a netkit's name has no %, as {name:?} has: choose another name"
    ))
}

/// The address for the netkit of a lease; `None`: the kernel chooses one.
fn address_of(held: &Held) -> Result<Option<[u8; 6]>, Refusal> {
    let Some(&mac) = held.wanted.filter.macs.first() else {
        return Ok(None);
    };
    // No lease has a multicast address; of the other ones the kernel refuses only zero (`is_valid_ether_addr`,
    // include/linux/etherdevice.h).
    if mac != [0; 6] {
        return Ok(Some(mac));
    }
    Reason::NotAllowed.refuse(format!(
        "{} is no address that an interface can have, and a netkit has that of its lease: take the lease with \
         another one, such as 02:00:00:00:00:01",
        mac_text(mac)
    ))
}

fn failed(step: Step, errno: u32) -> Refusal {
    let errno = Errno::from_raw_os_error(errno.cast_signed());
    let (reason, text) = match (step, errno) {
        (Step::Namespace, NO_NAMESPACE) => (
            Reason::NotAllowed,
            "only root may have a netkit in the steward's own network namespace: name another one (--netns)"
                .to_owned(),
        ),
        (Step::Namespace, Errno::PERM) => (
            Reason::NotAllowed,
            "the network namespace is another user's: ask as root, or as the user that owns it (unshare(1) with --user)"
                .to_owned(),
        ),
        (Step::Namespace, Errno::INVAL | Errno::BADMSG) => (
            Reason::NotAllowed,
            "the descriptor is not one network namespace: open /run/netns/NAME, or /proc/PID/ns/net".to_owned(),
        ),
        (Step::Netkit, Errno::EXIST) => (
            Reason::Taken,
            "there is an interface of that name in the network namespace already: ask for another name".to_owned(),
        ),
        _ => (Reason::Kernel, format!("{}: {errno}", step.what())),
    };
    reason.because(text)
}
