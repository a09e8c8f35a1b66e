//! Netkits to which queues of an interface are leased, as far as the program on it and the journal have to know them.
//! The part that makes netkits does the rest (see [`netkits`](crate::server::netkits)).
//!
//! A netkit is saved before it is made, and forgotten when it is seen to be gone: whenever a steward dies, the next one
//! finds it. The program's map for the queue is pinned next to the program; the lessee has the map, too, and puts its
//! socket there.

use std::fs;
use std::io;
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
pub struct Netkit {
    /// For the lessee's socket.
    pub map: OwnMap,
    /// The answer to its lessee.
    pub end: NetkitEnd,
    /// The netkit was found to be gone.
    pub is_lost: bool,
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

    /// Removes a netkit from the journal.
    pub fn forget_netkit(&mut self, queue: u32) {
        self.ledger.forget_netkit(queue);
    }

    /// Redirects a queue's frames to the socket in the map of a netkit, and keeps the map if it is a new one.
    ///
    /// # Errors
    /// In words.
    pub fn install_netkit(&mut self, queue: u32, mut netkit: Netkit, is_new: bool) -> Result<(), String> {
        if let Some(pins) = self.pins().filter(|_| is_new) {
            netkit.pin(pins, queue).map_err(|error| error.to_string())?;
        }
        if let Some(program) = &self.program {
            self.redirect(queue, &netkit, program)?;
        }
        self.netkits.insert(queue, netkit);
        Ok(())
    }

    /// The map of a queue's netkit that a previous steward has pinned.
    #[must_use]
    pub fn pinned_map(&self, queue: u32) -> Option<OwnMap> {
        OwnMap::open_pinned(&own_path(self.pins.as_ref()?, queue)).ok()
    }

    /// Has a program redirect a queue's frames to its netkit, or none yet.
    fn redirect(&self, queue: u32, netkit: &Netkit, program: &Program) -> Result<(), String> {
        let installed = match self.is_blind(queue) {
            true => program.deactivate_queue(queue),
            false => program.activate_own_map(queue, &netkit.map, conf()),
        };
        installed.map_err(|error| with_sources(&error))
    }

    /// Lets a netkit receive frames by a new program, or after tags have become visible on the interface.
    pub(super) fn go_on_with_netkit(&self, queue: u32) {
        let (Some(netkit), Some(program)) = (self.netkits.get(&queue), &self.program) else {
            return;
        };
        if let Err(why) = self.redirect(queue, netkit, program) {
            tracing::warn!(
                interface = self.link.name,
                queue,
                "its netkit gets nothing yet: {why}"
            );
        }
    }

    /// The step that removes the netkit of a queue, if it has one.
    pub(super) fn netkit_step(&self, queue: u32) -> Option<Step> {
        self.ledger.netkit(queue).map(|_| Step::Netkit { queue })
    }

    /// Removes the map of a queue from the program; the queue's frames go to the host.
    pub fn forget_map(&self, queue: u32) {
        let disabled = self.program.as_ref().map(|program| program.disable_queue(queue));
        if let Some(Err(error)) = disabled {
            tracing::warn!(interface = self.link.name, queue, "{}", with_sources(&error));
        }
    }

    /// Deletes the netkit of a queue, wherever it is. `is_new`: not yet while a socket has the queue.
    ///
    /// # Errors
    /// In words.
    pub fn remove_netkit(&self, queue: u32, is_new: bool) -> Result<(), String> {
        if let Some(saved) = self.ledger.netkit(queue) {
            saved.remove(self.netkits_by, self.link.index, is_new)?;
        }
        // Not before: while a socket has the queue, a next steward takes the netkit over with this map.
        if let Some(pins) = &self.pins {
            let _ = fs::remove_file(own_path(pins, queue));
        }
        Ok(())
    }

    /// Name of the netkit that had a queue, if it was found to be gone.
    pub(super) fn lost_netkit(&self, queue: u32) -> Option<&str> {
        let netkit = self.netkits.get(&queue).filter(|netkit| netkit.is_lost)?;
        Some(&netkit.end.name)
    }

    /// Checks which netkits are gone: there is no notification from another network namespace.
    pub fn look_at_netkits(&mut self) {
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
}
