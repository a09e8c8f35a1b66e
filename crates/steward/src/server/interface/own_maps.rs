//! Queues whose frames go to a socket map of their own: those that are leased on to a netkit.
//!
//! The map is pinned next to the program; the lessee has it, too, and puts its socket there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use steer::{OwnMap, Program, QueueConf, with_sources};

use super::Interface;
use crate::server::journal::teardown::Step;
use host::nic::bound;
use steward_protocol::FRAME_LIMITS;

/// Prefix of the names of pinned maps; the queue number follows.
const OWN: &str = "own-";

pub(super) fn own_path(pins: &Path, queue: u32) -> PathBuf {
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

impl Interface {
    /// Redirects a queue's frames to the socket in a map, and pins the map if it is a new one.
    ///
    /// # Errors
    /// In words.
    pub fn install_map(&mut self, queue: u32, mut map: OwnMap, is_new: bool) -> Result<(), String> {
        if let Some(pins) = self.pins().filter(|_| is_new) {
            map.pin(&own_path(pins, queue))
                .map_err(|error| error.to_string())?;
        }
        if let Some(program) = &self.program {
            self.redirect(queue, &map, program)?;
        }
        self.own_maps.insert(queue, map);
        Ok(())
    }

    /// The map of a queue.
    #[must_use]
    pub fn own_map(&self, queue: u32) -> Option<&OwnMap> {
        self.own_maps.get(&queue)
    }

    /// The map of a queue that a previous steward has pinned.
    #[must_use]
    pub fn pinned_map(&self, queue: u32) -> Option<OwnMap> {
        OwnMap::open_pinned(&own_path(self.pins.as_ref()?, queue)).ok()
    }

    /// Has a program redirect a queue's frames to its map, or none yet.
    fn redirect(&self, queue: u32, map: &OwnMap, program: &Program) -> Result<(), String> {
        let installed = match self.is_blind(queue) {
            true => program.deactivate_queue(queue),
            false => program.activate_own_map(queue, map, conf()),
        };
        installed.map_err(with_sources)
    }

    /// Lets a map receive frames by a new program, or after tags have become visible on the interface.
    pub(super) fn go_on_with_map(&self, queue: u32) {
        let (Some(map), Some(program)) = (self.own_maps.get(&queue), &self.program) else {
            return;
        };
        if let Err(why) = self.redirect(queue, map, program) {
            tracing::warn!(
                interface = self.link.name,
                queue,
                "its netkit gets nothing yet: {why}"
            );
        }
    }

    /// Removes the map of a queue from the program; the queue's frames go to the host.
    pub fn forget_map(&mut self, queue: u32) {
        self.own_maps.remove(&queue);
        let disabled = self.program.as_ref().map(|program| program.disable_queue(queue));
        if let Some(Err(error)) = disabled {
            tracing::warn!(interface = self.link.name, queue, "{}", with_sources(error));
        }
    }

    /// The step that removes the netkit of a queue, if it has one.
    pub(super) fn netkit_step(&self, queue: u32) -> Option<Step> {
        self.netkit_queues
            .contains(&queue)
            .then_some(Step::Netkit { queue })
    }

    /// Deletes the netkit of a queue, wherever it is. `is_new`: not yet while a socket has the queue.
    ///
    /// # Errors
    /// In words.
    pub fn remove_netkit(&self, queue: u32, is_new: bool) -> Result<(), String> {
        if let Some(netkits) = self.netkits {
            netkits.remove(self, queue, is_new)?;
        }
        // Not before: while a socket has the queue, a next steward takes the netkit over with this map.
        if let Some(pins) = &self.pins {
            let _ = fs::remove_file(own_path(pins, queue));
        }
        Ok(())
    }

    /// Checks which netkits are gone: there is no notification from another network namespace.
    pub(super) fn look_at_netkits(&mut self) {
        // The kernel reports nothing while the NIC is down.
        for &queue in self.own_maps.keys() {
            match self.is_lost(queue) {
                Ok(true) => self.lost_netkits.insert(queue),
                Ok(false) => self.lost_netkits.remove(&queue),
                Err(_) => false,
            };
        }
        self.lost_netkits
            .retain(|queue| self.own_maps.contains_key(queue));
    }

    /// Whether the netkit that had a queue is gone.
    ///
    /// # Errors
    /// The kernel reports nothing: the NIC is down.
    pub fn is_lost(&self, queue: u32) -> io::Result<bool> {
        bound::leased_to(self.link.index, queue).map(|found| found.is_none())
    }
}
