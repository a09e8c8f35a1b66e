//! Where an interface's program and sockets come from: made by this process, which needs privileges, leased from a steward, or brought by
//! somebody else (`external.rs`).
//!
//! A lease's interface may be in another network namespace: what is known of it, and what happens to it, the steward tells.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use steer::{MAX_QUEUES, Mode, ModeRequest, Program, QueueConf, QueueCounters};
use steward::client::Lease;
use steward::links::{DriverSends, Link};
use steward::protocol::{Facts, Steered, Wanted};
use xsk::{OpenError, SocketConfig, Umem, Unbound};

use super::external::External;
use super::interface::{InterfaceError, L2_BYTES};
use super::port::with_sources;
use crate::data::resident::Home;

/// Longest frame for which a program without multi-buffer support can be attached, bytes: a page
/// less headroom and the kernel's own tail (veth and most drivers).
const LONGEST_WITHOUT_FRAGS: u32 = 3000;
/// How long memory of a socket that was closed may still count as locked: the kernel lets go of it some 20 ms later.
const UNLOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// See the module's head.
pub(crate) enum Steering {
    /// The program is ours, and sockets are made here.
    Own(Program),
    /// Both are the steward's.
    Leased(Leased),
    /// The program is somebody else's, and so may the sockets be.
    External(External),
}

/// Queues leased from a steward.
pub(crate) struct Leased {
    lease: Lease,
    /// As the lease began.
    facts: Facts,
    /// Sockets that came with the lease and were not used yet, by queue.
    fresh: Mutex<HashMap<u32, OwnedFd>>,
}

impl Steering {
    /// Attaches the program.
    ///
    /// # Errors
    /// [`InterfaceError`].
    pub(crate) fn attach(link: &Link, mode: ModeRequest) -> Result<Self, InterfaceError> {
        let frags = link.mtu + L2_BYTES > LONGEST_WITHOUT_FRAGS;
        Ok(Self::Own(Program::attach(link.index, mode, frags)?))
    }

    /// Leases queues of an interface from the steward at `path`.
    ///
    /// # Errors
    /// [`InterfaceError::Lease`].
    pub(crate) fn lease(path: &Path, wanted: &Wanted) -> Result<(Self, Link), InterfaceError> {
        let (lease, sockets) = Lease::take(path, wanted)?;
        let facts = lease.facts();
        let link = link_of(&facts);
        let fresh = Mutex::new(wanted.range().zip(sockets).collect());
        Ok((Self::Leased(Leased { lease, facts, fresh }), link))
    }

    /// How the program is attached.
    pub(crate) fn mode(&self) -> Mode {
        match self {
            Self::Own(program) => program.mode(),
            Self::External(external) => external.mode(),
            Self::Leased(leased) => leased.facts.mode.unwrap_or(Mode::Skb),
        }
    }

    /// Why it is not attached natively, if that was tried.
    pub(crate) fn fallback(&self) -> Option<&str> {
        match self {
            Self::Own(program) => program.fallback(),
            Self::External(_) => None,
            Self::Leased(leased) => Some(leased.facts.note.as_str()).filter(|note| !note.is_empty()),
        }
    }

    /// Tells a program of ours which frames the queues take; a lease is for them already.
    ///
    /// # Errors
    /// [`InterfaceError::Queue`].
    pub(crate) fn take(&self, wanted: &Wanted) -> Result<(), InterfaceError> {
        match self {
            // What is beyond the interface's queues is refused later, with a better word.
            Self::Own(program) => Ok(wanted
                .range()
                .take_while(|&queue| queue < MAX_QUEUES)
                .try_for_each(|queue| program.set_filter(queue, &wanted.filter))?),
            Self::Leased(_) | Self::External(_) => Ok(()),
        }
    }

    /// How frames come to the queues, and why not in a better way.
    pub(crate) fn steered(&self, is_filtered: bool) -> (Steered, String) {
        match self {
            Self::Own(_) if is_filtered => (Steered::ByProgram, String::new()),
            Self::Own(_) => (Steered::ByQueue, String::new()),
            Self::External(_) => (Steered::ByQueue, "the XDP program is not ours".to_owned()),
            Self::Leased(leased) => {
                let facts = leased.lease.facts();
                (facts.steered, facts.note)
            }
        }
    }

    /// What the program did with a queue's frames, if it can be told.
    pub(crate) fn counters(&self, queue: u32) -> Option<QueueCounters> {
        match self {
            Self::Own(program) => program.counters(queue).ok(),
            Self::External(_) => None,
            Self::Leased(leased) => leased.lease.counters(queue).ok(),
        }
    }

    /// What the driver does for sockets in zero-copy mode.
    pub(crate) fn driver_sends(&self, link: &Link) -> DriverSends {
        match self {
            Self::Own(_) | Self::External(_) => DriverSends::by_index(link.index),
            Self::Leased(leased) => leased.facts.sends,
        }
    }

    /// A socket for a queue, with memory and without the queue; the queue goes on as it does.
    ///
    /// # Errors
    /// [`InterfaceError`].
    pub(crate) fn prepare(
        &self,
        umem: &Umem,
        config: &SocketConfig,
        link: &Link,
    ) -> Result<Unbound, InterfaceError> {
        match self {
            Self::Own(_) => Ok(Unbound::open(umem, config)?),
            Self::External(external) => external.prepare(umem, config, &link.name),
            Self::Leased(leased) => leased.prepare(umem, config),
        }
    }

    /// Where a queue's socket is while no guest has it, if it stays when guests go.
    pub(crate) fn home(&self, queue: u32) -> Option<&Home> {
        match self {
            Self::External(external) => external.home(queue),
            Self::Own(_) | Self::Leased(_) => None,
        }
    }

    /// From now on a queue's frames go to the socket that was prepared last, which is bound.
    ///
    /// # Errors
    /// [`InterfaceError`].
    pub(crate) fn enable(
        &self,
        queue: u32,
        socket: BorrowedFd<'_>,
        conf: QueueConf,
    ) -> Result<(), InterfaceError> {
        match self {
            Self::Own(program) => Ok(program.enable_queue(queue, socket, conf)?),
            Self::External(external) => external.enable(queue, socket),
            Self::Leased(leased) => Ok(leased.lease.activate(queue, conf)?),
        }
    }

    /// From now on a queue's frames go to the host.
    pub(crate) fn disable(&self, queue: u32) {
        // Fails only when the interface or the steward is gone, and the program with it.
        let _ = match self {
            Self::Own(program) => program.disable_queue(queue).map_err(InterfaceError::from),
            // The kernel takes a closed socket out of the map.
            Self::External(_) => Ok(()),
            Self::Leased(leased) => leased.lease.deactivate(queue).map_err(InterfaceError::from),
        };
    }

    /// The interface as it is now, or why it cannot be used any more.
    pub(crate) fn look(&self, opened: &Link) -> Result<Link, String> {
        match self {
            Self::Own(_) | Self::External(_) => {
                Link::by_index(opened.index).ok_or_else(|| format!("interface {} is gone", opened.name))
            }
            Self::Leased(leased) => leased.look(),
        }
    }

    /// Readable when there is something to [`look`](Self::look) at that rtnetlink does not tell.
    pub(crate) fn watch(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Own(_) | Self::External(_) => None,
            Self::Leased(leased) => Some(leased.lease.as_fd()),
        }
    }
}

impl Leased {
    fn prepare(&self, umem: &Umem, config: &SocketConfig) -> Result<Unbound, InterfaceError> {
        let deadline = Instant::now() + UNLOCK_TIMEOUT;
        loop {
            let refused = match Unbound::from_fd(self.socket(config.queue.0)?, umem, config) {
                // A socket whose memory was refused is of no more use.
                Err(OpenError::MemoryLock {
                    needed_bytes,
                    limit_bytes: Some(limit),
                }) => self.lease.raise_memlock(limit.saturating_add(needed_bytes)),
                result => return Ok(result?),
            };
            if let Err(error) = refused {
                if Instant::now() >= deadline {
                    return Err(error.into());
                }
                sleep(Duration::from_millis(10));
            }
        }
    }

    fn socket(&self, queue: u32) -> Result<OwnedFd, InterfaceError> {
        let mut fresh = self.fresh.lock().unwrap_or_else(PoisonError::into_inner);
        match fresh.remove(&queue) {
            Some(socket) => Ok(socket),
            None => Ok(self.lease.socket(queue)?),
        }
    }

    fn look(&self) -> Result<Link, String> {
        self.lease.take_changes().map_err(|error| with_sources(&error))?;
        let facts = self.lease.facts();
        // Down is no reason to give the queues up; without a program, or without a queue, there is nothing to use.
        if facts.mode.is_none() || (facts.impaired && facts.up) {
            return Err(facts.note);
        }
        if facts.generation != self.facts.generation {
            return Err(format!(
                "the steward has attached its program on {} anew",
                facts.name
            ));
        }
        Ok(link_of(&facts))
    }
}

/// What rtnetlink would say.
fn link_of(facts: &Facts) -> Link {
    Link {
        index: facts.ifindex,
        name: facts.name.clone(),
        mtu: facts.mtu,
        mac: facts.mac,
        up: facts.up,
        rx_queues: facts.rx_queues,
        partial_checksums: facts.partial_checksums,
    }
}
