//! Netkits to which queues of an interface are leased: made, found again by the next steward, and deleted.
//!
//! A netkit is saved before it is made, under a name of its own ([`crate::links::netkit`]), and forgotten when it is
//! seen to be gone: whenever a steward dies, the next one finds it. The program's map for the queue is
//! pinned next to the program; the lessee has the map, too, and puts its socket there.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use steer::{Mode, OwnMap, Program, QueueConf, with_sources};

use super::Interface;
use crate::hardware::bound::{self, LeasedTo};
use crate::links::netkit::{self, NetkitError};
use crate::protocol::{FRAME_LIMITS, NetkitEnd, NetkitWanted, Reason, Refusal};
use crate::server::entries;
use crate::server::file::may_crash;
use crate::server::ledger::SavedNetkit;
use crate::server::teardown::Step;

/// First part of the name of a netkit until it is in its network namespace; eight digits follow.
const MADE_AS: &str = "vaxk";
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

fn refusal(interface: &str, queue: u32, error: &NetkitError) -> Refusal {
    let (reason, text) = match error {
        NetkitError::Driver(_) => (Reason::Nic, format!("{interface}: {error}")),
        NetkitError::Busy(_) => (Reason::Taken, format!("queue {queue} of {interface}: {error}")),
        NetkitError::Lease(_) => (Reason::Kernel, format!("queue {queue} of {interface}: {error}")),
        _ => (Reason::Kernel, error.to_string()),
    };
    reason.because(text)
}

impl Interface {
    /// Makes a netkit for a queue, in the steward's namespace under a temporary name, and leases the queue to it; its
    /// index. `mac`: the address that it has, if it is to have a certain one.
    pub(in crate::server) fn begin_netkit(
        &mut self,
        wanted: &NetkitWanted,
        mac: Option<[u8; 6]>,
    ) -> Result<u32, Refusal> {
        let (name, queue) = (self.link.name.clone(), wanted.queue);
        self.check_for_netkit(queue)?;
        if self.is_netkits(queue) {
            // Retry a deletion that may have failed before.
            self.drop_netkit(queue);
        }
        if self.is_netkits(queue) {
            return Reason::Taken.refuse(format!(
                "the netkit that had queue {queue} of {name} before is not deleted yet: try again"
            ));
        }
        let number: io::Result<[u8; 4]> = program::random();
        let number = number.map_err(|error| Reason::Kernel.because(error.to_string()))?;
        let made_as = format!("{MADE_AS}{:08x}", u32::from_ne_bytes(number));
        self.ledger.set_interface(&name);
        let saved = self.ledger.save_netkit(SavedNetkit {
            queue,
            made_as: made_as.clone(),
            name: wanted.name.clone(),
            ifindex: 0,
            namespace: None,
            its_queue: 0,
        });
        saved.map_err(|error| {
            Reason::Kernel.because(format!(
                "a netkit is not made without a note, which cannot be written: {error} (--state)"
            ))
        })?;
        may_crash("netkit-saved");
        let made = netkit::make(&made_as, self.link.mtu, mac).and_then(|index| {
            may_crash("netkit-made");
            netkit::lease(index, self.link.index, queue).map(|_| index)
        });
        may_crash("netkit-leased");
        made.map_err(|error| {
            self.drop_netkit(queue);
            refusal(&name, queue, &error)
        })
    }

    /// Checks whether a netkit of this queue would receive frames.
    fn check_for_netkit(&self, queue: u32) -> Result<(), Refusal> {
        let name = &self.link.name;
        let (reason, text) = if !self.ledger.is_kept() {
            let text =
                "a netkit is not made without a note, and this steward keeps none: start it with --state";
            (Reason::Kernel, text.to_owned())
        } else if self.program()?.mode() == Mode::Skb {
            let text = format!(
                "a netkit's socket gets frames of the driver only, and the program of {name} is attached in skb mode: \
                 take the lease in native mode, if the driver has it"
            );
            (Reason::Program, text)
        } else if !self.sends.zero_copy {
            let text = format!(
                "the driver of {name} ({}) has no zero-copy for AF_XDP, without which no frame comes to a netkit's \
                 socket: use a NIC that has it, and queue management (gve, mlx5)",
                self.link.driver
            );
            (Reason::Nic, text)
        } else if self.is_blind(queue) {
            (Reason::Impaired, entries::blind(name))
        } else if !self.link.up {
            let text = format!(
                "{name} is down, and then the kernel does not report the owner of a queue: `ip link set {name} up`"
            );
            (Reason::Impaired, text)
        } else {
            return Ok(());
        };
        reason.refuse(text)
    }

    /// Whether the requested netkit exists already. One that is gone is forgotten, so that another one can be
    /// made. Errors: a netkit of another name has the queue.
    pub(in crate::server) fn keeps_netkit(&mut self, wanted: &NetkitWanted) -> Result<bool, Refusal> {
        let queue = wanted.queue;
        self.look_at_netkits();
        let Some(netkit) = self.netkits.get(&queue) else {
            return Ok(false);
        };
        if netkit.is_lost {
            self.drop_netkit(queue);
            return Ok(false);
        }
        let its_name = &netkit.end.name;
        if *its_name == wanted.name {
            return Ok(true);
        }
        Reason::Taken.refuse(format!(
            "queue {queue} of {} has the netkit {its_name} already: ask for that name, or end the lease and take \
             another one",
            self.link.name
        ))
    }

    /// Called when the netkit is in its namespace: redirects the queue's frames to the socket in its map.
    pub(in crate::server) fn settle_netkit(&mut self, queue: u32) -> Result<(), Refusal> {
        may_crash("netkit-moved");
        let settled = self.settle(queue);
        settled.map_err(|text| {
            self.drop_netkit(queue);
            Reason::Kernel.because(text)
        })
    }

    fn settle(&mut self, queue: u32) -> Result<(), String> {
        let gone = || {
            format!(
                "the netkit for queue {queue} of {} is gone already",
                self.link.name
            )
        };
        let found = bound::leased_to(self.link.index, queue).map_err(|error| error.to_string())?;
        let LeasedTo {
            ifindex,
            queue: its_queue,
            namespace,
        } = found.ok_or_else(gone)?;
        let saved = self.ledger.netkit(queue).cloned().ok_or_else(gone)?;
        let saved = SavedNetkit {
            ifindex,
            namespace,
            its_queue,
            ..saved
        };
        let end = saved.end();
        self.ledger
            .save_netkit(saved)
            .map_err(|error| error.to_string())?;
        let map = OwnMap::new().map_err(|error| format!("no map for its socket: {error}"))?;
        let mut netkit = Netkit {
            map,
            end,
            is_lost: false,
        };
        if let Some(pins) = self.pins() {
            netkit.pin(pins, queue).map_err(|error| error.to_string())?;
        }
        let program = self.program().map_err(|refusal| refusal.text)?;
        netkit.install(queue, program, self.is_blind(queue))?;
        may_crash("netkit-settled");
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
    pub(in crate::server) fn netkit_of(&self, queue: u32) -> Option<io::Result<(NetkitEnd, OwnedFd)>> {
        let netkit = self.netkits.get(&queue)?;
        let map = netkit.map.as_fd().try_clone_to_owned();
        Some(map.map(|map| (netkit.end.clone(), map)))
    }

    /// Whether a queue is leased to a netkit, or will be.
    pub(in crate::server) fn is_netkits(&self, queue: u32) -> bool {
        self.ledger.netkit(queue).is_some()
    }

    /// The step that removes the netkit of a queue, if it has one.
    pub(super) fn netkit_step(&self, queue: u32) -> Option<Step> {
        self.ledger.netkit(queue).map(|_| Step::Netkit { queue })
    }

    /// Deletes the netkit of a queue whose lease continues. If that fails, it is tried again when the lease ends.
    pub(in crate::server) fn drop_netkit(&mut self, queue: u32) {
        // Before it has its map, the program treats frames of the queue as before.
        if self.netkits.remove(&queue).is_some() {
            self.forget_map(queue);
        }
        match self.remove_netkit(queue) {
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

    /// Deletes the netkit of a queue, unless a socket has it, which may be closed: the kernel lets go of its memory
    /// only afterwards (`xp_release_deferred`, net/xdp/xsk_buff_pool.c), and tells the NIC's driver by the netkit. Of
    /// one that is deleted by then it cannot (7.2, "Failed to disable zero-copy!"), and the driver goes on with
    /// memory that is freed. A socket that is open yet is told when the netkit goes.
    pub(super) fn remove_netkit_unless_bound(&self, queue: u32) -> Result<(), String> {
        match bound::has_socket(self.link.index, queue) {
            Ok(true) => Err("a socket has its queue, or lets go of it now".to_owned()),
            _ => self.remove_netkit(queue),
        }
    }

    /// Deletes the netkit of a queue, wherever it is.
    pub(super) fn remove_netkit(&self, queue: u32) -> Result<(), String> {
        if let Some(pins) = &self.pins {
            let _ = fs::remove_file(own_path(pins, queue));
        }
        let Some(saved) = self.ledger.netkit(queue) else {
            return Ok(());
        };
        let removed = saved.trace(self.link.index).remove();
        may_crash("netkit-deleted");
        removed.map_err(|error| format!("netkit {}: {error}", saved.name))
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
