//! The queue of an interface that a netkit has: its map in the program, and what the journal says of it.

use host::nic::bound;
use steer::OwnMap;
use steward::server::{Interface, Netkit, SavedNetkit};

/// The name of the netkit that has a queue. One that is gone is forgotten, so that another one can be made.
pub(super) fn current(interface: &mut Interface, queue: u32) -> Option<&str> {
    interface.look_at_netkits();
    if interface.netkits.get(&queue).is_some_and(|netkit| netkit.is_lost) {
        drop_netkit(interface, queue);
    }
    interface
        .netkits
        .get(&queue)
        .map(|netkit| netkit.end.name.as_str())
}

/// Redirects a queue's frames to the socket in the map of its netkit, which is in its namespace and saved.
/// Errors: in words.
pub(super) fn give_map(interface: &mut Interface, queue: u32) -> Result<(), String> {
    let saved = interface.saved_netkit(queue).ok_or("it is not in the journal")?;
    let map = OwnMap::new().map_err(|error| format!("no map for its socket: {error}"))?;
    let netkit = new(saved, map);
    interface.program().map_err(|refusal| refusal.text)?;
    interface.install_netkit(queue, netkit, true)
}

fn new(saved: &SavedNetkit, map: OwnMap) -> Netkit {
    Netkit {
        map,
        end: saved.end(),
        is_lost: false,
    }
}

/// Deletes the netkit of a queue whose lease continues. If that fails, it is tried again when the lease ends.
pub(super) fn drop_netkit(interface: &mut Interface, queue: u32) {
    // Before it has its map, the program treats frames of the queue as before.
    if interface.netkits.remove(&queue).is_some() {
        interface.forget_map(queue);
    }
    match interface.remove_netkit(queue, false) {
        Ok(()) => interface.forget_netkit(queue),
        Err(why) => {
            let interface = &interface.link.name;
            tracing::warn!(interface, queue, "netkit not deleted yet: {why}");
        }
    }
}

/// Takes over the netkit that a previous steward made for a queue. If it is not in its namespace, it is deleted: its
/// lessee requests it again.
pub(super) fn adopt(interface: &mut Interface, queue: u32) {
    let Some(saved) = interface.saved_netkit(queue) else {
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
    let netkit = map.map(|map| new(saved, map));
    // The predecessor may not have installed it.
    let taken_over = netkit.is_some_and(|netkit| interface.install_netkit(queue, netkit, false).is_ok());
    if taken_over {
        return;
    }
    // The program may know its map.
    if was_moved {
        interface.forget_map(queue);
    }
    drop_netkit(interface, queue);
}
