//! The queue of an interface that a netkit has: what the journal says of it, and its map in the program.
//!
//! A netkit is saved before it is made, and forgotten when it is seen to be gone: whenever a steward dies, the next one
//! finds it.

use std::collections::BTreeSet;
use std::io;

use host::links::Link;
use host::nic::bound;
use serde::{Deserialize, Serialize};
use steer::OwnMap;
use steward::server::file::may_crash;
use steward::server::{Entry, Interface, Journal};
use steward_protocol::NetkitEnd;

use super::device::Trace;

/// First part of the names of entries in the journal.
const NETKIT: &str = "netkit";

/// A netkit to which a queue is leased.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedNetkit {
    /// Number and name of the interface.
    number: u64,
    interface: String,
    /// The NIC's queue.
    queue: u32,
    /// Its unique temporary name, before it was moved to its network namespace.
    made_as: String,
    /// Its name in that namespace.
    pub(super) name: String,
    /// Its index in that namespace; 0: it may not have been moved yet.
    #[serde(default)]
    pub(super) ifindex: u32,
    /// The id (netnsid) of that namespace in the steward's; `None`: it is the steward's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) namespace: Option<i32>,
    /// Number of the netkit's queue to which the NIC's queue is leased.
    #[serde(default)]
    pub(super) its_queue: u32,
}

impl SavedNetkit {
    /// One that is not made yet.
    pub(super) fn new(interface: &Interface, queue: u32, made_as: &str, name: &str) -> Self {
        Self {
            number: interface.number,
            interface: interface.link.name.clone(),
            queue,
            made_as: made_as.to_owned(),
            name: name.to_owned(),
            ifindex: 0,
            namespace: None,
            its_queue: 0,
        }
    }

    /// The answer to its lessee, once it is in its network namespace.
    pub(super) fn end(self) -> NetkitEnd {
        NetkitEnd {
            name: self.name,
            ifindex: self.ifindex,
            queue: self.its_queue,
        }
    }

    pub(super) fn save(&self, interface: &mut Interface) -> io::Result<()> {
        entry(interface, self.queue).write(self)?;
        interface.netkit_queues.insert(self.queue);
        Ok(())
    }

    /// Deletes it, and checks that it is gone. `nic`: index of the interface.
    fn remove(&self, nic: u32) -> Result<(), String> {
        let place = (self.ifindex, self.namespace);
        let trace = Trace {
            made_as: &self.made_as,
            last: (self.ifindex != 0).then_some(place),
            queue: (nic, self.queue),
        };
        let removed = trace.remove();
        may_crash("netkit-deleted");
        removed.map_err(|error| format!("netkit {}: {error}", self.name))
    }
}

/// The place of the entry about the netkit of a queue.
pub(super) fn entry(interface: &Interface, queue: u32) -> Entry {
    entry_in(&interface.journal, interface.number, queue)
}

fn entry_in(journal: &Journal, number: u64, queue: u32) -> Entry {
    journal.entry(&format!("{NETKIT}-{number}-{queue}"))
}

/// What the journal says of the netkit of a queue; it may not exist.
/// Errors: in words; the entry cannot be read now.
pub(super) fn saved(interface: &Interface, queue: u32) -> Result<Option<SavedNetkit>, String> {
    match entry(interface, queue).read() {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
        read => read.map_err(|error| error.to_string()),
    }
}

/// See [`Netkits`](steward::server::Netkits).
pub(super) fn queues(interface: &Interface) -> BTreeSet<u32> {
    let prefix = format!("{NETKIT}-{}-", interface.number);
    let saved = interface.journal.contents::<SavedNetkit>(&prefix);
    saved.into_iter().map(|saved| saved.queue).collect()
}

/// The same.
pub(super) fn remove(interface: &Interface, queue: u32, is_new: bool) -> Result<(), String> {
    let Some(saved) = saved(interface, queue)? else {
        return Ok(());
    };
    let nic = interface.link.index;
    // The kernel releases the memory of a closed socket only afterwards (`xp_release_deferred`,
    // net/xdp/xsk_buff_pool.c), and tells the NIC's driver by the netkit. Of one that is deleted by then it cannot
    // (7.2, "Failed to disable zero-copy!"), and the driver goes on with memory that is freed. A socket that is
    // open yet is told when the netkit goes.
    if is_new && matches!(bound::has_socket(nic, queue), Ok(true)) {
        return Err("a socket has its queue, or lets go of it now".to_owned());
    }
    saved.remove(nic)?;
    entry(interface, queue)
        .remove()
        .map_err(|error| error.to_string())
}

/// The same.
pub(super) fn remove_strays(journal: &Journal, is_known: &dyn Fn(u64) -> bool) {
    let saved = journal.contents::<SavedNetkit>(&format!("{NETKIT}-")).into_iter();
    for stray in saved.filter(|saved| !is_known(saved.number)) {
        let nic = Link::by_name(&stray.interface).map_or(0, |link| link.index);
        if let Err(why) = stray.remove(nic) {
            tracing::warn!("it may be left over: {why}");
        }
        let _ = entry_in(journal, stray.number, stray.queue).remove();
    }
}

/// The name of the netkit that has a queue. One that is gone is forgotten, so that another one can be made.
pub(super) fn current(interface: &mut Interface, queue: u32) -> Option<String> {
    interface.own_map(queue)?;
    if matches!(interface.is_lost(queue), Ok(true)) {
        drop_netkit(interface, queue);
    }
    interface.own_map(queue)?;
    saved(interface, queue).ok().flatten().map(|saved| saved.name)
}

/// Redirects a queue's frames to the socket in the map of its netkit, which is in its namespace and saved.
/// Errors: in words.
pub(super) fn give_map(interface: &mut Interface, queue: u32) -> Result<(), String> {
    let map = OwnMap::new().map_err(|error| format!("no map for its socket: {error}"))?;
    interface.program().map_err(|refusal| refusal.text)?;
    interface.install_map(queue, map, true)
}

/// Deletes the netkit of a queue whose lease continues. If that fails, it is tried again when the lease ends.
pub(super) fn drop_netkit(interface: &mut Interface, queue: u32) {
    // Before it has its map, the program treats frames of the queue as before.
    if interface.own_map(queue).is_some() {
        interface.forget_map(queue);
    }
    match interface.remove_netkit(queue, false) {
        Ok(()) => _ = interface.netkit_queues.remove(&queue),
        Err(why) => {
            let interface = &interface.link.name;
            tracing::warn!(interface, queue, "netkit not deleted yet: {why}");
        }
    }
}

/// Takes over the netkit that a previous steward made for a queue. If it is not in its namespace, it is deleted: its
/// lessee requests it again.
pub(super) fn adopt(interface: &mut Interface, queue: u32) {
    let Ok(Some(saved)) = saved(interface, queue) else {
        return;
    };
    let was_moved = saved.ifindex != 0;
    let is_there = was_moved
        && match bound::leased_to(interface.link.index, queue) {
            Ok(found) => found.is_some_and(|found| found.ifindex == saved.ifindex),
            // The kernel reports nothing while the NIC is down: it is checked when the NIC is up.
            Err(error) => error.raw_os_error() == Some(libc::ENOENT),
        };
    let map = interface.pinned_map(queue).filter(|_| is_there);
    // The predecessor may not have installed it.
    if map.is_some_and(|map| interface.install_map(queue, map, false).is_ok()) {
        return;
    }
    // The program may know its map.
    if was_moved {
        interface.forget_map(queue);
    }
    drop_netkit(interface, queue);
}
