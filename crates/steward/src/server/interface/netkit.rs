//! Netkits to which queues of an interface are leased: in the journal, in the program, and found again by the next
//! steward.
//!
//! A netkit is saved before it is made, and forgotten when it is seen to be gone: whenever a steward dies, the next one
//! finds it. The program's map for the queue is pinned next to the program; the lessee has the map, too, and puts its
//! socket there.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use steer::{OwnMap, Program, QueueConf, with_sources};

use super::Interface;
use crate::server::journal::teardown::Step;
use crate::server::netkits::SavedNetkit;
use host::nic::bound;
use steward_protocol::{FRAME_LIMITS, NetkitEnd};

/// Prefix of the names of pinned maps; the queue number follows.
const OWN: &str = "own-";

/// A netkit that has a queue.
#[derive(Debug)]
pub(super) struct Netkit {
    /// For the lessee's socket.
    pub(super) map: OwnMap,
    end: NetkitEnd,
    /// The netkit was found to be gone.
    is_lost: bool,
}

fn own_path(pins: &Path, queue: u32) -> PathBuf {
    pins.join(format!("{OWN}{queue}"))
}

/// Bare frames of any length: the driver limits the length for the socket bound to the netkit.
fn conf() -> QueueConf {
    QueueConf {
        virtio_header: None,
        frame_limit: *FRAME_LIMITS.end(),
        hints: false,
    }
}

impl Netkit {
    /// Installs the map in a program. `is_blind`: no frames may be redirected yet.
    fn install(&self, queue: u32, program: &Program, is_blind: bool) -> Result<(), String> {
        let installed = match is_blind {
            true => program.deactivate_queue(queue),
            false => program.activate_own_map(queue, &self.map, conf()),
        };
        installed.map_err(|error| with_sources(&error))
    }

    /// Pins the map next to the program.
    pub(super) fn pin(&mut self, pins: &Path, queue: u32) -> io::Result<()> {
        let path = own_path(pins, queue);
        // It may be left from a lease that a dead steward did not take back.
        let _ = fs::remove_file(&path);
        self.map.pin(&path)
    }
}

impl Interface {
    /// Whether there is a journal, without which no netkit is made.
    #[must_use]
    pub fn has_journal(&self) -> bool {
        self.ledger.is_kept()
    }

    /// What the journal has of the netkit of a queue; it may not exist.
    #[must_use]
    pub fn saved_netkit(&self, queue: u32) -> Option<&SavedNetkit> {
        self.ledger.netkit(queue)
    }

    /// Writes a netkit into the journal.
    ///
    /// # Errors
    /// The kernel's.
    pub fn save_netkit(&mut self, saved: SavedNetkit) -> io::Result<()> {
        self.ledger.set_interface(&self.link.name);
        self.ledger.save_netkit(saved)
    }

    /// The name of the netkit that has a queue. One that is gone is forgotten, so that another one can be made.
    pub fn current_netkit(&mut self, queue: u32) -> Option<&str> {
        self.look_at_netkits();
        if self.netkits.get(&queue).is_some_and(|netkit| netkit.is_lost) {
            self.drop_netkit(queue);
        }
        self.netkits.get(&queue).map(|netkit| netkit.end.name.as_str())
    }

    /// Redirects a queue's frames to the socket in the map of its netkit, which is in its namespace and saved.
    ///
    /// # Errors
    /// In words.
    pub fn give_map(&mut self, queue: u32) -> Result<(), String> {
        let saved = self.ledger.netkit(queue).ok_or("it is not in the journal")?;
        let map = OwnMap::new().map_err(|error| format!("no map for its socket: {error}"))?;
        let mut netkit = Netkit {
            map,
            end: saved.end(),
            is_lost: false,
        };
        if let Some(pins) = self.pins() {
            netkit.pin(pins, queue).map_err(|error| error.to_string())?;
        }
        let program = self.program().map_err(|refusal| refusal.text)?;
        netkit.install(queue, program, self.is_blind(queue))?;
        self.netkits.insert(queue, netkit);
        Ok(())
    }

    /// Installs all maps in a new program.
    pub(super) fn go_on_with_netkits(&self) {
        self.netkits
            .keys()
            .for_each(|&queue| self.go_on_with_netkit(queue));
    }

    /// Lets a netkit receive frames again after tags have become visible on the interface.
    pub(super) fn go_on_with_netkit(&self, queue: u32) {
        let (Some(netkit), Some(program)) = (self.netkits.get(&queue), &self.program) else {
            return;
        };
        if let Err(why) = netkit.install(queue, program, self.is_blind(queue)) {
            tracing::warn!(
                interface = self.link.name,
                queue,
                "its netkit gets nothing yet: {why}"
            );
        }
    }

    /// The answer about the netkit that has a queue, with the map.
    #[must_use]
    pub fn netkit_of(&self, queue: u32) -> Option<io::Result<(NetkitEnd, OwnedFd)>> {
        let netkit = self.netkits.get(&queue)?;
        let map = netkit.map.as_fd().try_clone_to_owned();
        Some(map.map(|map| (netkit.end.clone(), map)))
    }

    /// Whether a queue is leased to a netkit, or will be.
    #[must_use]
    pub fn is_netkits(&self, queue: u32) -> bool {
        self.ledger.netkit(queue).is_some()
    }

    /// The step that removes the netkit of a queue, if it has one.
    pub(super) fn netkit_step(&self, queue: u32) -> Option<Step> {
        self.ledger.netkit(queue).map(|_| Step::Netkit { queue })
    }

    /// Deletes the netkit of a queue whose lease continues. If that fails, it is tried again when the lease ends.
    pub fn drop_netkit(&mut self, queue: u32) {
        // Before it has its map, the program treats frames of the queue as before.
        if self.netkits.remove(&queue).is_some() {
            self.forget_map(queue);
        }
        match self.remove_netkit(queue, false) {
            Ok(()) => self.ledger.forget_netkit(queue),
            Err(why) => tracing::warn!(interface = self.link.name, queue, "netkit not deleted yet: {why}"),
        }
    }

    /// Removes the map of a queue from the program; the queue's frames go to the host.
    fn forget_map(&self, queue: u32) {
        let disabled = self.program.as_ref().map(|program| program.disable_queue(queue));
        if let Some(Err(error)) = disabled {
            tracing::warn!(interface = self.link.name, queue, "{}", with_sources(&error));
        }
    }

    /// Deletes the netkit of a queue, wherever it is. `is_new`: not yet while a socket has the queue.
    pub(super) fn remove_netkit(&self, queue: u32, is_new: bool) -> Result<(), String> {
        self.ledger.remove_netkit(self.link.index, queue, is_new)?;
        // Not before: while a socket has the queue, a next steward takes the netkit over with this map.
        if let Some(pins) = &self.pins {
            let _ = fs::remove_file(own_path(pins, queue));
        }
        Ok(())
    }

    /// Takes over the netkit that a previous steward made for a queue. If it is not in its namespace, it is deleted:
    /// its lessee requests it again.
    pub(super) fn adopt_netkit(&mut self, queue: u32) {
        let Some(saved) = self.ledger.netkit(queue).cloned() else {
            return;
        };
        let map = self
            .pins
            .as_ref()
            .map(|pins| OwnMap::open_pinned(&own_path(pins, queue)));
        let is_there = saved.ifindex != 0
            && match bound::leased_to(self.link.index, queue) {
                Ok(found) => found.is_some_and(|found| found.ifindex == saved.ifindex),
                // The kernel reports nothing while the NIC is down: it is checked when the NIC is up.
                Err(error) => error.raw_os_error() == Some(libc::ENOENT),
            };
        match map {
            Some(Ok(map)) if is_there => {
                let end = saved.end();
                let netkit = Netkit {
                    map,
                    end,
                    is_lost: false,
                };
                // The predecessor may not have done this.
                let installed = self.program.as_ref().map_or(Ok(()), |program| {
                    netkit.install(queue, program, self.is_blind(queue))
                });
                match installed {
                    Ok(()) => drop(self.netkits.insert(queue, netkit)),
                    Err(_) => self.abandon_netkit(queue),
                }
            }
            _ => self.abandon_netkit(queue),
        }
    }

    /// The same, of a predecessor's, whose map the program may know if it was saved where the netkit is.
    fn abandon_netkit(&mut self, queue: u32) {
        if self.ledger.netkit(queue).is_some_and(|saved| saved.ifindex != 0) {
            self.forget_map(queue);
        }
        self.drop_netkit(queue);
    }

    /// Checks which netkits are gone: there is no notification from another network namespace.
    pub(super) fn look_at_netkits(&mut self) {
        for (&queue, netkit) in &mut self.netkits {
            // The kernel reports nothing while the NIC is down.
            if let Ok(found) = bound::leased_to(self.link.index, queue) {
                netkit.is_lost = found.is_none();
            }
        }
    }

    /// Queues whose netkits were found to be gone.
    pub(super) fn lost_netkits(&self) -> Vec<u32> {
        let lost = self.netkits.iter().filter(|(_, netkit)| netkit.is_lost);
        lost.map(|(&queue, _)| queue).collect()
    }

    /// Name of the netkit that had a queue, if it was found to be gone.
    pub(super) fn lost_netkit(&self, queue: u32) -> Option<&str> {
        let netkit = self.netkits.get(&queue).filter(|netkit| netkit.is_lost)?;
        Some(&netkit.end.name)
    }
}
