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

use std::os::fd::AsFd;
use std::time::Instant;

use rustix::io::Errno;
use steer::mac_text;

use super::connection::{Held, Reply};
use super::job::{Job, Outcome, Pending, lost};
use super::limits::DeviceChange;
use super::{Answered, Server};
use crate::links::netkit::moving;
use crate::protocol::{Answer, NetkitWanted, Reason, Refusal, Step};
use crate::sys::netkit::{self, NO_NAMESPACE};

impl Server {
    /// Makes a netkit for the queue of a connection, and begins to move it. The message may have a network namespace.
    pub(super) fn make_netkit(&mut self, number: u64, wanted: &NetkitWanted) -> Result<Pending, Refusal> {
        let connection = self.connections.get(&number).ok_or_else(super::no_lease)?;
        let held = connection.held.as_ref().ok_or_else(super::no_lease)?;
        held.check(wanted.queue)?;
        self.policy.check_netkit(held.rule)?;
        if held.wanted.queues != 1 || held.wanted.network {
            return Reason::Lease.refuse("a netkit has one queue, of a lease that is of this one alone and of no network: take a lease \
                        of one queue");
        }
        check_name(&wanted.name)?;
        let (at, uid) = (held.interface, connection.peer.uid);
        let mac = address_of(held)?;
        let queue = wanted.queue;
        let interface = self.interfaces.get_mut(&at).ok_or_else(super::no_lease)?;
        let connection = connection.as_fd();
        let job = if interface.keeps_netkit(wanted)? {
            Job::discard(connection)
        } else {
            // Making one takes everybody's lock, too.
            let changes = &mut self.device_changes;
            changes.take(DeviceChange::NicSetUp, &interface.link.name, uid, Instant::now())?;
            let ifindex = interface.begin_netkit(wanted, mac)?;
            let made = moving(ifindex, &wanted.name)
                .map_err(|error| Reason::Kernel.because(error.to_string()))
                .and_then(|mut message| {
                    Job::begin(&[connection], || netkit::settle(connection, uid, &mut message))
                });
            made.inspect_err(|_| interface.drop_netkit(queue))
        };
        Ok(Pending::new(job?, move |server, number, outcome| {
            server.conclude_netkit(number, queue, outcome)
        }))
    }

    /// Whether a lease with its netkit may continue under a rule.
    pub(super) fn check_netkit_of(&self, held: &Held, rule: usize) -> Result<(), Refusal> {
        let interface = self.interfaces.get(&held.interface);
        match interface.is_some_and(|interface| interface.is_netkits(held.wanted.start_queue)) {
            true => self.policy.check_netkit(rule),
            false => Ok(()),
        }
    }

    /// A child has moved a netkit, or not.
    fn conclude_netkit(&mut self, number: u64, queue: u32, outcome: Outcome) -> Answered {
        let connection = self.connections.get(&number).ok_or_else(super::no_lease)?;
        let held = connection.held.as_ref().ok_or_else(super::no_lease)?;
        let interface = self.interfaces.get_mut(&held.interface);
        let interface = interface.ok_or_else(super::no_lease)?;
        if interface.netkit_of(queue).is_none() {
            match outcome {
                Outcome::Done(_) => interface.settle_netkit(queue)?,
                Outcome::Failed { step, errno } => {
                    interface.drop_netkit(queue);
                    return Err(failed(step, errno));
                }
                Outcome::Lost => {
                    interface.drop_netkit(queue);
                    return Err(lost());
                }
            }
            let name = &interface.link.name;
            if self.leases.may_log(connection.peer.uid) {
                tracing::info!(
                    pid = connection.peer.pid,
                    interface = name,
                    queue,
                    "a netkit has the queue"
                );
            }
        }
        let given = interface.netkit_of(queue).ok_or_else(super::no_lease)?;
        let (end, map) = given.map_err(|error| Reason::Kernel.because(error.to_string()))?;
        // The one before may have been told to be gone.
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.dirty = true;
        }
        Ok(Reply::with(Answer::Netkit(end), vec![map]))
    }
}

/// In such a name the kernel puts a number (`dev_alloc_name`, net/core/dev.c), and it is another one then.
fn check_name(name: &str) -> Result<(), Refusal> {
    if !name.contains('%') {
        return Ok(());
    }
    Reason::NotAllowed.refuse(format!(
        "a netkit's name has no %, as {name:?} has: choose another name"
    ))
}

/// The address that the netkit of a lease is to have; none: of the kernel's choice.
fn address_of(held: &Held) -> Result<Option<[u8; 6]>, Refusal> {
    let Some(&mac) = held.wanted.filter.macs.first() else {
        return Ok(None);
    };
    // Those of groups no lease has; of the others the kernel refuses this one (`is_valid_ether_addr`,
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
